"""Move entries between a cache's slots on a GPU (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.launch import launch


def permute(x: Tensor, order: Tensor, back: bool = False) -> None:
    """Entry order[i] of x [B, H, n, D] to place i, order [B, H, n]; or `back` from there."""
    kept = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _copy(x, kept, order, "target" if back else "source")
    _copy(kept, x)


def shift(x: Tensor, source: int, target: int, count: int) -> None:
    """Entries of x [B, H, n, D] from `source` on to where `target` is; the two may overlap."""
    come, to = (x[:, :, start : start + count] for start in (source, target))
    kept = torch.empty(come.shape, dtype=x.dtype, device=x.device)
    _copy(come, kept)
    _copy(kept, to)


def _copy(source: Tensor, target: Tensor, order: Tensor | None = None, ordered: str = "") -> None:
    """Between stretches of a cache, which are no one piece: torch does that at half the rate."""
    rows, heads, n, width = source.shape
    if n == 0:
        return
    order = source if order is None else order  # where none is read, any tensor stands in
    launch(
        _copy_entries, (triton.cdiv(n, 64), rows * heads),
        source, target, order, *source.stride()[:3], *target.stride()[:3], *order.stride()[:2],
        heads, n, ORDERED=ordered, D=width, N=64, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "n"])
def _copy_entries(
    source, target, order, s_b, s_h, s_n, t_b, t_h, t_n, r_b, r_h, heads, n,
    ORDERED: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Copy entries, the source's or the target's in order."""
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    place, at_d = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)[None, :]
    there = (place < n)[:, None]
    taken = place.to(tl.int64)[:, None]
    given = taken
    if ORDERED != "":
        entry = tl.load(order + b * r_b + h * r_h + place, mask=place < n, other=0)
        if ORDERED == "source":
            taken = entry.to(tl.int64)[:, None]
        else:
            given = entry.to(tl.int64)[:, None]
    value = tl.load(source + b * s_b + h * s_h + taken * s_n + at_d, mask=there)
    tl.store(target + b * t_b + h * t_h + given * t_n + at_d, value, mask=there)
