"""Decide before an MLP, by its own input, which tokens replay what was kept of the last frame."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON, has_decode_kernel
from tachyscope.kernels.gemv import Norm
from tachyscope.kernels.input_gate import torch as torch_backend
from tachyscope.kernels.input_gate.gate import InputGate, Kind

if HAS_TRITON:
    from tachyscope.kernels.input_gate import triton as triton_backend

__all__ = ["InputGate", "Kind", "input_gate"]


def input_gate(x: Tensor, norm: Norm, gate: InputGate) -> None:
    """From the MLP's input norm(x), x [B, W], to `gate.skip`; computed tokens' inputs are kept."""
    if has_decode_kernel(x):
        triton_backend.input_gate(x, norm, gate)
    else:
        torch_backend.input_gate(x, norm, gate)
