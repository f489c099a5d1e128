"""Wan-type causal video diffusion: the transformer under its published names, and its sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.adapters import Adapter
from tachyscope.adapters.checkpoint import (
    PICKLED,
    SAFE,
    fit,
    read_json,
    read_tensors,
    strip_prefixes,
    write_json,
    write_tensors,
)
from tachyscope.errors import TachyscopeError
from tachyscope.session import Session
from tachyscope.types import Mlp, Rope, Shape

T = TypeVar("T")

WEIGHTS = "diffusion_pytorch_model.safetensors"

# our field -> the name in Wan's config.json
WAN_NAMES = {
    "dim": "dim",
    "ffn_dim": "ffn_dim",
    "layers": "num_layers",
    "heads": "num_heads",
    "in_channels": "in_dim",
    "text_dim": "text_dim",
    "text_len": "text_len",
    "freq_dim": "freq_dim",
    "eps": "eps",
    "patch": "patch_size",
}
# what a config.json may also say, and must then say so
WAN_FIXED = {
    "model_type": "t2v",
    "qk_norm": True,
    "cross_attn_norm": True,
    "window_size": [-1, -1],
}


@dataclass(frozen=True, slots=True)
class WanConfig:
    """A Wan-type model's numbers; as they stand, those of Self-Forcing 1.3B."""

    dim: int = 1536
    ffn_dim: int = 8960
    layers: int = 30
    heads: int = 12
    in_channels: int = 16
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256
    eps: float = 1e-6
    patch: tuple[int, int, int] = (1, 2, 2)
    chunk: int = 3  # latent frames made together
    actions: str = ""  # one letter an action; the first is "stay"
    steps: tuple[int, ...] = (1000, 750, 500, 250)
    warp: bool = True  # steps count along the schedule before its shift; else they are timesteps
    shift: float = 5.0
    prediction: str = "flow"  # noise - x0; or "x0"
    size: tuple[int, int] = (60, 104)  # latent rows and columns unless a size is asked for
    stride: tuple[int, int, int] = (4, 8, 8)  # pixel frames, rows, columns of a latent one
    fps: int = 16
    stock: str = "cache=window:budget=21f,sink=0 attention=dense text=dense replay=none"
    text_encoder: str = ""  # kinds of the parts saved beside the weights; "" for none
    decoder: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), field.default)
        for name in ("dim", "ffn_dim", "layers", "heads", "in_channels", "text_dim", "text_len",
                     "freq_dim", "eps", "chunk", "shift", "fps"):  # fmt: skip
            _demand(getattr(self, name) > 0, f"{_called(name)} must be over 0", getattr(self, name))
        for name in ("patch", "size", "stride"):
            _demand(min(getattr(self, name)) > 0, f"{name} must be over 0", getattr(self, name))
        _demand(
            self.dim % (2 * self.heads) == 0 and self.head_dim >= 6,
            "dim / heads must be even and at least 6",
            f"{self.dim} / {self.heads}",
        )
        _demand(self.freq_dim % 2 == 0, "freq_dim must be even", self.freq_dim)
        _demand(self.patch[0] == 1, "patch must take latent frames one by one", self.patch)
        _demand(
            len(self.steps) > 0
            and self.steps[-1] >= 0
            and self.steps[0] <= 1000
            and all(a > b for a, b in zip(self.steps, self.steps[1:], strict=False)),
            "steps must fall, from 1000 at most to 0 at least",
            self.steps,
        )
        _demand(
            self.prediction in ("flow", "x0"), "prediction must be 'flow' or 'x0'", self.prediction
        )
        _demand(
            len(set(self.actions)) == len(self.actions), "actions must differ", repr(self.actions)
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def to_json(self) -> dict[str, Any]:
        """Wan's own names, and what Wan has no name for in "tachyscope"."""
        values = dataclasses.asdict(self)
        ours = {name: value for name, value in values.items() if name not in WAN_NAMES}
        wan = {WAN_NAMES[name]: values[name] for name in WAN_NAMES}
        return {"model_type": "t2v", "out_dim": self.in_channels, **wan, "tachyscope": ours}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "config.json") -> Self:
        """The configuration in a config.json, whether it is Wan's own or one of ours."""
        wan = {name: given for name, given in value.items() if not name.startswith("_")}
        ours = wan.pop("tachyscope", {})
        values: dict[str, Any] = {}
        out = wan.pop("out_dim", None)
        known = {theirs: field for field, theirs in WAN_NAMES.items()}
        for name, given in wan.items():
            if name in WAN_FIXED:
                if given != WAN_FIXED[name]:
                    raise TachyscopeError(
                        f"{where}: {name} must be {WAN_FIXED[name]!r}, got {given!r}: "
                        f"give a text-to-video model of Wan's first form"
                    )
                continue
            if name not in known:
                raise TachyscopeError(
                    f"{where} has an unknown {name!r}; it takes "
                    f"{', '.join((*known, *WAN_FIXED, 'out_dim'))}: "
                    f"remove it, or give the original Wan configuration"
                )
            values[known[name]] = given
        fields = {field.name for field in dataclasses.fields(cls)} - set(WAN_NAMES)
        if not isinstance(ours, Mapping) or not set(ours) <= fields:
            odd = sorted(set(ours) - fields) if isinstance(ours, Mapping) else ours
            raise TachyscopeError(
                f"{where}: 'tachyscope' takes {', '.join(sorted(fields))}, got {odd}: remove these"
            )
        values |= ours
        # JSON has no tuples
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        try:
            config = cls(**values)
        except TachyscopeError as fault:
            raise TachyscopeError(f"{where}: {fault}") from None
        if out not in (None, config.in_channels):
            raise TachyscopeError(
                f"{where}: out_dim must equal in_dim ({config.in_channels}), got {out!r}: "
                f"give a model that predicts its own latents"
            )
        return config

    @classmethod
    def infer(cls, tensors: Mapping[str, Tensor], where: str) -> Self:
        """The configuration that a published file's shapes tell, heads being 128 wide."""
        try:
            dim, channels, deep, high, wide = tensors["patch_embedding.weight"].shape
            ffn = tensors["blocks.0.ffn.0.weight"].shape[0]
            text = tensors["text_embedding.0.weight"].shape[1]
            freq = tensors["time_embedding.0.weight"].shape[1]
        except (KeyError, IndexError, ValueError):
            raise TachyscopeError(
                f"{where} must hold a Wan model under its original names, "
                f"got {', '.join(sorted(tensors)[:3]) or 'nothing'}: "
                f"give the original checkpoint, not a converted one"
            ) from None
        if dim % 128 or "action_embedding.weight" in tensors:
            raise TachyscopeError(
                f"{where} has {dim} channels and {len(tensors)} tensors, which do not tell its "
                f"heads and actions: give its configuration"
            )
        layers = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
        return cls(
            dim=dim, ffn_dim=ffn, layers=len(layers), heads=dim // 128, in_channels=channels,
            text_dim=text, freq_dim=freq, patch=(deep, high, wide),
        )  # fmt: skip


