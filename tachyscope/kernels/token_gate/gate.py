"""What a replay policy says of single tokens, and what is remembered to decide about them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

MAX_TOKEN_COST = 4.0  # times the budget that one token may take of it
Score = Literal["rotated", "mixed", "input", "drawn", ""]
Rule = Literal["threshold", "share", "draw", "budget"]


@dataclass(frozen=True, slots=True)
class TokenGate:
    """How it is decided whether a token replays; the higher its score the sooner.

    score      the Temporal Attention Score of a "rotated" query, or with an unrotated one
               ("mixed", as in the authors' code); the relative change of the MLP's "input",
               negative; a number "drawn" from 0 to 1, one for a guidance pair; "": 0
    rule       and its number `limit`:
      threshold  the least score that replays
      share      of tokens that replay: those that rank so high among the last frame's worth
      draw       what a score must be below
      budget     the mean square of the scores of those that replay, over all tokens: each adds
                 it to what is left of it, at most a frame's worth, and who replays takes its own
    strict     a score must exceed the threshold
    tied       rows b and b + B/2 decide by their mean score
    age_limit  times in a row that a value may serve; 0: no limit
    """

    score: Score
    rule: Rule
    limit: float
    strict: bool = False
    tied: bool = False
    age_limit: int = 0

    def owed(self, places: int) -> tuple[float, float]:
        """What a token leaves owed to the share: one that is computed, and one that replays."""
        return self.limit / places, (self.limit - 1) / places


@dataclass(frozen=True, slots=True)
class GateState:
    """What deciding about a layer's tokens reads and writes: numbers of the device.

    limit   [] float32       the gate's, which may be another in every frame
    place   [] int32         the token's place in its frame
    ready   [] int32         0: nothing was kept yet, so that all is computed
    skip    [B] int32        what is decided: 1 replays
    counts  [2] int32        tokens skipped; tokens that replay beside one that is computed
    age     [B, N] int32     times in a row that the kept value has served
    luck    [N, B] float32   numbers drawn
    recent  [B, N] float32   by share: the last scores; NaN where there is none yet
    due     [B, 1] float32   by share: what is owed to it
    credit  [B, 1] float32   by budget: what is left of it
    key     [B, Hkv, N, D]   the last frame's rotated keys by place, where attention scores
    input   [B, N, W]        the inputs that made the kept outputs, where those are compared
    """

    gate: TokenGate
    limit: Tensor
    place: Tensor
    ready: Tensor
    skip: Tensor
    counts: Tensor
    age: Tensor
    luck: Tensor | None = None
    recent: Tensor | None = None
    due: Tensor | None = None
    credit: Tensor | None = None
    key: Tensor | None = None
    input: Tensor | None = None

    @classmethod
    def of(
        cls, gate: TokenGate, own: Mapping[str, Tensor], luck: Tensor | None = None,
        **shared: Tensor,
    ) -> GateState:  # fmt: skip
        """With what a layer keeps; `shared` are the tensors that it does not."""
        return cls(
            gate, **shared, luck=luck, age=own["age"][0], recent=own.get("recent_scores"),
            due=own.get("share_due"), credit=own.get("credit"),
            key=own["key"][0] if "key" in own else None,
            input=own["input"][0] if "input" in own else None,
        )  # fmt: skip


def gate_tensors(
    gate: TokenGate, rows: int, places: int, device: torch.device
) -> dict[str, Tensor]:
    """What a gate keeps beside a layer."""
    fine: dict[str, Any] = {"dtype": torch.float32, "device": device}
    if gate.rule == "share":
        # not a number: no token has scored there yet
        recent = torch.full((rows, places), math.nan, **fine)
        return {"recent_scores": recent, "share_due": torch.full((rows, 1), gate.limit, **fine)}
    return {"credit": torch.zeros(rows, 1, **fine)} if gate.rule == "budget" else {}
