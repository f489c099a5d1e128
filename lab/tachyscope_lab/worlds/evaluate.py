"""Plans in unseen towns where a past comes back: how far from the truth, beside dense.

The regimes are Atrium's (evaluation/regimes.py), with the way around the map for its full turn: 24
steps, of which the window shows four. All towns of a regime are walked in from the same place, as
the videos of a batch take the same actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tachyscope.core.arguments import parse_plan
from tachyscope.core.opening import open as open_stream
from tachyscope.core.prefill import Part, prefill
from tachyscope.core.stream import Stream
from tachyscope.io.results import Document
from tachyscope.io.tables import format_table
from tachyscope.measure.quality import Frames, psnr
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation.batched_rollout import counted, decoded
from tachyscope_lab.evaluation.intervals import interval, mean
from tachyscope_lab.evaluation.regimes import Regime
from tachyscope_lab.evaluation.scenes import spell
from tachyscope_lab.worlds import town
from tachyscope_lab.worlds.model import frames_of, load_model

UNSEEN = 10**9  # towns' seeds begin here; training draws on a GPU, from generators of its own
SEEN = town.VIEW // town.STEP  # steps after which a frame shows nothing of what another shows
ENOUGH = 25.0  # dB that the next frame must have for a table to count
EVERY = 4  # of the judged frames, those that are made from the true past
FORCED = "next frame"  # the row of these


def _around(pace: float, about: str) -> Regime:
    """Twice around the map; of the second time what shows nothing that the ends show."""
    times, way = round(1 / pace), "d" * (town.AROUND - SEEN)
    known = "." + spell("d" * town.AROUND, pace)
    return Regime(about, known, spell(way, pace), range(SEEN * times - 1, len(way) * times), pace)


START = (50.0, 4.0)
GIVEN = "." + "d" * town.AROUND
AWAY = "ss" + "d" * town.AROUND + "w" + "a" * town.AROUND + "s" + "d" * town.AROUND + "ww"
ALL = ".wwww" + "d" * town.AROUND + "ssss" + "d" * town.AROUND
WALK = (
    "wwaaaaaaaaaasddddddddddddddwwaaaaaasss...aaaaaaa"
    "aaaawwdddddddddddddddsdddddddwwwaaaaassddddddddd"
)
REGIMES = {
    "slow": _around(0.25, "around again at a quarter of the pace"),
    "half": _around(0.5, "around again at half of the pace"),
    "long": Regime(
        "around, three times around from other heights, then the first way again",
        GIVEN + AWAY, "d" * (town.AROUND - SEEN), range(SEEN - 1, town.AROUND - SEEN),
    ),
    "short": _around(1.0, "around again"),
    "walk": Regime("frames 49 to 96 of a walk about what was seen", ALL, WALK, range(48, 96)),
}  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """A walk through a town, and the truth at every frame."""

    number: int
    moves: list[int]  # numbers of a model's letters, one a frame
    frames: Frames


def way_of(regime: Regime) -> Tensor:
    """Places [T, 2] of the window in a regime."""
    actions = town.letters(regime.given + regime.walk)
    return town.walk(torch.tensor([START]), actions[None], regime.pace)[0]


@lru_cache(maxsize=8)
def scenes_of(name: str, seed: int, count: int, device: torch.device | str) -> list[Scene]:
    """The first towns of a seed."""
    place = way_of(REGIMES[name])
    time = REGIMES[name].pace * torch.arange(len(place), device=device)
    moves, scenes = town.told(place).tolist(), []
    for number in range(count):
        generator = torch.Generator().manual_seed(UNSEEN + 1_000 * seed + number)
        towns = town.make_towns(1, generator).to(device)
        pictures = town.film(towns, place[None].to(device), time)[0]
        scenes.append(Scene(number, moves, frames_of(pictures)))
    return scenes


def open_towns(model: WanModel, plan: str, scenes: Sequence[Scene], given: int) -> Stream:
    """A stream of one video a scene that has seen the first `given` true frames."""
    moves = scenes[0].moves
    return open_stream(
        model, plan, prompt=[""] * len(scenes), seed=[scene.number for scene in scenes],
        first=[scene.frames[:given] for scene in scenes], first_actions=moves[:given],
        frames=len(moves) - given,
    )  # fmt: skip


class Task(NamedTuple):
    """A plan through a regime."""

    regime: str
    plan: str

    def __str__(self) -> str:
        return f"{self.regime}: {self.plan}"


@cache
def _model(folder: Path, device: str, dtype: str) -> WanModel:
    return load_model(folder, device, dtype)


@torch.inference_mode()
def measure(
    folder: Path, device: str, dtype: str, seed: int, count: int, task: Task
) -> dict[str, Any]:
    """dB to the truth by town, and what the plan cost: all towns are played at once."""
    model, regime = _model(folder, device, dtype), REGIMES[task.regime]
    given = len(regime.given)
    scenes = scenes_of(task.regime, seed, count, model.device)
    if task.plan == FORCED:
        return {"db": next_frames(model, scenes, regime)}
    stream = open_towns(model, task.plan, scenes, given)
    stats, made = [], []
    for move in scenes[0].moves[given:]:
        chunk = stream.generate([move])
        made.append(chunk.latents)
        stats.append(chunk.stats | {"cache_mb": chunk.stats["cache_allocated_mb"] / count})
    db = {}
    for frames, scene in zip(decoded(stream, made), scenes, strict=True):
        near = psnr(frames, scene.frames[given:])
        db[scene.number] = mean(near[i] for i in regime.judged)
    late = stats[regime.judged[0] : regime.judged[-1] + 1]
    share = sum(x["pairs"] for x in late) / sum(x["pairs_dense"] for x in late)
    cost = counted(stats, stream.session)
    stream.close()
    kept = {key: cost[key] for key in ("cache_mb", "host_mb", "frame_ms") if key in cost}
    return {"db": db} | kept | {"pairs_share": share}


def next_frames(model: WanModel, scenes: Sequence[Scene], regime: Regime) -> dict[int, float]:
    """dB by town of judged frames that are made each from the true past."""
    given, judged = len(regime.given), regime.judged[::EVERY]
    stream = open_towns(model, "dense", scenes, given)
    session, last = stream.session, given + judged[-1] + 1
    truth = torch.cat([model.encode_frames(scene.frames[given:last]) for scene in scenes])
    made = []
    for i, true in enumerate(truth.split(1, 2)):
        move = scenes[0].moves[given + i : given + i + 1]
        if i in judged:
            made.append(model.sample(session, move))
        # the true frame takes the place of the made one in now
        prefill(model, session, [Part(true, move)])
    frames = decoded(stream, made)
    stream.close()
    at = [given + i for i in judged]
    return {
        scene.number: mean(psnr(mine, scene.frames[at]))
        for mine, scene in zip(frames, scenes, strict=True)
    }


def tasks_of(plans: Sequence[str], regimes: Sequence[str]) -> list[Task]:
    """Plan by plan, so that what was measured when time is up is of all regimes."""
    every = dict.fromkeys((FORCED, "dense", *plans))
    return [Task(name, plan) for plan in every for name in regimes]


def row_of(model: WanModel, task: Task, found: Document, dense: Document) -> Document:
    """A plan's row in a regime: dB to the truth, or the difference to dense town by town."""
    values, base = found["db"], dense["db"]
    row: Document = {"model": model.name, "regime": task.regime, "plan": task.plan}
    row["past"] = list(REGIMES[task.regime].past)
    if task.plan != FORCED:
        row["text"] = str(parse_plan(model, task.plan))
    if task.plan in (FORCED, "dense"):
        row["db"], row["db_low"], row["db_high"] = interval(values.values())
    else:
        apart = [values[number] - base[number] for number in base]
        row["to_dense_db"], row["to_dense_low"], row["to_dense_high"] = interval(apart)
        row["worst_town_db"] = min(apart)
    row["worst_db"] = min(values.values())
    row |= {key: value for key, value in found.items() if key != "db"}
    return row | {"by_town": {str(number): round(x, 3) for number, x in values.items()}}


