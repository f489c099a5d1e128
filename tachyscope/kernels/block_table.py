"""Which blocks of the past each tile of queries reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Listed(NamedTuple):
    """Past entries, so many to a block, and which blocks each tile of queries reads.

    k, v [B, Hkv, C, D] may be a cache itself: where the last block reaches beyond the past, or
    beyond C, its weights are minus infinity. log_count [B, Hkv, blocks * block] has rows of its own
    length. ids [B, H, tiles, most] name a tile's blocks, of which it reads the first `counts`
    [B, H, tiles]; both are int32.
    """

    k: Tensor
    v: Tensor
    log_count: Tensor
    ids: Tensor
    counts: Tensor
    tile: int
    block: int
