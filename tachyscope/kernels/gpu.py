"""The Triton backends by their former names; leaves with its last callers."""

from __future__ import annotations

from tachyscope.kernels.device import HAS_TRITON
from tachyscope.kernels.device import has_kernel as suits

if HAS_TRITON:
    from tachyscope.kernels.block_index import triton as blocks
    from tachyscope.kernels.match import triton as match
    from tachyscope.kernels.merge import triton as folding
    from tachyscope.kernels.prompt_hits import triton as nearest
__all__ = ["blocks", "folding", "match", "nearest", "suits"]
