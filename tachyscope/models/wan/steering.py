"""Controls of a Wan-type model beside the prompt: a first image, actions and camera poses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.session import Session
from tachyscope.core.types import Shape
from tachyscope.models.wan import action_modules, camera_rays, key_adapter, key_camera
from tachyscope.models.wan.action_modules import ActionInputs
from tachyscope.models.wan.camera_rays import Injected
from tachyscope.models.wan.parts import Controls
from tachyscope.models.wan.transformer import RAY

if TYPE_CHECKING:
    from tachyscope.models.wan.model import WanModel

REACH = 29  # latent frames after which Wan's causal encoder no longer sees an image
GREY = 127.5  # the level of a missing image


def controls(
    model: WanModel, session: Session, actions: Sequence[int] | Tensor, frames: int
) -> Controls:
    """The controls of the next latent frames; the session's camera moves to the last of them."""
    numbers, control = model.actions_tensor(actions, frames), model.config.control
    rows = numbers if control == "table" else None
    found = Controls(rows, image=_image(model, session, frames))
    if numbers is None:
        return found
    if control == "keys":
        adapter, grid = model.transformer.act_control_adapter, session.shape.grid
        found = found._replace(added=adapter(key_adapter.pressed(model.device)[numbers], grid))
        session.work.macs += frames * adapter.macs(grid)
    if control in action_modules.LAYOUTS:
        found = found._replace(inputs=_action_inputs(model, session, numbers))
    if control == "rays":
        if not session.memory.latent_frame:  # the first latent frame is where the camera begins
            numbers = torch.cat([numbers.new_zeros(1), numbers[1:]])
        motions = key_camera.motions(model.device)[numbers].to(model.latent_dtype)
        found = found._replace(injected=_injected(model, session.shape, motions))
        session.work.macs += _injection_macs(model, session.shape, frames)
    if not (model.camera or session.wants_poses):
        return found
    walker, features = model.walker, session.memory.features
    if features.camera is None:  # a session that was made by hand
        features.camera = walker.at([walker.START] * session.shape.batch, 1.0, model.device)
    poses = walker.walk(features.camera, numbers)
    if session.wants_poses:
        session.set_poses(walker.matrices(poses))
    if model.camera:
        found = found._replace(rays=walker.rays(poses, session.shape.grid))
    return found


def empty_past(model: WanModel, shape: Shape, device: torch.device | str) -> Tensor | None:
    """An uninitialised tensor of the keys and values that action modules keep between chunks."""
    c = model.config
    seen = c.reach - c.chunk
    if not c.action_modules or not seen or not action_modules.LAYOUTS[c.control].mouse:
        return None
    rows, head = shape.batch * shape.tokens_per_frame, action_modules.WIDE // action_modules.HEADS
    size = c.layers // 2, 2, rows, seen, action_modules.HEADS, head
    return torch.empty(size, dtype=model.dtype, device=device)


def empty_controls(
    model: WanModel, x: Tensor, shape: Shape, past: Tensor | None = None
) -> Controls:
    """Uninitialised controls for latents x, to measure the memory of a pass.

    `past` is what `empty_past` returns.
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
    if c.action_modules:
        seen = c.reach - c.chunk
        pressed = torch.empty(
            seen + action_modules.BEFORE + frames, dtype=torch.int64, device=x.device
        )
        inputs = ActionInputs(c.control, frames, pressed, x.new_empty(frames), past, seen)
        found = found._replace(inputs=inputs)
    return found


def condition(model: WanModel, frames: np.ndarray) -> Tensor:
    """The condition [1, C, F, h, w] that a video's first image becomes.

    Its latents, if they are the first of the first chunk. Otherwise extra channels of all latents:
    a mask of the given frames, and the latents of the image followed by grey. They end where the
    encoder sees grey alone, and the last frame serves all later ones.
    """
    if len(frames) != 1:
        raise TachyscopeError(
            f"{model.name} begins with one picture, got {len(frames)}: give the one to begin with"
        )
    c, encode = model.config, model.require_decoder().encode
    if c.image == "held":
        return encode(frames).to(model.device, model.latent_dtype)
    pixels = torch.full((1 + c.stride[0] * REACH, *frames.shape[1:]), GREY)
    pixels[:1] = torch.from_numpy(frames)
    latents = encode(pixels).to(model.device, model.latent_dtype)
    mask = latents.new_zeros(1, c.stride[0], *latents.shape[2:])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], 1)


def _image(model: WanModel, session: Session, frames: int) -> Tensor | None:
    """The extra channels of the next latent frames; None without a first image."""
    image = session.memory.features.image
    if image is None or model.config.image != "channels":
        return None
    at = session.positions(frames)[:: session.shape.tokens_per_frame, 0]
    return image.index_select(2, at.long().clamp(max=image.shape[2] - 1))


def _action_inputs(model: WanModel, session: Session, numbers: Tensor) -> ActionInputs:
    """The inputs of action modules for the next latent frames."""
    c, features = model.config, session.memory.features
    seen = action_modules.seen_before(session.memory.latent_frame, c.reach, c.chunk)
    before = features.pressed
    if before is None:  # a video's first action was there before it
        before = numbers[:1].expand(c.reach - c.chunk + action_modules.BEFORE)
    at = session.positions(len(numbers))[:: session.shape.tokens_per_frame, 0]
    pressed = torch.cat([before, numbers])
    return ActionInputs(c.control, len(numbers), pressed, at, features.moves, seen)


def _injected(model: WanModel, shape: Shape, motions: Tensor) -> Injected:
    """The scale and shift of every layer for a camera's motions [F, 3, 4]."""
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