def lines(document: Document) -> list[str]:
    """The regimes as a reader wants them, a row a plan."""
    cells = []
    for row in document["rows"]:
        kind = "db" if "db" in row else "to_dense"
        sign = "" if kind == "db" else "+"
        middle = row["db" if kind == "db" else "to_dense_db"]
        worst = f"{row['worst_town_db']:+.1f}" if "worst_town_db" in row else ""
        cells.append([
            row["regime"], "{} to {}".format(*row["past"]), row["plan"], f"{middle:{sign}.2f}",
            f"{row[f'{kind}_low']:{sign}.1f} to {row[f'{kind}_high']:{sign}.1f}", worst,
            f"{row['worst_db']:.1f}", f"{100 * row.get('pairs_share', 1.0):.0f}",
        ])  # fmt: skip
    head = ["regime", "behind", "plan", "dB", "95 %", "worst town", "worst dB", "pairs %"]
    footer = (
        f"{document['towns']} unseen towns; dB to the truth: dense's and that of the next frame, "
        f"and of other plans how much more than dense's, town by town"
    )
    verdict = (
        "the table counts: the next frame has 25 dB or more in every regime"
        if document["enough"]
        else "not trained well enough: the next frame is below 25 dB, so the table does not count"
    )
    return [*format_table(head, cells), footer, verdict]
