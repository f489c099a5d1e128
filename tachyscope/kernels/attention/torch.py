"""Attention with log_count, by torch's scaled_dot_product_attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# where no kernel of ours is faster: what torch would choose by itself is half as fast as cuDNN
FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# queries from which on those are worth asking for
LONG = 64


def attention(
    q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None = None, causal: bool = False
) -> Tensor:
    """softmax(q·k / √D + log_count) v for q [B, H, S, D] and entries [B, Hkv, N, D].

    log_count [B, Hkv or 1, N] is the log of an entry's multiplicity, -inf where a slot is empty.
    With `causal` the last S entries are the queries' own, and none sees a later one.
    """
    if q.shape[2] == 1 and q.shape[1] > k.shape[1]:
        # a token alone: query heads that share keys become queries of one head
        shared = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        return attention(shared, k, v, log_count).reshape(q.shape)
    gqa = q.shape[1] != k.shape[1]
    if q.is_cuda and q.dtype.itemsize == 2 and q.shape[2] >= LONG and not causal:
        with sdpa_kernel(FASTEST, set_priority=True):
            if log_count is not None:
                return attention_by_channels(q, k, v, log_count)
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
    if causal and log_count is None and q.is_cuda and q.shape[2] > 1 and not gqa:
        # a mask that is known by its shape: no kernel has to read one
        from torch.nn.attention.bias import causal_lower_right  # slow to import

        return F.scaled_dot_product_attention(q, k, v, causal_lower_right(q.shape[2], k.shape[2]))
    mask = None if log_count is None else bias(log_count, q)
    if causal and q.shape[2] > 1:
        s, n = q.shape[2], k.shape[2]
        seen = torch.ones(s, n, dtype=torch.bool, device=q.device).tril(n - s)
        later = torch.zeros(s, n, dtype=q.dtype, device=q.device).masked_fill_(~seen, -math.inf)
        mask = later if mask is None else mask + later
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


def attention_by_channels(q: Tensor, k: Tensor, v: Tensor, log_count: Tensor) -> Tensor:
    """`attention` by what a GPU's libraries do fast: no mask, but log_count as two channels of k.

    In 16 bits one would keep log 100 to 1.6 %: a second has what the first leaves.
    """
    width, times = q.shape[3], 16.0
    # large and finite for an empty slot; both factors are held exactly
    weight = (log_count * (math.sqrt(width) / times)).clamp(min=-6e4).expand(-1, k.shape[1], -1)
    # libraries take widths in eights
    wide_k = F.pad(torch.cat([k, high_and_low(weight, k.dtype)], -1), (0, 6))
    wide_q = F.pad(F.pad(q, (0, 2), value=times), (0, 6))
    out = F.scaled_dot_product_attention(
        wide_q, wide_k, F.pad(v, (0, 8)), scale=1 / math.sqrt(width), enable_gqa=True
    )
    return out[..., :width]


def high_and_low(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [...] as two numbers of a short type that add up to it: [..., 2]."""
    high = x.to(dtype)
    return torch.stack([high, (x - high.to(x.dtype)).to(dtype)], -1)


def bias(log_count: Tensor, q: Tensor) -> Tensor:
    """log_count [B, Hkv or 1, N] as an additive mask [B, H or 1, 1, N] in q's type.

    An empty slot gets a large finite number: a row that sees only empty slots (a pad of the
    prompt) then stays finite, and any live entry still drowns them to exactly zero.
    """
    if 1 < log_count.shape[1] < q.shape[1]:
        log_count = log_count.repeat_interleave(q.shape[1] // log_count.shape[1], 1)
    floor = -3e4 if q.dtype == torch.float16 else -1e30
    return log_count.clamp(min=floor).to(q.dtype).unsqueeze(2)
