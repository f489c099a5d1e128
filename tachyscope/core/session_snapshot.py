"""Saves a session's state as tensors by name, and restores it after checking every part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.features import Features
from tachyscope.core.session_state import SessionState
from tachyscope.core.types import Text
from tachyscope.snapshot.format import (
    AGAIN,
    COUNTS,
    blocks_of,
    check_blocks,
    check_finite,
    check_range,
    check_tensor,
    generators,
    pack,
    refuse,
    unpack,
    whole_numbers,
)
from tachyscope.store import KVStore

KEPT = "kept."  # prefix of the caller's tensors, and of the session's latents


def take_state(
    memory: SessionState, host: bool, kept: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """The state between two chunks as tensors by name, ready for a safetensors file.

    Without `host`, a bank's blocks in host memory are left out: `segment` of a bank has them.
    `kept` are the caller's own tensors, saved with it.
    """
    if memory.now:
        raise TachyscopeError(
            f"a session's state can be taken between chunks, and {memory.now} tokens of one are "
            f"under way: finish the chunk first"
        )
    noise = torch.cat([x.get_state() for x in memory.generators])
    drawn = {"generator": noise, "policy_rng": memory.policy_rng.get_state()}
    blocks = _host_tensors(memory) if host else {}
    others = {f"{KEPT}{name}": x for name, x in (kept or {}).items()}
    tensors = _tensors(memory) | blocks | drawn | others
    return pack(tensors, _shared(memory) | _counts(memory))


def read_state(
    memory: SessionState,
    state: Mapping[str, Tensor],
    segments: Sequence[Mapping[str, Tensor]] | None,
    check: Callable[[Mapping[str, Tensor]], None] | None,
) -> SessionState:
    """A new SessionState from a saved `state`, for a session of the same model, plan and prompt.

    `segments` have a bank's blocks if the state was saved without them, the oldest first. The host
    memory of a session that has made nothing yet is used again. Everything is checked and copied,
    and a state that does not fit is refused before the session changes. `check` gets the caller's
    `kept` tensors, and raises if it cannot use them.
    """
    tensors, meta = unpack(state, _shared(memory))
    pos = tensors.get("layers.0.pos")
    slots = pos.shape[2] if pos is not None and pos.dim() == 4 else 0
    _check_counts(memory, meta, slots)
    # an empty bank's memory can be used again
    banks = [] if memory.total_entries else memory.bank_memory()
    layers = _layers_of(memory, tensors, slots, segments, banks)
    _check_texts(memory, tensors, meta["texts"])
    if (camera := memory.features.camera) is not None:
        check_tensor(tensors, "features.camera", camera, (0, 0))
    rest = {k: x for k, x in tensors.items() if k.startswith(("texts.", "features.", KEPT))}
    for name, x in rest.items():
        check_finite(name, x)
    kept = {k.removeprefix(KEPT): x for k, x in rest.items() if k.startswith(KEPT)}
    rest = {name: x.to(memory.spec.device, copy=True) for name, x in rest.items()}
    (*noise, policy_rng) = generators(tensors, memory.spec.device, len(meta["seeds"]))
    made = SessionState(
        memory.spec, memory.latent_frames, memory.lengths, meta["seeds"], layers=layers
    )
    for name in COUNTS:
        setattr(made, name, meta[name])
    made.replay.ready = set(meta["ready"])
    made.texts = [
        Text(rest[f"texts.{i}.k"], rest[f"texts.{i}.v"], rest.get(f"texts.{i}.log_count"))
        for i in range(meta["texts"])
    ]
    made.noise, made.source = memory.noise, replace(memory.source, first=meta["first"])
    made.latents = rest.get(f"{KEPT}latents")
    made.features = Features.read(rest)
    made.generators, made.policy_rng = noise, policy_rng
    if check is not None:
        check(kept)
    return made


def _check_counts(memory: SessionState, meta: Mapping[str, Any], slots: int) -> None:
    """Raise if a state's counts are impossible."""
    shape, cache, frame = memory.spec.shape, memory.spec.plan.cache, meta["latent_frame"]
    least = cache.capacity(shape, memory.prompt, meta["latent_frames"])
    check_range("slots", slots, least, max(slots, least) if cache.grows else least)
    # every chunk finishes latent frames; a prompt change may count a chunk again
    least = -(-frame // (shape.chunk + shape.rolling_frames))
    check_range("chunk", meta["chunk"], least, 2 * frame + 2)
    entries = memory.prompt + shape.max_pass_tokens + frame * shape.tokens_per_frame
    check_range("total_entries", meta["total_entries"], 0, entries)
    room = slots if cache.grows else slots - shape.max_pass_tokens
    check_range("past", meta["past"], 0, min(room, meta["total_entries"]))
    texts = shape.layers if shape.text else 0
    check_range("texts", meta["texts"], len(memory.texts), texts)
    least = memory.text_tokens
    tokens = (least, least) if memory.texts else (0, shape.text)
    check_range("text_tokens", meta["text_tokens"], *tokens)
    for step in meta["ready"]:
        check_range("ready", step, 0, shape.passes - 1)


def _layers_of(
    memory: SessionState,
    tensors: Mapping[str, Tensor],
    slots: int,
    segments: Sequence[Mapping[str, Tensor]] | None,
    banks: list[dict[str, Tensor]],
) -> list[KVStore]:
    """The layers of a state, on the device."""
    empty = memory.spec.empty_layer
    like = empty(slots, memory.latent_frames, banks)
    if segments is not None:
        if like.bank is None:
            refuse("is of a cache without a bank, and `segments` are a bank's", "leave them out")
        if not isinstance(segments, list | tuple) or not all(
            isinstance(segment, Mapping) for segment in segments
        ):
            refuse(f"has {shown(segments)} as segments", "give a list of what the bank returned")
    ranges = {} if like.bank is None else like.bank.ranges()
    for i in range(memory.spec.shape.layers):
        for name, x in like.tensors().items():
            known = ranges.get(name) or whole_numbers(name, slots)
            check_tensor(tensors, f"layers.{i}.{name}", x, known)
        if like.bank is not None:
            used = int(tensors[f"layers.{i}.bank.used"])
            check_blocks(tensors, segments, i, like.bank.host, used)
    layers = [
        like,
        *(empty(slots, memory.latent_frames, banks) for _ in range(memory.spec.shape.layers - 1)),
    ]
    # a stream allocates in inference mode, and its tensors can only be written there
    with torch.inference_mode():
        for i, layer in enumerate(layers):
            for name, x in layer.tensors().items():
                x.copy_(tensors[f"layers.{i}.{name}"])
            for name, x in layer.host_tensors().items() if segments is None else ():
                held = tensors[f"layers.{i}.{name}"]
                x[:, :, : held.shape[2]] = held
            for segment in segments or ():
                assert layer.bank is not None
                layer.bank.load_segment(blocks_of(segment, i))
    return layers


def _check_texts(memory: SessionState, tensors: Mapping[str, Tensor], count: int) -> None:
    """Raise unless a state's prompt tensors match this session's; each needs keys and values."""
    own = {k: x for k, x in _tensors(memory).items() if k.startswith("texts.")}
    for name, x in own.items():
        check_tensor(tensors, name, x, (0, 0))
    for name in [f"texts.{i}.{part}" for i in range(count) for part in ("k", "v")]:
        if name not in tensors:
            refuse(f"lacks {name!r}", AGAIN)


def _tensors(memory: SessionState) -> dict[str, Tensor]:
    tensors = memory.features.tensors()
    for i, layer in enumerate(memory.layers):
        tensors |= {f"layers.{i}.{name}": x for name, x in layer.tensors().items()}
    for i, text in enumerate(memory.texts):
        parts = {"k": text.k, "v": text.v, "log_count": text.log_count}
        tensors |= {f"texts.{i}.{name}": x for name, x in parts.items() if x is not None}
    return tensors if memory.latents is None else tensors | {f"{KEPT}latents": memory.latents}


def _host_tensors(memory: SessionState) -> dict[str, Tensor]:
    """Tensors in host memory: a bank's blocks that are in use."""
    tensors = {}
    for i, layer in enumerate(memory.layers):
        for name, x in layer.host_tensors().items():
            assert layer.bank is not None
            tensors[f"layers.{i}.{name}"] = x[:, :, : int(layer.bank.tensors["used"])]
    return tensors


def _shared(memory: SessionState) -> dict[str, Any]:
    """What must be equal in the session that saved a state and in the one that restores it."""
    return {
        "shape": asdict(memory.spec.shape),
        "plan": str(memory.spec.plan),
        "lengths": memory.lengths,
        "dtype": str(memory.spec.dtype),
        "weights": memory.source.weights,
        "prompt": memory.source.prompt,
        "noise": memory.source.noise,
        "decoder": memory.source.decoder,
    }


def _counts(memory: SessionState) -> dict[str, Any]:
    counts: dict[str, Any] = {name: getattr(memory, name) for name in COUNTS}
    counts |= {"ready": sorted(memory.replay.ready), "texts": len(memory.texts)}
    counts["seeds"] = list(memory.seeds)
    return counts | {"first": memory.source.first}
