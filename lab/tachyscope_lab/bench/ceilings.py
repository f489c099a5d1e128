"""What replay can save at most, by a trunk's shape and context: from bytes that a token reads.

python -m tachyscope_lab.bench.ceilings prints a table.
"""

from __future__ import annotations

from dataclasses import dataclass

RANK = 256  # of the map that stands in for neurons
# a weight's bytes: int4 has a scale and an offset of two bytes for every 128
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 128}
ENTRY_BYTES = 2
CONTEXTS = (1024, 4096, 16384, 65536)
WINDOW = 260  # entries that a window of 256 and a sink of 4 read


@dataclass(frozen=True, slots=True)
class Trunk:
    """The sizes of one layer of a trunk whose layers are alike."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


TRUNKS = {
    "VILA-U 7B": Trunk(4096, 11008, 32, 32, 128),
    "Emu3 8B, Cosmos 4B": Trunk(4096, 14336, 32, 8, 128),
    "Cosmos 12B": Trunk(5120, 14336, 32, 8, 128),
    "LLaMA 3.2 1B": Trunk(2048, 8192, 32, 8, 64),
}


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a token reads in a layer."""

    projections: float
    mlp: float
    entries: float

    @property
    def total(self) -> float:
        return self.projections + self.mlp + self.entries


def bytes_of(trunk: Trunk, entries: int, weights: str = "bf16", neurons: float = 1.0) -> Bytes:
    """With so many entries; `neurons` is the share computed, below 1 with a map beside it."""
    each = WEIGHT_BYTES[weights]
    rows = 2 * (trunk.heads + trunk.kv_heads) * trunk.head_dim
    mlp = 3 * neurons * trunk.intermediate * trunk.hidden
    if 0 < neurons < 1:
        mlp += 2 * RANK * trunk.hidden
    held = 2 * trunk.kv_heads * trunk.head_dim * ENTRY_BYTES
    return Bytes(each * rows * trunk.hidden, each * mlp, float(entries * held))


def ceiling(
    trunk: Trunk, entries: int, weights: str = "bf16", neurons: float = 0.0, window: bool = False
) -> float:
    """How many times faster a token is than dense, where memory's rate alone counts.

    `neurons` is the share of every MLP that is computed: 0 where its output is replayed.
    """
    read = min(entries, WINDOW) if window else entries
    dense = bytes_of(trunk, entries, weights)
    return dense.total / bytes_of(trunk, read, weights, neurons).total


def over_video(momentary: float, frames: int = 8) -> float:
    """Over a video whose first frame is computed whole."""
    return frames / (1 + (frames - 1) / momentary)


def ceiling_lines() -> list[str]:
    """A table in Markdown."""
    columns = [
        "trunk", "entries", "MLP share", "int8", "int4", "all replayed", "8 frames", "int4",
        "with a window", "neurons 75 %", "8 frames",
    ]  # fmt: skip
    rows = []
    for name, trunk in TRUNKS.items():
        for entries in CONTEXTS:
            share = [
                f"{100 * size.mlp / size.total:.0f} %"
                for size in (bytes_of(trunk, entries, kind) for kind in WEIGHT_BYTES)
            ]
            every, part = ceiling(trunk, entries), ceiling(trunk, entries, neurons=0.25)
            times = [
                every, over_video(every), ceiling(trunk, entries, "int4"),
                ceiling(trunk, entries, window=True), part, over_video(part),
            ]  # fmt: skip
            rows.append([name, f"{entries:,}", *share, *(f"{x:.2f}" for x in times)])
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    print(*ceiling_lines(), sep="\n")
