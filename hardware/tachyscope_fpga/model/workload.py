"""What is decoded on a board: a model's sizes, and which of its MLPs a real run replayed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tachyscope_fpga.errors import TachyscopeError

BLOCK = 2**18
"""Most bytes of one fetch: 8 KiB from each of 32 memory ports."""


@dataclass(frozen=True)
class Workload:
    """A decoder in int8, and what comes with each of its tokens."""

    name: str
    layers: int
    width: int
    kv_width: int
    """Of a token's keys, and of its values: smaller where query heads share them."""
    inner: int
    tokens_per_frame: int
    frames: int
    prompt: int
    """Tokens of the prompt, assumed."""
    depth_bytes: int
    """Weights read for one token by the depth transformer, all its codes."""
    depth_weights: int
    """Weights of the depth transformer that the memory holds."""
    sink: int = 4
    """First tokens that a window keeps."""

    @property
    def qkv(self) -> int:
        return self.width * (self.width + 2 * self.kv_width)

    @property
    def out(self) -> int:
        return self.width**2

    @property
    def mlp(self) -> int:
        return 3 * self.width * self.inner

    @property
    def weights(self) -> int:
        return self.layers * (self.qkv + self.out + self.mlp)

    @property
    def block(self) -> int:
        """Bytes of one fetch over all memory ports: no more than the smallest matrix has."""
        return min(BLOCK, 2 ** (self.out.bit_length() - 1))

    @property
    def steps(self) -> int:
        """Tokens that are decoded: the prompt's pass gives the first."""
        return self.frames * self.tokens_per_frame - 1

    def kv(self, context: int, window: int) -> int:
        """Bytes one layer reads and writes for one row: keys, values, the new pair of them.

        With a window also the key one frame back, which the gate needs.
        """
        kept = context if not window else min(context, self.sink + window)
        gate = self.kv_width if kept < context else 0
        return 2 * self.kv_width * (kept + 1) + gate


_E, _DEPTH = 2560, 4
WORKLOADS = {
    "vila-u-7b": Workload(
        name="vila-u-7b",
        layers=32,
        width=4096,
        kv_width=4096,
        inner=11008,
        tokens_per_frame=256,
        frames=8,
        prompt=60,
        # six layers of 12 E^2 and a classifier, once a code; its keys and values stay on chip
        depth_bytes=_DEPTH * (6 * 12 * _E**2 + _E * 16384),
        depth_weights=6 * 12 * _E**2 + _E * 16384,
    )
}


@dataclass(frozen=True)
class Trace:
    """A recorded run: its model, and `replayed` [tokens, layers, rows], true where an MLP was."""

    workload: Workload
    replayed: NDArray[np.bool_]

    def __post_init__(self) -> None:
        flags, layers = self.replayed, self.workload.layers
        if flags.dtype != np.bool_ or flags.ndim != 3 or not flags.size or flags.shape[1] != layers:
            raise TachyscopeError(
                f"a replay trace of {self.workload.name} must hold booleans "
                f"[tokens, {layers}, rows], got {flags.dtype} {list(flags.shape)}"
            )

    def save(self, path: Path) -> None:
        np.savez_compressed(
            path, workload=json.dumps(asdict(self.workload)), replayed=self.replayed
        )

    @classmethod
    def load(cls, path: Path) -> Trace:
        try:
            with np.load(path, allow_pickle=False) as file:
                workload = Workload(**json.loads(str(file["workload"])))
                replayed = file["replayed"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TachyscopeError(
                f"{path} is no replay trace: give a file of hardware/scripts/trace.py"
            ) from error
        return cls(workload, replayed)
