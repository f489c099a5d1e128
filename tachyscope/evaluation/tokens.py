"""What replay costs a token model on Atrium, and why it costs what it costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tachyscope.arguments import parse_plan
from tachyscope.bounds import check
from tachyscope.errors import TachyscopeError
from tachyscope.evaluation.clips import CLIPS, GIVEN, Clip, make_clip, true_codes
from tachyscope.evaluation.intervals import Values, combined, versus
from tachyscope.evaluation.replay_scores import (
    RankedReplay,
    Way,
    begin,
    begin_dense,
    changes,
    replayed,
    score,
)
from tachyscope.evaluation.token_timing import REPLAY, WINDOW, clock
from tachyscope.evaluation.world import Watch
from tachyscope.graph_runner import ChunkRunner
from tachyscope.machine import cores
from tachyscope.meter import summary
from tachyscope.models.registry import load
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.process import spread
from tachyscope.quality import Frames, psnr
from tachyscope.results import Document, Parts, document
from tachyscope.session import Session
from tachyscope.stream import Stream
from tachyscope.tables import format_table
from tachyscope.worlds import atrium

SHIFTS = range(-4, 5)  # columns by which a picture may have moved since the last frame
RANKS = ("tas", "mass", "input")  # what a policy could know before it computes
# at three quarters, and at half
SHARES = {
    "": {"share": 0.75, "k": 4, "age": 4},
    "_half": {"share": 0.5, "k": 2, "age": 2},
}
CONTROLS = {
    "attentive": "replay=attentive:share={share},age={age},drift=true",
    "random": "replay=random:share={share},drift=true",
    "every_k": "replay=every_k:k={k},drift=true",
    # as it was published
    "attentive_paper": "replay=attentive:share={share}",
    "random_paper": "replay=random:share={share}",
    "every_k_paper": "replay=every_k:k={k}",
}
FORCED = {
    f"kl_{name}{ending}": Way(text.format(**numbers))
    for ending, numbers in SHARES.items()
    for name, text in CONTROLS.items()
}
HALF = "replay=attentive:share=0.5,age=2,drift=true"
MADE = {
    "dense": Way("dense"),
    "replay": Way(REPLAY),
    "window": Way(WINDOW),
    "replay_window": Way(f"{WINDOW} {REPLAY}"),
    "half": Way(HALF),
    "half_window": Way(f"{WINDOW} {HALF}"),
    "quarter": Way("replay=attentive:share=0.25,age=1,drift=true"),
    "paper": Way("replay=attentive:share=0.75"),
    "paper_half": Way("replay=attentive:share=0.5"),
    "random": Way("replay=random:share=0.75,drift=true"),
    "every_k": Way("replay=every_k:k=4,drift=true"),
}
WHY = (
    Way(REPLAY), Way(REPLAY, "reversed"), Way(REPLAY, "mass"), Way(REPLAY, "input"),
    Way(REPLAY, "change"), Way("replay=attentive:share=0.75,drift=true"),
)  # fmt: skip


def divergence(dense: Tensor, other: Tensor) -> Tensor:
    """Mean over places and codes of KL(dense || other), from logits [V, N, D, K]: [V]."""
    p, q = dense.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean((1, 2))


@torch.inference_mode()
def forced(
    model: VilaModel,
    clip: Clip,
    ways: Sequence[Way],
    frames: int = GIVEN,
    codes: Tensor | None = None,
    start: Session | None = None,
) -> list[list[Values]]:
    """KL from dense of each way, by world, all fed the true codes; dense itself comes first.

    codes, start: the clip's true codes and a session of `begin_dense`, where there are such.
    """
    codes = true_codes(model, clip) if codes is None else codes
    moves = clip.moves_on(model.device)
    start = begin_dense(model, clip, codes) if start is None else start
    sessions = [begin(model, way, clip, codes, start=start) for way in (Way("dense"), *ways)]
    sums = torch.zeros(len(sessions), 3, len(clip.worlds))
    first = torch.zeros(len(sessions), len(clip.worlds))
    gated: list[list[Tensor | None]] = [[] for _ in sessions]
    for i in range(GIVEN, GIVEN + frames):
        told = codes[:, i].flatten(1, 2)[..., None]  # [V, N, D, 1]
        dense = None
        for row, session in enumerate(sessions):
            logits = score(model, session, codes[:, i : i + 1], moves[i : i + 1])
            session.commit()
            gated[row].append(replayed(session))
            dense = logits if dense is None else dense
            kl = divergence(dense, logits)
            nll = -logits.log_softmax(-1).gather(-1, told).mean((1, 2, 3))
            right = (logits.argmax(-1, keepdim=True) == told).float().mean((1, 2, 3))
            sums[row] += torch.stack([kl, nll, right]).cpu() / frames
            if i == GIVEN:
                first[row] = kl.cpu()
    out = []
    for row, session in enumerate(sessions):
        shares = skipped(session, [session.meter.take()], gated[row])
        found, at_first = sums[row].tolist(), first[row].tolist()
        keys = ("kl", "nll", "right", "kl_first")
        each = zip(*found, at_first, strict=True)
        out.append(
            [
                dict(zip(keys, values, strict=True)) | share
                for values, share in zip(each, shares, strict=True)
            ]
        )
    return out


@torch.inference_mode()
def made(
    model: VilaModel,
    clip: Clip,
    ways: Sequence[Way],
    codes: Tensor | None = None,
    start: Session | None = None,
) -> list[list[Values]]:
    """dB to the truth of frames that each way makes by itself, by world.

    psnr_truth_to_N: of the eight frames up to the clip's N-th. motion: how much pictures change
    from frame to frame, over how much the truth does: 0 is a picture that stands still. codes,
    start: as `forced` has them.
    """
    codes, out = true_codes(model, clip) if codes is None else codes, []
    for way in ways:
        stream = Stream(model, begin(model, way, clip, codes, start=start), batch=len(clip.worlds))
        if not way.published:
            stream.runner = ChunkRunner(model, stream.session)  # what ranks is no policy's own
        chunks, gated = [], []
        for i in range(GIVEN, clip.length):
            chunks.append(stream.decode(stream.generate(clip.action(i, model.device))))
            gated.append(replayed(stream.session))
        shares = skipped(stream.session, [chunk.stats for chunk in chunks], gated)
        by_world: list[Values] = []
        for world, true in enumerate(clip.frames):
            near = [
                float(psnr(chunk.frames[world], true[i : i + 1])[0])
                for i, chunk in enumerate(chunks, GIVEN)
            ]
            film = np.concatenate([true[GIVEN - 1 : GIVEN], *(c.frames[world] for c in chunks)])
            values = {"psnr_first": near[0], "psnr_last": near[-1]}
            for end in range(2 * GIVEN, clip.length + 1, GIVEN):
                values[f"psnr_truth_to_{end}"] = statistics.fmean(near[end - 2 * GIVEN :][:GIVEN])
            values["motion"] = motion(film) / max(motion(true[GIVEN - 1 :]), 1e-9)
            by_world.append({"psnr_truth": statistics.fmean(near)} | values | shares[world])
        out.append(by_world)
    return out


def motion(film: Frames) -> float:
    """Mean change of a pixel from frame to frame, in levels."""
    return float(np.abs(np.diff(film.astype(np.int16), axis=0)).mean())


@torch.inference_mode()
def bounds(model: VilaModel, clip: Clip) -> list[Values]:
    """By world: the tokenizer alone, and the last given frame repeated, in dB to the truth."""
    out: list[Values] = []
    shape = model.shape()
    session = Session(shape, parse_plan(model, "dense"), model.rope(shape), device=model.device)
    for true, codes in zip(clip.frames, true_codes(model, clip), strict=True):
        shown = model.decode_latents(session, codes[None])
        still = true[GIVEN - 1 : GIVEN].repeat(len(true) - GIVEN, 0)
        alone, repeat = psnr(shown, true).mean(), psnr(still, true[GIVEN:]).mean()
        out.append({"psnr_tokenizer": float(alone), "psnr_truth_repeat": float(repeat)})
    return out


def skipped(
    session: Session, rows: Sequence[Mapping[str, float]], gated: Sequence[Tensor | None]
) -> list[Values]:
    """What was not computed, by world: rows of token gates each have a share of their own, which
    `gated` has by frame."""
    found = summary(rows)
    videos = len(session.generators)
    shares = [found["share_eligible"]] * videos
    if known := [x for x in gated if x is not None]:
        shares = torch.stack(known).mean(0)[:videos].tolist()  # a pair's rows decide together
    return [{"share_eligible": share, "density": found["density"]} for share in shares]


@torch.inference_mode()
def probe(model: VilaModel, clip: Clip, frames: int = GIVEN) -> list[list[Values]]:
    """How MLP outputs change on the dense path, and what foretells it: by layer, by world.

    rank_*: Spearman's correlation, over a frame's places, of a score with the relative change of
    the output since the last frame; -1 would rank perfectly. change: that change itself, its mean.
    change_moved: to the place that the best shift of whole columns leads to, by frame and world.
    change_nearest: to whichever place of the last frame had the most alike output.
    """
    codes, moves = true_codes(model, clip), clip.moves_on(model.device)
    # a share of nothing: all is computed, and the last outputs are still kept
    share = Way("replay=attentive:share=0")
    session = begin(model, share, clip, codes, note=RANKS)
    assert isinstance(session.replay, RankedReplay)
    layers, worlds = len(session.layers), len(clip.worlds)
    sums: list[list[Values]] = [[{} for _ in range(worlds)] for _ in range(layers)]
    for i in range(GIVEN, GIVEN + frames):
        before = [layer.own["replay"]["output"][0].clone() for layer in session.layers]
        model.score(session, codes[:, i : i + 1], moves[i : i + 1])
        session.commit()
        for n, layer in enumerate(session.layers):
            for world in range(worlds):
                new, old = layer.own["replay"]["output"][0][world], before[n][world]
                found = _compare(new, old, session.shape.grid)
                own = changes(new, old)
                for name, scores in session.replay.noted.items():
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


TASKS = tuple(
    (what, clip)
    for what, clips in {
        "made": CLIPS,
        "forced": CLIPS,
        "why": ("reversing",),
        "probe": ("reversing", "forward", "still"),
        "bounds": CLIPS,
    }.items()
    for clip in clips
)
QUICK_TASKS = tuple((what, "reversing") for what in ("made", "forced", "bounds"))
PLANNED = ("made", "forced", "bounds")  # what is measured of given plans
QUICK_WAYS = ("dense", "replay", "replay_window")
QUICK_FRAMES = 2  # made frames, where they are teacher-forced


@dataclass(frozen=True)
class Task:
    """A measure of a clip in so many worlds."""

    what: str
    clip: str
    worlds: int
    seed: int
    quick: bool
    plans: tuple[str, ...]  # instead of the usual ones


@cache
def _model(name: str, weights: str | None, device: str) -> VilaModel:
    """A process's model."""
    fault = f"{name} is no token model of Atrium: try atrium-tokens"
    model = VilaModel.narrow(load(name, weights, device=device), fault)
    if model.actions != atrium.ACTIONS:
        raise TachyscopeError(fault)
    return model


