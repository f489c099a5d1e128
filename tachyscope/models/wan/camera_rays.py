"""Plücker rays of a camera's motion, which scale and shift every layer: LingBot-World."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# the authors' camera: focal lengths and principal point at 480x832
LENS, LENS_SIZE = (415.53, 415.69, 415.78, 239.78), (480, 832)
RAY = 6  # numbers of a ray: its origin and direction
# linears of a layer; of the model
OF_LAYER = ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")
OF_MODEL = ("c2ws_hidden_states_layer1", "c2ws_hidden_states_layer2")
PATCHES = "patch_embedding_wancamctrl"

Injected = list[tuple[Tensor, Tensor]]  # of each layer 1 + scale, and shift: [1, S, W]


def add_to_layer(layer: nn.Module, dim: int) -> None:
    """Add the camera linears of a layer, under their published names."""
    for name in OF_LAYER:
        layer.add_module(name, nn.Linear(dim, dim))


def add_to_model(model: nn.Module, dim: int, token: int) -> None:
    """Add the camera linears of the model; `token` is the pixels of a token."""
    model.add_module(PATCHES, nn.Linear(RAY * token, dim))
    for name in OF_MODEL:
        model.add_module(name, nn.Linear(dim, dim))


def plucker(motions: Tensor, size: tuple[int, int]) -> Tensor:
    """Origin and direction [F, H, W, 6] of every pixel's ray, for camera motions [F, 3, 4]."""
    rows, columns = (torch.arange(n, dtype=motions.dtype, device=motions.device) for n in size)
    (fx, fy, cx, cy), (high, wide) = LENS, (size[0] / LENS_SIZE[0], size[1] / LENS_SIZE[1])
    x = (columns + 0.5 - cx * wide) / (fx * wide)
    y = (rows + 0.5 - cy * high) / (fy * high)
    ahead = torch.stack(torch.broadcast_tensors(x, y[:, None], torch.ones_like(x)), -1)
    ahead = ahead / ahead.norm(dim=-1, keepdim=True)
    directions = torch.einsum("fij,hwj->fhwi", motions[:, :, :3], ahead)
    origins = motions[:, None, None, :, 3].expand_as(directions)
    return torch.cat([origins, directions], -1)


def by_token(rays: Tensor, side: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """Rays [F, H, W, 6] grouped by token: [S, 6 · pixels].

    Within a token the order is channel, pixel in a latent position (`side`), position in a patch.
    """
    x = rays.unflatten(2, (-1, patch[1], side[1])).unflatten(1, (-1, patch[0], side[0]))
    # [F, h, ph, sh, w, pw, sw, 6]
    return x.permute(0, 1, 4, 7, 3, 6, 2, 5).flatten(3).flatten(0, 2)


def part(injected: Injected | None, own: Callable[[Tensor], Tensor]) -> Injected | None:
    """Scales and shifts of the tokens that `own` selects."""
    if injected is None:
        return None
    return [(own(scale), own(shift)) for scale, shift in injected]


def inject(model: Any, layers: Any, rays: Tensor) -> Injected:
    """The scale and shift of each layer's stream after attention, for rays [S, 6 · pixels].

    They are the same in every pass over a chunk.
    """
    first = getattr(model, PATCHES)
    e = first(rays[None].to(first.weight.dtype))
    one, two = (getattr(model, name) for name in OF_MODEL)
    e = e + two(F.silu(one(e)))
    made = []
    for layer in layers:
        one, two, scale, shift = (getattr(layer, name) for name in OF_LAYER)
        h = two(F.silu(one(e))) + e
        made.append((1 + scale(h), shift(h)))
    return made
