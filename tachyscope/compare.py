"""A plan beside the dense model: same seed, prompt and actions, chunk by chunk by turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tachyscope.adapters import Adapter
from tachyscope.arguments import check_model, parse_first, parse_plan
from tachyscope.bench import label, noise, verdict, warm
from tachyscope.errors import TachyscopeError
from tachyscope.files import check_folder, write_atomically
from tachyscope.meter import summary
from tachyscope.notes import notes
from tachyscope.plan import Plan
from tachyscope.quality import FLOOR_DB, Quality, horizon
from tachyscope.report import Floor, Run, decibels, percent, write_report
from tachyscope.results import Document, document, size_of, to_json
from tachyscope.rollout import open_session, rollout
from tachyscope.session import Session
from tachyscope.types import Chunk
from tachyscope.video import VideoWriter, beside

if TYPE_CHECKING:
    from tachyscope.arguments import Actions, Pictures, PixelSize

STRETCHES = 5  # parts of a rollout that are timed one by one, like a benchmark's rounds
SHORT_SIDE = 256  # pixels: a smaller video is enlarged to about that beside another

Watch = Callable[[str, Chunk], None]
Truth = Callable[[int, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found: the results document, and what a report shows of it."""

    document: Document
    runs: tuple[Run, Run]  # dense, then the plan
    floor: Floor | None  # None: not measured
    aa: tuple[float, float] | None  # the dense run's speed against itself
    lead: str  # the verdict in a sentence or two


@dataclass(slots=True)
class _Take:
    """One rollout under way."""

    name: str
    session: Session
    chunks: Generator[Chunk]
    rows: list[dict[str, float]] = field(default_factory=list)  # of the meter
    looks: list[dict[str, float]] = field(default_factory=list)  # of the frames, for the plots
    quality: Quality = field(default_factory=Quality)
    true: Quality = field(default_factory=lambda: Quality(against="truth"))

    def step(self, watch: Watch | None) -> Chunk:
        chunk = next(self.chunks)
        self.rows.append(chunk.stats)
        if watch is not None:
            watch(self.name, chunk)
        return chunk


def compare(
    model: Adapter,
    plan: Plan | str = "fast",
    *,
    frames: int,
    prompt: str = "",
    actions: Actions = "",
    seed: int = 0,
    size: PixelSize | None = None,
    first: Pictures | None = None,
    truth: Truth | None = None,
    out: str | os.PathLike[str] | None = None,
    twin: Adapter | None = None,
    aa: bool = True,
    command: str = "",
    about: str = "",
    watch: Watch | None = None,
) -> Comparison:
    """Play dense and a plan, and say what the plan saved and how far from dense it went.

    Plan, frames, prompt, actions, seed, size and first are as `rollout` takes them.
    twin: the same model in another dtype. Its dense run finds the horizon, the frame from which
    closeness to the dense run says nothing; `psnr_dense` is the mean over the frames before it.
    truth: the true frames from one number to another, counted from the first new one;
    `psnr_truth` is then measured too.
    aa: play dense twice, so that a ratio of speeds can be told from noise; else none is given.
    out: a folder for dense.mp4, plan.mp4, compare.mp4, compare.json and report.html.
    about: a sentence for the report's head. watch: is told every chunk, with its run's name.

    Runs take turns at every chunk, so all their caches are in memory together.
    """
    check_model(model)
    parse_plan(model, plan)
    if twin is not None and check_model(twin).dtype == model.dtype:
        raise TachyscopeError(
            f"a floor needs the model in two dtypes, got {_dtype(model)} twice: load another twin"
        )
    asked: dict[str, Any] = {
        "frames": frames, "prompt": prompt, "seed": seed, "size": size,
        "first": None if first is None else parse_first(first),
    }  # fmt: skip

    def take(name: str, of: Adapter, by: Plan | str) -> _Take:
        session = open_session(of, by, **asked)
        return _Take(name, session, rollout(of, frames=frames, actions=actions, session=session))

    takes = {"dense": take("dense", model, "dense"), "plan": take(label(plan), model, plan)}
    if twin is not None:
        takes["floor"] = take(f"dense {_dtype(twin)}", twin, "dense")
    if aa:
        takes["again"] = take("dense again", model, "dense")
        for role in ("dense", "plan"):
            warm(model, takes[role].session.plan, actions=actions, **asked)
    video_size = _play(takes, frames, model.fps, truth, out, watch)
    found = _conclude(takes, model, video_size, command, about)
    if out is not None:
        _write(Path(out), found, model, video_size)
    return found


