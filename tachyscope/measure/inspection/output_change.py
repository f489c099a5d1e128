"""How far attention's output is from dense attention over every entry, layer by layer."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.observers import Observer
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext
from tachyscope.io.results import Document


class OutputChange(Observer):
    """Keeps every entry beside a session, as `keep_all` would, and compares attention's outputs.

    `found` gathers, by layer, |output - dense output| / |dense output| of some queries' heads. The
    queries are the plan's own, so a layer's value is what the policy does in that layer.
    """

    def __init__(self, queries: int = 16) -> None:
        self.queries = queries

    def on_open(self, session: Session) -> None:
        self.session = session
        layers = range(session.shape.layers)
        # keys, values and log-weights as they were committed
        self.entries: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in layers]
        self.found: dict[int, list[Tensor]] = defaultdict(list)

    def on_attend(
        self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor, rotated_q: Tensor, out: Tensor
    ) -> None:
        if ctx.prefilling or not ctx.past or not self.session.present.reads_past:
            return
        here, count = self.session.memory.layers[ctx.layer], q.shape[2]
        chosen = torch.arange(0, count, max(1, count // self.queries), device=q.device)
        present = (*here.now(ctx), here.log_count[:, :, ctx.past : ctx.end])
        keys, values, weights = (
            _by_head(torch.cat(parts, 2), q.shape[1])
            for parts in zip(*self.entries[ctx.layer], present, strict=True)
        )
        scores = rotated_q[:, :, chosen].double() @ keys.double().mT / math.sqrt(q.shape[3])
        scores = scores + weights.double().unsqueeze(2)
        if ctx.shape.token_by_token:
            first = keys.shape[2] - count  # entries before this pass's tokens
            later = torch.arange(keys.shape[2], device=q.device) > first + chosen[:, None]
            scores = scores.masked_fill(later, -math.inf)
        dense = scores.softmax(-1) @ values.double()
        off = (out[:, :, chosen].double() - dense).norm(dim=-1)
        size = dense.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
        self.found[ctx.layer].append((off / size).flatten().cpu())

    def on_commit(self, ctx: PassContext, n: int) -> None:
        new = slice(ctx.past, ctx.past + n)
        for entries, layer in zip(self.entries, self.session.memory.layers, strict=True):
            keys, values = (x[:, :, :n].clone() for x in layer.now(ctx))
            entries.append((keys, values, layer.log_count[:, :, new].clone()))

    def table(self) -> list[Document]:
        """Mean and 95th percentile by layer."""
        rows = []
        for layer, parts in sorted(self.found.items()):
            values = torch.cat(parts).numpy()
            high = float(np.quantile(values, 0.95))
            rows.append({"layer": layer, "change": float(values.mean()), "change_p95": high})
        return rows


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Entries [B, 1 or Hkv, …] for every head of the queries."""
    return x if x.shape[1] == 1 else x.repeat_interleave(heads // x.shape[1], 1)
