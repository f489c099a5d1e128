"""Block-sparse attention by stock torch: gather a tile's entries, then attend to them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels.attention import attention
from tachyscope.kernels.block_table import BlockTable, Read
from tachyscope.kernels.codes import decode

# elements of keys gathered at once: bounds memory, not the result
AT_ONCE = 2**24


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, past: BlockTable, kept: tuple[Tensor, ...] = ()
) -> Read:
    """Attention of q [B, H, S, D] over each tile's blocks of the past and all present entries k, v.

    Present entries [B, Hkv, n, D] are of weight one. `kept` is what the last call with the same
    table gave back.
    """
    return read_tiles(q, k, v, past, kept, attention)


def read_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: BlockTable,
    kept: tuple[Tensor, ...],
    attend: Callable[..., Tensor],
) -> Read:
    """As many tiles at once as AT_ONCE allows, by `attend`; a gather that serves all is kept."""
    tile, read, present = past.tile, past.ids.shape[3] * past.block, k.shape[2]
    per_tile = q.shape[:2].numel() * (read + present) * q.shape[3]
    group, whole = max(1, AT_ONCE // per_tile), q.shape[2] // tile
    cuts = [(i, min(i + group, whole)) for i in range(0, whole, group)]
    if q.shape[2] % tile:  # the last tile is a part
        cuts.append((whole, whole + 1))
    out = []
    for start, stop in cuts:
        size = (q.shape[0], stop - start, q.shape[1], read + present)
        if not kept or kept[0].shape[:4] != size:
            kept = _gather(past, slice(start, stop), present, k.dtype)
        for entries, x in zip(kept[:2], (k, v), strict=True):
            entries[..., read:, :] = x[:, None].repeat_interleave(q.shape[1] // x.shape[1], 2)
        part = q[:, :, start * tile : stop * tile].unflatten(2, (stop - start, -1))
        part = part.transpose(1, 2)  # [B, tiles, H, tile, D]
        part, keys, values, log_count = [x.flatten(0, 1) for x in (part, *kept)]
        answer = attend(part, keys, values, None if past.plain else log_count)
        out.append(answer.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3))
        if len(cuts) > 1:
            kept = ()
    whole_out = out[0] if len(out) == 1 else torch.cat(out, 2)
    return Read(whole_out, q.shape[:3].numel() * (read + present), kept)


def _gather(
    past: BlockTable, tiles: slice, present: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [B, tiles, H, N, D] and log_count of what tiles read, with room for now."""
    slots = slots_of(past, past.ids[:, :, tiles]).transpose(1, 2)  # [B, tiles, H, entries]
    log_count = gather_entries(past.log_count[..., None], slots)[..., 0]
    log_count = F.pad(log_count.masked_fill(slots < 0, -math.inf), (0, present))

    def entries(x: Tensor, scale: Tensor | None) -> Tensor:
        x = gather_entries(x, slots)
        if scale is not None:
            x = decode(x, gather_entries(scale[..., None], slots)[..., 0], dtype)
        return F.pad(x, (0, 0, 0, present))

    return entries(past.k, past.k_scale), entries(past.v, past.v_scale), log_count


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
