"""What replay costs a token model on Atrium, and why it costs what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import check
from tachyscope.io.machine import cores
from tachyscope.io.results import Document, Parts, document
from tachyscope.io.tables import format_table
from tachyscope.models.atrium import world as atrium
from tachyscope.models.registry import load
from tachyscope.models.vila_u.model import VilaModel
from tachyscope_lab.evaluation.clips import CLIPS, GIVEN, Clip, make_clip
from tachyscope_lab.evaluation.intervals import combined, versus
from tachyscope_lab.evaluation.replay_scores import Way
from tachyscope_lab.evaluation.token_measures import bounds, forced, made, probe
from tachyscope_lab.evaluation.token_timing import REPLAY, WINDOW, clock
from tachyscope_lab.evaluation.world import Watch
from tachyscope_lab.processes import spread
from tachyscope_lab.results import run_parts

# at three quarters, and at half
SHARES = {
    "": {"share": 0.75, "k": 4, "age": 4},
    "_half": {"share": 0.5, "k": 2, "age": 2},
}
CONTROLS = {
    "attentive": "replay=attentive:share={share},age={age},drift=true",
    "random": "replay=random:share={share},drift=true",
    "every_k": "replay=every_k:k={k},drift=true",
    # as it was published
    "attentive_paper": "replay=attentive:share={share}",
    "random_paper": "replay=random:share={share}",
    "every_k_paper": "replay=every_k:k={k}",
}
FORCED = {
    f"kl_{name}{ending}": Way(text.format(**numbers))
    for ending, numbers in SHARES.items()
    for name, text in CONTROLS.items()
}
HALF = "replay=attentive:share=0.5,age=2,drift=true"
MADE = {
    "dense": Way("dense"),
    "replay": Way(REPLAY),
    "window": Way(WINDOW),
    "replay_window": Way(f"{WINDOW} {REPLAY}"),
    "half": Way(HALF),
    "half_window": Way(f"{WINDOW} {HALF}"),
    "quarter": Way("replay=attentive:share=0.25,age=1,drift=true"),
    "paper": Way("replay=attentive:share=0.75"),
    "paper_half": Way("replay=attentive:share=0.5"),
    "random": Way("replay=random:share=0.75,drift=true"),
    "every_k": Way("replay=every_k:k=4,drift=true"),
}
WHY = (
    Way(REPLAY), Way(REPLAY, "reversed"), Way(REPLAY, "mass"), Way(REPLAY, "input"),
    Way(REPLAY, "change"), Way("replay=attentive:share=0.75,drift=true"),
)  # fmt: skip


TASKS = tuple(
    (what, clip)
    for what, clips in {
        "made": CLIPS,
        "forced": CLIPS,
        "why": ("reversing",),
        "probe": ("reversing", "forward", "still"),
        "bounds": CLIPS,
    }.items()
    for clip in clips
)
QUICK_TASKS = tuple((what, "reversing") for what in ("made", "forced", "bounds"))
PLANNED = ("made", "forced", "bounds")  # what is measured of given plans
QUICK_WAYS = ("dense", "replay", "replay_window")
QUICK_FRAMES = 2  # made frames, where they are teacher-forced


@dataclass(frozen=True)
class Task:
    """A measure of a clip in so many worlds."""

    what: str
    clip: str
    worlds: int
    seed: int
    quick: bool
    plans: tuple[str, ...]  # instead of the usual ones


@cache
def _model(name: str, weights: str | None, device: str) -> VilaModel:
    """A process's model."""
    fault = f"{name} is no token model of Atrium: try atrium-tokens"
    model = VilaModel.narrow(load(name, weights, device=device), fault)
    if model.actions != atrium.ACTIONS:
        raise TachyscopeError(fault)
    return model


def _work(name: str, weights: str | None, device: str, task: Task) -> list[Document]:
    model = _model(name, weights, device)
    clip = make_clip(task.clip, task.worlds, task.seed, model.config.size[0])
    head = {"measure": task.what, "clip": task.clip, "worlds": task.worlds}
    return [head | row for row in _measure(model, task, clip)]


