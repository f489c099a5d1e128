"""Which blocks of a bank are resident (LRU, with hysteresis), in torch, without a host sync."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels.entries import at_or, or_last

# Hysteresis: a resident block's mass counts this many times. Without it, blocks of nearly equal
# mass replace each other at every choice. On `atrium-world` 1.5 to 4 fetch a tenth to a half less,
# and change the mean of 8 rooms by 0.1 dB at most.
STAY = 2


class Residency(NamedTuple):
    """The block in every resident slot, and LRU stamps; `admit` updates all but `choices`."""

    choices: Tensor  # [1] number of choices so far, this one included
    wanted: Tensor  # [B, Hkv, most] LRU stamp: the last choice that wanted the block + its share
    slot: Tensor  # [B, Hkv, most + 1] resident slot of a block, -1: on the host only; last: padding
    block: Tensor  # [B, Hkv, slots] the block in a slot, -1: empty
    now: Tensor  # [B, Hkv, slots] block to copy to a slot before the first pass, -1: none
    later: Tensor  # [B, Hkv, slots] block to copy to a slot during the first pass, -1: none


def record_demand(mass: Tensor, ids: Tensor | None, choices: Tensor, wanted: Tensor) -> Tensor:
    """`demand_of` every block; updates the LRU stamps `wanted` of those with any."""
    demand = demand_of(mass, ids, wanted)
    wanted.copy_(torch.where(demand > 0, choices + share_of(demand), wanted))
    return demand


def demand_of(mass: Tensor, ids: Tensor | None, wanted: Tensor) -> Tensor:
    """The summed mass of every block that a tile wants [B, Hkv, most], times 2^40; else 0."""
    mass = mass.unflatten(1, (wanted.shape[1], -1)).flatten(2, 3)
    if ids is None:
        total = mass.clamp(min=0).sum(2, dtype=torch.float64) * 2**40
        return F.pad(total.long(), (0, wanted.shape[2] - total.shape[2]))
    index, mass = ids.unflatten(1, (wanted.shape[1], -1)).flatten(2), mass.flatten(2)
    demand = torch.zeros(wanted.shape, dtype=torch.int64, device=mass.device)
    # as whole numbers: a GPU adds them up in any order, and the sum is the same
    return demand.scatter_add_(2, index, (mass.double() * 2**40).long().clamp(min=1))


def share_of(demand: Tensor) -> Tensor:
    """Demand as a part of the largest, below 1."""
    return demand.float() / demand.amax(-1, keepdim=True) * 0.99


def admit(mass: Tensor, ids: Tensor | None, residency: Residency, at_once: int) -> Tensor:
    """Choose which blocks are resident from now on, and which of them must be fetched.

    ids [B, H, tiles, n] are the blocks that each tile chose, mass its attention mass on them;
    without ids every block counts, by mass [B, H, tiles, most], negative where it is empty. The
    blocks of largest summed mass become resident, the mass of resident ones times `STAY`; slots
    that are left keep the most recently wanted (LRU). Returns the block [B, Hkv, slots] in each
    slot once the first `at_once` of a head have been fetched.
    """
    choices, wanted, slot, block, now, later = residency
    most, slots = wanted.shape[2], block.shape[2]
    demand, here = record_demand(mass, ids, choices, wanted), slot[:, :, :-1] >= 0
    demand = torch.where(here, STAY * demand, demand)
    score = torch.where(demand > 0, choices + share_of(demand), wanted)
    score = score.masked_fill(~(here | (demand > 0)), -1.0)
    best = score.topk(slots, -1)
    chosen = best.indices.to(torch.int32)
    comes = (best.values >= 0) & (at_or(slot, chosen, 0) < 0)
    # a block stays unless it is not among the best
    kept = torch.zeros_like(slot, dtype=torch.bool)
    kept.scatter_(2, best.indices, best.values >= 0)
    stays = (block >= 0) & at_or(kept, block, 0)
    # the i-th block to fetch gets the i-th free slot
    turn = (comes.long().cumsum(-1) - 1).masked_fill(~comes, slots)
    listed = F.pad(torch.full_like(chosen, -1), (0, 1)).scatter_(2, turn, chosen)
    rank = (~stays).long().cumsum(-1) - 1
    gets = ~stays & (rank < comes.sum(-1, keepdim=True))
    fetched = torch.where(gets, listed.gather(2, rank.clamp(min=0)), -1)
    now.copy_(fetched.masked_fill(rank >= at_once, -1))
    later.copy_(fetched.masked_fill(rank < at_once, -1))
    first = torch.where(now >= 0, now, block)
    block.copy_(torch.where(stays, block, fetched))
    slot.copy_(_slots_of(block, most))
    return first


def best_slots(mass: Tensor, blocks: Tensor, out: Tensor, sink: int) -> None:
    """Write the slots of a tile's n best resident blocks [B, Hkv, slots], in any order.

    mass [B, H, tiles, most] of all blocks is at least 0, or -1 for an empty one; an empty slot
    counts as -1. The slots in out [B, H, tiles, n] are numbered behind the `sink` ones.
    """
    slots = blocks.shape[2]
    if out.shape[3] == slots:  # all of them
        out.copy_(torch.arange(sink, sink + slots, device=out.device))
        return
    blocks = blocks.repeat_interleave(mass.shape[1] // blocks.shape[1], 1).unsqueeze(2)
    there = blocks.expand(-1, -1, mass.shape[2], -1)
    near = mass.gather(3, there.long().clamp(min=0)).masked_fill(there < 0, -1.0)
    out.copy_(near.topk(out.shape[3], -1, sorted=False).indices + sink)


def _slots_of(blocks: Tensor, most: int) -> Tensor:
    """The slot of every block [B, Hkv, most + 1], from the block in every slot [B, Hkv, slots]."""
    standing = torch.full(
        (*blocks.shape[:2], most + 1), -1, dtype=torch.int32, device=blocks.device
    )
    slots = torch.arange(blocks.shape[2], dtype=torch.int32, device=blocks.device)
    standing.scatter_(2, or_last(blocks, most), slots.expand_as(blocks))
    standing[:, :, -1] = -1
    return standing
