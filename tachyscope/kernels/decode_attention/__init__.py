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
    from tachyscope.kernels.decode_attention import several
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


def decode_attention(
    out: Tensor, qkv: Tensor, step: Step, scratch: Scratch, tokens: int = 1
) -> Tensor:
    """out [B, H * D] = attention of a token's qkv [B, (H + 2 Hkv) * D], unrotated, in a layer.

    Its key and value are put into the layer's slot, and where the step has a gate that decides
    whether the MLP behind is replayed. Of `tokens` tokens in a row, each row's one after the other
    in qkv and out [B * tokens, ...], each sees those before it; such steps have no gate.
    """
    if not has_decode_kernel(qkv[:1]):
        return torch_backend.decode_attention(out, qkv, step, tokens)
    if tokens > 1:
        return several.several_attention(out, qkv, step, scratch, tokens)
    return triton_backend.decode_attention(out, qkv, step, scratch)
