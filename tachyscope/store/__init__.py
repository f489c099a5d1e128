"""How the past is stored: in the model's dtype, or quantised to 8, 4 or 2 bits."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.policy import Policy
from tachyscope.core.types import Shape
from tachyscope.store.codec import Codec
from tachyscope.store.kv import KVStore, PerSlot, Tensors
from tachyscope.store.layer_pass import LayerPass

__all__ = ["Codec", "KVStore", "LayerPass", "PerSlot", "StorePolicy", "Tensors"]


class StorePolicy(Policy, question="store"):
    """Chooses how past keys and values are stored; the present chunk stays in the model's dtype."""

    whole_frames: ClassVar[bool] = False  # whether entries must be moved by whole latent frames
    for_banks: ClassVar[bool] = False  # whether resident blocks of a bank can be stored so

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if not self.whole_frames:
            return
        whole = {"cache": plan["cache"].whole_frames, "attention": not plan["attention"].reorders}
        for question, serves in whole.items():
            if not serves:
                raise TachyscopeError(
                    f"store={self} keeps groups of entries together, which "
                    f"{question}={plan[question]} would separate: use store=int4"
                )

    @abc.abstractmethod
    def codecs(self, shape: Shape, whole_frames: bool) -> dict[str, Codec]:
        """The codecs of k, v and unrotated, by name; none where they stay in the model's dtype.

        `whole_frames`: the entries of a latent frame stay together.
        """
