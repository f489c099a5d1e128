"""Plans through unseen worlds: which process plays what, and the rows of results."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import check
from tachyscope.core.plan import NAMES
from tachyscope.io.machine import cores
from tachyscope.io.results import Document, Parts, document
from tachyscope.models.atrium.world import TURN
from tachyscope.models.registry import find_device
from tachyscope_lab.evaluation.batched_rollout import Take
from tachyscope_lab.evaluation.intervals import Values, combined
from tachyscope_lab.evaluation.scenes import check_pace, frames_a_step, make_world
from tachyscope_lab.evaluation.world import (
    TRUSTED,
    Request,
    Watch,
    judge_world,
    measured_dtype,
    play_worlds,
    to_dense,
    world_models,
)
from tachyscope_lab.processes import spread, spread_safely
from tachyscope_lab.results import run_parts

AT_ONCE = 16  # worlds that share a GPU's passes
PLAYERS, BY_TURNS = 7, 2  # processes that share a GPU with MPS, beside their parent; and without


def evaluate_world(
    plans: Sequence[str] = ("dense", "balanced", "fast"),
    *,
    weights: str | None = None,
    device: str = "cpu",
    floor: bool = True,
    worlds: int = 16,
    seed: int = 0,
    frames: int = 48,
    quick: bool = False,
    recall: bool = True,
    world: bool = True,
    own: bool = False,
    pace: float = 1.0,
    runs: int = 1,
    jobs: int | None = None,
    command: str = "",
    parts: Parts | None = None,
    watch: Watch | None = None,
) -> Document:
    """Play plans through unseen worlds; a results document with 95 % intervals over worlds.

    Every rollout is shown one full turn of the room, then makes `frames` frames of a walk that sees
    all of it again. world: also measure the model itself, as `world`. own: also each plan's memory
    of what the model makes up. pace: the part of a step that a frame takes. runs: how often every
    plan is played, each time with noise of its own; values are then means, and bands
    (`revisit_db_band`) the most less the least. recall: sample each plan's attention recall, where
    its cache tells what became of an entry. floor: also run dense in the other dtype, which tells
    until which frame two dense runs agree. quick: 26 frames and no recall. watch: is told how many
    worlds are done. Worlds are shared out to `jobs` processes, as many as cores unless given; on a
    GPU plans are, 16 worlds at once, to 2 processes, or 7 where NVIDIA's MPS runs.
    parts: keeps what is measured, and has what was before: a world by all plans, on a GPU a plan in
    16 worlds.
    """
    check("worlds", worlds)
    check("runs", runs)
    turn = TURN * frames_a_step(pace)
    if frames < turn and not quick:
        raise TachyscopeError(f"frames must be {turn} or more, a full turn, got {frames}")
    for number in (0, worlds - 1):
        make_world(seed, number)  # raises where there are not so many
    # what plays are other processes, which have models of their own
    model, _ = world_models(weights, "cpu")
    check_pace(model, pace)
    for plan in plans:
        parse_plan(model, plan).check(model.shape())
    recall &= not quick
    request = Request(tuple(plans), seed, frames, quick, recall, world, own, pace, runs)
    request = replace(request, frames=len(request.walk))
    parts = Parts() if parts is None else parts
    parts.begin("atrium", model.name, model.fingerprint)
    owns: list[Values] = []
    by_plan: list[list[Values]] = [[] for _ in plans]
    if find_device(device).type == "cpu":
        jobs = max(1, min(jobs or cores(), worlds))
        measure = partial(_measure, request, weights, device, floor)

        def measured(left: Sequence[int]) -> Iterable[Document]:
            # a process a core: two threads of one small model wait for each other
            return spread(measure, left, jobs, torch.set_num_threads, max(1, cores() // jobs))

        for result in run_parts(parts, range(worlds), "world {}".format, measured):
            owns.append(result["world"])
            for values, one in zip(by_plan, result["rows"], strict=True):
                values.append(one)
            if watch is not None:
                watch(len(owns))
    else:
        play = partial(play_tasks, weights, device, floor, worlds, jobs)
        for i, result in _measure_plans(request, worlds, play, parts, watch):
            owns += [values for values in result["world"] if values]
            if plans:
                by_plan[i] += result["rows"]
    rows = []
    for i, plan in enumerate(request.plans):
        row: Document = {
            "name": plan if plan in NAMES else "plan",
            "plan": str(parse_plan(model, plan)),
            "asked": plan,
            "model": model.name,
            "frames": request.frames,
            "worlds": worlds,
        }
        rows.append(row | combined(by_plan[i]))
    more: Document = {
        "given": request.given,
        "walk": request.walk,
        "seed": seed,
        "pace": pace,
        "runs": runs,
    }
    more["fingerprint"] = model.fingerprint
    more["dtype"] = measured_dtype(device)
    if world:
        whole = combined(owns)
        parted = [x for x in whole["by_world"].get("horizon", []) if math.isfinite(x)]
        if parted:
            # the floor holds where it holds in every world
            whole["horizon"] = min(parted)
        more["world"] = whole
    return document("atrium", rows, command, **more)


def _measure(
    request: Request, weights: str | None, device: str, floor: bool, number: int
) -> Document:
    """All of one world, in whatever process."""
    model, twin = world_models(weights, device, floor)
    return judge_world(request, play_worlds(model, request, [number], twin)[0])


def players() -> int:
    """Processes that share a GPU: without NVIDIA's MPS it serves one at a time, and two fill it."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return PLAYERS if os.path.exists(os.path.join(folder, "control")) else BY_TURNS


