"""What a GPU has, as far as kernels are built by it."""

from __future__ import annotations

import functools

import torch

# of a device without data, which stands for an H200
PROCESSORS = 132
# bytes that a program can share, from which on large tiles fit: 227 KiB on Hopper and a B200,
# 163 on an A100, 99 on others
ROOM = 200 * 1024


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors."""
    if device.type != "cuda":
        return PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@functools.cache
def roomy(device: torch.device) -> bool:
    """Whether it has room for large tiles, and the copy engine that such GPUs have."""
    if device.type != "cuda":
        return True
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0)) >= ROOM  # AMD's do not tell
