"""What stands around the decoder, in NumPy: a place's codes from a state, an input from its codes.

The depth transformer and the projector are exact integers too, of the decoder's own parts: int8
GEMVs with one rounding, RMSNorm after the mean is taken off, attention, and GELU by a table. Only
the draw of a code from its logits (temperature, top k, top p, noise) is in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tachyscope_fpga.decoder.model import Linear, eps_of
from tachyscope_fpga.parts.attention_unit import AttentionUnit
from tachyscope_fpga.parts.fixed import Ints, round_shift, saturate
from tachyscope_fpga.parts.rms_norm import RmsNorm
from tachyscope_fpga.parts.vector import FRACTION, WIDE, from_wide, to_int8, to_wide

Arrays = Mapping[str, ArrayLike]
Reals = NDArray[np.float64]
STEP_BITS, UNIT_BITS = 8, 15


def gelu(x: Ints) -> Ints:
    """x times the normal distribution up to x, from a table of 256 a unit up to 4."""
    at = (np.arange(1024) + 0.5) / (1 << STEP_BITS)
    table = [math.floor((1 + math.erf(a / math.sqrt(2))) * (1 << UNIT_BITS) / 2 + 0.5) for a in at]
    table[-1] = 1 << UNIT_BITS
    low = x < 0
    index = np.minimum((x ^ -low.astype(np.int64)) >> (FRACTION - STEP_BITS), 1023)
    part = np.array(table, np.int64)[index]
    return round_shift(x * np.where(low, (1 << UNIT_BITS) - part, part), UNIT_BITS)


@dataclass(frozen=True)
class Affine:
    """A Linear and a wide bias [N]."""

    linear: Linear
    bias: Ints

    @classmethod
    def of(
        cls, weight: ArrayLike, bias: ArrayLike, norm: tuple[Reals, Reals] | None = None
    ) -> Affine:
        """Of real weights [N, K], with the gain and the bias of a norm before them folded in."""
        w, b = np.asarray(weight, np.float64), np.asarray(bias, np.float64)
        if norm is not None:
            gain, shift = norm
            w, b = w * gain, b + w @ shift
        return cls(Linear.of(w), to_wide(b))

    def compute(self, x: Ints) -> Ints:
        return saturate(self.linear.compute(x) + self.bias, WIDE)


@dataclass(frozen=True)
class Sampler:
    """How a code is drawn: as the float model's sampler does, without guidance."""

    temperature: float
    top_k: int
    top_p: float

    def pick(self, logits: Reals, noise: Reals) -> int:
        """A code of logits [K], for exponential noise [K] that belongs to codes."""
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        kept = logits[order] / self.temperature
        weights = np.exp(kept - kept[0])
        before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
        kept = np.where((before >= self.top_p) & (np.arange(len(kept)) > 0), -np.inf, kept)
        return int(order[np.argmax(kept - np.log(noise[order]))])


