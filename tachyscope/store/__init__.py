"""How to store what is remembered: as the model computes it, or as codes of 8, 4 or 2 bits."""

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
    """Says how a past key or value is stored; the present chunk is as the model computes it."""

    whole_frames: ClassVar[bool] = False  # whether entries can be moved by latent frames alone
    for_banks: ClassVar[bool] = False  # whether a bank's resident blocks can be such codes

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if not self.whole_frames:
            return
        whole = {"cache": plan["cache"].whole_frames, "attention": not plan["attention"].reorders}
        for question, serves in whole.items():
            if not serves:
                raise TachyscopeError(
                    f"store={self} keeps groups of entries together, which "
                    f"{question}={plan[question]} would part: use store=int4"
                )

    @abc.abstractmethod
    def codecs(self, shape: Shape, whole_frames: bool) -> dict[str, Codec]:
        """By name, of k, v and unrotated; none where they are in the model's own dtype.

        `whole_frames`: a latent frame's entries stay together.
        """
