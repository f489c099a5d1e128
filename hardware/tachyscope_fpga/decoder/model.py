"""A LLaMA-type decoder in exact integers, token by token: what the hardware must equal.

Integers: RMSNorm, int8 GEMVs with int32 accumulators, requantisation, RoPE, the int8 KV cache,
attention, SiLU * up, the residual stream, the TAS gate and the replay cache. Norms' gains are
folded into the weights that follow them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.attention_unit import AttentionUnit
from tachyscope_fpga.parts.fixed import (
    Ints,
    check_multiple,
    check_range,
    multiplier_and_shift,
    quantise,
    requantise,
    saturate,
)
from tachyscope_fpga.parts.rms_norm import RmsNorm
from tachyscope_fpga.parts.rope import Rope
from tachyscope_fpga.parts.silu_mul import SiluMul
from tachyscope_fpga.parts.vector import FRACTION, WIDE, to_int8

PARTS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder, and of the video that it writes."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens_per_frame: int
    context: int

    def __post_init__(self) -> None:
        check_range("decoder width", self.width, 4, 16384)
        check_range("decoder inner", self.inner, 4, 65536)
        check_range("decoder layers", self.layers, 1, 128)
        check_range("decoder heads", self.heads, 1, 256)
        check_range("decoder kv_heads", self.kv_heads, 1, 256)
        check_multiple("decoder heads", self.heads, "kv_heads", self.kv_heads)
        check_range("decoder head_dim", self.head_dim, 2, 256)
        check_range("decoder tokens_per_frame", self.tokens_per_frame, 1, 65536)
        check_range("decoder context", self.context, 2, 65536)

    @property
    def group(self) -> int:
        """Query heads to a key/value head."""
        return self.heads // self.kv_heads

    def sizes(self, part: str) -> tuple[int, int]:
        """(N, K) of a layer's matrix."""
        shared = self.head_dim * self.kv_heads
        return {
            "qkv": (self.head_dim * self.heads + 2 * shared, self.width),
            "o": (self.width, self.head_dim * self.heads),
            "gate_up": (2 * self.inner, self.width),
            "down": (self.width, self.inner),
        }[part]


@dataclass(frozen=True)
class Linear:
    """int8 weights [N, K], and a multiplier and a shift an output channel."""

    weight: Ints
    multiplier: Ints
    shift: Ints

    @classmethod
    def of(cls, weight: ArrayLike) -> Linear:
        """Of real weights [N, K]: inputs and outputs are wide numbers."""
        code, scale = quantise(weight)
        return cls(code, *multiplier_and_shift(scale[:, 0]))

    @cached_property
    def _doubles(self) -> NDArray[np.float64]:
        return self.weight.astype(np.float64)

    def compute(self, x: Ints) -> Ints:
        """x [K] wide -> [N] wide: int8 inputs, int32 sums, one rounding."""
        given, exponent = to_int8(x)
        # every sum is below 2**31, so that a product of doubles is exact, and fast
        acc = (self._doubles @ given.astype(np.float64)).astype(np.int64)
        return requantise(acc, self.multiplier, np.maximum(self.shift - exponent, 0), WIDE)


class Layer(NamedTuple):
    """A layer's matrices; the rows of qkv are q, k, v and q's and k's pairs lie side by side."""

    qkv: Linear
    o: Linear
    gate_up: Linear  # rows are gate, up, gate, up, ...
    down: Linear


