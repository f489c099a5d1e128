"""How long a token takes on the CPU, and what of it is Python's."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from tachyscope.attention import AttentionPolicy
from tachyscope.core.meter import summary
from tachyscope.core.session import Session
from tachyscope.core.stream import Stream
from tachyscope.io.results import Document
from tachyscope.measure.noise import noise
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.store import LayerPass
from tachyscope_lab.evaluation.clips import GIVEN, Clip, true_codes
from tachyscope_lab.evaluation.replay_scores import Way, begin

WINDOW = "attention=window:tokens=512,sink=4"
REPLAY = "replay=attentive:share=0.75,age=4,drift=true"


class Timed(VilaModel):
    """The model, with a clock on every run of its trunk over a token."""

    def __init__(self, model: VilaModel, weights: nn.Module | None = None) -> None:
        weights = model.transformer if weights is None else weights
        super().__init__(cast(Any, weights), model.config, model.tokenizer, model.name)
        self.trunk_ms: list[float] = []

    def feed(
        self,
        session: Session,
        codes: Tensor,
        pos: Tensor,
        actions: Sequence[int] | Tensor,
        drafted: bool = False,
    ) -> Tensor:
        start = time.perf_counter()
        states = super().feed(session, codes, pos, actions, drafted)
        self.trunk_ms.append((time.perf_counter() - start) * 1e3)
        return states


class Nothing(nn.Module):
    """Takes a layer's place and computes nothing: one tensor of the right width, always."""

    macs = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.out = width, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.out.shape[:-1] != x.shape[:-1]:
            self.out = torch.zeros(*x.shape[:-1], self.width)
        return self.out


@dataclass(frozen=True)
class NoRead(AttentionPolicy):
    """Attention that reads nothing: a query is its own answer."""

    paper: ClassVar[str] = ""

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        return q


def hollow(model: VilaModel, projections: bool) -> VilaModel:
    """The model with its trunk's MLPs, and on demand its projections, replaced by nothing."""
    weights = copy.deepcopy(model.transformer)
    for layer in weights.trunk.layers:
        layer.mlp = Nothing(model.config.hidden)
        if projections:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                part = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, Nothing(part.out_features))
    return Timed(model, weights)


@torch.inference_mode()
def clock(model: VilaModel, clip: Clip, rounds: int = GIVEN) -> Document:
    """Time a token: of the trunk, and of the whole step; plans by turns, dense among them twice.

    A round is the next frame of one world, made by every plan in an order drawn anew; its time is
    the mean of its tokens, since a replayed token and a computed one are different things. Ratios
    are medians over rounds of dense / plan. `no_mlp` is dense without its MLPs' work, `python` and
    `python_replay` without any linear or attention: Python, norms, rotation, cache, choosing.
    """
    clip = Clip(clip.worlds[:1], clip.actions[:1], clip.frames[:1])
    codes = true_codes(model, clip)
    ways = {
        "dense": Way("dense"), "again": Way("dense"), "window": Way(WINDOW),
        "replay": Way(REPLAY), "replay_window": Way(f"{WINDOW} {REPLAY}"),
        "no_mlp": Way("dense"), "python": Way("dense"), "python_replay": Way(REPLAY),
    }  # fmt: skip
    players: dict[str, Timed] = {}
    streams: dict[str, Stream] = {}
    stats: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for name, way in ways.items():
        made_of = hollow(model, name.startswith("python")) if name[:2] in ("no", "py") else model
        players[name] = Timed(made_of)
        session = _plain(begin(model, way, clip, codes), players[name], clip, codes)
        streams[name] = Stream(players[name], session)
        if name.startswith("python"):
            session.plan = replace(session.plan, attention=NoRead())
    trunk: dict[str, list[float]] = {name: [] for name in ways}
    whole: dict[str, list[float]] = {name: [] for name in ways}
    token: dict[str, list[float]] = {name: [] for name in ways}
    draw = random.Random(0)
    names = list(ways)
    for i in range(GIVEN, GIVEN + rounds):
        for name in draw.sample(names, len(names)):
            player, stream = players[name], streams[name]
            player.trunk_ms = []
            stats[name].append(stream.generate(clip.moves[i].tolist()).stats)
            spent = stats[name][-1]["chunk_ms"]
            whole[name].append(spent / stream.session.shape.tokens_per_frame)
            trunk[name].append(statistics.fmean(player.trunk_ms))
            token[name] += player.trunk_ms
    out: Document = {
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "trunk_aa": noise(trunk["dense"], trunk["again"]),
        "whole_aa": noise(whole["dense"], whole["again"]),
    }
    for name in ways:
        row: Document = {"plan": str(ways[name])}
        for key, times in (("trunk", trunk), ("whole", whole)):
            ratios = [a / b for a, b in zip(times["dense"], times[name], strict=True)]
            row[f"{key}_ms"] = statistics.median(times[name])
            row[f"{key}_ratio"] = statistics.median(ratios)
            row[f"{key}_ratio_low"], row[f"{key}_ratio_high"] = min(ratios), max(ratios)
        row["trunk_token_ms"] = statistics.median(token[name])
        row["share_eligible"] = summary(stats[name])["share_eligible"]
        out[name] = row
    return out


def _plain(ranked: Session, player: VilaModel, clip: Clip, codes: Tensor) -> Session:
    """A session of the same plan without anything that only measuring needs."""
    memory = ranked.memory
    session = Session(
        ranked.shape, ranked.plan, ranked.rope, latent_frames=memory.latent_frames,
        lengths=memory.lengths, seed=memory.seeds, device=ranked.device, dtype=ranked.dtype,
    )  # fmt: skip
    session.memory.source = memory.source
    session.restore(ranked.state())
    player.prefill_latents(session, codes[:, GIVEN - 1 : GIVEN], clip.moves[GIVEN - 1].tolist())
    session.restore(ranked.state())
    return session