def _dtype(model: Adapter) -> str:
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
            if truth is not None:
                done = dense.true.frames
                true = truth(done, done + len(first))
                dense.true.add(first, true)
                plan.true.add(ours, true)
                shown, labels = [true, *shown], ["truth", *labels]
            if files:
                scale = max(1, SHORT_SIDE // min(first.shape[1:3]))
                pair = beside(shown, labels, scale=scale)
                for file, pictures in zip(files, (first, ours, pair), strict=True):
                    file.write(pictures)
    return size


def _conclude(
    takes: Mapping[str, _Take], model: Adapter, size: str, command: str, about: str
) -> Comparison:
    dense, plan = takes["dense"], takes["plan"]
    floor, more = None, {}
    if "floor" in takes:
        near = takes["floor"].quality.psnrs
        floor = Floor(FLOOR_DB, horizon(near))
        inside = near[: floor.horizon]
        more["floor"] = {
            "run": takes["floor"].name,
            "db": floor.db,
            "horizon": floor.horizon,
            "psnr": float(np.mean(inside)) if inside else None,
        }
    aa, speed = None, {}
    if "again" in takes:
        times = {role: _stretches(takes[role].rows) for role in ("dense", "again", "plan")}
        aa = noise(times["dense"], times["again"])
        pairs = zip(times["dense"], times["plan"], strict=True)
        speed = verdict([theirs / ours for theirs, ours in pairs], aa)
        speed["ratio_dense"] = sum(times["dense"]) / sum(times["plan"])
    runs = (_run(dense, {}), _run(plan, speed | _closeness(plan.quality, floor)))
    rows = []
    for run in runs:
        named: Document = {"name": run.name, "plan": run.plan, "model": model.name, "size": size}
        rows.append(named | dict(run.summary) | {"notes": list(run.notes)})
    result = document("compare", rows, command, aa, **more)
    return Comparison(result, runs, floor, aa, f"{_lead(*runs)} {about}".strip())


def _stretches(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Time of each part of a rollout, at most five of them."""
    ms = np.array([row["chunk_ms"] for row in rows])
    return [float(part.sum()) for part in np.array_split(ms, min(STRETCHES, len(ms)))]


def _closeness(quality: Quality, floor: Floor | None) -> dict[str, float]:
    """PSNR over the frames before the horizon, and how many they are; nothing if there are none."""
    inside = quality.psnrs[: floor.horizon if floor is not None else None]
    if not inside:
        return {}
    return {"psnr_dense": float(np.mean(inside)), "psnr_frames": len(inside)}


def _run(take: _Take, more: Mapping[str, float]) -> Run:
    looks = take.quality.summary()
    # over all frames, where only those before the horizon count
    looks.pop("psnr_dense", None)
    if take.true.frames:
        looks["psnr_truth"] = take.true.summary()["psnr_truth"]
    return Run(
        take.name,
        str(take.session.plan),
        [row | look for row, look in zip(take.rows, take.looks, strict=True)],
        summary(take.rows) | looks | dict(more),
        notes(take.session, take.rows),
    )


def _lead(dense: Run, plan: Run) -> str:
    work = plan.summary["macs"] / dense.summary["macs"]
    text = (
        f"{plan.name} scored {percent(plan.summary['density'])} of the dense model's query-key "
        f"pairs and did {percent(work)} of its counted work"
    )
    if "psnr_dense" in plan.summary:
        near, count = plan.summary["psnr_dense"], plan.summary["psnr_frames"]
        text += f"; over {count:.0f} frames it lies {decibels(near)} from the dense run"
    return text + "."


def tell_floor(found: Comparison) -> str:
    """How far closeness to the dense run can be trusted, in a sentence."""
    floor = found.document.get("floor")
    if floor is None:
        return "Floor not measured: how far closeness to dense can be trusted is unknown."
    if floor["horizon"] is None:
        return (
            f"Floor: {floor['run']} lies {decibels(floor['psnr'])} from dense and is nowhere "
            f"below {floor['db']:g} dB."
        )
    return (
        f"Floor: {floor['run']} parts from dense at frame {floor['horizon']} (below "
        f"{floor['db']:g} dB); PSNR to dense counts the frames before it alone."
    )


def _write(out: Path, found: Comparison, model: Adapter, size: str) -> None:
    write_atomically(out / "compare.json", to_json(found.document, indent=2) + "\n")
    write_report(
        out / "report.html",
        f"{model.name}: {found.runs[1].name} beside dense",
        found.runs,
        model=f"{model.name}, {size}, {_dtype(model)}, {model.device}",
        command=found.document["command"],
        machine=found.document["machine"],
        versions=found.document["versions"],
        date=found.document["date"],
        floor=found.floor,
        noise=found.aa,
        video=(out / "compare.mp4").read_bytes(),
        lead=found.lead,
    )
