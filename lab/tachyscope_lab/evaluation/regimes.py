"""Plans where a past comes back: how far each is from the truth, beside dense, regime by regime.

Every room of a regime is shown the same walk, then a plan goes on. What is judged is the distance
to the truth, so that a plan may be better than dense; rooms and noise are the same for all plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.limits import check
from tachyscope.io.machine import cores
from tachyscope.io.results import Document, Parts, document
from tachyscope.io.tables import format_table
from tachyscope.measure.quality import psnr
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.world import TURN
from tachyscope.models.registry import find_device
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation.batched_rollout import counted, decoded, open_scenes
from tachyscope_lab.evaluation.intervals import Values, interval, mean
from tachyscope_lab.evaluation.scenes import Scene, make_scene, make_world, spell
from tachyscope_lab.evaluation.world import GIVEN, WALK, measured_dtype, world_models
from tachyscope_lab.evaluation.world_rows import AT_ONCE, players
from tachyscope_lab.processes import spread
from tachyscope_lab.results import run_parts

AT_ONCE_CPU = 8  # rooms that share a CPU's passes: more gather more than its memory keeps at hand


@dataclass(frozen=True)
class Regime:
    """What is given and what is made, at a pace, and which of the made frames are judged."""

    about: str
    given: str  # a letter a frame
    walk: str
    judged: range  # of the made frames, from 0
    pace: float = 1.0
    returns: bool = False  # only rooms where the given frames end where they began

    @property
    def past(self) -> tuple[int, int]:
        """Latent frames that lie behind the first frame that is judged, and the last."""
        known = len(self.given)
        return known + self.judged[0], known + self.judged[-1]


def _turn(pace: float, about: str, frames: int) -> Regime:
    """Two turns in place; of the second what shows nothing that its first frame shows."""
    walk, times = spell(WALK, pace)[:frames], round(1 / pace)
    return Regime(about, spell(GIVEN, pace), walk, range(6 * times - 1, 18 * times), pace)


AWAY = "ww" + "q" * TURN + "ss" + "aa" + "q" * TURN + "dd" + "ss" + "q" * TURN + "ww"
REGIMES = {
    "slow": _turn(0.25, "a second turn at a quarter of the pace", 72),
    "half": _turn(0.5, "a second turn at half of the pace", 36),
    "long": Regime(
        "a turn, three turns from two steps away, then the first again", GIVEN + AWAY, "q" * 18,
        range(5, 18), returns=True,
    ),
    "short": Regime("a second turn", GIVEN, WALK[:18], range(5, 18)),
    "walk": Regime("frames 49 to 96 of a walk to new places", GIVEN, WALK[:96], range(48, 96)),
    "far": Regime(
        "frames 161 to 208 of a free walk", GIVEN, (WALK * 3)[:208], range(160, 208)
    ),
}  # fmt: skip


def rooms_of(regime: Regime, seed: int, count: int) -> list[int]:
    """The first rooms of a seed that the regime can be walked in."""
    if not regime.returns:
        return list(range(count))
    found = []
    letters = atrium.letters(regime.given)[None]
    for number in range(1000):
        pose = atrium.walk(make_world(seed, number).start, letters, regime.pace)[0]
        if float((pose[-1, :2] - pose[0, :2]).norm()) < 1e-5:
            found.append(number)
        if len(found) == count:
            break
    return found


def scenes_of(regime: Regime, seed: int, count: int, device: torch.device) -> list[Scene]:
    walk = regime.given + regime.walk
    return [
        make_scene(make_world(seed, n), walk, device, regime.pace)
        for n in rooms_of(regime, seed, count)
    ]


@torch.inference_mode()
def play_regime(
    model: WanModel, name: str, plan: str, scenes: Sequence[Scene]
) -> tuple[list[Values], Values]:
    """A plan through rooms of a regime, all at once: each room's dB to the truth, and the cost."""
    regime = REGIMES[name]
    given = len(regime.given)
    stream = open_scenes(model, plan, scenes, given)
    stats, made = [], []
    for action in regime.walk:
        chunk = stream.generate([model.actions.index(action)])
        made.append(chunk.latents)
        stats.append(chunk.stats | {"cache_mb": chunk.stats["cache_allocated_mb"] / len(scenes)})
    rooms = []
    for frames, scene in zip(decoded(stream, made), scenes, strict=True):
        near = psnr(frames, scene.frames[given:])
        rooms.append({"room": scene.world.number, "db": mean(near[i] for i in regime.judged)})
    cost = counted(stats, stream.session)
    late = stats[regime.judged[0] : regime.judged[-1] + 1]
    share = sum(x["pairs"] for x in late) / sum(x["pairs_dense"] for x in late)
    kept = {key: cost[key] for key in ("cache_mb", "host_mb", "frame_ms") if key in cost}
    return rooms, kept | {"pairs_share": share}


class Task(NamedTuple):
    """Rooms that are played together, by their place among a regime's, and by which plan."""

    regime: str
    plan: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.regime}, rooms {self.first} to {self.last - 1}: {self.plan}"


