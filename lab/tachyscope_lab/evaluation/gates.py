"""What leaving out MLP work costs a token model, by method, share and kind of camera.

Every method is held to the same share of MLP work left out, in the same rooms with the same noise:
teacher-forced KL from dense, and dB to the truth of what is made freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.observers import Observer
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext
from tachyscope.io.results import Document
from tachyscope.models.vila_u.model import VilaModel
from tachyscope_lab.evaluation.clips import CLIPS, GIVEN, Clip, join, make_clip, true_codes
from tachyscope_lab.evaluation.intervals import Values, combined, versus
from tachyscope_lab.evaluation.replay_scores import RankedReplay, Way, begin, begin_dense, changes
from tachyscope_lab.evaluation.token_measures import bounds, forced, made, spearman

SHARES = (0.75, 0.5, 0.25)
OTHER = 901  # seed of the rooms that thresholds and heads are chosen in
SEEN = 2  # such rooms of every kind of camera, and frames of each
# by name; {s} is the share, {k} = 1 / (1 - share), {age} the limit that the share allows
METHODS = {
    "dense": "dense",
    "draft": "passes=draft",  # dense, code for code
    "fastcar": "fastcar",  # as published: what share its threshold replays is the model's
    "neurons": "replay=neurons:share={s}",
    "neurons_age": "replay=neurons:share={s},age=7",
    "prune": "replay=prune:share={s}",
    "tas": "replay=attentive:share={s}",  # all heads, as published
    "tas_head": "replay=attentive:share={s}",  # each layer's best head, found in other rooms
    "authors": "replay=attentive:share={s},authors=true",  # as their code scores
    "threshold": "replay=attentive:threshold={t}",  # one for all layers, found in other rooms
    "thresholds": "replay=attentive:threshold=0",  # one for each layer, found there too
    "input": "replay=input:share={s}",  # distance of the MLP's inputs
    "drift": "replay=attentive:share={s},age={age},drift=true",
    "random": "replay=random:share={s}",
    "every_k": "replay=every_k:k={k}",
}
FORCED = (
    ("neurons", "prune", "tas", "random"),
    ("tas_head", "input", "authors", "every_k"),
    ("threshold", "thresholds", "drift", "neurons_age"),
)


@dataclass(frozen=True)
class Task:
    """Some methods at a share, on clips in so many rooms each: `forced`, `made` or `bounds`."""

    what: str
    clips: tuple[str, ...]
    share: float
    methods: tuple[str, ...]
    worlds: int
    seed: int = 0
    frames: int = GIVEN  # teacher-forced, or made


def plan_tasks(
    plans: Sequence[str], worlds: int, clips: Sequence[str], seed: int, frames: int
) -> list[Task]:
    """Dense and other plans, each making frames."""
    names = ("dense", *(plan for plan in plans if plan != "dense"))
    return [Task("made", tuple(clips), 0.0, (name,), worlds, seed, frames) for name in names]


def tasks(worlds: int, clips: Sequence[str] = tuple(CLIPS), shares: Sequence[float] = SHARES,
          frames: int = GIVEN) -> list[Task]:  # fmt: skip
    """All that is measured, what matters most first."""
    kinds = tuple(clips)

    def made(share: float, *names: str) -> list[Task]:
        return [Task("made", kinds, share, (name,), worlds) for name in names]

    def forced(share: float, *groups: tuple[str, ...]) -> list[Task]:
        return [Task("forced", kinds, share, names, worlds, 0, frames) for names in groups]

    listed = made(0.0, "dense", "draft", "fastcar")
    listed += forced(0.0, ("fastcar",))
    for share in shares:
        if share <= 0.25:
            listed += made(share, "neurons", "prune", "tas", "random")
            listed += forced(share, FORCED[0])
            continue
        listed += made(share, *FORCED[0], *FORCED[1])
        listed += forced(share, *FORCED)
        listed += made(share, *FORCED[2])
        if share == shares[0]:
            listed.append(Task("bounds", kinds, 0.0, (), worlds))
    return listed


ClipKey = tuple[str, int, int, int, int]  # what `make_clip` is given
DRAWN: dict[ClipKey, Clip] = {}  # drawing one takes seconds, and encoding it as many


def clip_keys(task: Task, size: int) -> list[ClipKey]:
    """The clips that a task is measured on, at the model's size of a picture."""
    frames = task.frames if task.what == "made" else GIVEN
    return [(name, task.worlds, task.seed, size, frames) for name in task.clips]


def _clip(*key: Any) -> Clip:
    if key not in DRAWN:
        DRAWN[key] = make_clip(*key)
    return DRAWN[key]


