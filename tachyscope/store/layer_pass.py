"""The argument of policies' hooks: a pass in one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tachyscope.core.ranks import alone
from tachyscope.core.types import PassContext
from tachyscope.core.work import Work
from tachyscope.store.kv import KVStore, Rotate

# called with slots `source` that were merged into slots `root`, both [B, Hkv or 1, e]
OnMerge = Callable[[PassContext, Tensor, Tensor], None]


class LayerPass(NamedTuple):
    """A pass in one layer. A tuple, since one is made for every layer and token."""

    ctx: PassContext
    layer: KVStore
    work: Work
    rotate: Rotate  # rotates keys by the session's RoPE
    rng: torch.Generator  # for policies' draws: the noise has its own
    mean_heads: Callable[[Tensor], Tensor] = alone  # the mean over ranks, of this rank's heads
    on_merge: OnMerge | None = None  # set where observers listen

    def token(self, i: int) -> LayerPass:
        """The pass of a token model's i-th token alone."""
        return self._replace(ctx=self.ctx.token(i))
