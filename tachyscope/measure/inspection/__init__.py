"""Measure what methods rest on: where time goes, what repeats, where attention mass lies.

One rollout is observed and others are timed, since observing takes time. It changes no result: an
observed rollout makes the same frames.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from tachyscope.core.arguments import check_model, check_whole, parse_plan
from tachyscope.core.errors import TachyscopeError, warn
from tachyscope.core.observers import Observer, Timing
from tachyscope.core.opening import open_request
from tachyscope.core.plan import Plan
from tachyscope.core.request import VideoOptions, VideoRequest, chunks_for
from tachyscope.core.rollout import rollout
from tachyscope.core.types import Chunk
from tachyscope.io.files import check_folder, write_atomically
from tachyscope.io.results import Document, document, size_of, to_json
from tachyscope.io.tables import Column, table
from tachyscope.measure.inspection.neurons import TOP, NeuronChange
from tachyscope.measure.inspection.output_change import OutputChange
from tachyscope.measure.inspection.stats import ALIKE, NAMES, StatsObserver, by_axes
from tachyscope.measure.inspection.timing import PARTS, overall, times
from tachyscope.models.base import VideoModel

__all__ = ["inspect_model", "lines", "write"]

Watch = Callable[[str, Chunk], None]
LAYER = Column("layer", "layer")


def inspect_model(
    model: VideoModel,
    plan: Plan | str = "dense",
    *,
    frames: int,
    places: int = 64,
    queries: int = 16,
    rounds: int = 3,
    command: str = "",
    watch: Watch | None = None,
    **options: Unpack[VideoOptions],
) -> Document:
    """Observe one rollout, time `rounds` more, and say what was found as a results document.

    Plan, frames and the options of a video are as `rollout` takes them: prompt, actions, seed,
    size, first, first_actions, start, pace, noise, video and strength.
    places: how many positions of a latent frame are compared with the frame before, the same ones
    throughout. queries: how many positions' attention is weighed, drawn for each layer and pass.
    Given frames are observed too, but count in the table `frames` alone. watch: called with a run's
    name and each of its chunks.
    """
    check_model(model)
    frames = check_whole("frames", frames)
    request = VideoRequest(frames=frames, **options).one_video()
    queries, places = check_whole("queries", queries), check_whole("places", places)
    rounds, parsed = check_whole("rounds", rounds), parse_plan(model, plan)
    video = request.parse(model)
    with torch.inference_mode():
        given = [model.encode_frames(pictures) for pictures in video.pictures]
    known = given[0].shape[model.frame_dim] if given else 0
    shape = video.shape
    if known + chunks_for(model, shape.chunk, known, frames) * shape.chunk < 2:
        raise TachyscopeError("adjacent frames need two latent frames, got 1: raise frames")

    def play(name: str, *observers: Observer) -> list[Chunk]:
        stream = open_request(model, parsed, request, observers)
        made = []
        for chunk in rollout(model, frames=frames, actions=request.actions, stream=stream):
            made.append(chunk)
            if watch is not None:
                watch(name, chunk)
        return made

    # observe first, so that what a process does once is not timed
    observed = StatsObserver(places, queries)
    neurons = NeuronChange(model.mlps if shape.token_by_token else ())
    # the dense plan has none
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
    row |= by_axes(made_only, ())[0]
    return document(
        "inspect", [row], command, time=by_chunk, layers=by_axes(made_only, ("layer",)),
        neurons=neurons.table() if neurons.mlps else [],
        changes=changes[0].table() if changes else [],
        passes=by_axes(made_only, ("pass",)), cells=by_axes(made_only, ("layer", "frame")),
        frames=[
            part | {"given": part["frame"] < known} for part in by_axes(observed.found, ("frame",))
        ],
    )  # fmt: skip


def write(document: Document, folder: str | os.PathLike[str]) -> list[Path]:
    """Write inspect.json and, if matplotlib is installed, the plots; returns the files."""
    target = check_folder(folder)
    files = [write_atomically(target / "inspect.json", to_json(document, indent=2) + "\n")]
    if find_spec("matplotlib") is None:
        warn("the plots are drawn by matplotlib: pip install -e '.[plots]'")
        return files
    from tachyscope.measure.inspection.figures import draw

    return files + [write_atomically(target / name, drawn) for name, drawn in draw(document)]


def lines(document: Document) -> list[str]:
    """An inspection as tables: time, similarity by layer, attention mass by layer."""
    row, layers = document["rows"][0], document["layers"]
    cpu, gpu = document["machine"]["cpu"], document["machine"]["gpu"]
    keys = [Column("keys", "context", ".0f")]
    keys += [Column(NAMES[part], f"time_{part}", ".1%") for part in PARTS]
    out = [
        f"{row['model']} {row['size']}, {row['frames']} frames after {row['given']} given, "
        f"torch {document['versions']['torch']}, {gpu or cpu}",
        "",
        "Share of the time, by how many keys a query sees:",
        *table([*keys, Column("ms a chunk", "chunk_ms", ".1f")], _stretches(document["time"], 6)),
    ]
    work = ", ".join(f"{NAMES[part]} {row[f'work_{part}']:.1%}" for part in PARTS)
    out += [f"Counted work: {work}.", ""]
    kinds = [kind for kind in ALIKE if f"{kind}_cosine" in row]
    several = [*layers, row | {"layer": "all"}]

    def alike(kind: str) -> Column:
        of, other = f"{kind}_cosine", f"{kind}_elsewhere"
        return Column(NAMES[kind], lambda part: f"{part[of]:.3f} ({part[other]:.3f})")

    out += ["Cosine to the same place one latent frame before (to another place), by layer:"]
    out += table([LAYER, *map(alike, kinds)], several)
    apart = ", ".join(f"{NAMES[kind]} {row[f'{kind}_difference']:.3f}" for kind in kinds)
    out += [f"Difference over norm: {apart}.", ""]
    out += ["Attention mass in the strongest keys, by layer:"]
    shown = [Column(f"{p} %", f"mass_{p}", ".1%") for p in (5, 10, 20, 30, 50)]
    if "prompt_mass_5" in row:
        prompt = {one.of: row[f"prompt_{one.of}"] for one in shown}
        several = [*several, prompt | {"layer": "prompt"}]
    out += table([LAYER, *shown], several)
    if document["changes"]:
        out += [
            "",
            "Difference of attention's output to dense attention over every entry, by layer:",
        ]
        high = Column("95 % are below", "change_p95", ".1%")
        out += table([LAYER, Column("mean", "change", ".1%"), high], document["changes"])
    if document["neurons"]:
        out += ["", "Share of the MLPs' change held by the neurons that change most, by layer:"]
        tops = [Column(f"top {p:g} %", f"top_{p:g}", ".1%") for p in TOP]
        out += table([LAYER, *tops], document["neurons"])
    return out


def _stretches(rows: Sequence[Document], most: int) -> list[Document]:
    """Means over at most `most` stretches of the video, since single chunks' times scatter."""
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
