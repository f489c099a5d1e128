"""An MLP for the tokens of a decode step in one launch, which a flag on the device skips."""

from __future__ import annotations

from torch import Tensor

from tachyscope.kernels.decode_mlp import torch as torch_backend
from tachyscope.kernels.decode_mlp.mlp import COPIES, Error, Kept, MlpWeights
from tachyscope.kernels.device import HAS_TRITON, has_decode_kernel

if HAS_TRITON:
    from tachyscope.kernels.decode_mlp import triton as triton_backend

__all__ = ["COPIES", "Error", "Kept", "MlpWeights", "decode_mlp", "run_mlp"]


def decode_mlp(
    x: Tensor,
    mlp: MlpWeights,
    kept: Kept | Error | None,
    inner: Tensor,
    barrier: Tensor,
    tokens: int = 1,
    normed: Tensor | None = None,
) -> None:
    """x [B, W] += mlp(x), or what was kept of the last frame; outputs are kept in turn.

    With an `Error` that is added as well. Where all tokens replay, no weight is read. `inner`
    [B, inner width or more] and `normed` [COPIES, B, W] are scratch memory, and `barrier` [] int32
    is 0 before every call.
    Of `tokens` tokens in a row, x [B * tokens, W] from the place on, all are computed.
    """
    if has_decode_kernel(x) and (tokens == 1 or kept is None):
        triton_backend.decode_mlp(x, mlp, kept, inner, barrier, normed=normed)
    else:
        torch_backend.decode_mlp(x, mlp, kept, tokens)


def run_mlp(x: Tensor, mlp: MlpWeights) -> Tensor:
    """mlp of any number of tokens [..., W], whose inputs are normed."""
    return torch_backend.run_mlp(x, mlp)
