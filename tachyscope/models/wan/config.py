"""A Wan-type model's numbers, and the config.json that holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from tachyscope.bounds import WAN, bound_fault, demand, describe, has_type
from tachyscope.errors import TachyscopeError
from tachyscope.models.wan.context import Absolute, ContextRule, rule_from_json
from tachyscope.worlds.atrium import ACTIONS

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
# what diffusers' config.json calls otherwise, and what it may say only so
DIFFUSERS_NAMES = {"num_attention_heads": "num_heads", "in_channels": "in_dim",
                   "out_channels": "out_dim"}  # fmt: skip
DIFFUSERS_FIXED = {
    "qk_norm": "rms_norm_across_heads",
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
# flags of 0.1
RETIRED = ("rolling", "alone", "restart", "reencode", "together")


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
    camera: bool = False  # whether every token is told what Atrium's camera sees there
    steps: tuple[int, ...] = (1000, 750, 500, 250)
    first_steps: tuple[int, ...] = ()  # the first generated chunk's, where they are others
    warp: bool = True  # steps count along the schedule before its shift; else they are timesteps
    shift: float = 5.0
    prediction: str = "flow"  # noise - x0; or "x0"
    context: ContextRule = Absolute()  # what a finished chunk leaves for the next
    size: tuple[int, int] = (60, 104)  # latent rows and columns unless a size is asked for
    stride: tuple[int, int, int] = (4, 8, 8)  # pixel frames, rows, columns of a latent one
    fps: int = 16
    stock: str = "cache=window:budget=21f,sink=0 attention=dense text=dense replay=none"
    text_encoder: str = ""  # kinds of the parts saved beside the weights; "" for none
    decoder: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), field.default)
        for name, bound in WAN.items():
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            faults = [fault for x in numbers if (fault := bound_fault(bound, x))]
            _demand(not faults, f"{_called(name)} must be {''.join(faults[:1])}", describe(value))
        _demand(
            self.dim % (2 * self.heads) == 0 and self.head_dim >= 6,
            "dim / heads must be even and at least 6",
            f"{self.dim} / {self.heads}",
        )
        _demand(self.freq_dim % 2 == 0, "freq_dim must be even", self.freq_dim)
        _demand(self.patch[0] == 1, "patch must take latent frames one by one", self.patch)
        for name in ("steps", "first_steps"):
            steps = getattr(self, name)
            falls = all(a > b for a, b in zip(steps, steps[1:], strict=False))
            _demand(
                steps[0] <= 1000 and steps[-1] >= 0 and falls if steps else name != "steps",
                f"{name} must fall, from 1000 at most to 0 at least",
                steps,
            )
        _demand(
            self.prediction in ("flow", "x0"), "prediction must be 'flow' or 'x0'", self.prediction
        )
        if wrong := self.context.check(self):
            _demand(False, f"context {self.context.name} {wrong[0]}", wrong[1])
        _demand(
            len(set(self.actions)) == len(self.actions), "actions must differ", repr(self.actions)
        )
        _demand(
            not self.camera or (self.actions == ACTIONS and self.size[0] == self.size[1]),
            f"camera needs actions {ACTIONS!r} and a square size",
            f"{self.actions!r} and {self.size}",
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kind(self) -> str:
        """Which named plans are meant."""
        return self.context.kind

    @property
    def levels(self) -> tuple[int, ...]:
        """Every step that some chunk takes: a pass is known by its place among them."""
        return tuple(sorted({*self.steps, *self.first_steps}, reverse=True))

    @property
    def size_words(self) -> str:
        """What a checkpoint's shapes tell."""
        return f"{self.layers} layers of {self.dim} channels, MLPs of {self.ffn_dim}"

    def to_json(self) -> dict[str, Any]:
        """Wan's own names, and what Wan has no name for in "tachyscope"."""
        values = dataclasses.asdict(self)
        ours = {name: value for name, value in values.items() if name not in WAN_NAMES}
        ours["context"] = self.context.to_json()
        wan = {WAN_NAMES[name]: values[name] for name in WAN_NAMES}
        return {"model_type": "t2v", "out_dim": self.in_channels, **wan, "tachyscope": ours}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "config.json") -> Self:
        """The configuration in a config.json: Wan's own, diffusers', or one of ours."""
        wan = {name: given for name, given in value.items() if not name.startswith("_")}
        if "attention_head_dim" in wan:
            wan = _from_diffusers(wan, where)
        ours = wan.pop("tachyscope", {})
        if isinstance(ours, Mapping):
            # what a context rule says now was a flag each, and off says nothing
            ours = {name: x for name, x in ours.items() if name not in RETIRED or x}
        values: dict[str, Any] = {}
        out = wan.pop("out_dim", None)
        known = {theirs: field for field, theirs in WAN_NAMES.items()}
        for name, given in wan.items():
            if name in WAN_FIXED:
                _demand_fixed(where, name, given, WAN_FIXED[name])
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
        if "context" in values:
            try:
                values["context"] = rule_from_json(values["context"])
            except TachyscopeError as fault:
                raise TachyscopeError(f"{where}: {fault}") from None
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
        )  # fmt: skip


def _from_diffusers(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A diffusers transformer's config.json in Wan's words."""
    wan = dict(value)
    for name, fixed in DIFFUSERS_FIXED.items():
        _demand_fixed(where, name, wan.pop(name, fixed), fixed)
    wan.pop("rope_max_seq_len", None)  # rotation is computed, and has no longest video
    wide, heads = wan.pop("attention_head_dim"), wan.get("num_attention_heads")
    if type(wide) is not int or type(heads) is not int:
        raise TachyscopeError(
            f"{where}: num_attention_heads and attention_head_dim must be whole numbers, "
            f"got {heads!r} and {wide!r}: mend it or get it again"
        )
    return {DIFFUSERS_NAMES.get(name, name): given for name, given in wan.items()} | {
        "dim": heads * wide
    }


def _demand_fixed(where: str, name: str, given: Any, fixed: Any) -> None:
    if given != fixed:
        raise TachyscopeError(
            f"{where}: {name} must be {fixed!r}, got {given!r}: "
            f"give a text-to-video model of Wan's first form"
        )


def _check_type(name: str, value: Any, like: Any) -> None:
    """A value read from a file has the type of the default it replaces."""
    if isinstance(like, ContextRule):
        right, kind = isinstance(value, ContextRule), "a context rule"
    elif isinstance(like, tuple):
        right = isinstance(value, tuple) and all(type(v) is int for v in value)
        # only steps may be more or fewer
        steps = name in ("steps", "first_steps")
        right = right and (steps or len(value) == len(like))
        kind = "whole numbers" if steps else f"{len(like)} whole numbers"
    else:
        right, kind = has_type(value, type(like)), KINDS[type(like)]
    _demand(right, f"{_called(name)} must be {kind}", describe(value))


def _called(name: str) -> str:
    """A field's name, and that in Wan's config.json where it has another."""
    theirs = WAN_NAMES.get(name, name)
    return name if theirs == name else f"{name} ({theirs})"


def _demand(right: bool, rule: str, got: object) -> None:
    demand(right, "a Wan configuration's", rule, got)
