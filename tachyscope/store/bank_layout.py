"""How a bank is cut up, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tachyscope.core.types import Shape
from tachyscope.kernels.block_index import LOWEST
from tachyscope.store.host_memory import host_empty

if TYPE_CHECKING:
    from tachyscope.store.bank import BlockBank

# what host memory holds a channel as
HOST = {"native": None, "int8": torch.int8, "int4": torch.uint8}
UNUSED = 2.0  # over any cosine: a block that was never written is the first to be taken
GIVEN = 3.0  # what was given counts as so much less alike than anything drawn: it leaves last
# one block in so many, the newest, stay whatever they are like: a model goes on from them
NEWEST = 4
COUNTERS = ("blocks_wanted", "blocks_late", "blocks_denied", "blocks_fetched")
# what tensors begin as where that is not 0
START = {"weight": LOWEST, "place": -1, "block": -1, "wanted": -1.0, "alike": UNUSED, "norm": 1.0}


@dataclass(frozen=True)
class BankLayout:
    """How a layer's slots and its bank are cut up, in blocks but for `newest`."""

    block: int  # entries
    sink: int  # the first entries, always resident
    places: int  # what is resident beside
    newest: int  # entries that are not sealed yet, always resident
    most: int  # what the bank holds
    tile: int  # queries that read the same blocks
    order_bits: (
        int  # signs by which entries are ordered before they are cut into blocks; 0: by time
    )
    code: int  # numbers of a block's code
    code_dtype: torch.dtype
    whole: bool  # whether every block is full
    bank: type[BlockBank]
    log_weight: float = 0.0  # of sealed entries, added to their scores
    coded: bool = False  # whether what stands in places are float8 codes (`store/coded_bank.py`)

    @cached_property
    def open(self) -> int:
        """Blocks that the newest entries fill."""
        return -(-self.newest // self.block)

    @cached_property
    def first(self) -> int:
        """The slot of the first place."""
        return self.sink * self.block

    @cached_property
    def room(self) -> int:
        """Slots of a full past."""
        return (self.sink + self.places) * self.block + self.newest

    def resident(self, past: int) -> int:
        """Blocks that stand in places when the past takes so many slots."""
        return max(0, past - self.sink * self.block - self.newest) // self.block

    def sealed(self, past: int) -> slice:
        """The slots of sealed blocks."""
        return slice(self.first, self.first + self.resident(past) * self.block)

    def apart(self, past: int) -> int:
        """Slots of the past whose keys and values are not the layer's own, but codes."""
        return self.resident(past) * self.block if self.coded else 0

    def blocks(self, past: int) -> tuple[int, int, int]:
        """Blocks of the sink, of places and of the newest that so many slots fill."""
        held, first = self.resident(past), self.first
        rest = max(0, past - first - held * self.block)
        return -(-min(past, first) // self.block), held, -(-rest // self.block)


def device_tensors(layout: BankLayout, shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """What a bank holds on the device between chunks, as `BlockBank` lists it."""
    blocks, places = (shape.batch, shape.kv_heads, layout.most), layout.places
    rows = (*blocks[:2], layout.sink + layout.most + layout.open)
    slots = -(-layout.room // layout.block) * layout.block
    whole, fine = torch.int32, torch.float32
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "code": ((*rows, layout.code), layout.code_dtype),
        "scale": ((*rows, 1), fine),
        "weight": (rows, fine),
        "log_count": ((*blocks[:2], -(-slots // 4) * 4), fine),
        "length": (blocks, whole),
        "place": ((*blocks[:2], layout.most + 1), whole),
        "block": ((*blocks[:2], places), whole),
        "wanted": (blocks, fine),
        "alike": (blocks, fine),
        "norm": (blocks, fine),
        "written": (blocks, whole),
        "choices": ((1,), fine),
        "sealed": ((1,), whole),
        "used": ((1,), whole),
        "given": ((1,), whole),
    }
    if layout.coded:
        codes = ((*blocks[:2], places * layout.block, shape.head_dim), torch.uint8)
        sizes |= {
            "places_k": codes,
            "places_v": codes,
            "places_scale": ((*blocks[:2], places, 2), fine),
            "block_scale": ((*blocks, 2), fine),
            "centre": ((*blocks[:2], shape.head_dim), fine),
        }
    return {
        name: torch.full(size, START.get(name, 0), dtype=dtype, device=device)
        for name, (size, dtype) in sizes.items()
    }


def work_tensors(layout: BankLayout, shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """What a choice is written to."""
    whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
    table = (shape.batch, shape.heads, -(-shape.max_pass_tokens // layout.tile))
    most = layout.sink + layout.places + layout.open
    return {
        "now": torch.full((shape.batch, shape.kv_heads, layout.places), -1, **whole),
        "later": torch.full((shape.batch, shape.kv_heads, layout.places), -1, **whole),
        "count": torch.zeros(table, **whole),
        "first": torch.zeros(*table, most, **whole),
        "map": torch.zeros(*table, most, **whole),
        "counters": torch.zeros(len(COUNTERS), dtype=torch.float64, device=device),
    }


def host_tensors(
    size: tuple[int, ...], width: int, host: str, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Keys and values of blocks, [B, Hkv, most, block, …]."""
    codes, tensors = HOST[host], dict[str, Tensor]()
    for name in ("k", "v"):
        channels = width // 2 if host == "int4" else width
        tensors[name] = host_empty((*size, channels), codes or dtype, device)
        if codes is not None:
            if host == "int4":  # of a block
                scales = host_empty((*size[:-1], 2, width), torch.float16, device)
            else:
                scales = host_empty((*size, 1), torch.float32, device)
            tensors[f"{name}_scale"] = scales
    return tensors