@lru_cache(len(CLIPS))
def _start(
    model: VilaModel, names: tuple[str, ...], worlds: int, seed: int, size: int, frames: int
) -> Session:
    """What all plans go on from."""
    keys = [(name, worlds, seed, size, frames) for name in names]
    clip = join([_clip(*key) for key in keys])
    return begin_dense(model, clip, torch.cat([_codes(model, *key) for key in keys]))


@cache
def _codes(model: VilaModel, name: str, worlds: int, seed: int, size: int, frames: int) -> Tensor:
    return true_codes(model, _clip(name, worlds, seed, size, frames))


def measure(model: VilaModel, task: Task) -> list[Document]:
    """The rows of one task."""
    keys = clip_keys(task, model.config.size[0])
    clip = join([_clip(*key) for key in keys])
    head = {"measure": task.what, "worlds": task.worlds, "seed": task.seed}
    if task.what == "bounds":
        return [head | row for row in _by_clip(task, bounds(model, clip))]
    ways = [way_of(model, name, task) for name in task.methods]
    codes = torch.cat([_codes(model, *key) for key in keys])
    start = _start(model, task.clips, *keys[0][1:])
    if task.what == "made":
        results = made(model, clip, ways, codes, start)
    else:
        results = forced(model, clip, ways, task.frames, codes, start)[1:]
    rows = []
    for name, way, by_world in zip(task.methods, ways, results, strict=True):
        named: Document = head | {"method": name, "share": task.share, "plan": str(way)}
        named["frames"] = task.frames
        for row in _by_clip(task, by_world):
            if "kl" in row:
                row["kl_worst"] = max(row["by_world"]["kl"])
            rows.append(named | row)
    return rows


def _by_clip(task: Task, values: Sequence[Values]) -> list[Document]:
    """Means over each clip's rooms, which lie behind each other."""
    return [
        {"clip": clip} | combined(values[i * task.worlds : (i + 1) * task.worlds])
        for i, clip in enumerate(task.clips)
    ]


def way_of(model: VilaModel, name: str, task: Task) -> Way:
    """A method at a share; what it must know beforehand comes from other rooms."""
    if name not in METHODS:
        return Way(name)
    k = round(1 / (1 - task.share))
    text = METHODS[name].replace("{s}", f"{task.share:g}").replace("{k}", str(k))
    text = text.replace("{age}", str(k if k > 2 else 2))
    if name not in ("threshold", "thresholds", "tas_head"):
        return Way(text)
    heads, scores = _known(model)
    if name == "tas_head":
        return Way(text, "head", heads=heads)
    if name == "thresholds":
        each = (float(layer.quantile(1 - task.share)) for layer in scores)
        return Way(text, thresholds=tuple(each))
    return Way(text.replace("{t}", f"{float(torch.cat(scores).quantile(1 - task.share)):.6g}"))


@cache
def _known(model: VilaModel) -> tuple[tuple[int, ...], list[Tensor]]:
    size = model.config.size[0]
    other = join([_clip(name, SEEN, OTHER, size, GIVEN) for name in CLIPS])
    return choose(model, other)


class HeadScores(Observer):
    """Gathers every head's score of every token: [B, H, 1] each, by layer."""

    def __init__(self, runner: RankedReplay) -> None:
        self.runner = runner
        self.found: dict[int, list[Tensor]] = {}

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        self.found.setdefault(ctx.layer, []).append(self.runner.by_head[ctx.layer])


@torch.inference_mode()
def choose(model: VilaModel, clip: Clip) -> tuple[tuple[int, ...], list[Tensor]]:
    """Of a clip: the head of each layer whose score ranks changes best, and the mean scores over
    all heads of its tokens, by layer."""
    codes, moves = true_codes(model, clip), clip.moves_on(model.device)
    # a share of nothing: all is computed, and the last outputs are still kept
    session = begin(model, Way("replay=attentive:share=0"), clip, codes)
    runner = session.memory.replay
    if not isinstance(runner, RankedReplay):
        raise TachyscopeError("heads are chosen from attentive replay's scores")
    layers, heads = session.shape.layers, session.shape.heads
    scores: list[list[Tensor]] = [[] for _ in range(layers)]  # [B, H, N] a frame
    changed: list[list[Tensor]] = [[] for _ in range(layers)]  # [B, N] a frame
    for i in range(GIVEN, GIVEN + SEEN):
        before = [layer.own["replay"]["output"][0].clone() for layer in session.memory.layers]
        heads_seen = HeadScores(runner)
        session.watch(heads_seen)
        model.score(session, codes[:, i : i + 1], moves[i : i + 1])
        session.unwatch(heads_seen)
        session.commit()
        for n, layer in enumerate(session.memory.layers):
            scores[n].append(torch.cat(heads_seen.found[n], -1))
            changed[n].append(changes(layer.own["replay"]["output"][0], before[n]))
    best, every = [], []
    for mine, truth in zip(scores, changed, strict=True):
        by_head, wanted = torch.cat(mine).float().cpu(), torch.cat(truth).float().cpu()
        ranks = [
            sum(spearman(by_head[row, h], wanted[row]) for row in range(len(wanted)))
            for h in range(heads)
        ]
        best.append(min(range(heads), key=ranks.__getitem__))
        every.append(by_head.mean(1).flatten())
    return tuple(best), every


