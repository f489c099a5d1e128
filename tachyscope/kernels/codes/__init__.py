"""Vectors as codes of one byte a channel, and a scale each."""

from __future__ import annotations

from torch import Tensor, cat, float32
from torch import dtype as DType

from tachyscope.kernels.codes import torch as torch_backend
from tachyscope.kernels.codes.torch import Past, numbers
from tachyscope.kernels.device import DTYPE, HAS_TRITON, reads_keys

if HAS_TRITON:
    from tachyscope.kernels.codes import triton as triton_backend

__all__ = ["Past", "decode", "decoded", "encode", "numbers"]


def encode(x: Tensor, code: Tensor, scale: Tensor) -> None:
    """Write codes [B, H, n, D] of x and their scales [B, H, n].

    A vector's largest channel gets the largest code. The dtype of `code` tells which codes: int8
    are whole numbers, uint8 the bits of float8_e4m3fn (torch gathers no float8).
    """
    if x.dtype == DTYPE and reads_keys(code):
        triton_backend.encode(x, code, scale)
    else:
        found, scale[:] = torch_backend.encode(x, code.dtype)
        code.copy_(found)


def decode(code: Tensor, scale: Tensor | None, dtype: DType) -> Tensor:
    """The vectors [..., D] of codes and scales [...]; without scales they are vectors already."""
    if scale is None:
        return code
    if code.dim() != 4:
        return torch_backend.decode(code, scale, dtype)
    out = scale.new_empty(code.shape, dtype=dtype)
    _decode_into(code, scale, out)
    return out


def decoded(
    past: Past, k: Tensor, v: Tensor, log_count: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and weights of a past in codes and of present entries, in a row."""
    assert past.k_scale is not None and past.v_scale is not None
    n, both = past.k.shape[2], []
    for code, scale, new in ((past.k, past.k_scale, k), (past.v, past.v_scale, v)):
        row = new.new_empty(*new.shape[:2], n + new.shape[2], new.shape[3])
        _decode_into(code, scale, row[:, :, :n])
        row[:, :, n:] = new
        both.append(row)
    weights = [past.log_count, log_count]
    if past.log_count is None and log_count is None:
        return both[0], both[1], None
    groups = max(x.shape[1] for x in weights if x is not None)
    rows = [
        k.new_zeros(k.shape[0], groups, count, dtype=float32)
        if x is None
        else x.expand(-1, groups, -1)
        for x, count in zip(weights, (n, k.shape[2]), strict=True)
    ]
    return both[0], both[1], cat(rows, 2)


def _decode_into(code: Tensor, scale: Tensor, out: Tensor) -> None:
    if out.dtype == DTYPE and reads_keys(code):
        triton_backend.decode(code, scale, out)
    else:
        out.copy_(torch_backend.decode(code, scale, out.dtype))
