"""The machine and versions that a number was measured with, without host names."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch


def machine() -> dict[str, str | int | float | None]:
    """The CPU, the cores and memory that this process may use, and the first GPU or None."""
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
    """Versions that can change a result; packages that are not installed are left out."""
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
    # a container often has fewer cores than the machine
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_of(device: torch.device) -> int | None:
    """Bytes of a device's memory that this process may use in total; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system counts its pages
        return None
    for limit in _group_limits():
        with suppress(OSError, ValueError):  # no such file, or the word "max"
            total = min(total, int(limit.read_text()))
    return total


def _group_limits(root: Path = Path("/")) -> Iterator[Path]:
    """Files that may limit this process's memory: of its cgroup and of all above it, v2 and v1."""
    groups = root / "sys/fs/cgroup"
    yield from (groups / "memory.max", groups / "memory/memory.limit_in_bytes")  # a container's
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                top, limit = groups, "memory.max"
            elif "memory" in kinds.split(","):
                top, limit = groups / "memory", "memory.limit_in_bytes"
            else:
                continue
            group = top / path.lstrip("/")
            yield from (x / limit for x in (group, *group.parents) if x.is_relative_to(top))


def count_peak(device: torch.device) -> None:
    """Reset the peak counters of GPU tensors and of the process's RAM."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # only on Linux; elsewhere the peak is that of the whole run
        Path("/proc/self/clear_refs").write_text("5")


def peak_gb(device: torch.device) -> float:
    """The peak of GPU tensors in GB since `count_peak`; 0 on the CPU."""
    if device.type != "cuda":
        return 0.0
    return torch.cuda.max_memory_allocated(device) / 1e9


def ram(most: bool = False) -> int | None:
    """Bytes of RAM of this process, or the peak since `count_peak`; None if unknown."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == ("VmHWM" if most else "VmRSS"):
                return 1024 * int(value.split()[0])
    return None