def _work(name: str, weights: str | None, device: str, task: Task) -> list[Document]:
    model = _model(name, weights, device)
    clip = make_clip(task.clip, task.worlds, task.seed, model.config.size[0])
    head = {"measure": task.what, "clip": task.clip, "worlds": task.worlds}
    return [head | row for row in _measure(model, task, clip)]


def _measure(model: VilaModel, task: Task, clip: Clip) -> list[Document]:
    """The rows of one task."""
    frames = clip.length - GIVEN
    if task.what == "bounds":
        return [combined(bounds(model, clip))]
    if task.what == "probe":
        found = probe(model, clip, frames)
        return [{"layer": n} | combined(by_world) for n, by_world in enumerate(found)]
    if task.what == "made":
        ways = list(made_ways(task.quick, task.plans).values())
        results = made(model, clip, ways)
    else:
        alone = [Way(REPLAY, layers=(n,)) for n in range(model.config.layers)]
        asked = [Way(plan) for plan in task.plans] or list(claims(task.quick).values())
        asked = asked if task.what == "forced" else [*WHY, *alone]
        ways = [Way("dense"), *asked]
        frames = min(frames, QUICK_FRAMES) if task.quick else frames
        results = forced(model, clip, asked, frames)
    return [
        {"plan": str(way), "frames": frames} | combined(by_world)
        for way, by_world in zip(ways, results, strict=True)
    ]


