"""What memory a plan will take: a model's own code, run on tensors that have shapes and no data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tachyscope.arguments import parse_plan
from tachyscope.bounds import check
from tachyscope.cache.bank import Bank
from tachyscope.cache.merge import Merge
from tachyscope.errors import TachyscopeError
from tachyscope.layers import empty_layer, make_room, slots_for
from tachyscope.meter import Meter
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import MODELS, SIZED, find_dtype, load
from tachyscope.peak_memory import peak, tensor_bytes
from tachyscope.plan import Plan, spell
from tachyscope.results import Document, document
from tachyscope.store import KVStore
from tachyscope.stream import chunks_for
from tachyscope.tables import format_table
from tachyscope.types import PassContext, Rope, Shape, Size

# of a GPU's memory; the rest is left to CUDA's own and to gaps between tensors
ROOM = 0.95


class Shapes:
    """A session's layers on the meta device, grown as a rollout of its length would grow them.

    A cache without a bound is taken to merge nothing, as it does on CUDA, where emptied slots stay
    in use.
    """

    def __init__(
        self,
        shape: Shape,
        plan: Plan,
        rope: Rope,
        *,
        latent_frames: int,
        lengths: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        plan.check(shape)
        self.shape, self.plan, self.rope, self.dtype = shape, plan, rope, dtype
        self.latent_frames, self.lengths, self.device = latent_frames, lengths, torch.device("meta")
        cache = plan.cache
        self.prompt, self.past, self.now = max(self.lengths, default=0), 0, shape.max_pass_tokens
        self.total = 0
        self.left_padding = tuple(self.prompt - n for n in self.lengths)
        self._origin = torch.zeros(shape.batch, 1, 1, 1, dtype=torch.float64, device=self.device)
        slots = slots_for(plan, shape, lengths, latent_frames)
        # one stands for all
        self.layers = [empty_layer(plan, shape, slots, dtype, self.device, latent_frames)]
        entries = self.prompt + latent_frames * shape.tokens_per_frame
        step = 1 if shape.token_by_token else shape.max_pass_tokens
        while cache.grows and (slots := self.layers[0].slots) < entries:
            # up to the first pass that finds no room
            self.past = self.prompt + (slots - self.prompt) // step * step
            make_room(self.layers, plan, self.moment()._replace(start=0), Meter())
        slots = self.layers[0].slots
        self.past = max(0, min(slots, entries) - shape.max_pass_tokens)
        self.total = max(self.past, entries - shape.max_pass_tokens)

    def moment(self) -> PassContext:
        """The first pass over the next chunk, in the last layer."""
        shape = self.shape
        tokens = 1 if shape.token_by_token else shape.max_pass_tokens
        return PassContext(
            shape, shape.layers - 1, 1, self.past, shape.max_pass_tokens - tokens, tokens,
            shape.passes - 1, shape.passes, (1.0,) * shape.chunk, self.prompt, self.left_padding,
            not self.plan.cache.merges, total=self.total,
        )  # fmt: skip

    def tensors(self) -> dict[str, int]:
        """Bytes of all layers, by the tensors' names."""
        (layer,) = self.layers
        held = layer.tensors() | layer.buffers()
        return {name: self.shape.layers * tensor_bytes([x]) for name, x in held.items()}

    def host(self) -> int:
        """Bytes of all layers in host memory."""
        (layer,) = self.layers
        return self.shape.layers * tensor_bytes(layer.host_tensors().values())

    def reading(self) -> int:
        """Bytes that one layer's attention works with, beside what goes in and out."""
        plan, ctx, shape = self.plan, self.moment(), self.shape
        q = self._empty(shape.heads, ctx.tokens)
        measured = peak(lambda: plan.attention.attend(q, self.layers[0], ctx, Meter()))
        if plan.text is None:
            return measured
        k, v = (self._empty(shape.heads, shape.text) for _ in range(2))
        policy, text = plan.text, plan.text.prepare(k, v, (shape.text,) * shape.batch)
        return max(measured, peak(lambda: policy.attend(q, text, Meter())))

    def committing(self) -> int:
        """Bytes that bringing one layer within its budget works with, or indexing it."""
        plan, layer, ctx, shape = self.plan, self.layers[0], self.moment(), self.shape
        n = shape.chunk * shape.tokens_per_frame

        def commit(layer: KVStore) -> None:
            if plan.cache.wants_poses:
                poses = torch.empty(shape.batch, shape.chunk, 3, 4, device=self.device)
                plan.cache.retrieve_by(layer, shape, ctx.total, poses, Meter())
            plan.cache.commit(layer, ctx._replace(start=0), n, self._rotate, Meter())

        def compress(layer: KVStore) -> None:
            left = plan.cache.past_in_pass(shape, self.past, ctx.tokens)
            if left < self.past:
                q = self._empty(shape.heads, ctx.tokens)
                plan.cache.compress(layer, ctx, q, left, self._rotate, Meter())

        return max(
            peak(lambda: compress(layer)),
            peak(lambda: plan.attention.restore_order(layer, ctx, self.past)),
            peak(lambda: commit(layer)),
            peak(lambda: plan.attention.build_index(layer, ctx, self.past, Meter())),
        )

    def _rotate(self, unrotated: Tensor, pos: Tensor) -> Tensor:
        return self.rope.rotate(unrotated, pos, self._origin)

    def _empty(self, heads: int, tokens: int) -> Tensor:
        size = (self.shape.batch, heads, tokens, self.shape.head_dim)
        return torch.empty(size, dtype=self.dtype, device=self.device)


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes by what takes them: what stays, and what comes and goes."""

    weights: int
    decoder: int  # its weights
    decoder_state: int  # what it keeps of a video between chunks
    cache: dict[str, int]  # by tensor
    host: int  # of the cache in host memory, which is no part of the sums
    prompt: int
    activations: int  # of a pass, attention left out
    attention: int
    committing: int
    decoding: int
    beside: bool  # whether a chunk is decoded while the next is made

    @property
    def stays(self) -> int:
        return self.weights + self.decoder + self.of_video

    @property
    def of_video(self) -> int:
        """What stays of one video: two of one model share the weights alone."""
        return self.decoder_state + sum(self.cache.values()) + self.prompt

    @property
    def making(self) -> int:
        """The largest of what comes and goes by turns while a chunk is made."""
        return max(self.activations + self.attention, self.committing)

    @property
    def peak(self) -> int:
        """What stays, making a chunk, and decoding beside it or after."""
        if self.beside:
            return self.stays + self.making + self.decoding
        return self.stays + max(self.making, self.decoding)

    @property
    def undecoded(self) -> int:
        """The peak where nothing is shown."""
        return self.stays - self.decoder - self.decoder_state + self.making


def sized(name: str, weights: str | Path | None = None, dtype: str = "bfloat16") -> VideoModel:
    """A model whose weights are shapes alone, by its name or its published size.

    Where the name stands for an architecture, the checkpoint is read for its shapes.
    """
    wanted = find_dtype(dtype)
    if name in SIZED:
        if weights is not None:
            raise TachyscopeError(f"the size of {name} is known: leave `weights` out")
        return SIZED[name](wanted)
    if name not in MODELS:
        known = ", ".join(dict.fromkeys((*MODELS, *SIZED)))
        raise TachyscopeError(f"no model {name!r}; there are: {known}")
    return load(name, weights, dtype=dtype).on_meta()


def need(
    model: VideoModel,
    plan: Plan | str,
    *,
    frames: int,
    size: tuple[int, int] | None = None,
    prompt: str = "",
) -> Need:
    """What a rollout of so many frames will take, for a model on the meta device.

    The prompt matters in models that hold it in their cache.
    """
    session = _shapes(model, plan, frames, size, prompt)
    return _need(session, _model_parts(model, session))


def _shapes(
    model: VideoModel,
    plan: Plan | str,
    frames: int,
    size: tuple[int, int] | None,
    prompt: str,
) -> Shapes:
    shape = model.shape(size)
    # one that is read by cross-attention fills no entries
    lengths = () if shape.text else model.encode_prompt(prompt).lengths
    latents = chunks_for(model, shape.chunk, 0, frames) * shape.chunk
    return Shapes(
        shape, parse_plan(model, plan), model.rope(shape), latent_frames=latents, lengths=lengths,
        dtype=model.dtype,
    )  # fmt: skip


def _model_parts(model: VideoModel, session: Shapes) -> dict[str, Any]:
    """What hangs on the model and the size, and on no plan."""
    parts = model.memory_parts(session.shape, session.prompt)
    # as a rollout on a GPU does it
    return {**parts._asdict(), "beside": model.overlaps_decode}


def _need(session: Shapes, parts: Mapping[str, Any]) -> Need:
    return Need(
        cache=session.tensors(),
        host=session.host(),
        attention=session.reading(),
        committing=session.committing(),
        **parts,
    )


def fit(
    model: VideoModel,
    plan: Plan | str,
    *,
    frames: int,
    size: tuple[int, int] | None = None,
    prompt: str = "",
    gpu_gb: float | None = None,
    command: str = "",
) -> Document:
    """Whether a plan's peak fits a GPU; if not, the largest budget that would. A document."""
    check("frames", frames)
    if gpu_gb is not None:
        check("gpu_gb", gpu_gb)
    parsed = parse_plan(model, plan)
    session = _shapes(model, parsed, frames, size, prompt)
    shape = session.shape
    parts = _model_parts(model, session)
    result = _need(session, parts)
    bytes_of = dataclasses.asdict(result)
    beside = bytes_of.pop("beside")
    row: Document = {
        "name": "plan" if isinstance(plan, Plan) else plan,
        "plan": str(parsed),
        "model": model.name,
        "frames": frames,
        "grid": list(shape.grid),
        "dtype": str(model.dtype).removeprefix("torch."),
        **{f"{key}_bytes": value for key, value in bytes_of.items()},
        "decoding_beside": beside,
        "peak_bytes": result.peak,
    }
    if gpu_gb is not None:
        room = ROOM * gpu_gb * 1e9
        row |= {"gpu_gb": gpu_gb, "fits": result.peak <= room}
        if not row["fits"]:

            def fits(count: int) -> bool:
                trial = _shapes(model, bounded(parsed, count), frames, size, prompt)
                stays = sum(
                    parts[name] for name in ("weights", "decoder", "decoder_state", "prompt")
                )
                if stays + sum(trial.tensors().values()) > room:
                    return False
                return _need(trial, parts).peak <= room

            best = largest(fits, session.latent_frames or 0)
            row["largest_budget"] = best and spell(bounded(parsed, best).cache)
    return document("bench-fit", [row], command)