def _measure(model: VilaModel, task: Task, clip: Clip) -> list[Document]:
    """The rows of one task."""
    frames = clip.length - GIVEN
    if task.what == "bounds":
        return [combined(bounds(model, clip))]
    if task.what == "probe":
        values = probe(model, clip, frames)
        return [{"layer": n} | combined(by_world) for n, by_world in enumerate(values)]
    if task.what == "made":
        ways = list(made_ways(task.quick, task.plans).values())
        results = made(model, clip, ways)
    else:
        alone = [Way(REPLAY, layers=(n,)) for n in range(model.config.layers)]
        chosen = [Way(plan) for plan in task.plans] or list(claims(task.quick).values())
        chosen = chosen if task.what == "forced" else [*WHY, *alone]
        ways = [Way("dense"), *chosen]
        frames = min(frames, QUICK_FRAMES) if task.quick else frames
        results = forced(model, clip, chosen, frames)
    return [
        {"plan": str(way), "frames": frames} | combined(by_world)
        for way, by_world in zip(ways, results, strict=True)
    ]


def made_ways(quick: bool, plans: Sequence[str]) -> dict[str, Way]:
    """What makes frames by itself, by name: dense, and plans where some are given."""
    if plans:
        return {"dense": Way("dense"), **{plan: Way(plan) for plan in plans}}
    return {key: MADE[key] for key in (QUICK_WAYS if quick else MADE)}


def claims(quick: bool) -> dict[str, Way]:
    """What is teacher-forced; when it must be quick, without the published form."""
    return {key: way for key, way in FORCED.items() if not (quick and "_paper" in key)}


def evaluate_tokens(
    name: str = "atrium-tokens",
    plans: Sequence[str] = (),
    *,
    weights: str | None = None,
    device: str = "cpu",
    worlds: int = 16,
    seed: int = 0,
    quick: bool = False,
    timed: bool = True,
    jobs: int | None = None,
    command: str = "",
    parts: Parts | None = None,
    watch: Watch | None = None,
) -> Document:
    """Measure a token model on unseen worlds; a results document with intervals over worlds.

    plans: what to measure beside dense, instead of replay at its usual settings and its reasons.
    All worlds share the passes of a measure, and measures are shared out to as many processes as
    there are cores. quick: the reversing camera alone, and less of it. timed: take the time of a
    token too, on the CPU whatever the device of the rest. watch: is told how many are done. parts:
    keeps what is measured, and has what was before; times are taken anew.
    """
    check("worlds", worlds)
    model = _model(name, weights, device)
    for plan in plans:
        parse_plan(model, plan).check(model.shape())
    chosen = [t for t in (QUICK_TASKS if quick else TASKS) if t[0] in PLANNED or not plans]
    tasks = [Task(*t, worlds, seed, quick, tuple(plans)) for t in chosen]
    jobs = min(jobs or cores(), len(tasks))
    work, rows = partial(_work, name, weights, device), list[Document]()
    parts = Parts() if parts is None else parts
    parts.begin("atrium-tokens", model.name, model.fingerprint)

    def measured(left: Sequence[Task]) -> Iterable[Document]:
        results = spread(work, left, jobs, torch.set_num_threads, 1)
        return ({"rows": one} for one in results)

    found = run_parts(parts, tasks, lambda t: f"{t.what} {t.clip}", measured)
    for done, part in enumerate(found, 1):
        rows += part["rows"]
        if watch is not None:
            watch(done)
    more: Document = {"model": name, "clips": CLIPS, "given": GIVEN, "seed": seed}
    if not timed:
        return document("atrium-tokens", rows, command, tokens=headline(rows, plans), **more)
    model = _model(name, weights, "cpu")
    clip = make_clip("reversing", 1, seed, model.config.size[0])
    rounds = QUICK_FRAMES if quick else clip.length - GIVEN
    speed = clock(model, clip, rounds)
    more |= {"tokens": headline(rows, plans) | speedups(speed), "speed": speed}
    return document("atrium-tokens", rows, command, speed["trunk_aa"], **more)


