"""What replay costs a token model on Atrium, what it saves, and why it costs what it costs.

`python -m tachyscope.evaluation_tokens` needs neither cyclopts, rich nor av.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from tachyscope.adapters.checkpoint import read_json
from tachyscope.adapters.vila import Prompt, VilaAdapter
from tachyscope.attention import AttentionPolicy
from tachyscope.bench import Parser, noise
from tachyscope.errors import TachyscopeError
from tachyscope.evaluation import Values, World, interval, make_world, versus
from tachyscope.meter import Meter, summary
from tachyscope.models import MODELS, load
from tachyscope.quality import Frames, psnr
from tachyscope.results import Document, check_json, document, emit
from tachyscope.rollout import parse_plan
from tachyscope.session import Session
from tachyscope.types import Layer, Mlp, Moment, Shape
from tachyscope.worlds import atrium

GIVEN = 8
PACE = MODELS["atrium-tokens"].pace
# Letters of the given frames, then of the made ones, which see again what the given ones showed,
# and steps a frame.
CLIPS = {
    "pan": (".qqqqqqq", "eeeeeeee", PACE),
    "brisk": (".qqqqqqq", "eeeeeeee", 2.5 * PACE),
    "walk": (".wwwwwww", "ssssssss", PACE),
    "still": ("........", "........", PACE),  # only what moves on its own moves
}
WINDOW = "attention=window:tokens=512,sink=4"
SHIFTS = range(-4, 5)  # columns by which a picture may have moved since the last frame
RANKS = ("tas", "mass", "input")  # what a policy could know before it computes


@dataclass(frozen=True)
class Way:
    """A plan, what its replay is ranked by, and the layers in which it replays (None: in all)."""

    plan: str
    rank: str = "tas"
    layers: tuple[int, ...] | None = None

    def __str__(self) -> str:
        out = self.plan if self.rank == "tas" else f"{self.plan} by {self.rank}"
        return out if self.layers is None else f"{out} in layer {', '.join(map(str, self.layers))}"


SHARES = {"": 0.75, "_half": 0.5}
CONTROLS = {
    "attentive": "replay=attentive:share={share}",
    "random": "replay=random:share={share}",
    "every_k": "replay=every_k:k={k}",
}
DRIFTS = {"": ",drift=true", "_paper": ""}  # as it is here, as it was published
FORCED = {
    f"kl_{name}{how}{ending}": Way(text.format(share=share, k=round(1 / (1 - share))) + drift)
    for how, drift in DRIFTS.items()
    for ending, share in SHARES.items()
    for name, text in CONTROLS.items()
}
REPLAY = "replay=attentive:share=0.75,drift=true"
HALF = "replay=attentive:share=0.5,drift=true"
MADE = {
    "dense": Way("dense"),
    "replay": Way(REPLAY),
    "window": Way(WINDOW),
    "replay_window": Way(f"{WINDOW} {REPLAY}"),
    "half": Way(HALF),
    "half_window": Way(f"{WINDOW} {HALF}"),
    "quarter": Way("replay=attentive:share=0.25,drift=true"),
    "paper": Way("replay=attentive:share=0.75"),
    "paper_half": Way("replay=attentive:share=0.5"),
    "random": Way("replay=random:share=0.75,drift=true"),
    "every_k": Way("replay=every_k:k=4,drift=true"),
}
WHY = (
    Way(REPLAY), Way(REPLAY, "reversed"), Way(REPLAY, "mass"), Way(REPLAY, "input"),
    Way(REPLAY, "change"), Way(f"{REPLAY},age=3"),
)  # fmt: skip


# --- clips --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clip:
    """Worlds that the same actions lead through, one row each: their prompts and true frames."""

    worlds: tuple[World, ...]
    actions: str
    frames: tuple[Frames, ...]  # [T, H, W, 3] of each

    @property
    def moves(self) -> list[int]:
        return [atrium.ACTIONS.index(letter) for letter in self.actions]


def make_clip(name: str, worlds: int, seed: int = 0, size: int = atrium.SIZE) -> Clip:
    """A named clip's truth in so many unseen worlds."""
    given, made, pace = CLIPS[name]
    found = tuple(make_world(seed, number) for number in range(worlds))
    films = tuple(_film(world, given + made, pace, size) for world in found)
    return Clip(found, given + made, films)


