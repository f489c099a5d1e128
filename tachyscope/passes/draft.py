"""Speculative decoding of token models: several drafted tokens are verified in one pass.

A code is sampled as argmax(logits - log noise), with noise that is drawn before the logits are
known. So once the trunk has run over the drafts before a token, the code that the dense model would
sample there is known, and a draft is accepted if it equals that. The video is the dense model's,
code for code, whatever the drafts are; better drafts need fewer passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from tachyscope.core.features import Features
from tachyscope.core.limits import Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape
from tachyscope.passes import Drafter, DraftSession, PassPolicy


@final
@dataclass(frozen=True)
class Draft(PassPolicy, name="draft"):
    """Verify the drafts of `places` positions of a frame in one pass (token models).

    Drafts are the last frame's codes. When one is rejected, the codes that the pass sampled for the
    positions behind it are their next drafts (Jacobi decoding).
    """

    paper: ClassVar[str] = "speculative decoding (2211.17192), coupled by the noise"
    places: int = setting(
        32, "Drafts checked in one pass; 0 drafts nothing.", bound=Bound(0, 1_024)
    )
    source: Literal["codes", "logits", "row", "repeat"] = setting(
        "codes",
        "Source of drafts: the last frame's codes, samples of its logits, the row above, a repeat.",
    )
    jacobi: bool = setting(
        True, "After a rejection, draft later positions by what that pass sampled there."
    )

    @property
    def drafts_codes(self) -> bool:
        return self.source != "logits"

    def refusal(self, shape: Shape, replays: bool) -> str | None:
        if not shape.token_by_token:
            return "only token models can be drafted, this one makes whole chunks"
        if replays:
            return "drafts are several tokens in a pass, and replay decides token by token"
        return None

    def sample_frame(
        self, session: DraftSession, features: Features, drafter: Drafter, noise: Tensor
    ) -> Tensor:
        """Codes [V, N, D], those that the dense model draws with noise [V, N, D, K]."""
        videos, places, depth, _ = noise.shape
        columns = session.shape.grid[1]
        last, logits = features.codes, features.logits
        codes = torch.zeros(videos, places, depth, dtype=torch.int64, device=noise.device)
        guess = codes.clone()  # sampled by a pass behind a rejected draft
        guessed = 0  # positions before this one have a guess
        first = last if last is not None else codes  # a first frame has no good draft
        first = first if logits is None else drafter.pick(logits, noise)
        kept = torch.empty_like(noise) if self.source == "logits" else None

        def draw(states: Tensor, at: int) -> Tensor:
            here = slice(at, at + states.shape[1])
            return drafter.draw(states, noise[:, here], None if kept is None else kept[:, here])

        at = 0
        codes[:, :1] = draw(features.last_state()[:, None], 0)
        while True:
            left = places - 1 - at
            n = min(self.places, left)
            drafts = self.drafts(codes, first, at + 1, n, columns)
            if self.jacobi and guessed > at + 1:
                m = min(guessed - at - 1, n)
                drafts = torch.cat([guess[:, at + 1 : at + 1 + m], drafts[:, m:]], 1)
            states = drafter.feed(torch.cat([codes[:, at : at + 1], drafts], 1), at)
            session.work.drafts += videos * n
            if left == 0:
                features.hidden = states[:, 0]
                break
            ahead = min(n + 1, left)
            found = draw(states[:, :ahead], at + 1)
            right = (found[:, :n] == drafts).all(-1).all(0)  # one decision for all videos
            accepted = int(right.cumprod(0).sum())
            session.work.drafts_accepted += videos * accepted
            session.retract(n - accepted)
            new = min(accepted + 1, left)
            codes[:, at + 1 : at + 1 + new] = found[:, :new]
            guess[:, at + 1 : at + 1 + ahead], guessed = found, at + 1 + ahead
            if accepted == left:
                features.hidden = states[:, accepted]
                break
            at += new
        features.codes = codes
        if kept is not None:
            features.logits = kept
        return codes

    def keep_frame(self, features: Features, codes: Tensor, logits: Callable[[], Tensor]) -> None:
        features.codes = codes
        if self.source == "logits":
            features.logits = logits()

    def drafts(self, codes: Tensor, first: Tensor, at: int, count: int, columns: int) -> Tensor:
        """Drafts [V, count, D] of the positions from `at` on.

        codes [V, N, D] are this frame's before `at`; first [V, N, D] the last frame's codes, or
        those that its logits give with this frame's noise.
        """
        if self.source in ("logits", "codes"):
            return first[:, at : at + count]
        back = torch.arange(at, at + count, device=codes.device)
        if self.source == "repeat":
            back = torch.full_like(back, at - 1)
        else:
            # the row above; of positions whose row above is drafted too, the one above that
            back = back - columns * ((back - at) // columns + 1)
        return codes[:, back.clamp(0, at - 1)]
