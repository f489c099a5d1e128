"""The layers' caches: made empty for a plan, made larger, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tachyscope.errors import TachyscopeError
from tachyscope.machine import memory_of
from tachyscope.meter import Meter
from tachyscope.plan import Plan
from tachyscope.replay.runners import replay_tensors
from tachyscope.store import KVStore
from tachyscope.types import PassContext, Shape


def slots_for(plan: Plan, shape: Shape, lengths: Sequence[int], latent_frames: int | None) -> int:
    """A layer's slots where prompts have these lengths; raises where the plan has no room."""
    cache, prompt = plan.cache, max(lengths, default=0)
    slots = cache.capacity(shape, prompt, latent_frames)
    plan.attention.check(shape, prompt, None if cache.grows else slots)
    return slots


def empty_layer(
    plan: Plan, shape: Shape, slots: int, dtype: torch.dtype, device: torch.device
) -> KVStore:
    """One layer's cache with nothing in it."""
    declared = {
        "cache": plan.cache.tensors(shape, slots, device),
        "attention": plan.attention.tensors(shape, slots, device),
        "replay": replay_tensors(plan.replay, shape, dtype, device),
    }
    return KVStore.empty(
        shape, slots, plan.cache.cache_heads(shape), dtype, device,
        unrotated=plan.cache.keeps_unrotated, codes=plan.store.codes, declared=declared,
    )  # fmt: skip


def check_memory(
    plan: Plan, shape: Shape, slots: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise where keys and values of so many slots are more than the device's whole memory.

    The system itself may grant what it does not have, and end the process when it is used.
    """
    limit = memory_of(device)
    size = 2 * shape.layers * shape.batch * shape.kv_heads * slots * shape.head_dim
    size *= (plan.store.codes or dtype).itemsize
    if limit is not None and size > limit:
        raise TachyscopeError(
            f"the memory of {device} does not hold the cache of {plan}: "
            f"{size / 1e9:.3g} GB of {limit / 1e9:.3g}: give it a "
            f"budget, for example cache=merge:budget=21f, or take fewer `frames` or a smaller "
            f"`size`; tachyscope bench fit tells what fits"
        )


def cache_bytes(layers: Sequence[KVStore], entries: int | None = None) -> int:
    """What the layers' tensors take; with a number of entries, what these take of them."""
    return sum(layer.bytes(entries) for layer in layers)


def make_room(layers: Sequence[KVStore], plan: Plan, ctx: PassContext, meter: Meter) -> None:
    """Slots for the tokens of a pass; raises where a bounded plan does not hold them."""
    slots, needed = layers[0].slots, ctx.end
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


def _grow(layer: KVStore, slots: int, plan: Plan, ctx: PassContext, meter: Meter) -> None:
    kept, attention = ctx.past if plan.cache.appends else 0, plan.attention
    if not kept:
        attention.restore_order(layer, ctx, ctx.past)
    larger = empty_layer(plan, ctx.shape, slots, layer.dtype, layer.k.device)
    layer.grow(larger)
    attention.grow(layer.own["attention"], larger.own["attention"], kept)
    attention.build_index(layer, ctx, ctx.past, meter, kept)
