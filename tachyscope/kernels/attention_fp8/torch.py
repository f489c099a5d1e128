"""Attention of float8 operands by stock torch, which multiplies their numbers in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels.block_sparse.torch import read_tiles
from tachyscope.kernels.block_table import BlockTable, Read
from tachyscope.kernels.codes import decode

FP8 = torch.float8_e4m3fn
LARGEST, LEAST = torch.finfo(FP8).max, 1e-12
# the order of values in each 16 entries: a GPU's thread then holds weights and values alike
ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
# weights are rounded times 2^8: the least of them is then 2^-17 of the largest
OFFSET = 8.0
# about how many keys the mean is taken of, which all are centred by
SAMPLE = 512
# entries of a block in dense attention; scores held at once, which bounds memory alone
BLOCK, AT_ONCE = 128, 2**24


class Entries(NamedTuple):
    """Entries as float8 codes in blocks; the last block is filled with zeros.

    k      [B, Hkv, slots, D]
    v      [B, Hkv, blocks, D, block], each 16 entries in ORDER where 16 divides a block
    scale  [B, Hkv, blocks, 2] in float32, of a block's keys and of its values
    """

    k: Tensor
    v: Tensor
    scale: Tensor
    block: int


class Listed(NamedTuple):
    """Which blocks of the past each tile of queries reads; the rest as `BlockTable` has it."""

    entries: Entries
    log_count: Tensor
    ids: Tensor
    counts: Tensor
    tile: int

    def table(self, k: Tensor, v: Tensor) -> BlockTable:
        """The same table over vectors k, v instead of codes."""
        block = self.entries.block
        return BlockTable(k, v, self.log_count, self.ids, self.counts, self.tile, block)


def attention_fp8(q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None = None) -> Tensor:
    """`attention` of float8 codes of q, k and v; the weights are rounded to float8 too."""
    entries = quantise_entries(k, v, BLOCK, log_count, centre_of(k, log_count))
    keys, values = (x[:, :, : k.shape[2]] for x in dequantise(entries, torch.float32))
    return _weigh(_rounded(q), keys, values, log_count).to(q.dtype)


def block_sparse_attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, past: BlockTable, kept: tuple[Tensor, ...] = ()
) -> Read:
    """`block_sparse_attention` of float8 codes, each block of the past with scales of its own."""
    held, centre = held_as_fp8(past, quantise_entries, k.dtype)
    listed = Listed(held, past.log_count, past.ids, past.counts, past.tile)
    return listed_attention_fp8(q, k, v, listed, centre, kept)


def listed_attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, past: Listed, centre: Tensor, kept: tuple[Tensor, ...] = ()
) -> Read:
    """The same over a past that is codes already, of keys less `centre` [B, Hkv, D]."""
    now = quantise_entries(k, v, past.entries.block, None, centre)
    keys, values = (x[:, :, : k.shape[2]] for x in dequantise(now, torch.float32))
    table = past.table(*dequantise(past.entries, torch.float32))
    read = read_tiles(_rounded(q), keys, values, table, kept, _weigh)
    return read._replace(out=read.out.to(q.dtype))


def held_as_fp8(
    past: BlockTable, quantise: Callable[..., Entries], dtype: torch.dtype
) -> tuple[Entries, Tensor]:
    """The past's entries as codes, however they are stored, and the mean that was subtracted."""
    k, v = decode(past.k, past.k_scale, dtype), decode(past.v, past.v_scale, dtype)
    log_count = past.log_count[:, :, : k.shape[2]]
    centre = centre_of(k, log_count)
    return quantise(k, v, past.block, log_count, centre), centre


