"""Load and save checkpoints of Wan-type models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, warn
from tachyscope.models.atrium.autoencoder import AutoencoderDecoder
from tachyscope.models.atrium.words import WordTextEncoder
from tachyscope.models.checkpoint import (
    INDEX,
    PICKLED,
    SAFE,
    allocate,
    fit,
    matched,
    read_json,
    read_tensors,
    strip_prefixes,
    write_json,
    write_tensors,
)
from tachyscope.models.diffusion import Decoder
from tachyscope.models.wan.clip_vision import PUBLISHED as CLIP
from tachyscope.models.wan.clip_vision import ClipVision
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.lora import merge_lora
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.names import wan_names
from tachyscope.models.wan.parts import TextEncoder
from tachyscope.models.wan.plain_parts import BytesText, Preview
from tachyscope.models.wan.text import UMT5, PromptFile
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope.models.wan.transformer import WanCausal
from tachyscope.models.wan.vae import WanVae

T = TypeVar("T")
WEIGHTS, SHARDED = "diffusion_pytorch_model.safetensors", "model.safetensors.index.json"
INNER = ("transformer", "transformers")  # subfolders that may hold the weights
# RoPE tables that some trainers save with the weights: names of Wan and of diffusers
ROPE_TABLES = ("freqs", "rope.freqs", "rope.freqs_cos", "rope.freqs_sin")
ROPE_POSITIONS = 65_536  # at most, of such a table: published ones have 1,024
# readers of the parts in a model's folder, by kind
TEXT_ENCODERS: dict[str, Callable[[Path, WanConfig], TextEncoder]] = {
    "bytes": BytesText.read,
    "words": WordTextEncoder.read,
    "umt5": UMT5.read,
    "prompt_file": PromptFile.read,
}
DECODERS: dict[str, Callable[..., Decoder]] = {
    "preview": Preview.read,
    "autoencoder": AutoencoderDecoder.read,
    "wan_vae": WanVae.read,
    "tiny_decoder": TinyDecoder.read,
}


def load_wan(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: WanConfig | None = None,
    decoder: Path | str | None = None,
    decoder_check: bool = False,
    lora: Path | str | None = None,
    lora_alpha: float | None = None,
    preset: str = "",
    entry: str = "",
    parts: Path | None = None,
) -> WanModel:
    """Load a model from a folder with config.json, or from a file.

    The folder may be diffusers', of a transformer or a pipeline. A file's configuration is inferred
    unless `config` is given. `decoder` is the file of a tiny decoder, or of a VAE with fewer
    channels than Wan's; otherwise the folder's own text encoder and decoder are used, or Wan's
    published ones in `parts`, in the folder, beside the file, or in the folder above it.

    decoder_check: compare a tiny decoder's frames with the VAE's. lora: merged into the weights,
    with `lora_alpha` if it has no alpha. preset: the published model that `config` describes.
    entry: the copy of the weights to use of a file that has several.
    """
    path, text, shown = Path(path), None, None
    if path.is_dir():
        folder = next((path / x for x in INNER if (path / x).is_dir()), path)
        if config is None:
            stated = folder / "config.json"
            config = WanConfig.from_json(read_json(stated), str(stated))
        files = [folder / name for name in (WEIGHTS + INDEX, WEIGHTS, SHARDED)]
        file = next((file for file in files if file.is_file()), files[1])
        text = _part(TEXT_ENCODERS, config.text_encoder, path, config)
        if decoder is None:
            shown = _part(DECODERS, config.decoder, path, config, device=device)
    else:
        file = path
        if not file.is_file():
            raise TachyscopeError(
                f"no model at {path}: give a folder with config.json, or a checkpoint file"
            )
    tensors = wan_names(strip_prefixes(read_tensors(file, entry)), str(file))
    stored = {name: tensors.pop(name) for name in ROPE_TABLES if name in tensors}
    if config is None or preset:
        inferred = WanConfig.infer(tensors, str(file))
        config = config or inferred
        if config.size_words != inferred.size_words:
            raise TachyscopeError(
                f"{file} holds a model of {inferred.size_words}, but {preset} has "
                f"{config.size_words}: give {preset}'s own weights, or load them as wan_causal"
            )
    # on the meta device no time goes into weights that the file replaces
    with torch.device("meta"):
        model = WanCausal(config).cast(dtype)
    # checked before memory is allocated: a configuration may have any sizes
    matched(model, tensors, str(file))
    model = allocate(model, device, str(file))
    fit(model, tensors, str(file))
    if lora is not None:
        merge_lora(model, tensors, Path(lora), lora_alpha)
    beside = parts or _parts_folder(path)
    if text is None and UMT5.found(beside):
        text = UMT5.read(beside, config)
    vae = None
    # without diffusers latents can still be sampled
    if WanVae.found(beside) and find_spec("diffusers"):
        vae = functools.partial(WanVae.read, beside, device=device, dtype=dtype)
    if decoder is not None:
        shown = _read_decoder(Path(decoder), config, device, dtype, vae, decoder_check)
    elif shown is None and vae is not None:
        shown = vae()
    if isinstance(shown, WanVae) and shown.stride != config.stride:
        sides = ["x".join(map(str, x)) for x in (shown.stride, config.stride)]
        raise TachyscopeError(
            f"{beside} has a VAE of {sides[0]} (frames x height x width of a latent place), and "
            f"the model {file} is of {sides[1]}: give the VAE that it was trained with, or the "
            f"model's `stride` under 'tachyscope' in its config.json"
        )
    name = preset or (path.resolve().name if path.is_dir() else path.stem)
    made = WanModel(name, model.eval(), text, shown)
    if config.action_modules and ClipVision.found(beside):
        made.clip = ClipVision(beside / CLIP, config.text_len, config.text_dim)
    if made.context.decodes_in_loop and isinstance(shown, TinyDecoder):
        warn(
            f"{name} encodes its own pictures again, which a tiny decoder draws less exactly: "
            f"what it makes is then another video, not only shown otherwise"
        )
    for key, table in stored.items():
        _skip_rope_table(key, table, made, str(file))
    return made


def _read_decoder(
    path: Path,
    config: WanConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    vae: Callable[[], Decoder] | None,
    check: bool,
) -> Decoder:
    """A tiny decoder, or a VAE of Wan's layout with fewer channels, such as LightVAE."""
    if not path.is_file() or not WanVae.known(read_tensors(path)):
        return TinyDecoder.read(path, config, device, dtype, vae, check)
    if check:
        raise TachyscopeError(
            f"`decoder_check` is of a tiny decoder, {path} is a VAE: leave `decoder_check` out"
        )
    shown = WanVae.read(path, config, device, dtype)
    shown.name = path.stem
    return shown


