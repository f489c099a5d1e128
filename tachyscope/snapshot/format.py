"""The format of a saved state: tensors by name, all checked before any is used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown, spelled
from tachyscope.core.types import kind_of

VERSION = 4
# the counts of a state
COUNTS = (
    "chunk",
    "latent_frame",
    "past",
    "total_entries",
    "made",
    "text_tokens",
    "latent_frames",
)
MAX_COUNT = 2**40
META_BYTES = 2**22  # 40 layers take about 2^16
# what a state must share with the session that restores it, and the advice if it does not
SHARED = {
    "shape": "open the session with the same model and size, on the same rank of as many",
    "plan": "open the session with that plan",
    "dtype": "load the model in that dtype",
    "weights": "load the weights that it was taken with",
    "prompt": "open the session with its newest prompt",
    "lengths": "open the session with its newest prompt",
    "noise": "open the session with the noise that it was opened with, or without any",
    "decoder": "load the model with that decoder",
}
# these are compared by their hashes, which an error does not show
HASHED = {"weights": "other weights", "prompt": "another prompt", "noise": "other noise"}
AGAIN = "take the state again"


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the tensors, and `meta` as bytes of JSON, with a list of the tensors."""
    copied = torch.contiguous_format  # a file holds no strides
    clones = {name: x.clone(memory_format=copied) for name, x in tensors.items()}
    text = json.dumps({"version": VERSION, **meta, "tensors": _listed(clones)}, sort_keys=True)
    return clones | {"meta": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def unpack(
    state: Mapping[str, Tensor], own: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state's tensors and meta.

    Raises unless they are complete, of the right types, and equal to `own` in what must be shared.
    """
    if not isinstance(state, Mapping):
        refuse(f"is a {type(state).__name__}", "give what state() returned")
    for name, x in state.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            refuse(f"has a {type(x).__name__} as {shown(str(name))}", "give what state() returned")
        # an expanded tensor would take more memory when it is copied
        plain = x.layout is torch.strided and not (x.is_meta or x.is_quantized)
        if not plain or x.numel() * x.element_size() > x.untyped_storage().nbytes():
            refuse(f"has no tensor with memory as {shown(name)}", "give what state() returned")
    meta = _read_meta(state.get("meta"))
    tensors = {name: x for name, x in state.items() if name != "meta"}
    version = meta.get("version")
    if type(version) is not int or version != VERSION:
        refuse(f"has version {spelled(version)}, and {VERSION} is read here", AGAIN)
    wanted = {"version", "tensors", "texts", "ready", "first", "seeds", *COUNTS, *SHARED}
    for name in sorted(wanted ^ set(meta)):
        lacks = "lacks" if name in wanted else "has an unknown"
        refuse(f"{lacks} {shown(name)} in its meta", AGAIN)
    _check_shared(meta, json.loads(json.dumps(own)))
    _check_types(meta)
    _check_listed(meta["tensors"], tensors)
    return tensors, meta


def check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        refuse(f"has {name} {spelled(value)}, and {least} to {most} is possible", AGAIN)


def check_tensor(
    tensors: Mapping[str, Tensor], name: str, like: Tensor, whole: tuple[int, int]
) -> None:
    """Raise unless a tensor has the shape and dtype of `like`, and allowed values.

    Floats must be finite, except for NaN and -inf if `like` has some; integers wider than a byte
    must be in the range `whole`, both ends included.
    """
    if name not in tensors:
        refuse(f"lacks {shown(name)}", AGAIN)
    x = tensors[name]
    if x.shape != like.shape or x.dtype != like.dtype:
        refuse(f"has {name} as {kind_of(x)}, and it must be {kind_of(like)}", AGAIN)
    if x.is_floating_point():
        check_finite(name, x, like)
    elif x.element_size() > 1 and x.numel():
        check_range(f"numbers in {name} from", int(x.min()), *whole)
        check_range(f"numbers in {name} up to", int(x.max()), *whole)


def blocks_of(segment: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """One layer's part of a segment of a bank."""
    prefix = f"layers.{layer}."
    return {k.removeprefix(prefix): x for k, x in segment.items() if k.startswith(prefix)}


def check_blocks(
    tensors: Mapping[str, Tensor],
    segments: Sequence[Mapping[str, Tensor]] | None,
    layer: int,
    host: Mapping[str, Tensor],
    used: int,
) -> None:
    """Raise unless a state, or its segments together, has all blocks of a layer's bank."""
    if segments is None:
        for name, x in host.items():
            check_tensor(tensors, f"layers.{layer}.host.{name}", x[:, :, :used], (0, 0))
        return
    size = next(iter(host.values())).shape[:2]
    seen = torch.zeros(*size, used + 1, dtype=torch.bool)
    for number, segment in enumerate(segments):
        parts = blocks_of(segment, layer)
        ids = parts.get("ids")
        if ids is None or ids.dim() != 3 or ids.dtype != torch.int32:
            refuse(f"has no blocks of layer {layer} in segment {number}", AGAIN)
        like = {name: x[:, :, : ids.shape[2]] for name, x in host.items()}
        most = next(iter(host.values())).shape[2]
        shape = torch.zeros(*size, ids.shape[2], dtype=torch.int32)
        check_tensor(parts, "ids", shape, (0, most - 1))
        for name, x in like.items():
            check_tensor(parts, name, x, (0, 0))
        # an older segment may have blocks that the bank has dropped since
        seen.scatter_(2, ids.long().clamp(max=used), True)
    if not bool(seen[:, :, :used].all()):
        refuse(f"lacks blocks of layer {layer} in its segments", AGAIN)


def whole_numbers(name: str, slots: int) -> tuple[int, int]:
    """The range of integers in a layer's tensor; most are slot numbers."""
    known = {
        "replay.age": (0, MAX_COUNT),
        "attention.map": (-1, slots - 1),
        "attention.count": (0, slots),
    }
    return known.get(name, (0, slots - 1))


def check_finite(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Raise if x has NaN or infinity and `like` does not; in log counts -inf is an empty slot."""
    fine = x.isfinite()
    if name.endswith("log_count") or (like is not None and bool((like == -torch.inf).any())):
        fine |= x == -torch.inf
    if like is not None and bool(like.isnan().any()):
        fine |= x.isnan()
    if not bool(fine.all()):
        refuse(f"has NaN or infinity in {name}", AGAIN)


def generators(
    tensors: Mapping[str, Tensor], device: torch.device, videos: int
) -> list[torch.Generator]:
    """The restored generators: each video's noise, then that of policies."""
    states = []
    for name, count in (("generator", videos), ("policy_rng", 1)):
        try:
            for state in tensors[name].cpu().chunk(count):
                states.append(torch.Generator(device))
                states[-1].set_state(state.clone())  # a view would crash torch
        except (KeyError, RuntimeError, TypeError):
            refuse(f"has no state of a {device.type} generator as {name!r}", AGAIN)
    if len(states) != videos + 1:
        refuse(f"has noise of other than {videos} videos", AGAIN)
    return states


def prompt_of(state: Mapping[str, Tensor]) -> str:
    """The hash of a state's prompt; empty if it has none."""
    prompt = _read_meta(state.get("meta")).get("prompt")
    return prompt if isinstance(prompt, str) else ""


def _read_meta(packed: Tensor | None) -> dict[str, Any]:
    if packed is None:
        refuse("lacks 'meta'", "give what state() returned")
    if packed.dtype != torch.uint8 or packed.dim() != 1 or len(packed) > META_BYTES:
        refuse(f"has a meta of {kind_of(packed)}, and it must be bytes of JSON", AGAIN)
    try:
        meta = json.loads(bytes(packed.tolist()))
    except (ValueError, RecursionError):
        refuse("has a meta that is not JSON", AGAIN)
    if not isinstance(meta, dict):
        refuse(f"has a meta that is {spelled(meta)}, and it must be an object", AGAIN)
    return meta


def _check_shared(meta: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name, advice in SHARED.items():
        theirs, ours = meta[name], own[name]
        if theirs == ours:
            continue
        if name in HASHED:
            refuse(f"was taken with {HASHED[name]}", advice)
        if name == "shape":
            # show the first number that differs
            numbers = theirs if isinstance(theirs, dict) else {}
            name = next((key for key in ours if numbers.get(key) != ours[key]), name)
            theirs, ours = numbers.get(name), ours.get(name)
        refuse(f"was taken with {name}={spelled(theirs)}, the session has {spelled(ours)}", advice)


def _check_types(meta: Mapping[str, Any]) -> None:
    for name in (*COUNTS, "texts"):
        value = meta[name]
        if name == "latent_frames" and value is None:
            continue
        if type(value) is not int:
            refuse(f"has {name} {spelled(value)}, and it must be a whole number", AGAIN)
        check_range(name, value, 0, MAX_COUNT)
    seeds = meta["seeds"]
    if type(seeds) is not list or not seeds or any(type(seed) is not int for seed in seeds):
        refuse(f"has seeds {spelled(seeds)}, and they must be whole numbers, one a video", AGAIN)
    for seed in seeds:
        check_range("seeds", seed, -(2**63), 2**64 - 1)  # torch takes negative ones too
    ready = meta["ready"]
    if not isinstance(ready, list) or any(type(x) is not int for x in ready):
        refuse(f"has ready {spelled(ready)}, and it must be a list of whole numbers", AGAIN)
    if not isinstance(meta["first"], str):
        refuse(f"has first {spelled(meta['first'])}, and it must be text", AGAIN)


def _check_listed(listed: Any, tensors: Mapping[str, Tensor]) -> None:
    names = _listed(tensors)
    if not isinstance(listed, dict):
        refuse("has no list of its tensors", AGAIN)
    for name in (*listed, *names):
        if name not in names:
            refuse(f"lacks {shown(name)}", AGAIN)
        if name not in listed:
            refuse(f"has {shown(name)}, which its list of tensors does not", AGAIN)
        if listed[name] != names[name]:
            kind = kind_of(tensors[name])
            refuse(f"has {shown(name)} as {kind}, and its list of tensors says otherwise", AGAIN)


def _listed(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: [str(x.dtype), list(x.shape)] for name, x in tensors.items()}


def refuse(what: str, advice: str) -> NoReturn:
    raise TachyscopeError(f"this state {what}: {advice}")
