"""What CLIP sees in a first picture: the tokens that stand in a prompt's place in Matrix-Game 2."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.checkpoint import read_tensors

PUBLISHED = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
TOKENS, WIDTH = 257, 1280  # a picture's patches behind one token for all of it
HEADS, SIDE, EPS = 16, 224, 1e-5
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BYTES = 4 * 630_766_080  # of its picture half in float32, which runs on the CPU


class Tokens(nn.Module):
    """From CLIP's tokens to a model's width, under the published names."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, dim),
            nn.LayerNorm(dim),
        )  # fmt: skip


class Sight:
    """CLIP's ViT-H as its authors have it, up to the layer before its last."""

    kind = "sight"
    host_bytes = BYTES

    def __init__(self, file: Path) -> None:
        self.file = file

    @staticmethod
    def found(folder: Path) -> bool:
        return (folder / PUBLISHED).is_file()

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        """By published names, read when a picture is first seen."""
        prefix = "visual."
        found = {
            name.removeprefix(prefix): x.float()
            for name, x in read_tensors(self.file).items()
            if name.startswith(prefix)
        }
        wanted = ("patch_embedding.weight", "cls_embedding", "pos_embedding", "pre_norm.weight",
                  "transformer.0.attn.to_qkv.weight")  # fmt: skip
        if missing := [name for name in wanted if name not in found]:
            raise TachyscopeError(
                f"{self.file} must hold CLIP's picture encoder under its published names, it lacks "
                f"visual.{missing[0]}: give the published {PUBLISHED}"
            )
        if bad := [name for name, x in found.items() if not x.isfinite().all()]:
            raise TachyscopeError(
                f"{self.file} must hold finite numbers, it has NaN or infinity in visual.{bad[0]}: "
                f"get it again"
            )
        return found

    @torch.no_grad()
    def __call__(self, frames: np.ndarray) -> Tensor:
        """The tokens [1, 257, 1280] of a picture uint8 [1, H, W, 3]."""
        x = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
        side = self.side
        x = F.interpolate(x, (side, side), mode="bicubic", align_corners=False)
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
        return see(self.weights, (x - mean) / std)

    @property
    def side(self) -> int:
        """Rows and columns of the picture that it is shown."""
        w = self.weights
        patches = w["pos_embedding"].shape[1] - 1
        return round(patches**0.5) * w["patch_embedding.weight"].shape[-1]


class SightSize:
    """CLIP's ViT-H as its size alone."""

    kind = "sight"
    host_bytes = BYTES


def see(w: dict[str, Tensor], x: Tensor, heads: int = HEADS) -> Tensor:
    """The tokens of pictures [B, 3, H, W] behind all layers but the last."""
    patch = w["patch_embedding.weight"]
    x = F.conv2d(x, patch, stride=patch.shape[-1]).flatten(2).transpose(1, 2)
    x = torch.cat([w["cls_embedding"].expand(len(x), -1, -1), x], 1) + w["pos_embedding"]
    x = _norm(w, "pre_norm", x)
    for layer in range(len({n.split(".")[1] for n in w if n.startswith("transformer.")}) - 1):
        at = f"transformer.{layer}"
        made = _linear(w, f"{at}.attn.to_qkv", _norm(w, f"{at}.norm1", x))
        q, k, v = made.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + _linear(w, f"{at}.attn.proj", seen)
        inner = F.gelu(_linear(w, f"{at}.mlp.0", _norm(w, f"{at}.norm2", x)))
        x = x + _linear(w, f"{at}.mlp.2", inner)
    return x


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], EPS)
