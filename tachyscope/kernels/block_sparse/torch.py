"""Block-sparse attention by stock torch: gather a tile's entries, then attend to them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels.attention import attention
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.codes import decode

# elements of keys gathered at once: bounds memory, not the result
AT_ONCE = 2**24


class Read(NamedTuple):
    """An answer [B, H, S, D], and what it took."""

    out: Tensor
    pairs: int | Tensor  # query-key pairs that were scored
    masked: Tensor | None = None  # of them, those of blocks that a tile does not read
    kept: tuple[Tensor, ...] = ()  # gathered entries, for a later call with the same table


def read_tiles(
    q: Tensor, k: Tensor, v: Tensor, past: BlockTable, kept: tuple[Tensor, ...] = ()
) -> Read:
    """As many tiles at once as AT_ONCE allows; every tile gathers as many blocks as the longest.

    Where one gather serves all tiles, it is kept.
    """
    tile, read, present = past.tile, past.ids.shape[3] * past.block, k.shape[2]
    per_tile = q.shape[:2].numel() * (read + present) * q.shape[3]
    group, whole = max(1, AT_ONCE // per_tile), q.shape[2] // tile
    cuts = [(i, min(i + group, whole)) for i in range(0, whole, group)]
    if q.shape[2] % tile:  # the last tile is a part
        cuts.append((whole, whole + 1))
    out, masked = [], torch.zeros((), dtype=torch.int64, device=q.device)
    for start, stop in cuts:
        size = (q.shape[0], stop - start, q.shape[1], read + present)
        if not kept or kept[0].shape[:4] != size:
            kept = _gather(past, slice(start, stop), present, k.dtype)
        for entries, x in zip(kept[:2], (k, v), strict=True):
            entries[..., read:, :] = x[:, None].repeat_interleave(q.shape[1] // x.shape[1], 2)
        part = q[:, :, start * tile : stop * tile].unflatten(2, (stop - start, -1))
        part = part.transpose(1, 2)  # [B, tiles, H, tile, D]
        part, keys, values, log_count = (x.flatten(0, 1) for x in (part, *kept))
        answer = attention(part, keys, values, None if past.plain else log_count)
        out.append(answer.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3))
        if past.ragged:
            masked += (past.ids[:, :, start:stop] < 0).sum() * past.block * part.shape[2]
        if len(cuts) > 1:
            kept = ()
    whole_out = out[0] if len(out) == 1 else torch.cat(out, 2)
    pairs = q.shape[:3].numel() * (read + present)
    return Read(whole_out, pairs, masked if past.ragged else None, kept)


def _gather(
    past: BlockTable, tiles: slice, present: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [B, tiles, H, N, D] and log_count of what tiles read, with room for now."""
    slots = slots_of(past, past.ids[:, :, tiles]).transpose(1, 2)  # [B, tiles, H, entries]
    log_count = gather_entries(past.log_count[..., None], slots)[..., 0]
    log_count = F.pad(log_count.masked_fill(slots < 0, -math.inf), (0, present))

    def entries(x: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            scale = gather_entries(scale[..., None], slots)[..., 0]
        return F.pad(decode(gather_entries(x, slots), scale, dtype), (0, 0, 0, present))

    return entries(past.k, past.k_scale), entries(past.v, past.v_scale), log_count


def read_ragged(q: Tensor, k: Tensor, v: Tensor, past: BlockTable) -> Read:
    """Each head and tile reads as many blocks as it lists: a shape from data, for the CPU."""
    out = v.new_empty(*q.shape[:3], v.shape[3])
    group, pairs = q.shape[1] // k.shape[1], 0
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            own, kv = slice(b, b + 1), slice(h // group, h // group + 1)
            for i, part in enumerate(q[own, h : h + 1].split(past.tile, 2)):
                slots = slots_of(past, past.ids[b, h, i])
                slots = slots[slots >= 0]
                keys, values = (
                    torch.cat([_listed(old, scale, slots, own, kv, new.dtype), new[own, kv]], 2)
                    for old, scale, new in ((past.k, past.k_scale, k), (past.v, past.v_scale, v))
                )
                log_count = past.log_count[own, kv].index_select(2, slots)
                log_count = F.pad(log_count, (0, k.shape[2]))
                rows = slice(i * past.tile, (i + 1) * past.tile)
                out[own, h : h + 1, rows] = attention(part, keys, values, log_count)
                pairs += part.shape[2] * keys.shape[2]
    return Read(out, pairs)


def _listed(
    x: Tensor, scale: Tensor | None, slots: Tensor, row: slice, head: slice, dtype: torch.dtype
) -> Tensor:
    """Entries `slots` of one head."""
    if scale is not None:
        scale = scale[row, head].index_select(2, slots)
    return decode(x[row, head].index_select(2, slots), scale, dtype)


def slots_of(past: BlockTable, ids: Tensor) -> Tensor:
    """The slots of blocks ids [..., M], -1 where there is none: [..., M * block]."""
    slot = ids.long().unsqueeze(-1) * past.block + torch.arange(past.block, device=ids.device)
    return slot.masked_fill((slot < 0) | (slot >= past.k.shape[2]), -1).flatten(-2)


def gather_entries(x: Tensor, slots: Tensor) -> Tensor:
    """Entries `slots` [B, T, H, M] (below 0: the first) of x [B, Hkv, N, D]: [B, T, H, M, D].

    x may be a slice of a cache: it is read where it stands.
    """
    heads, device = slots.shape[2], slots.device
    batch = torch.arange(x.shape[0], device=device)[:, None, None, None]
    group = torch.arange(heads, device=device)[:, None] // (heads // x.shape[1])
    return x[batch, group, slots.clamp(min=0)]
