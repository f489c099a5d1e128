"""Merge alike entries: fold them into one another and close the gaps, in place."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.device import HAS_TRITON, reads_keys
from tachyscope.kernels.merge import torch as torch_backend
from tachyscope.kernels.merge.torch import Entries, join_entries, take

if HAS_TRITON:
    from tachyscope.kernels.merge import triton as triton_backend

__all__ = ["Entries", "join_entries", "merge_entries", "take"]


def merge_entries(
    held: Entries, alike: Tensor, partner: Tensor, excess: int, newest: bool, mean: bool
) -> tuple[Tensor, Tensor]:
    """Fold the `excess` most alike of the first n entries into their partners; close the gaps.

    alike, partner [B, G, n], G = H or 1; a partner is older, and the first entry has none and is
    never folded. One whose partner is itself folded passes on to the partner's. What is held may
    go on behind the n entries, and follows. With `mean` who stays gets its group's weight and mean
    value; with `newest` the key and position of its newest member, and without `mean` its value.
    Partners then point to where theirs went. Returns who was folded and into whom, [B, G, excess],
    both counted before.
    """
    k = held.k
    by_head, coded = alike.shape[1] == k.shape[1], held.k_scale is not None
    # the kernels know no codes of unrotated keys
    packed = held.k_scale is not None and held.k_scale.dim() == 4  # several channels a byte
    serves = by_head and not packed and not (coded and held.unrotated is not None)
    backend = triton_backend if serves and reads_keys(k) else torch_backend
    return backend.merge_entries(held, alike, partner, excess, newest, mean)
