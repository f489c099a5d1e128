"""Allocates and grows the layers' KV caches, and counts their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan
from tachyscope.core.types import Shape
from tachyscope.io.machine import memory_of
from tachyscope.replay.runner import replay_tensors
from tachyscope.store import Codec, KVStore, LayerPass
from tachyscope.store.host_bank import HostBank


def slots_for(plan: Plan, shape: Shape, lengths: Sequence[int], latent_frames: int | None) -> int:
    """A layer's slots for prompts of these lengths; raises if the plan has no room for them."""
    cache, prompt = plan.cache, max(lengths, default=0)
    slots = cache.capacity(shape, prompt, latent_frames)
    plan.attention.check(shape, prompt, None if cache.grows else slots)
    cache.bank_layout(plan, shape, slots, latent_frames)
    return slots


def codecs_of(plan: Plan, shape: Shape) -> dict[str, Codec]:
    """The plan's codecs for keys and values, by name."""
    if not plan.cache.stores_codes:
        return {}
    budget = getattr(plan.cache, "budget", None)
    whole = budget is None or budget.entries(shape) % shape.tokens_per_frame == 0
    stays = plan.cache.whole_frames and not plan.attention.reorders
    return plan.store.codecs(shape, whole and stays and not shape.token_by_token)


def empty_layer(
    plan: Plan,
    shape: Shape,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    latent_frames: int | None = None,
    host: dict[str, Tensor] | None = None,
) -> KVStore:
    """One layer's empty cache; `host` is a freed bank's memory to use again."""
    layout: Any = plan.cache.bank_layout(plan, shape, slots, latent_frames)
    bank: HostBank | None = None
    if layout is not None:
        held_as = plan.cache.host or "native"
        bank = layout.bank.empty(layout, shape, held_as, dtype, device, host)
    declared = {
        "cache": plan.cache.tensors(shape, slots, device),
        # a bank indexes its own past
        "attention": {} if bank else plan.attention.tensors(shape, slots, device),
        "replay": replay_tensors(plan.replay, shape, dtype, device),
    }
    return KVStore.empty(
        shape, slots, plan.cache.cache_heads(shape), dtype, device,
        unrotated=plan.cache.keeps_unrotated, codecs=codecs_of(plan, shape), bank=bank,
        declared=declared,
    )  # fmt: skip


def check_memory(
    plan: Plan,
    shape: Shape,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    latent_frames: int | None = None,
) -> None:
    """Raise if keys and values of `slots` entries exceed the device's total memory.

    The operating system may overcommit, and kill the process once the memory is used.
    """
    limit = memory_of(device)
    if plan.cache.bank_layout(plan, shape, slots, latent_frames) is not None:
        meta = empty_layer(plan, shape, slots, dtype, torch.device("meta"), latent_frames)
        needed = shape.layers * sum(x.nbytes for x in meta.host_tensors().values())
        most = memory_of(torch.device("cpu"))
        if most is not None and needed > most:
            smaller = plan.cache.host not in (None, "int4") and plan.store.name == "native"
            then = ", or set host=int4" if smaller else ""
            raise TachyscopeError(
                f"host memory of {most / 1e9:.3g} GB does not hold a bank of {needed / 1e9:.3g} "
                f"GB: lower its budget={getattr(plan.cache, 'budget', None)}{then}"
            )
    codecs = codecs_of(plan, shape)
    taken = [codecs[name].bytes(shape.head_dim) for name in ("k", "v") if name in codecs]
    entry = sum(taken) if taken else 2 * shape.head_dim * dtype.itemsize
    size = shape.layers * shape.batch * shape.kv_heads * slots * entry
    if plan.store.for_banks and not plan.cache.stores_codes:
        size = round(size * meta.stored_share)
    if limit is not None and size > limit:
        raise TachyscopeError(
            f"the memory of {device} does not hold the cache of {plan}: "
            f"{size / 1e9:.3g} GB of {limit / 1e9:.3g}: give it a "
            f"budget, for example cache=merge:budget=21f, or take fewer `frames` or a smaller "
            f"`size`; tachyscope fit shows what fits"
        )


def cache_bytes(layers: Sequence[KVStore], entries: int | None = None) -> int:
    """Bytes of the layers' tensors; with `entries`, of this many entries alone."""
    return sum(layer.bytes(entries) for layer in layers)


def cache_stats(layers: Sequence[KVStore], past: int, tokens: int) -> dict[str, float]:
    """A chunk's stats of the cache: its sizes, with `past` entries and the `tokens` of a pass."""
    host = sum(x.nbytes for layer in layers for x in layer.host_tensors().values())
    return {
        "cache_mb": cache_bytes(layers, past + tokens) / 1e6,
        "cache_allocated_mb": cache_bytes(layers) / 1e6,
        "entries": float(past),
        **({"host_mb": host / 1e6} if host else {}),
    }


def make_room(passes: Sequence[LayerPass], plan: Plan, dropped: int = 0) -> None:
    """Grow the layers if the tokens of a pass, and `dropped` entries of the past, do not fit.

    Raises for a bounded plan.
    """
    ctx, slots = passes[0].ctx, passes[0].layer.slots
    needed = ctx.end + dropped
    if needed <= slots:
        return
    if not plan.cache.grows:
        raise TachyscopeError(
            f"a pass of {ctx.start + ctx.tokens} tokens needs {needed} entries, the plan holds "
            f"{slots}: raise the cache policy's budget"
        )
    larger = max(needed, slots + slots // 4)
    for p in passes:
        _grow(p, larger, plan)


def _grow(p: LayerPass, slots: int, plan: Plan) -> None:
    layer, ctx = p.layer, p.ctx
    kept, attention = ctx.past if plan.cache.appends else 0, plan.attention
    if not kept:
        attention.restore_order(p, ctx.past)
    larger = empty_layer(plan, ctx.shape, slots, layer.dtype, layer.k.device)
    layer.grow(larger)
    attention.grow(layer.own["attention"], larger.own["attention"], kept)
    attention.build_index(p, ctx.past, kept)
