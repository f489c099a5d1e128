"""A bank whose resident blocks are float8 codes, which attention reads as they are.

A block is what `kernels/attention_fp8` reads: codes of keys less a centre, codes of values, turned,
and a scale of each. Host memory holds the same bytes, so that nothing is decoded or rounded again
on the way. The sink, the newest entries and the present chunk stay the layer's own numbers and
stand in a row: its k and v have no slots of the places.
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
    """tensors, on the device, beside those of `BlockBank`:

    places_k, places_v  [B, Hkv, places * block, D]  codes as bytes; a block of values is turned
    places_scale  [B, Hkv, places, 2]  of what stands there, keys' and values'
    block_scale   [B, Hkv, most, 2]    of all blocks
    centre        [B, Hkv, D]          the mean key of what was sealed first
    """

    __slots__ = ()

    def apart(self, past: int) -> int:
        return self.layout.apart(past)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        return self.tensors["places_k"], self.tensors["places_v"]

    def keys(self, layer: KVStore, ctx: PassContext) -> Tensor:
        apart, first = self.apart(ctx.past), self.layout.first
        own, _ = self.plain(layer, ctx)
        k, _ = dequantise(self._entries(), torch.float32)
        k = (k + self.tensors["centre"].unsqueeze(2)).to(layer.dtype)
        return torch.cat([own[:, :, :first], k[:, :, :apart], own[:, :, first:]], 2)

    def plain(self, layer: KVStore, ctx: PassContext) -> tuple[Tensor, Tensor]:
        """Keys and values that are no codes, in a row: the sink's, the newest, the present."""
        own = slice(0, ctx.end - self.apart(ctx.past))
        return layer.k[:, :, own], layer.v[:, :, own]

    def _places(self, layer: KVStore) -> tuple[Tensor, Tensor]:
        return self.places

    def _blocks(
        self, entries: Mapping[str, Tensor], live: Tensor, ids: Tensor, held: int
    ) -> HostBlocks:
        own, size = self.tensors, (ids.shape[2], self.layout.block)
        if not held:
            own["centre"].copy_(centre_of(entries["k"], live))
        codes = quantise_entries(entries["k"], entries["v"], size[1], live, own["centre"])
        own["block_scale"].scatter_(2, _pairs(ids), codes.scale)
        turned = codes.v.view(torch.uint8).flatten(2).unflatten(2, (*size, -1))
        return HostBlocks(codes.k.view(torch.uint8).unflatten(2, size), turned)

    def _scale(self, ids: Tensor) -> None:
        held = self.tensors["places_scale"]
        scale = self.tensors["block_scale"].gather(2, _pairs(ids.clamp(min=0)))
        held.copy_(torch.where(ids.unsqueeze(-1) < 0, held, scale))

    def listed(self, layer: KVStore, past: int, read: int, first: bool, weighs: bool) -> Listed:
        """What tiles read of the places, as `table` has it; with `read` 0 all that are in use."""
        layout, work = self.layout, self.work
        if not first:
            self.join(layer)
        sink, held, newest = layout.blocks(past)
        if read:
            ids = work["first" if first and past == layout.room else "map"]
            ids, counts = ids[..., : read - sink - newest], work["count"]
        else:
            counts = torch.full_like(work["count"], held)
            ids = torch.arange(held, dtype=torch.int32, device=counts.device)
            ids = ids.expand(*counts.shape, -1)
        plain = weighs or not layout.log_weight
        log_count = self.tensors["log_count"] if plain else self.unweighed(past)
        return Listed(self._entries(), log_count[:, :, self._slots], ids, counts, layout.tile)

    def _entries(self) -> Entries:
        k, v = (x.view(FP8) for x in self.places)
        turned = v.flatten(2).unflatten(2, (self.layout.places, -1, self.layout.block))
        return Entries(k, turned, self.tensors["places_scale"], self.layout.block)


def _pairs(ids: Tensor) -> Tensor:
    """What indexes the two scales of blocks."""
    return ids.long().unsqueeze(-1).expand(-1, -1, -1, 2)