def interleave(weight: ArrayLike, head_dim: int) -> NDArray[np.float64]:
    """Rows of q or k with each pair (i, i + half) of a head's channels side by side."""
    rows = np.asarray(weight, np.float64)
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def layer_of(weights: Mapping[str, ArrayLike], head_dim: int) -> Layer:
    """A layer of real matrices by LLaMA's names, the norms' gains folded in."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    before, after = w["input_layernorm"], w["post_attention_layernorm"]
    qkv = [interleave(w["q_proj"], head_dim), interleave(w["k_proj"], head_dim), w["v_proj"]]
    both = np.stack([w["gate_proj"], w["up_proj"]], 1).reshape(-1, len(after))
    return Layer(
        Linear.of(np.concatenate(qkv) * before),
        Linear.of(w["o_proj"]),
        Linear.of(both * after),
        Linear.of(w["down_proj"]),
    )


@dataclass(frozen=True)
class Token:
    """What a token asks of the decoder."""

    index: int  # in the KV cache; it is the token's position too
    place: int  # in its frame
    replay: bool  # whether the gate may decide: there is a frame before, and it is not given


class DecoderModel:
    """One row's decoder with its state: KV cache, replay cache.

    thresholds: the least TAS at which a layer's MLP is replayed, as `threshold_of` makes it.
    window: entries read beside the first `sink`, the token's own included; 0 reads all.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[Layer],
        rope: Rope,
        eps: float,
        thresholds: Sequence[int] = (),
        sink: int = 0,
        window: int = 0,
    ) -> None:
        self.shape, self.layers, self.rope = shape, tuple(layers), rope
        if len(self.layers) != shape.layers:
            raise TachyscopeError(
                f"the decoder has {shape.layers} layers, got weights of {len(self.layers)}"
            )
        self.thresholds = tuple(thresholds) or (2**47 - 1,) * shape.layers
        self.sink, self.window = sink, window
        self.norm = RmsNorm(shape.width, eps=eps_of(eps, shape.width))
        self.silu = SiluMul()
        self.attention = AttentionUnit(shape.head_dim, shape.group, shape.context)
        kv = (shape.layers, 2, shape.kv_heads, shape.context, shape.head_dim)
        self.kv = np.zeros(kv, np.int64)
        self.kv_exponents = np.zeros((shape.layers, 2, shape.context), np.int64)
        self.kept = np.zeros((shape.layers, shape.tokens_per_frame, shape.width), np.int64)
        self.valid = np.zeros((shape.layers, shape.tokens_per_frame), bool)
        self.scores = [0] * shape.layers  # the newest token's, in 2**-24

    def step(self, x: Ints, token: Token) -> tuple[Ints, list[bool]]:
        """The state [W] wide, normed, after a token's input x [W] wide; which layers replayed."""
        replayed = []
        for i, layer in enumerate(self.layers):
            x, tas_passed = self._attend(i, layer, x, token)
            replay = token.replay and tas_passed and bool(self.valid[i, token.place])
            if replay:
                y = self.kept[i, token.place]
            else:
                y = layer.down.compute(
                    self.silu.compute(layer.gate_up.compute(self.norm.compute(x)))
                )
            self.kept[i, token.place], self.valid[i, token.place] = y, True
            x = saturate(x + y, WIDE)
            replayed.append(replay)
        return self.norm.compute(x), replayed

    def _attend(self, i: int, layer: Layer, x: Ints, token: Token) -> tuple[Ints, bool]:
        shape, at = self.shape, token.index
        inner, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = layer.qkv.compute(self.norm.compute(x))
        q, k, v = np.split(qkv, [inner, inner + shared])
        q = self.rope.compute(q.reshape(-1, shape.head_dim), at)
        k = self.rope.compute(k.reshape(-1, shape.head_dim), at)
        for kind, new in enumerate((k.reshape(-1), v)):
            new8, self.kv_exponents[i, kind, at] = to_int8(new)
            self.kv[i, kind, :, at] = new8.reshape(-1, shape.head_dim)
        q8, exponent = to_int8(q.reshape(-1))
        heads = q8.reshape(shape.kv_heads, shape.group, shape.head_dim)
        outs = []
        read = self.entries(at)
        for g, queries in enumerate(heads):
            k8, v8 = (self.kv[i, kind, g, read] for kind in (0, 1))
            ek, ev = (self.kv_exponents[i, kind, read] for kind in (0, 1))
            outs.append(self.attention.compute(queries, int(exponent), k8, ek, v8, ev))
        y = layer.o.compute(np.stack(outs).reshape(-1))
        passed = token.replay and self._tas(i, heads, int(exponent), at - shape.tokens_per_frame)
        return saturate(x + y, WIDE), passed

    def entries(self, at: int) -> NDArray[np.int64]:
        """Indices of the entries that the token at `at` reads."""
        if not self.window or at + 1 <= self.sink + self.window:
            return np.arange(at + 1)
        return np.concatenate([np.arange(self.sink), np.arange(at + 1 - self.window, at + 1)])

    def _tas(self, i: int, heads: Ints, exponent: int, before: int) -> bool:
        """Whether the sum over heads of q . k of this place one frame back is above the threshold.

        The threshold is shifted by the exponents and not the sum: nothing is lost by that, since a
        sum is above a number where it is above its floor.
        """
        total = int(np.einsum("ghd,gd->", heads, self.kv[i, 0, :, before]))
        self.scores[i] = total << (exponent + int(self.kv_exponents[i, 0, before]))
        return self.scores[i] > self.thresholds[i]


def threshold_of(tas: float, shape: DecoderShape) -> int:
    """A TAS, the mean over heads of q . k / sqrt(head_dim), as the gate compares it."""
    return int(np.floor(tas * shape.heads * np.sqrt(shape.head_dim) * 2.0 ** (2 * FRACTION)))


def eps_of(eps: float, width: int) -> int:
    return max(1, round(eps * width * 2.0 ** (2 * FRACTION)))
