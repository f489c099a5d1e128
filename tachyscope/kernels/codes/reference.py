"""The definition of codes, one vector at a time in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.codes.torch import FP8, LARGEST


def encode_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x [B, H, n, D] and their scales [B, H, n]."""
    code, scale = torch.empty(x.shape, dtype=dtype), torch.empty(x.shape[:3])
    for at in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).unbind():
        vector = x[*at].double()
        scale[*at] = vector.abs().max().clamp(min=1e-12) / LARGEST[dtype]
        nearest = vector / scale[*at].double()
        code[*at] = nearest.round() if dtype == torch.int8 else nearest.to(FP8).view(dtype)
    return code, scale
