"""The same as custom operators of torch, which torch.compile does not trace into."""

from __future__ import annotations

from torch import Tensor, empty, empty_like, float32
from torch.library import custom_op

from tachyscope.kernels import norm_quantise as operation
from tachyscope.kernels.norm_quantise.torch import FP8


@custom_op("tachyscope::quantise", mutates_args=())
def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 codes [..., W] of x, and of each row a scale [..., 1]."""
    return operation.quantise(x)


@custom_op("tachyscope::gelu_quantise", mutates_args=())
def gelu_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantise` of gelu(x), by its tanh form."""
    return operation.gelu_quantise(x)


@custom_op("tachyscope::norm_quantise", mutates_args=())
def norm_quantise(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`quantise` of norm(x) · (1 + scale) + shift, x [B, S, W], one shift and scale a frame."""
    return operation.norm_quantise(x, shift, scale, eps)


@custom_op("tachyscope::add_norm", mutates_args=())
def add_norm(
    x: Tensor, y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + y · gate, one gate a frame [B, F, W], and norm(of that sum) · weight + bias."""
    return operation.add_norm(x, y, gate, weight, bias, eps)


@custom_op("tachyscope::add_gated", mutates_args=())
def add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + y · gate, one gate a frame [B, F, W]."""
    return operation.add_gated(x, y, gate)


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    code = empty(x.shape, dtype=FP8, device=x.device)
    return code, x.new_empty((*x.shape[:-1], 1), dtype=float32)


# the shapes of their results, for torch's compiler and for tensors without data
quantise.register_fake(_codes)
gelu_quantise.register_fake(_codes)
norm_quantise.register_fake(lambda x, shift, scale, eps: _codes(x))
add_norm.register_fake(lambda x, y, gate, weight, bias, eps: (empty_like(x), empty_like(x)))
add_gated.register_fake(lambda x, y, gate: empty_like(x))
