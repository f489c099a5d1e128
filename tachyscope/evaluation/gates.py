"""What leaving out MLP work costs a token model, by method, share and kind of camera.

Every method is held to the same share of MLP work left out, in the same rooms with the same noise:
teacher-forced KL from dense, and dB to the truth of what is made freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError
from tachyscope.evaluation.clips import CLIPS, GIVEN, Clip, make_clip, true_codes
from tachyscope.evaluation.intervals import combined, versus
from tachyscope.evaluation.replay_scores import RankedReplay, Way, begin, changes
from tachyscope.evaluation.tokens import bounds, forced, made, spearman
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.observers import Observer
from tachyscope.results import Document
from tachyscope.types import PassContext

SHARES = (0.75, 0.5)
OTHER = 900  # seed of the rooms that thresholds and heads are chosen in
SEEN = 2  # such rooms, and frames of each
# by name; {s} is the share, {k} = 1 / (1 - share), {age} the limit that the share allows
METHODS = {
    "tas": "replay=attentive:share={s}",  # all heads, as published
    "tas_head": "replay=attentive:share={s}",  # each layer's best head, found in other rooms
    "authors": "replay=attentive:share={s},authors=true",  # as their code scores
    "threshold": "replay=attentive:threshold={t}",  # one for all layers, found in other rooms
    "input": "replay=attentive:share={s}",  # cosine of the MLP's inputs
    "drift": "replay=attentive:share={s},age={age},drift=true",
    "random": "replay=random:share={s}",
    "every_k": "replay=every_k:k={k}",
    "neurons": "replay=neurons:share={s}",
    "neurons_age": "replay=neurons:share={s},age=7",
    "prune": "replay=prune:share={s}",
}
# those that make videos freely
FREE = ("tas", "tas_head", "authors", "input", "random", "every_k", "neurons", "neurons_age",
        "prune")  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Some methods at a share, on a clip in so many rooms: `forced`, `made` or `bounds`."""

    what: str
    clip: str
    share: float
    methods: tuple[str, ...]
    worlds: int
    seed: int = 0
    frames: int = GIVEN  # teacher-forced ones


def tasks(worlds: int, clips: Sequence[str] = tuple(CLIPS), shares: Sequence[float] = SHARES,
          frames: int = GIVEN) -> list[Task]:  # fmt: skip
    """All that is measured, the longest first."""
    found = []
    for clip in clips:
        for share in shares:
            for names in (tuple(METHODS)[:4], tuple(METHODS)[4:8], tuple(METHODS)[8:]):
                found.append(Task("forced", clip, share, names, worlds, 0, frames))
            for names in (FREE[:3], FREE[3:6], FREE[6:]):
                found.append(Task("made", clip, share, names, worlds))
        found.append(Task("forced", clip, 0.25, ("neurons", "prune"), worlds, 0, frames))
        found.append(Task("made", clip, 0.25, ("dense", "neurons", "prune"), worlds))
        # rooms in which a loss would be foretold from
        found.append(Task("made", clip, 0.5, ("dense", "neurons"), worlds, OTHER))
        found.append(Task("made", clip, 0.75, ("neurons",), worlds, OTHER))
        found.append(Task("bounds", clip, 0.0, (), worlds))
    return found


_clip = cache(make_clip)  # drawing one takes seconds


def measure(model: VilaModel, task: Task) -> list[Document]:
    """The rows of one task."""
    clip = _clip(task.clip, task.worlds, task.seed, model.config.size[0])
    head = {"measure": task.what, "clip": task.clip, "worlds": task.worlds, "seed": task.seed}
    if task.what == "bounds":
        return [head | combined(bounds(model, clip))]
    ways = [way_of(model, name, task) for name in task.methods]
    if task.what == "made":
        results = made(model, clip, ways)
    else:
        results = forced(model, clip, ways, task.frames)[1:]
    rows = []
    for name, way, by_world in zip(task.methods, ways, results, strict=True):
        row: Document = head | {"method": name, "share": task.share, "plan": str(way)}
        row |= combined(by_world)
        if "kl" in row:
            row["kl_worst"] = max(row["by_world"]["kl"])
        rows.append(row)
    return rows


def way_of(model: VilaModel, name: str, task: Task) -> Way:
    """A method at a share; what it must know beforehand comes from other rooms."""
    if name == "dense":
        return Way("dense")
    k = round(1 / (1 - task.share))
    text = METHODS[name].replace("{s}", f"{task.share:g}").replace("{k}", str(k))
    text = text.replace("{age}", str(k if k > 2 else 2))
    if name == "input":
        return Way(text, "input")
    if name not in ("threshold", "tas_head"):
        return Way(text)
    other = _clip(task.clip, SEEN, OTHER + 1, model.config.size[0])
    heads, threshold = choose(model, other, task.share)
    if name == "tas_head":
        return Way(text, "head", heads=heads)
    return Way(text.replace("{t}", f"{threshold:.6g}"))


