"""The newest latents of a stream, which a new prompt prefills again; as tensors of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tachyscope.models.base import VideoModel
from tachyscope.prefill import Part
from tachyscope.session import Session
from tachyscope.state_file import AGAIN, MAX_COUNT, check_tensor, refuse
from tachyscope.types import CAMERA


class Held(NamedTuple):
    """What a stream has beside its session."""

    chunk: int  # that comes next
    parts: list[Part]


def pack_held(held: Held, frame_dim: int) -> dict[str, Tensor]:
    """As tensors by name, for a state."""
    tensors = {"chunk": torch.tensor(held.chunk)}
    if not held.parts:
        return tensors
    sizes = [part.latents.shape[frame_dim] for part in held.parts]
    actions = [action for part in held.parts for action in part.actions]
    cameras = [part.camera for part in held.parts if part.camera is not None]
    if cameras:
        tensors["cameras"] = torch.stack(cameras)
    return tensors | {
        "held": torch.cat([part.latents for part in held.parts], frame_dim),
        "sizes": torch.tensor(sizes),
        "actions": torch.tensor(actions, dtype=torch.int64),
    }


def unpack_held(model: VideoModel, session: Session, tensors: Mapping[str, Tensor]) -> Held | None:
    """From a state's tensors; None where it was taken of a session alone.

    Raises where they are not such as `pack_held` makes.
    """
    if "chunk" not in tensors:
        return None
    check_tensor(tensors, "chunk", torch.tensor(0), (0, MAX_COUNT))
    chunk = int(tensors["chunk"])
    if "held" not in tensors:
        return Held(chunk, [])
    held, sizes = tensors["held"], tensors.get("sizes", torch.zeros(0))
    whole = sizes.dtype == torch.int64 and sizes.dim() == 1 and len(sizes)
    if not whole or int(sizes.min()) < 1 or int(sizes.max()) > session.shape.chunk:
        refuse("has no lengths of the chunks that it holds", AGAIN)
    model.check_latents(session.shape, held)
    count = int(sizes.sum())
    if held.shape[model.frame_dim] != count:
        refuse(f"holds {held.shape[model.frame_dim]} latent frames and tells of {count}", AGAIN)
    actions = torch.zeros(count if model.actions else 0, dtype=torch.int64)
    check_tensor(tensors, "actions", actions, (0, max(0, len(model.actions) - 1)))
    camera = session.features.get(CAMERA)
    if camera is not None:
        check_tensor(tensors, "cameras", camera.new_zeros(len(sizes), *camera.shape), (0, 0))
    lengths, moves = sizes.tolist(), tensors["actions"].tolist()
    latents = held.to(session.device, copy=True).split(lengths, model.frame_dim)
    parts, at = [], 0
    for i, (part, length) in enumerate(zip(latents, lengths, strict=True)):
        stood = None if camera is None else tensors["cameras"][i].to(session.device, copy=True)
        parts.append(Part(part, moves[at : at + length], stood))
        at += length
    return Held(chunk, parts)
