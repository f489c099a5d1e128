"""What steers a Wan-type model's latent frames beside the prompt: a first picture, and actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.session import Session
from tachyscope.core.types import Shape
from tachyscope.models.atrium import camera
from tachyscope.models.wan import camera_rays, key_adapter, keys, moves
from tachyscope.models.wan.camera_rays import Injected
from tachyscope.models.wan.parts import Controls
from tachyscope.models.wan.transformer import RAY

if TYPE_CHECKING:
    from tachyscope.models.wan.model import WanModel

SEEN = 29  # latent frames from one that Wan's encoder sees to those that it no longer changes
GREY = 127.5  # the level of no picture


def controls(
    model: WanModel, session: Session, actions: Sequence[int] | Tensor, frames: int
) -> Controls:
    """What steers the next latent frames; the camera then stands at the last of them."""
    numbers, control = model.actions_tensor(actions, frames), model.config.control
    rows = numbers if control == "table" else None
    found = Controls(rows, image=_image(model, session, frames))
    if numbers is None:
        return found
    if control == "keys":
        adapter, grid = model.transformer.act_control_adapter, session.shape.grid
        found = found._replace(added=adapter(key_adapter.pressed(model.device)[numbers], grid))
        session.work.macs += frames * adapter.macs(grid)
    if model.config.pad:
        found = found._replace(moves=_moves(model, session, numbers))
    if control == "rays":
        if (
            not session.memory.latent_frame
        ):  # a video's first latent frame is where the camera begins
            numbers = torch.cat([numbers.new_zeros(1), numbers[1:]])
        motions = keys.motions(model.device)[numbers].to(model.latent_dtype)
        found = found._replace(injected=_injected(model, session.shape, motions))
        session.work.macs += _injection_macs(model, session.shape, frames)
    if not (model.camera or session.wants_poses):
        return found
    walker = model.walker
    if session.memory.features.camera is None:  # a session that was made by hand
        start = walker.at([walker.START] * session.shape.batch, 1.0, model.device)
        session.memory.features.camera = start
    poses = walker.walk(session.memory.features.camera, numbers)
    if session.wants_poses:
        session.set_poses(walker.matrices(poses))
    if model.camera:
        found = found._replace(rays=camera.rays(poses, session.shape.grid))
    return found


def left_behind(model: WanModel, shape: Shape, device: torch.device | str) -> Tensor | None:
    """What a pad leaves for the next chunk, empty: the mouse's keys and values."""
    c = model.config
    seen = c.reach - c.chunk
    if not c.pad or not seen or not moves.PADS[c.control].mouse:
        return None
    rows, head = shape.batch * shape.tokens_per_frame, moves.WIDE // moves.HEADS
    size = c.layers // 2, 2, rows, seen, moves.HEADS, head
    return torch.empty(size, dtype=model.dtype, device=device)


def sketch(model: WanModel, x: Tensor, shape: Shape, past: Tensor | None = None) -> Controls:
    """Controls of latents x without their numbers, for the memory that a pass takes.

    `past` is what `left_behind` gives.
    """
    c, (rows, frames) = model.config, (x.shape[0], x.shape[2])
    found = Controls()
    if c.actions and c.control == "table":
        found = Controls(torch.empty(frames, dtype=torch.int64, device=x.device))
    if c.camera:
        tokens = frames * shape.tokens_per_frame
        found = found._replace(rays=x.new_empty(rows, tokens, RAY, dtype=torch.float32))
    if c.condition_channels:
        found = found._replace(image=x.new_empty(1, c.condition_channels, *x.shape[2:]))
    if c.control == "keys":
        adapter = model.transformer.act_control_adapter
        down = x.new_empty(frames, len(key_adapter.LETTERS))
        found = found._replace(added=adapter(down, shape.grid))
    if c.control == "rays":
        found = found._replace(injected=_injected(model, shape, x.new_empty(frames, 3, 4)))
    if c.pad:
        seen = c.reach - c.chunk
        pressed = torch.empty(seen + moves.BEFORE + frames, dtype=torch.int64, device=x.device)
        told = moves.Moves(c.control, frames, pressed, x.new_empty(frames), past, seen)
        found = found._replace(moves=told)
    return found


def condition(model: WanModel, frames: np.ndarray) -> Tensor:
    """What a model is told of the picture that a video begins with [1, C, F, h, w].

    Its latents, where they are a chunk's first. Or the channels beside all latents: a mask of its
    frames, and the latents of the picture with grey behind it, until all that the encoder sees is
    grey: from there on they stay as the last ones.
    """
    if len(frames) != 1:
        raise TachyscopeError(
            f"{model.name} begins with one picture, got {len(frames)}: give the one to begin with"
        )
    c, encode = model.config, model.require_decoder().encode
    if c.image == "held":
        return encode(frames).to(model.device, model.latent_dtype)
    pixels = torch.full((1 + c.stride[0] * SEEN, *frames.shape[1:]), GREY)
    pixels[:1] = torch.from_numpy(frames)
    latents = encode(pixels).to(model.device, model.latent_dtype)
    mask = latents.new_zeros(1, c.stride[0], *latents.shape[2:])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], 1)


def _image(model: WanModel, session: Session, frames: int) -> Tensor | None:
    """The channels beside those of the next latent frames; None without a first picture."""
    image = session.memory.features.image
    if image is None or not model.config.condition_channels:
        return None
    at = session.positions(frames)[:: session.shape.tokens_per_frame, 0]
    return image.index_select(2, at.long().clamp(max=image.shape[2] - 1))


def _moves(model: WanModel, session: Session, numbers: Tensor) -> moves.Moves:
    """What the next latent frames' actions tell, behind those before them."""
    c, features = model.config, session.memory.features
    seen = moves.seen_before(session.memory.latent_frame, c.reach, c.chunk)
    before = features.pressed
    if before is None:  # a video's first action was there before it
        before = numbers[:1].expand(c.reach - c.chunk + moves.BEFORE)
    at = session.positions(len(numbers))[:: session.shape.tokens_per_frame, 0]
    pressed = torch.cat([before, numbers])
    return moves.Moves(c.control, len(numbers), pressed, at, features.moves, seen)


def _injected(model: WanModel, shape: Shape, motions: Tensor) -> Injected:
    """What the motions [F, 3, 4] of a camera do in every layer."""
    (_, high, wide), (_, *patch) = model.config.stride, model.config.patch
    size = shape.grid[0] * patch[0] * high, shape.grid[1] * patch[1] * wide
    rays = camera_rays.plucker(motions, size)
    return model.transformer.inject(camera_rays.by_token(rays, (high, wide), (patch[0], patch[1])))


def _injection_macs(model: WanModel, shape: Shape, frames: int) -> int:
    """Multiply-adds of `_injected`."""
    c = model.config
    pixels: Any = c.patch[1] * c.patch[2] * c.stride[1] * c.stride[2]
    token = c.dim * ((4 * c.layers + 2) * c.dim + camera_rays.RAY * pixels)
    return frames * shape.tokens_per_frame * token
