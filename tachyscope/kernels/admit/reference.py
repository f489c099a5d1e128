"""The definition of what becomes resident, and of what a tile reads: block by block, in float64."""

from __future__ import annotations

from itertools import product

from torch import Tensor

from tachyscope.kernels.admit.torch import STAY, Residency


def admit_reference(
    mass: Tensor, ids: Tensor | None, residency: Residency, at_once: int
) -> tuple[Residency, Tensor]:
    """The residency after `admit`, `wanted` in float64, and the block in each slot at first.

    Of blocks of equal demand the one of lower number comes first.
    """
    after = Residency(*(x.cpu().clone() for x in residency))
    after = after._replace(wanted=after.wanted.double())
    first = after.block.clone()
    batch, heads, _ = after.block.shape
    group = mass.shape[1] // heads
    for b, h in product(range(batch), range(heads)):
        mine = slice(h * group, (h + 1) * group)
        demand: dict[int, int] = {}
        if ids is None:
            total = mass[b, mine].double().clamp(min=0).sum((0, 1)) * 2**40
            demand = {block: int(x) for block, x in enumerate(total.tolist()) if int(x)}
        else:
            want, by = ids[b, mine].flatten().tolist(), mass[b, mine].double().flatten().tolist()
            for block, x in zip(want, by, strict=True):
                demand[block] = demand.get(block, 0) + max(1, int(x * 2**40))
        one = Residency(after.choices, *(x[b, h] for x in after[1:]))
        _fill_reference(one, demand, first[b, h], at_once)
    return after, first


def _fill_reference(one: Residency, demand: dict[int, int], first: Tensor, at_once: int) -> None:
    """Fill one head's slots with the best of the resident and demanded blocks, in place."""
    stood = one.block.tolist()
    there = {block for block in stood if block >= 0}
    weighed = {block: x * STAY if block in there else x for block, x in demand.items()}
    score = one.wanted.tolist()
    for x, values in ((one.wanted, demand), (score, weighed)):
        for block, value in values.items():
            x[block] = float(one.choices) + value / max(values.values()) * 0.99
    counted = [block for block in there | set(demand) if score[block] >= 0]
    best = sorted(counted, key=lambda block: (-score[block], block))[: len(stood)]
    comers = [block for block in best if block not in there]
    turn = 0
    one.slot[:] = one.now[:] = one.later[:] = -1
    for slot, block in enumerate(stood):
        if block not in best:
            block = comers[turn] if turn < len(comers) else -1
            (one.now if turn < at_once else one.later)[slot] = block
            if turn < at_once and block >= 0:
                first[slot] = block
            turn += 1
        one.block[slot] = block
        if block >= 0:
            one.slot[block] = slot


def best_slots_reference(mass: Tensor, blocks: Tensor, n: int) -> list[list[float]]:
    """The masses, in falling order, of the n best of blocks [B, Hkv, slots] for each tile."""
    best = []
    batch, heads, tiles, _ = mass.shape
    group = heads // blocks.shape[1]
    for b, h, tile in product(range(batch), range(heads), range(tiles)):
        there = blocks[b, h // group].tolist()
        near = [float(mass[b, h, tile, block]) if block >= 0 else -1.0 for block in there]
        best.append(sorted(near, reverse=True)[:n])
    return best
