"""How much of the attention that dense would pay a plan pays too, in the same rollout."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.observers import Observer
from tachyscope.core.plan import spell
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext
from tachyscope.measure.inspection.read_mass import read_mass
from tachyscope.store import KVStore


def recall_of(method: Tensor, dense: Tensor, slot: Tensor) -> Tensor:
    """Σ min(dense mass, the method's mass) of each query, over groups for merged entries.

    method [..., S, past + now], dense [..., S, seen + now], slot [..., seen]: in which slot of the
    method's past each entry of the dense one went, -1 for gone.
    """
    seen = slot.shape[-1]
    past = method.shape[-1] - (dense.shape[-1] - seen)
    groups = torch.zeros(*method.shape[:-1], past + 1, dtype=dense.dtype, device=dense.device)
    index = torch.where(slot < 0, past, slot).unsqueeze(-2).expand(*dense.shape[:-1], seen)
    groups.scatter_add_(-1, index, dense[..., :seen])
    both = torch.minimum(groups[..., :past], method[..., :past]).sum(-1)
    return both + torch.minimum(dense[..., seen:], method[..., past:]).sum(-1)


class RecallObserver(Observer):
    """Holds what `keep_all` would, beside a session, and compares attention with it.

    `recalls` gathers, by chunk, the recall of every query of the first and the clean pass over the
    chunks in `wanted`, as [B, H, S] a layer.
    """

    def __init__(self, wanted: Collection[int] = ()) -> None:
        self.wanted = frozenset(wanted)

    def on_open(self, session: Session) -> None:
        self.session, shape = session, session.shape
        if not session.plan.cache.traceable:
            raise TachyscopeError(
                f"recall cannot follow the entries of cache={spell(session.plan.cache)}: leave it "
                f"out (--no-recall)"
            )
        groups = (shape.batch, session.plan.cache.cache_heads(shape), 0)
        # by layer: keys and log-weights as they were committed, and the slot each went to
        self.shadow: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(shape.layers)]
        empty = torch.zeros(groups, dtype=torch.int64, device=session.device)
        self.slots = [empty] * shape.layers
        self.recalls: dict[int, list[Tensor]] = {}
        self._merges: dict[int, tuple[Tensor, Tensor]] = {}  # of the present commit, by layer

    def on_attend(
        self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor, rotated_q: Tensor, out: Tensor
    ) -> None:
        ends = ctx.pass_index in (0, ctx.pass_count - 1)
        if ctx.chunk in self.wanted and ends and ctx.past and not ctx.prefilling:
            self.recalls.setdefault(ctx.chunk, []).append(self._recall(rotated_q, ctx))

    def _recall(self, q: Tensor, ctx: PassContext) -> Tensor:
        here, heads = self.session.memory.layers[ctx.layer], q.shape[1]
        now = slice(ctx.past, ctx.end)
        parts = [*self.shadow[ctx.layer], (here.now(ctx)[0], here.log_count[:, :, now])]
        keys, log_count = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        keys, log_count = (
            x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] > 1 else x
            for x in (keys, log_count)
        )
        scores = q.double() @ keys.double().mT / math.sqrt(q.shape[3])
        dense = (scores + log_count.double().unsqueeze(2)).softmax(-1)
        slots = self.slots[ctx.layer]
        slots = slots.repeat_interleave(heads // slots.shape[1], 1)
        paid = read_mass(self.session.plan.attention, self.session.present.layers[ctx.layer], q)
        return recall_of(paid.double(), dense, slots)

    def on_commit(self, ctx: PassContext, n: int) -> None:
        total, self._merges = ctx.past + n, {}
        self._before: list[Tensor] = []
        self._prompt, self._past = ctx.prompt, ctx.past
        for i, layer in enumerate(self.session.memory.layers):
            new = slice(ctx.past, total)
            # committed weights are those of one group a head where heads keep their own entries
            log_count = layer.log_count[:, :, new].clone()
            self.shadow[i].append((layer.now(ctx)[0][:, :, :n].clone(), log_count))
            self._before.append(self._labels(layer, total))

    def on_merge(self, ctx: PassContext, source: Tensor, root: Tensor) -> None:
        self._merges[ctx.layer] = source, root

    def on_committed(self) -> None:
        for i, layer in enumerate(self.session.memory.layers):
            self._follow(i, layer, self._before[i], self._merges.get(i))

    def _labels(self, layer: KVStore, count: int) -> Tensor:
        """One number an entry, from its position; another for each empty slot."""
        t, y, x = layer.pos[:, :, :count].long().unbind(-1)
        shape = self.session.shape
        label = t * shape.tokens_per_frame + y * shape.grid[1] + x
        slot = torch.arange(count, device=label.device) + 2**50
        return torch.where(layer.log_count[:, :, :count] == -math.inf, slot, label)

    def _follow(
        self, i: int, layer: KVStore, before: Tensor, merged: tuple[Tensor, Tensor] | None
    ) -> None:
        """Bring `slots` up to date: whose group each entry joined, and where that stands now."""
        total, past, held_now = before.shape[2], self._past, self.session.memory.past
        sink = getattr(self.session.plan.cache, "sink", 0) or 0
        first = min(self._prompt + sink * self.session.shape.tokens_per_frame, past)
        slot = torch.arange(total, device=before.device).expand_as(before)
        group = slot.clone()
        if merged is not None:
            group.scatter_(2, *merged)
        # an entry stands where one of its group stood: find it by its position
        order = before[:, :, first:].contiguous().sort(-1)
        after = self._labels(layer, held_now)
        slots = torch.searchsorted(order.values, after[:, :, first:].contiguous())
        member = order.indices.gather(2, slots.clamp(max=total - first - 1)) + first
        # the sink never moves, though its positions may
        member = torch.cat([slot[:, :, :first], member], 2)[:, :, :held_now]
        stands = torch.full((*before.shape[:2], total + 1), -1, device=before.device)
        live = layer.log_count[:, :, :held_now] > -math.inf
        target = torch.where(live, group.gather(2, member), total)
        stands.scatter_(2, target, torch.arange(held_now, device=before.device).expand_as(target))
        stands[:, :, total] = -1
        old = self.slots[i]
        fresh = slot[:, :, past:].expand(*old.shape[:2], -1)
        held = torch.cat([old, fresh], 2)
        now = stands.gather(2, group.gather(2, held.clamp(min=0)))
        self.slots[i] = torch.where(held < 0, -1, now)
