"""Choosing a fixed share of a pass's tokens, with a limit on how often an output is replayed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import PassContext
from tachyscope.replay import RowSelection


def tokens_to_compute(policy: str, share: float, age: int, tokens: int) -> int:
    """How many of `tokens` are computed at a share; raises if the age limit needs more."""
    if age and share > age / (age + 1):
        most = math.floor(1000 * age / (age + 1)) / 1000
        raise TachyscopeError(
            f"replay policy {policy!r}: share={share} cannot keep age={age}, which needs every "
            f"token computed once in {age + 1} frames: lower share to {most:g} or "
            f"raise age"
        )
    due = math.ceil(tokens / (age + 1)) if age else 0
    return max(due, tokens - round(share * tokens))


def tie_pairs(score: Tensor) -> Tensor:
    """Scores [B, S] with those of each guidance pair replaced by their mean."""
    pairs: Tensor = score.unflatten(0, (2, -1))
    return pairs.mean(0, keepdim=True).expand_as(pairs).flatten(0, 1)


def refresh_and_fill(
    urgency: Tensor, share: float, age: int, ctx: PassContext, policy: str
) -> RowSelection | None:
    """The tokens that the age limit asks for, then those of highest urgency [B, S]: a fixed number.

    With an age limit every token is computed once in age + 1 chunks, by its index: the limit holds
    for any scores, and every chunk costs the same.
    """
    tokens = urgency.shape[1]
    compute = tokens_to_compute(policy, share, age, tokens)
    if compute == tokens:
        return None
    if age:
        turn = torch.arange(tokens, device=urgency.device) % (age + 1) == ctx.chunk % (age + 1)
        urgency = urgency.masked_fill(turn, math.inf)
    return RowSelection(rows=urgency.topk(compute, -1, sorted=False).indices)
