"""Wan's VAE: decodes latents chunk by chunk, and encodes given frames."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError, first_line
from tachyscope.core.limits import Bound
from tachyscope.memory.allocations import tensor_bytes
from tachyscope.models.checkpoint import (
    fit,
    matched,
    read_json,
    read_tensors,
    some,
    write_json,
    write_tensors,
)
from tachyscope.models.config_schema import SIDE, check_numbers
from tachyscope.models.diffusion import Decoder
from tachyscope.models.wan import vae_5b, vae_bands
from tachyscope.models.wan.text import needed

# Wan 2.1's, and that of Wan 2.2 5B
PUBLISHED, PUBLISHED_5B = "Wan2.1_VAE.pth", "Wan2.2_VAE.pth"
WEIGHTS = "diffusion_pytorch_model.safetensors"
# what a config.json of diffusers says
BOUNDS = {
    "base_dim": Bound(1, 4_096),
    "decoder_base_dim": Bound(1, 4_096),
    "z_dim": SIDE,
    "num_res_blocks": Bound(1, 64),
    "in_channels": SIDE,
    "out_channels": SIDE,
    "patch_size": Bound(1, 64),
    "dim_mult": Bound(1, 64),
}
STRIDE = 4  # pixel frames of a latent frame; a video's first latent frame is one

Normed = Callable[[Tensor, Tensor], Tensor]


class WanVae(Decoder):
    """diffusers' Wan VAE, decoded latent frame by latent frame.

    The state of its causal convolutions is in the session's features, so that a video decoded in
    chunks equals the video decoded at once.
    """

    kind = "wan_vae"
    name = "Wan's VAE"
    bands = 1  # bands of rows in which a frame is decoded

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.convolutions = _optimise_decoder(model.decoder)
        causal = type(model.encoder.conv_in)
        self.encoder_convolutions = sum(type(x) is causal for x in model.encoder.modules())

    def compile_norms(self, backend: str = "inductor") -> Self:
        """Compile the decoder's norms, which are over many short vectors."""
        # dynamic in the number of vectors; their width is that of a parameter
        normed = torch.compile(_normed, dynamic=True, backend=backend)
        for module in self.model.decoder.modules():
            if type(module) is type(self.model.decoder.norm_out):
                module.forward = partial(_norm, module, normed)
        return self

    @property
    def stride(self) -> tuple[int, int, int]:
        """Pixel frames, rows and columns of a latent place."""
        config = self.model.config
        return (config.scale_factor_temporal, *(config.scale_factor_spatial,) * 2)

    @staticmethod
    def found(folder: Path) -> bool:
        files = (folder / PUBLISHED, folder / PUBLISHED_5B)
        return any(file.is_file() for file in files) or (folder / "vae").is_dir()

    @staticmethod
    def known(tensors: Mapping[str, Tensor]) -> bool:
        """Whether tensors have the original names of a VAE of Wan's layout."""
        return {"conv2.weight", "encoder.conv1.weight"} <= tensors.keys()

    @classmethod
    def read(
        cls,
        path: Path | str,
        config: object = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """The VAE in an original file, in diffusers' folder, or in a folder with one of them.

        `config`, the model's, is not used.
        """
        path = Path(path)
        inside = [path / name for name in (PUBLISHED, PUBLISHED_5B, "vae")]
        path = next((x for x in inside if x.exists()), path)
        diffusers = needed("diffusers", f"Wan's VAE in {path}")
        if path.is_dir():
            file, settings = path / WEIGHTS, read_json(path / "config.json")
            tensors = read_tensors(file)
        else:
            file, tensors = path, read_tensors(path)
            if not cls.known(tensors):
                raise TachyscopeError(
                    f"{file} must hold Wan's VAE under its original names, got "
                    f"{some(sorted(tensors)) or 'nothing'}: give the published "
                    f"{PUBLISHED} or {PUBLISHED_5B}, or a diffusers folder"
                )
            if vae_5b.known(tensors):
                settings, tensors = vae_5b.settings(tensors), vae_5b.renamed(tensors)
            else:
                settings = {
                    "base_dim": tensors["encoder.conv1.weight"].shape[0],
                    "z_dim": tensors["conv2.weight"].shape[0],
                }
                names = importlib.import_module("diffusers.loaders.single_file_utils")
                tensors = names.convert_wan_vae_to_diffusers(tensors)
        check_numbers(settings, BOUNDS, str(file.parent / "config.json"))
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
        return cls(_cast(model, dtype).to(device))

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
        return self.encode_next(frames, {})

    def encode_next(self, frames: np.ndarray | Tensor, state: dict[str, Tensor]) -> Tensor:
        model, place = self.model, self.model.post_quant_conv.weight
        pixels = torch.as_tensor(frames).permute(3, 0, 1, 2)[None].to(place.device)
        wide = torch.promote_types(place.dtype, torch.float32)
        pixels = _patched((pixels.to(wide) / 127.5 - 1).to(place.dtype), model.config.patch_size)
        # a video's first frame is a latent frame by itself
        lone = [] if state else [1]
        parts = pixels.split(lone + [STRIDE] * ((len(frames) - len(lone)) // STRIDE), 2)
        seen = [state.get(f"encoder.{i}") for i in range(self.encoder_convolutions)]
        # each by itself, so that a video in chunks equals the video at once
        made = [model.quant_conv(model.encoder(x, feat_cache=seen, feat_idx=[0])) for x in parts]
        state |= {f"encoder.{i}": x for i, x in enumerate(seen) if x is not None}
        latents = torch.cat(made, 2).chunk(2, 1)[0].to(wide)
        mean, std = self._spread(latents)
        return (latents - mean) / std

    def encoder_state(self, size: tuple[int, int]) -> int:
        state: dict[str, Tensor] = {}
        self.encode_next(torch.empty(1 + STRIDE, *size, 3, device="meta"), state)
        return tensor_bytes(state.values())

    def skip(self, latents: Tensor, features: dict[str, Tensor]) -> None:
        self._decode(latents, features)

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        pixels = self._decode(latents, features)[0]
        return (pixels.float().clamp(-1, 1) * 127.5 + 127.5).permute(1, 2, 3, 0)

    def _decode(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        """Pixels [1, 3, F, H, W], about -1 to 1; updates the features."""
        model = self.model.to(latents.device)
        mean, std = self._spread(latents)
        latents = (latents * std + mean).to(model.post_quant_conv.weight.dtype)
        seen: list[Any] = [_seen(features.get(f"vae.{i}")) for i in range(self.convolutions)]
        parts = []
        for latent in model.post_quant_conv(latents).split(1, 2):
            first = all(feature is None for feature in seen)
            if self.bands > 1:
                parts.append(vae_bands.decode(model.decoder, latent, seen, self.bands, first))
                continue
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
        """The mean and deviation of each channel, by which a model's latents are normalised."""
        config = self.model.config
        mean, std = (like.new_tensor(x) for x in (config.latents_mean, config.latents_std))
        return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


def _patched(pixels: Tensor, patch: int | None) -> Tensor:
    """Pixels [B, 3, F, H, W] as [B, C · px · py, F, h, w]."""
    if not patch:
        return pixels
    split = pixels.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))
    return split.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def _optimise_decoder(decoder: Any) -> int:
    """Make diffusers' decoder read memory less often; returns its number of causal convolutions.

    Channels are stored last, as convolutions on a GPU want them. Half of the time that is then left
    is norms, padding and casts that copy whole frames.
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
            # nearest-neighbour indices need no wider type
            module.forward = partial(nn.Upsample.forward, module)
    return sum(type(module) is causal for module in modules)


def _convolve(module: Any, x: Tensor, seen: Tensor | None = None) -> Tensor:
    """A causal convolution of x [B, C, F, h, w] after the cached frames, or zeros."""
    wide, _, high, _, before, _ = module._padding
    if before and seen is not None:
        x, before = torch.cat([seen, x], 2), before - seen.shape[2]
    if before:
        x = F.pad(x, (0, 0, 0, 0, before, 0))
    return F.conv3d(x, module.weight, module.bias, module.stride, (0, high, wide))


def _norm(module: Any, normed: Normed, x: Tensor) -> Tensor:
    """The norm over the channels of x [B, C, ...]."""
    x = x.movedim(1, -1).contiguous()
    if x.is_meta:  # compiled programs take no tensors without data, as `fit` measures with
        normed = _normed
    return normed(x.view(-1, x.shape[-1]), module.gamma).view(x.shape).movedim(-1, 1)


def _normed(rows: Tensor, gamma: Tensor) -> Tensor:
    # diffusers clamps a vector's norm at 1e-12, which is this epsilon on its square
    return F.rms_norm(rows, rows.shape[-1:], gamma.flatten(), 1e-24)


def _cast(model: Any, dtype: torch.dtype) -> Any:
    # diffusers' own warns of modules to keep in float32, of which this model has none
    return nn.Module.to(model, dtype)


def _seen(feature: Tensor | None) -> Tensor | str | None:
    return vae_bands.REPEAT if feature is not None and feature.numel() == 0 else feature
