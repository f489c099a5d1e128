"""Plans on the trained world model, and at full size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tachyscope.core.plan import Plan
from tachyscope_lab.evaluation.intervals import versus
from tachyscope_lab.results import Document, Results
from tachyscope_lab.tables.markdown import (
    number,
    paired,
    percent,
    signed,
    table,
    times,
    worst_room,
)

WINDOW = "cache=window:budget=21f"
NAMED = {  # rows of README, and what they are
    "dense": "full cache",
    "stock": "the authors' window of 21 latent frames",
    "fast": "the past in host memory, 21 latent frames on the GPU, 40 % of them read",
    "balanced": "the same with 42 on the GPU, half of them read",
    "live": "21 without duplicates, 30 % of them read; no host memory",
    "pose": "for models with camera poses: reads the ten frames with the nearest poses",
    "similar": "for others with a slow camera or late returns: reads the 14 most similar frames",
}
SAME = {  # plans of `results/` by another name
    WINDOW: "stock",
    "cache=bank:host=int8,resident=21f attention=similar text=pads": "similar",
}
VIDEO = "1880"  # frames of the longest video of which the full cache fits an H200
FRAMES = 12  # of a chunk of Wan's
# plans that were measured in other suites before they weighed the past
UNWEIGHED = ("balanced", "fast", "live")
REGIMES = {  # of world-regimes, in the order of their columns, and where a view is judged
    "short": "seen again after 36 latent frames",
    "long": "seen again after 120",
    "half": "at half the camera speed",
    "slow": "at a quarter of it",
    "walk": "new places",
    "far": "a walk of 208 frames",
}
TOWN = {  # those of the second world
    "short": "after 28 latent frames",
    "long": "after 106",
    "half": "half pace",
    "slow": "a quarter",
    "walk": "a walk",
}
IN_README = ("short", "long", "half", "slow")
NONE = "–"  # a cell that was not measured

Cells = dict[tuple[str, str], Document]  # rows of world-regimes by plan and regime


def readme_plans(results: Results) -> str:
    """Speed and memory of the named plans at full size, beside what they lose by regime."""
    found = _regimes(results)
    rows = []
    for plan, about in NAMED.items():
        memory, rate = _at_full_size(results, plan)
        label = f"**`{plan}`**" if plan in ("fast", "pose") else f"`{plan}`"
        cells = [_cell(found.get((plan, x)), brief=True) for x in IN_README]
        if cells[0] == NONE:
            cells[0] = _revisit(results, plan)
        rows.append([f"{label}: {about}", memory, rate, *cells])
    columns = ["plan", "GPU memory", "frames/s", *(REGIMES[x] for x in IN_README)]
    return table(columns, rows)


def readme_gain(results: Results) -> str:
    """In a sentence what `fast` gains over a window and over the full cache."""
    fast, stock, dense = (_at_full_size(results, plan) for plan in ("fast", "stock", "dense"))
    authors = results.by("wan-chunks", "authors", "name")["self-forcing"]
    return (
        f"On one H200 with Wan 1.3B at 480x832, `fast` makes {_rate(fast)} in {fast[0]} of GPU "
        f"memory. A window of 21 latent frames makes {_rate(stock)} in {stock[0]}, the full cache "
        f"{_rate(dense)} in {dense[0]}, Self-Forcing's own code {number(_fps(authors))}."
    )


def _rate(cells: tuple[str, str]) -> str:
    return f"{cells[1].split(' ')[0]} frames/s"


def _at_full_size(results: Results, plan: str) -> tuple[str, str]:
    """A plan's GPU memory, and frames/s beside the authors' code, if it was timed with its cache.

    A result of a plan that had another cache or way of reading says nothing about today's.
    """
    authors = results.by("wan-chunks", "authors", "name")["self-forcing"]
    peaks = results.by("wan-chunks", "all", "name") | results.by("wan-chunks", "plans", "name")
    row = peaks.get(plan)
    if row is None:
        return NONE, NONE
    if plan not in ("dense", "stock"):
        timed, named = Plan.parse(row["plan"]), Plan.parse(plan)
        if (timed.cache, timed.attention.name) != (named.cache, named.attention.name):
            return NONE, NONE
    chunk = results.by("wan-chunks", "plans-60", "name").get(plan, row)
    fps = row["rates"][VIDEO]["fps"] if plan == "dense" else _fps(chunk)
    return f"{number(row['peak_gb'])} GB", f"{number(fps)} ({times(fps / _fps(authors), 1)})"


def _fps(row: Document) -> float:
    return 1e3 * FRAMES / float(row["chunk_ms"])


def _revisit(results: Results, plan: str) -> str:
    """The first regime as the suite `world` has it, for a plan that is today what it was there."""
    quality = {SAME.get(name, name): row for name, row in results.by("world", "plans").items()}
    if plan not in quality or plan in ("dense", *UNWEIGHED):
        return NONE
    row, base = quality[plan], quality["dense"]
    mean, _, _ = versus(row, base, "revisit_db")
    return f"{signed(mean)} ({signed(worst_room(row, base, 'revisit_db'))})"


def _regimes(results: Results) -> Cells:
    """The named plans' rows of world-regimes: with intervals where there are, else a GPU's."""
    found: Cells = {}
    for entry in ("plans-h200", "plans", "similar"):
        found |= _regimes_of(results, entry)
    return found


def _regimes_of(results: Results, entry: str) -> Cells:
    """The rows of world-regimes by plan and regime; of equal ones the last."""
    rows = results.rows("world-regimes", entry)
    return {(SAME.get(str(row["plan"]), str(row["plan"])), str(row["regime"])): row for row in rows}


def _cell(row: Document | None, brief: bool = False) -> str:
    """dB to the truth: dense's own, or how much more than dense's, with the worst room."""
    if row is None:
        return NONE
    if "db" in row:
        return f"{number(row['db'])} dB"
    text = signed(row["to_dense_db"])
    if not brief and "to_dense_low" in row:
        text += f"±{number((row['to_dense_high'] - row['to_dense_low']) / 2)}"
    if (worst := row.get("worst_room_db", row.get("worst_town_db"))) is not None:
        text += f" ({signed(worst)})"
    return text


def regimes(results: Results) -> str:
    """The named plans by speed of the camera and by age of what is seen again."""
    return _by_regime(_regimes(results), REGIMES, NAMED)


def _by_regime(found: Cells, columns: Mapping[str, str], plans: Iterable[str]) -> str:
    """Plans of which there is a row, a column a regime."""
    known = {name for name, _ in found}
    rows = [
        [_code(plan), *(_cell(found.get((plan, x))) for x in columns)]
        for plan in plans
        if plan in known
    ]
    return table(["plan", *columns.values()], rows)


def second_world(results: Results) -> str:
    """Plans in the second world, by regime."""
    rows = [
        row
        for entry in ("second-world", "second-world-bounded")
        for row in results.rows("world-regimes", entry)
    ]
    found = {(row["plan"], row["regime"]): row for row in rows}
    return _by_regime(found, TOWN, dict.fromkeys(plan for plan, _ in found))


def _code(plan: str) -> str:
    """A plan as code; what is no plan stays words."""
    return plan if plan == "next frame" else f"`{plan}`"


def plans(results: Results) -> str:
    """The named plans over 96 frames, paired with the full cache room by room."""
    quality = results.by("world", "plans")
    dense = quality["dense"]
    rows = []
    for plan, row in quality.items():
        ours = row is not dense
        rows.append([
            f"`{plan}`", number(row["revisit_db"]), number(row["revisit_db_worst"]),
            paired(row, dense, "revisit_db") if ours else "",
            signed(worst_room(row, dense, "revisit_db")) if ours else "",
            paired(row, dense, "new_place_db") if ours else "",
            percent(row["identity"]), percent(row["identity_worst"]), percent(row["density"]),
        ])  # fmt: skip
    return table(
        ["plan", "seen again, dB", "worst room", "to dense", "largest loss in a room",
         "new places, to dense", "surfaces right", "worst room", "pairs read"],
        rows,
    )  # fmt: skip


def banks(results: Results) -> str:
    """How much of a bank is resident and read."""
    rows = results.rows("world", "banks")
    dense = rows[0]
    return table(
        ["plan (`lossless cache=`)", "seen again, dB", "worst room", "to dense",
         "largest loss in a room", "new places, dB", "surfaces right", "pairs", "GPU, MB",
         "host, MB", "late", "denied"],
        [
            [
                f"`{row['asked'].removeprefix('lossless cache=')}`", number(row["revisit_db"]),
                number(row["revisit_db_worst"]),
                "" if row is dense else paired(row, dense, "revisit_db"),
                "" if row is dense else signed(worst_room(row, dense, "revisit_db")),
                number(row["new_place_db"]), percent(row["identity"]), percent(row["density"]),
                number(row["cache_mb"], 0), number(row.get("host_mb"), 0),
                percent(row.get("late_share"), 2), percent(row.get("denied_share"), 1),
            ]
            for row in rows
        ],
    )  # fmt: skip


LOOPS = ("replay", "return", "rot180", "rot360", "aba", "abca", "mirror")


def loops(results: Results) -> str:
    """Walks that come back, in dB with the worst room."""
    return table(
        ["plan", *LOOPS, "follows a new prompt"],
        [
            [
                f"`{row['asked']}`",
                *(f"{number(row[f'{x}_db'])} ({number(row[f'{x}_db_worst'])})" for x in LOOPS),
                percent(row["switch_follows"]),
            ]
            for row in results.rows("loops", "plans")
        ],
    )  # fmt: skip


def rounding(results: Results) -> str:
    """How far the batch size alone moves a room."""
    return table(
        ["plan", "type", "batch sizes", "most in a room, dB", "means apart, dB"],
        [
            [
                f"`{row['plan']}`", row["dtype"], ", ".join(row["revisit_db"]),
                f"{row['most_apart_db']:.2g}", f"{row['means_apart_db']:.2g}",
            ]
            for name in results.entries("rounding")
            for row in results.rows("rounding", name)
        ],
    )  # fmt: skip
