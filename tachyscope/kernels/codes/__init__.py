"""Vectors as codes of one byte a channel, and a scale each."""

from __future__ import annotations

from torch import Tensor
from torch import dtype as DType

from tachyscope.kernels.codes import torch as torch_backend
from tachyscope.kernels.codes.torch import Past, numbers
from tachyscope.kernels.device import DTYPE, HAS_TRITON, reads_keys

if HAS_TRITON:
    from tachyscope.kernels.codes import triton as triton_backend

__all__ = ["Past", "decode", "decode_into", "encode", "numbers"]


def encode(x: Tensor, code: Tensor, scale: Tensor) -> None:
    """Write codes [B, H, n, D] of x and their scales [B, H, n].

    A vector's largest channel gets the largest code. The dtype of `code` tells which codes: int8
    are whole numbers, uint8 the bits of float8_e4m3fn (torch gathers no float8).
    """
    if x.dtype == DTYPE and reads_keys(code):
        triton_backend.encode(x, code, scale)
    else:
        encoded, scale[:] = torch_backend.encode(x, code.dtype)
        code.copy_(encoded)


def decode(code: Tensor, scale: Tensor | None, dtype: DType) -> Tensor:
    """The vectors [..., D] of codes and scales [...]; without scales they are vectors already."""
    if scale is None:
        return code
    if code.dim() != 4:
        return torch_backend.decode(code, scale, dtype)
    out = scale.new_empty(code.shape, dtype=dtype)
    decode_into(code, scale, out)
    return out


def decode_into(code: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write the vectors [B, H, n, D] of codes and scales [B, H, n] to `out`."""
    if out.dtype == DTYPE and reads_keys(code):
        triton_backend.decode(code, scale, out)
    else:
        out.copy_(torch_backend.decode(code, scale, out.dtype))
