"""Choose the most alike entries, fold them, close the gaps: in place, on a GPU (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.codes import numbers
from tachyscope.kernels.codes.torch import LARGEST
from tachyscope.kernels.launch import launch
from tachyscope.kernels.merge.torch import Entries

PIECE = 64  # of a list of folded entries, read at once


class Folds(NamedTuple):
    """Which entries are folded into which, and which stay; all int32, R = B * H rows.

    source, root [R, e]: the folded, grouped by root and in order of age in a group.
    order, heir [R, n - e]: the others, and where each one's partner, or who it was folded into,
    stands among them.
    """

    source: Tensor
    root: Tensor
    order: Tensor
    heir: Tensor


def merge_entries(
    held: Entries, alike: Tensor, partner: Tensor, excess: int, newest: bool, mean: bool
) -> tuple[Tensor, Tensor]:
    """`merge_entries` of every head by itself; nothing as large as the keys is made."""
    b, h, n = alike.shape
    folds = choose(alike, partner, excess)
    fold_groups(held, folds, newest, mean)
    slide(held, folds)
    partner[:, :, : n - excess] = folds.heir.view(b, h, -1)
    return folds.source.view(b, h, excess), folds.root.view(b, h, excess)


def choose(alike: Tensor, partner: Tensor, excess: int) -> Folds:
    """Of entries with partners, both [B, H, n], fold the `excess` most alike, of equals the oldest.

    A partner is older; the first entry has none and is never folded.
    """
    b, h, n = alike.shape
    rows, stay = b * h, n - excess

    def made(size: int) -> Tensor:
        return torch.empty(rows, size, dtype=torch.int32, device=alike.device)

    parent, slot = made(n), made(n)
    source, place, order, heir = made(excess), made(excess), made(stay), made(stay)
    strides = (*alike.stride()[:2], *partner.stride()[:2])
    launch(
        _choose, (rows,), alike, partner, parent, slot, *strides, h, n, excess, N=8192, num_warps=32
    )
    launch(
        _trace, (triton.cdiv(n, 256), rows),
        partner, parent, slot, source, place, order, heir, *partner.stride()[:2], h, n, excess,
        N=256, num_warps=4,
    )  # fmt: skip
    # one sort of all rows, since a place names the row too; stable, so members stay in order of age
    places, sources = place.flatten().sort(stable=True)
    grouped = source.flatten().gather(0, sources)
    return Folds(grouped.view(rows, excess), (places % n).view(rows, excess), order, heir)


def fold_groups(held: Entries, folds: Folds, newest: bool, mean: bool) -> None:
    """With `mean` give every root its group's weight and mean value, as `fold` does.

    With `newest`, also the key and position of its newest member, and without `mean` its value.
    """
    _, _, log_count, pos, unrotated, k_scale, v_scale, _ = held
    k, v = numbers(held.k), numbers(held.v)
    rows, excess = folds.source.shape
    n, width = k.shape[2:]
    largest = 0.0 if k_scale is None else LARGEST[held.k.dtype]
    # most groups are small, but one may hold almost all: it is read in pieces at the same time
    pieces = excess // PIECE
    means = torch.empty(rows, pieces, width, dtype=torch.float32, device=k.device)
    weights = torch.empty(rows, pieces, dtype=torch.float32, device=k.device)
    times = torch.empty(rows, pieces, dtype=torch.int64, device=k.device)
    # where none is read, any tensor stands in
    other = k if unrotated is None else unrotated
    scales = (log_count if k_scale is None else k_scale, log_count if v_scale is None else v_scale)
    lists, into = (folds.source, folds.root), (means, weights, times)
    inner = (*v.stride()[:3], *log_count.stride()[:2], *pos.stride()[:3])
    if pieces:
        launch(
            _sum_pieces, (pieces, rows),
            v, scales[1], log_count, pos, *lists, *into, *inner, *scales[1].stride()[:2],
            k.shape[1], n, excess,
            MEAN=mean, CODED=k_scale is not None, D=width, M=PIECE, num_warps=4,
        )  # fmt: skip
    launch(
        _fold, (excess, rows),
        k, v, other, log_count, pos, *scales, *lists, *into,
        *k.stride()[:3], *other.stride()[:3], *inner, *scales[0].stride()[:2],
        k.shape[1], n, excess, NEWEST=newest, MEAN=mean, UNROTATED=unrotated is not None,
        CODED=k_scale is not None, WHOLE=v.dtype == torch.int8, LARGEST=largest,
        D=width, M=PIECE, num_warps=4,
    )  # fmt: skip


class Setting(NamedTuple):
    """How entries are moved; the result does not depend on it."""

    channels: int = 32  # that one program moves, of all entries
    entries: int = 1024  # at once
    warps: int = 16


def slide(held: Entries, folds: Folds, setting: Setting | None = None) -> None:
    """Close the gaps that folded entries leave, in place.

    What is held may go on behind the entries that folds speak of; it follows.
    """
    k, v, log_count, pos, unrotated, k_scale, v_scale, _ = held
    s = setting or Setting()
    stay, excess = folds.order.shape[1], folds.source.shape[1]
    rows, width = k.shape[0] * k.shape[1], k.shape[3]
    other = k if unrotated is None else unrotated
    scales = (log_count if k_scale is None else k_scale, log_count if v_scale is None else v_scale)
    channels = min(s.channels, width)
    launch(
        _slide, (rows, width // channels, 4 if unrotated is not None else 3),
        k, v, other, log_count, pos, *scales, folds.order,
        *k.stride()[:3], *v.stride()[:3], *other.stride()[:3],
        *log_count.stride()[:2], *pos.stride()[:3], *scales[0].stride()[:2],
        k.shape[1], stay, excess, k.shape[2] - excess,
        CODED=k_scale is not None, C=channels, N=s.entries, num_warps=s.warps, num_stages=1,
    )  # fmt: skip


@triton.jit
def _fixed(x):
    """Cosines as whole numbers, 2^29 to one, so that two can be added; -inf is below all others."""
    return (tl.maximum(x, -1.5) * 536870912.0).to(tl.int32)


@triton.jit(do_not_specialize=["heads", "n", "excess"])
def _choose(
    alike, partner, parent, slot, a_b, a_h, p_b, p_h, heads, n, excess, N: tl.constexpr
):  # fmt: skip
    """A head's entries: whose parent is their partner, and where the others come to stand."""
    row = tl.program_id(0)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    alike += b * a_b + h * a_h
    partner += b * p_b + h * p_h
    parent += row.to(tl.int64) * n
    slot += row.to(tl.int64) * n
    at = tl.arange(0, N)
    # bisect for the least likeness that is folded: at least `excess` reach low, fewer reach high
    low = tl.full((), -536871936, tl.int32)
    high = tl.full((), 536871936, tl.int32)
    reached = tl.full((), -1, tl.int32)
    while (low + 1 < high) & (reached != excess):
        middle = (low + high) >> 1
        count = tl.zeros([N], tl.int32)
        for start in range(0, n, N):
            x = _fixed(tl.load(alike + start + at, mask=start + at < n, other=-2.0))
            count += (x >= middle).to(tl.int32)
        total = tl.sum(count)
        enough = total >= excess
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        reached = tl.where(enough, total, reached)
    count = tl.zeros([N], tl.int32)
    for start in range(0, n, N):
        x = _fixed(tl.load(alike + start + at, mask=start + at < n, other=-2.0))
        count += (x > low).to(tl.int32)
    equal = excess - tl.sum(count)  # how many of those at `low` itself are folded
    before, level = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, n, N):
        mine = start + at
        inside = mine < n
        x = _fixed(tl.load(alike + mine, mask=inside, other=-2.0))
        tie = (x == low).to(tl.int32)
        rank = level + tl.cumsum(tie, 0) - tie
        gone = ((x > low) | ((x == low) & (rank < equal))).to(tl.int32)
        older = before + tl.cumsum(gone, 0) - gone
        other = tl.load(partner + mine, mask=inside, other=0).to(tl.int32)
        tl.store(parent + mine, tl.where(gone > 0, other, mine), mask=inside)
        tl.store(slot + mine, mine - older, mask=inside)
        before += tl.sum(gone)
        level += tl.sum(tie)


