"""What a pass over several tokens costs at full size: the ground of drafts (docs/passes.md).

Stock linears are then products of matrices; all of a pass is one CUDA graph.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.bench.device_clock import milliseconds, recorded
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.results import Document

# places that a pass of 1 + 32 tokens settled on atrium-tokens (docs/passes.md)
PLACES = {"still": 12.2, "walk": 7.2, "forward": 7.5}
MEASURED = 32


@torch.inference_mode()
def bench_drafts(
    model: VilaModel, drafts: int, entries: int, rounds: int, times: int = 10
) -> Document:
    """Milliseconds of the trunk over 1 + drafts tokens behind some entries, and of their codes."""
    c, shape, trunk = model.config, model.shape(), model.transformer.trunk
    rows, tokens = shape.batch, 1 + drafts
    device = model.device
    kind: dict[str, Any] = {"dtype": model.dtype, "device": device}
    size = (rows, c.kv_heads, entries, c.head_dim)
    past = [tuple(torch.randn(size, **kind) for _ in range(2)) for _ in range(c.layers)]
    x = torch.randn(rows, tokens, c.hidden, **kind)
    # a token reads all that was there and those of the pass up to itself
    seen = torch.ones(tokens, entries + tokens, dtype=torch.bool, device=device).tril(entries)
    session: Any = _Past(past, seen)
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
    if drafts == MEASURED:
        out["ms_a_token"] = {clip: out["step_ms"] / places for clip, places in PLACES.items()}
    return out


class _Past:
    """Keys and values of a past beside those of a pass: what the trunk asks of a session."""

    def __init__(self, past: list[tuple[Tensor, ...]], seen: Tensor) -> None:
        self.past, self.seen = past, seen

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        old_k, old_v = self.past[layer]
        k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        return F.scaled_dot_product_attention(q, k, v, self.seen, enable_gqa=True)

    def mlp(self, layer: int, x: Tensor, fn: Any) -> Tensor:
        y: Tensor = fn(x)
        return y