class HeadScores(Observer):
    """Gathers every head's score of every token: [B, H, 1] each, by layer."""

    def __init__(self, runner: RankedReplay) -> None:
        self.runner = runner
        self.found: dict[int, list[Tensor]] = {}

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        self.found.setdefault(ctx.layer, []).append(self.runner.by_head[ctx.layer])


@torch.inference_mode()
def choose(model: VilaModel, clip: Clip, share: float) -> tuple[tuple[int, ...], float]:
    """Of a clip: the head of each layer whose score ranks changes best, and a threshold of the
    mean score over all heads that a share of all layers' tokens reaches."""
    codes = true_codes(model, clip)
    # a share of nothing: all is computed, and the last outputs are still kept
    session = begin(model, Way("replay=attentive:share=0"), clip, codes)
    runner = session.replay
    if not isinstance(runner, RankedReplay):
        raise TachyscopeError("heads are chosen from attentive replay's scores")
    layers, heads = session.shape.layers, session.shape.heads
    scores: list[list[Tensor]] = [[] for _ in range(layers)]  # [B, H, N] a frame
    changed: list[list[Tensor]] = [[] for _ in range(layers)]  # [B, N] a frame
    for i in range(GIVEN, GIVEN + SEEN):
        before = [layer.own["replay"]["output"][0].clone() for layer in session.layers]
        heads_seen = HeadScores(runner)
        session.watch(heads_seen)
        model.score(session, codes[:, i : i + 1], clip.moves[i : i + 1])
        session.unwatch(heads_seen)
        session.commit()
        for n, layer in enumerate(session.layers):
            scores[n].append(torch.cat(heads_seen.found[n], -1))
            changed[n].append(changes(layer.own["replay"]["output"][0], before[n]))
    best, every = [], []
    for mine, truth in zip(scores, changed, strict=True):
        by_head, wanted = torch.cat(mine), torch.cat(truth)
        ranks = [
            sum(spearman(by_head[row, h], wanted[row]) for row in range(len(wanted)))
            for h in range(heads)
        ]
        best.append(min(range(heads), key=ranks.__getitem__))
        every.append(by_head.mean(1).flatten())
    return tuple(best), float(torch.cat(every).float().quantile(1 - share))


def lines(rows: Sequence[Document]) -> list[str]:
    """A Markdown table a share: KL, loss to dense in dB with its interval, and the worst room's.

    Losses are room by room. A last table has what rooms of another seed would have foretold.
    """
    there = {(r["measure"], r["clip"], r.get("share"), r.get("method"), r["seed"]): r for r in rows}
    dense = {(r["clip"], r["seed"]): r for r in rows if r.get("method") == "dense"}
    out = []
    for share in sorted({row["share"] for row in rows if row.get("share")}, reverse=True):
        out += [
            "",
            f"| {share:g} left out | {' | '.join(CLIPS)} |",
            "|---" * (len(CLIPS) + 1) + "|",
        ]
        for name in METHODS:
            cells = []
            for clip in CLIPS:
                told = there.get(("forced", clip, share, name, 0))
                cell = f"{told['kl']:.2f}" if told else ""
                if free := there.get(("made", clip, share, name, 0)):
                    cell += f"; {_loss(dense.get((clip, 0)), free)}"
                cells.append(cell)
            if any(cells):
                out.append(f"| {name} | {' | '.join(cells)} |")
    out += ["", "Neurons, loss in rooms of another seed:"]
    for row in rows:
        if row["measure"] == "made" and row["method"] == "neurons" and row["seed"]:
            foretold = _loss(dense.get((row["clip"], row["seed"])), row)
            out.append(f"{row['clip']} {row['share']:g}: {foretold}")
    return out


def _loss(dense: Document | None, row: Document) -> str:
    """dB to the truth that are lost: mean (interval), worst room."""
    if dense is None:
        return f"{row['psnr_truth']:.1f} dB"
    mean, low, high = versus(dense, row, "psnr_truth")
    pairs = zip(dense["by_world"]["psnr_truth"], row["by_world"]["psnr_truth"], strict=True)
    return f"{mean:.2f} ({low:.2f} to {high:.2f}), worst {max(a - b for a, b in pairs):.1f}"
