"""Models by name, and checkpoints by path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tachyscope.errors import TachyscopeError
from tachyscope.models.base import VideoModel
from tachyscope.models.cosmos_ar.model import load_cosmos
from tachyscope.models.vila_u.model import load_vila, toy_tokens
from tachyscope.models.wan.loading import load_wan
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.presets import PRESETS, SIZES, load_preset, sized_wan
from tachyscope.models.wan.text import PromptFile
from tachyscope.models.wan.toy import toy_chunks
from tachyscope.numerics import own_numerics
from tachyscope.plan import Plan
from tachyscope.weights import shipped

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Entry:
    """What `load` makes of a name."""

    about: str
    kind: str  # of the model it makes
    make: Callable[..., VideoModel]
    weights: bool = False  # whether a checkpoint must be given
    wan: bool = False  # a Wan-type checkpoint, which takes a LoRA and a tiny decoder
    random: bool = False  # whether its weights are, so that its pictures say nothing of quality
    world: str = ""  # the world with a known truth that it was trained on
    pace: float = 1.0  # steps of a walk in that world that a frame takes
    tempo: float = 1.0  # steps by which things that move on their own go on in a frame


def _load_shipped(load: Callable[..., VideoModel], name: str, **options: Any) -> VideoModel:
    return load(shipped(name), **options)


MODELS = {
    "atrium-world": Entry(
        "our own trained world model of small rooms, 128x128, driven by actions",
        "chunks",
        partial(_load_shipped, load_wan, "atrium-world"),
        world="atrium",
    ),
    "atrium-tokens": Entry(
        "our own trained token model of the same rooms, 128x128, 256 tokens a frame",
        "tokens",
        partial(_load_shipped, load_vila, "atrium-tokens"),
        world="atrium",
        # a degree a frame, and periods of 48 frames: in the middle of what it was trained on
        pace=1 / 15,
        tempo=1 / 3,
    ),
    "toy-chunks": Entry(
        "tiny random Wan-type diffusion model, a chunk of 3 at a time",
        "chunks",
        toy_chunks,
        random=True,
    ),
    "toy-tokens": Entry(
        "tiny random VILA-U-type model, token by token", "tokens", toy_tokens, random=True
    ),
    **{
        name: Entry(
            preset.about, preset.config.kind, partial(load_preset, name), weights=True, wan=True
        )
        for name, preset in PRESETS.items()
    },
    "wan_causal": Entry(
        "any Wan-type causal checkpoint: a folder, .safetensors or .pt",
        "chunks",
        load_wan,
        weights=True,
        wan=True,
    ),
    "vila_u": Entry("any VILA-U checkpoint folder", "tokens", load_vila, weights=True),
    "cosmos_ar": Entry(
        "NVIDIA Cosmos-Predict1 4B or 12B: model.pt, goes on from given frames",
        "tokens",
        load_cosmos,
        weights=True,
    ),
}

# models that are known without a checkpoint, as shapes alone
SIZED: dict[str, Callable[[torch.dtype], VideoModel]] = {
    name: partial(sized_wan, name) for name in (*PRESETS, *SIZES)
}


@own_numerics()
def load(
    name: str,
    weights: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    decoder: str | Path | None = None,
    decoder_check: bool = False,
    lora: str | Path | None = None,
    lora_alpha: float | None = None,
) -> VideoModel:
    """A model by name; `weights` is the checkpoint, where the name stands for an architecture.

    Published models take weights="random" too: their full size, made up on the device, for a
    clock. weights="download" fetches their files from Hugging Face, into its cache. `decoder` is
    the file of a tiny decoder, taew2_1 or lighttaew2_1, which shows a Wan-type checkpoint's latents
    instead of Wan's VAE, or "random-tiny" for a clock; with `decoder_check` both decode every
    chunk, and `plan_notes.notes` tells their PSNR. `lora` is a file whose updates are merged into a
    Wan-type checkpoint, by `lora_alpha` over their rank, or by the alpha that the file tells; by 1
    without either.
    """
    if not isinstance(name, str) or name not in MODELS:
        raise TachyscopeError(f"no model {name!r}; there are: {', '.join(MODELS)}")
    dtype, place = find_dtype(dtype), find_device(device)
    entry = MODELS[name]
    if not entry.wan:
        if lora is not None:
            raise TachyscopeError(f"model {name!r} takes no LoRA, got {lora}: leave `lora` out")
        if decoder is not None:
            raise TachyscopeError(
                f"model {name!r} takes no tiny decoder, got {decoder}: leave `decoder` out"
            )
    if lora is None and lora_alpha is not None:
        raise TachyscopeError(
            f"`lora_alpha` is a LoRA's, got {lora_alpha} and no LoRA: give `lora` too"
        )
    if decoder is None and decoder_check:
        raise TachyscopeError("`decoder_check` is of a tiny decoder, got none: give `decoder` too")
    if entry.weights:
        if weights is None:
            raise TachyscopeError(
                f"model {name!r} needs a checkpoint: give its path as `weights`{_elsewhere(name)}"
            )
        more: dict[str, Any] = {}
        if entry.wan:
            more = {"lora": lora, "lora_alpha": lora_alpha}
            more |= {"decoder": decoder, "decoder_check": decoder_check}
        model = entry.make(Path(weights), device=place, dtype=dtype, **more)
        _check_stock(model, weights)
        return model
    if weights is not None:
        raise TachyscopeError(f"model {name!r} brings its own weights: leave `weights` out")
    return entry.make(device=place, dtype=dtype)


def _elsewhere(name: str) -> str:
    """What else than a path the weights of a published model can be."""
    if name not in PRESETS:
        return ""
    hub = PRESETS[name].hub
    fetch = f"; 'download' fetches it, as does: {hub.commands(name)}" if hub else ""
    return f", or 'random' to time it{fetch}"


def _check_stock(model: VideoModel, weights: str | Path) -> None:
    """Raise where the plan that a checkpoint names as its authors' cannot be read."""
    try:
        Plan.parse("stock", model.kind, model.stock)
    except TachyscopeError as fault:
        raise TachyscopeError(
            f"{weights} names a stock plan that cannot be read: {fault}: mend its config.json"
        ) from None


def with_prompt(model: VideoModel, file: Path | str, later: Sequence[str] = ()) -> VideoModel:
    """The model, reading prompts that were embedded before instead of encoding them.

    A rollout begins with that in `file`; in its `then` a prompt is the name of a `later` file.
    """
    if not isinstance(model, WanModel):
        raise TachyscopeError(
            f"{model.name} takes no embedded prompt, got {file}: give the prompt in words"
        )
    text = PromptFile.read(Path(file), model.config, later)
    return WanModel(model.name, model.transformer, text, model.decoder)


def find_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of that name; raises where models have none such."""
    named = str(dtype).removeprefix("torch.")
    if named not in DTYPES:
        raise TachyscopeError(f"no dtype {named!r}; there are: {', '.join(DTYPES)}")
    return DTYPES[named]


def find_device(device: str | torch.device) -> torch.device:
    """The device of that name; raises where there is none."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise TachyscopeError(f"no device {device!r}; give cpu, cuda or cuda:N")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise TachyscopeError("`device` cuda: no CUDA device is usable here: use cpu")
    return place