def _check_type(name: str, value: Any, like: Any) -> None:
    """A value read from a file has the type of the default it replaces."""
    if isinstance(like, tuple):
        right = isinstance(value, tuple) and all(type(v) is type(like[0]) for v in value)
        # only steps may be more or fewer
        right = right and (name == "steps" or len(value) == len(like))
        kind = f"{len(like)} whole numbers" if name != "steps" else "whole numbers"
    elif isinstance(like, float):
        right, kind = type(value) in (int, float), "a number"
    else:
        right = type(value) is type(like)
        kind = {int: "a whole number", bool: "true or false", str: "a text"}[type(like)]
    _demand(right, f"{_called(name)} must be {kind}", repr(value))


def _called(name: str) -> str:
    """A field's name, and that in Wan's config.json where it has another."""
    theirs = WAN_NAMES.get(name, name)
    return name if theirs == name else f"{name} ({theirs})"


def _demand(right: bool, rule: str, got: object) -> None:
    if not right:
        raise TachyscopeError(f"a Wan configuration's {rule}, got {got}: change it")


class Calls(Protocol):
    """What the transformer asks of a session, or of what stands in for one in training.

    q, k, v and results are [B, H, S, D]; q and k are normed and not yet rotated.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def cross(self, layer: int, q: Tensor) -> Tensor: ...
    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor: ...


class FeedForward(nn.Sequential):
    """down(gelu(up(x))), as a value that can be called, or opened by a kernel."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU("tanh"), nn.Linear(hidden, dim))
        self.macs = 2 * dim * hidden

    @property
    def up(self) -> nn.Linear:
        return cast(nn.Linear, self[0])

    @property
    def down(self) -> nn.Linear:
        return cast(nn.Linear, self[2])


