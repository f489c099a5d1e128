"""A token model's clips by dense and by plans: KL, dB to the truth, and how MLP outputs change."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.arguments import parse_plan
from tachyscope.core.chunk_runner import ChunkRunner, FrameRunner
from tachyscope.core.meter import summary
from tachyscope.core.session import Session
from tachyscope.core.stream import Stream
from tachyscope.decode import unsupported
from tachyscope.measure.quality import motion, psnr
from tachyscope.models.vila_u.model import VilaModel
from tachyscope_lab.evaluation.clips import GIVEN, Clip, true_codes
from tachyscope_lab.evaluation.intervals import Values
from tachyscope_lab.evaluation.replay_scores import (
    RankedReplay,
    Way,
    begin,
    begin_dense,
    changes,
    replayed,
    score,
)

SHIFTS = range(-4, 5)  # columns by which a picture may have moved since the last frame
RANKS = ("tas", "mass", "input")  # what a policy could know before it computes


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
        target = codes[:, i].flatten(1, 2)[..., None]  # [V, N, D, 1]
        dense = None
        for row, session in enumerate(sessions):
            logits = score(model, session, codes[:, i : i + 1], moves[i : i + 1])
            session.commit()
            gated[row].append(replayed(session))
            dense = logits if dense is None else dense
            kl = divergence(dense, logits)
            nll = -logits.log_softmax(-1).gather(-1, target).mean((1, 2, 3))
            right = (logits.argmax(-1, keepdim=True) == target).float().mean((1, 2, 3))
            sums[row] += torch.stack([kl, nll, right]).cpu() / frames
            if i == GIVEN:
                first[row] = kl.cpu()
    out = []
    for row, session in enumerate(sessions):
        shares = skipped(session, [session.meter.take()], gated[row])
        totals, at_first = sums[row].tolist(), first[row].tolist()
        keys = ("kl", "nll", "right", "kl_first")
        each = zip(*totals, at_first, strict=True)
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
        elif graph := recorded(model, stream.session):
            stream.runner = graph
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
            film = np.concatenate([chunk.frames[world] for chunk in chunks])
            values = {"psnr_first": near[0], "psnr_last": near[-1]}
            for end in range(2 * GIVEN, clip.length + 1, GIVEN):
                values[f"psnr_truth_to_{end}"] = statistics.fmean(near[end - 2 * GIVEN :][:GIVEN])
            moved, truly = motion(film, true[GIVEN - 1]), motion(true[GIVEN - 1 :])
            values["motion"] = float(moved.mean() / max(truly.mean(), 1e-9))
            by_world.append({"psnr_truth": statistics.fmean(near)} | values | shares[world])
        out.append(by_world)
    return out


def recorded(model: VilaModel, session: Session) -> FrameRunner | None:
    """Makes frames by a step that is recorded once, for all rows at once, where a GPU can.

    Each row decides for itself: stock torch masks, so that nothing is gained but launches, which
    are what many rows of a small model in float32 wait for.
    """
    parts = model.decode_parts()
    if session.device.type != "cuda" or session.plan.passes.drafts_codes:
        return None
    return None if unsupported(parts, session) else FrameRunner(model, session, parts)


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
    stats = summary(rows)
    videos = len(session.generators)
    shares = [stats["share_eligible"]] * videos
    if known := [x for x in gated if x is not None]:
        shares = torch.stack(known).mean(0)[:videos].tolist()  # a pair's rows decide together
    return [{"share_eligible": share, "density": stats["density"]} for share in shares]


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
    assert isinstance(session.memory.replay, RankedReplay)
    layers, worlds = len(session.memory.layers), len(clip.worlds)
    sums: list[list[Values]] = [[{} for _ in range(worlds)] for _ in range(layers)]
    for i in range(GIVEN, GIVEN + frames):
        before = [layer.own["replay"]["output"][0].clone() for layer in session.memory.layers]
        model.score(session, codes[:, i : i + 1], moves[i : i + 1])
        session.commit()
        for n, layer in enumerate(session.memory.layers):
            for world in range(worlds):
                new, old = layer.own["replay"]["output"][0][world], before[n][world]
                change = _compare(new, old, session.shape.grid)
                own = changes(new, old)
                for name, scores in session.memory.replay.noted.items():
                    change[f"rank_{name}"] = spearman(scores[n, world], own)
                for key, value in change.items():
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
