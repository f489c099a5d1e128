"""Attention over entries that may stand for several, or for none."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tachyscope.kernels import gpu

# where no kernel of ours is faster: what torch would choose by itself is half as fast as cuDNN
FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention(
    q: Tensor, k: Tensor, v: Tensor, logw: Tensor | None = None, causal: bool = False
) -> Tensor:
    """softmax(q·k / √D + logw) v for q [B, H, S, D] and entries [B, Hkv, N, D].

    logw [B, Hkv or 1, N] is the log of an entry's multiplicity, -inf where a slot is empty. With
    `causal` the last S entries are the queries' own, and none sees a later one.
    """
    if q.shape[2] == 1 and q.shape[1] > k.shape[1]:
        # a token alone: query heads that share their keys are so many queries of one head
        shared = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        return attention(shared, k, v, logw).reshape(q.shape)
    gqa = q.shape[1] != k.shape[1]
    if q.shape[2] >= min(gpu.TILES) and not causal:
        # the kernels have no gradient
        served = gpu.suits(q.device, q.dtype, q.shape[3]) and not q.requires_grad
        if served and (logw is not None or gpu.flash.hopper(q.device) is not None):
            return gpu.flash.flash_attention(q, k, v, logw)
        if logw is None and q.is_cuda and q.dtype.itemsize == 2:
            with sdpa_kernel(FASTEST, set_priority=True):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
    mask = None if logw is None else bias(logw, q)
    if causal and q.shape[2] > 1:
        s, n = q.shape[2], k.shape[2]
        seen = torch.ones(s, n, dtype=torch.bool, device=q.device).tril(n - s)
        later = torch.zeros(s, n, dtype=q.dtype, device=q.device).masked_fill_(~seen, -math.inf)
        mask = later if mask is None else mask + later
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


def bias(logw: Tensor, q: Tensor) -> Tensor:
    """logw [B, Hkv or 1, N] as an additive mask [B, H or 1, 1, N] in q's type.

    An empty slot gets a large finite number: a row that sees only empty slots (a pad of the
    prompt) then stays finite, and any live entry still drowns them to exactly zero.
    """
    if 1 < logw.shape[1] < q.shape[1]:
        logw = logw.repeat_interleave(q.shape[1] // logw.shape[1], 1)
    floor = -3e4 if q.dtype == torch.float16 else -1e30
    return logw.clamp(min=floor).to(q.dtype).unsqueeze(2)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, logw: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The definition, in float64, with every head's entries written out."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1])
    if logw is not None:
        wide = logw if logw.shape[1] == 1 else logw.repeat_interleave(group, 1)
        scores = scores + wide.double().unsqueeze(2)
    if causal:
        s, n = scores.shape[-2:]
        later = torch.arange(n, device=q.device) > torch.arange(n - s, n, device=q.device)[:, None]
        scores = scores.masked_fill(later, -math.inf)
    return (scores.softmax(-1) @ v).to(q.dtype)
