"""Predicts the memory of a plan by running the model's own code on meta tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.kv_allocation import make_room, slots_for
from tachyscope.core.plan import Plan
from tachyscope.core.request import chunks_for
from tachyscope.core.session_state import SessionSpec, SessionState
from tachyscope.core.types import Rope, Shape
from tachyscope.core.work import Work
from tachyscope.memory.allocations import peak, tensor_bytes
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import SIZED, changed, find_dtype, find_entry, load
from tachyscope.store import LayerPass

# the share of a GPU's memory that tensors may take; the rest is for CUDA and fragmentation
ROOM = 0.95


class MetaSession:
    """A session's state on the meta device, as at the end of a rollout of this length.

    One layer stands for all. An unbounded cache is assumed to merge nothing: on CUDA, merged slots
    stay in use.
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
        spec = SessionSpec(shape, plan, rope, torch.device("meta"), dtype)
        self.shape, self.plan = shape, plan
        slots = slots_for(plan, shape, lengths, latent_frames)
        layers = [spec.empty_layer(slots, latent_frames)]
        self.state = state = SessionState(spec, latent_frames, lengths, (0,), layers)
        state.chunk, state.now = 1, shape.max_pass_tokens
        entries = state.prompt + latent_frames * shape.tokens_per_frame
        step = 1 if shape.token_by_token else shape.max_pass_tokens
        while plan.cache.grows and (slots := layers[0].slots) < entries:
            # grow as the first pass without room would
            state.past = state.prompt + (slots - state.prompt) // step * step
            p = self.layer_pass()
            make_room([p._replace(ctx=p.ctx._replace(start=0))], plan)
        state.past = max(0, min(layers[0].slots, entries) - shape.max_pass_tokens)
        state.total_entries = max(state.past, entries - shape.max_pass_tokens)

    def layer_pass(self) -> LayerPass:
        """The first pass over the next chunk, as the last layer's policies receive it."""
        shape, state = self.shape, self.state
        tokens = 1 if shape.token_by_token else shape.max_pass_tokens
        start, noise = shape.max_pass_tokens - tokens, (1.0,) * shape.chunk
        ctx = state.context(tokens, start, shape.passes - 1, shape.passes, noise)
        ctx = ctx._replace(layer=shape.layers - 1, plain=not self.plan.cache.merges)
        return LayerPass(ctx, state.layers[0], Work(), state.rotate, state.policy_rng)

    def tensors(self) -> dict[str, int]:
        """Bytes of all layers, by the tensors' names."""
        (layer,) = self.state.layers
        held = layer.tensors() | layer.buffers()
        return {name: self.shape.layers * tensor_bytes([x]) for name, x in held.items()}

    def host(self) -> int:
        """Bytes of all layers in host memory."""
        (layer,) = self.state.layers
        return self.shape.layers * tensor_bytes(layer.host_tensors().values())

    def reading(self) -> int:
        """Peak bytes of one layer's attention, without its inputs and output."""
        plan, p, shape = self.plan, self.layer_pass(), self.shape
        q = self._empty(shape.heads, p.ctx.tokens)
        measured = peak(lambda: plan.attention.attend(p, q))
        # what each layer gathers in a later pass stays until the end of the chunk; the clean pass
        # ends in its last layer with a write
        others = shape.layers - (1 if shape.passes > 2 else 2)
        measured += max(0, others) * tensor_bytes(p.layer.scratch)
        if plan.text is None:
            return measured
        k, v = (self._empty(shape.heads, shape.text) for _ in range(2))
        policy, text = plan.text, plan.text.prepare(k, v, (shape.text,) * shape.batch)
        return max(measured, peak(lambda: policy.attend(q, text, Work())))

    def committing(self) -> int:
        """Peak bytes of a commit in one layer: bringing it within budget, or indexing it."""
        plan, p, shape = self.plan, self.layer_pass(), self.shape
        n = shape.chunk * shape.tokens_per_frame

        def commit() -> None:
            for policy in (plan.cache, plan.attention):
                if policy.wants_poses:
                    poses = torch.empty(shape.batch, shape.chunk, 3, 4, device="meta")
                    policy.before_chunk(p, poses)
            plan.cache.commit(p._replace(ctx=p.ctx._replace(start=0)), n)

        def compress() -> None:
            left = plan.cache.past_in_pass(shape, self.state.past, p.ctx.tokens)
            if left < self.state.past:
                plan.cache.compress(p, self._empty(shape.heads, p.ctx.tokens), left)

        return max(
            peak(compress),
            peak(lambda: plan.attention.restore_order(p, self.state.past)),
            peak(commit),
            peak(lambda: plan.attention.build_index(p, self.state.past)),
        )

    def _empty(self, heads: int, tokens: int) -> Tensor:
        size = (self.shape.batch, heads, tokens, self.shape.head_dim)
        return torch.empty(size, dtype=self.state.spec.dtype, device="meta")