class Attention(nn.Module):
    """Projections and norms around an attention that the session computes."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.o = nn.Linear(config.dim, config.dim)
        # over all heads together
        self.norm_q = nn.RMSNorm(config.dim, config.eps)
        self.norm_k = nn.RMSNorm(config.dim, config.eps)

    def query(self, x: Tensor) -> Tensor:
        return self.split(_rms(self.q(x), self.norm_q))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(_rms(self.k(x), self.norm_k)), self.split(self.v(x))

    def out(self, x: Tensor) -> Tensor:
        return self.o(x.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, S, D]


class Block(nn.Module):
    """One layer: self-attention and MLP modulated by each latent frame's time, the text between."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)
        self.self_attn = Attention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)
        self.cross_attn = Attention(config)
        self.ffn = FeedForward(config.dim, config.ffn_dim)
        self.eps = config.eps

    def forward(self, session: Calls, layer: int, x: Tensor, time: Tensor) -> Tensor:
        """x [B, S, W] after the layer; time [B, F, 6, W]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + time).unbind(2)
        a = _modulate(x, shift1, scale1, self.eps)
        q, (k, v) = self.self_attn.query(a), self.self_attn.key_value(a)
        x = _add(x, self.self_attn.out(session.attend(layer, q, k, v)), gate1)
        wide = _wider(x.dtype)
        a = F.layer_norm(
            x.to(wide), x.shape[-1:], self.norm3.weight.to(wide), self.norm3.bias.to(wide), self.eps
        ).to(x.dtype)
        x = x + self.cross_attn.out(session.cross(layer, self.cross_attn.query(a)))
        return _add(x, session.mlp(layer, _modulate(x, shift2, scale2, self.eps), self.ffn), gate2)


class Head(nn.Module):
    """From the stream to the prediction's patches, modulated by time."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)
        self.head = nn.Linear(config.dim, config.in_channels * config.patch[1] * config.patch[2])
        self.eps = config.eps

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.modulation + time[:, :, None]).unbind(2)
        return self.head(_modulate(x, shift, scale, self.eps))


