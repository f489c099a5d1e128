"""One token's attention in a decode step: rotate, write, read, and decide what is replayed."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.decode_attention import torch as torch_backend
from tachyscope.kernels.decode_attention.step import (
    Entries,
    Gate,
    GateKind,
    Rotation,
    Scratch,
    Step,
    Window,
)
from tachyscope.kernels.device import HAS_TRITON, has_decode_kernel

if HAS_TRITON:
    from tachyscope.kernels.decode_attention import triton as triton_backend

__all__ = [
    "Entries",
    "Gate",
    "GateKind",
    "Rotation",
    "Scratch",
    "Step",
    "Window",
    "decode_attention",
]


def decode_attention(out: Tensor, qkv: Tensor, step: Step, scratch: Scratch) -> Tensor:
    """out [B, H * D] = attention of a token's qkv [B, (H + 2 Hkv) * D], unrotated, in a layer.

    Its key and value are put into the layer's slot, and where the step has a gate that decides
    whether the MLP behind is replayed.
    """
    if has_decode_kernel(qkv):
        return triton_backend.decode_attention(out, qkv, step, scratch)
    return torch_backend.decode_attention(out, qkv, step)
