"""Which `past_weight` suits a model: how similar what it shows again is to what it showed first.

A model with actions walks somewhere and back; one without continues its prompt. No ground truth is
needed: a video's second look at a place is compared with its own first look.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Unpack

import numpy as np

from tachyscope.core.arguments import check_model, check_whole, parse_actions, parse_plan
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.plan import Plan
from tachyscope.core.policy import settings
from tachyscope.core.request import VideoOptions
from tachyscope.core.rollout import rollout
from tachyscope.core.types import Chunk
from tachyscope.io.results import Document, document
from tachyscope.io.tables import format_table
from tachyscope.measure.metrics.lpips import SHORTEST_SIDE, Lpips
from tachyscope.measure.metrics.weights import LPIPS, has_weights
from tachyscope.measure.quality import Frames, motion, psnr
from tachyscope.measure.take import Watch
from tachyscope.models.base import VideoModel

WEIGHTS = (1.0, 2.0, 4.0, 8.0)
SEEDS = 3  # rollouts of each weight: every seed must gain
BACK = dict(zip(".wsadqe", ".swdaeq", strict=True))  # what undoes an action
LEAST_MOTION = 0.8  # of weight 1's: a frozen video repeats itself perfectly
FEWEST = 8  # frames
LOOKS = 8  # first frames that a later one is compared with if none shows the same place


class Look(NamedTuple):
    """A frame of the second look, and the frames of the first look that it is compared with."""

    again: int
    first: tuple[int, ...]


def sweep_past(
    model: VideoModel,
    plan: Plan | str = "fast",
    *,
    frames: int,
    command: str = "",
    watch: Watch | None = None,
    **options: Unpack[VideoOptions],
) -> Document:
    """Make videos by a plan with several values of `past_weight`, and say which value to take.

    In a model with actions the first half of the frames follows them (a turn by default) and the
    second half is the same way back; the last half of the way back is compared with the frames of
    the way out at the same places. In other models the last third is compared with the most similar
    frames of the first third. The distance is LPIPS if its weights are installed and frames are
    large enough, otherwise PSNR. Three seeds, from `seed` on. The best weight is one that is nearer
    than 1 with every seed and has as much motion.
    """
    check_model(model)
    if check_whole("frames", frames) < FEWEST:
        raise TachyscopeError(f"a sweep needs {FEWEST} frames or more, got {frames}: raise frames")
    seed = options.pop("seed", 0)
    if not isinstance(seed, int):
        raise TachyscopeError("a sweep takes one seed and draws the next ones itself: give one")
    actions, looks = _walk(model, options.pop("actions", ""), frames)
    plans = _plans(model, plan)
    lpips: Lpips | None = None
    rows: list[Document] = []
    for name, weight, one in plans:
        near, moved = list[float](), list[float]()
        for number in range(seed, seed + SEEDS):
            video_options: VideoOptions = {**options, "actions": actions, "seed": number}
            made = rollout(model, one, frames=frames, **video_options)
            video = _frames(made, f"{name}, seed {number}", watch)
            if not rows and not near and _has_lpips(video):
                lpips = Lpips.load(device=model.device)
            near.append(_apart(video, looks, lpips))
            moved.append(float(motion(video).mean()))
        row: Document = {"name": name, "plan": str(one), "model": model.name}
        row |= {"past_weight": weight, "apart": statistics.mean(near), "by_seed": near}
        rows.append(row | {"motion": statistics.mean(moved)})
    judge = "psnr" if lpips is None else "lpips"
    return document(
        "sweep-past", rows, command, judge=judge, seed=seed, frames=frames,
        walk="back" if actions else "on", lead=_lead(rows, judge),
    )  # fmt: skip


def _walk(model: VideoModel, given: object, frames: int) -> tuple[list[int], list[Look]]:
    """The actions there and back, none for a model without actions, and the frames to compare."""
    if not model.actions:
        third = frames // 3
        first = tuple(np.linspace(0, third - 1, min(LOOKS, third)).round().astype(int).tolist())
        return [], [Look(i, first) for i in range(frames - third, frames)]
    out = frames // 2
    letters = model.actions
    if not given:
        if "q" not in letters:
            raise TachyscopeError(
                f"a sweep walks a way and back, and this model's actions are {letters!r}: give "
                f"`actions` of {''.join(BACK)!r}"
            )
        given = f"q*{out}"
    moves = parse_actions(given, letters, frames)  # type: ignore[arg-type]
    if any(moves[out:]):
        raise TachyscopeError(
            f"a sweep of {frames} frames has {out} for `actions` and {out} for the way back, got "
            f"more actions: raise `frames` or shorten the actions"
        )
    moves = moves[:out]
    for letter in {letters[move] for move in moves}:
        if BACK.get(letter, "") not in letters or letter not in BACK:
            raise TachyscopeError(
                f"a sweep walks a way and back, and nothing undoes action {shown(letter)}: use "
                f"actions of {''.join(BACK)!r}"
            )
    back = [letters.index(BACK[letters[move]]) for move in reversed(moves)]
    # k steps back from the end is the place k steps before it
    looks = [Look(out - 1 + k, (out - 1 - k,)) for k in range((out + 1) // 2, out)]
    return [*moves, *back], looks


def about(model: VideoModel, plan: Plan | str, frames: int) -> str:
    """How many videos a sweep makes, what each shows, and which of its frames are judged."""
    settings = len(_plans(model, plan))
    videos = f"{settings * SEEDS} videos: {settings} settings with {SEEDS} seeds each"
    if not model.actions:
        third = frames // 3
        return (
            f"{videos}, of {frames} frames, whose last {third} are compared with the first {third}"
        )
    out = frames // 2
    return (
        f"{videos}, of {out} frames along the actions and {out} the same way back, of which the "
        f"last {out // 2} are compared with those of the way out"
    )


def _plans(model: VideoModel, plan: Plan | str) -> list[tuple[str, float, Plan]]:
    """The plan with each weight, and the plan `pose` if the model knows poses."""
    shape, base = model.shape(), parse_plan(model, plan)
    if "past_weight" not in settings(type(base.attention)):
        raise TachyscopeError(
            f"attention={base.attention} has no past_weight to sweep: use dense, ann or window"
        )
    found = [(f"past_weight={x:g}", x, _weighed(base, x)) for x in WEIGHTS]
    if shape.poses and base.attention.name != "pose":
        by_pose = parse_plan(model, "pose")
        weight = by_pose.attention.past_weight or 1.0
        found.append((f"plan pose, {weight:g}", weight, by_pose))
    for _, _, one in found:
        one.check(shape)
    return found


def _weighed(plan: Plan, weight: float) -> Plan:
    return replace(plan, attention=replace(plan.attention, past_weight=weight))  # type: ignore[type-var]


def _frames(made: Iterable[Chunk], name: str, watch: Watch | None) -> Frames:
    parts = []
    for chunk in made:
        parts.append(chunk.frames)
        if watch is not None:
            watch(name, chunk)
    return np.concatenate(parts)


def _has_lpips(video: Frames) -> bool:
    return has_weights(LPIPS) and min(video.shape[1:3]) >= SHORTEST_SIDE


def _apart(video: Frames, looks: Sequence[Look], lpips: Lpips | None) -> float:
    """Mean distance of second looks to the nearest first one: LPIPS, or PSNR in dB."""
    values = []
    for look in looks:
        again = np.repeat(video[look.again : look.again + 1], len(look.first), 0)
        first = video[list(look.first)]
        values.append(
            float(psnr(again, first).max() if lpips is None else lpips(again, first).min())
        )
    return statistics.mean(values)


def _gain(row: Document, judge: str) -> list[float]:
    sign = -1 if judge == "lpips" else 1
    return [sign * x for x in row["by_seed"]]


def _lead(rows: Sequence[Document], judge: str) -> str:
    """A sentence: which weight to take, or that none gains."""
    base, unit = rows[0], "LPIPS" if judge == "lpips" else "PSNR"

    def better(row: Document) -> bool:
        pairs = zip(_gain(row, judge), _gain(base, judge), strict=True)
        return all(a > b for a, b in pairs) and row["motion"] >= LEAST_MOTION * base["motion"]

    good = [row for row in rows[1:] if better(row)]
    before = _written(base["apart"], judge)
    if not good:
        return (
            f"No gain is seen: no weight is nearer than 1 ({unit} {before}) in each of "
            f"{len(base['by_seed'])} seeds and moves as much; leave past_weight at 1."
        )
    best = max(good, key=lambda row: statistics.mean(_gain(row, judge)))
    after, seeds = _written(best["apart"], judge), len(base["by_seed"])
    return f"Take {best['name']}: {unit} {before} to {after}, better in each of {seeds} seeds."


def _written(value: float, judge: str) -> str:
    return f"{value:.3f}" if judge == "lpips" else f"{value:.1f} dB"


def lines(results: Document) -> list[str]:
    """A sweep as a table, with its advice."""
    judge = results["judge"]
    cells = [
        [
            row["name"], _written(row["apart"], judge),
            " ".join(_written(x, judge) for x in row["by_seed"]), f"{row['motion']:.2f}",
        ]
        for row in results["rows"]
    ]  # fmt: skip
    name = "LPIPS to the first look" if judge == "lpips" else "PSNR to the first look"
    return [*format_table(["weight", name, "by seed", "motion"], cells), str(results["lead"])]
