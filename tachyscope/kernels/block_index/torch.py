"""Index past entries by blocks, by stock torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels import hashing
from tachyscope.kernels.codes import Past, decode
from tachyscope.kernels.device import MEANS
from tachyscope.kernels.hashing import int8_scores, lsh_scores, quantise, signs

LOG2E = math.log2(math.e)
LOWEST = -1e30  # the weight of a block without entries


def buckets(x: Tensor, bits: int) -> Tensor:
    """The signs of x [B, H, n, D] on `bits` random planes, as one number."""
    return hashing.buckets(x, bits)


class Codes(NamedTuple):
    """What is known of blocks: code [B, Hkv, most, E], scale [B, Hkv, most, 1] and the log of their
    weight [B, Hkv, most]."""

    code: Tensor
    scale: Tensor
    weight: Tensor


def encode_blocks(past: Past, log_count: Tensor, block: int, codes: Codes, first: int = 0) -> None:
    """Write the code [B, Hkv, most, E] of every block of past keys from `first` on, its scale
    [B, Hkv, most, 1], and the log of its weight [B, Hkv, most].

    A code of int8 is the block's mean key; one of floats the mean signs of its keys on E planes,
    whose scale is the keys' mean norm. log_count [B, Hkv, blocks * block], -inf for a slot without
    an entry.
    """
    used = slice(first, log_count.shape[2] // block)
    slots = slice(first * block, log_count.shape[2])
    keys = past.k[:, :, slots]
    if past.k_scale is not None:
        keys = decode(keys, past.k_scale[:, :, slots], torch.float32)
    log_count = log_count[:, :, first * block :]
    keys = F.pad(keys.float(), (0, 0, 0, log_count.shape[2] - keys.shape[2]))
    keys = keys.unflatten(2, (-1, block))  # [B, Hkv, blocks, block, D]
    log_count = log_count.unflatten(2, (-1, block))
    live = (log_count > -math.inf).float().unsqueeze(-1)
    members = live.sum(3).clamp(min=1)
    codes.weight[:, :, used] = log_count.logsumexp(-1).clamp(min=LOWEST)
    if codes.code.dtype == torch.int8:
        code, scale = quantise((keys * live).sum(3) / members)
    else:
        code = (signs(keys, codes.code.shape[3]) * live).sum(3) / members
        scale = (keys.norm(dim=-1, keepdim=True) * live).sum(3) / members
    codes.code[:, :, used] = code
    codes.scale[:, :, used] = scale


def block_mass(q: Tensor, codes: Codes, blocks: int, tile: int) -> Tensor:
    """Each tile's sum over its queries q [B, H, S, D] of their softmax over the first blocks.

    A query's score of a block is estimated by the block's code, plus the block's weight. The
    masses are [B, H, tiles, blocks].
    """
    code, scale, weight = (x[:, :, :blocks] for x in codes)
    grouped = q.unflatten(1, (code.shape[1], -1)).flatten(2, 3)  # [B, Hkv, group * S, D]
    if code.dtype == torch.int8:
        scores = int8_scores(grouped, code, scale)
    else:
        scores = lsh_scores(grouped, code, scale.squeeze(-1))
    return _sum_tiles((scores + weight.unsqueeze(2)).softmax(-1), tile, q.shape[2])


def mean_mass(q: Tensor, codes: Codes, blocks: int, tile: int) -> Tensor:
    """`block_mass` where blocks are very many: a tile scores them by MEANS mean queries at most.

    A mean is of tile / MEANS queries in a row, and the masses are sums over the means. A block
    whose weight says that it has no entry has the mass -1.
    """
    if tile > MEANS and tile % MEANS == 0:
        q, tile = mean_queries(q, tile // MEANS), MEANS
    mass = block_mass(q, codes, blocks, tile)
    none = codes.weight[:, :, :blocks] <= LOWEST
    return mass.masked_fill(none.repeat_interleave(q.shape[1] // none.shape[1], 1).unsqueeze(2), -1)


def mean_queries(q: Tensor, group: int) -> Tensor:
    """The mean of each `group` queries q [B, H, S, D] in a row; the last may be of fewer."""
    whole = q.shape[2] // group * group
    means = [q[:, :, :whole].unflatten(2, (-1, group)).mean(3)]
    if whole < q.shape[2]:
        means.append(q[:, :, whole:].mean(2, keepdim=True))
    return torch.cat(means, 2)


def entry_mass(q: Tensor, k: Tensor, log_count: Tensor | None, tile: int) -> Tensor:
    """`block_mass` where a block is one entry of k [B, Hkv, n, D]: its key is its own best code.

    Two heads at once in one buffer that stays in a CPU's cache; keys down, queries across, since
    tall matrices are multiplied twice as fast as wide ones; exp2, since it is twice as fast as exp.
    """
    tokens = q.shape[2]
    q = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B, Hkv, group * S, D]
    q, k = q.float() * (LOG2E / math.sqrt(q.shape[3])), k.float()
    batch, heads, queries, _ = q.shape
    buffer = q.new_empty(batch, min(heads, 2), k.shape[2], queries)
    parts = []
    for pair in (slice(head, head + 2) for head in range(0, heads, 2)):
        scores = buffer[:, : len(range(heads)[pair])]
        torch.matmul(k[:, pair], q[:, pair].mT, out=scores)
        if log_count is not None:
            scores += LOG2E * log_count[:, pair, :, None]
        scores.sub_(scores.amax(2, keepdim=True)).exp2_()
        scores /= scores.sum(2, keepdim=True)
        parts.append(_sum_tiles(scores.mT, tile, tokens))
    return torch.cat(parts, 1)


def _sum_tiles(p: Tensor, tile: int, tokens: int) -> Tensor:
    """Each tile's sum [B, H, tiles, n] of its queries' softmax [B, Hkv, group * S, n]."""
    p = p.unflatten(2, (-1, tokens)).flatten(1, 2)  # [B, H, S, n]
    return torch.stack([part.sum(2) for part in p.split(tile, 2)], 2)
