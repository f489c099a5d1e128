"""One frame of a token model with drafts: several places in one pass of the trunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tachyscope.models.vila_u.depth import Sampler
from tachyscope.passes.draft import Draft
from tachyscope.session import Session

# trunk states [B, S, W] of codes [V, S, D] fed from a place on
Feed = Callable[[Tensor, int], Tensor]
# codes [V, S, D] and guided logits [V, S, D, K] of the places from one on, for states [B, S, W]
Draw = Callable[[Tensor, int], tuple[Tensor, Tensor]]

LOGITS, CODES = "draft.logits", "draft.codes"  # of the last frame


def sample_drafted(
    policy: Draft, session: Session, sampler: Sampler, noise: Tensor, feed: Feed, draw: Draw
) -> Tensor:
    """Codes [V, N, D], those that the dense model draws with this noise [V, N, D, K]."""
    videos, places, depth, _ = noise.shape
    columns = session.shape.grid[1]
    last, logits = session.features.get(CODES), session.features.get(LOGITS)
    own = policy.source in ("row", "repeat")
    codes = torch.zeros(videos, places, depth, dtype=torch.int64, device=noise.device)
    kept = torch.empty_like(noise)
    guess = codes.clone()  # what a refuted pass drew
    guessed = 0  # places before this one have a guess
    first = last if last is not None else codes
    drawn = first if logits is None or policy.source != "logits" else sampler.pick(logits, noise)
    at = 0
    codes[:, :1], kept[:, :1] = draw(session.features["hidden"][:, None], 0)
    while True:
        # the first frame has none before it
        left = places - 1 - at
        n = min(policy.places, left) if own or last is not None else 0
        drafts = policy.drafts(codes, first, drawn, at + 1, n, columns)
        if policy.jacobi and guessed > at + 1:
            m = min(guessed - at - 1, n)
            drafts = torch.cat([guess[:, at + 1 : at + 1 + m], drafts[:, m:]], 1)
        states = feed(torch.cat([codes[:, at : at + 1], drafts], 1), at)
        session.meter.add("drafts", videos * n)
        if left == 0:
            session.features["hidden"] = states[:, 0]
            break
        ahead = min(n + 1, left)
        found, scores = draw(states[:, :ahead], at + 1)
        right = (found[:, :n] == drafts).all(-1).all(0)  # one decision for all videos
        accepted = int(right.cumprod(0).sum())
        session.meter.add("drafts_accepted", videos * accepted)
        session.retract(n - accepted)
        new = min(accepted + 1, left)
        codes[:, at + 1 : at + 1 + new] = found[:, :new]
        kept[:, at + 1 : at + 1 + new] = scores[:, :new]
        guess[:, at + 1 : at + 1 + ahead], guessed = found, at + 1 + ahead
        if accepted == left:
            session.features["hidden"] = states[:, accepted]
            break
        at += new
    session.features |= {CODES: codes, LOGITS: kept}
    return codes
