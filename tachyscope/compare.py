"""A plan beside the dense model: same seed, prompt and actions, chunk by chunk by turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tachyscope.arguments import check_model, check_prompt, check_whole, parse_first, parse_plan
from tachyscope.bench.cpu import warm
from tachyscope.bench.noise import noise, verdict
from tachyscope.errors import TachyscopeError
from tachyscope.files import check_folder, write_atomically
from tachyscope.meter import summary
from tachyscope.models.base import VideoModel
from tachyscope.plan import Plan, label
from tachyscope.plan_notes import notes
from tachyscope.quality import FLOOR_DB, Quality, horizon
from tachyscope.rates import Clock, frame_rate, rates, warm_up
from tachyscope.report import write_report
from tachyscope.results import Document, document, size_of, to_json
from tachyscope.rollout import rollout
from tachyscope.runs import Run, decibels, percent
from tachyscope.session import Session
from tachyscope.stream import Stream
from tachyscope.stream import open as open_stream
from tachyscope.types import Chunk
from tachyscope.video import VideoWriter, beside

if TYPE_CHECKING:
    from tachyscope.arguments import Actions, Pictures, PixelSize, Start

STRETCHES = 5  # parts of a rollout that are timed one by one, like a benchmark's rounds
MUCH = 0.9  # of dense's counted work: a plan that does more cannot be much faster
SHORT_SIDE = 256  # pixels: a smaller video is enlarged to about that beside another

Watch = Callable[[str, Chunk], None]
Truth = Callable[[int, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found: the results document, and what a report shows of it."""

    document: Document
    runs: tuple[Run, Run]  # dense, then the plan

    @property
    def lead(self) -> str:
        """The verdict in a few sentences: speed and its cost, then counted work."""
        return str(self.document["lead"])


@dataclass(slots=True)
class _Take:
    """One rollout under way."""

    name: str
    stream: Stream
    chunks: Generator[Chunk]
    rows: list[dict[str, float]] = field(default_factory=list)  # of the meter
    looks: list[dict[str, float]] = field(default_factory=list)  # of the frames, for the plots
    quality: Quality = field(default_factory=Quality)
    true: Quality = field(default_factory=lambda: Quality(against="truth"))
    clock: Clock = field(default_factory=Clock)

    def step(self, watch: Watch | None) -> Chunk:
        with self.clock:
            chunk = next(self.chunks)
        self.clock.lap(chunk)
        self.rows.append(chunk.stats)
        if watch is not None:
            watch(self.name, chunk)
        return chunk


def compare(
    model: VideoModel,
    plan: Plan | str = "fast",
    *,
    frames: int,
    prompt: str = "",
    actions: Actions = "",
    seed: int = 0,
    size: PixelSize | None = None,
    first: Pictures | None = None,
    first_actions: Actions = "",
    start: Start | None = None,
    pace: float | None = None,
    truth: Truth | None = None,
    out: str | os.PathLike[str] | None = None,
    twin: VideoModel | None = None,
    aa: bool = True,
    command: str = "",
    about: str = "",
    load_s: float = 0.0,
    watch: Watch | None = None,
) -> Comparison:
    """Play dense and a plan, and say what the plan saved and how far from dense it went.

    Plan, frames, prompt, actions, seed, size, first, first_actions, start and pace are as
    `rollout` takes them.
    twin: the same model in another dtype. Its dense run finds the horizon, the frame from which
    closeness to the dense run says nothing; `psnr_dense` is the mean over the frames before it.
    truth: the true frames from one number to another, counted from the first new one;
    `psnr_truth` is then measured too.
    aa: play dense twice, so that a ratio of speeds can be told from noise; else none is given.
    out: a folder for dense.mp4, plan.mp4, compare.mp4, compare.json and report.html.
    about: a sentence for the report's head. load_s: what loading took, told beside.
    watch: is told every chunk, with its run's name.

    Runs take turns at every chunk, so all their caches are in memory together.
    """
    check_model(model)
    check_prompt(prompt)  # one video, no batch
    check_whole("seed", seed)
    parse_plan(model, plan)
    if twin is not None and check_model(twin).dtype == model.dtype:
        raise TachyscopeError(
            f"a floor needs the model in two dtypes, got {_dtype(model)} twice: load another twin"
        )
    request: dict[str, Any] = {
        "frames": frames, "prompt": prompt, "seed": seed, "size": size, "start": start,
        "pace": pace,
    }  # fmt: skip
    given: dict[str, Any] = {}
    if first is not None:
        given = {"first": parse_first(first), "first_actions": first_actions}

    def take(name: str, of: VideoModel, by: Plan | str, like: Stream | None = None) -> _Take:
        with Clock() as clock:
            stream = open_stream(of, by, **request, **({} if like else given))
            if like is not None:
                stream.restore(like.snapshot())
            chunks = rollout(of, frames=frames, actions=actions, stream=stream)
        return _Take(name, stream, chunks, clock=clock)

    takes = {"dense": take("dense", model, "dense"), "plan": take(label(plan), model, plan)}
    if twin is not None:
        takes["floor"] = take(f"dense {_dtype(twin)}", twin, "dense")
    warmed: dict[str, float] = {}
    if aa:
        # prefilled once: given frames may be many
        takes["again"] = take("dense again", model, "dense", takes["dense"].stream)
        newest = {"first": given["first"][-1:]} if given else {}
        for role in ("dense", "plan"):
            warmed[role] = warm(
                model, takes[role].stream.session.plan, actions=actions, **request, **newest
            )
    video_size = _play(takes, frames, model.fps, truth, out, watch)
    comparison = _conclude(takes, model, video_size, warmed, load_s, command, about)
    if out is not None:
        _write(Path(out), comparison, model, video_size)
    return comparison


