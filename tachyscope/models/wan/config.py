"""The configuration of a Wan-type model, and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import Bound
from tachyscope.models.atrium.world import ACTIONS as WALKER
from tachyscope.models.checkpoint import some
from tachyscope.models.config_schema import (
    ACTIONS,
    EPS,
    FPS,
    HEADS,
    INNER,
    LAYERS,
    SIDE,
    WIDTH,
    Config,
    Tables,
    entry,
    merge,
    put,
    written,
)
from tachyscope.models.wan.action_modules import LAYOUTS
from tachyscope.models.wan.context import Absolute, ContextRule, rule_from_json
from tachyscope.models.wan.key_camera import ACTIONS as KEYS

# other keys that a config.json may have, with the only value that is supported
FIXED = {
    "model_type": "t2v",
    "qk_norm": True,
    "cross_attn_norm": True,
    "window_size": [-1, -1],
}
# keys with other names in diffusers' config.json, and those with one supported value
DIFFUSERS_NAMES = {"num_attention_heads": "num_heads", "in_channels": "in_dim",
                   "out_channels": "out_dim"}  # fmt: skip
DIFFUSERS_FIXED = {
    "qk_norm": "rms_norm_across_heads",
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}
FIRST_FORM = "give a text-to-video model of Wan's first form"
# Wan 2.2 5B's latents: 16 x 16 pixels a position, so that 704 x 1280 are 44 x 80
CHANNELS_5B = 48
SIZE_5B: dict[str, Any] = {"stride": (4, 16, 16), "size": (44, 80)}
# flags of 0.1
RETIRED = ("rolling", "alone", "restart", "reencode", "together")
STEP = Bound(0, 1_000)
STEPS = Bound(0, 1_001)  # number of steps


@dataclass(frozen=True, slots=True)
class WanConfig(Config):
    """A Wan-type model's configuration; the defaults are Self-Forcing 1.3B."""

    subject, section = "a Wan configuration's", "tachyscope"

    dim: int = entry(1536, WIDTH, at="dim")
    ffn_dim: int = entry(8960, INNER, at="ffn_dim")
    layers: int = entry(30, LAYERS, at="num_layers")
    heads: int = entry(12, HEADS, at="num_heads")
    in_channels: int = entry(16, SIDE, at="in_dim")
    text_dim: int = entry(4096, Bound(1, 16_384), at="text_dim")
    text_len: int = entry(512, Bound(1, 4_096), at="text_len")
    freq_dim: int = entry(256, Bound(2, 8_192), at="freq_dim")
    eps: float = entry(1e-6, EPS, at="eps")
    patch: tuple[int, int, int] = entry((1, 2, 2), Bound(1, 64), at="patch_size")
    chunk: int = entry(3, Bound(1, 256))  # latent frames denoised together
    actions: str = entry("", ACTIONS)  # one letter an action; the first is "stay"
    # whether every token reads the ray of Atrium's camera
    camera: bool = entry(False)
    # how the network reads actions: an embedding each, rays of the camera that they move, an
    # adapter of pressed keys, or the action modules of a Matrix-Game 2
    control: Literal["table", "rays", "keys", "walk", "drive", "run"] = entry("table")
    reach: int = entry(0, Bound(0, 256))  # latent frames that action modules see
    # what a first image is: a frame of the past; extra channels of the latents (a mask and the
    # image's latents), as in Wan's image-to-video models; or the first latent frame of the first
    # chunk, clean in every pass
    image: Literal["frames", "channels", "held"] = entry("frames")
    steps: tuple[int, ...] = entry((1000, 750, 500, 250), STEP, length=STEPS)
    # steps of the first generated chunk, if they differ
    first_steps: tuple[int, ...] = entry((), STEP, length=STEPS)
    # whether steps are indices of the schedule before its shift, not timesteps
    warp: bool = entry(True)
    shift: float = entry(5.0, Bound(1e-6, 1e6))
    # the table of a thousand noise levels: UniPC's has integer timesteps
    levels_of: Literal["flow", "unipc"] = entry("flow")
    prediction: Literal["flow", "x0"] = entry("flow")  # flow: noise - x0
    # how a finished chunk is remembered
    context: ContextRule = entry(Absolute(), at="")
    # default latent rows and columns
    size: tuple[int, int] = entry((60, 104), Bound(1, 4_096))
    # pixel frames, rows and columns of a latent position
    stride: tuple[int, int, int] = entry((4, 8, 8), Bound(1, 64))
    fps: int = entry(16, FPS)
    stock: str = entry(
        "cache=window:budget=21f,sink=0 attention=dense text=dense replay=none", Bound(0, 1_000)
    )
    # kinds of the text encoder and decoder saved beside the weights; "" for none
    text_encoder: str = entry("", Bound(0, 100))
    decoder: str = entry("", Bound(0, 100))

    def check_fields(self) -> None:
        self.demand(
            self.dim % (2 * self.heads) == 0 and self.head_dim >= 6,
            "dim / heads must be even and at least 6",
            f"{self.dim} / {self.heads}",
        )
        self.demand(self.freq_dim % 2 == 0, "freq_dim must be even", self.freq_dim)
        self.demand(self.patch[0] == 1, "patch must take latent frames one by one", self.patch)
        for name in ("steps", "first_steps"):
            steps = getattr(self, name)
            falls = all(a > b for a, b in zip(steps, steps[1:], strict=False))
            self.demand(
                falls and bool(steps or name != "steps"),
                f"{name} must fall, from 1000 at most to 0 at least",
                steps,
            )
        if wrong := self.context.check(self):
            self.demand(False, f"context {self.context.name} {wrong[0]}", wrong[1])
        self.demand(
            len(set(self.actions)) == len(self.actions), "actions must differ", repr(self.actions)
        )
        known = LAYOUTS[self.control].actions if self.action_modules else KEYS
        self.demand(
            self.control == "table" or (self.actions == known and not self.camera),
            f"control {self.control} needs actions {known!r}, and no camera",
            f"{self.actions!r}, camera={self.camera}",
        )
        self.demand(
            self.reach >= self.chunk if self.action_modules else not self.reach,
            "reach is for controls walk, drive and run, and at least the chunk",
            self.reach,
        )
        self.demand(
            not self.camera or (self.actions == WALKER and self.size[0] == self.size[1]),
            f"camera needs actions {WALKER!r} and a square size",
            f"{self.actions!r} and {self.size}",
        )

    @property
    def condition_channels(self) -> int:
        """Extra input channels: a mask of a latent frame's pixel frames, and an image's latents."""
        return self.stride[0] + self.in_channels if self.image == "channels" else 0

    @property
    def action_modules(self) -> bool:
        """Whether layers read keys and mouse by modules, and cross-attention an image's tokens."""
        return self.control in LAYOUTS

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kind(self) -> str:
        """Selects the form of named plans."""
        return self.context.kind

    @property
    def levels(self) -> tuple[int, ...]:
        """All steps of all chunks, falling: a pass is known by its index here."""
        return tuple(sorted({*self.steps, *self.first_steps}, reverse=True))

    @property
    def size_words(self) -> str:
        """The sizes that a checkpoint's shapes show, in words."""
        return f"{self.layers} layers of {self.dim} channels, MLPs of {self.ffn_dim}"

    def to_json(self) -> dict[str, Any]:
        """The config.json: Wan's own names, and all else under "tachyscope"."""
        wan: dict[str, Any] = {"model_type": "t2v", "out_dim": self.in_channels, **written(self)}
        if extra := self.condition_channels:
            wan |= {"model_type": "i2v", "in_dim": self.in_channels + extra}
        return merge(wan, {"tachyscope": {"context": self.context.to_json()}})

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "config.json") -> Self:
        """The configuration in a config.json of Wan, of diffusers or of `to_json`."""
        wan = {name: given for name, given in value.items() if not name.startswith("_")}
        if "attention_head_dim" in wan:
            wan = _from_diffusers({**wan, "_class_name": value.get("_class_name", "")}, where)
        if isinstance(ours := wan.get("tachyscope"), Mapping):
            # flags of 0.1 that are now context rules; those that are off are ignored
            wan["tachyscope"] = {name: x for name, x in ours.items() if name not in RETIRED or x}
        read, made = wan.get("in_dim"), wan.get("out_dim")
        beside = type(read) is int and type(made) is int and read > made
        if beside and wan.get("model_type") != "i2v":
            beside = read == 2 * (made or 0) + 4
        if beside:
            wan |= {"in_dim": made, "model_type": "t2v"}
            put(wan, "tachyscope.image", "channels")
        tables = Tables(wan, where)
        advice = "remove it, or give the original Wan configuration"
        tables.only(cls, also=[*FIXED, "out_dim"], advice=advice)
        tables.only(cls, "tachyscope", ["context"])
        for name, fixed in FIXED.items():
            tables.must(name, fixed, None, advice=FIRST_FORM)
        values = tables.fields(cls)
        if values.get("in_channels") == CHANNELS_5B:
            values = SIZE_5B | values
        if (context := tables.at("tachyscope.context")) is not None:
            values["context"] = rule_from_json(context, tables)
        try:
            config = cls(**values)
        except TachyscopeError as fault:
            raise TachyscopeError(f"{where}: {fault}") from None
        if beside and read != config.in_channels + config.condition_channels:
            raise TachyscopeError(
                f"{where}: in_dim must be {config.in_channels + config.condition_channels}, a "
                f"picture's latents and their mask beside those made, got {read}: {FIRST_FORM}"
            )
        if wan.get("out_dim") not in (None, config.in_channels):
            raise TachyscopeError(
                f"{where}: out_dim must equal in_dim ({config.in_channels}), got "
                f"{wan['out_dim']!r}: give a model that predicts its own latents"
            )
        return config

    @classmethod
    def infer(cls, tensors: Mapping[str, Tensor], where: str) -> Self:
        """The configuration inferred from a file's shapes, with heads of 128 channels."""
        try:
            dim, read, deep, high, wide = tensors["patch_embedding.weight"].shape
            channels = tensors["head.head.weight"].shape[0] // (deep * high * wide)
            ffn = tensors["blocks.0.ffn.0.weight"].shape[0]
            first = ("text_embedding.0.weight", "img_emb.proj.1.weight")
            text = tensors[first[first[0] not in tensors]].shape[1]
            freq = tensors["time_embedding.0.weight"].shape[1]
        except (KeyError, IndexError, ValueError, ZeroDivisionError):
            raise TachyscopeError(
                f"{where} must hold a Wan model under its original names, "
                f"got {some(sorted(tensors)) or 'nothing'}: "
                f"give a checkpoint with Wan's own names or diffusers'"
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
            image="channels" if read > channels else "frames",
            **(SIZE_5B if channels == CHANNELS_5B else {}),
        )  # fmt: skip


def _from_diffusers(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A diffusers transformer's config.json with Wan's names."""
    wan = dict(value)
    kind = str(wan.pop("_class_name"))
    if kind and not kind.endswith("WanTransformer3DModel"):
        raise TachyscopeError(
            f"{where} is of a {kind}, which tachyscope does not run: give a checkpoint of a "
            f"WanTransformer3DModel, or of Wan's own names"
        )
    tables = Tables(value, where)
    for name, fixed in DIFFUSERS_FIXED.items():
        if name in wan:
            tables.must(name, fixed, advice=FIRST_FORM)
            del wan[name]
    wan.pop("rope_max_seq_len", None)  # RoPE is computed, for videos of any length
    wide, heads = wan.pop("attention_head_dim"), wan.get("num_attention_heads")
    if type(wide) is not int or type(heads) is not int:
        raise TachyscopeError(
            f"{where}: num_attention_heads and attention_head_dim must be whole numbers, "
            f"got {heads!r} and {wide!r}: mend it or get it again"
        )
    return {DIFFUSERS_NAMES.get(name, name): given for name, given in wan.items()} | {
        "dim": heads * wide
    }
