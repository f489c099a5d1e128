"""Speculative decoding of token models: places are drafted, and several checked in one pass.

A code is drawn as argmax(logits - log noise), and a place's noise is known before its logits. So
what the dense model would draw at a drafted place is known as soon as the trunk has run over the
drafts before it: a draft is right where it equals that. The video is the dense model's own, code
for code, whatever the drafts are; good drafts make fewer passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from tachyscope.passes import PassPolicy
from tachyscope.settings import check_settings, setting
from tachyscope.types import Shape


@final
@dataclass(frozen=True)
class Draft(PassPolicy):
    """Check `places` drafted places of a frame in one pass (token models).

    Drafts are the last frame's codes. Where a pass refutes one, what it drew for the places behind
    serves as their next draft (Jacobi decoding): right but for what the refuted code changes.
    """

    paper: ClassVar[str] = "speculative decoding (2211.17192), coupled by the noise"
    places: int = setting(32, "Drafts checked in one pass; 0 drafts nothing.")
    source: Literal["codes", "logits", "row", "repeat"] = setting(
        "codes",
        "What drafts are: the last frame's codes, draws from its logits, the row above, a repeat.",
    )
    jacobi: bool = setting(True, "What a refuted pass drew for later places is their next draft.")

    def __post_init__(self) -> None:
        check_settings(self, "passes", "draft")

    def refusal(self, shape: Shape, replays: bool) -> str | None:
        if not shape.token_by_token:
            return "only token models can be drafted, this one makes whole chunks"
        if replays:
            return "drafts are several tokens in a pass, and replay decides token by token"
        return None

    def drafts(
        self, codes: Tensor, last: Tensor, drawn: Tensor, at: int, count: int, columns: int
    ) -> Tensor:
        """Drafts [V, count, D] of the places from `at` on.

        codes [V, N, D] are this frame's before `at`; last those of the last frame; drawn those
        that its logits give with this frame's noise.
        """
        if self.source in ("logits", "codes"):
            return (drawn if self.source == "logits" else last)[:, at : at + count]
        back = torch.arange(at, at + count, device=codes.device)
        if self.source == "repeat":
            back = torch.full_like(back, at - 1)
        else:
            # the row above, itself drafted where it is not yet there
            back = back - columns * ((back - at) // columns + 1)
        return codes[:, back.clamp(0, at - 1)]
