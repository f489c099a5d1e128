"""Rollouts of a world model through several worlds at once, one row each."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.meter import summary
from tachyscope.core.observers import Observer
from tachyscope.core.opening import open as open_stream
from tachyscope.core.plan import Plan
from tachyscope.core.prefill import Part, prefill
from tachyscope.core.session import Session
from tachyscope.core.stream import Stream
from tachyscope.measure.quality import Frames
from tachyscope.models.atrium.visit import WORLDS
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation.intervals import Values
from tachyscope_lab.evaluation.recall import RecallObserver
from tachyscope_lab.evaluation.scenes import Scene

# latent frames decoded together: on a GPU one is mostly launches, on a CPU as a rollout does it
DECODED = {"cpu": 1, "cuda": 64}


def open_scenes(
    model: WanModel,
    plan: str | Plan,
    scenes: Sequence[Scene],
    given: int,
    observers: Sequence[Observer] = (),
    runs: int = 1,
) -> Stream:
    """A stream of one video a scene and run that has seen the first `given` true frames.

    Every run draws noise of its own; all scenes of the first run come first.
    """
    scenes, worlds = [*scenes] * runs, len(scenes)
    actions = list(scenes[0].actions)
    camera: dict[str, Any] = {}
    if model.camera:
        camera = {"start": [scene.world.view for scene in scenes], "pace": scenes[0].pace}
    return open_stream(
        model, plan, prompt=[scene.world.prompt for scene in scenes],
        seed=[scene.world.number + i // worlds * WORLDS for i, scene in enumerate(scenes)],
        size=scenes[0].frames.shape[1:3],
        first=[scene.frames[:given] for scene in scenes], first_actions=actions[:given],
        frames=len(actions) - given, observers=observers, **camera,
    )  # fmt: skip


@dataclass(frozen=True)
class Take:
    """One world's rollout, gone on from true frames, and what it cost."""

    frames: Frames
    cost: Values  # by the meter, and recall where it was sampled
    work: tuple[float, ...]  # multiply-adds of each chunk


@torch.inference_mode()
def play(
    model: WanModel,
    plan: str | Plan,
    scenes: Sequence[Scene],
    given: int,
    probed: Collection[int] = (),
    runs: int = 1,
) -> list[Take]:
    """Play the scenes' actions, the same in all, after their first `given` true frames.

    probed: numbers of made frames, from 1 on, at which recall is sampled. runs: how often, each
    with noise of its own, all at once; the takes of the first run come first.
    """
    wanted = [given + i - 1 for i in probed]
    recall = RecallObserver(wanted)
    stream = open_scenes(model, plan, scenes, given, [recall] if probed else [], runs)
    session, rows, stats, made = stream.session, runs * len(scenes), [], []
    for action in scenes[0].actions[given:]:
        chunk = stream.generate([model.actions.index(action)])
        made.append(chunk.latents)
        stats.append(chunk.stats | {"cache_mb": chunk.stats["cache_allocated_mb"] / rows})
    cost = counted(stats, session)
    work = tuple(row["macs"] / rows for row in stats)
    return [
        Take(frames, cost | recall_values(recall.recalls if probed else {}, row), work)
        for row, frames in enumerate(decoded(stream, made))
    ]


def decoded(stream: Stream, latents: Sequence[Tensor]) -> Frames:
    """All frames of a batch, [B, F, H, W, 3]."""
    pieces = torch.cat(list(latents), 2).split(DECODED[stream.model.device.type], 2)
    return np.concatenate([stream.frames_of(piece) for piece in pieces], 1)


def counted(stats: Sequence[Values], session: Session) -> Values:
    """What a rollout's made frames cost, by the meter."""
    sums = summary(stats)
    keys = (
        "density", "simulated_density", "cache_mb", "share_all", "share_eligible", "text_density",
        "late_share", "denied_share",
    )  # fmt: skip
    out = {key: sums[key] for key in keys if key in sums}
    if "fetched_mb" in sums:
        out["fetched_mb_chunk"] = sums["fetched_mb"] / len(stats) / session.shape.batch
    out["gmacs_frame"] = sums["macs"] / sums["frames"] / 1e9
    out["pairs_frame"] = sums["pairs"] / sums["frames"]
    if "host_mb" in sums:
        out["host_mb"] = sums["host_mb"] / session.shape.batch
    if session.device.type == "cuda":
        # on a CPU others may be at work; later chunks, since an unbounded cache grows
        times = [row["chunk_ms"] / row["frames"] for row in stats[len(stats) // 2 :]]
        out["frame_ms"] = statistics.median(times)
    out["entries_share"] = session.memory.past / session.memory.total_entries
    return out


def recall_values(recalls: dict[int, list[Tensor]], row: int) -> Values:
    """Mean recall of a row, its 5th percentile, and its mean at the last sampled frame."""
    if not recalls:
        return {}
    by_chunk = {i: torch.cat([x[row].flatten() for x in parts]) for i, parts in recalls.items()}
    every = torch.cat(list(by_chunk.values()))
    return {
        "recall": float(every.mean()),
        "recall_p5": float(every.quantile(0.05)),
        "recall_end": float(by_chunk[max(by_chunk)].mean()),
    }


@dataclass(frozen=True)
class Forced:
    """One world's frames made each from the true past, and as the autoencoder shows the truth."""

    index: tuple[int, ...]  # numbers of the scene's frames
    frames: Frames
    shown: Frames


@torch.inference_mode()
def teacher_forced(
    model: WanModel, scenes: Sequence[Scene], given: int, made: Sequence[int]
) -> list[Forced]:
    """Frames `made` of the scenes, each made after clean passes over all true ones before it."""
    stream = open_scenes(model, "dense", scenes, given)
    session, last = stream.session, max(made) + 1
    latents = torch.cat([model.encode_frames(scene.frames[given:last]) for scene in scenes])
    frames, shown = [], []
    for i, true in enumerate(latents.split(1, 2), given):
        move = [model.actions.index(scenes[0].actions[i])]
        stood = session.memory.features.camera
        stood = None if stood is None else stood.clone()
        if i in made:
            frames.append(model.sample(session, move))
            shown.append(true)
        # the true frame takes the place of the made one in now
        prefill(model, session, [Part(true, move, stood)])
    pairs = zip(decoded(stream, frames), decoded(stream, shown), strict=True)
    return [Forced(tuple(made), ours, theirs) for ours, theirs in pairs]
