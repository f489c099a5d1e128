"""Methods of other authors beside ours, and how both hold over 1,000 frames."""

from __future__ import annotations

from tachyscope_lab.results import Document, Results
from tachyscope_lab.tables.markdown import (
    number,
    percent,
    spread,
    spread_percent,
    table,
)

PACES = {1.0: "15 degrees a frame", 0.25: "3.75 degrees a frame"}
GROUPS = {
    "bytes": "equal GPU bytes (a window of 21 latent frames)",
    "pairs": "equal pairs read",
    "published": "as published",
}


def rivals(results: Results) -> str:
    """Every method at equal GPU bytes, at both speeds of the camera; dense below them."""
    found = results.rows("rivals", "all")
    at = {
        (row["pace"], row["name"]): row
        for row in found
        if "bytes" in row["groups"] or row["name"] == "dense"
    }
    names = [row["name"] for row in found if row["pace"] == 1 and "bytes" in row["groups"]]
    names.sort(key=lambda name: -at[1.0, name]["revisit_db"])
    rows = []
    for name in [*names, "dense"]:
        row, slow = at[1.0, name], at.get((0.25, name), {})
        rows.append([
            name, f"`{row['asked'].removeprefix('lossless ')}`", spread(row, "revisit_db"),
            number(row["revisit_db_worst"]), number(row["new_place_db"]),
            percent(row["identity_last"]), number(slow.get("revisit_db")),
            percent(slow.get("identity_last")),
        ])  # fmt: skip
    return table(
        ["method", "plan", "seen again, dB", "worst room", "new places, dB", "right at the end",
         "quarter of the pace: seen again", "at the end"],
        rows,
    )  # fmt: skip


def rivals_all(results: Results) -> str:
    """Every method: at equal bytes, at equal pairs, as published; at both speeds of the camera."""
    found = results.rows("rivals", "all")
    parts = []
    for pace, speed in PACES.items():
        for group, title in GROUPS.items():
            rows = [row for row in found if row["pace"] == pace and group in row["groups"]]
            rows.sort(key=lambda row: -row["revisit_db"])
            parts.append(f"**{title[0].upper()}{title[1:]}**, {speed}:\n\n{_methods(rows)}")
    return "\n\n".join(parts)


def _methods(rows: list[Document]) -> str:
    return table(
        ["method", "plan", "seen again, dB", "worst room", "new places, dB", "surfaces right",
         "at the end", "GPU, MB", "host, MB"],
        [
            [
                row["name"], f"`{row['asked']}`", spread(row, "revisit_db"),
                number(row["revisit_db_worst"]), number(row["new_place_db"]),
                percent(row["identity"]), percent(row["identity_last"]), number(row["cache_mb"]),
                number(row.get("host_mb"), 0),
            ]
            for row in rows
        ],
    )  # fmt: skip


def world_long(results: Results) -> str:
    """1,000 frames, three runs."""
    rows = sorted(results.rows("world-long", "frames-1000"), key=lambda row: -row["revisit_db"])
    return table(
        ["plan", "seen again, dB", "worst room", "band of three runs", "new places, dB",
         "surfaces right", "at the end", "blurred", "frozen", "pairs", "GPU, MB", "host, MB"],
        [
            [
                f"`{row['asked']}`", spread(row, "revisit_db"), number(row["revisit_db_worst"]),
                number(row["revisit_db_band"]), number(row["new_place_db"]),
                percent(row["identity"]), spread_percent(row, "identity_last"),
                percent(row["blurred"], 1), percent(row["frozen"], 1), percent(row["density"], 1),
                number(row["cache_mb"], 0), number(row.get("host_mb"), 0),
            ]
            for row in rows
        ],
    )  # fmt: skip


STRETCHES = (160, 320, 480, 640, 800, 960, 1000)


def drift(results: Results) -> str:
    """1,000 frames by stretches: dB to the truth, and the share of surfaces that are right."""
    rows = sorted(results.rows("world-long", "frames-1000"), key=lambda row: -row["revisit_db"])
    return table(
        ["plan", *(f"to {number(end, 0)}" for end in STRETCHES)],
        [
            [
                f"`{row['asked']}`",
                *(
                    f"{number(row[f'stretch_{end}_db'])}, {percent(row[f'identity_stretch_{end}'])}"
                    for end in STRETCHES
                ),
            ]
            for row in rows
        ],
    )
