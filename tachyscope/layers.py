"""The layers' caches: made empty for a plan, made larger, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tachyscope.attention.ann import Ann
from tachyscope.cache.bank import Bank
from tachyscope.cache.worldkv import WorldKv
from tachyscope.errors import TachyscopeError
from tachyscope.machine import memory_of
from tachyscope.meter import Meter
from tachyscope.plan import Plan
from tachyscope.replay.runners import replay_tensors
from tachyscope.store import KVStore
from tachyscope.store.bank import BlockBank
from tachyscope.store.bank_layout import BankLayout
from tachyscope.store.host_bank import HostBank
from tachyscope.store.pose_bank import PoseBank
from tachyscope.types import PassContext, Shape


def slots_for(plan: Plan, shape: Shape, lengths: Sequence[int], latent_frames: int | None) -> int:
    """A layer's slots where prompts have these lengths; raises where the plan has no room."""
    cache, prompt = plan.cache, max(lengths, default=0)
    slots = cache.capacity(shape, prompt, latent_frames)
    plan.attention.check(shape, prompt, None if cache.grows else slots)
    bank_layout(plan, shape, slots, latent_frames)
    return slots


def bank_layout(
    plan: Plan, shape: Shape, slots: int, latent_frames: int | None
) -> BankLayout | None:
    """How the plan's bank cuts up a layer of so many slots; None where it has none.

    Of a video whose latent frames are known it holds no more than these.
    """
    if not isinstance(plan.cache, Bank):
        return None
    assert isinstance(plan.attention, Ann)
    budget = plan.cache.budget.entries(shape)
    if latent_frames is not None:
        budget = min(budget, latent_frames * shape.tokens_per_frame)
    return plan.attention.bank_layout(shape, slots, budget)


def empty_layer(
    plan: Plan,
    shape: Shape,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    latent_frames: int | None = None,
    host: dict[str, Tensor] | None = None,
) -> KVStore:
    """One layer's cache with nothing in it; `host` is memory of a bank that is not in use."""
    layout = bank_layout(plan, shape, slots, latent_frames)
    bank: HostBank | None = None
    if isinstance(plan.cache, WorldKv):
        bank = PoseBank.empty(plan.cache.layout(shape), shape, dtype, device, host)
    elif layout is not None:
        assert isinstance(plan.cache, Bank)
        bank = BlockBank.empty(layout, shape, plan.cache.host, dtype, device, host)
    declared = {
        "cache": plan.cache.tensors(shape, slots, device),
        # of a bank's past the bank has the index
        "attention": {} if bank else plan.attention.tensors(shape, slots, device),
        "replay": replay_tensors(plan.replay, shape, dtype, device),
    }
    return KVStore.empty(
        shape, slots, plan.cache.cache_heads(shape), dtype, device,
        unrotated=plan.cache.keeps_unrotated, codecs=plan.store.codecs(shape), bank=bank,
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
    """Raise where keys and values of so many slots are more than the device's whole memory.

    The system itself may grant what it does not have, and end the process when it is used.
    """
    limit = memory_of(device)
    if isinstance(plan.cache, Bank | WorldKv):
        meta = empty_layer(plan, shape, slots, dtype, torch.device("meta"), latent_frames)
        needed = shape.layers * sum(x.nbytes for x in meta.host_tensors().values())
        most = memory_of(torch.device("cpu"))
        if most is not None and needed > most:
            then = ", or set host=int4" if isinstance(plan.cache, Bank) else ""
            raise TachyscopeError(
                f"host memory of {most / 1e9:.3g} GB does not hold a bank of {needed / 1e9:.3g} "
                f"GB: lower its budget={plan.cache.budget}{then}"
            )
    codecs = plan.store.codecs(shape)
    taken = [codecs[name].bytes(shape.head_dim) for name in ("k", "v") if name in codecs]
    entry = sum(taken) if taken else 2 * shape.head_dim * dtype.itemsize
    size = shape.layers * shape.batch * shape.kv_heads * slots * entry
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


def make_room(
    layers: Sequence[KVStore], plan: Plan, ctx: PassContext, meter: Meter, dropped: int = 0
) -> None:
    """Slots for the tokens of a pass, behind entries that it drops from the past.

    Raises where a bounded plan does not hold them.
    """
    slots, needed = layers[0].slots, ctx.end + dropped
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
