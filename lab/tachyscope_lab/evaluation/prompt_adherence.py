"""Whether a world model draws what its prompt names, the first time that it comes into view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tachyscope.core.limits import check
from tachyscope.io.results import Document, Parts, document
from tachyscope.io.tables import format_table
from tachyscope.models.atrium.world import SIDES, TURN
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation.batched_rollout import play
from tachyscope_lab.evaluation.frame_checks import named_walls
from tachyscope_lab.evaluation.intervals import Values, combined, mean
from tachyscope_lab.evaluation.scenes import make_scene, make_world
from tachyscope_lab.evaluation.world import measured_dtype, world_models
from tachyscope_lab.results import run_parts

AT_ONCE = {"cpu": 1, "cuda": 64}  # worlds that share passes


def evaluate_views(
    *,
    worlds: int = 200,
    device: str = "cpu",
    seed: int = 0,
    command: str = "",
    parts: Parts | None = None,
    watch: Callable[[int], None] | None = None,
) -> Document:
    """A full turn from one given frame, in a room where nothing moves; a document with `views`.

    `right` is the mean over worlds of the share of named walls that come out as named, `right_left`
    and so on that of walls on one side. It needs many worlds: each has one to three such walls.
    parts: keeps what is measured, and has what was before.
    """
    check("worlds", worlds)
    model, _ = world_models(None, device)
    step = AT_ONCE[model.device.type]
    parts = Parts() if parts is None else parts
    parts.begin("atrium-views", model.name, model.fingerprint)
    starts = range(0, worlds, step)

    def measured(left: Sequence[int]) -> Iterator[Document]:
        for start in left:
            numbers = range(start, min(worlds, start + step))
            yield {"views": _views(model, seed, numbers)}

    rows: list[Values] = []
    for part in run_parts(parts, starts, "worlds from {}".format, measured):
        rows += part["views"]
        if watch is not None:
            watch(len(rows))
    return document(
        "atrium-views", [], command, model=model.name, seed=seed, worlds=worlds,
        dtype=measured_dtype(device), views=combined(rows),
    )  # fmt: skip


def _views(model: WanModel, seed: int, numbers: Sequence[int]) -> list[Values]:
    """Named walls of each world that came out right, at their first good view."""
    scenes = [
        make_scene(make_world(seed, n, motion=0.0), "." + "q" * TURN, model.device) for n in numbers
    ]
    rows = []
    for scene, take in zip(scenes, play(model, "dense", scenes, 1), strict=True):
        walls = named_walls(take.frames, scene, range(1, TURN + 1))
        values = {"right": mean(right for _, right in walls)}
        for side in SIDES[1:]:
            values[f"right_{side}"] = mean(right for of, right in walls if of == side)
        rows.append(values)
    return rows


def lines(document: Document) -> list[str]:
    """The shares as a reader wants them."""
    views = document["views"]
    rows = []
    for key in ("right", *(f"right_{side}" for side in SIDES[1:])):
        values = [x for x in views["by_world"][key] if x == x]
        low, high = views[f"{key}_low"], views[f"{key}_high"]
        rows.append([key, f"{views[key]:.1%}", f"{low:.1%} to {high:.1%}", str(len(values))])
    return format_table(["named walls", "share", "95 % interval", "worlds"], rows)
