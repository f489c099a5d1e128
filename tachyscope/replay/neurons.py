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

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.replay import ReplayPolicy
from tachyscope.settings import check_settings, setting


class NeuronReplay(ReplayPolicy):
    """Computes a calibrated slice of every MLP.

    share: of all layers' neurons, left out. file: of `tachyscope calibrate`; the model's own if
    none is named.
    """

    share: float
    file: str | None
    remembers: ClassVar[bool]

    def whole(self, chunk: int, place: int) -> bool:
        """Whether a token's turn has come to be computed whole."""
        return False


@final
@dataclass(frozen=True)
class Neurons(NeuronReplay):
    """Leave out a `share` of the neurons; remember by place what that cost when last computed."""

    share: float = setting(
        0.75, "Share of the MLPs' neurons, those that change least, that are left out, from 0 to 1."
    )
    age: int = setting(0, "Frames in a row that a place may go without its whole MLP; 0: no limit.")
    file: str | None = setting(
        None, "A file of tachyscope calibrate; the one beside the model's weights if none is named."
    )

    paper: ClassVar[str] = "this project"
    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(self, "replay", "neurons")

    @property
    def turns(self) -> bool:
        return self.age > 0

    def whole(self, chunk: int, place: int) -> bool:
        # neighbours have their turns in different frames, so that frames cost alike
        return self.age > 0 and (chunk + place) % (self.age + 1) == 0
