"""A decode step's MLP by stock torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.kernels.decode_mlp.mlp import Kept, MlpWeights
from tachyscope.kernels.device import host_may_read
from tachyscope.kernels.gemv.torch import linear, normed


def decode_mlp(x: Tensor, mlp: MlpWeights, kept: Kept | None = None) -> None:
    """On a CPU tokens that replay together run nothing; elsewhere they only mask."""
    if kept is None:
        x += _run(x, mlp)
        return
    index = kept.place.long().view(1)
    old, age = kept.output.index_select(1, index)[:, 0], kept.age.index_select(1, index)
    skip = kept.skip.bool()
    moved = old if kept.drift is None else old + kept.drift
    if host_may_read(x) and bool(skip.all()):
        y = moved
    else:
        y = torch.where(skip[:, None], moved, _run(x, mlp))
        if kept.drift is not None and kept.ready is not None:
            learns = kept.ready.bool() & ~skip[:, None]
            new = torch.lerp(kept.drift, y - old, 1 / kept.memory)
            kept.drift.copy_(torch.where(learns, new, kept.drift))
    x += y
    kept.output.index_copy_(1, index, y[:, None])
    kept.age.index_copy_(1, index, torch.where(skip[:, None], age + 1, 0))


def _run(x: Tensor, mlp: MlpWeights) -> Tensor:
    a = normed(x, mlp.norm)
    if mlp.gate is None:
        return linear(F.gelu(linear(a, mlp.up)), mlp.down)
    return linear(F.silu(linear(a, mlp.gate)) * linear(a, mlp.up), mlp.down)
