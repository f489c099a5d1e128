"""How much of the attention that dense would pay a plan pays too, in the same rollout."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tachyscope.attention import AttentionPolicy
from tachyscope.attention.ann import Ann
from tachyscope.cache import matching, merge
from tachyscope.kernels.merge import Entries, join_entries, merge_entries
from tachyscope.meter import Meter
from tachyscope.session import Session
from tachyscope.types import LayerCache, PassContext, Shape

COLUMNS = 1024  # slots whose attention is read off at once


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


def read_mass(policy: AttentionPolicy, q: Tensor, layer: LayerCache, ctx: PassContext) -> Tensor:
    """The attention [B, H, S, end] that a policy really pays: its answer to one-hot values."""
    width = COLUMNS
    if isinstance(policy, Ann) and policy.top_p is not None:
        width = q.shape[3]  # its ragged form writes into the queries' shape
    parts = []
    for lo in range(0, ctx.end, width):
        hot = torch.zeros(layer.k.shape[2], width, dtype=layer.v.dtype, device=layer.v.device)
        count = min(width, ctx.end - lo)
        hot[lo : lo + count, :count] = torch.eye(count, dtype=hot.dtype, device=hot.device)
        values = policy.to_index_order(hot.expand(*layer.k.shape[:2], -1, -1), layer, ctx)
        stand_in = replace(layer, v=values, scratch=())
        parts.append(policy.attend(q, stand_in, ctx, Meter(q.device))[..., :count])
    return torch.cat(parts, -1)


class Probed(Session):
    """A session that also holds what `keep_all` would, and compares attention with it.

    Its outputs are those of a plain session; `recalls` gathers, by chunk, the recall of every
    query of the first and the clean pass over the chunks in `wanted`, as [B, H, S] a layer.
    """

    watches = True

    def __init__(self, shape: Shape, *args: Any, wanted: Collection[int] = (), **kwargs: Any):
        self.wanted = frozenset(wanted)
        super().__init__(shape, *args, **kwargs)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        groups = (self.shape.batch, self.plan.cache.cache_heads(self.shape), 0)
        # by layer: keys and log-weights as they were committed, and the slot each went to
        self.shadow: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.shape.layers)]
        empty = torch.zeros(groups, dtype=torch.int64, device=self.device)
        self.slots = [empty] * self.shape.layers
        self.recalls: dict[int, list[Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        ctx = self._context
        assert ctx is not None and self._cos_sin is not None
        ends = ctx.pass_index in (0, ctx.pass_count - 1)
        if self.chunk in self.wanted and ends and self.past and not ctx.prefilling:
            turned = self.rope.apply(q, *self._cos_sin)
            self.recalls.setdefault(self.chunk, []).append(
                self._recall(turned, ctx.for_layer(layer))
            )
        return out

    def _recall(self, q: Tensor, ctx: PassContext) -> Tensor:
        here, heads = self.layers[ctx.layer], q.shape[1]
        now = slice(ctx.past, ctx.end)
        parts = [*self.shadow[ctx.layer], (here.k[:, :, now], here.log_count[:, :, now])]
        keys, log_count = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        keys, log_count = (
            x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] > 1 else x
            for x in (keys, log_count)
        )
        scores = q.double() @ keys.double().mT / math.sqrt(q.shape[3])
        dense = (scores + log_count.double().unsqueeze(2)).softmax(-1)
        slots = self.slots[ctx.layer]
        slots = slots.repeat_interleave(heads // slots.shape[1], 1)
        return recall_of(read_mass(self.plan.attention, q, here, ctx).double(), dense, slots)

    def commit(self, n: int | None = None) -> None:
        n = self.now if n is None else n
        past, total = self.past, self.past + n
        before = []
        for i, layer in enumerate(self.layers):
            new = slice(past, total)
            # committed weights are those of one group a head where heads keep their own entries
            log_count = layer.log_count[:, :, new].clone()
            self.shadow[i].append((layer.k[:, :, new].clone(), log_count))
            before.append(self._labels(layer, total))
        folds: list[tuple[Tensor, Tensor]] = []

        def note_merge(*args: Any) -> tuple[Tensor, Tensor]:
            source, root = merge_entries(*args)
            folds.append((source.long(), root.long()))
            return source, root

        def note_join(held: Entries, source: Tensor, root: Tensor, *how: bool) -> None:
            folds.append((source, root))
            join_entries(held, source, root, *how)

        # the one moment at which entries' groups are known
        with (
            mock.patch.object(matching, "merge_entries", note_merge),
            mock.patch.object(merge, "join_entries", note_join),
        ):
            super().commit(n)
        for i, layer in enumerate(self.layers):
            self._follow(i, layer, before[i], folds[i] if folds else None, past, n)

    def _labels(self, layer: LayerCache, count: int) -> Tensor:
        """One number an entry, from its position; another for each empty slot."""
        t, y, x = layer.pos[:, :, :count].long().unbind(-1)
        label = t * self.shape.tokens_per_frame + y * self.shape.grid[1] + x
        slot = torch.arange(count, device=label.device) + 2**50
        return torch.where(layer.log_count[:, :, :count] == -math.inf, slot, label)

    def _follow(
        self,
        i: int,
        layer: LayerCache,
        before: Tensor,
        folded: tuple[Tensor, Tensor] | None,
        past: int,
        n: int,
    ) -> None:
        """Bring `slots` up to date: whose group each entry joined, and where that stands now."""
        total = before.shape[2]
        protected = (
            self.prompt + (getattr(self.plan.cache, "sink", 0) or 0) * self.shape.tokens_per_frame
        )
        first = min(protected, past)
        slot = torch.arange(total, device=before.device).expand_as(before)
        group = slot.clone()
        if folded is not None:
            source, root = folded
            group.scatter_(2, source + first, root + first)
        # an entry stands where one of its group stood: find it by its position
        order = before[:, :, first:].contiguous().sort(-1)
        after = self._labels(layer, self.past)
        found = torch.searchsorted(order.values, after[:, :, first:].contiguous())
        member = order.indices.gather(2, found.clamp(max=total - first - 1)) + first
        # the sink never moves, though its positions may
        member = torch.cat([slot[:, :, :first], member], 2)[:, :, : self.past]
        stands = torch.full((*before.shape[:2], total + 1), -1, device=before.device)
        live = layer.log_count[:, :, : self.past] > -math.inf
        target = torch.where(live, group.gather(2, member), total)
        stands.scatter_(2, target, torch.arange(self.past, device=before.device).expand_as(target))
        stands[:, :, total] = -1
        old = self.slots[i]
        fresh = slot[:, :, past : past + n].expand(*old.shape[:2], n)
        held = torch.cat([old, fresh], 2)
        now = stands.gather(2, group.gather(2, held.clamp(min=0)))
        self.slots[i] = torch.where(held < 0, -1, now)
