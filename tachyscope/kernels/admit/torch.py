"""Which blocks of a bank are resident, by stock torch: nothing looks at data."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels.entries import at_or, or_last

# A resident block stays until another is wanted by so many times its mass. Without it, contents
# that are wanted nearly alike change places at every choice. On `atrium-world` 1.5 to 4 fetch a
# tenth to a half less, and change the mean of 8 rooms by 0.1 dB at most.
STAY = 2


class Residency(NamedTuple):
    """What is known of a bank's blocks, all but `choices` written in place."""

    choices: Tensor  # [1] how many choices were made, the present one counted
    wanted: Tensor  # [B, Hkv, most] when a block was last wanted: a choice's number, and how much
    place: Tensor  # [B, Hkv, most + 1] where it stands, -1 for nowhere; the last is no block
    block: Tensor  # [B, Hkv, places] which block stands there, -1 for none
    now: Tensor  # [B, Hkv, places] what is fetched at once, -1 for nothing
    later: Tensor  # [B, Hkv, places] what is fetched after


def note(mass: Tensor, ids: Tensor | None, choices: Tensor, wanted: Tensor) -> Tensor:
    """`demand_of` every block; when they were wanted is written."""
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
    """Settle which blocks are resident from now on, and which of them are to be fetched.

    Tiles want blocks ids [B, H, tiles, n] by their mass on each; without ids every block by its
    mass [B, H, tiles, most], which is below 0 where it is empty. All that are wanted become
    resident, of largest summed mass first, that of resident ones counted `STAY` times; then those
    wanted last. The first `at_once` of a head that are to be fetched are so at once: which block
    [B, Hkv, places] then stands in each place.
    """
    choices, wanted, place, block, now, later = residency
    most, places = wanted.shape[2], block.shape[2]
    demand, here = note(mass, ids, choices, wanted), place[:, :, :-1] >= 0
    demand = torch.where(here, STAY * demand, demand)
    score = torch.where(demand > 0, choices + share_of(demand), wanted)
    score = score.masked_fill(~(here | (demand > 0)), -1.0)
    best = score.topk(places, -1)
    chosen = best.indices.to(torch.int32)
    comes = (best.values >= 0) & (at_or(place, chosen, 0) < 0)
    # a block stays unless it is not among the best
    kept = torch.zeros_like(place, dtype=torch.bool)
    kept.scatter_(2, best.indices, best.values >= 0)
    stays = (block >= 0) & at_or(kept, block, 0)
    # the i-th that comes gets the i-th place that is free
    turn = (comes.long().cumsum(-1) - 1).masked_fill(~comes, places)
    listed = F.pad(torch.full_like(chosen, -1), (0, 1)).scatter_(2, turn, chosen)
    rank = (~stays).long().cumsum(-1) - 1
    gets = ~stays & (rank < comes.sum(-1, keepdim=True))
    fetched = torch.where(gets, listed.gather(2, rank.clamp(min=0)), -1)
    now.copy_(fetched.masked_fill(rank >= at_once, -1))
    later.copy_(fetched.masked_fill(rank < at_once, -1))
    first = torch.where(now >= 0, now, block)
    block.copy_(torch.where(stays, block, fetched))
    place.copy_(_places_of(block, most))
    return first


def best_places(mass: Tensor, blocks: Tensor, out: Tensor, sink: int) -> None:
    """Write where a tile's n best among the resident blocks [B, Hkv, places] stand, in any order.

    mass [B, H, tiles, most] is what each tile has on all blocks: at least 0, or -1 for one that is
    empty, as which a place without a block counts. out [B, H, tiles, n] counts the sink's places.
    """
    places = blocks.shape[2]
    if out.shape[3] == places:  # all of them
        out.copy_(torch.arange(sink, sink + places, device=out.device))
        return
    blocks = blocks.repeat_interleave(mass.shape[1] // blocks.shape[1], 1).unsqueeze(2)
    there = blocks.expand(-1, -1, mass.shape[2], -1)
    near = mass.gather(3, there.long().clamp(min=0)).masked_fill(there < 0, -1.0)
    out.copy_(near.topk(out.shape[3], -1, sorted=False).indices + sink)


def _places_of(blocks: Tensor, most: int) -> Tensor:
    """Where every block stands [B, Hkv, most + 1] when these [B, Hkv, places] do."""
    standing = torch.full(
        (*blocks.shape[:2], most + 1), -1, dtype=torch.int32, device=blocks.device
    )
    places = torch.arange(blocks.shape[2], dtype=torch.int32, device=blocks.device)
    standing.scatter_(2, or_last(blocks, most), places.expand_as(blocks))
    standing[:, :, -1] = -1
    return standing