def _film(world: World, actions: str, pace: float, size: int) -> Frames:
    pose = atrium.walk(world.start, atrium.letters(actions)[None], pace)[0]
    rooms = world.rooms.rows(torch.zeros(len(actions), dtype=torch.long))
    pictures = atrium.render(rooms, pose, pace * torch.arange(len(actions)), size)
    levels = (255 * pictures.clamp(0, 1)).round().to(torch.uint8)
    return cast(Frames, levels.permute(0, 2, 3, 1).contiguous().numpy())


def batch_prompts(model: VilaAdapter, texts: Iterable[str]) -> Prompt:
    """Prompts of several videos as one: rows are [conditional…, unconditional…]."""
    found = [model.encode(text) for text in texts]
    longest = max(x.ids.shape[1] for x in found)
    rows, lengths = [], []
    for row in range(len(found[0].lengths)):
        for x in found:
            rows.append(nn.functional.pad(x.ids[row], (longest - x.ids.shape[1], 0)))
            lengths.append(x.lengths[row])
    return Prompt(torch.stack(rows), tuple(lengths))


@torch.inference_mode()
def begin(model: VilaAdapter, way: Way, clip: Clip, codes: Tensor, seed: int = 0) -> Ranked:
    """A session, one row a world, that has seen the prompts and the given frames.

    Worlds share every pass: the rows never look at each other, and a pass over several costs
    little more than one.
    """
    prompt = batch_prompts(model, (world.prompt for world in clip.worlds))
    own = model.shape()
    shape = replace(own, rows=own.rows * len(clip.worlds))
    session = Ranked(
        shape, parse_plan(model, way.plan), model.rope(shape), rank=way.rank, within=way.layers,
        frames=len(clip.actions), lengths=prompt.lengths, seed=seed, device=model.device,
        dtype=model.dtype,
    )  # fmt: skip
    model.start(session, prompt)
    for i in range(GIVEN):
        model.clean(session, codes[:, i : i + 1], clip.moves[i : i + 1])
        session.commit()
    session.meter.take()
    return session


@torch.inference_mode()
def true_codes(model: VilaAdapter, clip: Clip) -> Tensor:
    """Codes [V, T, rows, columns, D] of a clip's true frames."""
    return torch.cat([model.latents(frames) for frames in clip.frames])


# --- another score ------------------------------------------------------------------------------


