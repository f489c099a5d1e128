"""A Wan-type model's numbers, and the config.json that holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from tachyscope.errors import TachyscopeError

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
