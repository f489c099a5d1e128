"""Compute the neurons that change most; remember, by place, what leaving out the others cost.

An MLP's output is the sum of its neurons'. A calibration has ranked them, and fitted an affine map
of the input to what those that are left out add together:

    y ≈ slice(x) + A x + b

Where an output is computed whole (given frames, the first one that is made, and once in `age` + 1
frames if that is asked for) what this is off by is kept with the input, and added at the same place
in later frames, the less the further the input has come from there:

    y = slice(x) + A x + b + exp(-beta |x - x_old|² / |x_old|²) · error

Without a memory it is `prune`. Nothing is chosen by data, so shapes are fixed: weights that are
left out are not read, on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import SHARE, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape
from tachyscope.replay import ReplayPolicy


class NeuronReplay(ReplayPolicy):
    """Computes a calibrated slice of every MLP.

    share: of all layers' neurons, left out. file: of `inspect --fit-neurons`; the model's own if
    none is named.
    """

    share: float
    file: str | None
    remembers: ClassVar[bool]

    @property
    def decides(self) -> bool:
        return self.turns  # a slice that is the same for every token needs no decision

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if not shape.token_by_token:
            raise TachyscopeError(
                f"this model makes no video token by token, got replay={self}: use "
                f"replay=attentive, random or every_k"
            )

    def whole(self, chunk: int, place: int) -> bool:
        """Whether a token's turn has come to be computed whole."""
        return False


@final
@dataclass(frozen=True)
class Neurons(NeuronReplay, name="neurons"):
    """Skip a `share` of the neurons; add the error that this last had at each position."""

    share: float = setting(
        0.75,
        "Share of the MLPs' neurons, those that change least, that are left out, from 0 to 1.",
        bound=SHARE,
    )
    age: int = setting(
        0,
        "Frames in a row that a place may go without its whole MLP; 0: no limit.",
        bound=Bound(0, 1_000_000),
    )
    file: str | None = setting(
        None,
        "A file of tachyscope inspect --fit-neurons; the one beside the model's weights if none is "
        "named.",
    )

    paper: ClassVar[str] = "this project"
    remembers: ClassVar[bool] = True

    @property
    def turns(self) -> bool:
        return self.age > 0

    def whole(self, chunk: int, place: int) -> bool:
        # neighbours have their turns in different frames, so that frames cost alike
        return self.age > 0 and (chunk + place) % (self.age + 1) == 0
