"""Find every new entry's most alike older one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tachyscope.kernels.dispatch import dispatch
from tachyscope.kernels.match import torch as stock
from tachyscope.kernels.match.torch import features

__all__ = ["best_older", "features", "measure"]


@dispatch
def best_older(
    vectors: Sequence[Tensor], first: int, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """For entries `first`… the most alike older one: cosine and index, both [B, G, m].

    Slots are ordered by age; an entry with none before it gets -inf and itself. How alike two
    entries are is the mean cosine of their vectors, each [B, H, n, D]: of one head (G = H), or of
    all heads where they are `shared` (G = 1).
    """
    return stock.best_older(features(vectors, shared), first)


@dispatch
def measure(
    vectors: Sequence[Tensor], partner: Tensor, alike: Tensor, shared: bool = False
) -> None:
    """Write to alike [B, G, m] how alike entries 0…m are to their partners [B, G, m].

    The first has none older, which is -inf.
    """
    stock.measure(features([x[:, :, : alike.shape[2]] for x in vectors], shared), partner, alike)
