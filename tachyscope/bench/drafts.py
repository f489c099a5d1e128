"""What a pass over several tokens costs at full size: the ground of drafts (docs/passes.md).

Stock linears are then products of matrices; all of a pass is one CUDA graph.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from tachyscope.bench.device_clock import milliseconds, recorded
from tachyscope.kernels.attention import attention
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.results import Document


@torch.inference_mode()
def bench_drafts(
    model: VilaModel, drafts: int, entries: int, rounds: int, times: int = 10
) -> Document:
    """Milliseconds of the trunk over 1 + drafts tokens behind some entries, and of their codes."""
    c, shape, trunk = model.config, model.shape(), model.transformer.trunk
    rows, tokens = shape.batch, 1 + drafts
    device = model.device
    kind: dict[str, Any] = {"dtype": model.dtype, "device": device}
    size = (rows, c.kv_heads, entries + tokens, c.head_dim)
    slots = [tuple(torch.randn(size, **kind) for _ in range(2)) for _ in range(c.layers)]
    x = torch.randn(rows, tokens, c.hidden, **kind)
    session: Any = _Slots(slots, entries)
    videos = rows // 2 if shape.paired else rows
    hidden = torch.randn(rows * tokens, c.hidden, **kind)
    noise = torch.empty(videos * tokens, c.depth, c.codes, device=device).exponential_()
    books = model.transformer.vae.quantizer
    runs = {
        "trunk": recorded(lambda: trunk(session, x), device),
        "depth": recorded(
            lambda: model.transformer.head.generate(hidden, books, c.sampler, noise), device
        ),
    }
    out: Document = {"tokens": tokens, "entries": entries}
    for name, run in runs.items():
        takes = [milliseconds(run, times, device) for _ in range(rounds)]
        out |= {f"{name}_ms": statistics.median(takes), f"{name}_takes_ms": [[t] for t in takes]}
    out["step_ms"] = out["trunk_ms"] + out["depth_ms"]
    return out


class _Slots:
    """Keys and values of a past, a pass's behind them: what the trunk asks of a session."""

    def __init__(self, slots: list[tuple[Tensor, ...]], entries: int) -> None:
        self.slots, self.entries = slots, entries

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        all_k, all_v = self.slots[layer]
        all_k[:, :, self.entries :] = k
        all_v[:, :, self.entries :] = v
        return attention(q, all_k, all_v, causal=True)

    def mlp(self, layer: int, x: Tensor, fn: Any) -> Tensor:
        y: Tensor = fn(x)
        return y
