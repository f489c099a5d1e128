"""Launch a Triton kernel, or nothing where tensors have no data."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args), whose first argument is a tensor.

    On the meta device nothing runs: what a caller allocates for the launch is then all that
    happens, and `tachyscope/memory.py` adds it up.
    """
    if not args[0].is_meta:
        kernel[grid](*args, **options)
