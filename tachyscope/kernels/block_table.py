"""Which blocks of the past each tile of queries reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BlockTable(NamedTuple):
    """Past entries, so many to a block, and which blocks each tile of queries reads.

    k, v [B, Hkv, C, D] may be a part of a cache, and are codes where they have scales. log_count
    [B, Hkv, blocks * block] has rows of its own length; where the last block reaches beyond C it is
    minus infinity. ids [B, H, tiles, most] name a tile's blocks, of which it reads the first
    `counts` [B, H, tiles]; both are int32, and an id behind those is -1.
    """

    k: Tensor
    v: Tensor
    log_count: Tensor
    ids: Tensor
    counts: Tensor
    tile: int
    block: int
    ragged: bool = False  # whether counts differ from `most`
    plain: bool = False  # whether every slot of every block holds one entry
    k_scale: Tensor | None = None  # of codes, [B, Hkv, C]
    v_scale: Tensor | None = None