class Ranked(Session):
    """A session whose replay may be ranked by another score than TAS, or held to some layers.

    tas       the policy's own: the mean attention logit to the same place one frame back
    reversed  its negative
    mass      the attention that key really gets, after the softmax, mean over heads
    input     cosine of the MLP's input to the one that made the kept output
    change    the output's own relative change, negative: best there could be, and saves nothing
    """

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

    def reset(self) -> None:
        super().reset()
        size = (self.shape.layers, self.shape.rows, self.shape.places)
        self.watched = {name: torch.zeros(size, device=self.device) for name in self.watch}
        self._masses: dict[int, Tensor] = {}
        self._inputs = torch.zeros(*size, self.shape.width, dtype=self.dtype, device=self.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        assert self._moment is not None and self._angles is not None
        if "mass" in (self.rank, *self.watch) and q.shape[2] == 1 and self.chunk:
            turned, end = self.rope.turn(q, *self._angles), self._moment.end
            keys = self.layers[layer].k[:, :, :end]
            group = q.shape[1] // keys.shape[1]
            logits = turned.unflatten(1, (-1, group)).squeeze(3) @ keys.mT / math.sqrt(q.shape[3])
            empty = self.layers[layer].logw[:, :, None, :end].isinf()
            paid = logits.masked_fill(empty, -torch.inf).softmax(-1)
            # every entry is kept, so the same place of the last frame is one frame's places back
            self._masses[layer] = paid[..., end - 1 - self.shape.places].mean((1, 2))[:, None]
        return out

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        if self.plan.replay is None or self._prefilling:
            return super().mlp(layer, x, fn)
        if self.within is not None and layer not in self.within:
            self._count_rows(fn, x.shape[:2].numel(), x.shape[:2].numel())
            return fn(x)
        assert self._moment is not None
        at = self._moment
        here = slice(at.start, at.start + at.tokens)
        if at.tokens == 1 and at.step in self._ready:
            found = {name: self._rank(name, layer, x, fn, here) for name in self.watch}
            for name, value in found.items():
                self.watched[name][layer, :, here] = value
            if self.rank != "tas":
                self._scores[layer] = self._rank(self.rank, layer, x, fn, here)
        out = super().mlp(layer, x, fn)
        fresh = self.layers[layer].own["ring_age"][at.step][:, here] == 0
        kept = self._inputs[layer][:, here]
        # the input that made the kept output, which may be frames old
        self._inputs[layer][:, here] = torch.where(fresh[..., None], x, kept)
        return out

    def _rank(self, name: str, layer: int, x: Tensor, fn: Mlp, here: slice) -> Tensor:
        if name == "tas":
            return self._scores[layer]
        if name == "reversed":
            return -self._scores[layer]
        if name == "mass":
            return self._masses[layer]
        if name == "input":
            return torch.cosine_similarity(x, self._inputs[layer][:, here], -1)
        old = self.layers[layer].own["ring_mlp"][0][:, here]
        return -changes(fn(x), old)


def changes(new: Tensor, old: Tensor) -> Tensor:
    """How far outputs [..., W] are from others, in lengths of their own: [...]."""
    found: Tensor = (new - old).norm(dim=-1) / new.norm(dim=-1).clamp_min(1e-12)
    return found


# --- measures -----------------------------------------------------------------------------------


def divergence(dense: Tensor, other: Tensor) -> Tensor:
    """Mean over places and codes of KL(dense || other), from logits [V, N, D, K]: [V]."""
    p, q = dense.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean((1, 2))


@torch.inference_mode()
def forced(
    model: VilaAdapter, clip: Clip, ways: Sequence[Way], frames: int = GIVEN
) -> list[list[Values]]:
    """KL from dense of each way, by world, all fed the true codes; dense itself comes first."""
    codes = true_codes(model, clip)
    sessions = [begin(model, way, clip, codes) for way in (Way("dense"), *ways)]
    sums = torch.zeros(len(sessions), 3, len(clip.worlds))
    first = torch.zeros(len(sessions), len(clip.worlds))
    for i in range(GIVEN, GIVEN + frames):
        told = codes[:, i].flatten(1, 2)[..., None]  # [V, N, D, 1]
        dense = None
        for row, session in enumerate(sessions):
            logits = model.score(session, codes[:, i : i + 1], clip.moves[i : i + 1])
            session.commit()
            dense = logits if dense is None else dense
            kl = divergence(dense, logits)
            nll = -logits.log_softmax(-1).gather(-1, told).mean((1, 2, 3))
            right = (logits.argmax(-1, keepdim=True) == told).float().mean((1, 2, 3))
            sums[row] += torch.stack([kl, nll, right]).cpu() / frames
            if i == GIVEN:
                first[row] = kl.cpu()
    out = []
    for session, found, start in zip(sessions, sums.tolist(), first.tolist(), strict=True):
        skipped = _skipped(session.meter.take())
        keys = ("kl", "nll", "right", "kl_first")
        each = zip(*found, start, strict=True)
        out.append([dict(zip(keys, values, strict=True)) | skipped for values in each])
    return out


@torch.inference_mode()
def made(model: VilaAdapter, clip: Clip, ways: Sequence[Way]) -> list[list[Values]]:
    """dB to the truth of frames that each way makes by itself, by world."""
    codes = true_codes(model, clip)
    out = []
    for way in ways:
        session = begin(model, way, clip, codes)
        found = []
        for i in range(GIVEN, len(clip.actions)):
            latents = model.sample(session, clip.moves[i : i + 1])
            session.commit()
            found.append([model.decode(session, row[None]) for row in latents])
        skipped = _skipped(session.meter.take())
        by_world: list[Values] = []
        for world, true in enumerate(clip.frames):
            near = [
                float(psnr(frame[world], true[i : i + 1])[0])
                for i, frame in enumerate(found, GIVEN)
            ]
            ends = {"psnr_first": near[0], "psnr_last": near[-1]}
            by_world.append({"psnr_truth": statistics.fmean(near)} | ends | skipped)
        out.append(by_world)
    return out


@torch.inference_mode()
def bounds(model: VilaAdapter, clip: Clip) -> list[Values]:
    """By world: the tokenizer alone, and the last given frame repeated, in dB to the truth."""
    out: list[Values] = []
    shape = model.shape()
    session = Session(shape, parse_plan(model, "dense"), model.rope(shape), device=model.device)
    for true, codes in zip(clip.frames, true_codes(model, clip), strict=True):
        shown = model.decode(session, codes[None])
        still = true[GIVEN - 1 : GIVEN].repeat(len(true) - GIVEN, 0)
        alone, repeat = psnr(shown, true).mean(), psnr(still, true[GIVEN:]).mean()
        out.append({"psnr_tokenizer": float(alone), "psnr_truth_repeat": float(repeat)})
    return out


def _skipped(row: Mapping[str, float]) -> Values:
    found = summary([row])
    return {"share_eligible": found["share_eligible"], "density": found["density"]}


@torch.inference_mode()
def probe(model: VilaAdapter, clip: Clip, frames: int = GIVEN) -> list[list[Values]]:
    """How MLP outputs change on the dense path, and what foretells it: by layer, by world.

    rank_*: Spearman's correlation, over a frame's places, of a score with the relative change of
    the output since the last frame; -1 would rank perfectly. change: that change itself, its mean.
    change_moved: to the place that the best shift of whole columns leads to, by frame and world.
    change_nearest: to whichever place of the last frame had the most alike output.
    """
    codes = true_codes(model, clip)
    # a share of nothing: all is computed, and the rings still turn
    session = begin(model, Way("replay=attentive:share=0"), clip, codes)
    session.watch = RANKS
    session.watched = {
        name: torch.zeros(
            len(session.layers), session.shape.rows, session.shape.places, device=model.device
        )
        for name in RANKS
    }
    layers, worlds = len(session.layers), len(clip.worlds)
    sums: list[list[Values]] = [[{} for _ in range(worlds)] for _ in range(layers)]
    for i in range(GIVEN, GIVEN + frames):
        before = [layer.own["ring_mlp"][0].clone() for layer in session.layers]
        model.score(session, codes[:, i : i + 1], clip.moves[i : i + 1])
        session.commit()
        for n, layer in enumerate(session.layers):
            for world in range(worlds):
                new, old = layer.own["ring_mlp"][0][world], before[n][world]
                found = _compare(new, old, session.shape.grid)
                own = changes(new, old)
                for name, scores in session.watched.items():
                    found[f"rank_{name}"] = spearman(scores[n, world], own)
                for key, value in found.items():
                    sums[n][world][key] = sums[n][world].get(key, 0.0) + value / frames
    return sums


def _compare(new: Tensor, old: Tensor, grid: tuple[int, int]) -> Values:
    """Changes of a frame's outputs [N, W] since the last frame's, looked up in several ways."""
    own = changes(new, old)
    a, b = new.unflatten(0, grid), old.unflatten(0, grid)
    wide = grid[1]
    moved = []
    for shift in SHIFTS:
        if abs(shift) < wide:
            to = slice(max(0, -shift), wide - max(0, shift))
            come = slice(max(0, shift), wide + min(0, shift))
            moved.append(float(changes(a[:, to], b[:, come]).mean()))
    nearest = torch.cdist(new, old).amin(-1) / new.norm(dim=-1).clamp_min(1e-12)
    return {
        "change": float(own.mean()),
        "change_lowest": float(own.quantile(0.1)),
        "change_moved": min(moved),
        "change_nearest": float(nearest.mean()),
    }


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two vectors; ties, which real scores hardly have, by order."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


# --- time ---------------------------------------------------------------------------------------


class Timed(VilaAdapter):
    """The model, with a clock on every run of its trunk over a token."""

    def __init__(self, model: VilaAdapter, weights: nn.Module | None = None) -> None:
        weights = model.model if weights is None else weights
        super().__init__(cast(Any, weights), model.config, model.tokenizer, model.name)
        self.trunk_ms: list[float] = []

    def _feed(self, session: Session, codes: Tensor, pos: Tensor, actions: Sequence[int]) -> None:
        start = time.perf_counter()
        super()._feed(session, codes, pos, actions)
        self.trunk_ms.append((time.perf_counter() - start) * 1e3)


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

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        pass

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> dict[str, Tensor]:
        return {}

    def index(self, layer: Layer, at: Moment, past: int, meter: Meter) -> None:
        pass

    def attend(self, q: Tensor, layer: Layer, at: Moment, meter: Meter) -> Tensor:
        return q


def hollow(model: VilaAdapter, projections: bool) -> VilaAdapter:
    """The model with its trunk's MLPs, and on demand its projections, replaced by nothing."""
    weights = copy.deepcopy(model.model)
    for layer in weights.trunk.layers:
        layer.mlp = Nothing(model.config.hidden)
        if projections:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                part = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, Nothing(part.out_features))
    return Timed(model, weights)


