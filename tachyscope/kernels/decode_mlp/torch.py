"""A decode step's MLP by stock torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.kernels.decode_mlp.mlp import Error, Kept, MlpWeights
from tachyscope.kernels.device import host_may_read
from tachyscope.kernels.gemv import linear
from tachyscope.kernels.gemv.torch import normed as rows_normed
from tachyscope.kernels.replay import remembered_error


def decode_mlp(
    x: Tensor,
    mlp: MlpWeights,
    kept: Kept | Error | None = None,
    inner: Tensor | None = None,
    barrier: Tensor | None = None,
    tokens: int = 1,
    normed: Tensor | None = None,
) -> None:
    """x [B, W] += mlp(x), or what was kept of the last frame; outputs are kept in turn.

    With an `Error` that is added as well. Where all tokens replay, no weight is read (here: on a
    CPU). `inner` [B, inner width or more] and `normed` [COPIES, B, W] are scratch memory, and
    `barrier` [] int32 is 0 before every call.
    Of `tokens` tokens in a row, x [B * tokens, W] from the place on, all are computed.
    """
    a = rows_normed(x, mlp.norm)
    if kept is None:
        x += run_mlp(a, mlp)
        return
    index = kept.place + torch.arange(tokens, device=x.device)
    if isinstance(kept, Error):
        held = (part.index_select(1, index) for part in (kept.error, kept.input))
        error, base = (part.flatten(0, 1) for part in held)
        x += run_mlp(a, mlp) + remembered_error(error, base, a, kept.beta)
        return
    if kept.input is not None:
        kept.input.index_copy_(1, index, a.unflatten(0, (-1, tokens)))
    if tokens > 1:
        y = run_mlp(a, mlp)
        x += y
        kept.output.index_copy_(1, index, y.unflatten(0, (-1, tokens)))
        return
    old, age = kept.output.index_select(1, index)[:, 0], kept.age.index_select(1, index)
    skip = kept.skip.bool()
    moved = old if kept.drift is None else old + kept.drift
    if host_may_read(x) and bool(skip.all()):
        y = moved
    else:
        y = torch.where(skip[:, None], moved, run_mlp(a, mlp))
        if kept.drift is not None and kept.ready is not None:
            learns = kept.ready.bool() & ~skip[:, None]
            new = torch.lerp(kept.drift, y - old, 1 / kept.memory)
            kept.drift.copy_(torch.where(learns, new, kept.drift))
    x += y
    kept.output.index_copy_(1, index, y[:, None])
    kept.age.index_copy_(1, index, torch.where(skip[:, None], age + 1, 0))


def run_mlp(a: Tensor, mlp: MlpWeights) -> Tensor:
    """mlp of any number of tokens [..., W], whose inputs are normed."""
    up = linear(a, mlp.up)
    neurons, mapped = up.split([mlp.up.rows - mlp.linear, mlp.linear], -1)
    neurons = F.gelu(neurons) if mlp.gate is None else F.silu(linear(a, mlp.gate)) * neurons
    return linear(torch.cat([neurons, mapped], -1) if mlp.linear else neurons, mlp.down)
