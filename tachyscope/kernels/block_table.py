"""Which blocks of the past each tile of queries reads, and what reading them gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tachyscope.kernels.codes import decode
from tachyscope.kernels.device import DTYPE


class BlockTable(NamedTuple):
    """Past entries in blocks, and which blocks each tile of queries reads.

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
    plain: bool = False  # whether every slot of every block holds one entry
    k_scale: Tensor | None = None  # of codes, [B, Hkv, C]
    v_scale: Tensor | None = None

    def decoded(self) -> BlockTable:
        """With vectors in place of codes."""
        k, v = decode(self.k, self.k_scale, DTYPE), decode(self.v, self.v_scale, DTYPE)
        return self._replace(k=k, v=v)


class Read(NamedTuple):
    """An answer [B, H, S, D], and what it took."""

    out: Tensor
    pairs: int  # query-key pairs that were scored
    kept: tuple[Tensor, ...] = ()  # gathered entries, for a later call with the same table


def pairs_of(q: Tensor, k: Tensor, past: BlockTable) -> int:
    """The pairs that are scored of present entries k, and of the blocks that each tile lists."""
    return q.shape[:3].numel() * (k.shape[2] + past.ids.shape[3] * past.block)