@torch.inference_mode()
def clock(model: VilaAdapter, clip: Clip, rounds: int = GIVEN, seed: int = 0) -> Document:
    """Time a token: of the trunk, and of the whole step; plans by turns, dense among them twice.

    A round is the next frame of one world, made by every plan in an order drawn anew; its time is
    the mean of its tokens, since a replayed token and a computed one are different things. Ratios
    are medians over rounds of dense / plan. `no_mlp` is dense without its MLPs' work, `python` and
    `python_replay` without any linear or attention: Python, norms, rotation, cache, choosing.
    """
    clip = Clip(clip.worlds[:1], clip.actions, clip.frames[:1])
    codes = true_codes(model, clip)
    ways = {
        "dense": Way("dense"), "again": Way("dense"), "window": Way(WINDOW),
        "replay": Way(REPLAY), "replay_window": Way(f"{WINDOW} {REPLAY}"),
        "no_mlp": Way("dense"), "python": Way("dense"), "python_replay": Way(REPLAY),
    }  # fmt: skip
    players: dict[str, Timed] = {}
    sessions: dict[str, Session] = {}
    for name, way in ways.items():
        made_of = hollow(model, name.startswith("python")) if name[:2] in ("no", "py") else model
        players[name] = Timed(made_of)
        sessions[name] = _plain(begin(model, way, clip, codes, seed), players[name], clip, codes)
        if name.startswith("python"):
            sessions[name].plan = replace(sessions[name].plan, attention=NoRead())
    trunk: dict[str, list[float]] = {name: [] for name in ways}
    whole: dict[str, list[float]] = {name: [] for name in ways}
    token: dict[str, list[float]] = {name: [] for name in ways}
    draw = random.Random(seed)
    names = list(ways)
    for i in range(GIVEN, GIVEN + rounds):
        for name in draw.sample(names, len(names)):
            player, session = players[name], sessions[name]
            player.trunk_ms = []
            start = time.perf_counter()
            player.sample(session, clip.moves[i : i + 1])
            spent = (time.perf_counter() - start) * 1e3
            session.commit()
            whole[name].append(spent / session.shape.places)
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
        row["share_eligible"] = _skipped(sessions[name].meter.take())["share_eligible"]
        out[name] = row
    return out


