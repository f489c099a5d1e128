"""What a token model is made of, as the engine takes it: stock modules by what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer; linears are nn.Linear or CodedLinear.

    LLaMA's has RMS norms and a gate (SiLU); without a gate the activation is the exact GELU.
    """

    attention_norm: nn.RMSNorm | nn.LayerNorm
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    mlp_norm: nn.RMSNorm | nn.LayerNorm
    gate: nn.Module | None
    up: nn.Module
    down: nn.Module


@dataclass(frozen=True, slots=True)
class DepthParts:
    """From the trunk's state to a token's D codes, one after the other.

    from_hidden  the first position's input; from_codes that of later ones, from the code sum
    positions    [D, E], added to inputs
    books        D tables of code entries
    """

    from_hidden: nn.Module
    from_codes: nn.Module
    positions: Tensor
    blocks: Sequence[LayerParts]
    heads: int
    norm: nn.LayerNorm
    classifier: nn.Module
    codes: int
    books: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """A token model: trunk, depth transformer, what turns codes into inputs, how codes are drawn.

    projector  two linears with a GELU between them, from a code sum to the trunk's input
    actions    [actions, W], added to a frame's inputs, or None
    """

    layers: Sequence[LayerParts]
    norm: nn.RMSNorm
    depth: DepthParts
    projector: tuple[nn.Module, nn.Module]
    actions: Tensor | None
    guided: bool
    cfg: float
    temperature: float
    top_k: int
    top_p: float
