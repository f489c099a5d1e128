"""Attention over entries that may stand for several, or for none."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from torch import Tensor, device
from torch.cuda import get_device_capability

from tachyscope.kernels.attention import torch as torch_backend
from tachyscope.kernels.device import HAS_TRITON, TILES, has_kernel

if HAS_TRITON:
    from tachyscope.kernels.attention import triton as triton_backend


def attention(
    q: Tensor, k: Tensor, v: Tensor, log_count: Tensor | None = None, causal: bool = False
) -> Tensor:
    """softmax(q·k / √D + log_count) v for q [B, H, S, D] and entries [B, Hkv, N, D].

    log_count [B, Hkv or 1, N] is the log of an entry's multiplicity, -inf where a slot is empty.
    With `causal` the last S entries are the queries' own, and none sees a later one.
    """
    if q.shape[2] == 1 and q.shape[1] > k.shape[1]:
        # a token alone: query heads that share their keys are so many queries of one head
        shared = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        return attention(shared, k, v, log_count).reshape(q.shape)
    # the kernels have no causal mask and no gradient
    wide = q.shape[2] >= min(TILES) and not causal and not q.requires_grad
    if wide and has_kernel(q.device, q.dtype, q.shape[3]):
        hopper = hopper_backend(q.device)
        if hopper is not None:
            return hopper.flash_attention(q, k, v, log_count)
        if log_count is not None:  # without weights cuDNN is faster
            return triton_backend.flash_attention(q, k, v, log_count)
    return torch_backend.sdpa(q, k, v, log_count, causal)


@functools.cache
def hopper_backend(on: device) -> ModuleType | None:
    """The faster kernels of a Hopper GPU, where one is (a device without data stands for one)."""
    if on.type not in ("cuda", "meta"):
        return None
    if on.type == "cuda" and get_device_capability(on) != (9, 0):
        return None
    try:
        return importlib.import_module("tachyscope.kernels.attention.hopper")
    except (ImportError, AttributeError):  # a Triton whose Gluon is missing, or another
        return None
