"""Prefills a session's cache with a prompt and given latents, at a video's start or within it."""

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
    """A chunk of latents that one clean pass prefills, with its actions."""

    latents: Tensor
    actions: Sequence[int]  # one per latent frame
    camera: Tensor | None = None  # the camera's position before them


@dataclass(frozen=True, slots=True)
class Prompt:
    """Encoded prompts, one per video, and their hash, by which a session recognises them."""

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
    """Reset the session, then prefill a prompt and latents; the noise generators continue."""
    memory = session.memory
    memory.slots_for(prompt.encoded.lengths)  # raises before anything changes
    if memory.latent_frames is not None:
        known = sum(part.latents.shape[model.frame_dim] for part in parts)
        memory.latent_frames = known + max(0, memory.latent_frames - memory.latent_frame)
    memory.lengths = tuple(prompt.encoded.lengths)
    memory.source = replace(memory.source, prompt=prompt.key)
    # the video continues: the noise and the steps of its first chunk must not repeat
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
    """Fill the cache with given latents, by one clean pass per chunk."""
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
    """Split latents into chunks, with the actions `moves` given per pixel frame.

    `camera` is its position before the first of them.
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
