"""Which blocks of a bank are resident, in Triton: one program for all blocks of a head."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.admit import torch as admit_torch
from tachyscope.kernels.admit.torch import Residency
from tachyscope.kernels.launch import launch

# entries of `ids` that a program adds up, and blocks of a head that it loads at once
ADDED, CHUNK = 1024, 8192
# turns a block's number around, so that of equal keys the lower number's is the larger
LAST = tl.constexpr(2**31 - 1)


def admit(mass: Tensor, ids: Tensor | None, residency: Residency, at_once: int) -> Tensor:
    wanted, block = residency.wanted, residency.block
    assert all(x.is_contiguous() for x in residency)
    rows, most, slots = block.shape[:2].numel(), wanted.shape[2], block.shape[2]
    size, width = _padded(slots), _padded(most)
    if ids is None:
        demand = admit_torch.demand_of(mass, None, wanted)
    else:
        demand, count = torch.zeros(rows, most, dtype=torch.int64, device=mass.device), ids.numel()
        launch(
            _add_up, (triton.cdiv(count, ADDED),),
            mass.contiguous(), ids.contiguous(), demand, count, count // rows, most,
            N=ADDED, num_warps=4,
        )  # fmt: skip
    keys = torch.empty(rows, most, dtype=torch.int32, device=mass.device)
    comers = torch.empty(rows, size, dtype=torch.int64, device=mass.device)
    first = torch.empty_like(block)
    # a product and a sum stay two roundings, as stock torch has them
    launch(
        _admit, (rows,),
        demand, *residency, first, keys, comers, most, slots, at_once, admit_torch.STAY,
        N=width, C=min(width, CHUNK), P=size, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return first


def best_slots(mass: Tensor, blocks: Tensor, out: Tensor, sink: int) -> None:
    batch, heads, tiles, n = out.shape
    assert mass.stride(3) == out.stride(3) == 1 and blocks.is_contiguous()
    slots, size = blocks.shape[2], _padded(blocks.shape[2])
    launch(
        _best_slots, (tiles, batch * heads),
        mass, blocks, out, *mass.stride()[:3], *out.stride()[:3], heads,
        heads // blocks.shape[1], slots, n, sink, P=size, num_warps=max(1, size // 256),
    )  # fmt: skip


def _padded(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


@triton.jit(do_not_specialize=["count", "of_row", "most"])
def _add_up(mass, ids, demand, count, of_row, most, N: tl.constexpr):
    """Demand of blocks as whole numbers: in any order the sum is the same."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    inside = at < count
    whole = tl.load(mass + at, mask=inside, other=0.0).to(tl.float64) * 1099511627776.0  # 2^40
    to = (at // of_row).to(tl.int64) * most + tl.load(ids + at, mask=inside, other=0)
    tl.atomic_add(demand + to, tl.maximum(whole.to(tl.int64), 1), mask=inside, sem="relaxed")


@triton.jit
def _least_of_best(key, count):
    """The least of the `count` largest keys, of those at least 0 if they are fewer, by halving."""
    low, high = tl.min(tl.where(key >= 0, key, LAST), 0), tl.max(key, 0)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        enough = tl.sum((key >= middle).to(tl.int32), 0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["most", "slots", "at_once", "stay"])
def _admit(
    demand, choices, wanted, slot, block, now, later, first, keys, comers, most, slots, at_once,
    stay, N: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One head: its blocks in parts of C, all N of them where the best are sought."""
    row = tl.program_id(0).to(tl.int64)
    demand += row * most
    wanted += row * most
    keys += row * most
    slot += row * (most + 1)
    block += row * slots
    now += row * slots
    later += row * slots
    first += row * slots
    comers += row * P
    offs_c, offs_n, offs_p = tl.arange(0, C), tl.arange(0, N), tl.arange(0, P)

    top = tl.full((C,), 1, tl.int64)
    top_weighed = tl.full((C,), 1, tl.int64)
    for start in tl.range(0, most, C):
        at = start + offs_c
        mine = tl.load(demand + at, mask=at < most, other=0)
        here = tl.load(slot + at, mask=at < most, other=-1) >= 0
        top = tl.maximum(top, mine)
        top_weighed = tl.maximum(top_weighed, tl.where(here, stay * mine, mine))
    largest, largest_weighed = tl.max(top, 0).to(tl.float32), tl.max(top_weighed, 0).to(tl.float32)
    choice = tl.load(choices)
    # scores of what is resident or wanted now; as whole numbers they are in the same order
    for start in tl.range(0, most, C):
        at = start + offs_c
        inside = at < most
        mine = tl.load(demand + at, mask=inside, other=0)
        here = tl.load(slot + at, mask=inside, other=-1) >= 0
        share = tl.div_rn(mine.to(tl.float32), largest) * 0.99
        tl.store(wanted + at, choice + share, mask=inside & (mine > 0))
        weighed = tl.where(here, stay * mine, mine)
        share = tl.div_rn(weighed.to(tl.float32), largest_weighed) * 0.99
        before = tl.load(wanted + at, mask=inside & (mine == 0), other=-1.0)
        score = tl.where(mine > 0, choice + share, before)
        counts = (here | (mine > 0)) & (score >= 0)
        tl.store(keys + at, tl.where(counts, score.to(tl.int32, bitcast=True), -1), mask=inside)
    tl.debug_barrier()

    key = tl.load(keys + offs_n, mask=offs_n < most, other=-1)
    least = _least_of_best(key, slots)
    left = slots - tl.sum((key > least).to(tl.int32), 0)  # for those that are just `least`
    ties = tl.full((), 0, tl.int32)
    coming = tl.full((), 0, tl.int32)
    # list what comes; where a block stands, 0 for now: it stays
    for start in tl.range(0, most, C):
        at = start + offs_c
        inside = at < most
        part = tl.load(keys + at, mask=inside, other=-1)
        here = tl.load(slot + at, mask=inside, other=-1) >= 0
        tie = (part == least).to(tl.int32)
        chosen = (part > least) | ((part == least) & (ties + tl.cumsum(tie, 0) <= left))
        comes = chosen & (here == 0)
        turn = coming + tl.cumsum(comes.to(tl.int32), 0) - 1
        tl.store(comers + turn, (part.to(tl.int64) << 32) | (at ^ LAST), mask=comes)
        tl.store(slot + at, tl.where(chosen & here, 0, -1), mask=inside)
        ties += tl.sum(tie, 0)
        coming += tl.sum(comes.to(tl.int32), 0)
    tl.debug_barrier()

    inside = offs_p < slots
    stood = tl.load(block + offs_p, mask=inside, other=-1)
    stays = tl.load(slot + stood, mask=stood >= 0, other=-1) >= 0
    free = inside & (stays == 0)
    rank = tl.cumsum(free.to(tl.int32), 0) - 1
    order = tl.sort(tl.load(comers + offs_p, mask=offs_p < coming, other=-1), descending=True)
    # the i-th block to fetch gets the i-th free slot
    fetched = tl.gather(((order & LAST) ^ LAST).to(tl.int32), tl.maximum(rank, 0), 0)
    fetched = tl.where(free & (rank < coming), fetched, -1)
    soon = tl.where(rank < at_once, fetched, -1)
    stands = tl.where(stays, stood, fetched)
    tl.store(now + offs_p, soon, mask=inside)
    tl.store(later + offs_p, tl.where(rank < at_once, -1, fetched), mask=inside)
    tl.store(first + offs_p, tl.where(soon >= 0, soon, stood), mask=inside)
    tl.store(block + offs_p, stands, mask=inside)
    tl.debug_barrier()
    tl.store(slot + stands, offs_p, mask=stands >= 0)
    tl.store(slot + most, -1)


@triton.jit(do_not_specialize=["heads", "group", "slots", "n", "sink"])
def _best_slots(
    mass, blocks, out, m_b, m_h, m_t, o_b, o_h, o_t, heads, group, slots, n, sink,
    P: tl.constexpr,
):  # fmt: skip
    """One tile of one head."""
    tile, b, h = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    tile, b, h = tile.to(tl.int64), b.to(tl.int64), h.to(tl.int64)
    mass += b * m_b + h * m_h + tile * m_t
    out += b * o_b + h * o_h + tile * o_t
    at = tl.arange(0, P)
    inside = at < slots
    there = tl.load(
        blocks + (b * (heads // group) + h // group) * slots + at, mask=inside, other=-1
    )
    near = tl.load(mass + there, mask=there >= 0, other=-1.0)
    # whole numbers in the same order: 0 for nothing, behind the last slot -1
    key = tl.where(near >= 0, near.to(tl.int32, bitcast=True) + 1, 0)
    key = tl.where(inside, key, -1)
    least = _least_of_best(key, n)
    left = n - tl.sum((key > least).to(tl.int32), 0)
    tie = key == least
    best = (key > least) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= left))
    turn = tl.cumsum(best.to(tl.int32), 0) - 1
    tl.store(out + turn, at + sink, mask=best)