class WanCausal(nn.Module):
    """Wan's transformer with attention, cross-attention and MLPs left to the session.

    Its parameters have the published names; `action_embedding.weight` is the one addition, and is
    there only where the configuration has actions.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        # holds the published weight; a stride equal to the kernel makes it a linear of patches
        self.patch_embedding = nn.Conv3d(config.in_channels, dim, config.patch, config.patch)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU("tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        if config.actions:
            self.action_embedding = nn.Embedding(len(config.actions), dim)
            # a model that gains actions starts as it was
            nn.init.zeros_(self.action_embedding.weight)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)

    def forward(
        self, session: Calls, latents: Tensor, t: Tensor, actions: Tensor | None = None
    ) -> Tensor:
        """The prediction [B, C, F, h, w] for latents at timesteps t [B, F], from 0 to 1000.

        actions [F] or [B, F] are indices; without them no action is told.
        """
        frames, rows = latents.shape[2], latents.shape[3] // self.config.patch[1]
        weight = self.patch_embedding.weight
        patches = self._patches(latents).to(weight.dtype)
        x = F.linear(patches, weight.flatten(1), self.patch_embedding.bias)
        time = _through(self.time_embedding, self._sinusoid(t))
        if actions is not None:
            time = time + self.action_embedding(actions)
        wide = _wider(x.dtype)
        six = _through(self.time_projection, time).unflatten(-1, (6, -1)).to(wide)
        for layer, block in enumerate(self.blocks):
            x = block(session, layer, x, six)
        y = self.head(x, time.to(wide)).unflatten(1, (frames, rows, -1))
        y = y.unflatten(-1, (*self.config.patch[1:], -1))  # [B, F, h', w', ph, pw, C]
        y = y.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4)
        return y.to(latents.dtype)

    def keys_values(self, context: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Each layer's keys and values [B, H, L, D] of a prompt embedded as [B, L, text_dim]."""
        text = _through(self.text_embedding, context)
        pairs = [block.cross_attn.key_value(text) for block in cast(list[Block], self.blocks)]
        return tuple(k for k, _ in pairs), tuple(v for _, v in pairs)

    def cast(self, dtype: torch.dtype) -> Self:
        """The model in dtype; small tensors whose rounding every token would feel stay finer."""
        fine = ("time_embedding", "action_embedding", "modulation", "norm3")
        for name, parameter in self.named_parameters():
            small = any(part in name for part in fine)
            parameter.data = parameter.data.to(_wider(dtype) if small else dtype)
        return self

    def _patches(self, latents: Tensor) -> Tensor:
        """Tokens [B, S, C · ph · pw] by frame, row, column."""
        _, high, wide = self.config.patch
        x = latents.unflatten(4, (-1, wide)).unflatten(3, (-1, high))  # [B, C, F, h', ph, w', pw]
        return x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)

    def _sinusoid(self, t: Tensor) -> Tensor:
        # in float64: at t = 1000 a float32 angle is off by 1e-4
        half = self.config.freq_dim // 2
        i = torch.arange(half, dtype=torch.float64, device=t.device)
        angle = t.double()[..., None] * 10000.0 ** (-i / half)
        return torch.cat([angle.cos(), angle.sin()], -1)


def _through(layers: nn.Sequential, x: Tensor) -> Tensor:
    """The layers' output, x being brought to their dtype."""
    return layers(x.to(next(layers.parameters()).dtype))


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rms(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    # under autocast x is narrower than the weight, for which torch has no fused norm
    return F.rms_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.eps)


def _modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """norm(x) · (1 + scale) + shift, for x [B, S, W] and one shift and scale a frame [B, F, W]."""
    normed = F.layer_norm(x.to(_wider(x.dtype)), x.shape[-1:], eps=eps)
    by_frame = normed.unflatten(1, (shift.shape[1], -1))
    moved = torch.addcmul(shift[:, :, None], by_frame, 1 + scale[:, :, None])
    return moved.flatten(1, 2).to(x.dtype)


