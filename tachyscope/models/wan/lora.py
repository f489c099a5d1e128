"""LoRAs: read from a file and merged into a model's weights."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError, warn
from tachyscope.core.types import kind_of
from tachyscope.models.checkpoint import check_finite, read_tensors, some, unwrapped
from tachyscope.models.wan.names import wan_name

FACTORS = {"lora_A": "down", "lora_down": "down", "lora_B": "up", "lora_up": "up"}
NAME = re.compile(r"(.+)\.(?:(lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight|alpha)")


@dataclass(frozen=True)
class Update:
    """The update of a layer's weight: scale · up @ down."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    alpha: float | None = None

    @property
    def scale(self) -> float:
        """alpha / rank; without an alpha it is 1."""
        return 1.0 if self.alpha is None else self.alpha / self.down.shape[0]


@torch.no_grad()
def merge_lora(
    model: nn.Module, tensors: Mapping[str, Tensor], path: Path, alpha: float | None = None
) -> None:
    """Merge a LoRA into the model's weights, in float32 and then cast.

    `tensors` are the checkpoint's, before they were rounded to the model's dtype. `alpha` is for
    layers without one in the file.
    """
    layers = {name: x for name, x in model.named_modules() if isinstance(x, nn.Linear)}
    updates = read_lora(path, layers)
    if alpha is not None:
        if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha <= 0:
            raise TachyscopeError(f"a LoRA's alpha is a number over 0, got {alpha}: give another")
        if with_alpha := [name for name, update in updates.items() if update.alpha is not None]:
            kept = some(with_alpha)
            warn(f"{path} has its own alpha for {kept}, which is used there instead of {alpha:g}")
        updates = {
            name: replace(update, alpha=alpha if update.alpha is None else update.alpha)
            for name, update in updates.items()
        }
    for name, update in updates.items():
        weight = layers[name].weight
        if (update.up.shape[0], update.down.shape[1]) != weight.shape:
            raise TachyscopeError(
                f"{path} does not fit the model: its update of {name} is "
                f"{[update.up.shape[0], update.down.shape[1]]} and must be {list(weight.shape)}: "
                f"give a LoRA of this model's size"
            )
        exact = torch.promote_types(weight.dtype, torch.float32)
        base, up, down = (
            x.to(weight.device, exact) for x in (tensors[f"{name}.weight"], update.up, update.down)
        )
        weight.copy_(torch.addmm(base, up, down, alpha=update.scale))
    check_finite(model, str(path))


def read_lora(path: Path, layers: Collection[str]) -> dict[str, Update]:
    """A LoRA's updates by layer of the model; raises if one fits no layer."""
    tensors = read_tensors(path)
    pairs: dict[str, dict[str, str]] = {}
    unknown, strangers = [], []
    for key in tensors:
        match = NAME.fullmatch(unwrapped(key))
        if match is None:
            unknown.append(key)
            continue
        layer = _layer(match[1], layers)
        if layer is None:
            strangers.append(match[1])
            continue
        other = pairs.setdefault(layer, {}).setdefault(FACTORS.get(match[2], "alpha"), key)
        if other != key:
            raise TachyscopeError(
                f"{path} must hold one update of each layer, got two of {layer}, "
                f"in {other} and {key}: remove one of them"
            )
    if unknown or not (pairs or strangers):
        raise TachyscopeError(
            f"{path} must hold a LoRA's lora_A and lora_B, or lora_down, lora_up and alpha, "
            f"got {some(unknown) or 'nothing'}: give a LoRA of linear layers"
        )
    if strangers:
        raise TachyscopeError(
            f"{path} must fit layers of the model, it has none for "
            f"{some(dict.fromkeys(strangers))}: give a LoRA of this model"
        )
    updates = {}
    for layer, keys in pairs.items():
        parts = {part: tensors[key] for part, key in keys.items()}
        down, up = parts.get("down"), parts.get("up")
        if (
            down is None or up is None
            or not (down.is_floating_point() and up.is_floating_point())
            or down.dim() != 2 or not down.numel() or up.shape[1:] != down.shape[:1]
        ):  # fmt: skip
            raise TachyscopeError(
                f"{path} must hold both factors of {layer} as floats, [rank, in] and [out, rank], "
                f"got {' and '.join(kind_of(x) for x in (down, up) if x is not None)}: get it again"
            )
        alpha = parts.get("alpha")
        if alpha is not None and (alpha.numel() != 1 or alpha.is_complex()):
            raise TachyscopeError(
                f"{path} must hold one number in {keys['alpha']}, got {kind_of(alpha)}: "
                f"get it again"
            )
        updates[layer] = Update(down, up, None if alpha is None else float(alpha))
    return updates


def _layer(path: str, layers: Collection[str]) -> str | None:
    """The layer that a LoRA's key names, with or without prefixes of wrappers."""
    words = path.split(".")
    for i in range(len(words)):
        name = wan_name(".".join(words[i:]))
        if name in layers:
            return name
    flat = {name.replace(".", "_"): name for name in layers}
    return flat.get(path.removeprefix("lora_unet_"))
