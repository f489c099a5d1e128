"""How a bank divides a layer's cache and its own blocks, and the tensors that it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tachyscope.core.types import Shape
from tachyscope.kernels.block_index import LOWEST
from tachyscope.store.host_memory import host_empty

if TYPE_CHECKING:
    from tachyscope.store.bank import BlockBank

# the dtype of a channel in host memory, None: as on the device
HOST = {"native": None, "int8": torch.int8, "int4": torch.uint8}
UNUSED = 2.0  # `alike` of a block that was never written: over any cosine, so it is used first
GIVEN = 3.0  # subtracted from `alike` of given frames: they are replaced after all generated ones
# the newest 1/NEWEST of a full bank's blocks is never replaced: the model goes on from them
NEWEST = 4
COUNTERS = ("blocks_wanted", "blocks_late", "blocks_denied", "blocks_fetched")
# initial values of tensors that do not begin as 0
START = {"weight": LOWEST, "place": -1, "block": -1, "wanted": -1.0, "alike": UNUSED, "norm": 1.0}


@dataclass(frozen=True)
class BankLayout:
    """How a layer's cache slots and its bank are divided, in blocks where not said otherwise.

    The slots of the past: sink | resident slots, a block each | newest entries.
    """

    block: int  # entries of a block
    sink: int  # blocks of the first entries, always resident
    resident_slots: int  # blocks that can be resident beside the sink
    newest: int  # entries that are not sealed yet, always resident
    capacity: int  # blocks that host memory holds
    tile: int  # queries that read the same blocks
    order_bits: int  # hash bits that order entries before they are cut into blocks; 0: by time
    code_width: int  # numbers of a block's code in the index
    code_dtype: torch.dtype
    blocks_full: bool  # whether every block is full
    bank: type[BlockBank]
    log_weight: float = 0.0  # added to the scores of sealed entries
    coded: bool = False  # whether resident blocks are float8 codes (`store/coded_bank.py`)

    @cached_property
    def newest_blocks(self) -> int:
        """Blocks that the newest entries fill."""
        return -(-self.newest // self.block)

    @cached_property
    def index_rows(self) -> int:
        """Rows of the index: the blocks of the sink, of the bank and of the newest entries."""
        return self.sink + self.capacity + self.newest_blocks

    @cached_property
    def table_blocks(self) -> int:
        """Blocks of a full past on the device, which is as many as a tile can read."""
        return self.sink + self.resident_slots + self.newest_blocks

    @cached_property
    def first(self) -> int:
        """The first cache slot behind the sink, and the sink's entries."""
        return self.sink * self.block

    @cached_property
    def room(self) -> int:
        """Cache slots of a full past."""
        return (self.sink + self.resident_slots) * self.block + self.newest

    def resident_blocks(self, past: int) -> int:
        """Resident blocks beside the sink, of a past of `past` cache slots."""
        return max(0, past - self.first - self.newest) // self.block

    def sealed(self, past: int) -> slice:
        """The cache slots of sealed blocks."""
        return slice(self.first, self.first + self.resident_blocks(past) * self.block)

    def coded_entries(self, past: int) -> int:
        """Entries of the past that are float8 codes, so that the layer's own k and v lack them."""
        return self.resident_blocks(past) * self.block if self.coded else 0

    def blocks(self, past: int) -> tuple[int, int, int]:
        """Blocks of the sink, of the resident slots and of the newest entries."""
        held, first = self.resident_blocks(past), self.first
        rest = max(0, past - first - held * self.block)
        return -(-min(past, first) // self.block), held, -(-rest // self.block)


def device_tensors(layout: BankLayout, shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """What a bank keeps on the device between chunks, as `BlockBank` lists it."""
    heads, int32, float32 = (shape.batch, shape.kv_heads), torch.int32, torch.float32
    blocks, slots = (*heads, layout.capacity), layout.resident_slots
    rows = (*heads, layout.index_rows)
    entries = -(-layout.room // layout.block) * layout.block
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "code": ((*rows, layout.code_width), layout.code_dtype),
        "scale": ((*rows, 1), float32),
        "weight": (rows, float32),
        "log_count": ((*heads, -(-entries // 4) * 4), float32),
        "length": (blocks, int32),
        "place": ((*heads, layout.capacity + 1), int32),
        "block": ((*heads, slots), int32),
        "wanted": (blocks, float32),
        "alike": (blocks, float32),
        "norm": (blocks, float32),
        "written": (blocks, int32),
        "choices": ((1,), float32),
        "sealed": ((1,), int32),
        "used": ((1,), int32),
        "given": ((1,), int32),
    }
    if layout.coded:
        codes = ((*heads, slots * layout.block, shape.head_dim), torch.uint8)
        sizes |= {
            "places_k": codes,
            "places_v": codes,
            "places_scale": ((*heads, slots, 2), float32),
            "block_scale": ((*blocks, 2), float32),
            "centre": ((*heads, shape.head_dim), float32),
        }
    return {
        name: torch.full(size, START.get(name, 0), dtype=dtype, device=device)
        for name, (size, dtype) in sizes.items()
    }


def work_tensors(layout: BankLayout, shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Buffers of the present choice, as `BlockBank` lists them."""
    slots = (shape.batch, shape.kv_heads, layout.resident_slots)
    tiles = (shape.batch, shape.heads, -(-shape.max_pass_tokens // layout.tile))
    table = (*tiles, layout.table_blocks)
    sizes = {"now": slots, "later": slots, "count": tiles, "first": table, "map": table}
    tensors = {
        name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()
    }
    for name in ("now", "later"):
        tensors[name].fill_(-1)
    return tensors | {"counters": torch.zeros(len(COUNTERS), dtype=torch.float64, device=device)}


def host_tensors(
    size: tuple[int, ...], width: int, host: str, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Host memory for keys and values of blocks [B, Hkv, capacity, block, ...], and for scales."""
    codes, tensors = HOST[host], dict[str, Tensor]()
    for name in ("k", "v"):
        channels = width // 2 if host == "int4" else width
        tensors[name] = host_empty((*size, channels), codes or dtype, device)
        if codes is not None:
            if host == "int4":  # a step and a zero for each channel of a block
                scales = host_empty((*size[:-1], 2, width), torch.float16, device)
            else:
                scales = host_empty((*size, 1), torch.float32, device)
            tensors[f"{name}_scale"] = scales
    return tensors
