"""The reasons behind the methods, measured: where time goes, what repeats, where attention lies.

One rollout is observed and a few more are timed, since looking takes time of its own. Observing
changes nothing: an observed rollout makes the frames of a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tachyscope.arguments import (
    check_first_size,
    check_model,
    check_prompt,
    check_whole,
    parse_first,
    parse_plan,
    parse_size,
)
from tachyscope.errors import TachyscopeError
from tachyscope.inspection.figures import NAMES, write
from tachyscope.inspection.neurons import TOP, NeuronChange
from tachyscope.inspection.output_change import OutputChange
from tachyscope.inspection.stats import ALIKE, StatsObserver, table
from tachyscope.inspection.timing import PARTS, overall, times
from tachyscope.models.base import VideoModel
from tachyscope.observers import Observer, Timing
from tachyscope.plan import Plan
from tachyscope.results import Document, document, size_of
from tachyscope.rollout import rollout
from tachyscope.stream import chunks_for
from tachyscope.stream import open as open_stream
from tachyscope.tables import format_table
from tachyscope.types import Chunk

if TYPE_CHECKING:
    from tachyscope.arguments import Actions, Pictures, PixelSize, Start

__all__ = ["inspect_model", "lines", "write"]

Watch = Callable[[str, Chunk], None]


def inspect_model(
    model: VideoModel,
    plan: Plan | str = "dense",
    *,
    frames: int,
    prompt: str = "",
    actions: Actions = "",
    seed: int = 0,
    size: PixelSize | None = None,
    first: Pictures | None = None,
    first_actions: Actions = "",
    start: Start | None = None,
    pace: float | None = None,
    places: int = 64,
    queries: int = 16,
    rounds: int = 3,
    command: str = "",
    watch: Watch | None = None,
) -> Document:
    """Observe one rollout, time `rounds` more, and say what was found as a results document.

    Plan, frames, prompt, actions, seed, size, first, start and pace are as `rollout` takes them.
    places: how many places of a latent frame are held against the frame before, the same ones all
    along. queries: of how many places the attention is weighed, drawn anew for every layer and
    pass. Given frames are observed too, but count in the table `frames` alone. watch: is
    told every chunk, with its run's name.
    """
    check_model(model)
    check_prompt(prompt)  # one video, no batch
    check_whole("seed", seed)
    frames, queries = check_whole("frames", frames), check_whole("queries", queries)
    rounds, places = check_whole("rounds", rounds), check_whole("places", places)
    parsed, pixels = parse_plan(model, plan), parse_size(size)
    pictures = None if first is None else parse_first(first)
    if pictures is not None:
        check_first_size(model, pictures, pixels)
    with torch.inference_mode():
        given = None if pictures is None else model.encode_frames(pictures)
    known = 0 if given is None else given.shape[model.frame_dim]
    shape = model.shape(pixels)
    if known + chunks_for(model, shape.chunk, known, frames) * shape.chunk < 2:
        raise TachyscopeError("adjacent frames need two latent frames, got 1: raise frames")

    def play(name: str, *observers: Observer) -> list[Chunk]:
        stream = open_stream(
            model, parsed, prompt=prompt, frames=frames, seed=seed, size=pixels, first=pictures,
            first_actions=first_actions, start=start, pace=pace, observers=observers,
        )  # fmt: skip
        made = []
        for chunk in rollout(model, frames=frames, actions=actions, stream=stream):
            made.append(chunk)
            if watch is not None:
                watch(name, chunk)
        return made

    # observing comes first, so that what a process does once is done before the clock runs
    observed = StatsObserver(places, queries)
    neurons = NeuronChange(model.mlps if shape.token_by_token else ())
    # of the dense plan there is none to tell
    changes = [] if str(parsed) == str(parse_plan(model, "dense")) else [OutputChange(queries)]
    chunks = play("observed", observed, *([neurons] if neurons.mlps else []), *changes)
    names = [f"timed {i + 1}" for i in range(rounds)]
    timed = [[chunk.stats for chunk in play(name, Timing())] for name in names]
    by_chunk = times(timed, known, shape)
    made_only = {
        kind: [record for record in records if record.frame >= known]
        for kind, records in observed.found.items()
    }
    row: Document = {
        "name": "inspect", "plan": str(parsed), "model": model.name, "size": size_of(chunks[0]),
        "frames": frames, "given": known, "places": len(observed.places),
        "queries": observed.queries, "rounds": rounds,
    }  # fmt: skip
    row |= overall(timed, shape)
    row |= table(made_only, ())[0]
    return document(
        "inspect", [row], command, time=by_chunk, layers=table(made_only, ("layer",)),
        neurons=neurons.table() if neurons.mlps else [],
        changes=changes[0].table() if changes else [],
        passes=table(made_only, ("pass",)), cells=table(made_only, ("layer", "frame")),
        frames=[
            part | {"given": part["frame"] < known} for part in table(observed.found, ("frame",))
        ],
    )  # fmt: skip


def lines(document: Document) -> list[str]:
    """An inspection as a reader wants it in a terminal: time, likeness by layer, mass by layer."""
    row, layers = document["rows"][0], document["layers"]
    cpu, gpu = document["machine"]["cpu"], document["machine"]["gpu"]
    out = [
        f"{row['model']} {row['size']}, {row['frames']} frames after {row['given']} given, "
        f"torch {document['versions']['torch']}, {gpu or cpu}",
        "",
        "Share of the time, by how many keys a query sees:",
        *format_table(
            ["keys", *(NAMES[part] for part in PARTS), "ms a chunk"],
            [
                [
                    f"{part['context']:.0f}",
                    *(f"{part[f'time_{name}']:.1%}" for name in PARTS),
                    f"{part['chunk_ms']:.1f}",
                ]
                for part in _stretches(document["time"], 6)
            ],
        ),
    ]
    work = ", ".join(f"{NAMES[part]} {row[f'work_{part}']:.1%}" for part in PARTS)
    out += [f"Counted work: {work}.", ""]
    kinds = [kind for kind in ALIKE if f"{kind}_cosine" in row]
    out += ["Cosine to the same place one latent frame before (to another place), by layer:"]
    several = [*((str(part["layer"]), part) for part in layers), ("all", row)]
    cells = [
        [name, *(f"{part[f'{k}_cosine']:.3f} ({part[f'{k}_elsewhere']:.3f})" for k in kinds)]
        for name, part in several
    ]
    out += format_table(["layer", *(NAMES[kind] for kind in kinds)], cells)
    apart = ", ".join(f"{NAMES[kind]} {row[f'{kind}_difference']:.3f}" for kind in kinds)
    out += [f"Difference over norm: {apart}.", ""]
    out += ["Attention mass in the strongest keys, by layer:"]
    shown = (5, 10, 20, 30, 50)
    masses = [(name, "mass", part) for name, part in several]
    if "prompt_mass_5" in row:
        masses.append(("prompt", "prompt_mass", row))
    cells = [[name, *(f"{part[f'{kind}_{p}']:.1%}" for p in shown)] for name, kind, part in masses]
    out += format_table(["layer", *(f"{p} %" for p in shown)], cells)
    if document["changes"]:
        out += ["", "Attention's output, its difference to dense over every entry, by layer:"]
        cells = [
            [str(part["layer"]), f"{part['change']:.1%}", f"{part['change_p95']:.1%}"]
            for part in document["changes"]
        ]
        out += format_table(["layer", "mean", "95 % are below"], cells)
    if document["neurons"]:
        out += ["", "Share of the MLPs' change that the neurons hold that change most, by layer:"]
        cells = [
            [str(part["layer"]), *(f"{part[f'top_{p:g}']:.1%}" for p in TOP)]
            for part in document["neurons"]
        ]
        out += format_table(["layer", *(f"top {p:g} %" for p in TOP)], cells)
    return out


def _stretches(rows: Sequence[Document], most: int) -> list[Document]:
    """The chunks as at most so many stretches of the video: one by one their time scatters."""
    stretches = []
    for part in np.array_split(np.arange(len(rows)), min(most, len(rows))):
        some = [rows[i] for i in part]
        weights = [row["chunk_ms"] for row in some]
        mean = {"context": float(np.mean([row["context"] for row in some]))}
        mean["chunk_ms"] = float(np.mean(weights))
        for name in PARTS:
            shares = [row[f"time_{name}"] for row in some]
            mean[f"time_{name}"] = float(np.average(shares, weights=weights))
        stretches.append(mean)
    return stretches
