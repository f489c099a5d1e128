"""A bank whose resident blocks are float8 codes, which attention reads without decoding them.

A block is what `kernels/attention_fp8` reads: codes of keys less a centre, codes of values
transposed, and a scale of each. Host memory holds the same bytes, so a copy decodes and rounds
nothing. The sink, the newest entries and the present chunk stay in the model's dtype, contiguous in
the layer's k and v, which have no cache slots for the resident blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tachyscope.core.types import PassContext
from tachyscope.kernels.attention_fp8 import (
    FP8,
    Entries,
    Listed,
    centre_of,
    dequantise,
    quantise_entries,
)
from tachyscope.kernels.host_blocks import HostBlocks
from tachyscope.store.bank import BlockBank
from tachyscope.store.kv import KVStore


class CodedBank(BlockBank):
    """tensors, beside those of `BlockBank`:

    places_k, places_v  [B, Hkv, resident slots * block, D]  codes as bytes; values transposed
    places_scale  [B, Hkv, resident slots, 2]  scales of the keys and values in a resident slot
    block_scale   [B, Hkv, capacity, 2]        scales of all blocks
    centre        [B, Hkv, D]                  the mean of the keys that were sealed first
    """

    __slots__ = ()

    def coded_entries(self, past: int) -> int:
        return self.layout.coded_entries(past)

    @property
    def resident_codes(self) -> tuple[Tensor, Tensor]:
        return self.tensors["places_k"], self.tensors["places_v"]

    def keys(self, layer: KVStore, ctx: PassContext) -> Tensor:
        coded, first = self.coded_entries(ctx.past), self.layout.first
        own, _ = self.uncoded_kv(layer, ctx)
        k, _ = dequantise(self._entries(), torch.float32)
        k = (k + self.tensors["centre"].unsqueeze(2)).to(layer.dtype)
        return torch.cat([own[:, :, :first], k[:, :, :coded], own[:, :, first:]], 2)

    def uncoded_kv(self, layer: KVStore, ctx: PassContext) -> tuple[Tensor, Tensor]:
        """Keys and values in the model's dtype: of the sink, the newest, the present chunk."""
        own = slice(0, ctx.end - self.coded_entries(ctx.past))
        return layer.k[:, :, own], layer.v[:, :, own]

    def _resident_kv(self, layer: KVStore) -> tuple[Tensor, Tensor]:
        return self.resident_codes

    def _as_blocks(
        self, entries: Mapping[str, Tensor], live: Tensor, ids: Tensor, held: int
    ) -> HostBlocks:
        own, size = self.tensors, (ids.shape[2], self.layout.block)
        if not held:
            own["centre"].copy_(centre_of(entries["k"], live))
        codes = quantise_entries(entries["k"], entries["v"], size[1], live, own["centre"])
        own["block_scale"].scatter_(2, _pairs(ids), codes.scale)
        values = codes.v.view(torch.uint8).flatten(2).unflatten(2, (*size, -1))
        return HostBlocks(codes.k.view(torch.uint8).unflatten(2, size), values)

    def _load_scales(self, ids: Tensor) -> None:
        resident = self.tensors["places_scale"]
        scale = self.tensors["block_scale"].gather(2, _pairs(ids.clamp(min=0)))
        resident.copy_(torch.where(ids.unsqueeze(-1) < 0, resident, scale))

    def listed(self, past: int, read: int, first: bool, weighs: bool) -> Listed:
        """The resident blocks of each tile, as `table` lists them; with `read` 0 all of them."""
        layout, work = self.layout, self.work
        if not first:
            self.wait_for_copies()
        sink, held, newest = layout.blocks(past)
        if read:
            ids = work["first" if first and past == layout.room else "map"]
            ids, counts = ids[..., : read - sink - newest], work["count"]
        else:
            counts = torch.full_like(work["count"], held)
            ids = torch.arange(held, dtype=torch.int32, device=counts.device)
            ids = ids.expand(*counts.shape, -1)
        as_held = weighs or not layout.log_weight
        log_count = self.tensors["log_count"] if as_held else self.unweighted(past)
        log_count = log_count[:, :, self._resident_span]
        return Listed(self._entries(), log_count, ids, counts, layout.tile)

    def _entries(self) -> Entries:
        k, v = (x.view(FP8) for x in self.resident_codes)
        v = v.flatten(2).unflatten(2, (self.layout.resident_slots, -1, self.layout.block))
        return Entries(k, v, self.tensors["places_scale"], self.layout.block)


def _pairs(ids: Tensor) -> Tensor:
    """The index [B, Hkv, n, 2] of blocks' two scales."""
    return ids.long().unsqueeze(-1).expand(-1, -1, -1, 2)
