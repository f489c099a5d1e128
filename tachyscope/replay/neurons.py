"""Compute the neurons that change most, and correct by the last error at each position.

An MLP's output is the sum of its neurons'. A calibration has ranked them, and fitted an affine map
of the input to the sum of those that are left out:

    y ≈ slice(x) + A x + b

Where the whole MLP is computed (given frames, the first generated one, and with `age` once in
`age` + 1 frames) the error of this is stored with the input. In later frames it is added at the
same place, scaled down with the distance of the input from the stored one:

    y = slice(x) + A x + b + exp(-beta |x - x_old|² / |x_old|²) · error

Without the error it is `prune`. Nothing is chosen by data, so shapes are fixed: weights that are
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

    share: the share of all layers' neurons that is left out. file: a calibration by `inspect
    --fit-neurons`, by default the model's own. remembers: whether errors are stored.
    """

    share: float
    file: str | None
    remembers: ClassVar[bool]

    @property
    def per_token(self) -> bool:
        return self.work_varies  # a slice that is the same for every token needs no decision

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if not shape.token_by_token:
            raise TachyscopeError(
                f"this model makes no video token by token, got replay={self}: use "
                f"replay=attentive:share=0.5, random or every_k"
            )

    def computes_all(self, chunk: int, place: int) -> bool:
        """Whether the whole MLP is computed for the token at a place of this chunk."""
        return False


@final
@dataclass(frozen=True)
class Neurons(NeuronReplay, name="neurons"):
    """Skip a `share` of the neurons, and add the last error of that at each position."""

    share: float = setting(
        0.75,
        "Share of the MLPs' neurons, those that change least, that are left out, from 0 to 1.",
        bound=SHARE,
    )
    age: int = setting(
        0,
        "How many frames in a row a position may be without its whole MLP; 0: no limit.",
        bound=Bound(0, 1_000_000),
    )
    file: str | None = setting(
        None,
        "A calibration by tachyscope inspect --fit-neurons; by default the one beside the model's "
        "weights.",
    )

    paper: ClassVar[str] = "this project"
    remembers: ClassVar[bool] = True

    @property
    def work_varies(self) -> bool:
        return self.age > 0

    def computes_all(self, chunk: int, place: int) -> bool:
        # neighbours are computed in different frames, so that all frames cost the same
        return self.age > 0 and (chunk + place) % (self.age + 1) == 0
