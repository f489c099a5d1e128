"""The reasons behind the methods, measured: where time goes, what repeats, where attention lies.

One rollout is observed and a few more are timed, since looking takes time of its own. Observing
changes nothing: an observed rollout makes the frames of a plain one.
"""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from tachyscope.adapters import Adapter
from tachyscope.errors import TachyscopeError
from tachyscope.files import check_folder, replacing, write_atomically
from tachyscope.plan import Plan
from tachyscope.results import Document, document, size_of, to_json
from tachyscope.rollout import open_session, parse_plan, rollout
from tachyscope.session import Session
from tachyscope.types import Chunk, Mlp, Moment, Shape

PARTS = ("mlp", "attention", "prompt", "rest")  # of the time and of the counted work
ALIKE = ("mlp", "query", "key", "key_rotated")  # what is held against the frame before
ASPECTS = ("cosine", "difference", "elsewhere")  # what `alike` tells, in its order
MASS = ("mass", "prompt_mass")  # of the video's entries, of the prompt's tokens
PERCENTS = (1, 2, 5, 10, 20, 30, 50, 75, 100)  # of the keys, strongest first

Watch = Callable[[str, Chunk], None]
Rows = Sequence[Mapping[str, float]]  # of the meter, one a chunk


def inspect_model(
    model: Adapter,
    plan: Plan | str = "dense",
    *,
    frames: int,
    prompt: str = "",
    actions: str = "",
    seed: int = 0,
    size: tuple[int, int] | None = None,
    first: np.ndarray | None = None,
    first_actions: str = "",
    places: int = 64,
    queries: int = 16,
    rounds: int = 3,
    command: str = "",
    watch: Watch | None = None,
) -> Document:
    """Observe one rollout, time `rounds` more, and say what was found as a results document.

    places: how many places of a latent frame are held against the frame before, the same ones
    all along. queries: of how many places the attention is weighed, drawn anew for every layer
    and pass. Given frames are observed too, but count in the table `frames` alone. watch: is
    told every chunk, with its run's name.
    """
    for name, value in (("frames", frames), ("queries", queries), ("rounds", rounds)):
        if value < 1:
            raise TachyscopeError(f"{name} must be 1 or more, got {value}")
    if places < 2:
        raise TachyscopeError(f"places must be 2 or more, got {places}: one has no other beside it")
    parsed = parse_plan(model, plan)
    with torch.inference_mode():
        given = None if first is None else model.latents(first)
    known = 0 if given is None else given.shape[model.frame_dim]
    shape = model.shape(size)
    coming = known
    while model.frames(coming) < model.frames(known) + frames:
        coming += shape.chunk
    if coming < 2:
        raise TachyscopeError("adjacent frames need two latent frames, got 1: raise frames")

    def play(name: str, make: Callable[..., Session]) -> tuple[Any, list[Chunk]]:
        session = open_session(
            model, parsed, prompt=prompt, frames=frames, seed=seed, size=size, first=first,
            first_actions=first_actions, make=make,
        )  # fmt: skip
        made = []
        for chunk in rollout(model, frames=frames, actions=actions, session=session):
            made.append(chunk)
            if watch is not None:
                watch(name, chunk)
        return session, made

    # observing comes first, so that what a process does once is done before the clock runs
    observed, chunks = play("observed", partial(Observed, places=places, queries=queries))
    names = [f"timed {i + 1}" for i in range(rounds)]
    timed = [[chunk.stats for chunk in play(name, Timed)[1]] for name in names]
    by_chunk = _times(timed, known, shape)
    samples = {kind: Samples.of(records) for kind, records in observed.found.items()}
    made_only = {kind: found.since(known) for kind, found in samples.items()}
    row: Document = {
        "name": "inspect", "plan": str(parsed), "model": model.name, "size": size_of(chunks[0]),
        "frames": frames, "given": known, "places": len(observed.places),
        "queries": observed.queries, "rounds": rounds,
    }  # fmt: skip
    row |= _overall(timed, shape)
    row |= _table(made_only, ())[0]
    return document(
        "inspect", [row], command, time=by_chunk, layers=_table(made_only, ("layer",)),
        passes=_table(made_only, ("pass",)), cells=_table(made_only, ("layer", "frame")),
        frames=[
            part | {"given": part["frame"] < known} for part in _table(samples, ("frame",))
        ],
    )  # fmt: skip


