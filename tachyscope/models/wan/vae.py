"""Wan's VAE: latents to frames chunk by chunk, and first frames to latents."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.bounds import check_parts
from tachyscope.errors import TachyscopeError, first_line
from tachyscope.models.checkpoint import (
    check_finite,
    fit,
    matched,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from tachyscope.models.wan.parts import Decoder
from tachyscope.models.wan.text import needed

PUBLISHED = "Wan2.1_VAE.pth"
WEIGHTS = "diffusion_pytorch_model.safetensors"
STRIDE = 4  # frames of every latent one but the first, which is one frame
# what diffusers notes of a time convolution that has seen the first frame alone
REPEAT = "Rep"

Normed = Callable[[Tensor, Tensor], Tensor]


class WanVae(Decoder):
    """diffusers' Wan VAE, decoded latent frame by latent frame.

    What its causal convolutions saw last is kept in the session's features, so that a video in
    chunks is the video at once.
    """

    kind = "wan_vae"
    name = "Wan's VAE"

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.convolutions = _optimise_decoder(model.decoder)

    def compile_norms(self, backend: str = "inductor") -> Self:
        """The VAE with its decoder's norms compiled, which are short vectors, and many of them."""
        # any number of vectors; their width is a parameter's, and fixed
        normed = torch.compile(_normed, dynamic=True, backend=backend)
        for module in self.model.decoder.modules():
            if type(module) is type(self.model.decoder.norm_out):
                module.forward = partial(_norm, module, normed)
        return self

    @staticmethod
    def found(folder: Path) -> bool:
        return (folder / PUBLISHED).is_file() or (folder / "vae").is_dir()

    @classmethod
    def read(
        cls,
        path: Path | str,
        config: object = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """The VAE in the original file, in diffusers' folder, or in a folder with one of them.

        `config` is a model's, which does not matter here.
        """
        path = Path(path)
        if (path / PUBLISHED).is_file():
            path = path / PUBLISHED
        elif (path / "vae").is_dir():
            path = path / "vae"
        diffusers = needed("diffusers", f"Wan's VAE in {path}")
        if path.is_dir():
            file, settings = path / WEIGHTS, read_json(path / "config.json")
            tensors = read_tensors(file)
        else:
            file, tensors = path, read_tensors(path)
            if "conv2.weight" not in tensors or "encoder.conv1.weight" not in tensors:
                raise TachyscopeError(
                    f"{file} must hold Wan 2.1's VAE under its original names, got "
                    f"{', '.join(sorted(tensors)[:3]) or 'nothing'}: give the published "
                    f"{PUBLISHED}, or a diffusers folder"
                )
            settings = {
                "base_dim": tensors["encoder.conv1.weight"].shape[0],
                "z_dim": tensors["conv2.weight"].shape[0],
            }
            names = importlib.import_module("diffusers.loaders.single_file_utils")
            tensors = names.convert_wan_vae_to_diffusers(tensors)
        check_parts(settings, str(file.parent / "config.json"))
        try:
            with torch.device("meta"):
                empty = diffusers.AutoencoderKLWan.from_config(settings)
        except Exception as fault:  # whatever odd values lead to
            raise TachyscopeError(
                f"{path} must have a Wan VAE's own config.json, got {first_line(fault)}: get it "
                f"again"
            ) from fault
        matched(empty, tensors, str(file))
        model = diffusers.AutoencoderKLWan.from_config(settings)
        fit(model, tensors, str(file))
        check_finite(model, str(file))
        return cls(_cast(model, dtype).to(device))

    @classmethod
    def sized(cls, channels: int, dtype: torch.dtype) -> Self:
        """A VAE of random weights, with Wan 2.1's numbers, or with 2.2's for 48 channels."""
        diffusers = needed("diffusers", "the size of Wan's VAE")
        settings: dict[str, Any] = {"z_dim": channels}
        if channels == 48:
            settings |= {
                "base_dim": 160, "decoder_base_dim": 256, "is_residual": True, "in_channels": 12,
                "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16,
                "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
            }  # fmt: skip
        made = cls(_cast(diffusers.AutoencoderKLWan.from_config(settings), dtype))
        made.name = f"{cls.name} (random weights)"
        return made

    def write(self, folder: Path) -> None:
        settings = {name: value for name, value in self.model.config.items() if name[0] != "_"}
        write_json(folder / "vae" / "config.json", settings)
        write_tensors(folder / "vae" / WEIGHTS, self.model.state_dict())

    def pixel_frames(self, latents: int) -> int:
        return max(0, 1 + STRIDE * (latents - 1))

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        """Latents [1, C, F, h, w] of frames uint8 [1 + 4n, H, W, 3], or of their levels."""
        if len(frames) % STRIDE != 1:
            raise TachyscopeError(
                f"first frames are 1 + 4n of them for Wan's VAE, got {len(frames)}: give "
                f"{max(1, len(frames) - (len(frames) - 1) % STRIDE)}"
            )
        place = self.model.post_quant_conv.weight
        pixels = torch.as_tensor(frames).permute(3, 0, 1, 2)[None].to(place.device)
        wide = torch.promote_types(place.dtype, torch.float32)
        latents = self.model.encode(
            (pixels.to(wide) / 127.5 - 1).to(place.dtype)
        ).latent_dist.mode()
        latents = latents.to(wide)
        mean, std = self._spread(latents)
        return (latents - mean) / std

    def skip(self, latents: Tensor, features: dict[str, Tensor]) -> None:
        self._decode(latents, features)

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        pixels = self._decode(latents, features)[0]
        return (pixels.float().clamp(-1, 1) * 127.5 + 127.5).permute(1, 2, 3, 0)

    def _decode(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        """Pixels [1, 3, F, H, W], about -1 to 1; the features are brought up to date."""
        model = self.model.to(latents.device)
        mean, std = self._spread(latents)
        latents = (latents * std + mean).to(model.post_quant_conv.weight.dtype)
        seen: list[Any] = [_seen(features.get(f"vae.{i}")) for i in range(self.convolutions)]
        parts = []
        for latent in model.post_quant_conv(latents).split(1, 2):
            first = all(feature is None for feature in seen)
            parts.append(model.decoder(latent, feat_cache=seen, feat_idx=[0], first_chunk=first))
        for i, feature in enumerate(seen):
            if feature is not None:
                features[f"vae.{i}"] = latents.new_zeros(0) if isinstance(feature, str) else feature
        pixels = torch.cat(parts, 2)
        patch = model.config.patch_size
        if patch:
            # [B, C · px · py, F, h, w]: channels, then columns, then rows of a patch
            pixels = pixels.unflatten(1, (-1, patch, patch)).permute(0, 1, 4, 5, 3, 6, 2)
            pixels = pixels.flatten(5).flatten(3, 4)
        return pixels

    def _spread(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The published mean and deviation of each channel, which a model's latents are free of."""
        config = self.model.config
        mean, std = (like.new_tensor(x) for x in (config.latents_mean, config.latents_std))
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


def _optimise_decoder(decoder: Any) -> int:
    """Let diffusers' decoder go over memory less often, to the same results; its convolutions.

    Channels lie last, as convolutions on a GPU want them. What is then left of its time is half
    norms, padding and changes of type that are copies of whole pictures.
    """
    for weight in decoder.parameters():
        if weight.dim() >= 4:
            last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
            weight.data = weight.data.contiguous(memory_format=last)
    causal, norm = type(decoder.conv_in), type(decoder.norm_out)
    modules: list[Any] = list(decoder.modules())
    for module in modules:
        if type(module) is causal:
            module.forward = partial(_convolve, module)
        elif type(module) is norm:
            module.forward = partial(_norm, module, _normed)
        elif issubclass(type(module), nn.Upsample):
            # the nearest place's number needs no wider type
            module.forward = partial(nn.Upsample.forward, module)
    return sum(type(module) is causal for module in modules)


def _convolve(module: Any, x: Tensor, seen: Tensor | None = None) -> Tensor:
    """Of x [B, C, F, h, w] behind the frames seen last, or zeros; padded where it is computed."""
    wide, _, high, _, before, _ = module._padding
    if before and seen is not None:
        x, before = torch.cat([seen, x], 2), before - seen.shape[2]
    if before:
        x = F.pad(x, (0, 0, 0, 0, before, 0))
    return F.conv3d(x, module.weight, module.bias, module.stride, (0, high, wide))


def _norm(module: Any, normed: Normed, x: Tensor) -> Tensor:
    """Over the channels of x [B, C, ...]."""
    x = x.movedim(1, -1).contiguous()
    if x.is_meta:  # a compiled program does not take tensors without data, which `fit` gives
        normed = _normed
    return normed(x.view(-1, x.shape[-1]), module.gamma).view(x.shape).movedim(-1, 1)


def _normed(rows: Tensor, gamma: Tensor) -> Tensor:
    # diffusers holds a vector's length at 1e-12 or more; this much on its square is no more
    return F.rms_norm(rows, rows.shape[-1:], gamma.flatten(), 1e-24)


def _cast(model: Any, dtype: torch.dtype) -> Any:
    # diffusers' own warns of modules to keep in float32, of which this model has none
    return nn.Module.to(model, dtype)


def _seen(feature: Tensor | None) -> Tensor | str | None:
    return REPEAT if feature is not None and feature.numel() == 0 else feature