class Task(NamedTuple):
    """Some worlds from one on, by a request of one plan."""

    request: Request
    start: int

    @property
    def name(self) -> str:
        return f"worlds from {self.start}: {' '.join(self.request.plans)}"


def play_tasks(
    weights: str | None,
    device: str,
    floor: bool,
    worlds: int,
    jobs: int | None,
    tasks: Iterable[Task],
) -> Iterator[tuple[Task, Document | Exception]]:
    """Tasks and what they measured, or their fault, as they end.

    A process plays 16 worlds at once, in passes that are mostly launches, and judges them while
    others play.
    """
    on_cpu = find_device(device).type == "cpu"
    measure = partial(measure_task, weights, device, floor, worlds)
    jobs = jobs or (cores() if on_cpu else players())
    jobs = jobs if on_cpu else min(jobs, PLAYERS)
    for task, result in spread_safely(measure, tasks, jobs, torch.set_num_threads, 1):
        if jobs > 1 and not isinstance(result, Exception):
            for row in result["rows"]:
                row.pop("frame_ms", None)  # of a GPU that had more to do
        yield task, result


def measure_task(
    weights: str | None, device: str, floor: bool, worlds: int, task: Task
) -> Document:
    """The values of every world; the beginnings of its takes, and of dense ones that were made."""
    request = task.request
    model, twin = world_models(weights, device, floor and request.world)
    played = play_worlds(model, request, range(task.start, min(worlds, task.start + AT_ONCE)), twin)
    judged = [judge_world(request, one) for one in played]
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # another process's plan may need it
    return {
        "world": [one["world"] for one in judged],
        "rows": [row for one in judged for row in one["rows"]],
        "takes": [_beginning(take) for one in played for take in one.takes],
        "dense": [_beginning(one.dense) for one in played if one.dense is not None],
    }


def _beginning(take: Take) -> Take:
    return replace(take, frames=take.frames[:TRUSTED].copy())


def _measure_plans(
    request: Request,
    worlds: int,
    play: Callable[[Iterable[Task]], Iterator[tuple[Task, Document | Exception]]],
    parts: Parts,
    watch: Watch | None,
) -> Iterator[tuple[int, Document]]:
    """Every plan's number and values, 16 worlds each; what can be measured is, before a fault."""
    # what is measured of the model itself goes with dense, of which it is a part
    own = request.plans.index("dense") if "dense" in request.plans else 0
    by_plan = [
        replace(request, plans=request.plans[i : i + 1], world=request.world and i == own)
        for i in range(max(1, len(request.plans)))
    ]
    tasks = [(i, Task(one, n)) for n in range(0, worlds, AT_ONCE) for i, one in enumerate(by_plan)]
    left = [task for _, task in tasks if parts.get(task.name) is None]
    again: list[Task] = []
    compared = request.world or "dense" in request.plans
    if compared:
        # where its part was measured before, dense is played again for others to be held against
        there = {task.start for task in left if task.request == by_plan[own]}
        some = replace(request, plans=("dense",), world=False, own=False, recall=False, runs=1)
        again = [Task(some, n) for n in {task.start for task in left} - there]
    dense: dict[int, list[Take]] = {}
    early: dict[int, list[tuple[Task, Document]]] = defaultdict(list)
    fault: Exception | None = None

    def keep(start: int) -> None:
        for task, result in early.pop(start, ()):
            rows = zip(result["rows"], result["takes"], dense.get(start, ()), strict=False)
            for row, take, other in rows:
                row |= to_dense(take, other)
            if task not in again:
                parts.add(task.name, {key: result[key] for key in ("world", "rows")})

    for task, result in play([*again, *left]):
        if isinstance(result, Exception):
            fault = fault or result
            continue
        early[task.start].append((task, result))
        if result["dense"]:
            dense[task.start] = result["dense"]
        if task.start in dense or not compared:
            keep(task.start)
        if watch is not None:
            watch(worlds * sum(parts.get(task.name) is not None for _, task in tasks) // len(tasks))
    for start in list(early):
        keep(start)
    if fault is not None:
        raise fault
    for i, task in tasks:
        kept = parts.get(task.name)
        assert kept is not None
        yield i, kept
