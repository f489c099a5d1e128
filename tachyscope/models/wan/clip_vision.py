"""CLIP's image encoder, whose tokens Matrix-Game 2 reads by cross-attention instead of a prompt."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.checkpoint import matched, read_tensors, some

PUBLISHED = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
TOKENS, WIDTH = 257, 1280  # one token for the whole image, then one for each patch of 14 x 14
HEADS, EPS = 16, 1e-5
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BYTES = 4 * 630_766_080  # of the image encoder in float32, which runs on the CPU
PREFIX = "visual."


class ImageEmbedding(nn.Module):
    """Projects CLIP's tokens to the transformer's width, under the published names."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, dim),
            nn.LayerNorm(dim),
        )  # fmt: skip


class ClipVision:
    """CLIP's ViT-H image encoder without its last layer, as Wan's image-to-video models use it."""

    kind = "clip_vision"
    host_bytes = BYTES

    def __init__(self, file: Path, tokens: int = TOKENS, width: int = WIDTH) -> None:
        self.file, self.tokens, self.width = file, tokens, width

    @staticmethod
    def found(folder: Path) -> bool:
        return (folder / PUBLISHED).is_file()

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        """The weights in float32 by their published names, read when the first image is encoded."""
        found = {
            name.removeprefix(PREFIX): x
            for name, x in read_tensors(self.file).items()
            if name.startswith(PREFIX)
        }
        wanted = self._shapes(found)
        given = {name: found[name] for name in wanted if name in found}
        weights = {k: x.float() for k, x in matched(wanted, given, str(self.file)).items()}
        if bad := [name for name, x in weights.items() if not x.isfinite().all()]:
            raise TachyscopeError(
                f"{self.file} must hold finite numbers, it has NaN or infinity in "
                f"{some(PREFIX + name for name in bad)}: get it again"
            )
        return weights

    def _shapes(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that the encoder must have, on the meta device.

        The file's shapes give the patch size, the number of layers and the MLP's width.
        """
        try:
            side = found["patch_embedding.weight"].shape[3]
            inner = found["transformer.0.mlp.0.weight"].shape[0]
        except (KeyError, IndexError):
            raise TachyscopeError(
                f"{self.file} must hold CLIP's image encoder under its published names, got "
                f"{some(sorted(found)) or 'nothing'}: give the published {PUBLISHED}"
            ) from None
        wide = self.width
        shapes: dict[str, tuple[int, ...]] = {
            "patch_embedding.weight": (wide, 3, side, side),
            "cls_embedding": (1, 1, wide),
            "pos_embedding": (1, self.tokens, wide),
            "pre_norm.weight": (wide,),
            "pre_norm.bias": (wide,),
        }
        linears = {
            "attn.to_qkv": (3 * wide, wide), "attn.proj": (wide, wide),
            "mlp.0": (inner, wide), "mlp.2": (wide, inner),
        }  # fmt: skip
        layers = len({name.split(".")[1] for name in found if name.startswith("transformer.")})
        for layer in range(layers):
            at = f"transformer.{layer}."
            for name, size in linears.items():
                shapes |= {f"{at}{name}.weight": size, f"{at}{name}.bias": size[:1]}
            for name in ("norm1", "norm2"):
                shapes |= {f"{at}{name}.weight": (wide,), f"{at}{name}.bias": (wide,)}
        return {name: torch.empty(size, device="meta") for name, size in shapes.items()}

    @torch.no_grad()
    def __call__(self, frames: np.ndarray) -> Tensor:
        """The tokens [1, tokens, width] of an image uint8 [1, H, W, 3]."""
        x = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
        patch = self.weights["patch_embedding.weight"].shape[-1]
        side = math.isqrt(self.tokens - 1) * patch
        x = F.interpolate(x, (side, side), mode="bicubic", align_corners=False)
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
        return encode(self.weights, (x - mean) / std)


class ClipVisionSize:
    """The memory that CLIP's image encoder takes, without its weights."""

    kind = "clip_vision"
    host_bytes = BYTES


def encode(w: dict[str, Tensor], x: Tensor, heads: int = HEADS) -> Tensor:
    """The tokens of images [B, 3, H, W] after all layers but the last."""
    patch = w["patch_embedding.weight"]
    x = F.conv2d(x, patch, stride=patch.shape[-1]).flatten(2).transpose(1, 2)
    x = torch.cat([w["cls_embedding"].expand(len(x), -1, -1), x], 1) + w["pos_embedding"]
    x = _norm(w, "pre_norm", x)
    for layer in range(len({n.split(".")[1] for n in w if n.startswith("transformer.")}) - 1):
        at = f"transformer.{layer}"
        qkv = _linear(w, f"{at}.attn.to_qkv", _norm(w, f"{at}.norm1", x))
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + _linear(w, f"{at}.attn.proj", out)
        inner = F.gelu(_linear(w, f"{at}.mlp.0", _norm(w, f"{at}.norm2", x)))
        x = x + _linear(w, f"{at}.mlp.2", inner)
    return x


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], EPS)
