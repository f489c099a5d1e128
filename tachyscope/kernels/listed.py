"""Attention over listed entries only."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels.attention import attention


def listed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logw: Tensor,
    listed: Tensor,
    now: slice,
    causal: bool = False,
) -> Tensor:
    """Attention of q [B, H, S, D] over entries `listed` [B, H, M] (-1: none) and all of `now`.

    k, v [B, Hkv, N, D], logw [B, Hkv or 1, N]. With `causal` the last S of now are the queries'.
    """
    heads, device = q.shape[1], q.device
    mine = torch.arange(now.start, now.stop, device=device).expand(*listed.shape[:2], -1)
    at = torch.cat([listed.clamp(min=0), mine], 2)

    def take(x: Tensor) -> Tensor:
        """Entries `at` of x [B, G, N, ...]: whole rows, for an index a number is slow."""
        rows, groups, entries = x.shape[:3]
        first = torch.arange(groups, device=device).repeat_interleave(heads // groups) * entries
        if x.stride(0):
            first = first + torch.arange(rows, device=device)[:, None] * (groups * entries)
        else:
            x = x[:1]  # one row stands for all
        found = x.reshape(-1, *x.shape[3:]).index_select(0, (at + first.unsqueeze(-1)).flatten())
        return found.view(*at.shape, *x.shape[3:])

    unread = F.pad(listed < 0, (0, mine.shape[2]))
    return attention(q, take(k), take(v), take(logw).masked_fill(unread, -math.inf), causal)


def listed_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logw: Tensor,
    listed: Tensor,
    now: slice,
    causal: bool = False,
) -> Tensor:
    """The definition: all scores in float64, then minus infinity for what is not listed."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logw = logw if logw.shape[1] == 1 else logw.repeat_interleave(group, 1)
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1]) + logw.double().unsqueeze(2)
    read = torch.zeros(*listed.shape[:2], k.shape[2] + 1, dtype=torch.bool, device=q.device)
    read.scatter_(2, torch.where(listed < 0, k.shape[2], listed), True)
    read = read[:, :, None, :-1].repeat(1, 1, q.shape[2], 1)
    read[..., now] = True
    if causal:
        own = torch.arange(k.shape[2], device=q.device)
        last = torch.arange(now.stop - q.shape[2], now.stop, device=q.device)
        read = read & (own <= last[:, None])
    return (scores.masked_fill(~read, -math.inf).softmax(-1) @ v).to(q.dtype)
