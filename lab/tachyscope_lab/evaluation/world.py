"""A world model against the truth of unseen worlds, and what each plan costs it there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import takewhile
from typing import Any

import torch

from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError
from tachyscope.io.results import Document
from tachyscope.measure.quality import Frames, psnr
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.world import TURN
from tachyscope.models.registry import find_device, load
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation.batched_rollout import Forced, Take, play, teacher_forced
from tachyscope_lab.evaluation.frame_checks import pose_errors, prompt_right
from tachyscope_lab.evaluation.intervals import Values, mean
from tachyscope_lab.evaluation.judges import EVERY, far_frames, judge, judge_forced, revisit_own
from tachyscope_lab.evaluation.scenes import Scene, frames_a_step, make_scene, make_world, spell

GIVEN = "." + "q" * TURN  # all of the room is shown before anything is made
# The same turn again, from the same place, where a frame can be copied; then, from places where
# the walker never stood, what was seen before must be drawn anew. Longer walks repeat it.
WALK = "q" * 24 + "wwaa" + "e" * 20 + "dddd" + "q" * 20 + "ssss" + "e" * 20 + "wwddssaa"
QUICK_WALK = "q" * 18 + "wwaa" + "e" * 4
OWN_WALK = "q" * (TURN + 12)  # from one given frame: the second turn must repeat the first
WINDOW = "cache=window:budget=13f"  # shorter than the turn
PROBED = (12, 24, 48, 96, 104)  # made frames at which recall is sampled; 104: 128 are before it
PARTED_DB = 30.0  # two dense runs whose frame is below it have parted: an RMS error of 8 levels
TRUSTED = 24  # made frames over which closeness to dense is told; the floor says if rightly
SETTLED = 100  # frames, given ones too, after which a bounded plan's work must be the same
BANDS = ("revisit_db", "new_place_db", "psnr_truth", "identity")  # most less least of the runs
FLOOR_WORLDS, FLOOR_WORLDS_QUICK = 8, 1  # a second dense run, in a slower dtype on CPUs

Watch = Callable[[int], None]


@dataclass(frozen=True)
class Request:
    """What an evaluation measures; small enough to be sent to another process."""

    plans: tuple[str, ...]
    seed: int = 0
    frames: int = 48
    quick: bool = False
    recall: bool = True
    world: bool = True  # the model's own measures
    own: bool = False  # every plan's revisit of what the model itself made up
    pace: float = 1.0  # of a step that a frame takes
    runs: int = 1  # of every plan, each with noise of its own

    @property
    def given(self) -> str:
        return spell(GIVEN, self.pace)

    @property
    def walk(self) -> str:
        if self.quick:
            return spell(QUICK_WALK, self.pace)
        walk = spell(WALK, self.pace)
        return (walk * (self.frames // len(walk) + 1))[: self.frames]

    @property
    def coarser(self) -> int:
        return 2 if self.quick else 1


@dataclass(frozen=True)
class Played:
    """All that was made of one world, to be judged by any process."""

    scene: Scene
    takes: tuple[Take, ...]  # a plan each
    again: tuple[tuple[Frames, ...], ...] = ()  # of each further run, a plan each
    dense: Take | None = None
    floor: Frames | None = None  # dense in another dtype
    window: Frames | None = None
    forced: Forced | None = None
    still: Scene | None = None  # where nothing moves on its own
    own: Take | None = None  # dense there, after one given frame
    own_window: Take | None = None
    owns: tuple[Take, ...] = ()  # a plan each


@lru_cache(maxsize=2)  # two paces
def scenes_of(
    seed: int, numbers: Sequence[int], walk: str, device: torch.device, pace: float
) -> list[Scene]:
    """Scenes of the same walk; the last ones are kept, with what was worked out of their truth."""
    return [make_scene(make_world(seed, n), walk, device, pace) for n in numbers]


def play_worlds(
    model: WanModel, request: Request, numbers: Sequence[int], twin: WanModel | None = None
) -> list[Played]:
    """Every rollout that is asked for, of several worlds at once."""
    given, device, pace = len(request.given), model.device, request.pace
    walk = request.given + request.walk
    scenes = scenes_of(request.seed, tuple(numbers), walk, device, pace)
    probed = [i for i in PROBED if i <= request.frames] if request.recall else []
    played: list[dict[str, Any]] = [{"scene": scene} for scene in scenes]

    def keep(name: str, values: Sequence[Any], rows: Sequence[int] | None = None) -> None:
        for row, value in zip(rows or range(len(played)), values, strict=True):
            played[row][name] = value

    dense, count = list[Take](), len(scenes)
    if request.world or "dense" in request.plans:
        runs = request.runs if "dense" in request.plans else 1
        dense = play(model, "dense", scenes, given, runs=runs)
        keep("dense", dense[:count])
    most = FLOOR_WORLDS_QUICK if request.quick else FLOOR_WORLDS
    rows = [i for i, n in enumerate(numbers) if n < most]
    if twin is not None and dense and rows:
        floors = play(twin, "dense", [scenes[i] for i in rows], given)
        keep("floor", [take.frames for take in floors], rows)

    def take(plan: str) -> list[Take]:
        # recall cannot follow entries that lie in host memory, or are averaged
        followed = probed if parse_plan(model, plan).cache.traceable else []
        return play(model, plan, scenes, given, followed, request.runs)

    takes = [dense if plan == "dense" else take(plan) for plan in request.plans]
    for row in range(count):
        played[row]["takes"] = tuple(plan[row] for plan in takes)
        played[row]["again"] = tuple(
            tuple(plan[row + run * count].frames for plan in takes)
            for run in range(1, request.runs)
        )
    if request.world or request.own:
        # nothing moves on its own, so that the second turn should equal the first
        walk = "." + spell(OWN_WALK[: TURN + 7 if request.quick else None], pace)
        worlds = [make_world(request.seed, n, motion=0.0) for n in numbers]
        still = [make_scene(world, walk, device, pace) for world in worlds]
        keep("still", still)
    if request.world:
        last = given + far_frames(pace)[-1]
        short = [replace(s, actions=s.actions[:last], frames=s.frames[:last]) for s in scenes]
        keep("window", [take.frames for take in play(model, WINDOW, short, given)])
        made = range(given, given + min(48, len(request.walk)), EVERY["teacher"] * request.coarser)
        keep("forced", teacher_forced(model, scenes, given, made))
        keep("own", play(model, "dense", still, 1))
        if not request.quick:
            keep("own_window", play(model, WINDOW, still, 1))
    if request.own:
        owns = [play(model, plan, still, 1) for plan in request.plans]
        keep("owns", list(zip(*owns, strict=True)))
    return [Played(**parts) for parts in played]


def judge_world(request: Request, played: Played) -> Document:
    """All that is measured on one world: `world`, the model's own values, and one row a plan."""
    given, scene, dense = len(request.given), played.scene, played.dense
    rows: list[Values] = []
    for i, (plan, take) in enumerate(zip(request.plans, played.takes, strict=True)):
        values = [judge(x, scene, given) for x in (take.frames, *(run[i] for run in played.again))]
        row = {key: mean(each[key] for each in values) for key in values[0]} | take.cost
        if len(values) > 1:
            row |= {f"{key}_band": _spread(each[key] for each in values) for key in BANDS}
        if late := take.work[max(0, SETTLED - given) :]:
            row["work_spread"] = max(late) / min(late)
        if dense is not None:
            row |= to_dense(take, dense)
        if plan == "dense" and request.recall:
            row |= {"recall": 1.0, "recall_p5": 1.0, "recall_end": 1.0}
        if played.owns:
            row["revisit_own_db"] = revisit_own(played.owns[i], request.pace)
        rows.append(row)
    own: Values = {}
    if dense is not None and played.floor is not None:
        near = psnr(played.floor, dense.frames)
        own |= {"horizon": float(horizon(near)), "floor_db": mean(near[:TRUSTED])}
    if request.world:
        own |= judge_model(request, played)
    return {"world": own, "rows": rows}


