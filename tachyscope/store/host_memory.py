"""A bank's host memory: page-locked and mapped for a GPU, ordinary memory on a CPU."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError

# cudaHostRegisterPortable | cudaHostRegisterMapped
FLAGS = 1 | 2


def host_empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised host memory, which kernels on `device` read and write directly if it is a GPU.

    It is registered, since torch's own pinned memory is rounded up to a power of two. Page-locked
    memory is taken at once; on a CPU the system takes pages when they are written, so that a bank
    takes what its blocks fill and not its whole budget.
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