@dataclasses.dataclass(frozen=True)
class Need:
    """Predicted bytes by part: what stays allocated, and what is temporary."""

    weights: int
    decoder: int  # its weights
    decoder_state: int  # what it keeps between chunks
    cache: dict[str, int]  # by tensor
    host: int  # of the cache in host memory; of the sums below only in `on_cpu`
    prompt: int
    activations: int  # of a pass, attention left out
    attention: int
    committing: int
    decoding: int
    decoding_one: int
    beside: bool  # whether a chunk is decoded while the next is made

    @property
    def stays(self) -> int:
        return self.weights + self.decoder + self.of_video

    @property
    def of_video(self) -> int:
        """What stays for one video; two videos of one model share only the weights."""
        return self.decoder_state + sum(self.cache.values()) + self.prompt

    @property
    def of_session(self) -> int:
        """What a served session keeps on a GPU, with a CUDA graph's own memory pool."""
        return self.of_video + self.making

    @property
    def beside_sessions(self) -> int:
        """What a server keeps free: for making and decoding a chunk, and for a session's copy."""
        return self.making + self.decoding + self.of_video

    @property
    def making(self) -> int:
        """The peak of temporary memory while a chunk is made."""
        return max(self.activations + self.attention, self.committing)

    @property
    def peak(self) -> int:
        """The peak on a GPU: what stays, making a chunk, and decoding beside it or after it."""
        if self.beside:
            return self.stays + self.making + self.decoding
        return self.stays + max(self.making, self.decoding)

    @property
    def on_cpu(self) -> int:
        """The peak on a CPU, which makes and decodes by turns, and decodes in small parts.

        malloc returns about half of what the smaller turn took before the larger one.
        """
        turns = self.making, self.decoding_one or self.decoding
        return self.stays + self.host + max(turns) + min(turns) // 2

    @property
    def undecoded(self) -> int:
        """The peak without decoding."""
        return self.stays - self.decoder - self.decoder_state + self.making


def sized(
    name: str,
    weights: str | Path | None = None,
    dtype: str = "bfloat16",
    *,
    decoder: str | Path | None = None,
    precision: str | None = None,
    decoder_bands: int = 1,
) -> VideoModel:
    """A model on the meta device, by its name or its published size.

    If the name is that of an architecture, the checkpoint is read for its shapes. `decoder`,
    `precision` and `decoder_bands` are as in `load`.
    """
    wanted = find_dtype(dtype)
    if name in SIZED:
        if weights not in (None, "random", "download"):
            raise TachyscopeError(f"the size of {name} is known: leave `weights` out")
        return changed(SIZED[name](wanted, decoder), precision, decoder_bands)
    find_entry(name, SIZED)
    made = load(name, weights, dtype=dtype, decoder=decoder).on_meta()
    return changed(made, precision, decoder_bands)


def need(
    model: VideoModel,
    plan: Plan | str,
    *,
    frames: int,
    size: tuple[int, int] | None = None,
    prompt: str = "",
    given: int = 0,
    follows: bool = False,
) -> Need:
    """The memory of a rollout of `frames` frames after `given` ones, by a model on meta.

    The prompt matters for models that hold it in their cache. `follows`: with a source video.
    """
    session = meta_session(model, plan, frames, size, prompt, given)
    parts = model_parts(model, session)
    if follows:
        parts["decoder_state"] += model.encoder_state(session.shape)
    return need_of(session, parts)


def meta_session(
    model: VideoModel,
    plan: Plan | str,
    frames: int,
    size: tuple[int, int] | None = None,
    prompt: str = "",
    given: int = 0,
) -> MetaSession:
    """The session at the end of such a rollout."""
    shape = model.shape(size)
    # a prompt for cross-attention fills no cache entries
    lengths = () if shape.text else model.encode_prompt(prompt).lengths
    known = chunks_for(model, 1, 0, given) if given else 0
    latents = known + chunks_for(model, shape.chunk, known, frames) * shape.chunk
    return MetaSession(
        shape, parse_plan(model, plan), model.rope(shape), latent_frames=latents, lengths=lengths,
        dtype=model.dtype,
    )  # fmt: skip


def model_parts(model: VideoModel, session: MetaSession) -> dict[str, Any]:
    """The parts that depend on model and size, but not on the plan."""
    parts = model.memory_parts(session.shape, session.state.prompt)
    # as a rollout on a GPU does it
    return {**parts._asdict(), "beside": model.overlaps_decode}


def need_of(session: MetaSession, parts: Mapping[str, Any]) -> Need:
    return Need(
        cache=session.tensors(),
        host=session.host(),
        attention=session.reading(),
        committing=session.committing(),
        **parts,
    )