def _plain(ranked: Session, player: VilaAdapter, clip: Clip, codes: Tensor) -> Session:
    """A session of the same plan without anything that only measuring needs."""
    session = Session(
        ranked.shape, ranked.plan, ranked.rope, frames=ranked.frames, lengths=ranked.lengths,
        seed=ranked.seed, device=ranked.device, dtype=ranked.dtype,
    )  # fmt: skip
    session.restore(ranked.state())
    player.clean(session, codes[:, GIVEN - 1 : GIVEN], clip.moves[GIVEN - 1 : GIVEN])
    session.restore(ranked.state())
    return session


# --- the whole ----------------------------------------------------------------------------------


def combined(by_world: Sequence[Values]) -> Document:
    """Means and 95 % intervals of the worlds' values, and the values themselves."""
    out: Document = {}
    values = {key: [row[key] for row in by_world] for key in by_world[0]}
    for key, row in values.items():
        out[key], out[f"{key}_low"], out[f"{key}_high"] = interval(row)
    return out | {"by_world": values}


def tasks(worlds: int, few: int) -> list[tuple[str, str, int]]:
    """What is measured: (measure, clip, worlds); the long ones first."""
    found = [("made", "pan", worlds), ("forced", "pan", worlds), ("why", "pan", few)]
    found += [("made", "brisk", few), ("made", "still", few)]
    found += [("forced", name, few) for name in ("brisk", "walk", "still")]
    found += [("probe", name, few) for name in ("pan", "brisk", "still")]
    return [*found, ("bounds", "pan", worlds), ("bounds", "brisk", few), ("bounds", "still", few)]


