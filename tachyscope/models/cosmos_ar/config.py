"""The sizes of a Cosmos model; the published files are weights alone, so the published ones are
known by their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from tachyscope.bounds import COSMOS, bound_fault, demand, describe, has_type, within
from tachyscope.errors import TachyscopeError
from tachyscope.models.token_model import Sampler

MODEL_TYPE = "cosmos_ar"


@dataclass(frozen=True, slots=True, kw_only=True)
class CosmosConfig:
    """Sizes of the trunk, the video it writes, and how codes are drawn.

    `yarn` divides the slow speeds of rotation by itself, as for a model that was trained on
    `trained` latent frames and rows first; 1 leaves all as they are.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-5
    theta: float = 500000.0
    yarn: float = 1.0
    trained: tuple[int, int] = (3, 40)
    grid: tuple[int, int] = (40, 64)  # places of a latent frame: rows, columns
    levels: tuple[int, ...] = (8, 8, 8, 5, 5, 5)  # of a code's parts (FSQ)
    stride: tuple[int, int, int] = (8, 16, 16)  # frames, rows and columns of pixels a code
    fps: int = 25
    sampler: Sampler = field(default_factory=lambda: Sampler(cfg=1.0, top_k=64000, top_p=0.8))

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            numbers = value if isinstance(value, tuple) else (value,)
            for number in () if name == "sampler" else numbers:
                rule = bound_fault(COSMOS[name], number)
                _demand(rule is None, f"{name} must be {rule}", value)
        heads = self.heads, self.kv_heads
        _demand(heads[0] % heads[1] == 0, "heads must be a multiple of kv_heads", heads)
        _demand(self.head_dim % 2 == 0, "head_dim must be even", self.head_dim)
        _demand(not self.sampler.guided, "sampler must have a cfg of 1", self.sampler.cfg)

    @property
    def qk_norm(self) -> bool:
        return True

    @property
    def vocab(self) -> int:
        return math.prod(self.levels)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.grid[0] * self.stride[1], self.grid[1] * self.stride[2]

    @property
    def axes(self) -> tuple[tuple[int, tuple[float, float, float]], ...]:
        """Channels of a head that turn with time, row and column."""
        space = self.head_dim // 6 * 2
        time = self.head_dim - 2 * space
        return (time, (1.0, 0.0, 0.0)), (space, (0.0, 1.0, 0.0)), (space, (0.0, 0.0, 1.0))

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of every pair of channels; those that turn often in the trained length stay."""
        values = []
        rows, frames = self.trained[1], self.trained[0]
        # columns are scaled as rows are, as the authors' code has it
        for (channels, _), length in zip(self.axes, (frames, rows, rows), strict=True):
            slow, fast = (2 * math.pi * turns / length for turns in (1, 4))
            for i in range(0, channels, 2):
                speed = self.theta ** (-i / channels)
                kept = min(max((speed - slow) / (fast - slow), 0.0), 1.0)
                values.append(speed * ((1 - kept) / self.yarn + kept))
        return tuple(values)

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> CosmosConfig:
        """From the object of a config.json that `to_json` wrote."""
        kinds = {f.name: str(f.type) for f in fields(cls)}
        given = {name: value for name, value in values.items() if name != "model_type"}

        def refuse(name: str, rule: str) -> None:
            raise TachyscopeError(
                f"{where}: {name} must be {rule}, got {describe(values.get(name))}: mend it"
            )

        if values.get("model_type") != MODEL_TYPE:
            refuse("model_type", repr(MODEL_TYPE))
        for name, value in given.items():
            if name not in kinds:
                refuse(name, f"absent: the keys are {', '.join(kinds)}")
            if name == "sampler":
                right = isinstance(value, dict) and all(
                    key in ("temperature", "top_k", "top_p") and within(COSMOS[key], number)
                    for key, number in value.items()
                )
                if not right:
                    refuse(name, "an object of temperature, top_k and top_p")
                given[name] = Sampler(cfg=1.0, **value)
            elif kinds[name].startswith("tuple"):
                count = None if "..." in kinds[name] else kinds[name].count("int")
                if not isinstance(value, list) or not all(has_type(x, int) for x in value):
                    refuse(name, "a list of whole numbers")
                if not 1 <= len(value) <= 16 or count not in (None, len(value)):
                    refuse(name, f"a list of {count or '1 to 16'} numbers")
                given[name] = tuple(value)
            elif not has_type(value, {"int": int, "float": float}[kinds[name]]):
                refuse(name, f"of type {kinds[name]}")
        lacking = [f.name for f in fields(cls) if f.name not in given and f.name in REQUIRED]
        if lacking:
            refuse(lacking[0], "given")
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """What a config.json holds."""
        fields = asdict(self)
        del fields["sampler"]["cfg"]
        return {"model_type": MODEL_TYPE} | fields


def _demand(right: bool, rule: str, got: object) -> None:
    demand(right, "a Cosmos config's", rule, repr(got))


REQUIRED = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")

PUBLISHED = {
    "Cosmos-Predict1-4B": CosmosConfig(
        hidden=4096, intermediate=14336, layers=16, heads=32, kv_heads=8, head_dim=128
    ),
    "Cosmos-Predict1-12B": CosmosConfig(
        hidden=5120, intermediate=14336, layers=40, heads=32, kv_heads=8, head_dim=128, yarn=2.0
    ),
}


def published(tensors: Mapping[str, Tensor], where: str) -> CosmosConfig:
    """The published model whose tensors these are."""
    table = tensors.get("model.embed_tokens.weight")
    layers = len([name for name in tensors if name.endswith("self_attn.q_proj.weight")])
    width = table.shape[-1] if table is not None and table.dim() == 2 else 0
    for config in PUBLISHED.values():
        if (layers, width) == (config.layers, config.hidden):
            return config
    known = ", ".join(f"{name} {c.layers} of {c.hidden}" for name, c in PUBLISHED.items())
    raise TachyscopeError(
        f"{where} must hold a published model ({known}), it has {layers} layers of {width}: "
        f"put a config.json beside it that tells its sizes, and give the folder"
    )
