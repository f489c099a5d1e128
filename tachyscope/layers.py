"""The layers' caches: made empty for a plan, and made larger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tachyscope.errors import TachyscopeError
from tachyscope.meter import Meter
from tachyscope.plan import Plan
from tachyscope.replay.runner import replay_tensors
from tachyscope.types import LayerCache, PassContext, Shape


def slots_for(plan: Plan, shape: Shape, lengths: Sequence[int], latent_frames: int | None) -> int:
    """A layer's slots where prompts have these lengths; raises where the plan has no room."""
    cache, prompt = plan.cache, max(lengths, default=0)
    slots = cache.capacity(shape, prompt, latent_frames)
    plan.attention.check(shape, prompt, None if cache.grows else slots)
    return slots


def empty_layer(
    plan: Plan, shape: Shape, slots: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """One layer's cache with nothing in it."""
    kv = (shape.batch, shape.kv_heads, slots, shape.head_dim)
    groups = plan.cache.cache_heads(shape)
    k, v = (torch.zeros(kv, dtype=dtype, device=device) for _ in range(2))
    # never torch's default, which is the caller's
    fine: dict[str, Any] = {"dtype": torch.float32, "device": device}
    log_count = torch.zeros(shape.batch, groups, slots, **fine)
    pos = torch.zeros(shape.batch, groups, slots, 3, **fine)
    unrotated = torch.zeros_like(k) if plan.cache.keeps_unrotated else None
    extra = plan.cache.tensors(shape, slots, device)
    extra |= plan.attention.tensors(shape, slots, device)
    extra |= replay_tensors(plan.replay, shape, dtype, device)
    if plan.cache.wants_queries:
        size = (shape.batch, shape.heads, shape.max_pass_tokens, shape.head_dim)
        extra["queries"] = torch.zeros(size, **fine)
    return LayerCache(k, v, log_count, pos, unrotated, extra)


def make_room(layers: Sequence[LayerCache], plan: Plan, ctx: PassContext, meter: Meter) -> None:
    """Slots for the tokens of a pass; raises where a bounded plan does not hold them."""
    slots, needed = layers[0].k.shape[2], ctx.end
    if needed <= slots:
        return
    if not plan.cache.grows:
        raise TachyscopeError(
            f"a pass of {ctx.start + ctx.tokens} tokens needs {needed} entries, the plan holds "
            f"{slots}: raise the cache policy's budget"
        )
    larger = max(needed, slots + slots // 4)
    for i, layer in enumerate(layers):
        _grow(layer, larger, plan, ctx.for_layer(i), meter)


def _grow(layer: LayerCache, slots: int, plan: Plan, ctx: PassContext, meter: Meter) -> None:
    before, attention = layer.k.shape[2], plan.attention
    kept = ctx.past if plan.cache.appends else 0
    if not kept:
        attention.restore_order(layer, ctx, ctx.past)
    fresh = empty_layer(plan, ctx.shape, slots, layer.k.dtype, layer.k.device)
    for name, new in fresh.entries().items():
        new[:, :, :before] = layer.entries()[name]
        setattr(layer, name, new)
    for name, new in fresh.extra.items():
        if name.startswith("slot_"):
            new[:, :, :before] = layer.extra[name]
            layer.extra[name] = new
    attention.grow(layer, ctx.shape, slots, kept)
    attention.build_index(layer, ctx, ctx.past, meter, kept)
