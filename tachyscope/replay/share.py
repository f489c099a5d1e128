"""A fixed share of a pass's tokens, with a limit on how long a value may serve."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tachyscope.errors import TachyscopeError
from tachyscope.replay import Choice
from tachyscope.types import PassContext, Shape


def tokens_to_compute(policy: str, share: float, age: int, tokens: int) -> int:
    """How many of `tokens` a share leaves to compute; raises where the age limit needs more."""
    if age and share > age / (age + 1):
        raise TachyscopeError(
            f"replay policy {policy!r}: share={share} cannot keep age={age}, which needs every "
            f"token computed once in {age + 1} frames: lower share to {age / (age + 1):.3g} or "
            f"raise age"
        )
    due = math.ceil(tokens / (age + 1)) if age else 0
    return max(due, tokens - round(share * tokens))


def refresh_and_fill(
    urgency: Tensor, share: float, age: int, ctx: PassContext, policy: str
) -> Choice | None:
    """The tokens whose turn it is, then those of highest urgency [B, S], a fixed number in all.

    With an age limit every token has its turn once in age + 1 chunks, by its index: the limit holds
    whatever the scores say, and no chunk costs more than another.
    """
    tokens = urgency.shape[1]
    compute = tokens_to_compute(policy, share, age, tokens)
    if compute == tokens:
        return None
    if age:
        turn = torch.arange(tokens, device=urgency.device) % (age + 1) == ctx.chunk % (age + 1)
        urgency = urgency.masked_fill(turn, math.inf)
    return Choice(rows=urgency.topk(compute, -1, sorted=False).indices)


def share_tensors(share: float, shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """What `nearest_share` keeps beside a layer of a token model."""
    if not shape.token_by_token:
        return {}
    fine: dict[str, Any] = {"dtype": torch.float32, "device": device}
    # not a number: no token has scored there yet
    recent = torch.full((shape.batch, shape.tokens_per_frame), math.nan, **fine)
    return {"recent_scores": recent, "share_due": torch.full((shape.batch, 1), share, **fine)}


def nearest_share(
    score: Tensor,
    share: float,
    own: dict[str, Tensor],
    ctx: PassContext,
    old: Tensor | None = None,
) -> Tensor:
    """Whether a token [B, 1] is computed: where its middle rank lies below the top `share` of the
    last frame's worth of scores, or where it is too `old`.

    Scores that rise or fall from frame to frame, and values that grow too old, would make that
    another share: what is owed to the share so far is made good over a frame.
    """
    ring, due = own["recent_scores"], own["share_due"]
    # not a number is not itself
    known = (ring == ring).sum(-1, keepdim=True, dtype=due.dtype)
    higher = (ring > score).sum(-1, keepdim=True, dtype=due.dtype)
    ring[:, ctx.start : ctx.start + 1] = score
    compute = higher + 0.5 >= due * (known + 1)
    if old is not None:
        compute = compute | old
    # a token that is computed leaves the share owed, one that is replayed the rest
    due.sub_((1 - share) / ctx.shape.tokens_per_frame).add_(
        compute, alpha=1 / ctx.shape.tokens_per_frame
    )
    return compute
