"""Text encoder and decoder without a network: prompts as bytes, latents as colours."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.checkpoint import fit, read_tensors, write_tensors
from tachyscope.models.diffusion import Decoder, LatentSizes
from tachyscope.models.wan.config import WanConfig


class BytesText:
    """A prompt as its UTF-8 bytes, each a row of a table; the last row ends the prompt."""

    kind = "bytes"
    file = "text_encoder.safetensors"

    def __init__(self, table: Tensor, length: int) -> None:
        self.table, self.length = table, length  # [257, text_dim]

    @classmethod
    def seeded(cls, config: WanConfig, seed: int) -> Self:
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(257, config.text_dim, generator=generator, dtype=torch.float32)
        return cls(table, config.text_len)

    @classmethod
    def read(cls, folder: Path, config: WanConfig) -> Self:
        tensors = read_tensors(folder / cls.file)
        holder = nn.ModuleDict({"embedding": nn.Embedding(257, config.text_dim)})
        fit(holder, tensors, str(folder / cls.file))
        return cls(holder.state_dict()["embedding.weight"], config.text_len)

    def write(self, folder: Path) -> None:
        write_tensors(folder / self.file, {"embedding.weight": self.table})

    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        rows = [*prompt.encode(), 256]
        if len(rows) > self.length:
            raise TachyscopeError(
                f"a prompt has at most {self.length - 1} bytes, got {len(rows) - 1}: shorten it"
            )
        context = self.table.new_zeros(1, self.length, self.table.shape[1])
        context[0, : len(rows)] = self.table[rows]
        return context, len(rows)


class ImageMeans:
    """Stands in for CLIP: mean colours of runs of an image's pixels, projected to its width."""

    def __init__(self, config: WanConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        self.spread = torch.randn(3, config.text_dim, generator=generator)
        self.tokens = config.text_len

    def __call__(self, frames: np.ndarray) -> Tensor:
        pixels = torch.from_numpy(frames).float().flatten(1, 2).transpose(1, 2) / 127.5 - 1
        means = nn.functional.adaptive_avg_pool1d(pixels, self.tokens).transpose(1, 2)
        return means @ self.spread


class Preview(Decoder):
    """Shows latents without a decoder: colours are a linear map of their channels."""

    kind = name = "preview"
    file = "decoder.safetensors"

    def __init__(self, weight: Tensor, stride: tuple[int, int, int]) -> None:
        self.weight, self.stride = weight, stride  # [3, C]

    @classmethod
    def seeded(cls, config: LatentSizes, seed: int) -> Self:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(3, config.in_channels, generator=generator, dtype=torch.float32)
        # latents of spread two then use most of the range and seldom leave it
        return cls(0.125 * weight / weight.norm(dim=1, keepdim=True), config.stride)

    @classmethod
    def read(cls, folder: Path, config: LatentSizes, device: torch.device | str = "cpu") -> Self:
        holder = nn.ModuleDict({"preview": nn.Linear(config.in_channels, 3, bias=False)})
        fit(holder, read_tensors(folder / cls.file), str(folder / cls.file))
        return cls(holder.state_dict()["preview.weight"].to(device), config.stride)

    def write(self, folder: Path) -> None:
        write_tensors(folder / self.file, {"preview.weight": self.weight})

    def pixel_frames(self, latents: int) -> int:
        return max(0, 1 + self.stride[0] * (latents - 1))

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        raise TachyscopeError(
            "a preview shows latents and cannot make them of pixels: start without first frames "
            "and `video`, or load a model with an autoencoder"
        )

    def skip(self, latents: Tensor, features: dict[str, Tensor]) -> None:
        features["begun"] = torch.ones(1, dtype=torch.float32)

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        # as in Wan, a video's first latent frame is a single frame
        first = 0 if "begun" in features else self.stride[0] - 1
        self.skip(latents, features)
        colour = torch.einsum("kc,cfhw->fhwk", self.weight.to(latents), latents[0]) + 0.5
        frames = (255 * colour.clamp(0, 1)).round().cpu()
        for dim, times in enumerate(self.stride):
            frames = frames.repeat_interleave(times, dim)
        return frames[first:].float()