def measure(
    seed: int, worlds: int, weights: str | None, device: str, task: Task
) -> list[dict[str, Any]]:
    """What a process measures: every room's dB and the cost of its batch."""
    model, _ = world_models(weights, device)
    scenes = _scenes(task.regime, seed, worlds, model.device)[task.first : task.last]
    rooms, cost = play_regime(model, task.regime, task.plan, scenes)
    return [room | cost for room in rooms]


@lru_cache(maxsize=1)
def _scenes(name: str, seed: int, worlds: int, device: torch.device) -> list[Scene]:
    """A regime's scenes, the last ones kept: plans are played one after the other."""
    return scenes_of(REGIMES[name], seed, worlds, device)


def evaluate_regimes(
    plans: Sequence[str],
    regimes: Sequence[str] = (),
    *,
    weights: str | None = None,
    worlds: int = 16,
    device: str = "cpu",
    seed: int = 0,
    jobs: int | None = None,
    command: str = "",
    parts: Parts | None = None,
    watch: Callable[[int], None] | None = None,
) -> Document:
    """Plans in regimes, all of them unless named, beside dense: paired by room.

    weights: a world model's folder instead of the shipped one's. parts: keeps what is measured, and
    has what was before.
    """
    check("worlds", worlds)
    make_world(seed, worlds - 1)
    names = list(dict.fromkeys(regimes)) or list(REGIMES)
    for name in names:
        if name not in REGIMES:
            raise TachyscopeError(f"no regime {shown(name)}; there are: {', '.join(REGIMES)}")
    model, _ = world_models(weights, "cpu")
    plans = list(dict.fromkeys(("dense", *plans)))
    for plan in plans:
        parse_plan(model, plan).check(model.shape())
    on_cpu = find_device(device).type == "cpu"
    step = AT_ONCE_CPU if on_cpu else AT_ONCE
    tasks = [
        Task(name, plan, i, min(worlds, i + step))
        for name in names
        for plan in plans
        for i in range(0, worlds, step)
    ]
    most = cores() if on_cpu else players()
    jobs = max(1, min(jobs or most, most, len(tasks)))
    work = partial(measure, seed, worlds, weights, device)
    parts = Parts() if parts is None else parts
    parts.begin("world-regimes", model.name, model.fingerprint)

    def measured(left: Sequence[Task]) -> Iterable[Document]:
        found = spread(work, left, jobs, torch.set_num_threads, max(1, cores() // jobs))
        return ({"rooms": rooms} for rooms in found)

    rooms_by: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for done, (task, part) in enumerate(
        zip(tasks, run_parts(parts, tasks, str, measured), strict=True), 1
    ):
        rooms_by.setdefault((task.regime, task.plan), []).extend(part["rooms"])
        if watch is not None:
            watch(done)
    rows = [
        {"model": model.name, "text": str(parse_plan(model, plan))}
        | row_of(name, plan, rooms, rooms_by[name, "dense"])
        for (name, plan), rooms in rooms_by.items()
    ]
    return document(
        "world-regimes", rows, command, seed=seed, worlds=worlds, fingerprint=model.fingerprint,
        dtype=measured_dtype(device),
    )  # fmt: skip


def row_of(
    name: str, plan: str, rooms: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]]
) -> Document:
    """A plan's row in a regime: the difference to dense room by room, mean and worst."""
    values, base = ([float(x["db"]) for x in found] for found in (rooms, dense))
    past = REGIMES[name].past
    row: Document = {"regime": name, "plan": plan, "past": list(past)}
    if plan == "dense":
        row["db"], row["db_low"], row["db_high"] = interval(values)
    else:
        apart = [x - y for x, y in zip(values, base, strict=True)]
        row["to_dense_db"], row["to_dense_low"], row["to_dense_high"] = interval(apart)
        row["worst_room_db"] = min(apart)
    row["worst_db"] = min(values)
    cost = {key: mean(x[key] for x in rooms) for key in rooms[0] if key not in ("room", "db")}
    by_room = {str(x["room"]): round(x["db"], 3) for x in rooms}
    return row | cost | {"by_room": by_room}


def lines(document: Document) -> list[str]:
    """The regimes as a reader wants them, a row a plan."""
    cells = [
        [
            row["regime"], "{} to {}".format(*row["past"]), row["plan"], *_told(row),
            f"{row['worst_db']:.1f}", f"{100 * row['pairs_share']:.0f}", f"{row['cache_mb']:.0f}",
        ]
        for row in document["rows"]
    ]  # fmt: skip
    head = ["regime", "behind", "plan", "dB", "95 %", "worst room", "worst dB", "pairs %", "MB"]
    footer = (
        f"{document['worlds']} unseen rooms; dB to the truth: dense's, and of other plans how much "
        f"more, room by room. behind: latent frames of the past while judged"
    )
    return [*format_table(head, cells), footer]


def _told(row: Document) -> list[str]:
    if "db" in row:
        return [f"{row['db']:.2f}", f"{row['db_low']:.1f} to {row['db_high']:.1f}", ""]
    low, high = row["to_dense_low"], row["to_dense_high"]
    between = f"{low:+.1f} to {high:+.1f}"
    return [f"{row['to_dense_db']:+.2f}", between, f"{row['worst_room_db']:+.1f}"]
