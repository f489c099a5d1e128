"""The same slice of neurons without a memory: what `neurons` must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.replay.neurons import NeuronReplay
from tachyscope.settings import check_settings, setting


@final
@dataclass(frozen=True)
class Prune(NeuronReplay):
    """Leave out a `share` of the neurons, an affine map of the input in their place; a control."""

    share: float = setting(
        0.75, "Share of the MLPs' neurons, those that change least, that are left out, from 0 to 1."
    )
    file: str | None = setting(
        None, "A file of tachyscope calibrate; the one beside the model's weights if none is named."
    )

    paper: ClassVar[str] = ""
    remembers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_settings(self, "replay", "prune")

    @property
    def turns(self) -> bool:
        return False
