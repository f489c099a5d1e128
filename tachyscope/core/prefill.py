"""Prompts and given latents put into a session's cache, before a video and in the midst of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.session import Session
from tachyscope.io.fingerprint import digest
from tachyscope.io.torch_defaults import own_numerics
from tachyscope.models.base import VideoModel


class Part(NamedTuple):
    """Latents that are remembered in one pass, and what led to them."""

    latents: Tensor
    actions: Sequence[int]  # one a latent frame
    camera: Tensor | None = None  # where it stood before them


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompts as the model reads them, one a video, and the hash by which a session knows them."""

    encoded: Any
    key: str

    @classmethod
    def read(cls, model: VideoModel, texts: Sequence[str]) -> Self:
        with own_numerics():
            encoded = [model.encode_prompt(text) for text in texts]
            for one in encoded:
                if not hasattr(one, "lengths"):
                    raise TachyscopeError(
                        f"{model.name}.encode_prompt must return what has `lengths`, the cache "
                        f"entries that each row of it fills, got {one!r:.60}"
                    )
            joined = encoded[0] if len(encoded) == 1 else model.join_prompts(encoded)
            return cls(joined, cls.key_of(model, texts))

    @staticmethod
    def key_of(model: VideoModel, texts: Sequence[str]) -> str:
        keys = [model.prompt_key(text) for text in texts]
        return keys[0] if len(keys) == 1 else digest(*keys)


def refill(
    model: VideoModel, session: Session, prompt: Prompt, parts: Sequence[Part], shown: bool = False
) -> None:
    """Forget, then prefill a prompt and latents; the noise goes on where it was."""
    memory = session.memory
    memory.slots_for(prompt.encoded.lengths)  # raises while the session is still as it was
    if memory.latent_frames is not None:
        known = sum(part.latents.shape[model.frame_dim] for part in parts)
        memory.latent_frames = known + max(0, memory.latent_frames - memory.latent_frame)
    memory.lengths = tuple(prompt.encoded.lengths)
    memory.source = replace(memory.source, prompt=prompt.key)
    # a video goes on: the noise and the steps of its first chunk must not come again
    generators, policy_rng, made = memory.generators, memory.policy_rng, memory.made
    before = memory.features
    session.reset()
    memory = session.memory
    memory.generators, memory.policy_rng, memory.made = generators, policy_rng, made
    now = memory.features
    now.camera, now.image, now.seen = before.camera, before.image, before.seen
    model.prefill_prompt(session, prompt.encoded)
    prefill(model, session, parts, shown)
    session.meter.take()


def prefill(
    model: VideoModel, session: Session, parts: Sequence[Part], shown: bool = False
) -> None:
    """Run given latents through the model, a clean pass a chunk, to fill the cache."""
    for part in parts:
        if part.camera is not None:
            session.memory.features.camera = part.camera.clone()
        model.prefill_latents(session, part.latents, part.actions, shown)
        session.commit()
    if parts:
        session.memory.latents = torch.cat([part.latents for part in parts], model.frame_dim)


def by_chunk(
    model: VideoModel,
    latents: Tensor,
    chunk: int,
    moves: Sequence[int],
    camera: Tensor | None = None,
) -> list[Part]:
    """Latents of a video's beginning by chunks, with actions that are given by frames.

    camera: where it stood before all of them.
    """
    count = latents.shape[model.frame_dim]
    by_frame = [moves[model.pixel_frames(i)] for i in range(count)] if model.actions else []
    parts = []
    stands = None if camera is None else camera.clone()
    for i, part in enumerate(latents.to(model.device).split(chunk, model.frame_dim)):
        actions = by_frame[i * chunk :][: part.shape[model.frame_dim]]
        parts.append(Part(part, actions, None if stands is None else stands.clone()))
        if stands is not None:
            model.known_world().walk(stands, torch.tensor(actions, device=stands.device))
    return parts
