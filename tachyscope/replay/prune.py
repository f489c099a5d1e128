"""The slice of `neurons` without its stored errors: a control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.core.limits import SHARE
from tachyscope.core.policy import setting
from tachyscope.replay.neurons import NeuronReplay


@final
@dataclass(frozen=True)
class Prune(NeuronReplay, name="prune"):
    """Replace a `share` of the neurons by an affine map of the input; a control."""

    share: float = setting(
        0.75,
        "Share of the MLPs' neurons, those that change least, that are left out, from 0 to 1.",
        bound=SHARE,
    )
    file: str | None = setting(
        None,
        "A calibration by tachyscope inspect --fit-neurons; by default the one beside the model's "
        "weights.",
    )

    remembers: ClassVar[bool] = False

    @property
    def work_varies(self) -> bool:
        return False
