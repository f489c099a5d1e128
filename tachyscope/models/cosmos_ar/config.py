"""The configuration of a Cosmos model; published files are recognised by their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import Bound
from tachyscope.models.config_schema import (
    EPS,
    FPS,
    HEADS,
    INNER,
    LAYERS,
    SIDE,
    THETA,
    WIDTH,
    Config,
    Tables,
    entry,
    written,
)
from tachyscope.models.token_model import Sampler

MODEL_TYPE = "cosmos_ar"


@dataclass(frozen=True, slots=True, kw_only=True)
class CosmosConfig(Config):
    """Sizes of the trunk and the video, and the sampling of codes.

    `yarn` is YaRN's factor over a training length of `trained` latent frames and rows; 1 is RoPE.
    """

    subject, section = "a Cosmos config's", ""

    hidden: int = entry(bound=WIDTH)
    intermediate: int = entry(bound=INNER)
    layers: int = entry(bound=LAYERS)
    heads: int = entry(bound=HEADS)
    kv_heads: int = entry(bound=HEADS)
    head_dim: int = entry(bound=Bound(6, 8_192))
    eps: float = entry(1e-5, EPS)
    theta: float = entry(500000.0, THETA)
    yarn: float = entry(1.0, Bound(1.0, 1e3))
    trained: tuple[int, int] = entry((3, 40), SIDE)
    grid: tuple[int, int] = entry((40, 64), SIDE)  # tokens of a latent frame: rows, columns
    # FSQ levels of a code
    levels: tuple[int, ...] = entry((8, 8, 8, 5, 5, 5), SIDE, length=Bound(1, 16))
    # pixel frames, rows and columns of a code
    stride: tuple[int, int, int] = entry((8, 16, 16), Bound(1, 64))
    fps: int = entry(25, FPS)
    sampler: Sampler = entry(Sampler(cfg=1.0, top_k=64000, top_p=0.8))

    def check_fields(self) -> None:
        heads = self.heads, self.kv_heads
        self.demand(heads[0] % heads[1] == 0, "heads must be a multiple of kv_heads", heads)
        self.demand(self.head_dim % 2 == 0, "head_dim must be even", self.head_dim)
        self.demand(not self.sampler.guided, "sampler must have a cfg of 1", self.sampler.cfg)

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
        """Channels of a head that rotate with time, row and column."""
        space = self.head_dim // 6 * 2
        time = self.head_dim - 2 * space
        return (time, (1.0, 0.0, 0.0)), (space, (0.0, 1.0, 0.0)), (space, (0.0, 0.0, 1.0))

    @property
    def speeds(self) -> tuple[float, ...]:
        """The rotary frequency of each pair of channels, with YaRN's change of the low ones."""
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
        """The configuration in a config.json of `to_json`."""
        tables = Tables(values, where)
        tables.must("model_type", MODEL_TYPE)
        tables.only(cls, also=["model_type"])
        tables.only(cls, "sampler")
        return cls(**tables.fields(cls))

    def to_json(self) -> dict[str, Any]:
        """The object of a config.json."""
        return {"model_type": MODEL_TYPE} | written(self)


PUBLISHED = {
    "Cosmos-Predict1-4B": CosmosConfig(
        hidden=4096, intermediate=14336, layers=16, heads=32, kv_heads=8, head_dim=128
    ),
    "Cosmos-Predict1-12B": CosmosConfig(
        hidden=5120, intermediate=14336, layers=40, heads=32, kv_heads=8, head_dim=128, yarn=2.0
    ),
}


def published(tensors: Mapping[str, Tensor], where: str) -> CosmosConfig:
    """The published model that a file's tensors belong to."""
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