def _dtype(model: VideoModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _play(
    takes: Mapping[str, _Take],
    frames: int,
    fps: int,
    truth: Truth | None,
    out: str | os.PathLike[str] | None,
    watch: Watch | None,
) -> str:
    """Make every run's chunks by turns, look at them, and write the videos as they come."""
    dense, plan = takes["dense"], takes["plan"]
    size, turns = "", 0
    with ExitStack() as stack:
        files: list[VideoWriter] = []
        if out is not None:
            folder = check_folder(out)
            names = ("dense.mp4", "plan.mp4", "compare.mp4")
            files = [stack.enter_context(VideoWriter(folder / name, fps)) for name in names]
        while not size or dense.quality.frames < frames:
            # every other turn backwards, so that nobody always comes first
            order = list(takes)[:: -1 if turns % 2 else 1]
            made = {role: takes[role].step(watch) for role in order}
            turns += 1
            first, ours = made["dense"].frames, made["plan"].frames
            size = size_of(made["dense"])
            dense.looks.append(dense.quality.add(first))
            plan.looks.append(plan.quality.add(ours, first))
            if "floor" in made:
                takes["floor"].quality.add(made["floor"].frames, first)
            shown, labels = [first, ours], [dense.name, plan.name]
            captions = [_caption(take) for take in (dense, plan)]
            if truth is not None:
                done = dense.true.frames
                true = truth(done, done + len(first))
                dense.true.add(first, true)
                plan.true.add(ours, true)
                shown, labels, captions = [true, *shown], ["truth", *labels], ["", *captions]
            if files:
                scale = max(1, SHORT_SIDE // min(first.shape[1:3]))
                pair = beside(shown, labels, scale=scale, captions=captions)
                for file, pictures in zip(files, (first, ours, pair), strict=True):
                    file.write(pictures)
    return size


def _caption(take: _Take) -> str:
    """Seconds since a run's first new chunk, its rate over the last one, and its cache in use."""
    row = take.rows[-1]
    rate = frame_rate(row["frames_made"], row["wall_ms"])
    return f"{_wall(take.rows[1:]) / 1e3:.1f} s   {rate:.1f} frames/s   {row['cache_mb']:.0f} MB"


def _conclude(
    takes: Mapping[str, _Take],
    model: VideoModel,
    size: str,
    warmed: Mapping[str, float],
    load_s: float,
    command: str,
    about: str,
) -> Comparison:
    dense, plan = takes["dense"], takes["plan"]
    end, more = None, {}
    if "floor" in takes:
        floors = takes["floor"].quality.psnrs
        end = horizon(floors)
        near = float(np.mean(floors[:end])) if floors[:end] else None
        floor = {"run": takes["floor"].name, "db": FLOOR_DB, "horizon": end, "psnr": near}
        more["floor"] = floor
    # the same chunks of every run, or a growing cache would be met at another length
    start = max(warm_up(dense.rows), warm_up(plan.rows))
    aa, speed = None, {}
    if "again" in takes:
        times = {role: _stretches(takes[role].rows, start) for role in ("dense", "again", "plan")}
        aa = noise(times["dense"], times["again"])
        pairs = zip(times["dense"], times["plan"], strict=True)
        speed = verdict([theirs / ours for theirs, ours in pairs], aa)
        speed["ratio_dense"] = sum(times["dense"]) / sum(times["plan"])
        speed["ratio_dense_all"] = _wall(dense.rows) / _wall(plan.rows)
    loaded = {"load_s": load_s} if load_s else {}
    # over the frames before the horizon; nothing if there are none
    if inside := plan.quality.psnrs[:end]:
        speed |= {"psnr_dense": float(np.mean(inside)), "psnr_frames": len(inside)}
    runs = (
        _run(dense, loaded | rates(dense.rows, start), warmed.get("dense", 0.0)),
        _run(plan, loaded | rates(plan.rows, start) | speed, warmed.get("plan", 0.0)),
    )
    rows = [run.row(model.name, size) for run in runs]
    lead = " ".join(filter(None, (_speed(*runs, aa, plan.stream.session), _work(*runs), about)))
    return Comparison(document("compare", rows, command, aa, **more, lead=lead), runs)


def _wall(rows: Sequence[Mapping[str, float]]) -> float:
    return sum(row["wall_ms"] for row in rows)


def _stretches(rows: Sequence[Mapping[str, float]], start: int) -> list[float]:
    """Time of each part of a rollout from chunk `start` on, at most five of them.

    A video that ends before is taken from its first chunk.
    """
    ms = np.array([row["wall_ms"] for row in rows[start if start < len(rows) else 0 :]])
    return [float(part.sum()) for part in np.array_split(ms, min(STRETCHES, len(ms)))]


def _run(take: _Take, more: Mapping[str, float], warmed: float) -> Run:
    looks = take.quality.summary()
    # over all frames, where only those before the horizon count
    looks.pop("psnr_dense", None)
    if take.true.frames:
        looks["psnr_truth"] = take.true.summary()["psnr_truth"]
    stats = summary(take.rows) | looks | dict(more)
    stats["warm_s"] += warmed
    return Run(
        take.name,
        str(take.stream.session.plan),
        [row | look for row, look in zip(take.rows, take.looks, strict=True)],
        stats,
        notes(take.stream.session, take.rows),
    )


def _speed(dense: Run, plan: Run, aa: tuple[float, float] | None, session: Session) -> str:
    """How much faster the plan was and at what cost; or that it was not, why, and its cost."""
    costs = _costs(dense, plan)
    if aa is None:
        sentence = "Speeds were not compared: noise is unknown without a second dense run"
        return (
            f"{sentence}; {plan.name} has a {' and a '.join(costs)}." if costs else f"{sentence}."
        )
    stats = plan.summary
    ratios = f"{stats['ratio_dense_all']:.2f}x over the whole video"
    noise = f"dense against itself {aa[0]:.2f}x to {aa[1]:.2f}x"
    if stats["real"] and stats["ratio_dense"] > 1:
        sentence = f"{plan.name} is {stats['ratio_dense']:.2f}x as fast as dense once warm"
        at = f", at a {' and a '.join(costs)}" if costs else ""
        return f"{sentence} ({ratios}, {noise}){at}."
    what = "slower than" if stats["real"] else "not measurably faster than"
    sentence = (
        f"{plan.name} is {what} dense here, {stats['ratio_dense']:.2f}x once warm and {ratios} "
        f"({noise}), because {'; '.join(_reasons(dense, plan, session))}."
    )
    return f"{sentence} It has a {' and a '.join(costs)}." if costs else sentence


def _reasons(dense: Run, plan: Run, session: Session) -> list[str]:
    """Why a plan is not faster than dense: all that applies."""
    stats, policies, reasons = plan.summary, session.plan, []
    if not policies.cache.grows and session.past == session.total_entries:
        reasons.append("the video is too short: the cache was never full, and left nothing out")
    if stats["steady_chunks"] < 3:
        reasons.append(
            f"only {stats['steady_chunks']:.0f} chunks came after the warm-up of "
            f"{stats['warm_chunks']:.0f}, in which kernels are compiled and the cache fills"
        )
    if policies.attention.indexes and session.device.type == "cpu":
        reasons.append("on a CPU choosing what to read costs the time that reading less saves")
    work = stats["macs"] / dense.summary["macs"]
    if not reasons or work > MUCH:
        reasons.append(f"it did {percent(work)} of dense's counted work")
    return reasons


def _costs(dense: Run, plan: Run) -> list[str]:
    """How near a plan is to the dense run and to the truth, where that was measured."""
    stats, costs = plan.summary, []
    if "psnr_dense" in stats:
        costs.append(
            f"PSNR to dense of {decibels(stats['psnr_dense'])} over {stats['psnr_frames']:.0f} "
            f"frames (higher is closer)"
        )
    if "psnr_truth" in stats:
        theirs = decibels(dense.summary["psnr_truth"])
        costs.append(f"PSNR to the truth of {decibels(stats['psnr_truth'])} (dense: {theirs})")
    return costs


def _work(dense: Run, plan: Run) -> str:
    work = plan.summary["macs"] / dense.summary["macs"]
    return (
        f"{plan.name} scored {percent(plan.summary['density'])} of the dense model's query-key "
        f"pairs and did {percent(work)} of its counted work."
    )


def tell_floor(comparison: Comparison) -> str:
    """How far closeness to the dense run can be trusted, in a sentence."""
    floor = comparison.document.get("floor")
    if floor is None:
        return "Floor not measured: how far closeness to dense can be trusted is unknown."
    if floor["horizon"] is None:
        return (
            f"Floor: {floor['run']} has a PSNR to dense of {decibels(floor['psnr'])}, and nowhere "
            f"below {floor['db']:g} dB."
        )
    return (
        f"Floor: {floor['run']} parts from dense at frame {floor['horizon']} (below "
        f"{floor['db']:g} dB); PSNR to dense counts the frames before it alone."
    )


def _write(out: Path, comparison: Comparison, model: VideoModel, size: str) -> None:
    write_atomically(out / "compare.json", to_json(comparison.document, indent=2) + "\n")
    write_report(
        out / "report.html",
        f"{model.name}: {comparison.runs[1].name} beside dense",
        comparison.runs,
        comparison.document,
        model=f"{model.name}, {size}, {_dtype(model)}, {model.device}",
        video=(out / "compare.mp4").read_bytes(),
    )
