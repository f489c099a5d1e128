"""Speculative decoding of token models: places are drafted, and several checked in one pass.

A code is drawn as argmax(logits - log noise), and a place's noise is known before its logits. So
what the dense model would draw at a drafted place is known as soon as the trunk has run over the
drafts before it: a draft is right where it equals that. The video is the dense model's own, code
for code, whatever the drafts are; good drafts make fewer passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from tachyscope.passes import Calls, PassPolicy
from tachyscope.settings import check_settings, setting
from tachyscope.types import Shape, TokenFrame

LOGITS, CODES = "draft.logits", "draft.codes"  # of the last frame


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

    @property
    def drafts_codes(self) -> bool:
        return self.source != "logits"

    def refusal(self, shape: Shape, replays: bool) -> str | None:
        if not shape.token_by_token:
            return "only token models can be drafted, this one makes whole chunks"
        if replays:
            return "drafts are several tokens in a pass, and replay decides token by token"
        return None

    def sample_frame(self, session: Calls, frame: TokenFrame) -> Tensor:
        """Codes [V, N, D], those that the dense model draws with the frame's noise."""
        noise = frame.noise
        videos, places, depth, _ = noise.shape
        columns = session.shape.grid[1]
        last, logits = session.features.get(CODES), session.features.get(LOGITS)
        codes = torch.zeros(videos, places, depth, dtype=torch.int64, device=noise.device)
        guess = codes.clone()  # what a refuted pass drew
        guessed = 0  # places before this one have a guess
        first = last if last is not None else codes  # any draft will do for a first frame
        first = first if logits is None else frame.pick(logits, noise)
        at = 0
        codes[:, :1], scores = frame.draw(session.features["hidden"][:, None], 0)
        kept = [scores]
        while True:
            left = places - 1 - at
            n = min(self.places, left)
            drafts = self.drafts(codes, first, at + 1, n, columns)
            if self.jacobi and guessed > at + 1:
                m = min(guessed - at - 1, n)
                drafts = torch.cat([guess[:, at + 1 : at + 1 + m], drafts[:, m:]], 1)
            states = frame.feed(torch.cat([codes[:, at : at + 1], drafts], 1), at)
            session.meter.add("drafts", videos * n)
            if left == 0:
                session.features["hidden"] = states[:, 0]
                break
            ahead = min(n + 1, left)
            found, scores = frame.draw(states[:, :ahead], at + 1)
            right = (found[:, :n] == drafts).all(-1).all(0)  # one decision for all videos
            accepted = int(right.cumprod(0).sum())
            session.meter.add("drafts_accepted", videos * accepted)
            session.retract(n - accepted)
            new = min(accepted + 1, left)
            codes[:, at + 1 : at + 1 + new] = found[:, :new]
            if self.source == "logits":
                kept.append(scores[:, :new])
            guess[:, at + 1 : at + 1 + ahead], guessed = found, at + 1 + ahead
            if accepted == left:
                session.features["hidden"] = states[:, accepted]
                break
            at += new
        self.keep_frame(session.features, codes, lambda: torch.cat(kept, 1))
        return codes

    def keep_frame(
        self, features: dict[str, Tensor], codes: Tensor, logits: Callable[[], Tensor]
    ) -> None:
        features[CODES] = codes
        if self.source == "logits":
            features[LOGITS] = logits()

    def drafts(self, codes: Tensor, first: Tensor, at: int, count: int, columns: int) -> Tensor:
        """Drafts [V, count, D] of the places from `at` on.

        codes [V, N, D] are this frame's before `at`; first what the last frame says of all of them:
        its codes, or those that its logits give with this frame's noise.
        """
        if self.source in ("logits", "codes"):
            return first[:, at : at + count]
        back = torch.arange(at, at + count, device=codes.device)
        if self.source == "repeat":
            back = torch.full_like(back, at - 1)
        else:
            # the row above, itself drafted where it is not yet there
            back = back - columns * ((back - at) // columns + 1)
        return codes[:, back.clamp(0, at - 1)]
