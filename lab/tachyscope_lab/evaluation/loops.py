"""A world model's memory as the field measures it: replay, return, loops, mirror, prompt switch.

    replay  what was shown is walked through again: closeness to the truth (Echo-Memory, MIND's lcm)
    return  a turn of 45 degrees to the right and back: the last frame to the first (Echo-Memory)
    loop    rot180, a half turn and back; rot360, a full turn (Echo-Memory); ABA, to a place and
            back; ABCA, by two places (LoopNav): the last frame to the first
    mirror  a walk, then its actions undone: the way back to the way there (MIND's gsc)
    switch  a new prompt: its named surfaces that are drawn, and those of the old that stay

Each is gated, as WBench's: by the share of frames on the way that move where the truth does, times
the share that is not blurred. A picture that stands still or is blurred scores nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tachyscope.core.arguments import parse_plan
from tachyscope.core.limits import check
from tachyscope.io.machine import cores
from tachyscope.io.results import Document, Parts, document
from tachyscope.io.tables import format_table
from tachyscope.measure.quality import Frames, detail, has_ssim, psnr, ssim
from tachyscope.models.atrium import prompts
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.visit import World
from tachyscope.models.registry import find_device
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation.batched_rollout import decoded, open_scenes, play
from tachyscope_lab.evaluation.frame_checks import named_walls, stopped
from tachyscope_lab.evaluation.intervals import Values, combined, mean
from tachyscope_lab.evaluation.judges import BLURRED
from tachyscope_lab.evaluation.scenes import (
    WORLDS_A_SEED,
    Scene,
    check_pace,
    make_scene,
    make_world,
    spell,
)
from tachyscope_lab.evaluation.world import GIVEN, WALK, measured_dtype, world_models
from tachyscope_lab.evaluation.world_rows import players
from tachyscope_lab.processes import spread
from tachyscope_lab.results import run_parts

# Whole steps from the middle of the room, where no wall stops the walker; each ends as it began.
LOOPS = {
    "return": "eee" + "qqq",
    "rot180": "q" * 12 + "e" * 12,
    "rot360": "q" * 24,
    "aba": ("wwww" + "q" * 12) * 2,
    "abca": ("wwww" + "q" * 8) * 3,
}
AWAY = "wwaa" + "q" * 8 + "ww"
UNDONE = dict(zip("wsadqe", "swdaeq", strict=True))
REPLAY = WALK[:48]
SWITCHED = 24  # steps under the new prompt: a full turn
AT_ONCE = 64  # worlds that share a GPU's passes


def gate(frames: Frames, truth: Frames, before: Frames) -> float:
    """The share of frames that move where the truth does, times the share that is not blurred.

    before [H, W, 3] is the frame ahead of the first, in both.
    """
    still = stopped(frames, truth, before)
    blurred = float((detail(frames) < BLURRED * detail(truth)).mean())
    return (1 - (0.0 if math.isnan(still) else still)) * (1 - blurred)


def closeness(name: str, frames: Frames, others: Frames, factor: float) -> Values:
    """Mean PSNR and SSIM of frames to others, times a gate."""
    scores = {f"{name}_db": factor * mean(psnr(frames, others))}
    if has_ssim():
        scores[f"{name}_ssim"] = factor * mean(ssim(frames, others))
    return scores


def judge_loop(name: str, frames: Frames, scene: Scene) -> Values:
    """The last frame of a walk that ends where it began, to its first, which was given."""
    factor = gate(frames, scene.frames[1:], scene.frames[0])
    return {f"{name}_gate": factor} | closeness(name, frames[-1:], scene.frames[:1], factor)


def judge_mirror(frames: Frames, scene: Scene) -> Values:
    """The way back to the way there, both as they were made; the first frame was given."""
    half = len(frames) // 2
    there = np.concatenate([scene.frames[:1], frames[: half - 1]])
    factor = gate(frames, scene.frames[1:], scene.frames[0])
    back = frames[half:][::-1]
    return {"mirror_gate": factor} | closeness("mirror", back, there, factor)


def judge_replay(frames: Frames, scene: Scene, given: int) -> Values:
    """A walk through what was shown before, to the truth."""
    truth = scene.frames[given:]
    factor = gate(frames, truth, scene.frames[given - 1])
    return {"replay_gate": factor} | closeness("replay", frames, truth, factor)


def judge_switch(frames: Frames, old: Scene, new: Scene, given: int) -> Values:
    """Of the walls that the new prompt names, those that are drawn; of the old one's, that stay."""
    index = range(given, given + len(frames))
    factor = gate(frames, new.frames[given:], old.frames[given - 1])
    shares = [
        mean(right for _, right in named_walls(frames, scene, index, hidden=False))
        for scene in (new, old)
    ]
    return {"switch_follows": factor * shares[0], "switch_stays": shares[1]}


