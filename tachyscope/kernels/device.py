"""Which kernels a device can run, and what it has."""

from __future__ import annotations

import functools
import importlib.util

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
# tensors without data ("meta") are treated as a GPU's, so that its memory can be predicted
DEVICES, DTYPE, HEAD_DIMS = ("cuda", "meta"), torch.bfloat16, (64, 128)
# queries that read the same blocks, and entries of a block
TILES, BLOCKS = (64, 128), (32, 64, 128)
# queries of a tile that score the blocks of a bank: its own, or means of neighbours
MEANS = 16
# of an H200, for which tensors without data stand
MULTIPROCESSORS = 132
# rows that one reading of a weight serves in a decode step, and their dtypes
MAX_DECODE_ROWS, DECODE_DTYPES = 16, (torch.bfloat16, torch.float16)
# bytes of shared memory from which on large tiles fit: 227 KiB on Hopper and a B200, 163 on an
# A100, 99 on others
LARGE_SMEM = 200 * 1024


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the Triton kernels run such heads there; stock torch runs the others."""
    return HAS_TRITON and device.type in DEVICES and dtype == DTYPE and head_dim in HEAD_DIMS


def reads_keys(k: torch.Tensor) -> bool:
    """`has_kernel` of keys [B, H, n, D] that may be codes."""
    if k.dtype == torch.uint8 and not has_fp8(k.device):
        return False
    dtype = DTYPE if k.dtype in (torch.int8, torch.uint8) else k.dtype
    return has_kernel(k.device, dtype, k.shape[3])


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@functools.cache
def has_large_smem(device: torch.device) -> bool:
    """Whether large tiles fit its shared memory; such GPUs also have the copy engine (TMA)."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    # AMD's have no such number
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= LARGE_SMEM


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether it multiplies float8 (e4m3) by itself: from compute capability 8.9 on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def host_may_read(x: torch.Tensor) -> bool:
    """Whether the host may look at data without a wait, to make a shape of it."""
    return not x.is_cuda


def has_decode_kernel(x: torch.Tensor) -> bool:
    """Whether the Triton kernels of a decode step take x [B, ...]: few rows, of 16 bits."""
    fits = x.dtype in DECODE_DTYPES and x.shape[0] <= MAX_DECODE_ROWS
    return HAS_TRITON and x.is_cuda and fits


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether it has what came with compute capability 9: Hopper, or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
