"""How a code is drawn, and where what it is drawn from lies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """Classifier-free guidance, temperature, then of the top k those before the mass reaches top_p.

    Logits that are equal at the cut all stay. Rows are [conditional…, unconditional…] if guided.
    """

    guided: bool
    cfg: float
    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True, slots=True)
class Codes:
    """One of a token's D codes: numbers by the token's place, which is the device's own.

    codes  [V, N, D] int64    where it goes
    noise  [V, N, D, K]       exponential, as `Sampler.pick` takes it
    place  [] int32
    depth                     which of the D codes
    book   [K or more, dim]   entries, of which the drawn one is added to
    total  [B, dim]           the sum, which restarts at depth 0; a video's rows have the same
    """

    codes: Tensor
    noise: Tensor
    place: Tensor
    depth: int
    book: Tensor
    total: Tensor