_ready: dict[str, Any] = {}  # a process's model


def _prepare(
    name: str, weights: str | None = None, device: str = "cpu", threads: int | None = None
) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    _ready["model"] = load(name, weights, device=device)


def _work(task: tuple[str, str, int, int, int]) -> list[Document]:
    what, name, worlds, seed, frames = task
    model = _ready["model"]
    clip = make_clip(name, worlds, seed, model.config.size[0])
    start = time.monotonic()
    rows = _measure(model, what, clip, frames)
    spent = time.monotonic() - start
    head: Document = {"measure": what, "clip": name, "worlds": worlds, "seconds": spent}
    return [head | row for row in rows]


def _measure(model: VilaAdapter, what: str, clip: Clip, frames: int) -> list[Document]:
    """The rows of one task."""
    if what == "bounds":
        return [combined(bounds(model, clip))]
    if what == "probe":
        found = probe(model, clip, frames)
        return [{"layer": n} | combined(by_world) for n, by_world in enumerate(found)]
    if what == "made":
        ways = list(MADE.values())
        results = made(model, clip, ways)
        frames = len(clip.actions) - GIVEN
    else:
        alone = [Way(REPLAY, layers=(n,)) for n in range(model.config.layers)]
        asked = list(FORCED.values()) if what == "forced" else [*WHY, *alone]
        ways = [Way("dense"), *asked]
        frames = min(frames, len(clip.actions) - GIVEN)
        results = forced(model, clip, asked, frames)
    return [
        {"plan": str(way), "frames": frames} | combined(by_world)
        for way, by_world in zip(ways, results, strict=True)
    ]


