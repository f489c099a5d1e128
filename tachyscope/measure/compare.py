"""Plans side by side: same seed, prompt and actions, each by its own clock."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from tachyscope.core.arguments import check_model, check_whole, parse_plan
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import check
from tachyscope.core.plan import Plan, label
from tachyscope.core.request import VideoOptions, VideoRequest
from tachyscope.core.types import dtype_name
from tachyscope.io.files import check_folder, write_atomically
from tachyscope.io.results import Document, document, to_json
from tachyscope.io.video import VideoWriter
from tachyscope.measure.bench import warm
from tachyscope.measure.by_clock import FPS, Lane, pictures, speed_of
from tachyscope.measure.noise import noise, verdict
from tachyscope.measure.progress import Progress
from tachyscope.measure.rates import rates, warm_up
from tachyscope.measure.report import write_report
from tachyscope.measure.runs import Run
from tachyscope.measure.take import Judge, Store, Take, Truth, Watch
from tachyscope.measure.verdict import lead
from tachyscope.models.base import VideoModel

STRETCHES = 5  # parts of a rollout that are compared one by one, like a benchmark's rounds

Plans = Plan | str | Sequence[Plan | str] | Mapping[str, Plan | str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results document of a comparison, and its runs."""

    document: Document
    runs: tuple[Run, ...]  # the baseline first

    @property
    def lead(self) -> str:
        """The verdict in a few sentences: speed and its cost, then counted work."""
        return str(self.document["lead"])


def compare(
    model: VideoModel,
    plans: Plans = "fast",
    *,
    frames: int,
    truth: Truth | None = None,
    judge: Judge | None = None,
    out: str | os.PathLike[str] | None = None,
    aa: bool = True,
    command: str = "",
    about: str = "",
    load_s: float = 0.0,
    watch: Watch | None = None,
    progress: Progress | None = None,
    **options: Unpack[VideoOptions],
) -> Comparison:
    """Make a video by several plans: what each saved, and how much it differs from the first.

    One plan is compared with dense; of several, or a mapping from names to plans, the first is the
    baseline. `frames` and the options of a video are as `rollout` takes them: prompt, actions,
    seed, size, first, first_actions, start, pace and noise.
    truth: the true frames from one number to another, counted from the first new one;
    `psnr_truth` is then measured too. judge: which pixels of frames from a number on show a wrong
    surface; they are marked in the video.
    aa: run the baseline twice (A/A), to tell a ratio of speeds from noise; without it no ratio is
    given.
    out: a folder for compare.mp4, which shows all runs in true relative time, a video of each run,
    compare.json and report.html.
    about: a sentence for the report. load_s: seconds that loading took, for the table.
    watch: called with a run's name and each of its chunks. progress: shows other stages.

    On a CPU, runs take turns chunk by chunk, so all their caches are in memory together; on a GPU
    each runs alone, after two discarded chunks. A clock starts once the given frames are read.
    """
    check_model(model)
    frames = check_whole("frames", frames)
    request = VideoRequest(frames=frames, **options).one_video()
    named = _named(plans)
    check("plans", len(named), "how many plans there are")
    for plan in named.values():
        parse_plan(model, plan).check(model.shape())
    folder = None if out is None else check_folder(out)
    base, *others = named
    against = "dense" if named[base] == "dense" else "first"

    with ExitStack() as files:

        def take(name: str, plan: Plan | str) -> Take:
            store = Store(files.enter_context(tempfile.TemporaryFile(dir=folder)))
            return Take(name, plan, model, request, frames, store, against)

        takes = {base: take(base, named[base])} | {name: take(name, named[name]) for name in others}
        shown = list(takes.values())
        if aa:
            takes["again"] = take(f"{base} again", named[base])
        _play(takes, shown, truth, judge, watch, progress)
        comparison = _conclude(takes, shown, model, against, load_s, command, about)
        if folder is not None:
            _write(folder, comparison, shown, model, truth, progress)
    return comparison


def _named(plans: Plans) -> dict[str, Plan | str]:
    """Plans by name, the baseline first; a repeated one gets a number."""
    if isinstance(plans, Plan | str):
        plans = ["dense", plans]
    elif isinstance(plans, Mapping):
        return dict(plans)
    elif not isinstance(plans, Sequence):
        raise TachyscopeError(
            f"plans must be text, a Plan, or several of them, got a {type(plans).__name__}: "
            f"try ['dense', 'fast']"
        )
    named: dict[str, Plan | str] = {}
    for plan in plans:
        name = label(plan)
        named[next(x for i in count(1) if (x := f"{name} {i}" if i > 1 else name) not in named)] = (
            plan
        )
    return named


def takes_turns(device: torch.device) -> bool:
    """Whether runs take turns chunk by chunk (on a CPU); else one runs after another."""
    return device.type == "cpu"


