"""Lists of blocks by a mask, of as many blocks as each tile needs: attention by latent frames."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.attention import attend_blocks
from tachyscope.attention.blocks import BlockAttention
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape
from tachyscope.kernels.attention import attention
from tachyscope.kernels.block_sparse.torch import slots_of
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.codes import decode
from tachyscope.kernels.device import DEVICES, HAS_TRITON, host_may_read
from tachyscope.kernels.dispatch import find_row
from tachyscope.store import LayerPass


class RaggedAttention(BlockAttention):
    """Tiles list different numbers of blocks.

    On a CPU, and by kernels, each reads its own and no more; stock torch on a GPU masks the others,
    which counts as simulated.
    """

    def _read_table(self, p: LayerPass, q: Tensor, table: BlockTable) -> Tensor:
        layer, shape, table = p.layer, p.ctx.shape, table._replace(plain=False)
        k, v = layer.now(p.ctx)
        if host_may_read(q):
            out, scored = read_ragged(q, k, v, table)
            p.work.add_pairs(scored, q.shape[3])
            return out
        pairs = ragged_pairs(q, k, table)
        read = attend_blocks(shape, q, k, v, table, layer.scratch)
        layer.scratch = read.kept
        if _by_kernel(q, k, v, table, shape):
            p.work.add_pairs(pairs, q.shape[3])
        else:
            p.work.add_pairs(read.pairs, q.shape[3])
            p.work.simulated_pairs_skipped += read.pairs - pairs
        return read.out


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, table: BlockTable, shape: Shape) -> bool:
    """Whether a kernel reads the blocks that are listed, and stock torch those of the longest."""
    name = "block_sparse.block_sparse_attention"
    if shape.fp8_attention:
        name = "attention_fp8.block_sparse_attention_fp8"
    there = HAS_TRITON and q.device.type in DEVICES
    return there and find_row(name, {"q": q, "k": k, "v": v, "past": table}) is not None


def ragged_pairs(q: Tensor, k: Tensor, past: BlockTable) -> Tensor:
    """The pairs that are scored where each tile reads its own blocks and no more."""
    tiles = -(-q.shape[2] // past.tile)
    counts = past.counts[:, :, :tiles].sum((0, 1))
    whole = counts.sum() * past.tile - counts[-1] * (tiles * past.tile - q.shape[2])
    return whole * past.block + q.shape[:3].numel() * k.shape[2]


def read_ragged(q: Tensor, k: Tensor, v: Tensor, past: BlockTable) -> tuple[Tensor, int]:
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
    return out, pairs


def _listed(
    x: Tensor, scale: Tensor | None, slots: Tensor, row: slice, head: slice, dtype: torch.dtype
) -> Tensor:
    """Entries `slots` of one head."""
    if scale is not None:
        scale = scale[row, head].index_select(2, slots)
    return decode(x[row, head].index_select(2, slots), scale, dtype)


def tile_runs(tokens: int, tile: int, frame: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of each tile by latent frame, of which it has parts of one or two.

    First row and number of rows [2, tiles]; a second run may have none.
    """
    first = torch.arange(0, tokens, tile, device=device)
    stop = (first + tile).clamp(max=tokens)
    cut = torch.minimum((first // frame + 1) * frame, stop)
    start = torch.stack([first, cut.clamp(max=tokens - 1)])
    return start, torch.stack([cut - first, stop - cut])


def list_blocks(mask: Tensor, own: Mapping[str, Tensor]) -> None:
    """Write the blocks of mask [B, Hkv or 1 or H, tiles, blocks] to the map, in their order."""
    tiles, blocks = mask.shape[2:]
    heads = own["map"].shape[1]
    number = torch.arange(blocks, dtype=torch.int32, device=mask.device)
    ids = number.where(mask, blocks).sort(-1).values
    ids = ids.masked_fill(ids == blocks, -1).repeat_interleave(heads // mask.shape[1], 1)
    own["map"][:, :, :tiles, :blocks] = ids
    own["count"][:, :, :tiles] = (ids >= 0).sum(-1)


def check_frames(name: str, shape: Shape, block: int) -> None:
    """Raise where a policy that goes by latent frames cannot serve a shape."""
    if shape.token_by_token:
        raise TachyscopeError(
            f"attention policy {name!r} is for models that write whole latent frames, and this one "
            f"writes token by token: use attention=ann or window"
        )
    if block > shape.tokens_per_frame:
        raise TachyscopeError(
            f"attention policy {name!r}: block={block} is over the {shape.tokens_per_frame} tokens "
            f"of a latent frame: lower block"
        )
