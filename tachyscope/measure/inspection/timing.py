"""Shares of time and of counted work, from rows that `Timing` timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tachyscope.core.types import Shape
from tachyscope.io.results import Document

PARTS = ("mlp", "attention", "prompt", "rest")  # of the time and of the counted work
SPANS = {"mlp": "mlp_ms", "attention": "attend_ms", "prompt": "cross_ms"}  # by Timing

Rows = Sequence[Mapping[str, float]]  # of the meter, one a chunk


def times(timed: Sequence[Rows], known: int, shape: Shape) -> list[Document]:
    """A row for each chunk, from its fastest round, which other work disturbed least."""
    rows = []
    for i, rounds in enumerate(zip(*timed, strict=True)):
        row = min(rounds, key=lambda row: row["chunk_ms"])
        spot = {"frame": known + i * shape.chunk, "context": row["pairs_dense"] / row["queries"]}
        rows.append(spot | {"chunk_ms": row["chunk_ms"]} | _shares(row, shape))
    return rows


def overall(timed: Sequence[Rows], shape: Shape) -> Document:
    """Shares over all rounds, with the range of the time's shares between rounds."""
    sums = [{key: sum(row[key] for row in rows) for key in rows[0]} for rows in timed]
    total = {key: sum(row[key] for row in sums) for key in sums[0]}
    shares = {"chunk_ms": total["chunk_ms"] / len(timed)} | _shares(total, shape)
    by_round = [_shares(row, shape) for row in sums]
    for part in PARTS:
        values = [row[f"time_{part}"] for row in by_round]
        shares |= {f"time_{part}_low": min(values), f"time_{part}_high": max(values)}
    return shares


def _shares(row: Mapping[str, float], shape: Shape) -> dict[str, float]:
    """The shares of MLPs, attention and the prompt's attention in time and in counted work.

    The rest is projections, norms, heads and samplers, and what policies themselves compute.
    """
    time = {part: row.get(span, 0.0) for part, span in SPANS.items()}
    pair = 2 * shape.head_dim
    work = {
        "mlp": row["mlp_macs"],
        "attention": pair * row["pairs"],
        "prompt": pair * row.get("text_pairs", 0.0),
    }
    time["rest"] = row["chunk_ms"] - sum(time.values())
    work["rest"] = row["macs"] - sum(work.values())
    shares = {f"time_{part}": value / row["chunk_ms"] for part, value in time.items()}
    return shares | {f"work_{part}": value / row["macs"] for part, value in work.items()}
