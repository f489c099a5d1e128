"""Keep half a window as sink, and of the middle what recent queries attend to (Deep Forcing)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.cache import CachePolicy, set_times
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import ENTRIES, LATENTS
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape, Size
from tachyscope.store import LayerPass, Tensors
from tachyscope_lab.rivals.whole_frames import check_whole_frames


@final
@dataclass(frozen=True)
class DeepForcing(CachePolicy, name="deep_forcing"):
    """Compress the cache to `keep` latent frames when it reaches the budget.

    That is in a chunk's first pass. The `sink` first latent frames and the `newest`, the present
    chunk among them, stay. Of the entries between them those stay whose keys have the largest
    products with the queries of the newest frames, all heads and queries added up. Sink and chosen
    entries then stand right before the newest frames.
    """

    budget: Size = setting(
        Size(21, True),
        "Entries, the present chunk included, at which the cache is compressed: latent frames "
        "(21f), or entries of whole ones.",
        bound=ENTRIES,
    )
    keep: int = setting(
        16, "Latent frames' worth that is left, the present chunk included.", bound=LATENTS
    )
    sink: int = setting(10, "First latent frames that are always kept.", bound=LATENTS)
    newest: int = setting(
        4, "Latest latent frames that are kept, the present chunk included.", bound=LATENTS
    )

    paper: ClassVar[str] = "Deep Forcing, arXiv 2512.05081"
    keeps_unrotated: ClassVar[bool] = True
    wants_queries: ClassVar[bool] = True
    dense_only: ClassVar[bool] = True
    traceable: ClassVar[bool] = False

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        if shape.token_by_token or shape.rolling_frames:
            raise TachyscopeError(
                "cache policy 'deep_forcing' serves models that make a chunk at a time, got one "
                "that writes token by token or several chunks at once: use another cache"
            )
        check_whole_frames("deep_forcing", self.budget, shape)
        budget, least = (
            self.budget.entries(shape) // shape.tokens_per_frame,
            self.sink + max(self.newest, shape.chunk),
        )
        if not least <= self.keep <= budget:
            raise TachyscopeError(
                f"cache policy 'deep_forcing': keep={self.keep} must be from {least} (sink and the "
                f"newest, the present chunk of {shape.chunk} among them) to the budget's {budget}: "
                f"change these"
            )
        # a chunk is written before the cache that it overfills is compressed
        return (max(budget - 1, self.keep) + shape.chunk) * shape.tokens_per_frame

    def is_full(self, shape: Shape, past: int, room: int, total: int) -> bool:
        kept = self.keep * shape.tokens_per_frame
        return past == kept and self.past_in_pass(shape, past, shape.max_pass_tokens) < past

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        rows = (shape.batch, shape.heads)
        sizes = {"queries": shape.max_pass_tokens, "sums": max(1, self.newest)}
        return {
            name: torch.zeros(*rows, n, shape.head_dim, dtype=torch.float32, device=device)
            for name, n in sizes.items()
        }

    def past_in_pass(self, shape: Shape, past: int, tokens: int) -> int:
        if past + tokens < self.budget.entries(shape):
            return past
        return min(past, max(0, self.keep * shape.tokens_per_frame - tokens))

    def compress(self, p: LayerPass, q: Tensor, past: int) -> None:
        layer, ctx = p.layer, p.ctx
        shape, tokens = ctx.shape, ctx.shape.tokens_per_frame
        first = self.sink * tokens
        recent = max(0, self.newest * tokens - ctx.tokens)  # before the present chunk
        middle, kept = slice(first, ctx.past - recent), past - recent - first
        sums = layer.own["cache"]["sums"]  # of the newest frames, the last one's last
        queries = q.float().sum(2) + sums[:, :, sums.shape[2] - recent // tokens :].sum(2)
        keys = layer.vectors("k", middle)
        queries = queries.unflatten(1, (keys.shape[1], -1)).sum(2)
        score = torch.einsum("bhnd,bhd->bn", keys.to(queries.dtype), queries)
        p.work.macs += shape.batch * shape.kv_heads * shape.head_dim * score.shape[1]
        dropped = torch.ones_like(score, dtype=torch.int8)
        best = score.argsort(dim=1, descending=True, stable=True)[:, :kept]
        order = dropped.scatter_(1, best, 0).argsort(dim=1, stable=True)
        layer.gather(middle, order.unsqueeze(1))
        layer.move(middle.stop, first + kept, ctx.end - middle.stop)
        time = layer.pos[:, :, first + kept : first + kept + 1, 0].clone()
        frames = self.sink - (-kept // tokens)
        set_times(layer, slice(0, first + kept), time - frames, tokens, p.rotate)

    def commit(self, p: LayerPass, n: int) -> int:
        layer, ctx = p.layer, p.ctx
        own = layer.own["cache"]
        new = own["queries"][:, :, :n].unflatten(2, (-1, ctx.shape.tokens_per_frame)).sum(3)
        own["sums"].copy_(torch.cat([own["sums"], new], 2)[:, :, new.shape[2] :])
        return ctx.past + n