def evaluate(
    name: str = "atrium-tokens",
    *,
    weights: str | None = None,
    device: str = "cpu",
    worlds: int = 6,
    few: int = 4,
    frames: int = GIVEN,
    rounds: int = GIVEN,
    seed: int = 0,
    jobs: int = 1,
    command: str = "",
    watch: Callable[[Document], None] | None = None,
    known: Sequence[Document] = (),
    skip: Sequence[str] = (),
) -> Document:
    """Measure a token model on unseen worlds; a results document with intervals over worlds.

    The panning clip takes all of `worlds`, what is no claim but a reason, `few` of them; teacher
    forcing takes the first `frames` made frames. `watch` is shown the document as far as it has
    come. known: rows of earlier documents, not measured again. skip: what to leave out, as
    measure:clip. Time is taken on the CPU, whatever the device of the rest, unless rounds are 0.
    """
    if worlds < 1 or few < 1 or not 1 <= frames <= GIVEN or not 0 <= rounds <= GIVEN:
        raise TachyscopeError(
            f"worlds must be 1 or more, frames from 1 and rounds from 0 to {GIVEN}, "
            f"got {worlds}, {few}, {frames} and {rounds}"
        )
    _prepare(name, weights, device)
    model = _ready["model"]
    if not isinstance(model, VilaAdapter) or model.actions != atrium.ACTIONS:
        raise TachyscopeError(f"{name} is no token model of Atrium: try atrium-tokens")
    rows: list[Document] = list(known)
    have = {f"{row['measure']}:{row['clip']}" for row in rows} | set(skip)
    wanted = tasks(worlds, min(few, worlds))
    asked = [(*task, seed, frames) for task in wanted if ":".join(task[:2]) not in have]

    def gather(results: Iterable[list[Document]]) -> None:
        for result in results:
            rows.extend(result)
            if watch is not None:
                watch(document("atrium-tokens", rows, command))

    if jobs <= 1:
        gather(map(_work, asked))
    else:
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, fresh, _prepare, (name, weights, device, 1)) as pool:
            gather(pool.map(_work, asked))
    more: Document = {"model": name, "clips": CLIPS, "given": GIVEN, "seed": seed}
    if not rounds:
        return document("atrium-tokens", rows, command, tokens=headline(rows), **more)
    speed = clock(load(name, weights), make_clip("pan", 1, seed, model.config.size[0]), rounds)
    more |= {"tokens": headline(rows) | speedups(speed), "speed": speed}
    return document("atrium-tokens", rows, command, speed["trunk_aa"], **more)


def pick(rows: Sequence[Document], measure: str, clip: str, plan: str | None = None) -> Document:
    """The one row of a measure, a clip and a plan."""
    return next(
        row
        for row in rows
        if (row["measure"], row["clip"]) == (measure, clip) and plan in (None, row.get("plan"))
    )


def headline(rows: Sequence[Document]) -> Document:
    """The numbers that claims are held to; `_over` is by how much a control exceeds attentive."""
    out: Document = {}
    limits = pick(rows, "bounds", "pan")
    for key in ("psnr_tokenizer", "psnr_truth_repeat"):
        out[key] = limits[key]
    there = {(row["measure"], row["clip"]) for row in rows}
    for clip in CLIPS:
        ending = "" if clip == "pan" else f"_{clip}"
        if ("made", clip) in there:
            dense = pick(rows, "made", clip, "dense")
            for key, way in MADE.items():
                row = pick(rows, "made", clip, str(way))
                out[f"psnr_truth_{key}{ending}"] = row["psnr_truth"]
                if key != "dense":
                    out[f"psnr_truth_{key}_loss{ending}"] = versus(dense, row, "psnr_truth")
        for key, way in FORCED.items() if ("forced", clip) in there else ():
            row = pick(rows, "forced", clip, str(way))
            out[key + ending] = row["kl"]
            if "attentive" not in key:
                rival = FORCED[key.replace("random", "attentive").replace("every_k", "attentive")]
                ours = pick(rows, "forced", clip, str(rival))
                out[f"{key}{ending}_over"] = versus(row, ours, "kl")
    return out