def _play(
    takes: Mapping[str, Take],
    shown: Sequence[Take],
    truth: Truth | None,
    judge: Judge | None,
    watch: Watch | None,
    progress: Progress | None,
) -> None:
    """Make every run, and measure its frames as they come."""
    base, turns = shown[0], takes_turns(shown[0].model.device)

    def ready(take: Take) -> None:
        if take in shown and ("again" in takes or not turns):
            # what a process does once must not be timed; the newest given frame is enough for it
            first = take.request.first
            newest = first[-1:] if isinstance(first, np.ndarray) else None
            request = replace(take.request, first=newest, first_actions="")
            take.warm_s = warm(take.model, take.plan, request)
        again = take is takes.get("again") and turns
        take.open(base if again else None, progress)

    def look(take: Take) -> None:
        own = take in shown
        take.look(base, truth if own else None, judge if own else None)

    if not turns:
        for take in takes.values():
            ready(take)
            with take.clock:
                while not take.done:
                    take.step(watch, timed=False)
            look(take)
            take.close()
        return
    for take in takes.values():
        ready(take)
    order = list(takes.values())
    while not base.done:
        for take in order:
            take.step(watch)
        for take in takes.values():
            look(take)
        order.reverse()  # so that no run is always first
    for take in takes.values():
        take.close()


def _conclude(
    takes: Mapping[str, Take],
    shown: Sequence[Take],
    model: VideoModel,
    against: str,
    load_s: float,
    command: str,
    about: str,
) -> Comparison:
    base = shown[0]
    # the same chunks of every run: a growing cache must have the same length in each
    start = max(warm_up(take.rows) for take in shown)
    aa, runs = None, []
    times = [_stretches(take.rows, start) for take in shown]
    if "again" in takes:
        aa = noise(times[0], _stretches(takes["again"].rows, start))
    for take, own in zip(shown, times, strict=True):
        stats: dict[str, float] = {"load_s": load_s} if load_s else {}
        stats |= rates(take.rows, start)
        if take is not base:
            if aa is not None:
                pairs = zip(times[0], own, strict=True)
                found = verdict([theirs / ours for theirs, ours in pairs], aa)
                stats |= {key.replace("dense", against): x for key, x in found.items()}
                stats[f"ratio_{against}"] = sum(times[0]) / sum(own)
                stats[f"ratio_{against}_all"] = _wall(base.rows) / _wall(take.rows)
            stats["psnr_frames"] = len(take.near.psnrs)
        runs.append(take.run(stats))
    height, width = base.store.read().shape[1:3]
    lanes = [_lane(take) for take in shown]
    rows = [
        run.row(model.name, f"{height}x{width}", frame_s=[round(x, 4) for x in lane.frame_s])
        for run, lane in zip(runs, lanes, strict=True)
    ]
    sentences = "\n".join(filter(None, (lead(runs, shown, aa, against), about)))
    speed = speed_of(lanes)
    return Comparison(
        document("compare", rows, command, aa, baseline=base.name, speed=speed, lead=sentences),
        tuple(runs),
    )


def _wall(rows: Sequence[Mapping[str, float]]) -> float:
    return sum(row["wall_ms"] for row in rows)


def _stretches(rows: Sequence[Mapping[str, float]], start: int) -> list[float]:
    """Milliseconds of at most five equal parts of a rollout, from chunk `start` on.

    A shorter video is taken from its first chunk.
    """
    ms = np.array([row["wall_ms"] for row in rows[start if start < len(rows) else 0 :]])
    return [float(part.sum()) for part in np.array_split(ms, min(STRETCHES, len(ms)))]


def _lane(take: Take) -> Lane:
    gpu, first = take.model.device.type == "cuda", take.request.first
    given = first[-1:] if isinstance(first, np.ndarray) else None
    return Lane(take.name, take.rows, take.store.read(), take.wrong_of, take.right, gpu, given)


def _file_names(names: Sequence[str]) -> list[str]:
    """A file's name for each run: no two are the same, and none is that of the comparison."""
    taken, found = {"compare"}, list[str]()
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:200] or "run"
        numbered = (f"{plain}-{i}" if i > 1 else plain for i in count(1))
        found.append(next(one for one in numbered if one.lower() not in taken))
        taken.add(found[-1].lower())
    return found


def _write(
    out: Path,
    comparison: Comparison,
    shown: Sequence[Take],
    model: VideoModel,
    truth: Truth | None,
    progress: Progress | None,
) -> None:
    lanes, speed = [_lane(take) for take in shown], comparison.document["speed"]
    if progress is not None:
        progress.stage("writing the videos")
    for take, name in zip(shown, _file_names([take.name for take in shown]), strict=True):
        with VideoWriter(out / f"{name}.mp4", model.fps) as file:
            for i in range(0, take.frames, 16):
                file.write(np.asarray(take.store.read()[i : i + 16]))
    true = None if truth is None else truth(0, shown[0].frames)
    with VideoWriter(out / "compare.mp4", FPS) as file:
        for picture in pictures(lanes, speed, true):
            file.write(picture)
    write_atomically(out / "compare.json", to_json(comparison.document, indent=2) + "\n")
    height, width = lanes[0].frames.shape[1:3]
    write_report(
        out / "report.html",
        f"{model.name}: {', '.join(run.name for run in comparison.runs)}",
        comparison.runs,
        comparison.document,
        model=f"{model.name}, {height}x{width}, {dtype_name(model.dtype)}, {model.device}",
        video=(out / "compare.mp4").read_bytes(),
    )
    if progress is not None:
        progress.stage("")
