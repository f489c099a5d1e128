"""Draw a code in one launch, without sorting (Triton).

Floats are ordered as integers are. The k-th largest is found by halving a range: of values first,
which takes fewer turns, then of integers; all in registers. It need not be found exactly. Of those
that may be among the top k the one of the best score is taken where the mass above it is less than
top_p of what the top k have at least, and left out where it is top_p of what they have at most.
Where that, or whether it is among the top k, depends on the cut, the range is halved to its end.

On an H200 a code of 16,384 takes 17 to 24 us; with both cuts found first it took 22 to 36.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.launch import Overlap, launch
from tachyscope.kernels.pdl import wait_for_kernel_before
from tachyscope.kernels.sample_code.draw import Codes, Draw


def sample_code(logits: Tensor, draw: Draw, to: Codes) -> None:
    """`sample_code`; all tensors are contiguous."""
    videos, places, depth = to.codes.shape
    count, dim = logits.shape[1], to.total.shape[1]
    block = triton.next_power_of_2(count)
    launch(
        _sample_code, (videos,),
        logits, to.codes, to.noise, to.place, to.book, to.total, draw.cfg, 1 / draw.temperature,
        min(draw.top_k, count), draw.top_p, videos, places, count, to.depth, depth,
        GUIDED=draw.guided, TOP_P=draw.top_p < 1, FIRST=to.depth == 0, DIM=dim,
        BLOCK=block, DIM_BLOCK=triton.next_power_of_2(dim), num_warps=16 if block > 4096 else 4,
        **Overlap.options(logits),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["cfg", "inverse", "top_k", "top_p", "videos", "places", "at_depth", "depth"]
)
def _sample_code(
    logits, codes, noise, place, book, total, cfg, inverse, top_k, top_p, videos, places, count,
    at_depth, depth, GUIDED: tl.constexpr, TOP_P: tl.constexpr, FIRST: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    video, offs = tl.program_id(0), tl.arange(0, BLOCK)
    mask = offs < count
    at = (video.to(tl.int64) * places + tl.load(place)) * depth + at_depth
    wait_for_kernel_before(PDL)
    x = tl.load(logits + video * count + offs, mask=mask, other=-float("inf")).to(tl.float32)
    if GUIDED:
        without = tl.load(logits + (videos + video) * count + offs, mask=mask, other=0.0)
        without = without.to(tl.float32)
        x = without + cfg * (x - without)
    # -0 becomes 0
    x = tl.where(mask, x * inverse + 0.0, -float("inf"))
    code = _best(x, noise + at * count, mask, offs, top_k, top_p, TOP_P)
    tl.store(codes + at, code.to(tl.int64))
    offs_d = tl.arange(0, DIM_BLOCK)
    inside = offs_d < DIM
    entry = tl.load(book + code.to(tl.int64) * DIM + offs_d, mask=inside, other=0.0)
    if not FIRST:
        before = tl.load(total + video * DIM + offs_d, mask=inside, other=0.0)
        entry = (entry.to(tl.float32) + before.to(tl.float32)).to(entry.dtype)
    tl.store(total + video * DIM + offs_d, entry, mask=inside)
    if GUIDED:
        tl.store(total + (videos + video) * DIM + offs_d, entry, mask=inside)


@triton.jit
def _best(x, luck, mask, offs, top_k, top_p, TOP_P: tl.constexpr):
    """The best score of those that are kept; see above."""
    order = tl.where(mask, _order(x), 0)
    low, high = tl.zeros([], tl.uint32), tl.max(order) + 1
    below = tl.sum(mask.to(tl.int32))
    above = tl.where(below <= top_k, below, 0)
    bottom, peak = tl.min(tl.where(mask, x, float("inf"))), tl.max(x)
    turns = tl.zeros([], tl.int32)
    tries = below + 1
    cut = _narrow(order, low, high, below, above, bottom, peak, turns, top_k, top_k // 8 + 1)
    low, high, below, above, bottom, top, turns = cut
    x = _value(order)
    score = tl.where(mask, x - tl.log(tl.load(luck + offs, mask=mask, other=1.0)), -float("inf"))
    p = tl.where(mask, tl.exp(x - peak), 0.0)
    # each turn leaves one out, so that more are of no use: a GPU must not hang by NaN or infinities
    code = tl.full([], -1, tl.int32)
    while (code < 0) & (tries > 0):
        found = (below - above <= 1) | (high - low <= 1)
        sure = tl.where(found, low, high)
        best = tl.argmax(tl.where(order >= low, score, -float("inf")), 0)
        own = tl.max(tl.where(offs == best, order, 0))
        code = tl.where(own >= sure, best, -1)
        if TOP_P:
            most = top_p * tl.sum(tl.where(order >= low, p, 0.0))
            least = top_p * tl.sum(tl.where(order >= sure, p, 0.0))
            mass = tl.sum(tl.where(order > own, p, 0.0))
            code = tl.where(mass < least, code, -1)
            score = tl.where(offs == tl.where(mass >= most, best, -1), -float("inf"), score)
        if code < 0:
            cut = _narrow(order, low, high, below, above, bottom, top, turns, top_k, 1)
            low, high, below, above, bottom, top, turns = cut
        tries -= 1
    return tl.maximum(code, 0)


@triton.jit
def _narrow(order, low, high, below, above, bottom, top, turns, top_k, between):
    """Halve the range of the k-th largest until so few are left between its ends.

    From `low` on there are `below`, at least k; from `high` on `above`, fewer.
    """
    while (below - above > between) & (high - low > 1):
        middle = _middle(low, high, bottom, top, turns)
        count_at = tl.sum((order >= middle).to(tl.int32))
        enough = count_at >= top_k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        bottom, top, turns = _halves(middle, enough, bottom, top, turns)
        below, above = tl.where(enough, count_at, below), tl.where(enough, above, count_at)
        # exactly top_k: no need to know the last one's value
        above = tl.where(enough & (count_at == top_k), below, above)
    return low, high, below, above, bottom, top, turns


@triton.jit
def _order(x):
    """Integers in the order of floats: larger ones are larger, the negative ones turned round."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _value(order):
    """The float of an integer that `_order` gives."""
    bits = order.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high, bottom, top, turns):
    """Where a range of integers is cut: by its values for some turns, then by itself."""
    middle = low + ((high - low) >> 1)
    value = _order(0.5 * bottom + 0.5 * top)
    return tl.where((turns < 24) & (value > low) & (value < high), value, middle)


@triton.jit
def _halves(middle, enough, bottom, top, turns):
    """The ends of what is left of a range of values, after a cut."""
    value = _value(middle)
    return tl.where(enough, value, bottom), tl.where(enough, top, value), turns + 1