@triton.jit(do_not_specialize=["heads", "n", "excess"])
def _trace(
    partner, parent, slot, source, place, order, heir, p_b, p_h, heads, n, excess,
    N: tl.constexpr,
):  # fmt: skip
    """Follow partners to one that stays: a folded entry's root, or another's heir."""
    row = tl.program_id(1)
    partner += (row // heads).to(tl.int64) * p_b + (row % heads).to(tl.int64) * p_h
    parent += row.to(tl.int64) * n
    slot += row.to(tl.int64) * n
    mine = tl.program_id(0) * N + tl.arange(0, N)
    inside = mine < n
    end = tl.load(partner + mine, mask=inside, other=0).to(tl.int32)
    up = tl.load(parent + end)
    while tl.max((up != end).to(tl.int32)) > 0:
        end = up
        up = tl.load(parent + end)
    own = tl.load(parent + mine, mask=inside, other=0)
    gone, stays = inside & (own != mine), inside & (own == mine)
    now = tl.load(slot + mine, mask=inside, other=0)
    folded = row.to(tl.int64) * excess + mine - now
    tl.store(source + folded, mine, mask=gone)
    tl.store(place + folded, row * n + end, mask=gone)
    kept = row.to(tl.int64) * (n - excess) + now
    tl.store(order + kept, mine, mask=stays)
    tl.store(heir + kept, tl.load(slot + end), mask=stays)


@triton.jit
def _members(
    v, v_scale, log_count, pos, source, root, v_n, p_n, at, end, mine, n,
    MEAN: tl.constexpr, CODED: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Of a list from `at` to `end`, at most M, those of one group: how many, their weight, their
    weighted sum, and the newest."""
    listed = at + tl.arange(0, M)
    theirs = tl.load(root + listed, mask=listed < end, other=-1) == mine
    member = tl.load(source + listed, mask=theirs, other=0)
    total = tl.zeros((), tl.float32)
    mean = tl.zeros([D], tl.float32)
    if MEAN:
        w = tl.exp(tl.load(log_count + member, mask=theirs, other=-float("inf")))
        x = v + member[:, None] * v_n + tl.arange(0, D)[None, :]
        x = tl.load(x, mask=theirs[:, None], other=0.0).to(tl.float32)
        total += tl.sum(w)
        if CODED:
            w *= tl.load(v_scale + member, mask=theirs, other=0.0)
        mean += tl.sum(x * w[:, None], 0)
    time = tl.load(pos + member * p_n, mask=theirs, other=0.0).to(tl.int64)
    newest = tl.max(tl.where(theirs, time * n + member, -1))
    return tl.sum(theirs.to(tl.int32)), total, mean, newest


@triton.jit(do_not_specialize=["heads", "n", "excess"])
def _sum_pieces(
    v, v_scale, log_count, pos, source, root, means, weights, times,
    v_b, v_h, v_n, w_b, w_h, p_b, p_h, p_n, s_b, s_h, heads, n, excess,
    MEAN: tl.constexpr, CODED: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """A piece of a row's list, if it is all of one group."""
    row, piece = tl.program_id(1), tl.program_id(0)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    source += row.to(tl.int64) * excess
    root += row.to(tl.int64) * excess
    mine = tl.load(root + piece * M)
    if tl.load(root + piece * M + M - 1) == mine:
        _, total, mean, newest = _members(
            v + b * v_b + h * v_h, v_scale + b * s_b + h * s_h, log_count + b * w_b + h * w_h,
            pos + b * p_b + h * p_h, source, root,
            v_n, p_n, piece * M, piece * M + M, mine, n, MEAN, CODED, D, M,
        )  # fmt: skip
        at = row.to(tl.int64) * (excess // M) + piece
        tl.store(means + at * D + tl.arange(0, D), mean)
        tl.store(weights + at, total)
        tl.store(times + at, newest)


@triton.jit(do_not_specialize=["heads", "n", "excess"])
def _fold(
    k, v, unrotated, log_count, pos, k_scale, v_scale, source, root, means, weights, times,
    k_b, k_h, k_n, r_b, r_h, r_n, v_b, v_h, v_n, w_b, w_h, p_b, p_h, p_n, s_b, s_h,
    heads, n, excess, NEWEST: tl.constexpr, MEAN: tl.constexpr, UNROTATED: tl.constexpr,
    CODED: tl.constexpr, WHOLE: tl.constexpr, LARGEST: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One group. Only its own program writes its root; lists name groups in rising order."""
    row, first = tl.program_id(1), tl.program_id(0)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    source += row.to(tl.int64) * excess
    root += row.to(tl.int64) * excess
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    unrotated += b * r_b + h * r_h
    log_count += b * w_b + h * w_h
    pos += b * p_b + h * p_h
    k_scale += b * s_b + h * s_h
    v_scale += b * s_b + h * s_h
    mine = tl.load(root + first)
    leads = tl.load(root + first - 1, mask=first > 0, other=-1) != mine
    if leads:
        d = tl.arange(0, D)
        own = tl.load(v + mine * v_n + d)
        weight = tl.exp(tl.load(log_count + mine))
        newest = tl.load(pos + mine * p_n).to(tl.int64) * n + mine
        # up to where a piece begins
        piece = (first + M - 1) // M
        end = tl.minimum(piece * M, excess)
        count, total, mean, last = _members(
            v, v_scale, log_count, pos, source, root, v_n, p_n, first, end, mine, n,
            MEAN, CODED, D, M,
        )  # fmt: skip
        total += weight
        step = tl.load(v_scale + mine) if CODED else 1.0
        mean += own.to(tl.float32) * (weight * step)
        newest = tl.maximum(newest, last)
        if count == end - first:
            pieces = excess // M
            complete = tl.full((), M, tl.int32)
            while complete == M:
                which = piece + tl.arange(0, M)
                inside = which < pieces
                whole = tl.load(root + which * M, mask=inside, other=-1) == mine
                whole &= tl.load(root + which * M + M - 1, mask=inside, other=-1) == mine
                at = row.to(tl.int64) * pieces + which
                if MEAN:
                    total += tl.sum(tl.load(weights + at, mask=whole, other=0.0))
                    x = means + at[:, None] * D + d[None, :]
                    mean += tl.sum(tl.load(x, mask=whole[:, None], other=0.0), 0)
                newest = tl.maximum(newest, tl.max(tl.load(times + at, mask=whole, other=-1)))
                complete = tl.sum(whole.to(tl.int32))
                piece += complete
            _, more, sums, last = _members(
                v, v_scale, log_count, pos, source, root, v_n, p_n, piece * M, excess, mine, n,
                MEAN, CODED, D, M,
            )  # fmt: skip
            total += more
            mean += sums
            newest = tl.maximum(newest, last)
        if MEAN:
            # a root that gained nothing keeps its bits
            if CODED:
                mean /= total
                new_step = tl.maximum(tl.max(tl.abs(mean)), 1e-12) / LARGEST
                tl.store(v_scale + mine, tl.where(total > weight, new_step, step))
                mean = tl.minimum(tl.maximum(mean / new_step, -LARGEST), LARGEST)
                mean = tl.floor(mean + 0.5) if WHOLE else mean
                mean = tl.where(total > weight, mean, own.to(tl.float32))
            else:
                mean = tl.where(total > weight, mean / total, own.to(tl.float32))
            tl.store(v + mine * v_n + d, mean.to(own.dtype))
            tl.store(log_count + mine, tl.log(total))
        if NEWEST:
            member = (newest % n).to(tl.int32)
            tl.store(k + mine * k_n + d, tl.load(k + member * k_n + d))
            if not MEAN:
                tl.store(v + mine * v_n + d, tl.load(v + member * v_n + d))
            if UNROTATED:
                tl.store(unrotated + mine * r_n + d, tl.load(unrotated + member * r_n + d))
            if CODED:
                tl.store(k_scale + mine, tl.load(k_scale + member))
                if not MEAN:
                    tl.store(v_scale + mine, tl.load(v_scale + member))
            axis = tl.arange(0, 4)
            place = tl.load(pos + member * p_n + axis, mask=axis < 3)
            tl.store(pos + mine * p_n + axis, place, mask=axis < 3)


@triton.jit(do_not_specialize=["heads", "stay", "excess", "count"])
def _slide(
    k, v, unrotated, log_count, pos, k_scale, v_scale, order,
    k_b, k_h, k_n, v_b, v_h, v_n, r_b, r_h, r_n, w_b, w_h, p_b, p_h, p_n, s_b, s_h,
    heads, stay, excess, count, CODED: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Some channels of all of a head's entries, in order of age."""
    row, cut, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    order += row.to(tl.int64) * stay
    c = cut * C + tl.arange(0, C)
    if part == 0:
        _move(k + b * k_b + h * k_h, k_n, c, c >= 0, order, stay, excess, count, N)
    elif part == 1:
        _move(v + b * v_b + h * v_h, v_n, c, c >= 0, order, stay, excess, count, N)
    elif part == 2:
        # what is one or three numbers an entry, shared out over the programs
        cuts = tl.num_programs(1)
        if cut == 0:
            axis = tl.arange(0, 4)
            _move(pos + b * p_b + h * p_h, p_n, axis, axis < 3, order, stay, excess, count, N)
        axis = tl.arange(0, 1)
        if cut == 1 % cuts:
            _move(log_count + b * w_b + h * w_h, 1, axis, axis < 1, order, stay, excess, count, N)
        if CODED:
            scale_at = b * s_b + h * s_h
            if cut == 2 % cuts:
                _move(k_scale + scale_at, 1, axis, axis < 1, order, stay, excess, count, N)
            if cut == 3 % cuts:
                _move(v_scale + scale_at, 1, axis, axis < 1, order, stay, excess, count, N)
    else:
        _move(unrotated + b * r_b + h * r_h, r_n, c, c >= 0, order, stay, excess, count, N)


@triton.jit
def _move(x, x_n, channel, used, order, stay, excess, count, N: tl.constexpr):
    # An entry never moves up, and those of one turn come from before those of the next: a turn
    # overwrites nothing that a later one reads, if it has read all of its own
    for start in range(0, count, N):
        to = start + tl.arange(0, N)
        come = tl.load(order + to, mask=to < stay, other=0)
        come = tl.where(to < stay, come, to + excess)
        moved = ((to < count) & (come != to))[:, None] & used[None, :]
        held = tl.load(x + come[:, None] * x_n + channel[None, :], mask=moved)
        tl.debug_barrier()
        tl.store(x + to[:, None] * x_n + channel[None, :], held, mask=moved)
