"""Host memory that a GPU reads and writes by itself."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError

# in every context (portable), and in the GPU's address space (mapped)
FLAGS = 1 | 2


def host_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, page-locked where `device` is a GPU, which then addresses them.

    Registered rather than allocated by torch: that rounds every tensor up to a power of two.
    """
    if device.type != "cuda":
        return torch.zeros(size, dtype=dtype, device=device)
    x = torch.empty(size, dtype=dtype)
    x.zero_()  # its pages exist from here on
    register(x)
    return x


def register(x: Tensor) -> None:
    """Page-lock a tensor's memory until it is freed; raises where the system refuses."""
    code = int(torch.cuda.cudart().cudaHostRegister(x.data_ptr(), x.nbytes, FLAGS))
    if code:
        raise TachyscopeError(
            f"the system refuses to page-lock {x.nbytes / 1e9:.3g} GB of host memory (CUDA error "
            f"{code}): lower the bank's budget, set host=int4, or raise the limit (ulimit -l)"
        )
    weakref.finalize(x, torch.cuda.cudart().cudaHostUnregister, x.data_ptr())