def speedups(speed: Mapping[str, Any]) -> Document:
    """The clock's numbers that claims are held to."""
    out: Document = {
        "speedup_replay": speed["replay"]["trunk_ratio"],
        "speedup_replay_window": speed["replay_window"]["trunk_ratio"],
        "speedup_window": speed["window"]["trunk_ratio"],
        "speedup_whole": speed["replay"]["whole_ratio"],
        "speedup_whole_window": speed["replay_window"]["whole_ratio"],
    }
    for part in ("trunk", "whole"):
        empty = speed["python"]["trunk_ms"]
        out[f"python_share_{part}"] = empty / speed["dense"][f"{part}_ms"]
    return out


def lines(found: Document) -> list[str]:
    """An evaluation as a reader wants it: the claims' numbers, then every row."""
    out = []
    for key, value in found["tokens"].items():
        if isinstance(value, tuple | list):
            out.append(f"{key:32} {value[0]:9.4f}  ({value[1]:.4f} to {value[2]:.4f})")
        else:
            out.append(f"{key:32} {value:9.4f}")
    for row in found["rows"]:
        named = row.get("plan", f"layer {row['layer']}" if "layer" in row else "")
        shown = []
        for key in row["by_world"]:
            # a JSON file has null for a value that is no number
            three = (row[name] for name in (key, f"{key}_low", f"{key}_high"))
            mean, low, high = (math.nan if x is None else x for x in three)
            shown.append(f"{key} {mean:.4f} ({low:.4f} to {high:.4f})")
        out.append(f"{row['measure']} {row['clip']} {named}: " + ", ".join(shown))
    speed = found.get("speed", {})
    for part in ("trunk", "whole") if speed else ():
        low, high = speed[f"{part}_aa"]
        out.append(f"{part}: dense against itself {low:.2f}x to {high:.2f}x, inside is noise")
    for name, row in speed.items():
        if isinstance(row, Mapping):
            out.append(
                f"{name:14} trunk {row['trunk_ms']:.3f} ms a token ({row['trunk_ratio']:.2f}x, "
                f"{row['trunk_ratio_low']:.2f} to {row['trunk_ratio_high']:.2f}), whole "
                f"{row['whole_ms']:.3f} ({row['whole_ratio']:.2f}x)"
            )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The evaluation of token models without the command line's packages."""
    words = sys.argv[1:] if argv is None else argv
    prog = "python -m tachyscope.evaluation_tokens"
    parser = Parser(prog=prog, description="Measure replay on a token model and unseen worlds.")
    parser.add_argument("--model", default="atrium-tokens")
    parser.add_argument("--weights")
    parser.add_argument("--device", default="cpu", help="of all but the clock")
    parser.add_argument("--worlds", type=int, default=6)
    parser.add_argument("--few", type=int, default=4, help="worlds of what explains, not claims")
    parser.add_argument("--frames", type=int, default=GIVEN, help="made frames, teacher-forced")
    parser.add_argument("--rounds", type=int, default=GIVEN, help="of the clock; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes; the clock runs alone")
    parser.add_argument("--resume", action="append", help="a document whose rows are known")
    parser.add_argument("--skip", action="append", help="a measure:clip to leave out")
    parser.add_argument("--json", help="a file, or - for the last line of stdout")
    try:
        args = parser.parse_args(words)
        check_json(args.json)

        def watch(so_far: Document) -> None:
            row = so_far["rows"][-1]
            print(f"{row['measure']} {row['clip']}, {row['seconds']:.0f} s", file=sys.stderr)
            # hours of measuring must not hang on its last minute
            emit(so_far, None if args.json == "-" else args.json)

        known = [row for path in args.resume or () for row in read_json(Path(path))["rows"]]
        found = evaluate(
            args.model, weights=args.weights, device=args.device, worlds=args.worlds,
            few=args.few, frames=args.frames, rounds=args.rounds,
            seed=args.seed, jobs=args.jobs, command=f"{prog} {shlex.join(words)}", watch=watch,
            known=known, skip=args.skip or (),
        )  # fmt: skip
        print("\n".join(lines(found)))
        emit(found, args.json)
    except TachyscopeError as error:
        print(f"tachyscope: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