def headline(rows: Sequence[Document], plans: Sequence[str] = ()) -> Document:
    """The numbers that claims are held to; `_over` is by how much a control exceeds attentive."""
    out: Document = {}
    there = {(row["measure"], row["clip"], row.get("plan")): row for row in rows}
    for clip in CLIPS:
        ending = "" if clip == "reversing" else f"_{clip}"
        limits = there.get(("bounds", clip, None), {})
        for key in ("psnr_tokenizer", "psnr_truth_repeat"):
            if key in limits:
                out[key + ending] = limits[key]
        for key, way in made_ways(False, plans).items():
            row = there.get(("made", clip, str(way)))
            if row is not None:
                out[f"psnr_truth_{key}{ending}"] = row["psnr_truth"]
                if key != "dense":
                    dense = there["made", clip, "dense"]
                    out[f"psnr_truth_{key}_loss{ending}"] = versus(dense, row, "psnr_truth")
        for key, way in FORCED.items():
            row = there.get(("forced", clip, str(way)))
            if row is not None:
                out[key + ending] = row["kl"]
                rival = key.replace("random", "attentive").replace("every_k", "attentive")
                if rival != key:
                    ours = there["forced", clip, str(FORCED[rival])]
                    out[f"{key}{ending}_over"] = versus(row, ours, "kl")
    return out


def speedups(speed: Mapping[str, Any]) -> Document:
    """The clock's numbers that claims are held to."""
    out: Document = {
        "speedup_replay": speed["replay"]["trunk_ratio"],
        "speedup_replay_window": speed["replay_window"]["trunk_ratio"],
        "speedup_window": speed["window"]["trunk_ratio"],
        "speedup_whole": speed["replay"]["whole_ratio"],
        "speedup_whole_window": speed["replay_window"]["whole_ratio"],
    }
    for part in ("trunk", "whole"):
        empty = speed["python"]["trunk_ms"]
        out[f"python_share_{part}"] = empty / speed["dense"][f"{part}_ms"]
    return out


def lines(results: Document) -> list[str]:
    """An evaluation as a reader wants it: the claims' numbers, then every row."""
    claims = []
    for key, value in results["tokens"].items():
        several = isinstance(value, tuple | list)
        mean, *rest = value if several else (value,)
        interval = f"{rest[0]:.4f} to {rest[1]:.4f}" if rest else ""
        claims.append([key, f"{mean:.4f}", interval])
    out = format_table(["measure", "mean", "95 % interval"], claims)
    for row in results["rows"]:
        named = row.get("plan", f"layer {row['layer']}" if "layer" in row else "")
        shown = []
        for key in row["by_world"]:
            # a JSON file has null for a value that is no number
            three = (row[name] for name in (key, f"{key}_low", f"{key}_high"))
            mean, low, high = (math.nan if x is None else x for x in three)
            shown.append(f"{key} {mean:.4f} ({low:.4f} to {high:.4f})")
        out.append(f"{row['measure']} {row['clip']} {named}: " + ", ".join(shown))
    speed = results.get("speed", {})
    for part in ("trunk", "whole") if speed else ():
        low, high = speed[f"{part}_aa"]
        out.append(f"{part}: dense against itself {low:.2f}x to {high:.2f}x, inside is noise")
    times = [
        [
            name, f"{row['trunk_ms']:.3f}", f"{row['trunk_ratio']:.2f}x",
            f"{row['trunk_ratio_low']:.2f}x to {row['trunk_ratio_high']:.2f}x",
            f"{row['whole_ms']:.3f}", f"{row['whole_ratio']:.2f}x",
        ]
        for name, row in speed.items()
        if isinstance(row, Mapping)
    ]  # fmt: skip
    if times:
        head = ["ms a token", "trunk", "ratio", "range", "whole model", "ratio"]
        out += format_table(head, times)
    return out
