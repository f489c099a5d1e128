"""Observe what repeats from frame to frame and where attention mass lies, as tables of means."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.core.observers import Observer
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext
from tachyscope.io.results import Document

# what is measured, in words
NAMES = {
    "mlp": "MLP", "attention": "attention", "prompt": "prompt", "rest": "rest",
    "query": "query", "key": "key", "key_rotated": "key, rotated",
}  # fmt: skip
ALIKE = ("mlp", "query", "key", "key_rotated")  # what is compared with the frame before
ASPECTS = ("cosine", "difference", "elsewhere")  # what `alike` returns, in its order
MASS = ("mass", "prompt_mass")  # of the video's entries, of the prompt's tokens
PERCENTS = (1, 2, 5, 10, 20, 30, 50, 75, 100)  # of the keys, strongest first


class Record(NamedTuple):
    """Values [n, …] of one layer and pass, one a sampled token, in one latent frame."""

    layer: int
    frame: int
    step: int
    values: Tensor

    def on_host(self) -> Record:
        return self._replace(values=self.values.double().cpu())


class StatsObserver(Observer):
    """Samples tensors of a session.

    `found` gathers records by kind: of `ALIKE` cosine, relative difference and the cosine to
    another place; of `MASS` the mass in the strongest `PERCENTS` of the keys.
    """

    def __init__(self, places: int = 64, queries: int = 16) -> None:
        self.wanted, self.queries = places, queries

    def on_open(self, session: Session) -> None:
        self.session = session
        every = range(session.shape.tokens_per_frame)
        # a generator of its own: drawing from the session's would change the video
        drawn = random.Random(f"{session.memory.seeds[0]} places")
        self.places = sorted(drawn.sample(every, min(self.wanted, len(every))))
        self.queries = min(self.queries, len(every))
        self.found: dict[str, list[Record]] = defaultdict(list)
        self._fresh: dict[tuple[str, int, int], dict[int, Tensor]] = {}
        self._last: dict[tuple[str, int, int], tuple[int, Tensor]] = {}
        self._weighed: list[tuple[str, Record]] = []

    def on_attend(
        self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor, rotated_q: Tensor, out: Tensor
    ) -> None:
        if ctx.prefilling:
            return
        here = self.session.memory.layers[ctx.layer]
        kept = {"query": q, "key": k, "key_rotated": here.now(ctx)[0][:, :, ctx.start :]}
        for kind, x in kept.items():
            self._keep(kind, ctx, x.transpose(1, 2))
        tokens = self._tokens(ctx, self._drawn(ctx))
        if tokens.numel():
            seen = ctx.past + ctx.start + tokens + 1 if ctx.shape.token_by_token else None
            log_count = self.session.plan.attention.log_weights(
                self.session.present.layers[ctx.layer]
            )
            held = mass(rotated_q[:, :, tokens], here.keys(ctx), log_count, seen)
            self._weigh("mass", ctx, held)

    def on_cross(self, ctx: PassContext, q: Tensor) -> None:
        text, tokens = self.session.memory.texts[ctx.layer], self._tokens(ctx, self._drawn(ctx))
        if tokens.numel():
            self._weigh("prompt_mass", ctx, mass(q[:, :, tokens], text.k, text.log_count))

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        if not ctx.prefilling:
            self._keep("mlp", ctx, y)

    def on_commit(self, ctx: PassContext, n: int) -> None:
        frame, frames = self.session.memory.latent_frame, n // ctx.shape.tokens_per_frame
        for (kind, layer, step), parts in self._fresh.items():
            ordered = [parts[place] for place in sorted(parts)]
            now = torch.cat(ordered, 1).unflatten(1, (-1, len(self.places)))
            self._compare(kind, layer, step, frame, now[:, :frames])
        for kind, part in self._weighed:
            self.found[kind].append(part.on_host())
        self._fresh, self._weighed = {}, []

    def _drawn(self, ctx: PassContext) -> list[int]:
        """The places whose queries are weighed, seeded by chunk, layer and pass."""
        drawn = random.Random(
            f"{self.session.memory.seeds[0]} {ctx.chunk} {ctx.layer} {ctx.pass_index}"
        )
        return sorted(drawn.sample(range(ctx.shape.tokens_per_frame), self.queries))

    def _tokens(self, ctx: PassContext, places: Sequence[int]) -> Tensor:
        """The tokens of this pass at the places, latent frame by latent frame."""
        inside = self._inside(ctx, places)
        return torch.tensor(inside, dtype=torch.int64, device=self.session.device)

    def _inside(self, ctx: PassContext, places: Sequence[int]) -> list[int]:
        size = ctx.shape.tokens_per_frame
        frames = range(-(-(ctx.start + ctx.tokens) // size))
        slots = [frame * size + place - ctx.start for frame in frames for place in places]
        return [i for i in slots if 0 <= i < ctx.tokens]

    def _keep(self, kind: str, ctx: PassContext, x: Tensor) -> None:
        """Remember x [B, S, …] at the sampled places until the chunk is finished."""
        parts = self._fresh.setdefault((kind, ctx.layer, ctx.pass_index), {})
        # a repeated pass, or a rejected draft, replaces what was kept before
        if ctx.shape.token_by_token:
            for i in self._inside(ctx, self.places):
                parts[ctx.start + i] = x[:, i : i + 1].clone()
        else:
            parts[0] = x[:, self._tokens(ctx, self.places)]

    def _compare(self, kind: str, layer: int, step: int, frame: int, now: Tensor) -> None:
        """Compare each latent frame of now [B, F, P, …], from `frame` on, with the one before."""
        before, old = self._last.get((kind, layer, step), (-1, None))
        self._last[kind, layer, step] = frame + now.shape[1] - 1, now[:, -1:]
        # if the last chunk had no such pass, its frames cannot be compared
        frames = now if old is None or before != frame - 1 else torch.cat([old, now], 1)
        first = frame + now.shape[1] - frames.shape[1] + 1
        values = alike(frames[:, :-1], frames[:, 1:])
        for i, of_frame in enumerate(values.unbind(1)):
            record = Record(layer, first + i, step, of_frame.flatten(0, 1))
            self.found[kind].append(record.on_host())

    def _weigh(self, kind: str, ctx: PassContext, held: Tensor) -> None:
        """Note shares of mass [B, H, F · r, P] by latent frame, as the mean over heads."""
        frames = max(1, ctx.tokens // ctx.shape.tokens_per_frame)
        by_query = held.mean(1).unflatten(1, (frames, -1))
        first = self.session.memory.latent_frame
        for i, values in enumerate(by_query.unbind(1)):
            record = Record(ctx.layer, first + i, ctx.pass_index, values.flatten(0, 1))
            self._weighed.append((kind, record))


def by_axes(records: Mapping[str, Sequence[Record]], axes: Sequence[str]) -> list[Document]:
    """A row for each layer, latent frame or pass on the axes, with the measures of every kind."""
    rows: dict[tuple[int, ...], Document] = {}
    for kind in (*ALIKE, *MASS):
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for record in records.get(kind, ()):
            spot = {"layer": record.layer, "frame": record.frame, "pass": record.step}
            groups[tuple(spot[axis] for axis in axes)].append(record.values)
        for key, values in groups.items():
            row = rows.setdefault(key, dict(zip(axes, key, strict=True)))
            row |= _measures(kind, torch.cat(values))
    return [rows[key] for key in sorted(rows)] if rows else [{}]


def _measures(kind: str, values: Tensor) -> dict[str, float]:
    means = values.mean(0).tolist()
    if kind in MASS:
        return {f"{kind}_{p}": mean for p, mean in zip(PERCENTS, means, strict=True)}
    named = {f"{kind}_{x}": mean for x, mean in zip(ASPECTS, means, strict=True)}
    low, high = np.quantile(values[:, 0].numpy(), (0.05, 0.95))
    return named | {f"{kind}_cosine_p5": float(low), f"{kind}_cosine_p95": float(high)}


def alike(old: Tensor, new: Tensor) -> Tensor:
    """Cosine, |old - new| / |new|, and the cosine to another place: [B, F, P, 3].

    old and new are [B, F, P, W], or [B, F, P, H, D]: then values are means over heads. The other
    place is half the sampled ones away: what all places share is not repetition.
    """
    a, b = old.double(), new.double()
    size = b.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    parts = (
        F.cosine_similarity(a, b, -1),
        (a - b).norm(dim=-1) / size,
        F.cosine_similarity(a.roll(a.shape[2] // 2, 2), b, -1),
    )
    return torch.stack([part.flatten(3).mean(-1) if part.ndim > 3 else part for part in parts], -1)


def mass(
    q: Tensor, k: Tensor, log_count: Tensor | None = None, seen: Tensor | None = None
) -> Tensor:
    """The attention mass in each query's strongest keys, [B, H, R, len(PERCENTS)].

    q [B, H, R, D] and k [B, Hkv, N, D] are rotated; log_count is as in a layer; seen [R] counts
    of the entries a query sees. A share of the keys is rounded up to whole ones.
    """
    group = q.shape[1] // k.shape[1]
    scores = q.float() @ k.float().repeat_interleave(group, 1).mT / math.sqrt(q.shape[3])
    if log_count is not None:
        wide = log_count if log_count.shape[1] == 1 else log_count.repeat_interleave(group, 1)
        scores = scores + wide.unsqueeze(2)
    if seen is not None:
        later = torch.arange(k.shape[2], device=q.device) >= seen[:, None]
        scores = scores.masked_fill(later, -math.inf)
    live = scores.isfinite().sum(-1, keepdim=True)
    held = scores.softmax(-1, dtype=torch.float64).sort(descending=True).values.cumsum(-1)
    # number by number, and whole ones: a share as a float may round up to one key more
    counts = torch.cat([-(-live * percent // 100) for percent in PERCENTS], -1)
    return held.gather(-1, counts.clamp(min=1) - 1)
