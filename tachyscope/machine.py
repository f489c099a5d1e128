"""What a number was measured on: the machine and the versions, without names of hosts."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch


def machine() -> dict[str, str | int | float | None]:
    """CPU, cores and memory this process may use, and the first GPU, or None."""
    memory = memory_of(torch.device("cpu"))
    info: dict[str, str | int | float | None] = {
        "cpu": _cpu(),
        "cores": cores(),
        "memory_gb": None if memory is None else round(memory / 1e9, 1),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        info["gpu"] = properties.name
        info["gpu_memory_gb"] = round(properties.total_memory / 1e9, 1)
    return info


def versions() -> dict[str, str]:
    """Versions that can change a result; a package that is not there has no key."""
    info = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        info["cuda"] = torch.version.cuda
    for name in ("tachyscope", "triton"):
        try:
            info[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return info


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown"


def cores() -> int:
    """How many CPU cores this process may use."""
    # a container is often given fewer cores than the machine has
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_of(device: torch.device) -> int | None:
    """Bytes that this process may use of a device's memory in all; None where no one tells."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system counts its pages
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    with suppress(OSError, ValueError):  # no such file, or the word "max"
        total = min(total, int(limit.read_text()))
    return total