def in_the_middle(world: World) -> World:
    """The world, its walk begun in the middle of the room."""
    start = world.start.clone()
    start[:, :2] = 0.5
    return replace(world, start=start)


def repainted(world: World, other: World) -> World:
    """Another world's room seen from this one's start, with its prompt from there."""
    prompt = prompts.descriptions(other.rooms, 0)[int(atrium.facing(world.start[0]))]
    return replace(other, start=world.start, prompt=prompt)


@torch.inference_mode()
def play_switch(
    model: WanModel, plan: str, old: Sequence[Scene], new: Sequence[Scene], given: int
) -> list[Frames]:
    """Frames made under new prompts, after given frames of the old scenes."""
    stream = open_scenes(model, plan, old, given)
    stream.set_prompt([scene.world.prompt for scene in new])
    moves = [model.actions.index(action) for action in old[0].actions[given:]]
    return list(decoded(stream, [stream.generate([move]).latents for move in moves]))


Task = tuple[range, tuple[str, ...]]  # worlds that are played together, and plans


def measure(
    seed: int, pace: float, weights: str | None, device: str, task: Task
) -> list[list[Values]]:
    """Plans' values in some worlds, played together: by plan, then by world."""
    numbers, plans = task
    model, _ = world_models(weights, device)
    place = model.device
    still = [make_world(seed, n, motion=0.0) for n in numbers]
    middle = [in_the_middle(world) for world in still]
    others = [make_world(seed, (n + WORLDS_A_SEED // 2) % WORLDS_A_SEED, 0.0) for n in numbers]

    def scenes(worlds: Iterable[World], steps: str) -> list[Scene]:
        return [make_scene(world, spell(steps, pace), place, pace) for world in worlds]

    loops = {name: scenes(middle, "." + steps) for name, steps in LOOPS.items()}
    back = "".join(UNDONE[letter] for letter in reversed(AWAY))
    mirror = scenes(middle, "." + AWAY + back)
    given = len(spell(GIVEN, pace))
    replay = scenes((make_world(seed, n) for n in numbers), GIVEN + REPLAY)
    turn = GIVEN + "q" * SWITCHED
    old = scenes(still, turn)
    new = scenes(map(repainted, still, others), turn)
    scores = []
    for plan in plans:
        rows: list[Values] = [{} for _ in numbers]
        for name, walks in loops.items():
            for row, take, scene in zip(rows, play(model, plan, walks, 1), walks, strict=True):
                row |= judge_loop(name, take.frames, scene)
        for row, take, scene in zip(rows, play(model, plan, mirror, 1), mirror, strict=True):
            row |= judge_mirror(take.frames, scene)
        for row, take, scene in zip(rows, play(model, plan, replay, given), replay, strict=True):
            row |= judge_replay(take.frames, scene, given)
        switched = play_switch(model, plan, old, new, given)
        for row, frames, a, b in zip(rows, switched, old, new, strict=True):
            row |= judge_switch(frames, a, b, given)
        for row in rows:
            row["loop_db"] = mean(row[f"{name}_db"] for name in LOOPS if name != "return")
        scores.append(rows)
    return scores


def _name(task: Task) -> str:
    numbers, plans = task
    return f"worlds from {numbers[0]}: {', '.join(plans)}"


def evaluate_loops(
    plans: Sequence[str] = ("dense", "balanced", "fast"),
    *,
    weights: str | None = None,
    worlds: int = 16,
    device: str = "cpu",
    seed: int = 0,
    pace: float = 1.0,
    jobs: int | None = None,
    command: str = "",
    parts: Parts | None = None,
    watch: Callable[[int], None] | None = None,
) -> Document:
    """Play plans through loops of unseen worlds: a document with 95 % intervals over worlds.

    pace: the part of a step that a frame takes. weights: a world model's folder instead of the
    shipped one's. parts: keeps what is measured, and has what was before.
    """
    check("worlds", worlds)
    for number in (0, worlds - 1):
        make_world(seed, number)
    model, _ = world_models(weights, "cpu")
    check_pace(model, pace)
    spell(GIVEN, pace)
    for plan in plans:
        parse_plan(model, plan).check(model.shape())
    on_cpu = find_device(device).type == "cpu"
    step, most = (1, cores()) if on_cpu else (AT_ONCE, players())
    groups = [range(i, min(worlds, i + step)) for i in range(0, worlds, step)]
    # on a CPU a process plays all plans in a world, on a GPU one in many
    by_plan = [tuple(plans)] if on_cpu else [(plan,) for plan in plans]
    tasks = [(group, some) for group in groups for some in by_plan]
    jobs = max(1, min(jobs or most, most, len(tasks)))
    work = partial(measure, seed, pace, weights, device)
    parts = Parts() if parts is None else parts
    parts.begin("atrium-loops", model.name, model.fingerprint)

    def measured(left: Sequence[Task]) -> Iterable[Document]:
        scores = spread(work, left, jobs, torch.set_num_threads, max(1, cores() // jobs))
        return ({"scores": one} for one in scores)

    values_of: dict[str, list[Values]] = {plan: [] for plan in plans}
    for (_, some), part in zip(tasks, run_parts(parts, tasks, _name, measured), strict=True):
        for plan, scores in zip(some, part["scores"], strict=True):
            values_of[plan] += scores
        if watch is not None:
            watch(min(map(len, values_of.values())))
    rows: list[Document] = []
    for plan, values in values_of.items():
        row: Document = {"plan": str(parse_plan(model, plan)), "asked": plan}
        rows.append(row | {"model": model.name, "worlds": worlds} | combined(values))
    return document(
        "atrium-loops", rows, command, seed=seed, pace=pace, fingerprint=model.fingerprint,
        dtype=measured_dtype(device),
    )  # fmt: skip


SHOWN = ("replay_db", "return_db", "loop_db", "rot180_db", "rot360_db", "aba_db", "abca_db",
         "mirror_db", "replay_ssim", "mirror_ssim")  # fmt: skip
SHARES = ("switch_follows", "switch_stays")


def lines(document: Document) -> list[str]:
    """The measures as a reader wants them, with the worst world of the loops."""
    rows = document["rows"]
    shown = [key for key in SHOWN if key in rows[0]]
    head = [
        "plan",
        *(key.removesuffix("_db") for key in shown),
        "worst loop",
        "follows %",
        "stays %",
    ]
    cells = [
        [
            row["asked"],
            *(f"{row[key]:.{1 if key.endswith('_db') else 3}f}" for key in shown),
            f"{row['loop_db_worst']:.1f}",
            *(f"{100 * row[key]:.0f}" for key in SHARES),
        ]
        for row in rows
    ]
    footer = (
        f"{rows[0]['worlds']} unseen worlds at pace {document['pace']:g}; dB, gated: a picture "
        f"that stands still or is blurred scores nothing. follows: walls that a new prompt names "
        f"and that are drawn so; stays: walls of the old one that are still there"
    )
    return [*format_table(head, cells), footer]
