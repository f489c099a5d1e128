"""What a chunk read, merged, replayed and fetched, place by place of the picture: the live map."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tachyscope.core.observers import Observer
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext
from tachyscope.measure.inspection.read_mass import read_mass
from tachyscope.store.bank import BlockBank
from tachyscope.store.host_bank import HostBank

GROUPS = 3  # of layers: the first, the middle and the last ones


class ReadMap(Observer):
    """Watches one layer of each group; `take` hands over what it saw of the last chunk.

    read      of a place's entries in the past, the share that a query of the chunk read, on average
    merged    entries of a place that joined another, or went, when the chunk was committed
    replayed  of a place's MLP outputs, the share that was the last frame's
    fetched   of the blocks that a place reads by cache=bank, the share that came from host memory
              for this chunk; None by other plans

    `read` is None where the past is in a bank, whose blocks do not tell what places they show, and
    in token models.
    """

    def on_open(self, session: Session) -> None:
        self.session = session
        layers, groups = session.shape.layers, min(GROUPS, session.shape.layers)
        self.spans = [(i * layers // groups, (i + 1) * layers // groups) for i in range(groups)]
        self.watched = {(low + high) // 2: i for i, (low, high) in enumerate(self.spans)}
        self.read = [self._nothing() for _ in self.spans]
        self.merged = [self._nothing() for _ in self.spans]
        self.fetched = [self._nothing() for _ in self.spans]
        self.pos: dict[int, Tensor] = {}

    def on_attend(
        self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor, rotated_q: Tensor, out: Tensor
    ) -> None:
        if ctx.layer not in self.watched or not ctx.past:
            return
        layer, policy = self.session.memory.layers[ctx.layer], self.session.plan.attention
        if layer.bank is not None and ctx.pass_index == 0:
            self._see_bank(layer.bank, ctx, q.shape[2])
        # sparse attention chooses in its first pass what the chunk's later ones read too; where
        # none comes, the last pass before the clean one is shown
        first, last = policy.first_sparse_pass(ctx), max(0, ctx.pass_count - 2)
        chosen = any(step >= first for step in ctx.before)
        shown = (ctx.pass_index >= first and not chosen) or ctx.pass_index == last < first
        if self._reads_places and shown and not ctx.given:
            mass = read_mass(policy, self.session.present.layers[ctx.layer], rotated_q)[
                ..., : ctx.past
            ]
            share = (mass > 0).double().mean((0, 1, 2))
            place = self._places(layer.pos[0, 0, : ctx.past])
            count = torch.bincount(place, minlength=len(self._nothing()))
            total = torch.bincount(place, share.cpu(), minlength=len(count))
            self.read[self.watched[ctx.layer]] = total / count.clamp(min=1)

    @property
    def _reads_places(self) -> bool:
        """Whether `read` is told: a token model's passes are too many to look into."""
        return self.session.memory.layers[0].bank is None and not self.session.shape.token_by_token

    def _see_bank(self, bank: HostBank, ctx: PassContext, queries: int) -> None:
        """Of the blocks that each tile of the chunk's queries reads, the share that was fetched."""
        self.fetched[self.watched[ctx.layer]] = self._nothing()
        layout, work = cast(BlockBank, bank).layout, bank.work
        if "map" not in work or ctx.past < layout.room:
            return  # whole frames are read, or all that there is is resident
        read = int(work["count"].max())
        # [B, H, tiles, read], the sink's blocks first; of float8 codes the resident slots alone
        ids, ahead = work["map"][..., :read].long(), 0 if layout.coded else layout.sink
        came = (work["now"] >= 0) | (work["later"] >= 0)
        came = came.repeat_interleave(ids.shape[1] // came.shape[1], 1)
        flags = torch.zeros(*ids.shape[:2], layout.table_blocks)
        flags[:, :, ahead : ahead + layout.resident_slots] = came.cpu()
        share = flags.gather(2, ids.flatten(2).cpu()).unflatten(2, ids.shape[2:])
        by_tile = share.double().mean((0, 1, 3))
        by_query = by_tile.repeat_interleave(layout.tile)[:queries]
        by_place = by_query.view(-1, self.session.shape.tokens_per_frame).mean(0)
        self.fetched[self.watched[ctx.layer]] = by_place

    def on_commit(self, ctx: PassContext, n: int) -> None:
        self.pos = {i: self.session.memory.layers[i].pos[0, 0].clone() for i in self.watched}
        self.merged = [self._nothing() for _ in self.spans]

    def on_merge(self, ctx: PassContext, source: Tensor, root: Tensor) -> None:
        if ctx.layer in self.watched:
            place = self._places(self.pos[ctx.layer][source[0, 0]])
            counts = torch.bincount(place, minlength=len(self._nothing()))
            self.merged[self.watched[ctx.layer]] = counts.double()

    def take(self) -> dict[str, Any]:
        """The last chunk's map: for every group of layers, numbers from 0 to 1, or None."""
        groups = []
        bank = self.session.memory.layers[0].bank
        for layer, group in self.watched.items():
            low, high = self.spans[group]
            merged = self.merged[group]
            fetched = None if bank is None or "map" not in bank.work else self.fetched[group]
            groups.append(
                {
                    "layers": [low, high - 1],
                    "read": _rounded(self.read[group] if self._reads_places else None),
                    "merged": _rounded(merged / max(1.0, float(merged.max()))),
                    "replayed": _rounded(self._replayed(layer)),
                    "fetched": _rounded(fetched),
                }
            )
        return {"grid": list(self.session.shape.grid), "groups": groups}

    def _replayed(self, layer: int) -> Tensor:
        age = self.session.memory.layers[layer].own.get("replay", {}).get("age")
        if age is None:
            return self._nothing()
        return (age[:, 0] > 0).double().mean(0).cpu()

    def _places(self, pos: Tensor) -> Tensor:
        """The place [..] of entries at (t, y, x); a prompt's entries, before all frames, are 0."""
        high, wide = self.session.shape.grid
        y, x = pos[:, 1].clamp(0, high - 1), pos[:, 2].clamp(0, wide - 1)
        return (y * wide + x).long().cpu()

    def _nothing(self) -> Tensor:
        return torch.zeros(self.session.shape.tokens_per_frame, dtype=torch.float64)


def _rounded(values: Tensor | None) -> list[float] | None:
    return None if values is None else [round(float(x), 3) for x in values]
