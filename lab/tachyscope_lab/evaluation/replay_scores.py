"""Replay ranked by other scores than the policy's own, or held to some layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.observers import Observer
from tachyscope.core.opening import open as open_stream
from tachyscope.core.plan import DEFAULT
from tachyscope.core.prefill import Part, prefill
from tachyscope.core.session import Session
from tachyscope.core.types import Mlp, PassContext
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.replay import TokenReplay
from tachyscope.replay.neurons import NeuronReplay, Neurons
from tachyscope.replay.runner import ReplayRunner
from tachyscope.snapshot.format import COUNTS
from tachyscope.store import LayerPass
from tachyscope_lab.evaluation.clips import GIVEN, Clip


@dataclass(frozen=True)
class Way:
    """A plan, what its replay is ranked by, and the layers in which it replays (None: in all).

    heads: ranked by "head", the one head of every layer whose score counts. thresholds: of every
    layer, taken from its scores, so that the plan's threshold is 0 in all.
    """

    plan: str
    rank: str = "tas"
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = ()

    @property
    def published(self) -> bool:
        """Whether the plan's own policy decides, so that a decode engine may run it."""
        return self.rank == "tas" and self.layers is None and not self.thresholds

    def __str__(self) -> str:
        out = self.plan if self.rank == "tas" else f"{self.plan} by {self.rank}"
        return out if self.layers is None else f"{out} in layer {', '.join(map(str, self.layers))}"


class MassObserver(Observer):
    """The attention that each token's place one frame back gets, mean over heads: [B, 1] a layer.

    For token models whose cache keeps every entry.
    """

    def on_open(self, session: Session) -> None:
        self.session = session
        self.found: dict[int, Tensor] = {}

    def on_attend(
        self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor, rotated_q: Tensor, out: Tensor
    ) -> None:
        if q.shape[2] > 1 or not ctx.chunk:
            return
        here = self.session.memory.layers[ctx.layer]
        keys = here.keys(ctx)
        group = q.shape[1] // keys.shape[1]
        logits = rotated_q.unflatten(1, (-1, group)).squeeze(3) @ keys.mT / math.sqrt(q.shape[3])
        weights = self.session.plan.attention.log_weights(self.session.present.layers[ctx.layer])
        empty = weights.isinf().unsqueeze(2)
        paid = logits.masked_fill(empty, -torch.inf).softmax(-1)
        # every entry is kept, so the same place of the last frame is one frame's places back
        back = ctx.end - 1 - ctx.shape.tokens_per_frame
        self.found[ctx.layer] = paid[..., back].mean((1, 2))[:, None]


class RankedReplay(ReplayRunner):
    """Replay that may be ranked by another score than TAS, or held to some layers.

    tas       the policy's own: the mean attention logit to the same place one frame back
    head      that of one head alone
    reversed  its negative
    mass      the attention that key really gets, after the softmax, mean over heads
    input     cosine of the MLP's input to the one that made the kept output
    change    the output's own relative change, negative: best there could be, and saves nothing

    `noted` gathers the scores named in `note`, of the last frame: [layers, B, N].
    """

    def __init__(self, session: Session, way: Way, note: Sequence[str]) -> None:
        policy = session.memory.replay.policy
        assert policy is None or isinstance(policy, TokenReplay)
        super().__init__(policy, getattr(session.memory.replay, "by_layer", ()))
        self.rank, self.within, self.heads = way.rank, way.layers, way.heads
        self.thresholds = way.thresholds
        self.by_head: dict[int, Tensor] = {}  # of the present pass, by layer: [B, H, S]
        shape, dtype, device = session.shape, session.dtype, session.device
        size = (shape.layers, shape.batch, shape.tokens_per_frame)
        self.noted = {name: torch.zeros(size, device=device) for name in note}
        self._inputs = torch.zeros(*size, shape.width, dtype=dtype, device=device)
        self.mass = MassObserver()
        if "mass" in (way.rank, *note):
            session.watch(self.mass)

    def score(self, p: LayerPass, q: Tensor, rotated_q: Tensor, k: Tensor) -> None:
        ctx, own = p.ctx, p.layer.own["replay"]
        scored = self.policy is not None and self.policy.score in ("rotated", "mixed")
        if scored and not ctx.prefilling:
            old = own["key"][ctx.pass_index].narrow(2, ctx.start, ctx.tokens)
            groups = rotated_q.unflatten(1, (old.shape[1], -1)) * old.unsqueeze(2)
            self.by_head[ctx.layer] = groups.sum(-1).flatten(1, 2) / math.sqrt(q.shape[-1])
        super().score(p, q, rotated_q, k)
        if self.thresholds and ctx.layer in self.scores:
            self.scores[ctx.layer] = self.scores[ctx.layer] - self.thresholds[ctx.layer]

    def mlp(self, p: LayerPass, x: Tensor, fn: Mlp) -> Tensor:
        ctx, work, own = p.ctx, p.work, p.layer.own["replay"]
        layer, here = ctx.layer, slice(ctx.start, ctx.start + ctx.tokens)
        if self.policy is None or ctx.prefilling:
            return super().mlp(p, x, fn)
        if self.within is not None and layer not in self.within:
            work.add_mlps(fn.macs, x.shape[:2].numel(), x.shape[:2].numel())
            return fn(x)
        if not ctx.given and ctx.pass_index in self.ready:
            ranked = {name: self._rank(name, x, fn, own, layer, here) for name in self.noted}
            for name, value in ranked.items():
                self.noted[name][layer, :, here] = value
            if self.rank != "tas":
                self.scores[layer] = self._rank(self.rank, x, fn, own, layer, here)
        out = super().mlp(p, x, fn)
        fresh = own["age"][ctx.pass_index][:, here] == 0
        kept = self._inputs[layer][:, here]
        # the input that made the kept output, which may be frames old
        self._inputs[layer][:, here] = torch.where(fresh[..., None], x, kept)
        return out

    def _rank(
        self, name: str, x: Tensor, fn: Mlp, own: dict[str, Tensor], layer: int, here: slice
    ) -> Tensor:
        if name == "tas":
            return self.scores[layer]
        if name == "head":
            return self.by_head[layer][:, self.heads[layer]]
        if name == "reversed":
            return -self.scores[layer]
        if name == "mass":
            return self.mass.found[layer]
        if name == "input":
            return torch.cosine_similarity(x, self._inputs[layer][:, here], -1)
        return -changes(fn(x), own["output"][0][:, here])


