"""What a decode step's MLP is made of, and what is kept of it from frame to frame."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tachyscope.kernels.gemv.weights import Norm, Weight

COPIES = 32  # of a normed input: programs that share one all write the same into it


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """down · (silu(gate · norm(x)) * (up · norm(x))); without a gate, down · gelu(up · norm(x)).

    The last `linear` rows of up have neither gate nor activation: with down's last columns they are
    a map of low rank.
    """

    norm: Norm
    gate: Weight | None
    up: Weight
    down: Weight
    linear: int = 0

    @property
    def parts(self) -> tuple[Weight, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class Kept:
    """The last frame's outputs, and the device's word on which tokens take theirs again.

    skip    [B] int32     nonzero: replay
    place   [] int32      the token's place in its frame
    output  [B, N, W]     outputs by place
    age     [B, N] int32  how often in a row each was replayed
    drift   [B, W]        or None: the running mean, over `memory` tokens, of how computed outputs
                          differ from those they replace; what is replayed is moved by it
    ready   [] int32      0: nothing was kept yet, so that drift stays
    input   [B, N, W]     or None: where the inputs, normed, are kept too
    """

    skip: Tensor
    place: Tensor
    output: Tensor
    age: Tensor
    drift: Tensor | None = None
    ready: Tensor | None = None
    memory: float = 1.0
    input: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Error:
    """What an MLP was off by at each place when last known, which is added to its output.

    It fades with the distance of normed inputs, then and now: exp(-beta |x - old|² / |old|²).

    place  [] int32
    error  [B, N, W]
    input  [B, N, W]    normed inputs of then
    beta
    fade   [B] float32  scratch memory
    """

    place: Tensor
    error: Tensor
    input: Tensor
    beta: float
    fade: Tensor
