"""Models by name, and checkpoints by path."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from tachyscope.core.errors import TachyscopeError, first_line
from tachyscope.core.limits import check
from tachyscope.core.plan import Plan
from tachyscope.core.types import dtype_name
from tachyscope.io.torch_defaults import own_numerics
from tachyscope.kernels import fp8
from tachyscope.kernels.device import has_fp8
from tachyscope.kernels.dispatch import has_hopper
from tachyscope.models.base import VideoModel
from tachyscope.models.checkpoint import check_path
from tachyscope.models.cosmos_ar.model import load_cosmos
from tachyscope.models.own import find_maker, make_own
from tachyscope.models.toys import toy_chunks, toy_tokens
from tachyscope.models.vila_u.model import load_vila
from tachyscope.models.wan.loading import load_wan
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.presets import PRESETS, SIZES, load_preset, sized_wan
from tachyscope.models.wan.sizes import VaeSize
from tachyscope.models.wan.text import PromptFile
from tachyscope.models.wan.vae import WanVae
from tachyscope.models.waypoint import loading as waypoint
from tachyscope.weights import shipped

GROUP = "tachyscope.models"  # entry points of other distributions
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# by precision: float8 linears, float8 attention
PRECISIONS = {
    "fp8": (True, True),
    "fp8_linears": (True, False),
    "fp8_attention": (False, True),
}


@dataclass(frozen=True)
class Entry:
    """A model that `load` knows by name."""

    about: str
    kind: str  # the model's `kind`
    make: Callable[..., VideoModel]
    weights: bool = False  # whether it needs a checkpoint
    wan: bool = False  # whether it takes a LoRA and a tiny decoder
    tiny: bool = False  # whether it takes a tiny decoder, and no LoRA
    random: bool = False  # whether its weights are random, so that quality cannot be judged
    world: str = ""  # the world with a known ground truth that it was trained on
    pace: float = 1.0  # steps of a walk in that world a frame
    tempo: float = 1.0  # steps of moving things in that world a frame
    own: bool = False  # whether it is a user's
    licence: str = "yours"  # of the weights
    download: bool = False  # whether weights="download" fetches them
    gpu: bool = False  # whether it is too large for a CPU


def _load_shipped(load: Callable[..., VideoModel], name: str, **options: Any) -> VideoModel:
    return load(shipped(name), **options)


MODELS = {
    "atrium-world": Entry(
        "our own trained world model of small rooms, 128x128, driven by actions",
        "chunks",
        partial(_load_shipped, load_wan, "atrium-world"),
        world="atrium",
        licence="Apache-2.0",
    ),
    "atrium-tokens": Entry(
        "our own trained token model of the same rooms, 128x128, 256 tokens a frame",
        "tokens",
        partial(_load_shipped, load_vila, "atrium-tokens"),
        world="atrium",
        # one degree a frame, and periods of 48 frames: the middle of its training range
        pace=1 / 15,
        tempo=1 / 3,
        licence="Apache-2.0",
    ),
    "toy-chunks": Entry(
        "tiny random Wan-type diffusion model, a chunk of 3 at a time",
        "chunks",
        toy_chunks,
        random=True,
        licence="Apache-2.0",
    ),
    "toy-tokens": Entry(
        "tiny random VILA-U-type model, token by token",
        "tokens",
        toy_tokens,
        random=True,
        licence="Apache-2.0",
    ),
    **{
        name: Entry(
            preset.about,
            preset.config.kind,
            partial(load_preset, name),
            weights=True,
            wan=True,
            licence=preset.licence,
            download=preset.hub is not None,
            gpu=True,
        )
        for name, preset in PRESETS.items()
    },
    "waypoint": Entry(
        waypoint.ABOUT,
        "chunks",
        waypoint.load_waypoint,
        weights=True,
        tiny=True,
        licence="Apache-2.0",
        download=True,
        gpu=True,
    ),
    "wan_causal": Entry(
        "any Wan-type causal checkpoint: a folder, .safetensors or .pt",
        "chunks",
        load_wan,
        weights=True,
        wan=True,
        gpu=True,
    ),
    "vila_u": Entry("any VILA-U checkpoint folder", "tokens", load_vila, weights=True, gpu=True),
    "cosmos_ar": Entry(
        "NVIDIA Cosmos-Predict1 4B or 12B: model.pt, goes on from given frames",
        "tokens",
        load_cosmos,
        weights=True,
        gpu=True,
    ),
}

# published files of models; None if they are not known
HUBS = {name: preset.hub for name, preset in PRESETS.items()} | {"waypoint": waypoint.HUB}
# models on the meta device, without a checkpoint
SIZED: dict[str, Callable[..., VideoModel]] = {
    name: partial(sized_wan, name) for name in (*PRESETS, *SIZES)
} | {"waypoint": waypoint.sized_waypoint}


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
    precision: str | None = None,
    decoder_bands: int = 1,
) -> VideoModel:
    """Load a model by name.

    name: a model of the package; your own as `my.py:MyWorld` or `my_module:MyWorld`, a class
    derived from VideoModel or a function that makes one, called with those of `device`, `dtype` and
    `weights` that it takes; or a name given by `register` or an entry point of the group
    `tachyscope.models`.
    weights: the checkpoint's path. For published models also "random", random weights of the full
    size, to measure time, or "download", which fetches the files into Hugging Face's cache.
    decoder: the file of a tiny decoder, such as taew2_1 or lighttaew2_1, which decodes instead of
    Wan's VAE; or "random-tiny", to measure time.
    decoder_check: decode every chunk with both; `plan_notes.notes` states the PSNR between them.
    lora: a file that is merged into a Wan-type checkpoint, scaled by alpha over rank.
    lora_alpha: for a LoRA file without its own alpha; by default the rank.
    precision: fp8, fp8_linears or fp8_attention: linears, attention over the video, or both of a
    Wan-type model compute in float8.
    decoder_bands: decode Wan's VAE in this many bands of rows, to the same frames with a fraction
    of the working memory.
    """
    entry = find_entry(name)
    dtype, place = find_dtype(dtype), find_device(device)
    check("decoder_bands", decoder_bands)
    if precision is not None or decoder_bands > 1:
        if precision is not None:
            check_precision(precision, place)
        beside: dict[str, Any] = {"decoder": decoder, "decoder_check": decoder_check}
        beside |= {"lora": lora, "lora_alpha": lora_alpha}
        made = load(name, weights, device=place, dtype=dtype, **beside)
        return changed(made, precision, decoder_bands)
    if entry.own:
        given = {} if weights is None else {"weights": weights}
        return make_own(name, entry.make, device=place, dtype=dtype, **given)
    for option, path in (("weights", weights), ("decoder", decoder), ("lora", lora)):
        check_path(option, path)
    if not entry.wan:
        if lora is not None:
            raise TachyscopeError(f"model {name!r} takes no LoRA, got {lora}: leave `lora` out")
        if decoder is not None and not entry.tiny:
            raise TachyscopeError(
                f"model {name!r} takes no tiny decoder, got {decoder}: leave `decoder` out"
            )
    if lora is None and lora_alpha is not None:
        raise TachyscopeError(
            f"`lora_alpha` is a LoRA's, got {lora_alpha} and no LoRA: give `lora` too"
        )
    if decoder is None and decoder_check:
        raise TachyscopeError("`decoder_check` is of a tiny decoder, got none: give `decoder` too")
    if entry.tiny and decoder_check:
        raise TachyscopeError(
            f"model {name!r} has no decoder but a tiny one to check it by: leave `decoder_check` "
            f"out"
        )
    if entry.weights:
        if weights is None:
            raise TachyscopeError(
                f"model {name!r} needs a checkpoint: give its path as `weights`{_elsewhere(name)}"
            )
        more: dict[str, Any] = {}
        if entry.wan:
            more = {"lora": lora, "lora_alpha": lora_alpha}
            more |= {"decoder": decoder, "decoder_check": decoder_check}
        elif entry.tiny:
            more = {"decoder": decoder}
        model = entry.make(Path(weights), device=place, dtype=dtype, **more)
        _check_stock(model, weights)
        return model
    if weights is not None:
        raise TachyscopeError(f"model {name!r} brings its own weights: leave `weights` out")
    return entry.make(device=place, dtype=dtype)


def check_precision(precision: str, place: torch.device) -> None:
    """Raise if a GPU cannot multiply float8; a CPU simulates it in float32."""
    if precision not in PRECISIONS:
        raise TachyscopeError(f"no precision {precision!r}; there are: {', '.join(PRECISIONS)}")
    if place.type != "cuda":
        return
    linears, attention = PRECISIONS[precision]
    card = torch.cuda.get_device_name(place)
    if not has_fp8(place):
        raise TachyscopeError(
            f"`precision` {precision} needs a GPU that multiplies float8 (Ada, Hopper, Blackwell), "
            f"got {card}: leave it out"
        )
    if attention and not has_hopper(place):
        raise TachyscopeError(
            f"attention in float8 runs on Hopper GPUs alone, got {card}: use precision=fp8_linears"
        )


def in_precision(model: VideoModel, precision: str) -> WanModel:
    """The model converted to a float8 precision."""
    check_precision(precision, model.device)
    if not isinstance(model, WanModel):
        raise TachyscopeError(
            f"model {model.name!r} has no `precision` {precision}, Wan-type models do: leave it out"
        )
    linears, attention = PRECISIONS[precision]
    return model.to_fp8(fp8 if linears else None, attention)


def in_bands(model: VideoModel, bands: int) -> VideoModel:
    """Have the model's VAE decode a frame in bands of rows; returns the model."""
    check("decoder_bands", bands)
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, WanVae | VaeSize):
        raise TachyscopeError(
            f"`decoder_bands` is of Wan's VAE, got {model.decoder_name or 'no decoder'} of model "
            f"{model.name!r}: leave `decoder_bands` out"
        )
    decoder.bands = bands
    return model


