"""A bank's host memory: a GPU reads and writes it by itself, a CPU's is taken as it fills."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError

# in every context (portable), and in the GPU's address space (mapped)
FLAGS = 1 | 2


def host_empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory to be written before it is read, page-locked where `device` is a GPU, which then
    addresses it.

    Registered rather than allocated by torch: that rounds every tensor up to a power of two. Pages
    that are locked exist from the start; on a CPU the system gives them when they are written, so
    that a bank takes what its blocks fill and not its whole budget.
    """
    if device.type != "cuda":
        return torch.empty(size, dtype=dtype, device=device)
    x = torch.empty(size, dtype=dtype)
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
