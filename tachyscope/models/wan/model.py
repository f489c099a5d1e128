"""Wan-type models as a rollout drives them: their parts, their sampler, their files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.bounds import check, check_prompt
from tachyscope.errors import TachyscopeError, is_out_of_memory, warn
from tachyscope.fingerprint import digest
from tachyscope.machine import memory_of
from tachyscope.models.atrium.autoencoder import Pictures
from tachyscope.models.atrium.words import Words
from tachyscope.models.base import VideoModel
from tachyscope.models.checkpoint import (
    PICKLED,
    SAFE,
    check_finite,
    fit,
    matched,
    read_json,
    read_tensors,
    strip_prefixes,
    wan_names,
    write_json,
    write_tensors,
)
from tachyscope.models.wan import text as wan_text
from tachyscope.models.wan import vae as wan_vae
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.lora import merge_lora
from tachyscope.models.wan.text import UMT5, PromptFile
from tachyscope.models.wan.tiny_decoder import ERROR, TinyDecoder
from tachyscope.models.wan.toy_parts import BytesText, Preview
from tachyscope.models.wan.transformer import WanCausal, clean_from, noised, schedule, wider
from tachyscope.models.wan.vae import WanVae
from tachyscope.session import Session
from tachyscope.types import Mlp, Rope, Shape

T = TypeVar("T")
WEIGHTS = "diffusion_pytorch_model.safetensors"
# Compiling layers takes 7 s on an H200 the first time and about 3 s from disk, and saves 40 ms of a
# chunk of Wan 1.3B. A narrow model's chunk is launches, which a CUDA graph saves already.
COMPILED_CHUNKS, COMPILED_WIDTH = 75, 1024
# RoPE's angles, which some trainers save with the weights: Wan's name, and diffusers'
ROPE_TABLES = ("freqs", "rope.freqs", "rope.freqs_cos", "rope.freqs_sin")


class TextEncoder(Protocol):
    """A prompt's embedding, as a part that can be exchanged."""

    kind: str

    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        """The embedding [1, text_len, text_dim], zero after the prompt, and the prompt's length."""

    def write(self, folder: Path) -> None: ...


class Decoder(Protocol):
    """From latents to pictures, as a part that can be exchanged."""

    kind: str
    name: str  # for people

    def pixel_frames(self, latents: int) -> int:
        """Frames that so many latent ones from the video's start become."""

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        """Latents [1, C, F, h, w] of frames uint8 [F, H, W, 3], or of such `levels`.

        Raises where there is no way.
        """

    def skip(self, latents: Tensor, features: dict[str, Tensor]) -> None:
        """Take in latents that are not shown, where what follows depends on them."""

    def levels(self, latents: Tensor, features: dict[str, Tensor]) -> Tensor:
        """The frames before they are rounded: 0 to 255 as floats."""

    def __call__(self, latents: Tensor, features: dict[str, Tensor]) -> np.ndarray:
        """Frames uint8 [F, H, W, 3] of latents [1, C, F, h, w]; `features` lasts for a video."""

    def write(self, folder: Path) -> None: ...


