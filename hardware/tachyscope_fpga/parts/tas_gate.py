"""The TAS gate: may this token's MLP output be replayed from the frame before?

FastCar's Temporal Attention Score (arXiv 2505.14709) is the mean over heads of q . k / sqrt(head
dim), with q of this token and k of the token at the same place one frame earlier; a token replays
where it is above a threshold. The mean, the root and the int8 scales are one positive factor, so
they are folded into the threshold and the hardware compares integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import ArrayLike

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.fixed import (
    ACC_BITS,
    ACC_HIGH,
    ACC_LOW,
    MAX_DEPTH,
    check_choice,
    check_multiple,
    check_range,
    ints,
)
from tachyscope_fpga.parts.gemv import GemvArray

QUERIES = ("before_rope", "after_rope")


@dataclass(frozen=True)
class TasGate:
    """A gate over `heads` x `head_dim` int8 numbers, `macs` of them a cycle.

    Parameters
    ----------
    query : "before_rope" or "after_rope"
        Which query is scored against the key, which is always after RoPE. "before_rope" is what
        the authors' code does; "after_rope" makes the score an attention logit.
    """

    heads: int = 32
    head_dim: int = 128
    macs: int = 16
    query: str = "before_rope"

    def __post_init__(self) -> None:
        check_range("TasGate heads", self.heads, 1, 1024)
        check_range("TasGate head_dim", self.head_dim, 1, 1024)
        check_range("TasGate heads * head_dim", self.dim, 1, MAX_DEPTH)
        check_choice("TasGate query", self.query, QUERIES)
        check_multiple("TasGate heads * head_dim", self.dim, "macs", self.array.macs)

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def array(self) -> GemvArray:
        return GemvArray(lanes=1, macs=self.macs)

    @property
    def beats(self) -> int:
        return self.dim // self.macs

    @property
    def latency(self) -> int:
        """Cycles from a token's last beat to its verdict: the array's, and the comparison."""
        return self.array.latency + 1

    def threshold(self, tau: float, q_scale: float, k_scale: float) -> int:
        """The integer that the dot product must be above, for a TAS above `tau`.

        An integer is above a number where it is above its floor, so nothing is lost by folding.
        """
        if not (q_scale > 0 and k_scale > 0 and math.isfinite(tau)):
            raise TachyscopeError(
                f"scales must be above 0 and tau finite, got {q_scale}, {k_scale}, {tau}"
            )
        folded = math.floor(tau * self.heads * math.sqrt(self.head_dim) / (q_scale * k_scale))
        return int(np.clip(folded, ACC_LOW, ACC_HIGH))

    def compute(self, q: ArrayLike, q_rotated: ArrayLike, k: ArrayLike, threshold: int) -> bool:
        """True: replay. q before and after RoPE, and k after it, as flat vectors [dim]."""
        check_range("threshold", threshold, ACC_LOW, ACC_HIGH)
        chosen = ints(q if self.query == "before_rope" else q_rotated, "q")
        return int(chosen @ ints(k, "k")) > threshold

    def cycles(self, tokens: int) -> int:
        """One beat a cycle, and two cycles a token at least, then the latency."""
        return max(self.beats, 2) * (tokens - 1) + self.beats + self.latency

    def pack(self, q: ArrayLike, q_rotated: ArrayLike, k: ArrayLike) -> list[dict[str, object]]:
        """The beats of one token."""
        parts = [np.asarray(v).reshape(self.beats, self.macs).tolist() for v in (q, q_rotated, k)]
        return [
            dict(zip(("q", "q_rotated", "k"), beat, strict=True))
            for beat in zip(*parts, strict=True)
        ]

    def create(self) -> TasGateUnit:
        return TasGateUnit(self)


class TasGateUnit(wiring.Component):
    """A verdict for every `beats` beats; it can be taken `latency` cycles after the last.

    Members
    -------
    i : In(stream of {q, q_rotated, k: `macs` signed(8) each})
        Of q and q_rotated only the one that `query` names is used.
    threshold : In(stream of signed(32))
        One beat a token, taken with the verdict.
    o : Out(stream of 1 bit)
        True: the score is above the threshold.
    """

    def __init__(self, params: TasGate) -> None:
        self.params = params
        vector = data.ArrayLayout(signed(8), params.macs)
        beat = data.StructLayout({"q": vector, "q_rotated": vector, "k": vector})
        super().__init__(
            {
                "i": In(stream.Signature(beat)),
                "threshold": In(stream.Signature(signed(ACC_BITS))),
                "o": Out(stream.Signature(1)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        gate = self.params
        m.submodules.array = array = gate.array.create()
        left = Signal(range(gate.beats), init=gate.beats - 1)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += left.eq(left - 1)
            with m.If(left == 0):
                m.d.sync += left.eq(gate.beats - 1)
        query = self.i.p.q if gate.query == "before_rope" else self.i.p.q_rotated
        m.d.comb += [
            array.i.valid.eq(self.i.valid),
            self.i.ready.eq(array.i.ready),
            array.i.p.w[0].eq(query),
            array.i.p.x.eq(self.i.p.k),
            array.i.p.last.eq(left == 0),
            # the score, its threshold and the verdict are taken together
            array.o.ready.eq(self.o.valid & self.o.ready),
            self.threshold.ready.eq(self.o.valid & self.o.ready),
        ]
        m.d.sync += [
            self.o.payload.eq(array.o.p[0] > self.threshold.payload),
            self.o.valid.eq(Mux(self.o.valid, ~self.o.ready, array.o.valid & self.threshold.valid)),
        ]
        return m