def made_ways(quick: bool, plans: Sequence[str]) -> dict[str, Way]:
    """What makes frames by itself, by name: dense, and plans where some are given."""
    if plans:
        return {"dense": Way("dense"), **{plan: Way(plan) for plan in plans}}
    return {key: MADE[key] for key in (QUICK_WAYS if quick else MADE)}


def claims(quick: bool) -> dict[str, Way]:
    """What is teacher-forced; when it must be quick, without the published form."""
    return {key: way for key, way in FORCED.items() if not (quick and "_paper" in key)}


def evaluate_tokens(
    name: str = "atrium-tokens",
    plans: Sequence[str] = (),
    *,
    weights: str | None = None,
    device: str = "cpu",
    worlds: int = 16,
    seed: int = 0,
    quick: bool = False,
    timed: bool = True,
    jobs: int | None = None,
    command: str = "",
    parts: Parts | None = None,
    watch: Watch | None = None,
) -> Document:
    """Measure a token model on unseen worlds; a results document with intervals over worlds.

    plans: what to measure beside dense, instead of replay at its usual settings and its reasons.
    All worlds share the passes of a measure, and measures are shared out to as many processes as
    there are cores. quick: the reversing camera alone, and less of it. timed: take the time of a
    token too, on the CPU whatever the device of the rest. watch: is told how many are done. parts:
    keeps what is measured, and has what was before; times are taken anew.
    """
    check("worlds", worlds)
    model = _model(name, weights, device)
    for plan in plans:
        parse_plan(model, plan).check(model.shape())
    asked = [t for t in (QUICK_TASKS if quick else TASKS) if t[0] in PLANNED or not plans]
    tasks = [Task(*t, worlds, seed, quick, tuple(plans)) for t in asked]
    jobs = min(jobs or cores(), len(tasks))
    work, rows = partial(_work, name, weights, device), list[Document]()
    parts = Parts() if parts is None else parts
    parts.begin("atrium-tokens", model.name, model.fingerprint)

    def measured(left: Sequence[Task]) -> Iterable[Document]:
        results = spread(work, left, jobs, torch.set_num_threads, 1)
        return ({"rows": one} for one in results)

    for done, part in enumerate(parts.run(tasks, lambda t: f"{t.what} {t.clip}", measured), 1):
        rows += part["rows"]
        if watch is not None:
            watch(done)
    more: Document = {"model": name, "clips": CLIPS, "given": GIVEN, "seed": seed}
    if not timed:
        return document("atrium-tokens", rows, command, tokens=headline(rows, plans), **more)
    model = _model(name, weights, "cpu")
    clip = make_clip("reversing", 1, seed, model.config.size[0])
    rounds = QUICK_FRAMES if quick else clip.length - GIVEN
    speed = clock(model, clip, rounds)
    more |= {"tokens": headline(rows, plans) | speedups(speed), "speed": speed}
    return document("atrium-tokens", rows, command, speed["trunk_aa"], **more)


