"""Vectors as codes of 8, 4 or 2 bits a channel, and scales."""

from __future__ import annotations

from torch import Tensor
from torch import dtype as DType

from tachyscope.kernels.codes import torch as torch_backend
from tachyscope.kernels.codes.torch import Past, numbers
from tachyscope.kernels.device import DTYPE, HAS_TRITON, has_kernel, reads_keys

if HAS_TRITON:
    from tachyscope.kernels.codes import triton as triton_backend

__all__ = ["Past", "decode", "decode_into", "decode_packed", "encode", "numbers"]


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


def decode_packed(
    code: Tensor, scale: Tensor, out: Tensor, bits: int, group: int = 1, first: int = 0
) -> None:
    """Write the vectors [B, H, n, D] of codes [B, H, n, bits D / 8] to `out`.

    `encode_int4`, `encode_int2_values` and `encode_int2_keys` tell what codes and scales are. Each
    row of scales is of `group` entries; `first` of those that share the first row stand before.
    """
    if has_kernel(out.device, out.dtype, out.shape[3]):
        triton_backend.decode_packed(code, scale, out, bits, group, first)
    else:
        torch_backend.decode_packed(code, scale, out, bits, group, first)