def lines(rows: Sequence[Document]) -> list[str]:
    """A Markdown table a share: share left out where it is not the asked one, KL, loss to dense in
    dB with its interval, and the worst room's.

    Losses are room by room.
    """
    there = {(r["measure"], r["clip"], r.get("share"), r.get("method"), r["seed"]): r for r in rows}
    dense = {(r["clip"], r["seed"]): r for r in rows if r.get("method") == "dense"}
    out = ["| to the truth, dB | " + " | ".join(CLIPS) + " |", "|---" * (len(CLIPS) + 1) + "|"]
    for name, key in (("tokenizer", "psnr_tokenizer"), ("repeat", "psnr_truth_repeat")):
        limits = [there.get(("bounds", clip, None, None, 0)) for clip in CLIPS]
        out.append(f"| {name} | " + " | ".join(f"{x[key]:.1f}" if x else "" for x in limits) + " |")
    base = [dense.get((clip, 0)) for clip in CLIPS]
    out.append("| dense | " + " | ".join(_level(x) if x else "" for x in base) + " |")
    for share in sorted({row["share"] for row in rows if "share" in row}, reverse=True):
        out += ["", f"| {share:g} left out | {' | '.join(CLIPS)} |"]
        out.append("|---" * (len(CLIPS) + 1) + "|")
        for name in dict.fromkeys([*METHODS, *(row["method"] for row in rows if "method" in row)]):
            cells = []
            for clip in CLIPS:
                forced = there.get(("forced", clip, share, name, 0))
                free = there.get(("made", clip, share, name, 0))
                cell = []
                if (some := forced or free) and abs(some["share_eligible"] - share) > 0.02:
                    cell.append(f"[{some['share_eligible']:.2f}]")
                if forced:
                    cell.append(f"{forced['kl']:.2f}")
                if free and name != "dense":
                    cell.append(_loss(dense.get((clip, 0)), free))
                cells.append("; ".join(cell))
            if any(cells):
                out.append(f"| {name} | {' | '.join(cells)} |")
    return out + _by_length(rows, dense)


def _by_length(rows: Sequence[Document], dense: Mapping[tuple[str, int], Document]) -> list[str]:
    """Of plans that make more than eight frames: what each eight of them lose, and the motion."""
    long = [row for row in rows if row["measure"] == "made" and row.get("frames", 0) > GIVEN]
    if not long:
        return []
    ends = sorted(int(key[14:]) for key in long[0]["by_world"] if key.startswith("psnr_truth_to_"))
    out = ["", f"| eight frames up to {ends}; motion | {' | '.join(CLIPS)} |"]
    out.append("|---" * (len(CLIPS) + 1) + "|")
    for name in dict.fromkeys(row["method"] for row in long):
        cells = {}
        for row in long:
            if row["method"] == name:
                base = None if name == "dense" else dense.get((row["clip"], row["seed"]))
                parts = [_loss(base, row, f"psnr_truth_to_{end}") for end in ends]
                cells[row["clip"]] = "; ".join([*parts, f"{row['motion']:.2f}"])
        out.append(f"| {name} | {' | '.join(cells.get(clip, '') for clip in CLIPS)} |")
    return out


def _level(row: Document) -> str:
    low, high, worst = (row[f"psnr_truth_{end}"] for end in ("low", "high", "worst"))
    return f"{row['psnr_truth']:.1f} ({low:.1f} to {high:.1f}), worst {worst:.1f}"


def _loss(dense: Document | None, row: Document, key: str = "psnr_truth") -> str:
    """dB to the truth that are lost: mean (interval), worst room."""
    if dense is None:
        return f"{row[key]:.1f} dB"
    mean, low, high = versus(dense, row, key)
    pairs = zip(dense["by_world"][key], row["by_world"][key], strict=True)
    return f"{mean:.2f} ({low:.2f} to {high:.2f}), worst {max(a - b for a, b in pairs):.1f}"