def _add(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + y · gate, for x and y [B, S, W] and one gate a frame [B, F, W]."""
    x_, y_ = (z.to(_wider(x.dtype)).unflatten(1, (gate.shape[1], -1)) for z in (x, y))
    return torch.addcmul(x_, y_, gate[:, :, None]).flatten(1, 2).to(x.dtype)


def schedule(config: WanConfig) -> list[tuple[float, float]]:
    """Timestep and noise level of each denoising pass."""

    def shifted(s: float) -> float:
        return config.shift * s / (1 + (config.shift - 1) * s)

    # the thousand levels of training, which a level between them is rounded to
    levels = [shifted(n / 1000) for n in range(1, 1001)]
    found = []
    for step in config.steps:
        t = 1000 * shifted(step / 1000) if config.warp else float(step)
        found.append((t, min(levels, key=lambda level: abs(1000 * level - t))))
    return found


def clean_from(config: WanConfig, x: Tensor, prediction: Tensor, sigma: float) -> Tensor:
    """x0 from latents x at noise level sigma and what the model said of them."""
    if config.prediction == "x0":
        return prediction
    # float64 is slow on a GPU, and float32 is enough for four steps
    exact = _wider(x.dtype) if x.is_cuda else torch.float64
    return (x.to(exact) - sigma * prediction.to(exact)).to(x.dtype)


def noised(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Clean latents brought to noise level sigma."""
    return (1 - sigma) * clean + sigma * noise


class TextEncoder(Protocol):
    """A prompt's embedding, as a part that can be exchanged."""

    kind: str

    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        """The embedding [1, text_len, text_dim], zero after the prompt, and the prompt's length."""

    def write(self, folder: Path) -> None: ...


class Decoder(Protocol):
    """From latents to pictures, as a part that can be exchanged."""

    kind: str

    def frames(self, latents: int) -> int:
        """Frames that so many latent ones from the video's start become."""

    def __call__(self, latents: Tensor, features: dict[str, Tensor]) -> np.ndarray:
        """Frames uint8 [F, H, W, 3] of latents [1, C, F, h, w]; `features` lasts for a video."""

    def write(self, folder: Path) -> None: ...


class BytesText:
    """A prompt as its UTF-8 bytes, each a row of a table; the last row ends the prompt."""

    kind = "bytes"
    file = "text_encoder.safetensors"

    def __init__(self, table: Tensor, length: int) -> None:
        self.table, self.length = table, length  # [257, text_dim]

    @classmethod
    def seeded(cls, config: WanConfig, seed: int) -> Self:
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(257, config.text_dim, generator=generator), config.text_len)

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


class Preview:
    """A look at latents without a decoder: each place's colour is a linear map of its channels."""

    kind = "preview"
    file = "decoder.safetensors"

    def __init__(self, weight: Tensor, stride: tuple[int, int, int]) -> None:
        self.weight, self.stride = weight, stride  # [3, C]

    @classmethod
    def seeded(cls, config: WanConfig, seed: int) -> Self:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(3, config.in_channels, generator=generator)
        # latents of spread two then use most of the range and seldom leave it
        return cls(0.125 * weight / weight.norm(dim=1, keepdim=True), config.stride)

    @classmethod
    def read(cls, folder: Path, config: WanConfig) -> Self:
        holder = nn.ModuleDict({"preview": nn.Linear(config.in_channels, 3, bias=False)})
        fit(holder, read_tensors(folder / cls.file), str(folder / cls.file))
        return cls(holder.state_dict()["preview.weight"], config.stride)

    def write(self, folder: Path) -> None:
        write_tensors(folder / self.file, {"preview.weight": self.weight})

    def frames(self, latents: int) -> int:
        return latents

    def __call__(self, latents: Tensor, features: dict[str, Tensor]) -> np.ndarray:
        colour = torch.einsum("kc,cfhw->fhwk", self.weight.to(latents), latents[0]) + 0.5
        small = (255 * colour.clamp(0, 1)).round().to(torch.uint8).cpu().numpy()
        return small.repeat(self.stride[1], 1).repeat(self.stride[2], 2)


