"""Vectors as codes of one byte a channel, and a scale each."""

from __future__ import annotations

from torch import Tensor, uint8

from tachyscope.kernels.codes import torch as torch_backend
from tachyscope.kernels.codes.torch import FP8, Past, decode, decoded, numbers
from tachyscope.kernels.device import HAS_TRITON, has_fp8, has_kernel

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


def has_code_kernel(code: Tensor, x: Tensor) -> bool:
    """Whether Triton kernels read such codes beside vectors x."""
    return has_kernel(x.device, x.dtype, x.shape[3]) and (code.dtype != uint8 or has_fp8(x.device))