def replayed(session: Session) -> Tensor | None:
    """Of the last frame's tokens in all layers, the share that was replayed, by row [B].

    None where no token gate chooses: then all rows have the meter's share.
    """
    if not isinstance(session.plan.replay, TokenReplay):
        return None
    runner = session.memory.replay
    within = runner.within if isinstance(runner, RankedReplay) else None
    ages = [
        layer.own["replay"]["age"][0]
        for i, layer in enumerate(session.memory.layers)
        if within is None or i in within
    ]
    return torch.stack(ages).gt(0).float().mean((0, 2)).cpu()


def changes(new: Tensor, old: Tensor) -> Tensor:
    """How far outputs [..., W] are from others, in lengths of their own: [...]."""
    change: Tensor = (new - old).norm(dim=-1) / new.norm(dim=-1).clamp_min(1e-12)
    return change


@torch.inference_mode()
def begin(
    model: VilaModel,
    way: Way,
    clip: Clip,
    codes: Tensor,
    note: Sequence[str] = (),
    observers: Sequence[Observer] = (),
    start: Session | None = None,
) -> Session:
    """A session, one row a world, that has seen the prompts and the given frames.

    Worlds share every pass: the rows never look at each other, and a pass over several costs
    little more than one. start: a dense session that has seen all given frames but the last, from
    which plans that read and keep all entries go on.
    """
    session = _open(model, way.plan, clip, clip.length, observers)
    if not isinstance(session.plan.replay, NeuronReplay):
        session.memory.replay = RankedReplay(session, way, note)
    first = 0
    if start is not None and _keeps_all(session):
        _go_on(session, start)
        first = GIVEN - 1
    prefill_clip(model, session, clip, codes, range(first, GIVEN))
    session.meter.take()
    return session


def begin_dense(model: VilaModel, clip: Clip, codes: Tensor) -> Session:
    """A dense session that has seen the prompts and all given frames but the last."""
    session = _open(model, "dense", clip, GIVEN, ())
    prefill_clip(model, session, clip, codes, range(GIVEN - 1))
    return session


def _open(
    model: VilaModel, plan: str, clip: Clip, frames: int, observers: Sequence[Observer]
) -> Session:
    return open_stream(
        model, plan, prompt=[world.prompt for world in clip.worlds],
        seed=[world.number for world in clip.worlds], frames=frames, observers=observers,
    ).session  # fmt: skip


@torch.inference_mode()
def score(model: VilaModel, session: Session, codes: Tensor, actions: Any) -> Tensor:
    """`model.score` of a frame's codes, by one pass over all of its tokens where that is the same.

    It is not where a token's output depends on those of others in its layer, or is looked at alone.
    """
    replay = session.plan.replay
    alone = isinstance(replay, TokenReplay) and replay.drift
    alone = alone or (isinstance(replay, Neurons) and replay.age > 0)
    if alone or session.observers:
        return model.score(session, codes, actions)
    before = session.memory.features.last_state()[:, None]
    states = feed_frame(model, session, codes, actions)
    return model.logits(torch.cat([before, states[:, :-1]], 1), codes.flatten(1, 3))


def feed_frame(model: VilaModel, session: Session, codes: Tensor, actions: Any) -> Tensor:
    """The trunk's states [B, N, W] of a frame's codes in one pass, as if they had been made."""
    pos = session.shape.positions(session.memory.latent_frame, 1, model.device)
    return model.feed(session, codes.flatten(1, 3), pos, actions, drafted=True)


@torch.inference_mode()
def prefill_clip(
    model: VilaModel, session: Session, clip: Clip, codes: Tensor, frames: Iterable[int]
) -> None:
    moves = clip.moves_on(model.device)
    for i in frames:
        prefill(model, session, [Part(codes[:, i : i + 1], moves[i : i + 1])])


def _keeps_all(session: Session) -> bool:
    """Whether given frames but the last leave nothing but keys and values, as dense ones do."""
    plan, replay = session.plan, session.memory.replay.policy
    drifts = isinstance(replay, TokenReplay) and replay.drift
    kinds = (plan.cache, plan.attention, plan.store)
    return kinds == (DEFAULT.cache, DEFAULT.attention, DEFAULT.store) and not drifts


def _go_on(session: Session, start: Session) -> None:
    """Take over what a dense session of the same clip remembers."""
    for mine, theirs in zip(session.memory.layers, start.memory.layers, strict=True):
        for name in ("k", "v", "pos", "log_count"):
            getattr(mine, name)[:, :, : start.memory.past] = getattr(theirs, name)[
                :, :, : start.memory.past
            ]
    for name in COUNTS:
        setattr(session.memory, name, getattr(start.memory, name))
    session.memory.features = copy.deepcopy(start.memory.features)
