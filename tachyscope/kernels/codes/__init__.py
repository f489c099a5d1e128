"""Vectors as codes of one byte a channel, and a scale each."""

from __future__ import annotations

from torch import Tensor, cat, float32, uint8
from torch import dtype as DType

from tachyscope.kernels.codes import torch as torch_backend
from tachyscope.kernels.codes.torch import FP8, Past, numbers
from tachyscope.kernels.device import DTYPE, HAS_TRITON, has_fp8, has_kernel, reads_keys

if HAS_TRITON:
    from tachyscope.kernels.codes import triton as triton_backend

__all__ = ["FP8", "Past", "decode", "decoded", "encode", "has_code_kernel", "numbers"]


def encode(x: Tensor, code: Tensor, scale: Tensor) -> None:
    """Write codes [B, H, n, D] of x and their scales [B, H, n].

    A vector's largest channel gets the largest code. The dtype of `code` tells which codes: int8
    are whole numbers, uint8 the bits of float8_e4m3fn (torch gathers no float8).
    """
    if has_code_kernel(code, x):
        triton_backend.encode(x, code, scale)
    else:
        found, scale[:] = torch_backend.encode(x, code.dtype)
        code.copy_(found)


def decode(code: Tensor, scale: Tensor | None, dtype: DType) -> Tensor:
    """The vectors [B, H, n, D] of codes and scales; without scales they are vectors already."""
    if scale is None:
        return code
    if dtype == DTYPE and code.dim() == 4 and reads_keys(code):
        return triton_backend.decode(code, scale, dtype)
    return torch_backend.decode(code, scale, dtype)


def decoded(
    past: Past, k: Tensor, v: Tensor, log_count: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and weights of past and present entries in a row, the past decoded."""
    both = [
        cat([decode(old, scale, new.dtype), new], 2)
        for old, scale, new in ((past.k, past.k_scale, k), (past.v, past.v_scale, v))
    ]
    weights = [past.log_count, log_count]
    if past.log_count is None and log_count is None:
        return both[0], both[1], None
    groups = max(x.shape[1] for x in weights if x is not None)
    rows = [
        k.new_zeros(k.shape[0], groups, n, dtype=float32) if x is None else x.expand(-1, groups, -1)
        for x, n in zip(weights, (past.k.shape[2], k.shape[2]), strict=True)
    ]
    return both[0], both[1], cat(rows, 2)


def has_code_kernel(code: Tensor, x: Tensor) -> bool:
    """Whether Triton kernels read such codes beside vectors x."""
    return has_kernel(x.device, x.dtype, x.shape[3]) and (code.dtype != uint8 or has_fp8(x.device))