def horizon(psnrs: Iterable[float]) -> int:
    """Frames before two dense runs part; from there on closeness to one says nothing."""
    return len(list(takewhile(lambda value: value >= PARTED_DB, psnrs)))


def to_dense(take: Take, dense: Take) -> Values:
    """How near a rollout's first frames are to dense's, and its work as a share of dense's."""
    near = psnr(take.frames[:TRUSTED], dense.frames[:TRUSTED])
    return {"psnr_dense": mean(near), "work_dense": sum(take.work) / sum(dense.work)}


def _spread(values: Iterable[float]) -> float:
    listed = list(values)
    return max(listed) - min(listed)


def judge_model(request: Request, played: Played) -> Values:
    """The model's own measures, those of its dense rollout among them."""
    given, scene, forced = len(request.given), played.scene, played.forced
    assert played.dense and forced and played.own and played.still and played.window is not None
    frames = played.dense.frames
    out = judge(frames, scene, given)
    step = EVERY["pose"] * request.coarser
    looked = list(range(step - 1, min(len(frames), 48), step))
    errors = pose_errors(frames[looked], scene, [given + i for i in looked])
    out["pose_error"], out["heading_error"] = errors
    # what the search for a pose finds on true frames is its own error
    at = forced.index[:4]
    out["pose_floor"], out["heading_floor"] = pose_errors(scene.frames[list(at)], scene, at)
    out |= judge_forced(forced, scene, given)
    far = [i - 1 for i in far_frames(request.pace)]
    out["revisit_window_db"] = mean(psnr(played.window[far], scene.frames[given:][far]))
    out["revisit_own_db"] = revisit_own(played.own, request.pace)
    if played.own_window is not None:
        out["revisit_own_window_db"] = revisit_own(played.own_window, request.pace)
    turn = TURN * frames_a_step(request.pace)
    out["prompt_right"] = prompt_right(played.own.frames[:turn], played.still, range(1, turn + 1))
    return out


def measured_dtype(device: str) -> str:
    """On a GPU bfloat16, which its kernels are for and users run; on a CPU float32."""
    return "float32" if find_device(device).type == "cpu" else "bfloat16"


@cache
def world_models(
    weights: str | None, device: str, twin: bool = False
) -> tuple[WanModel, WanModel | None]:
    """A process's models: that which is measured, and where asked for its twin in the other dtype.

    weights: a world model's folder instead of the shipped one's.
    """
    name = "atrium-world" if weights is None else "wan_causal"
    dtype = measured_dtype(device)
    model = load(name, weights, device=device, dtype=dtype)
    if model.device.type != "cpu":
        model.compile()  # a third of the launches, which is what takes the time
    fault = (
        f"{model.name} is no world model of Atrium, whose actions are {atrium.ACTIONS!r}: "
        f"evaluate atrium-world"
    )
    if model.actions != atrium.ACTIONS:
        raise TachyscopeError(fault)
    narrow = partial(WanModel.narrow, fault=fault)
    if not twin:
        return narrow(model), None
    other = "bfloat16" if dtype == "float32" else "float32"
    return narrow(model), narrow(load(name, weights, device=device, dtype=other))
