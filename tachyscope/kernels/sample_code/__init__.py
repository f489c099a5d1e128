"""Draw one of a token's codes from logits, and add its entry to the token's sum."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON
from tachyscope.kernels.sample_code import torch as torch_backend
from tachyscope.kernels.sample_code.draw import Codes, Draw

if HAS_TRITON:
    from tachyscope.kernels.sample_code import triton as triton_backend

__all__ = ["Codes", "Draw", "sample_code"]


def sample_code(logits: Tensor, draw: Draw, to: Codes) -> None:
    """From logits [B, K] of a video's rows to a code a video, at the token's place in `to`."""
    if HAS_TRITON and logits.is_cuda:
        triton_backend.sample_code(logits, draw, to)
    else:
        torch_backend.sample_code(logits, draw, to)