class Timed(Session):
    """A session whose meter also tells the time in attention, in the prompt's and in MLPs."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.meter.add("queries", q.shape[:3].numel())
        with self.meter.span("attention"):
            return super().attend(layer, q, k, v)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        with self.meter.span("prompt"):
            return super().cross(layer, q)

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        with self.meter.span("mlp"):
            return super().mlp(layer, x, fn)

    def _count_rows(self, fn: Mlp, computed: int, rows: int) -> None:
        super()._count_rows(fn, computed, rows)
        self.meter.add("mlp_macs", computed * fn.macs)


@dataclass(frozen=True, slots=True)
class Record:
    """Values [n, …] of one layer and pass, one a sampled token, in one latent frame."""

    layer: int
    frame: int
    step: int
    values: Tensor


class Observed(Session):
    """A session that looks at what passes through it; what it returns is a plain session's.

    `found` gathers records by kind: of `ALIKE` cosine, relative difference and the cosine to
    another place; of `MASS` the mass in the strongest `PERCENTS` of the keys.
    """

    def __init__(self, *args: Any, places: int = 64, queries: int = 16, **kwargs: Any) -> None:
        self.wanted, self.queries = places, queries
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        super().reset()
        every = range(self.shape.places)
        # draws of its own: the session's would change the video by being asked
        drawn = random.Random(f"{self.seed} places")
        self.places = sorted(drawn.sample(every, min(self.wanted, len(every))))
        self.queries = min(self.queries, len(every))
        self.found: dict[str, list[Record]] = defaultdict(list)
        self._fresh: dict[tuple[str, int, int], list[Tensor]] = {}
        self._last: dict[tuple[str, int, int], tuple[int, Tensor]] = {}
        self._weighed: list[tuple[str, Record]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        assert self._moment is not None and self._angles is not None
        at, here = self._moment.at(layer), self.layers[layer]
        if self._prefilling:
            return out
        slots = slice(at.past + at.start, at.end)
        kept = {"query": q, "key": k, "key_rotated": here.k[:, :, slots]}
        for kind, x in kept.items():
            self._keep(kind, at, x.transpose(1, 2))
        tokens = self._tokens(at, self._drawn(at))
        if tokens.numel():
            cos, sin = (x[:, :, tokens] for x in self._angles)
            turned = self.rope.turn(q[:, :, tokens], cos, sin)
            seen = at.past + at.start + tokens + 1 if at.shape.causal else None
            used = slice(0, at.end)
            held = mass(turned, here.k[:, :, used], here.logw[:, :, used], seen)
            self._weigh("mass", at, held)
        return out

    def cross(self, layer: int, q: Tensor) -> Tensor:
        out = super().cross(layer, q)
        assert self._moment is not None
        at, text = self._moment.at(layer), self.texts[layer]
        tokens = self._tokens(at, self._drawn(at))
        if tokens.numel():
            self._weigh("prompt_mass", at, mass(q[:, :, tokens], text.k, text.logw))
        return out

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        y = super().mlp(layer, x, fn)
        assert self._moment is not None
        if not self._prefilling:
            self._keep("mlp", self._moment.at(layer), y)
        return y

    def commit(self, n: int | None = None) -> None:
        frame = self.frame
        super().commit(n)
        for (kind, layer, step), parts in self._fresh.items():
            now = torch.cat(parts, 1).unflatten(1, (-1, len(self.places)))
            self._compare(kind, layer, step, frame, now[:, : self.frame - frame])
        for kind, part in self._weighed:
            self.found[kind].append(_on_host(part))
        self._fresh, self._weighed = {}, []

    def _drawn(self, at: Moment) -> list[int]:
        """The places whose queries are weighed, seeded by chunk, layer and pass."""
        drawn = random.Random(f"{self.seed} {at.chunk} {at.layer} {at.step}")
        return sorted(drawn.sample(range(at.shape.places), self.queries))

    def _tokens(self, at: Moment, places: Sequence[int]) -> Tensor:
        """Which of this pass's tokens stand at the places, latent frame by latent frame."""
        size = at.shape.places
        frames = range(-(-(at.start + at.tokens) // size))
        found = [frame * size + place - at.start for frame in frames for place in places]
        inside = [i for i in found if 0 <= i < at.tokens]
        return torch.tensor(inside, dtype=torch.int64, device=self.device)

    def _keep(self, kind: str, at: Moment, x: Tensor) -> None:
        """Remember x [B, S, …] at the sampled places until the chunk is finished."""
        tokens = self._tokens(at, self.places)
        parts = self._fresh.setdefault((kind, at.layer, at.step), [])
        if not at.shape.causal:
            parts.clear()  # a pass that is run again stands for itself alone
        if tokens.numel():
            parts.append(x[:, tokens])

    def _compare(self, kind: str, layer: int, step: int, frame: int, now: Tensor) -> None:
        """Hold each latent frame of now [B, F, P, …], from `frame` on, against the one before."""
        before, old = self._last.get((kind, layer, step), (-1, None))
        self._last[kind, layer, step] = frame + now.shape[1] - 1, now[:, -1:]
        # a pass that the last chunk did not have left nothing to compare with
        frames = now if old is None or before != frame - 1 else torch.cat([old, now], 1)
        first = frame + now.shape[1] - frames.shape[1] + 1
        values = alike(frames[:, :-1], frames[:, 1:])
        for i, of_frame in enumerate(values.unbind(1)):
            record = Record(layer, first + i, step, of_frame.flatten(0, 1))
            self.found[kind].append(_on_host(record))

    def _weigh(self, kind: str, at: Moment, held: Tensor) -> None:
        """Note shares of mass [B, H, F · r, P] by latent frame, as the mean over heads."""
        frames = max(1, at.tokens // at.shape.places)
        by_query = held.mean(1).unflatten(1, (frames, -1))
        for i, values in enumerate(by_query.unbind(1)):
            record = Record(at.layer, self.frame + i, at.step, values.flatten(0, 1))
            self._weighed.append((kind, record))


def _on_host(record: Record) -> Record:
    return Record(record.layer, record.frame, record.step, record.values.double().cpu())


def alike(old: Tensor, new: Tensor) -> Tensor:
    """Cosine, |old - new| / |new|, and the cosine to another place: [B, F, P, 3].

    old and new are [B, F, P, W], or [B, F, P, H, D]: then values are means over heads. The other
    place is half the sampled ones away: what all places share must not pass for repetition.
    """
    a, b = old.double(), new.double()
    size = b.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    parts = (
        F.cosine_similarity(a, b, -1),
        (a - b).norm(dim=-1) / size,
        F.cosine_similarity(a.roll(a.shape[2] // 2, 2), b, -1),
    )
    return torch.stack([part.flatten(3).mean(-1) if part.ndim > 3 else part for part in parts], -1)


def mass(q: Tensor, k: Tensor, logw: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
    """The attention mass in each query's strongest keys, [B, H, R, len(PERCENTS)].

    q [B, H, R, D] and k [B, Hkv, N, D] are rotated; logw is as in a layer; seen [R] is how many
    of the entries a query sees. A share of the keys is rounded up to whole ones.
    """
    group = q.shape[1] // k.shape[1]
    scores = q.float() @ k.float().repeat_interleave(group, 1).mT / math.sqrt(q.shape[3])
    if logw is not None:
        wide = logw if logw.shape[1] == 1 else logw.repeat_interleave(group, 1)
        scores = scores + wide.unsqueeze(2)
    if seen is not None:
        later = torch.arange(k.shape[2], device=q.device) >= seen[:, None]
        scores = scores.masked_fill(later, -math.inf)
    live = scores.isfinite().sum(-1, keepdim=True)
    held = scores.softmax(-1, dtype=torch.float64).sort(descending=True).values.cumsum(-1)
    # number by number, and whole ones: a share as a float may round up to one key more
    counts = torch.cat([-(-live * percent // 100) for percent in PERCENTS], -1)
    return held.gather(-1, counts.clamp(min=1) - 1)


@dataclass(frozen=True, slots=True)
class Samples:
    """Records of one kind, one row a token: where it was seen [n, 3], and its values [n, …]."""

    where: np.ndarray  # layer, latent frame, pass
    values: np.ndarray

    @classmethod
    def of(cls, records: Iterable[Record]) -> Samples:
        where, values = [], []
        for record in records:
            spot = (record.layer, record.frame, record.step)
            where.append(np.tile(spot, (len(record.values), 1)))
            values.append(record.values.numpy())
        return cls(np.concatenate(where), np.concatenate(values))

    def since(self, frame: int) -> Samples:
        late = self.where[:, 1] >= frame
        return Samples(self.where[late], self.values[late])

    def groups(self, axes: Sequence[str]) -> dict[tuple[int, ...], np.ndarray]:
        """Values by what they have in common on the axes; all of them for none."""
        if not len(self.values):
            return {}
        columns = [("layer", "frame", "pass").index(axis) for axis in axes]
        keys = self.where[:, columns]
        order = np.lexsort(keys.T[::-1]) if columns else np.arange(len(keys))
        keys = keys[order]
        cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(1)) + 1
        parts = np.split(self.values[order], cuts)
        return {tuple(map(int, keys[i])): v for i, v in zip((0, *cuts), parts, strict=True)}


def _table(found: Mapping[str, Samples], axes: Sequence[str]) -> list[Document]:
    """A row for each place on the axes, with the measures of every kind."""
    rows: dict[tuple[int, ...], Document] = {}
    for kind in (*ALIKE, *MASS):
        if kind in found:
            for key, values in found[kind].groups(axes).items():
                row = rows.setdefault(key, dict(zip(axes, key, strict=True)))
                row |= _measures(kind, values)
    return [rows[key] for key in sorted(rows)] if rows else [{}]


def _measures(kind: str, values: np.ndarray) -> dict[str, float]:
    means = [float(mean) for mean in values.mean(0)]
    if kind in MASS:
        return {f"{kind}_{p}": mean for p, mean in zip(PERCENTS, means, strict=True)}
    named = {f"{kind}_{x}": mean for x, mean in zip(ASPECTS, means, strict=True)}
    low, high = np.quantile(values[:, 0], (0.05, 0.95))
    return named | {f"{kind}_cosine_p5": float(low), f"{kind}_cosine_p95": float(high)}


def _times(timed: Sequence[Rows], known: int, shape: Shape) -> list[Document]:
    """A row a chunk: of all rounds its quickest, which others disturbed least."""
    found = []
    for i, rounds in enumerate(zip(*timed, strict=True)):
        row = min(rounds, key=lambda row: row["chunk_ms"])
        spot = {"frame": known + i * shape.chunk, "context": row["pairs_dense"] / row["queries"]}
        found.append(spot | {"chunk_ms": row["chunk_ms"]} | _shares(row, shape))
    return found


def _overall(timed: Sequence[Rows], shape: Shape) -> Document:
    """Shares over all rounds, and for those of the time their range from round to round."""
    sums = [{key: sum(row[key] for row in rows) for key in rows[0]} for rows in timed]
    total = {key: sum(row[key] for row in sums) for key in sums[0]}
    found = {"chunk_ms": total["chunk_ms"] / len(timed)} | _shares(total, shape)
    by_round = [_shares(row, shape) for row in sums]
    for part in PARTS:
        values = [row[f"time_{part}"] for row in by_round]
        found |= {f"time_{part}_low": min(values), f"time_{part}_high": max(values)}
    return found


def _shares(row: Mapping[str, float], shape: Shape) -> dict[str, float]:
    """What part of the time and of the counted work MLPs, attention and the prompt's take.

    The rest is projections, norms, heads and samplers, and what policies themselves compute.
    """
    time = {part: row.get(f"{part}_ms", 0.0) for part in PARTS[:-1]}
    pair = 2 * shape.head_dim
    work = {
        "mlp": row["mlp_macs"],
        "attention": pair * row["pairs"],
        "prompt": pair * row.get("text_pairs", 0.0),
    }
    time["rest"] = row["chunk_ms"] - sum(time.values())
    work["rest"] = row["macs"] - sum(work.values())
    found = {f"time_{part}": value / row["chunk_ms"] for part, value in time.items()}
    return found | {f"work_{part}": value / row["macs"] for part, value in work.items()}


def lines(found: Document) -> list[str]:
    """An inspection as a reader wants it in a terminal: time, likeness by layer, mass by layer."""
    row, layers = found["rows"][0], found["layers"]
    cpu, gpu = found["machine"]["cpu"], found["machine"]["gpu"]
    out = [
        f"{row['model']} {row['size']}, {row['frames']} frames after {row['given']} given, "
        f"torch {found['versions']['torch']}, {gpu or cpu}",
        "",
        "Share of the time, by how many keys a query sees:",
        f"{'keys':>8}{'MLP':>8}{'attention':>11}{'prompt':>8}{'rest':>8}{'ms a chunk':>12}",
    ]
    for part in _stretches(found["time"], 6):
        out.append(
            f"{part['context']:8.0f}{part['time_mlp']:8.1%}{part['time_attention']:11.1%}"
            f"{part['time_prompt']:8.1%}{part['time_rest']:8.1%}{part['chunk_ms']:12.1f}"
        )
    work = ", ".join(f"{NAMES[part]} {row[f'work_{part}']:.1%}" for part in PARTS)
    out += [f"Counted work: {work}.", ""]
    kinds = [kind for kind in ALIKE if f"{kind}_cosine" in row]
    out += ["Cosine to the same place one latent frame before (to another place), by layer:"]
    out += [f"{'layer':>8}" + "".join(f"{NAMES[kind]:>17}" for kind in kinds)]
    for name, part in [*((str(part["layer"]), part) for part in layers), ("all", row)]:
        cells = [f"{part[f'{k}_cosine']:.3f} ({part[f'{k}_elsewhere']:.3f})" for k in kinds]
        out.append(f"{name:>8}" + "".join(f"{cell:>17}" for cell in cells))
    apart = ", ".join(f"{NAMES[kind]} {row[f'{kind}_difference']:.3f}" for kind in kinds)
    out += [f"Difference over norm: {apart}.", ""]
    out += ["Attention mass in the strongest keys, by layer:"]
    shown = (5, 10, 20, 30, 50)
    out += [f"{'layer':>8}" + "".join(f"{f'{p} %':>8}" for p in shown)]
    several = [*((str(part["layer"]), "mass", part) for part in layers), ("all", "mass", row)]
    if "prompt_mass_5" in row:
        several.append(("prompt", "prompt_mass", row))
    for name, kind, part in several:
        out.append(f"{name:>8}" + "".join(f"{part[f'{kind}_{p}']:8.1%}" for p in shown))
    return out


def _stretches(rows: Sequence[Document], most: int) -> list[Document]:
    """The chunks as at most so many stretches of the video: one by one their time scatters."""
    found = []
    for part in np.array_split(np.arange(len(rows)), min(most, len(rows))):
        some = [rows[i] for i in part]
        weights = [row["chunk_ms"] for row in some]
        mean = {"context": float(np.mean([row["context"] for row in some]))}
        mean["chunk_ms"] = float(np.mean(weights))
        for name in PARTS:
            shares = [row[f"time_{name}"] for row in some]
            mean[f"time_{name}"] = float(np.average(shares, weights=weights))
        found.append(mean)
    return found


def write(found: Document, folder: str | os.PathLike[str]) -> list[Path]:
    """Write inspect.json and the plots, each as PNG and as SVG; the files' names."""
    target = check_folder(folder)
    files = [write_atomically(target / "inspect.json", to_json(found, indent=2) + "\n")]
    with mpl.rc_context(STYLE):
        for name, draw in DRAWN.items():
            figure = draw(found)
            for ending in ("png", "svg"):
                path = target / f"{name}.{ending}"
                nothing = {"Date": None} if ending == "svg" else None
                with replacing(path) as part:
                    figure.savefig(part, format=ending, dpi=160, metadata=nothing)
                files.append(path)
    return files


INK, SOFT, GRID = "#24272c", "#555b64", "#e3e3e3"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "tachyscope",  # else two plots of one document differ
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": GRID,
    "legend.frameon": False,
}
NAMES = {
    "mlp": "MLP", "attention": "attention", "prompt": "prompt", "rest": "rest",
    "query": "query", "key": "key", "key_rotated": "key, rotated",
}  # fmt: skip
# of Okabe and Ito, who chose them for every kind of colour vision
HUES = {
    "mlp": "#d55e00", "attention": "#0072b2", "prompt": "#009e73", "rest": "#c4c4c4",
    "query": "#0072b2", "key": "#009e73", "key_rotated": "#cc79a7",
}  # fmt: skip
# marks and hatches, so that colour is never the only difference
MARKS = {"mlp": "o", "query": "s", "key": "^", "key_rotated": "D"}
HATCHES = {"mlp": "", "attention": "///", "prompt": "...", "rest": ""}


def _titled(found: Document, what: str, size: tuple[float, float]) -> Figure:
    row = found["rows"][0]
    room = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
    figure = Figure(size, layout=room)
    figure.suptitle(
        f"{what}: {row['model']}, {row['size']}", x=0.015, ha="left", fontsize=12.5,
        fontweight="bold",
    )  # fmt: skip
    return figure


def _draw_time(found: Document) -> Figure:
    """Two stacks over context: the clock's shares, and the counted work's beside them."""
    figure = _titled(found, "Where the time goes", (10, 4.2))
    rows = found["time"]
    x = np.array([row["context"] for row in rows])
    width = 0.88 * float(np.diff(x).min()) if len(x) > 1 else 1.0
    parts = [part for part in PARTS if any(row[f"work_{part}"] for row in rows)]
    titles = {"time": "share of the time", "work": "share of the counted work (multiply-adds)"}
    for axes, (measure, title) in zip(
        figure.subplots(1, 2, sharey=True), titles.items(), strict=True
    ):
        floor = np.zeros(len(x))
        for part in parts:
            y = np.array([row[f"{measure}_{part}"] for row in rows])
            axes.bar(
                x, y, width, floor, color=HUES[part], hatch=HATCHES[part], edgecolor="white",
                linewidth=0, label=NAMES[part],
            )  # fmt: skip
            floor += y
        axes.set_title(title)
        axes.set_xlabel("keys that a query sees, mean of a chunk")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
        if len(x) < 6:
            axes.set_xticks(x, [f"{value:.0f}" for value in x])
    shown = axes.get_legend_handles_labels()
    figure.legend(*(part[::-1] for part in shown), loc="outside right center")
    return figure


def _draw_alike(found: Document) -> Figure:
    """Cosine and difference by layer, cosine by latent frame, and by pass where there are some."""
    figure = _titled(found, "How alike adjacent frames are, place by place", (11.5, 7.2))
    (by_layer, apart), (by_frame, other) = figure.subplots(2, 2)
    row, layers = found["rows"][0], found["layers"]
    kinds = [kind for kind in ALIKE if f"{kind}_cosine" in row]
    _curves(by_layer, layers, "layer", kinds, "cosine")
    # a band for each would be a fog
    x, low = _points(layers, "layer", "mlp_cosine_p5")
    high = _points(layers, "layer", "mlp_cosine_p95")[1]
    by_layer.fill_between(
        x, low, high, color=HUES["mlp"], alpha=0.13, linewidth=0, label="MLP, 5 to 95 %"
    )
    for kind in kinds:
        x, y = _points(layers, "layer", f"{kind}_elsewhere")
        name = "another place" if kind == "mlp" else None
        by_layer.plot(x, y, ":", color=HUES[kind], linewidth=1.4, label=name)
    _curves(apart, layers, "layer", kinds, "difference")
    _curves(by_frame, found["frames"], "frame", kinds, "cosine")
    given, last = row["given"], found["passes"][-1]["pass"]
    of_frame, grey = "latent frame, held against the one before", "; grey: given frames"
    framed, cosines = [by_frame], [by_layer, by_frame]
    if last:
        _curves(other, found["passes"], "pass", kinds, "cosine")
        other.set_title(f"cosine by pass; {last} is the clean one")
        cosines.append(other)
    else:  # a single pass makes no curve
        _curves(other, found["frames"], "frame", kinds, "difference")
        other.set_title("difference by latent frame")
        framed.append(other)
    if given > 1:
        for axes in framed:
            left, right = axes.get_xlim()
            axes.axvspan(left, given - 0.5, color="#efefef", linewidth=0, zorder=0)
            axes.set_xlim(left, right)
    by_layer.set_title("cosine by layer")
    apart.set_title("difference by layer; at 1 the old is no nearer than nothing")
    by_frame.set_title("cosine by latent frame" + (grey if given > 1 else ""))
    for axes in (by_layer, apart):
        axes.set_xlabel("layer")
    other.set_xlabel("pass over a chunk" if last else of_frame)
    by_frame.set_xlabel(of_frame)
    for axes in (by_layer, apart, by_frame, other):
        if axes in cosines:
            axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.03)
            axes.set_ylabel("cosine")
        else:
            axes.set_ylim(0, max(1.03, 1.05 * axes.get_ylim()[1]))
            axes.set_ylabel("|old − new| / |new|")
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    figure.legend(*by_layer.get_legend_handles_labels(), loc="outside right center")
    return figure


def _points(rows: Sequence[Document], axis: str, key: str) -> tuple[list[int], list[float]]:
    there = [row for row in rows if key in row]
    return [row[axis] for row in there], [row[key] for row in there]


def _curves(
    axes: Axes, rows: Sequence[Document], axis: str, kinds: Sequence[str], aspect: str
) -> None:
    for kind in kinds:
        x, y = _points(rows, axis, f"{kind}_{aspect}")
        axes.plot(
            x, y, color=HUES[kind], marker=MARKS[kind], markersize=4.5, linewidth=1.7,
            label=NAMES[kind],
        )  # fmt: skip
    axes.grid(axis="y")


def _draw_mass(found: Document) -> Figure:
    """Mass over the share of keys, a line a layer; and the strongest tenth's by layer and frame."""
    figure = _titled(found, "Where the attention lies", (11.5, 4.6))
    curves, cells = figure.subplots(1, 2)
    row, layers = found["rows"][0], found["layers"]
    colours = mpl.colormaps["cividis"]
    top = max(layers[-1]["layer"], 1)
    for part in layers:
        y = [part[f"mass_{p}"] for p in PERCENTS]
        curves.plot(PERCENTS, y, color=colours(0.85 * part["layer"] / top), linewidth=1.3)
    _mean_curve(curves, row, "mass", "mean of the layers", INK, "solid")
    if "prompt_mass_5" in row:
        _mean_curve(curves, row, "prompt_mass", "of the prompt's tokens", "#d55e00", (0, (5, 2)))
    curves.plot(PERCENTS, [p / 100 for p in PERCENTS], color=SOFT, linestyle=(0, (1, 2)),
                linewidth=1.2, label="if all keys weighed the same")  # fmt: skip
    curves.plot(*REPORTED, "x", color="#cc79a7", markersize=9, markeredgewidth=2.4, linestyle="",
                label="FAST-AR on Rolling-Forcing", zorder=5)  # fmt: skip
    curves.set_xscale("log")
    curves.set_xticks(PERCENTS, ["" if p == 75 else str(p) for p in PERCENTS])
    curves.minorticks_off()
    curves.set_xlim(1, 100)
    curves.set_ylim(0, 1.02)
    curves.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
    curves.grid()
    curves.set_xlabel("strongest keys read, % of those a query sees")
    curves.set_ylabel("attention mass they hold")
    curves.set_title("a line a layer, dark to light: first to last")
    figure.legend(*curves.get_legend_handles_labels(), loc="outside lower left", ncols=4)
    frames = sorted({part["frame"] for part in found["cells"]})
    grid = np.full((top + 1, len(frames)), np.nan)
    for part in found["cells"]:
        if f"mass_{SHOWN}" in part:
            grid[part["layer"], frames.index(part["frame"])] = part[f"mass_{SHOWN}"]
    box = (frames[0] - 0.5, frames[-1] + 0.5, -0.5, grid.shape[0] - 0.5)
    image = cells.imshow(
        grid, cmap="cividis", vmin=0, vmax=1, origin="lower", aspect="auto", extent=box
    )
    cells.set_xlabel("latent frame")
    cells.set_ylabel("layer")
    cells.set_title(f"mass in the strongest {SHOWN} % of the keys")
    for axis in (cells.xaxis, cells.yaxis):
        axis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    bar = figure.colorbar(image, ax=cells, format=mpl.ticker.PercentFormatter(1))
    bar.outline.set_visible(False)
    return figure


REPORTED = ([30], [0.85])  # FAST-AR's own measure: the strongest 30 % held about 85 %
SHOWN = 10  # percent of the keys, in the map of layers and frames


def _mean_curve(
    axes: Axes, row: Document, kind: str, name: str, colour: str, stroke: Any
) -> None:  # fmt: skip
    y = [row[f"{kind}_{p}"] for p in PERCENTS]
    axes.plot(PERCENTS, y, color=colour, linestyle=stroke, linewidth=2.4, label=name)


DRAWN: dict[str, Callable[[Document], Figure]] = {
    "time": _draw_time,
    "similarity": _draw_alike,
    "mass": _draw_mass,
}
