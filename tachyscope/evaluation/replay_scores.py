"""Replay ranked by other scores than the policy's own, or held to some layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tachyscope.evaluation.clips import GIVEN, Clip
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.prefill import prefill
from tachyscope.replay.runner import ReplayRunner
from tachyscope.session import Session
from tachyscope.stream import open as open_stream
from tachyscope.types import Mlp, Shape


@dataclass(frozen=True)
class Way:
    """A plan, what its replay is ranked by, and the layers in which it replays (None: in all)."""

    plan: str
    rank: str = "tas"
    layers: tuple[int, ...] | None = None

    def __str__(self) -> str:
        out = self.plan if self.rank == "tas" else f"{self.plan} by {self.rank}"
        return out if self.layers is None else f"{out} in layer {', '.join(map(str, self.layers))}"


class Ranked(Session):
    """A session whose replay may be ranked by another score than TAS, or held to some layers.

    tas       the policy's own: the mean attention logit to the same place one frame back
    reversed  its negative
    mass      the attention that key really gets, after the softmax, mean over heads
    input     cosine of the MLP's input to the one that made the kept output
    change    the output's own relative change, negative: best there could be, and saves nothing
    """

    watches = True

    def __init__(
        self,
        shape: Shape,
        *args: Any,
        rank: str = "tas",
        within: Sequence[int] | None = None,
        watch: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self.rank, self.within, self.watch = rank, within, tuple(watch)
        super().__init__(shape, *args, **kwargs)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        size = (self.shape.layers, self.shape.batch, self.shape.tokens_per_frame)
        self.watched = {name: torch.zeros(size, device=self.device) for name in self.watch}
        self._masses: dict[int, Tensor] = {}
        self._inputs = torch.zeros(*size, self.shape.width, dtype=self.dtype, device=self.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        assert self._context is not None and self._cos_sin is not None
        if "mass" in (self.rank, *self.watch) and q.shape[2] == 1 and self.chunk:
            turned, end = self.rope.apply(q, *self._cos_sin), self._context.end
            keys = self.layers[layer].k[:, :, :end]
            group = q.shape[1] // keys.shape[1]
            logits = turned.unflatten(1, (-1, group)).squeeze(3) @ keys.mT / math.sqrt(q.shape[3])
            ctx = self._context.for_layer(layer)
            empty = self.plan.attention.log_weights(self.layers[layer], ctx).isinf().unsqueeze(2)
            paid = logits.masked_fill(empty, -torch.inf).softmax(-1)
            # every entry is kept, so the same place of the last frame is one frame's places back
            self._masses[layer] = paid[..., end - 1 - self.shape.tokens_per_frame].mean((1, 2))[
                :, None
            ]
        return out

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        assert self._context is not None
        ctx = self._context
        if self.plan.replay is None or ctx.prefilling:
            return super().mlp(layer, x, fn)
        if self.within is not None and layer not in self.within:
            whole = ReplayRunner(None, self.shape, self.dtype, self.device)
            return whole.mlp(x, fn, {}, ctx, self.meter, self.policy_rng)
        here = slice(ctx.start, ctx.start + ctx.tokens)
        if ctx.tokens == 1 and ctx.pass_index in self.replay.ready:
            found = {name: self._rank(name, layer, x, fn, here) for name in self.watch}
            for name, value in found.items():
                self.watched[name][layer, :, here] = value
            if self.rank != "tas":
                self.replay.scores[layer] = self._rank(self.rank, layer, x, fn, here)
        out = super().mlp(layer, x, fn)
        fresh = self.layers[layer].extra["replay_age"][ctx.pass_index][:, here] == 0
        kept = self._inputs[layer][:, here]
        # the input that made the kept output, which may be frames old
        self._inputs[layer][:, here] = torch.where(fresh[..., None], x, kept)
        return out

    def _rank(self, name: str, layer: int, x: Tensor, fn: Mlp, here: slice) -> Tensor:
        if name == "tas":
            return self.replay.scores[layer]
        if name == "reversed":
            return -self.replay.scores[layer]
        if name == "mass":
            return self._masses[layer]
        if name == "input":
            return torch.cosine_similarity(x, self._inputs[layer][:, here], -1)
        old = self.layers[layer].extra["replay_output"][0][:, here]
        return -changes(fn(x), old)


def changes(new: Tensor, old: Tensor) -> Tensor:
    """How far outputs [..., W] are from others, in lengths of their own: [...]."""
    found: Tensor = (new - old).norm(dim=-1) / new.norm(dim=-1).clamp_min(1e-12)
    return found


@torch.inference_mode()
def begin(model: VilaModel, way: Way, clip: Clip, codes: Tensor, seed: int = 0) -> Ranked:
    """A session, one row a world, that has seen the prompts and the given frames.

    Worlds share every pass: the rows never look at each other, and a pass over several costs
    little more than one.
    """
    stream = open_stream(
        model, way.plan, prompt=[world.prompt for world in clip.worlds],
        seed=[seed + i for i in range(len(clip.worlds))], frames=len(clip.actions),
        make=partial(Ranked, rank=way.rank, within=way.layers),
    )  # fmt: skip
    session = stream.session
    assert isinstance(session, Ranked)
    for i in range(GIVEN):
        prefill(model, session, [(codes[:, i : i + 1], clip.moves[i : i + 1])])
    session.meter.take()
    return session