def centre_of(k: Tensor, log_count: Tensor | None = None) -> Tensor:
    """The mean [B, Hkv, D] of some of the keys, in float32.

    What all keys have in common changes no share of the weight, but float8 would keep three bits of
    it: in Atrium it is two thirds of a key, and left in it costs 7 dB.
    """
    step = max(1, k.shape[2] // SAMPLE)
    some = k[:, :, ::step]
    if log_count is None:
        return some.mean(2, dtype=torch.float32)
    there = (log_count[:, :, ::step] > -math.inf).unsqueeze(-1)
    total = torch.where(there, some.float(), 0.0).sum(2)
    return total / there.sum(2).clamp(min=1)


def _rounded(q: Tensor) -> Tensor:
    """What the codes of queries stand for."""
    code, scale = quantise_queries(q)
    return code.float() * (scale * math.sqrt(q.shape[-1])).unsqueeze(-1)


def _weigh(q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None) -> Tensor:
    """softmax(q·k / √D + log_count) v of [..., D] in float32, with weights of float8."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    if log_count is not None:
        wide = log_count if log_count.shape[1] == 1 else log_count.repeat_interleave(group, 1)
        log_count = wide.unsqueeze(2)
    out = []
    at_once = max(1, AT_ONCE // (q.shape[:2].numel() * k.shape[2]))
    for part in q.split(at_once, 2):
        scores = part @ k.mT / math.sqrt(q.shape[-1])
        if log_count is not None:
            scores = scores + log_count
        scores = scores / math.log(2)
        most = scores.amax(-1, keepdim=True).clamp(min=-1e30).ceil()
        shares = torch.exp2(scores - most + OFFSET)
        total = shares.sum(-1, keepdim=True).clamp(min=1e-30)
        out.append(shares.to(FP8).float() @ v / total)
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def quantise_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [B, H, S, D] of q, and of each query its scale over √D, [B, H, S]."""
    most = q.float().abs().amax(-1).clamp(min=LEAST)
    code = (q.float() * _inverse(most).unsqueeze(-1)).to(FP8)
    return code, most * (1 / (LARGEST * math.sqrt(q.shape[-1])))


def quantise_entries(
    k: Tensor,
    v: Tensor,
    block: int,
    log_count: Tensor | None = None,
    centre: Tensor | None = None,
) -> Entries:
    """Entries k - centre, v [B, Hkv, n, D] as codes; what is in an empty slot is not read."""
    if centre is not None:
        k = k.float() - centre.unsqueeze(2)
    n = k.shape[2]
    blocks = -(-n // block)
    there = torch.ones(1, 1, n, 1, dtype=torch.bool, device=k.device)
    if log_count is not None:
        there = (log_count > -math.inf).unsqueeze(-1)
    codes, scales = [], []
    for x in (k, v):
        x = F.pad(torch.where(there, x.float(), 0.0), (0, 0, 0, blocks * block - n))
        most = x.unflatten(2, (blocks, block)).abs().amax((3, 4)).clamp(min=LEAST)
        codes.append((x * _inverse(most).repeat_interleave(block, 2).unsqueeze(-1)).to(FP8))
        scales.append(most * (1 / LARGEST))
    turned = codes[1].view(torch.uint8)  # torch moves no float8 by an index, but bytes
    if block % 16 == 0:
        turned = turned.unflatten(2, (-1, 16))[:, :, :, list(ORDER)].flatten(2, 3)
    value = turned.unflatten(2, (blocks, block)).mT.contiguous().view(FP8)
    return Entries(codes[0], value, torch.stack(scales, -1), block)


def _inverse(most: Tensor) -> Tensor:
    # a number over a tensor would be its reciprocal, rounded, times the number
    return torch.full_like(most, LARGEST) / most


def dequantise(entries: Entries, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, slots, D] of codes, in their own order."""
    k_scale, v_scale = entries.scale.to(dtype).repeat_interleave(entries.block, 2).unbind(-1)
    v = entries.v.to(dtype).mT.flatten(2, 3)
    if entries.block % 16 == 0:
        back = sorted(range(16), key=ORDER.__getitem__)
        v = v.unflatten(2, (-1, 16))[:, :, :, back].flatten(2, 3)
    return entries.k.to(dtype) * k_scale.unsqueeze(-1), v * v_scale.unsqueeze(-1)
