"""Keep whole latent frames, and of those that are alike the newest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.cache import (
    CachePolicy,
    checked_capacity,
)
from tachyscope.core.limits import ENTRIES, LATENTS
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape, Size
from tachyscope.store import LayerPass
from tachyscope_lab.rivals.whole_frames import check_whole_frames


@final
@dataclass(frozen=True)
class Frames(CachePolicy, name="frames"):
    """Drop the latent frame that is most similar to another, in all heads.

    Two frames are as alike as the cosine of their values, all places and heads in one vector. Of
    the most alike pair the older leaves, or where that is the sink's the other. It is `dedup` with
    one comparison a pair of frames instead of one a pair of entries.
    """

    budget: Size = setting(
        Size(21, True),
        "Most entries that a layer holds, the present chunk included: latent frames (21f), or "
        "entries of whole ones.",
        bound=ENTRIES,
    )
    sink: int = setting(1, "First latent frames that are never dropped.", bound=LATENTS)
    newest: int = setting(1, "Latest latent frames that are never dropped.", bound=LATENTS)

    paper: ClassVar[str] = "after FAST-AR's TempCache, arXiv 2602.01801, by whole frames"
    whole_frames: ClassVar[bool] = True

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        slots = checked_capacity("frames", self.budget, shape, prompt, self.sink, self.newest)
        check_whole_frames("frames", self.budget, shape)
        return slots

    def commit(self, p: LayerPass, n: int) -> int:
        layer, ctx = p.layer, p.ctx
        tokens, total = ctx.shape.tokens_per_frame, ctx.past + n
        room = self.budget.entries(ctx.shape) - ctx.shape.max_pass_tokens - ctx.prompt
        held, kept = (total - ctx.prompt) // tokens, room // tokens
        if held <= kept:
            return total
        used = slice(ctx.prompt, total)
        v = layer.vectors("v", used).unflatten(2, (held, -1)).flatten(3)  # [B, Hkv, F, N * D]
        order = self._order((v @ v.mT).float().sum(1), held - kept)
        slots = order.unsqueeze(-1) * tokens + torch.arange(tokens, device=order.device)
        layer.gather(used, slots.flatten(1).unsqueeze(1))
        p.work.macs += held * v[:, :, 0].numel() * held
        return ctx.prompt + kept * tokens

    def _order(self, dots: Tensor, excess: int) -> Tensor:
        """Frames [B, F] by age, those `excess` that leave behind, for dot products [B, F, F]."""
        frames = dots.shape[1]
        norms = dots.diagonal(dim1=1, dim2=2).clamp(min=1e-12).rsqrt()
        cosine = dots * norms.unsqueeze(1) * norms.unsqueeze(2)
        index = torch.arange(frames, device=dots.device)
        stays = (index < self.sink) | (index >= frames - self.newest)
        newer = index.unsqueeze(0) > index.unsqueeze(1)
        # [i, j]: whether i may leave for j
        may_leave = ~stays.unsqueeze(1) & (newer | (newer.mT & stays.unsqueeze(0)))
        cosine = cosine.masked_fill(~may_leave, -math.inf)
        gone = torch.zeros_like(cosine[:, 0], dtype=torch.bool)
        for _ in range(excess):
            gone |= index == cosine.amax(2).argmax(1, keepdim=True)
            left = gone.unsqueeze(1) | gone.unsqueeze(2)
            cosine = cosine.masked_fill(left, -math.inf)
        return gone.to(torch.int8).argsort(dim=1, stable=True)