def headline(rows: Sequence[Document], plans: Sequence[str] = ()) -> Document:
    """The numbers that claims are held to; `_over` is by how much a control exceeds attentive."""
    out: Document = {}
    there = {(row["measure"], row["clip"], row.get("plan")): row for row in rows}
    for clip in CLIPS:
        ending = "" if clip == "reversing" else f"_{clip}"
        limits = there.get(("bounds", clip, None), {})
        for key in ("psnr_tokenizer", "psnr_truth_repeat"):
            if key in limits:
                out[key + ending] = limits[key]
        for key, way in made_ways(False, plans).items():
            row = there.get(("made", clip, str(way)))
            if row is not None:
                out[f"psnr_truth_{key}{ending}"] = row["psnr_truth"]
                if key != "dense":
                    dense = there["made", clip, "dense"]
                    out[f"psnr_truth_{key}_loss{ending}"] = versus(dense, row, "psnr_truth")
        for key, way in FORCED.items():
            row = there.get(("forced", clip, str(way)))
            if row is not None:
                out[key + ending] = row["kl"]
                rival = key.replace("random", "attentive").replace("every_k", "attentive")
                if rival != key:
                    ours = there["forced", clip, str(FORCED[rival])]
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
    claims = []
    for key, value in found["tokens"].items():
        several = isinstance(value, tuple | list)
        mean, *rest = value if several else (value,)
        interval = f"{rest[0]:.4f} to {rest[1]:.4f}" if rest else ""
        claims.append([key, f"{mean:.4f}", interval])
    out = format_table(["measure", "mean", "95 % interval"], claims)
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
    times = [
        [
            name, f"{row['trunk_ms']:.3f}", f"{row['trunk_ratio']:.2f}x",
            f"{row['trunk_ratio_low']:.2f}x to {row['trunk_ratio_high']:.2f}x",
            f"{row['whole_ms']:.3f}", f"{row['whole_ratio']:.2f}x",
        ]
        for name, row in speed.items()
        if isinstance(row, Mapping)
    ]  # fmt: skip
    if times:
        head = ["ms a token", "trunk", "ratio", "range", "whole model", "ratio"]
        out += format_table(head, times)
    return out
