"""The layers' caches: made empty for a plan, made larger, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tachyscope.errors import TachyscopeError
from tachyscope.machine import memory_of
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


def check_memory(
    plan: Plan, shape: Shape, slots: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise where keys and values of so many slots are more than the device's whole memory.

    The system itself may grant what it does not have, and end the process when it is used.
    """
    limit = memory_of(device)
    numbers = 2 * shape.layers * shape.batch * shape.kv_heads * slots * shape.head_dim
    if limit is not None and numbers * dtype.itemsize > limit:
        raise TachyscopeError(
            f"the memory of {device} does not hold the cache of {plan}: "
            f"{numbers * dtype.itemsize / 1e9:.3g} GB of {limit / 1e9:.3g}: give it a "
            f"budget, for example cache=merge:budget=21f, or take fewer `frames` or a smaller "
            f"`size`; tachyscope bench fit tells what fits"
        )


def cache_bytes(layers: Sequence[LayerCache]) -> int:
    """What the layers' tensors take."""
    held = (x for layer in layers for x in (layer.entries() | layer.extra).values())
    return sum(x.numel() * x.element_size() for x in held)


def used_bytes(layers: Sequence[LayerCache], entries: int) -> int:
    """Of these, what so many entries take."""
    share = min(1.0, entries / layers[0].k.shape[2])
    found = 0.0
    for layer in layers:
        by_slot = layer.entries().keys() | {x for x in layer.extra if x.startswith("slot_")}
        for name, x in (layer.entries() | layer.extra).items():
            size = x.numel() * x.element_size()
            found += share * size if name in by_slot else size
    return round(found)


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