def _parts_folder(path: Path) -> Path:
    """The folder of Wan's text encoder and VAE: the checkpoint's, or the one above it."""
    folder = path if path.is_dir() else path.parent
    here = UMT5.found(folder) or WanVae.found(folder) or path.is_dir()
    return folder if here else folder.parent


def save_wan(made: WanModel, path: Path | str) -> None:
    """Save a folder, or the weights alone to .safetensors, or to .pt in a trainer's form."""
    path = Path(path)
    tensors = made.transformer.state_dict()
    if path.suffix in SAFE:
        return write_tensors(path, tensors)
    if path.suffix in PICKLED:
        wrapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
        return write_tensors(path, wrapped, under="generator_ema")
    path.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(
        made.config,
        text_encoder=made.text.kind if made.text else "",
        decoder=made.decoder.kind if made.decoder else "",
    )
    write_json(path / "config.json", config.to_json())
    write_tensors(path / WEIGHTS, tensors)
    for part in (made.text, made.decoder):
        if part:
            part.write(path)


def _skip_rope_table(name: str, table: Tensor, model: WanModel, where: str) -> None:
    """Warn that a stored RoPE table is not read; raise unless it is the model's own RoPE.

    Wan's table [positions, D / 2] is complex; diffusers has cosines and sines [positions, D].
    """
    head, right = model.config.head_dim, False
    if table.dim() == 2 and len(table) <= ROPE_POSITIONS and table.shape[1] in (head // 2, head):
        positions = torch.arange(len(table), dtype=torch.float64)[:, None].expand(-1, 3)
        cos, sin = model.rope(model.shape()).cos_sin(positions, torch.float64)
        cos, sin = cos[:, ::2], sin[:, 1::2]
        angles = sin if name.endswith("sin") else cos
        if table.is_complex():
            angles = torch.complex(cos, sin)
        angles = angles.repeat_interleave(2 * table.shape[1] // head, 1)
        close = 1e-2 if table.itemsize == 2 else 1e-3
        right = torch.allclose(table.to(angles), angles, atol=close)
    if not right:
        raise TachyscopeError(
            f"{where}: {name} must be the angles of a RoPE of 3 axes and theta 10000 over "
            f"{head} channels, it has others: give a model of Wan's RoPE"
        )
    warn(f"{where}: {name} is not read, RoPE's angles are computed")


def _part(
    kinds: Mapping[str, Callable[..., T]], kind: str, folder: Path, config: WanConfig, **more: Any
) -> T | None:
    if not kind:
        return None
    if kind not in kinds:
        raise TachyscopeError(
            f"{folder / 'config.json'} names a part {kind!r}; there are {', '.join(kinds)}: "
            f"give one of these"
        )
    return kinds[kind](folder, config, **more)
