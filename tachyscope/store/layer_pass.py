"""What a policy's hooks are given: a pass, in one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tachyscope.core.ranks import alone
from tachyscope.core.types import PassContext
from tachyscope.core.work import Work
from tachyscope.store.kv import KVStore, Rotate

# called with slots `source` that joined slots `root`, both [B, Hkv or 1, e]
OnMerge = Callable[[PassContext, Tensor, Tensor], None]


class LayerPass(NamedTuple):
    """A pass in one layer; a hook uses what it needs of it.

    A tuple, since every layer makes its own for every token.
    """

    ctx: PassContext
    layer: KVStore
    work: Work
    rotate: Rotate  # unrotated keys, by the session's RoPE
    rng: torch.Generator  # of policies' own draws
    # of what was made of this rank's heads, the mean over all ranks
    mean_heads: Callable[[Tensor], Tensor] = alone
    on_merge: OnMerge | None = None  # where observers listen

    def token(self, i: int) -> LayerPass:
        """The i-th token of a token model's pass, as if it came alone."""
        return self._replace(ctx=self.ctx.token(i))
