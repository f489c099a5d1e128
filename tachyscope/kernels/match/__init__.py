"""Find every new entry's most alike older one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON, reads_keys
from tachyscope.kernels.match import torch as torch_backend
from tachyscope.kernels.match.torch import features

if HAS_TRITON:
    from tachyscope.kernels.match import triton as triton_backend

__all__ = ["best_older", "features", "measure"]


def best_older(
    vectors: Sequence[Tensor], first: int, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """For entries `first`… the most alike older one: cosine and index, both [B, G, m].

    Slots are ordered by age; an entry with none before it gets -inf and itself. How alike two
    entries are is the mean cosine of their vectors, each [B, H, n, D]: of one head (G = H), or of
    all heads where they are `shared` (G = 1).
    """
    if _has_kernel(vectors, shared):
        return triton_backend.match(vectors[0], first)
    return torch_backend.best_older(features(vectors, shared), first)


def measure(
    vectors: Sequence[Tensor], partner: Tensor, alike: Tensor, shared: bool = False
) -> None:
    """Write to alike [B, G, m] how alike entries 0…m are to their partners [B, G, m].

    The first has none older, which is -inf.
    """
    if _has_kernel(vectors, shared):
        triton_backend.measure(vectors[0], partner, alike)
    else:
        torch_backend.measure(
            features([x[:, :, : alike.shape[2]] for x in vectors], shared), partner, alike
        )


def _has_kernel(vectors: Sequence[Tensor], shared: bool) -> bool:
    (x, *others) = vectors
    return not (others or shared) and reads_keys(x)