def changed(model: VideoModel, precision: str | None, bands: int) -> VideoModel:
    """A model as it was loaded, in another precision or decoding in bands.

    A precision that cannot save time is refused here; to measure it anyway there is `in_precision`.
    """
    if bands != 1:
        model = in_bands(model, bands)
    if precision is None:
        return model
    coded = in_precision(model, precision)
    coded.check_fp8_gain(coded.shape(), coded.size)
    return coded


def register(name: str, make: Callable[..., VideoModel], about: str = "") -> None:
    """Register your own model: `load(name)` then returns `make(device=, dtype=)`."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}", name):
        raise TachyscopeError(
            f"a model's name has letters, digits, '-', '_' and '.', got {name!r:.60}: choose "
            f"another"
        )
    if name in MODELS and not MODELS[name].own:
        raise TachyscopeError(f"there is a model {name!r} already: choose another name")
    MODELS[name] = _own(name, make, about)


def _own(name: str, make: Any, about: str = "") -> Entry:
    if not callable(make):
        raise TachyscopeError(
            f"model {name!r} must be a class derived from VideoModel, or a function that makes "
            f"one, got a {type(make).__name__}"
        )
    said = (make.__doc__ or "").strip().partition("\n")[0]
    return Entry(
        about or said or "a model of one's own", getattr(make, "kind", "chunks"), make, own=True
    )


def find_entry(name: str, sizes: Iterable[str] = ()) -> Entry:
    """The entry of a name: a model of the package, of an entry point, or of a user's file.

    An error lists `sizes` too.
    """
    unknown = f"no model {name!r}; there are: {', '.join(dict.fromkeys((*MODELS, *sizes)))}"
    if not isinstance(name, str):
        raise TachyscopeError(unknown)
    if name in MODELS:
        return MODELS[name]
    found = {e.name: e for e in entry_points(group=GROUP)}
    if name in found:
        try:
            MODELS[name] = _own(name, found[name].load())
        except Exception as fault:  # whatever a user's module raises
            raise TachyscopeError(
                f"model {name!r} of {found[name].value} cannot be loaded: {type(fault).__name__}: "
                f"{first_line(fault)}"
            ) from fault
        return MODELS[name]
    home, colon, attribute = name.rpartition(":")
    if colon and home and attribute.isidentifier():
        MODELS[name] = _own(name, find_maker(name, home, attribute))
        return MODELS[name]
    raise TachyscopeError(unknown)


def _elsewhere(name: str) -> str:
    """The values of `weights` that a published model takes beside a path, for an error."""
    if name not in HUBS:
        return ""
    hub = HUBS[name]
    fetch = f"; 'download' fetches it, as does: {hub.commands(name)}" if hub else ""
    return f", or 'random' to time it{fetch}"


def _check_stock(model: VideoModel, weights: str | Path) -> None:
    """Raise if the stock plan in a checkpoint's config.json cannot be parsed."""
    try:
        Plan.parse("stock", model.kind, model.stock)
    except TachyscopeError as fault:
        raise TachyscopeError(
            f"{weights} names a stock plan that cannot be read: {fault}: mend its config.json"
        ) from None


def with_prompt(model: VideoModel, file: Path | str, later: Sequence[str] = ()) -> VideoModel:
    """The model with prompts read from files of embedded prompts.

    A rollout begins with the prompt in `file`; later prompts are the names of `later` files.
    """
    if not isinstance(model, WanModel):
        raise TachyscopeError(
            f"{model.name} takes no embedded prompt, got {file}: give the prompt in words"
        )
    reading = copy.copy(model)  # of the same precision, from the same files
    reading.text = PromptFile.read(Path(file), model.config, later)
    return reading


def find_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of a name; raises if models do not support it."""
    named = dtype_name(dtype)
    if named not in DTYPES:
        raise TachyscopeError(f"no dtype {named!r}; there are: {', '.join(DTYPES)}")
    return DTYPES[named]


def find_device(device: str | torch.device) -> torch.device:
    """The device of a name; raises if it cannot be used."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise TachyscopeError(f"no device {device!r}; give cpu, cuda or cuda:N")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise TachyscopeError(
            "`device` cuda: no CUDA device is usable here: tachyscope doctor tells what is, and "
            "the small models of tachyscope list models run on cpu"
        )
    return place
