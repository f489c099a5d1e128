"""What attention of one token reads and writes: all numbers that change are the device's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tachyscope.kernels.token_gate import GateState

MAX_SPLITS = 16  # programs that share a head's entries, at most
MAX_SEVERAL_SPLITS = 8  # the same, where they do for several tokens


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of a frame's tokens, cos and sin [B, N, D], as `Rope.cos_sin` gives them."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Entries:
    """A layer's slots; the token goes to slot `slot`, and reads all before it and itself.

    k, v       [B, Hkv, C, D]
    slot       [] int32
    log_count  [B, Hkv or 1, C]  or None where every entry stands for itself
    unrotated  [B, Hkv, C, D]    or None
    """

    k: Tensor
    v: Tensor
    slot: Tensor
    log_count: Tensor | None = None
    unrotated: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Of the entries, the first `sink` behind a row's padding and the newest `near` are read.

    A row with no more entries than these reads all of them. padding [B] int32. `whole`: up to
    this many entries, the token's own counted, some row reads all.
    """

    sink: int
    near: int
    whole: int
    padding: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """A token's attention in one layer; `place` [] int32 is the token's place in its frame.

    Of several tokens in a row, place and slot are the first one's.
    """

    entries: Entries
    heads: int
    place: Tensor
    rotation: Rotation | None = None
    window: Window | None = None
    gate: GateState | None = None


class Scratch:
    """Memory that the kernel's programs share; one serves all layers of a model."""

    def __init__(
        self, rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device,
        tokens: int = 1,
    ):  # fmt: skip
        group = 1 << (heads // kv_heads - 1).bit_length()
        wide = max(16, 1 << (head_dim - 1).bit_length())
        most = rows * kv_heads * group * MAX_SPLITS
        if tokens > 1:
            most = rows * heads * MAX_SEVERAL_SPLITS * max(16, 1 << (tokens - 1).bit_length())
        self.parts = torch.zeros(most * (wide + 2), dtype=torch.float32, device=device)
        self.scores = torch.zeros(rows * kv_heads, dtype=torch.float32, device=device)
        # how many programs are done: of every row and head, and in the last place of all
        self.done = torch.zeros(rows * heads + 1, dtype=torch.int32, device=device)
