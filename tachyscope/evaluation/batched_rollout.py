"""Rollouts of a world model through several worlds at once, one row each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from tachyscope.arguments import parse_plan
from tachyscope.evaluation.intervals import Values
from tachyscope.evaluation.recall import Probed
from tachyscope.evaluation.scenes import Scene
from tachyscope.meter import summary
from tachyscope.models.wan.model import WanModel
from tachyscope.plan import Plan
from tachyscope.quality import Frames
from tachyscope.session import Session


class Together(WanModel):
    """A model whose rows are worlds: each draws the noise that it would draw alone."""

    def __init__(self, model: WanModel, scenes: Sequence[Scene]) -> None:
        super().__init__(model.name, model.transformer, model.text, model.decoder)
        self.scenes = scenes
        numbers = [scene.world.number for scene in scenes]
        self.generators = [Generator(self.device).manual_seed(number) for number in numbers]
        self.moves = [self.actions.index(letter) for letter in scenes[0].actions]

    def open(self, plan: str | Plan, given: int, make: Any = Session) -> Session:
        """A session that has read every prompt and seen the first `given` true frames."""
        own = self.shape(self.scenes[0].frames.shape[1:3])
        shape = replace(own, batch=len(self.scenes))
        session: Session = make(
            shape, parse_plan(self, plan), self.rope(shape), latent_frames=len(self.moves),
            device=self.device, dtype=self.dtype,
        )  # fmt: skip
        prompts = [self.encode_prompt(scene.world.prompt) for scene in self.scenes]
        context = torch.cat([prompt.context for prompt in prompts])
        session.set_prompt_kv(
            *self.transformer.keys_values(context), [prompt.length for prompt in prompts]
        )
        latents = self.true_latents(0, given)
        for i in range(given):
            self.prefill_latents(session, latents[:, :, i : i + 1], self.moves[i : i + 1])
            session.commit()
        session.meter.take()
        return session

    def true_latents(self, start: int, stop: int) -> Tensor:
        """Latents [B, C, F, h, w] of the scenes' true frames."""
        return torch.cat([self.encode_frames(scene.frames[start:stop]) for scene in self.scenes])

    def show(self, session: Session, latents: Tensor) -> Frames:
        """Frames [B, H, W, 3] of one latent frame [B, C, 1, h, w]."""
        return self.decode_latents(session, latents.transpose(0, 2))

    def noise(self, session: Session, draw: int, ahead: int = 0) -> Tensor:
        one = replace(session.shape, batch=1)
        return torch.cat([self._draw(one, generator) for generator in self.generators])


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
) -> list[Take]:
    """Play the scenes' actions, the same in all, after their first `given` true frames.

    probed: numbers of made frames, from 1 on, at which recall is sampled.
    """
    together = Together(model, scenes)
    wanted = [given + i - 1 for i in probed]
    session = together.open(plan, given, partial(Probed, wanted=wanted) if probed else Session)
    rows, stats, made = len(scenes), [], []
    for move in together.moves[given:]:
        latents = together.sample(session, [move])
        session.commit()
        made.append(together.show(session, latents))
        session.meter.add("frames", rows)
        session.meter.add("cache_mb", session.cache_bytes() / rows / 1e6)
        stats.append(session.meter.take())
    cost = counted(stats, session)
    work = tuple(row["macs"] / rows for row in stats)
    recalls = session.recalls if isinstance(session, Probed) else {}
    return [
        Take(frames, cost | recall_values(recalls, row), work)
        for row, frames in enumerate(np.stack(made, 1))
    ]


def counted(stats: Sequence[Values], session: Session) -> Values:
    """What a rollout's made frames cost, by the meter."""
    sums = summary(stats)
    keys = ("density", "cache_mb", "share_all", "share_eligible", "text_density")
    out = {key: sums[key] for key in keys if key in sums}
    out["gmacs_frame"] = sums["macs"] / sums["frames"] / 1e9
    out["entries_share"] = session.past / session.total_entries
    return out


def recall_values(recalls: dict[int, list[Tensor]], row: int) -> Values:
    """Mean recall of a row, its 5th percentile, and its mean at the last sampled frame."""
    if not recalls:
        return {}
    by_chunk = {i: torch.cat([x[row].flatten() for x in found]) for i, found in recalls.items()}
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
    together = Together(model, scenes)
    session = together.open("dense", given)
    last = max(made) + 1
    latents = together.true_latents(given, last)
    frames, shown = [], []
    for i in range(given, last):
        true, move = latents[:, :, i - given : i - given + 1], together.moves[i : i + 1]
        if i in made:
            frames.append(together.show(session, together.sample(session, move)))
            shown.append(together.show(session, true))
        # the true frame takes the place of the made one in now
        together.prefill_latents(session, true, move)
        session.commit()
    pairs = zip(np.stack(frames, 1), np.stack(shown, 1), strict=True)
    return [Forced(tuple(made), ours, theirs) for ours, theirs in pairs]
