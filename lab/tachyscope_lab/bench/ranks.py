"""What several GPUs would make of one stream: predicted from a chunk's parts on one GPU.

Tokens and heads are shared, so every part of a chunk is divided, and what travels is added: each
rank sends its tokens' q, k and v of other ranks' heads, and gets the outputs back. Nothing of it
was measured on several GPUs. Left out: kernels that are less efficient with fewer tokens or heads,
what host and launches take, and waiting for the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape
from tachyscope.io.results import Document, document
from tachyscope.io.tables import Column, table
from tachyscope.memory.predict import sized

LINK = 55.4  # GB/s of a copy over PCIe, measured from page-locked host memory to an H200
FRAMES = 12  # pixel frames of a chunk of three latent ones


def sent(shape: Shape, ranks: int, width: int = 2) -> tuple[int, int]:
    """Bytes that a rank sends for a chunk, and in how many exchanges; `width` bytes a number."""
    tokens = shape.chunk * shape.tokens_per_frame // ranks
    there = shape.heads * shape.head_dim * tokens * (ranks - 1) // ranks * width
    # q, k, v go in every layer and pass; outputs come but in the clean pass's last layer
    ways, back = shape.layers * shape.passes, shape.layers * shape.passes - 1
    return there * (3 * ways + back), ways + back


def predict_ranks(
    measured: Mapping[str, Any], ranks: Sequence[int] = (1, 2, 4), link: float = LINK,
    command: str = "",
) -> Document:  # fmt: skip
    """A prediction of each plan of `bench wan`, a row a plan and number of GPUs."""
    model = sized("wan_1.3b")
    # of a suite the entry of named plans
    entries = [one for one in measured.get("entries", ()) if one.get("name") == "plans"]
    known = (entries[0] if entries else measured).get("rows", ())
    if not known or not all("parts_ms" in row for row in known):
        raise TachyscopeError(
            "several GPUs are predicted from a chunk's parts, which this file lacks: give a "
            "document of `tachyscope-lab bench wan`, or results/wan-chunks.json"
        )
    rows = []
    for row in known:
        for count in ranks:
            size, exchanges = sent(model.shape(), count)
            travels = size / link / 1e6 if count > 1 else 0.0
            chunk = row["chunk_ms"] / count + travels
            rows.append(
                {
                    "name": row["name"], "gpus": count, "predicted": count > 1,
                    "sent_mb": size / 1e6 if count > 1 else 0.0, "exchanges": exchanges,
                    "travels_ms": travels, "chunk_ms": chunk, "fps": 1e3 * FRAMES / chunk,
                    "ratio": row["chunk_ms"] / chunk,
                }
            )  # fmt: skip
    return document("ranks", rows, command)


def lines(results: Document) -> list[str]:
    """The document as a reader wants it."""
    columns = [
        Column("plan", "name"),
        Column("GPUs", "gpus", "d"),
        Column("sent, MB a chunk", "sent_mb", ".0f"),
        Column("of it ms", "travels_ms", ".1f"),
        Column("ms a chunk", "chunk_ms", ".1f"),
        Column("frames/s", "fps", ".1f"),
        Column("to one GPU", "ratio", ".2f", "x"),
        Column("", lambda row: "predicted" if row["predicted"] else "measured"),
    ]
    return table(columns, results["rows"])
