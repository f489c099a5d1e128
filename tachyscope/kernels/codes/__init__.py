"""Vectors as codes of 8, 4 or 2 bits a channel, and scales."""

from __future__ import annotations

from torch import Tensor
from torch import dtype as DType

from tachyscope.kernels.codes import torch as stock
from tachyscope.kernels.codes.torch import Past, numbers
from tachyscope.kernels.dispatch import dispatch

__all__ = ["Past", "decode", "decode_into", "decode_packed", "encode", "numbers"]

decode_into = dispatch(stock.decode_into)
decode_packed = dispatch(stock.decode_packed)


@dispatch
def encode(x: Tensor, code: Tensor, scale: Tensor) -> None:
    """Write codes [B, H, n, D] of x and their scales [B, H, n].

    A vector's largest channel gets the largest code. The dtype of `code` tells which codes: int8
    are whole numbers, uint8 the bits of float8_e4m3fn (torch gathers no float8).
    """
    encoded, scale[:] = stock.encode(x, code.dtype)
    code.copy_(encoded)


def decode(code: Tensor, scale: Tensor | None, dtype: DType) -> Tensor:
    """The vectors [..., D] of codes and scales [...]; without scales they are vectors already."""
    if scale is None:
        return code
    if code.dim() != 4:
        return stock.decode(code, scale, dtype)
    out = scale.new_empty(code.shape, dtype=dtype)
    decode_into(code, scale, out)
    return out