# how a kind of part is read from a model's folder
TEXT_ENCODERS: dict[str, Callable[[Path, WanConfig], TextEncoder]] = {"bytes": BytesText.read}
DECODERS: dict[str, Callable[[Path, WanConfig], Decoder]] = {"preview": Preview.read}


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt: it fills no cache entries, so `lengths` is empty."""

    context: Tensor  # [1, text_len, text_dim]
    length: int  # tokens of it that are not padding
    lengths: tuple[int, ...] = ()


class WanAdapter(Adapter):
    """A Wan-type causal model as a rollout drives it."""

    kind = "chunks"
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
        self.fps, self.actions = self.config.fps, self.config.actions
        self.stock = self.config.stock
        self.schedule = schedule(self.config)

    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        c = self.config
        grain = (c.stride[1] * c.patch[1], c.stride[2] * c.patch[2])
        size = size or (c.size[0] * c.stride[1], c.size[1] * c.stride[2])
        if min(size) <= 0 or size[0] % grain[0] or size[1] % grain[1]:
            raise TachyscopeError(
                f"{self.name} makes frames of a height that {grain[0]} divides and a width that "
                f"{grain[1]} divides, got {size[0]}x{size[1]}: round it"
            )
        patch = c.in_channels * c.patch[1] * c.patch[2]
        return Shape(
            layers=c.layers,
            heads=c.heads,
            kv_heads=c.heads,
            head_dim=c.head_dim,
            width=c.dim,
            grid=(size[0] // grain[0], size[1] // grain[1]),
            chunk=c.chunk,
            passes=len(c.steps) + 1,
            text=c.text_len,
            # six linears a layer, the patch embedding and the head
            macs=c.layers * 6 * c.dim**2 + 2 * patch * c.dim,
        )

    def rope(self, shape: Shape) -> Rope:
        side = 2 * (shape.head_dim // 6)
        return Rope(
            (
                (shape.head_dim - 2 * side, (1.0, 0.0, 0.0)),
                (side, (0.0, 1.0, 0.0)),
                (side, (0.0, 0.0, 1.0)),
            )
        )

    def frames(self, latents: int) -> int:
        return self._decoder().frames(latents)

    @torch.no_grad()
    def encode(self, prompt: str) -> Prompt:
        if self.text is None:
            raise TachyscopeError(
                f"{self.name} was loaded without a text encoder, got a prompt: load it with one"
            )
        context, length = self.text(prompt)
        return Prompt(context.to(self.device), length)

    @torch.no_grad()
    def start(self, session: Session, prompt: Prompt) -> None:
        rows = session.shape.rows
        keys, values = self.model.keys_values(prompt.context.expand(rows, -1, -1))
        session.give_text(keys, values, (prompt.length,) * rows)

    @torch.no_grad()
    def sample(self, session: Session, actions: Sequence[int]) -> Tensor:
        told = self._told(actions, self.config.chunk)
        x = self._noise(session)
        clean = x
        for i, (t, sigma) in enumerate(self.schedule):
            if i:
                x = noised(clean, self._noise(session), sigma)
            clean = clean_from(self.config, x, self._run(session, x, told, i, t, sigma), sigma)
        self._run(session, clean, told, len(self.schedule), 0.0, 0.0)
        return clean

    @torch.no_grad()
    def clean(self, session: Session, latents: Tensor, actions: Sequence[int]) -> None:
        told = self._told(actions, latents.shape[2])
        self._run(session, latents.to(self.device), told, len(self.schedule), 0.0, 0.0)

    @torch.no_grad()
    def decode(self, session: Session, latents: Tensor) -> np.ndarray:
        return self._decoder()(latents, session.features)

    def _decoder(self) -> Decoder:
        if self.decoder is None:
            raise TachyscopeError(
                f"{self.name} was loaded without a decoder, got latents to show: load it with one"
            )
        return self.decoder

    def _told(self, actions: Sequence[int], frames: int) -> Tensor | None:
        """Actions as the model takes them, put on the device without waiting for it."""
        if not self.actions:
            if any(actions):
                raise TachyscopeError(
                    f"{self.name} takes no actions, got {list(actions)}: leave them out"
                )
            return None
        if len(actions) != frames or not all(0 <= a < len(self.actions) for a in actions):
            raise TachyscopeError(
                f"{self.name} takes one action a latent frame, here {frames} from 0 to "
                f"{len(self.actions) - 1}, got {list(actions)}: give as many of these"
            )
        return torch.cat([torch.full((1,), a, device=self.device) for a in actions])

    def _noise(self, session: Session) -> Tensor:
        shape, (_, high, wide) = session.shape, self.config.patch
        size = (shape.rows, self.config.in_channels, shape.chunk)
        # drawn in float32 whatever the model's dtype, so that dtypes can be compared
        return torch.randn(
            *size, shape.grid[0] * high, shape.grid[1] * wide, generator=session.generator,
            device=self.device,
        ).to(_wider(self.dtype))  # fmt: skip

    def _run(
        self, session: Session, x: Tensor, told: Tensor | None, step: int, t: float, sigma: float
    ) -> Tensor:
        rows, _, frames = x.shape[:3]
        session.begin(
            session.shape.positions(session.frame, frames, self.device),
            step=step,
            steps=len(self.schedule) + 1,
            noise=(sigma,) * frames,
        )
        return self.model(session, x, torch.full((rows, frames), t, device=self.device), told)


def load_wan(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: WanConfig | None = None,
    text: TextEncoder | None = None,
    decoder: Decoder | None = None,
) -> WanAdapter:
    """A model from a folder with config.json, or from one file, its shape given or inferred.

    Parts given as `text` and `decoder` go before those that the folder holds.
    """
    path = Path(path)
    if path.is_dir():
        config = config or WanConfig.from_json(
            read_json(path / "config.json"), str(path / "config.json")
        )
        index = path / f"{WEIGHTS}.index.json"
        file = index if index.is_file() else path / WEIGHTS
        text = text or _part(TEXT_ENCODERS, config.text_encoder, path, config)
        decoder = decoder or _part(DECODERS, config.decoder, path, config)
    else:
        file = path
        if not file.is_file():
            raise TachyscopeError(
                f"no model at {path}: give a folder with config.json, or a checkpoint file"
            )
    tensors = strip_prefixes(read_tensors(file))
    config = config or WanConfig.infer(tensors, str(file))
    # no time goes into random weights that the file replaces
    with torch.device("meta"):
        model = WanCausal(config).cast(dtype)
    model = model.to_empty(device=device)
    fit(model, tensors, str(file))
    name = path.resolve().name if path.is_dir() else path.stem
    return WanAdapter(name, model.eval(), text, decoder)


def save_wan(adapter: WanAdapter, path: Path | str) -> None:
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
) -> WanAdapter:
    """A model of random weights, scaled so that attention is sharp and nothing explodes."""
    with torch.device("meta"):
        model = WanCausal(config).cast(dtype)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for key, parameter in model.named_parameters():
        # always drawn in float32, so that every dtype rounds the same weights
        drawn = torch.randn(parameter.shape, generator=generator, device=device)
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
    return WanAdapter(name, model.eval(), text, decoder)


def toy_chunks(
    seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> WanAdapter:
    """A tiny random model that makes a video in a blink."""
    config = WanConfig(
        dim=96, ffn_dim=160, layers=3, heads=4, text_dim=24, text_len=64, actions=".wsadqe",
        size=(8, 12), stride=(1, 8, 8),
    )  # fmt: skip
    # drawn on the CPU, so that it is the same model on every device
    made = random_wan(config, seed, dtype=dtype)
    return WanAdapter("toy-chunks", made.model.to(device), made.text, made.decoder)


def _part(
    kinds: Mapping[str, Callable[[Path, WanConfig], T]], kind: str, folder: Path, config: WanConfig
) -> T | None:
    if not kind:
        return None
    if kind not in kinds:
        raise TachyscopeError(
            f"{folder / 'config.json'} names a part {kind!r}; there are {', '.join(kinds)}: "
            f"give one of these"
        )
    return kinds[kind](folder, config)
