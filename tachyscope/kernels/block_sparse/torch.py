"""Attention over listed entries only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tachyscope.kernels.attention import attention


def gather_entries(x: Tensor, listed: Tensor) -> Tensor:
    """Entries `listed` [B, T, H, M] (below 0: the first) of x [B, Hkv, N, D]: [B, T, H, M, D].

    Whole rows by one list of numbers: an index a number would be slow.
    """
    rows, groups, entries, width = x.shape
    device, heads = listed.device, listed.shape[2]
    group = torch.arange(groups, device=device).repeat_interleave(heads // groups)
    first = (torch.arange(rows, device=device)[:, None] * groups + group) * entries  # [B, H]
    at = listed.clamp(min=0) + first[:, None, :, None]
    return x.reshape(-1, width).index_select(0, at.flatten()).view(*listed.shape, width)


def listed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_count: Tensor,
    listed: Tensor,
    now: slice,
    causal: bool = False,
) -> Tensor:
    """Attention of q [B, H, S, D] over entries `listed` [B, H, M] (-1: none) and all of `now`.

    k, v [B, Hkv, N, D], log_count [B, Hkv or 1, N]. With `causal` the
    last S of now are the queries'.
    """
    mine = torch.arange(now.start, now.stop, device=q.device).expand(*listed.shape[:2], -1)
    at = torch.cat([listed, mine], 2)
    k, v, weights = (gather_entries(x, at[:, None])[:, 0] for x in (k, v, log_count[..., None]))
    return attention(q, k, v, weights[..., 0].masked_fill(at < 0, -math.inf), causal)
