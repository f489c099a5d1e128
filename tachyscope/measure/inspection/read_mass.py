"""The attention weights of a policy, read from its output for one-hot values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tachyscope.attention import AttentionPolicy
from tachyscope.core.work import Work
from tachyscope.store import LayerPass

COLUMNS = 1024  # slots whose weights are read at once


def read_mass(policy: AttentionPolicy, p: LayerPass, q: Tensor) -> Tensor:
    """The attention weights [B, H, S, end] of a policy: its output for one-hot values."""
    width = q.shape[3] if q.is_cuda else COLUMNS  # kernels take values as wide as queries
    # what is read was chosen in the pass itself, by its true values
    layer, parts = p.layer, list[Tensor]()
    ctx = p.ctx._replace(before=(*p.ctx.before, p.ctx.pass_index))
    p = p._replace(ctx=ctx, work=Work())
    for lo in range(0, ctx.end, width):
        hot = torch.zeros(ctx.end, width, dtype=layer.dtype, device=q.device)
        count = min(width, ctx.end - lo)
        hot[lo : lo + count, :count] = torch.eye(count, dtype=hot.dtype, device=hot.device)
        rows = (*layer.pos.shape[:1], ctx.shape.kv_heads)
        values = policy.to_index_order(p, hot.expand(*rows, -1, -1))
        stand_in = replace(
            layer, k=layer.keys(ctx), v=values, scales={}, present={}, scratch=(), codecs={}
        )
        parts.append(policy.attend(p._replace(layer=stand_in), q)[..., :count])
    return torch.cat(parts, -1)