# how a kind of part is read from a model's folder
TEXT_ENCODERS: dict[str, Callable[[Path, WanConfig], TextEncoder]] = {
    "bytes": BytesText.read,
    "words": Words.read,
    "umt5": UMT5.read,
    "prompt_file": PromptFile.read,
}
DECODERS: dict[str, Callable[..., Decoder]] = {
    "preview": Preview.read,
    "autoencoder": Pictures.read,
    "wan_vae": WanVae.read,
    "tiny_decoder": TinyDecoder.read,
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt: it fills no cache entries, so `lengths` is empty."""

    context: Tensor  # [1, text_len, text_dim]
    length: int  # tokens of it that are not padding
    lengths: tuple[int, ...] = ()


class Alone:
    """A session's pass that sees nothing of the past; what it enters is remembered as ever."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        session, tokens = self.session, q.shape[2]
        q = session.write_kv(layer, q, k, v)
        pairs = q.shape[:3].numel() * tokens
        session.meter.add("pairs", pairs)
        session.meter.add("macs", 2 * pairs * q.shape[3])
        now = slice(session.past, session.past + tokens)
        return F.scaled_dot_product_attention(q, session.layers[layer].k[:, :, now], v)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        return self.session.cross(layer, q)

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        return self.session.mlp(layer, x, fn)


class WanModel(VideoModel):
    """A Wan-type causal model as a rollout drives it."""

    model: WanCausal
    frame_dim = 2

    def __init__(
        self,
        name: str,
        model: WanCausal,
        text: TextEncoder | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self.name, self.model, self.text, self.decoder = name, model, text, decoder
        self.config = model.config
        self.device = model.patch_embedding.weight.device
        self.dtype = model.patch_embedding.weight.dtype
        if self.device.type == "cuda":
            model.fuse()
        self.kind, self.fps = self.config.kind, self.config.fps
        (high, wide), (_, down, across) = self.config.size, self.config.stride
        self.size = high * down, wide * across
        self.actions = self.config.actions
        self.stock = self.config.stock
        self.decodes_in_loop, self.restarts = self.config.reencode, self.config.restart > 0
        self.together = self.config.together
        self.draws = max(len(self.config.steps), len(self.config.first_steps or ()))
        self.schedule = schedule(self.config)

    def compiling_pays(self, chunks: int) -> bool:
        large = self.config.dim >= COMPILED_WIDTH
        return self.device.type == "cuda" and large and chunks >= COMPILED_CHUNKS

    def compile(self) -> Self:
        self.model.compile_layers()
        if isinstance(self.decoder, WanVae):
            self.decoder.compile_norms()
        elif isinstance(self.decoder, TinyDecoder):
            self.decoder.compile()
        return self

    @property
    def decoder_name(self) -> str:
        return self.decoder.name if self.decoder else ""

    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        c = self.config
        grain = (c.stride[1] * c.patch[1], c.stride[2] * c.patch[2])
        size = size or self.size
        if min(size) <= 0 or size[0] % grain[0] or size[1] % grain[1]:
            raise TachyscopeError(
                f"{self.name} makes frames of a height that {grain[0]} divides and a width that "
                f"{grain[1]} divides, got {size[0]}x{size[1]}: round it"
            )
        for name, side in zip(("height", "width"), size, strict=True):
            check(name, side, f"the {name} of a video", "take a smaller `size`")
        patch = c.in_channels * c.patch[1] * c.patch[2]
        shape = Shape(
            layers=c.layers,
            heads=c.heads,
            kv_heads=c.heads,
            head_dim=c.head_dim,
            width=c.dim,
            grid=(size[0] // grain[0], size[1] // grain[1]),
            chunk=c.chunk,
            rolling_frames=(len(c.steps) - 1) * c.chunk if c.rolling else 0,
            passes=len(c.levels) + 1,
            text=c.text_len,
            # six linears a layer, the patch embedding and the head
            macs=c.layers * 6 * c.dim**2 + 2 * patch * c.dim,
        )
        what, advice = f"tokens of a pass at {size[0]}x{size[1]}", "take a smaller `size`"
        check("tokens of a pass", shape.max_pass_tokens, what, advice)
        return shape

    def latent_size(self, shape: Shape, frames: int) -> tuple[int, ...]:
        _, high, wide = self.config.patch
        rows, columns = shape.grid
        return shape.batch, self.config.in_channels, frames, rows * high, columns * wide

    def rope(self, shape: Shape) -> Rope:
        side = 2 * (shape.head_dim // 6)
        return Rope(
            (
                (shape.head_dim - 2 * side, (1.0, 0.0, 0.0)),
                (side, (0.0, 1.0, 0.0)),
                (side, (0.0, 0.0, 1.0)),
            )
        )

    def pixel_frames(self, latents: int) -> int:
        return self._decoder().pixel_frames(latents)

    @torch.no_grad()
    def encode_prompt(self, prompt: str) -> Prompt:
        if self.text is None:
            raise TachyscopeError(
                f"{self.name} was loaded without a text encoder, which an empty prompt needs too: "
                f"put {wan_text.PUBLISHED} and google/umt5-xxl beside its weights, or give a "
                f"prompt file"
            )
        context, length = self.text(check_prompt(prompt))
        return Prompt(context.to(self.device), length)

    def prompt_key(self, prompt: str) -> str:
        if not isinstance(self.text, PromptFile):
            return super().prompt_key(prompt)
        # the file, not its name, is the prompt
        context, length = self.text(prompt)
        return digest(context[0, :length].float().numpy().tobytes())

    @torch.no_grad()
    def prefill_prompt(self, session: Session, prompt: Prompt) -> None:
        rows = session.shape.batch
        keys, values = self.model.keys_values(prompt.context.expand(rows, -1, -1))
        session.set_prompt_kv(keys, values, (prompt.length,) * rows)

    @torch.no_grad()
    def sample(self, session: Session, actions: Sequence[int] | Tensor) -> Tensor:
        c, told = self.config, self.actions_tensor(actions, self.config.chunk)
        if c.rolling:
            clean = self._roll(session)
        else:
            x = clean = self._noise(session, 0)
            # the first generated chunk is special, whether or not frames were given before it
            for i, step in enumerate((not session.made and c.first_steps) or c.steps):
                level = c.levels.index(step)
                if i:
                    x = noised(clean, self._noise(session, i), self.schedule[level][1])
                (clean,) = self._denoised(session, [x], [level], told)
        self._remember(session, self._context(session, clean), told)
        session.made += c.chunk
        return clean

    def _roll(self, session: Session) -> Tensor:
        """The first chunk of a window where each is a step further from noise than the next.

        Every pass denoises all of it, and finishes its first chunk; noise enters behind, as long as
        more is to come. At the start the window fills up, a chunk and a pass at a time.
        """
        c, steps = self.config, len(self.schedule)
        held = session.features.pop("window", None)
        window = [] if held is None else list(held.split(c.chunk, 2))
        # beyond what was said to be coming, there is always more
        known = (
            session.latent_frames if (session.latent_frames or 0) > session.latent_frame else None
        )
        clean: list[Tensor] = []
        # what waits in a window lacks its last step, and what is behind it one step more
        for step in range(steps - 1 if window else 0, steps):
            if not window or known is None or session.latent_frame + len(window) * c.chunk < known:
                window.append(self._noise(session, 0, len(window)))
            levels = [step - i for i in range(len(window))]
            clean = self._denoised(session, window, levels, None)
            window = [
                noised(x, self._noise(session, level + 1, i), self.schedule[level + 1][1])
                for i, (x, level) in enumerate(zip(clean, levels, strict=True))
                if level + 1 < steps
            ]
        if window:
            session.features["window"] = torch.cat(window, 2)
        return clean[0]

    @torch.no_grad()
    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        told = self.actions_tensor(actions, latents.shape[2])
        latents = latents.to(self.device)
        self._remember(session, self._context(session, latents), told)
        again = session.features.pop("shown", None) is not None
        if self.decoder is not None and not again and not shown:
            self.decoder.skip(latents, session.features)

    def decoder_state(self, session: Session) -> dict[str, Tensor]:
        return {name: x for name, x in session.features.items() if name not in ("window", "shown")}

    @torch.no_grad()
    def encode_frames(self, frames: np.ndarray) -> Tensor:
        self.shape((frames.shape[1], frames.shape[2]))  # raises where the size does not fit
        return self._decoder().encode(frames).to(self.device, wider(self.dtype))

    @torch.no_grad()
    def decode_latents(self, session: Session, latents: Tensor) -> np.ndarray:
        shown = session.features.pop("shown", None)
        if shown is not None:
            return shown.numpy()
        return self._decoder()(latents, session.features)

    def _context(self, session: Session, latents: Tensor) -> Tensor:
        """What a finished chunk is remembered as.

        Where the past is cut off there, its first latent frame is encoded again: from the last
        picture it was shown as, which is then the first of a video.
        """
        c, frames = self.config, latents.shape[2]
        end, before = (
            max(0, x - c.chunk) for x in (session.latent_frame + frames, session.latent_frame)
        )
        cut = c.alone
        if c.restart and end // (c.restart - c.chunk) > before // (c.restart - c.chunk):
            session.forget()
            cut = True
        if not (c.reencode and cut and session.latent_frame):
            return latents
        decoder = self._decoder()
        # as in the authors' code, what is encoded again was not rounded to 8 bits
        pictures = decoder.levels(latents, session.features)
        session.features["shown"] = pictures.round().to(torch.uint8).cpu()
        later = decoder.pixel_frames(session.latent_frame + frames) - decoder.pixel_frames(
            session.latent_frame + 1
        )
        last = len(pictures) - later
        try:
            again = decoder.encode(pictures[last - 1 : last])
        except TachyscopeError as fault:
            raise TachyscopeError(
                f"{self.name} encodes a frame again after showing it, and its decoder only shows: "
                f"load it with its VAE"
            ) from fault
        begun = torch.cat([again.to(latents), latents[:, :, 1:]], 2)
        if c.restart:
            # what follows is decoded as a video that begins there
            for name in self.decoder_state(session):
                if name != ERROR:
                    del session.features[name]
            decoder.skip(begun, session.features)
        return begun

    def _decoder(self) -> Decoder:
        if self.decoder is None:
            raise TachyscopeError(
                f"{self.name} was loaded without a decoder, got latents to show: put "
                f"{wan_vae.PUBLISHED} beside its weights, and pip install tachyscope[hf]"
            )
        return self.decoder

    def actions_tensor(self, actions: Sequence[int] | Tensor, frames: int) -> Tensor | None:
        # put on the device without waiting for it
        if not self.actions:
            if any(actions):
                raise TachyscopeError(
                    f"{self.name} takes no actions, got {list(actions)}: leave them out"
                )
            return None
        if isinstance(actions, Tensor) and len(actions) == frames:
            return actions
        if len(actions) != frames or not all(0 <= a < len(self.actions) for a in actions):
            raise TachyscopeError(
                f"{self.name} takes one action a latent frame, here {frames} from 0 to "
                f"{len(self.actions) - 1}, got {list(actions)}: give as many of these"
            )
        return torch.cat([torch.full((1,), a, device=self.device) for a in actions])

    def _noise(self, session: Session, draw: int, ahead: int = 0) -> Tensor:
        """A chunk's noise, the draw-th that it takes: as handed in, else drawn.

        The chunk is the one that is made, or so many ahead of it.
        """
        given = session.given_noise(draw, ahead)
        if given is None:
            return self._draw(session.shape, session.generator)
        return given.to(self.device, wider(self.dtype))

    def _draw(self, shape: Shape, generator: torch.Generator) -> Tensor:
        size = self.latent_size(shape, shape.chunk)
        # drawn in float32 whatever the model's dtype, so that dtypes can be compared
        drawn = torch.randn(size, generator=generator, dtype=torch.float32, device=self.device)
        return drawn.to(wider(self.dtype))

    def _denoised(
        self, session: Session, parts: list[Tensor], levels: list[int], told: Tensor | None
    ) -> list[Tensor]:
        """One pass over chunks, each at its own level of the schedule: their clean latents."""
        x, frames = torch.cat(parts, 2), parts[0].shape[2]
        sigmas = [self.schedule[level][1] for level in levels]
        self._begin(session, x, levels[0], *sigmas)
        fine: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        times = [torch.full((len(x), frames), self.schedule[level][0], **fine) for level in levels]
        said = self.model(session, x, torch.cat(times, 1), told).split(frames, 2)
        return [clean_from(self.config, *given) for given in zip(parts, said, sigmas, strict=True)]

    def _remember(self, session: Session, x: Tensor, told: Tensor | None) -> None:
        """The clean pass, for the keys and values that it leaves."""
        c, shape = self.config, session.shape
        pos = self._begin(session, x, len(self.schedule), 0.0)
        # of its last layer and the head: three linears, one more, and what attention would score
        unused = 3 * c.dim**2 + c.in_channels * c.patch[1] * c.patch[2] * c.dim
        session.meter.add("macs", -shape.batch * len(pos) * unused)
        scored = len(pos) * (session.total_entries + len(pos))
        if c.alone:
            # no model would read the past in this pass: only what stands beside it
            scored += (shape.layers - 1) * len(pos) * session.total_entries
        session.meter.add("pairs_dense", -shape.batch * shape.heads * scored)
        calls = Alone(session) if c.alone else session
        t = torch.zeros(len(x), x.shape[2], dtype=torch.float32, device=self.device)
        self.model.remember(calls, session.write_kv, x, t, told)

    def _begin(self, session: Session, x: Tensor, step: int, *sigmas: float) -> Tensor:
        """A pass over latents whose parts, as many as there are sigmas, are at these levels."""
        frames = x.shape[2]
        noise = tuple(sigma for sigma in sigmas for _ in range(frames // len(sigmas)))
        pos = session.positions(frames)
        session.begin(pos, step=step, steps=len(self.schedule) + 1, noise=noise)
        return pos


def load_wan(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: WanConfig | None = None,
    text: TextEncoder | None = None,
    decoder: Path | str | None = None,
    decoder_check: bool = False,
    lora: Path | str | None = None,
    lora_alpha: float | None = None,
    preset: str = "",
    entry: str = "",
) -> WanModel:
    """A model from a folder with config.json, or from one file, its shape given or inferred.

    A folder may be diffusers', of the transformer or of the pipeline around it. `text`, and the
    tiny decoder in the file `decoder`, go before the parts that the folder holds, and these before
    Wan's own as they are published, which may also lie beside a file. `decoder_check` has a tiny
    decoder's frames compared with the VAE's. `lora` is merged into the weights, by `lora_alpha`
    where the file does not tell its alpha.
    `preset` is the name of the model that `config` describes, `entry` the copy its authors run
    where a file holds several.
    """
    path, shown = Path(path), None
    if path.is_dir():
        folder = path / "transformer" if (path / "transformer").is_dir() else path
        if config is None:
            stated = folder / "config.json"
            config = WanConfig.from_json(read_json(stated), str(stated))
        index = folder / f"{WEIGHTS}.index.json"
        file = index if index.is_file() else folder / WEIGHTS
        text = text or _part(TEXT_ENCODERS, config.text_encoder, path, config)
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
    # no time goes into random weights that the file replaces
    with torch.device("meta"):
        model = WanCausal(config).cast(dtype)
    # a configuration may say anything: memory is taken once the file has borne it out
    matched(model, tensors, str(file))
    model = _placed(model, device, str(file))
    fit(model, tensors, str(file))
    check_finite(model, str(file))
    if lora is not None:
        merge_lora(model, tensors, Path(lora), lora_alpha)
    beside = path if path.is_dir() else path.parent
    if text is None and UMT5.found(beside):
        text = UMT5.read(beside, config)
    vae = None
    # latents can be made and timed without what shows them
    if WanVae.found(beside) and find_spec("diffusers"):
        vae = functools.partial(WanVae.read, beside, device=device, dtype=dtype)
    if decoder is not None:
        shown = TinyDecoder.read(decoder, config, device, dtype, vae, decoder_check)
    elif shown is None and vae is not None:
        shown = vae()
    name = preset or (path.resolve().name if path.is_dir() else path.stem)
    adapter = WanModel(name, model.eval(), text, shown)
    if adapter.decodes_in_loop and isinstance(shown, TinyDecoder):
        warn(
            f"{name} encodes its own pictures again, which a tiny decoder draws less exactly: "
            f"what it makes is then another video, not only shown otherwise"
        )
    for key, table in stored.items():
        _pass_over(key, table, adapter, str(file))
    return adapter


def save_wan(adapter: WanModel, path: Path | str) -> None:
    """Write a folder, or the weights alone: to .safetensors, or to a .pt as trainers do."""
    path = Path(path)
    tensors = adapter.model.state_dict()
    if path.suffix in SAFE:
        return write_tensors(path, tensors)
    if path.suffix in PICKLED:
        wrapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
        return write_tensors(path, wrapped, under="generator_ema")
    path.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(
        adapter.config,
        text_encoder=adapter.text.kind if adapter.text else "",
        decoder=adapter.decoder.kind if adapter.decoder else "",
    )
    write_json(path / "config.json", config.to_json())
    write_tensors(path / WEIGHTS, tensors)
    for part in (adapter.text, adapter.decoder):
        if part:
            part.write(path)


def random_wan(
    config: WanConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    name: str = "random",
) -> WanModel:
    """A model of random weights, scaled so that attention is sharp and nothing explodes."""
    with torch.device("meta"):
        model = WanCausal(config).cast(dtype)
    model = _placed(model, device, name)
    generator = torch.Generator(device).manual_seed(seed)
    for key, parameter in model.named_parameters():
        # always drawn in float32, so that every dtype rounds the same weights
        drawn = torch.randn(
            parameter.shape, generator=generator, dtype=torch.float32, device=device
        )
        if key.endswith("modulation"):
            drawn *= 0.1
            if key.startswith("blocks"):
                # gates near one let every layer speak
                drawn[:, 2::3] += 1
        elif "norm" in key and key.endswith("weight"):
            # logits of spread two: flat attention would hide what a policy leaves out
            drawn.fill_(2**0.5)
        elif key.endswith("bias"):
            drawn *= 0.1
        elif not key.startswith("action"):
            drawn *= drawn[0].numel() ** -0.5
        parameter.data.copy_(drawn)
    text, decoder = BytesText.seeded(config, seed), Preview.seeded(config, seed)
    return WanModel(name, model.eval(), text, decoder)


def toy_chunks(
    seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> WanModel:
    """A tiny random model that makes a video in a blink."""
    config = WanConfig(
        dim=96, ffn_dim=160, layers=3, heads=4, text_dim=24, text_len=64, actions=".wsadqe",
        size=(8, 12), stride=(1, 8, 8),
    )  # fmt: skip
    # drawn on the CPU, so that it is the same model on every device
    made = random_wan(config, seed, dtype=dtype)
    return WanModel("toy-chunks", made.model.to(device), made.text, made.decoder)


def _placed(model: WanCausal, device: torch.device | str, where: str) -> WanCausal:
    """A model of shapes alone, with memory for its weights."""
    size = sum(x.numel() * x.element_size() for x in model.parameters())
    limit = memory_of(torch.device(device))
    try:
        # the system may grant what it does not have
        if limit is not None and size > limit:
            raise MemoryError
        return model.to_empty(device=device)
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault):
            raise
        wide = model.patch_embedding.weight.dtype.itemsize > 2
        raise TachyscopeError(
            f"{where}: its weights take {size / 1e9:.1f} GB, more than the memory of {device} has "
            f"left: free some, or {'load it in bfloat16' if wide else 'take a smaller model'}"
        ) from None


def _pass_over(name: str, table: Tensor, model: WanModel, where: str) -> None:
    """Note that RoPE's angles in a file are not read; refuse them where the model has others."""
    if table.is_complex():
        # Wan's own: the place along an axis, then channels by twos, each axis its share of them
        rows = table.shape[0] if table.dim() else 0
        places = torch.arange(rows, dtype=torch.float64)[:, None].expand(-1, 3)
        cos, sin = model.rope(model.shape()).cos_sin(places, torch.float64)
        angles = torch.complex(cos[:, ::2], sin[:, 1::2])
        if table.shape != angles.shape or not torch.allclose(table.to(angles), angles, atol=1e-3):
            raise TachyscopeError(
                f"{where}: {name} must be the angles of a RoPE of 3 axes and theta 10000 over "
                f"{model.config.head_dim} channels, it has others: give a model of Wan's RoPE"
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