class DepthModel:
    """A place's codes, one by one, from the decoder's state; and the next input from the codes.

    `arrays` are real numbers by the checkpoint's names, as the exporter writes them.
    """

    def __init__(self, arrays: Arrays, heads: int, sampler: Sampler) -> None:
        w = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
        self.sampler, self.heads = sampler, heads
        self.books = w["codebooks"]  # [D, K, dim]
        self.depth, self.codes, _ = self.books.shape
        self.first = Affine.of(w["in_mlp_2.weight"] * w["norm.weight"], w["in_mlp_2.bias"])
        self.more = to_wide(self.books @ w["in_mlp_1.weight"].T)  # [D, K, width]
        self.more_bias = to_wide(w["in_mlp_1.bias"])
        self.places = to_wide(w["pos_emb_d"])  # [D, width]
        width = self.places.shape[1]
        self.norm = RmsNorm(width, eps=eps_of(1e-5, width))
        self.attention = AttentionUnit(width // heads, 1, max(2, self.depth))
        count = sum(name.endswith("attn.proj.weight") for name in w)
        self.blocks = [self._block(w, f"blocks.{i}.") for i in range(count)]
        last = (w["classifier.layer_norm.weight"], w["classifier.layer_norm.bias"])
        self.classifier = Affine.of(
            w["classifier.linear.weight"], w["classifier.linear.bias"], last
        )
        self.words = to_wide(w["embed_tokens"])
        self.in_sums = to_wide(self.books @ w["projector.0.weight"].T)
        self.in_bias = to_wide(w["projector.0.bias"])
        self.projector = Affine.of(w["projector.2.weight"], w["projector.2.bias"])
        self.actions = to_wide(w["actions"])

    @staticmethod
    def _block(w: Mapping[str, Reals], name: str) -> dict[str, Affine]:
        def part(path: str, norm: str = "") -> Affine:
            folded = (w[f"{name}{norm}.weight"], w[f"{name}{norm}.bias"]) if norm else None
            return Affine.of(w[f"{name}{path}.weight"], w[f"{name}{path}.bias"], folded)

        return {
            **{key: part(f"attn.{key}", "ln1") for key in ("query", "key", "value")},
            "proj": part("attn.proj"),
            "up": part("mlp.0", "ln2"),
            "down": part("mlp.2"),
        }

    def centred(self, x: Ints) -> Ints:
        """LayerNorm less its gain and bias."""
        mean = (2 * x.sum(-1, keepdims=True) + x.shape[-1]) // (2 * x.shape[-1])
        return self.norm.compute(saturate(x - mean, WIDE))

    def logits(self, x: Ints, caches: list[list[tuple[Ints, Ints, Ints, Ints]]]) -> Ints:
        """The logits [K], wide, of the next position's input [width]."""
        for block, cache in zip(self.blocks, caches, strict=True):
            given = self.centred(x)
            q, k, v = (block[name].compute(given) for name in ("query", "key", "value"))
            cache.append((*to_int8(k), *to_int8(v)))
            q8, exponent = to_int8(q)
            x = saturate(x + block["proj"].compute(self._attend(q8, int(exponent), cache)), WIDE)
            x = saturate(
                x + block["down"].compute(gelu(block["up"].compute(self.centred(x)))), WIDE
            )
        return self.classifier.compute(self.centred(x))

    def _attend(self, q: Ints, exponent: int, cache: list[tuple[Ints, Ints, Ints, Ints]]) -> Ints:
        k, ke, v, ve = (np.stack(part) for part in zip(*cache, strict=True))
        outs = []
        for query, keys, values in zip(
            np.split(q, self.heads),
            np.split(k, self.heads, axis=1),
            np.split(v, self.heads, axis=1),
            strict=True,
        ):
            outs.append(self.attention.compute(query[None], exponent, keys, ke, values, ve)[0])
        return np.concatenate(outs)

    def generate(self, state: Ints, noise: ArrayLike) -> list[int]:
        """The codes [D] of a place, from the decoder's state [W] wide and noise [D, K]."""
        x = saturate(self.first.compute(state) + self.places[0], WIDE)
        caches: list[list[tuple[Ints, Ints, Ints, Ints]]] = [[] for _ in self.blocks]
        total, codes = self.more_bias, []
        for d, luck in enumerate(np.asarray(noise, np.float64)):
            logits = from_wide(self.logits(x, caches))
            codes.append(self.sampler.pick(logits, luck))
            if d + 1 < self.depth:
                total = total + self.more[d, codes[-1]]
                x = saturate(total + self.places[d + 1], WIDE)
        return codes

    def embed(self, codes: ArrayLike, action: int) -> Ints:
        """The decoder's input [W] wide of a place's codes [D] and its frame's action."""
        chosen = np.asarray(codes, np.int64)
        total = self.in_sums[np.arange(self.depth), chosen].sum(0) + self.in_bias
        return saturate(
            self.projector.compute(gelu(saturate(total, WIDE))) + self.actions[action], WIDE
        )