def bounded(plan: Plan, count: int) -> Plan:
    """The plan with a cache of so many latent frames; one without a budget merges instead."""
    cache = plan.cache
    if isinstance(cache, Bank):
        return dataclasses.replace(
            plan, cache=dataclasses.replace(cache, resident=Size(count, True))
        )
    budget: Any = {"budget": Size(count, True)}
    if getattr(cache, "budget", None) is None:
        return dataclasses.replace(plan, cache=Merge(**budget))
    return dataclasses.replace(plan, cache=dataclasses.replace(cast(Any, cache), **budget))


def largest(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest number up to `most` that fits, where more takes more; some may be refused."""

    def allowed(count: int) -> bool:
        try:
            return fits(count)
        except TachyscopeError:
            return True  # fewer than a policy must keep, or can read a share of

    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    try:
        return low if low and fits(low) else None
    except TachyscopeError:
        return None


def lines(document: Document) -> list[str]:
    """A document of `fit` as a reader wants it."""
    (row,) = document["rows"]
    cache = row["cache_bytes"]
    stays = {
        "weights": row["weights_bytes"],
        "decoder": row["decoder_bytes"],
        "its state between chunks": row["decoder_state_bytes"],
        **{f"cache: {name}": n for name, n in cache.items() if not name.startswith("bank.")},
        "cache: a bank's index": sum(n for name, n in cache.items() if name.startswith("bank.")),
        "prompt's keys and values": row["prompt_bytes"],
    }
    turns = [
        ("a pass's activations", row["activations_bytes"]),
        ("with it, attention", row["attention_bytes"]),
        ("or the cache's upkeep", row["committing_bytes"]),
        ("beside, decoding" if row["decoding_beside"] else "or decoding", row["decoding_bytes"]),
    ]
    sizes = [(name, size) for name, size in stays.items() if size]
    sizes += [("stays", sum(stays.values())), *turns, ("peak", row["peak_bytes"])]
    if row["host_bytes"]:
        sizes.append(("in host memory", row["host_bytes"]))
    high, wide = row["grid"]
    out = [
        f"{row['model']} {row['dtype']}, {row['frames']} frames",
        f"{high}x{wide} tokens a latent frame",
        row["plan"],
        *format_table(["", "GB"], [[name, f"{size / 1e9:.3f}"] for name, size in sizes]),
    ]
    if "fits" not in row:
        return out
    gpu = f"{row['gpu_gb']:g} GB, of which {1 - ROOM:.0%} are left to CUDA"
    if row["fits"]:
        return [*out, f"fits {gpu}"]
    budget = row["largest_budget"]
    advice = f"use cache={budget}" if budget else "no budget of the cache would: shrink the size"
    return [*out, f"does not fit {gpu}: {advice}"]
