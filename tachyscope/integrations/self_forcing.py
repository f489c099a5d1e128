"""Self-Forcing and repositories of its shape, accelerated in their own code.

Known by shape: a model with `_forward_inference(x, t, context, seq_len, …, kv_cache,
crossattn_cache, current_start)` and `blocks` whose `self_attn` and `cross_attn` have q, k, v, o,
norm_q and norm_k. State lives in the host's own list of cache dicts: two videos do not meet, and
memory goes when the host drops them.

Rolling-Forcing's passes go over several chunks, of which the first is finished: a pass with
`updating_cache` leaves it. Krea's server makes its cache anew for every chunk, of clean frames in
one pass behind a block-causal mask: here they come chunk by chunk. LongLive computes its window
anew behind a new prompt in one pass without a mask: `chunk` must be as wide.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan, spell
from tachyscope.integrations.accelerate import (
    Accelerated,
    Patches,
    check_options,
    replay_through,
    uncompiled,
)
from tachyscope.integrations.video_cache import VideoCache

KEY = "tachyscope"  # of our cache in the host's
CHUNK, PASSES = 3, 5  # latent frames, and denoising passes with the clean one, unless it says
UPDATES = "_apply_cache_updates"  # a method of models that write all layers' caches at the end
LIMIT = 1e-2  # of a chunk's relative error to the host's own attention, which may be bfloat16
PARTS = ("q", "k", "v", "o", "norm_q", "norm_k", "num_heads", "head_dim")
OWN = ("kv_cache1", "kv_cache_clean")  # a pipeline's own cache
WORDS = 300  # of the random prompt in the check; an image's 257 tokens would be the first ones
TOKENS_480P = 1560  # of a latent frame, a number in some repositories' code


@final
class SelfForcing(Accelerated):
    @staticmethod
    def matches(thing: Any) -> bool:
        return _model_of(thing) is not None

    def __init__(self, thing: Any, plan: str | Plan, options: Mapping[str, Any]) -> None:
        check_options(options, "check", "chunk", "latent_frames", "passes")
        model = _model_of(thing)
        assert model is not None
        if KEY in vars(model):
            raise TachyscopeError("this model is accelerated already: remove() that first")
        steps = getattr(thing, "denoising_step_list", None)
        self.model, self.pipeline = model, thing if hasattr(thing, "_initialize_kv_cache") else None
        part = model.blocks[0].self_attn
        self.rolls = "updating_cache" in inspect.signature(part.forward).parameters
        self.recomputes = hasattr(part, "fuse_projections")
        kind = "rolling" if self.rolls else "chunks"
        self.plan = Plan.parse(plan, kind) if isinstance(plan, str) else plan
        if self.plan.replay is not None and (self.rolls or self.recomputes):
            raise TachyscopeError(
                f"replay={spell(self.plan.replay)} finds nothing of the last chunk's passes in a "
                f"model that rolls over chunks or computes its window anew: leave replay out"
            )
        self.patches = Patches()
        self.chunk = options.get("chunk") or getattr(model, "num_frame_per_block", None) or CHUNK
        self.chunk = max(self.chunk, getattr(thing, "num_frame_per_block", None) or 1)
        self.block = self.chunk  # latent frames that are finished together
        count = len(steps) if steps is not None else PASSES - 1
        if self.rolls:  # a chunk a step is under way, and each pass has a clean one behind it
            self.chunk, count = self.chunk * count, 1
        self.passes = options.get("passes") or count + 1
        self.latent_frames = options.get("latent_frames")
        self.cache = self._new_cache(0)  # a wrong plan is refused here, not in the first pass
        self._end = 0  # of the present pass, in tokens
        self._lengths: tuple[Tensor, list[int]] | None = None  # of the prompt seen last
        if options.get("check", True):
            check_parity(model, self.block)
        self._attach()

    def stats(self) -> dict[str, float]:
        return self.cache.stats()

    def _new_cache(self, prompt_tokens: int) -> VideoCache:
        return VideoCache(
            self.plan, layers=len(self.model.blocks), chunk=self.chunk, passes=self.passes,
            latent_frames=self.latent_frames, prompt_tokens=prompt_tokens,
        )  # fmt: skip

    def _attach(self) -> None:
        model, patch = self.model, self.patches.set
        patch(model, KEY, self)
        inner = model._forward_inference
        patch(model, "_forward_inference", MethodType(self._forward(inner), model))
        for layer, block in enumerate(model.blocks):
            for part, fn in (
                (block.self_attn, self._self_attention),
                (block.cross_attn, self._cross_attention),
            ):
                patch(part, "forward", MethodType(partial(_by_layer, fn, layer), part))
        replay_through(self.patches, model.blocks, self.plan, lambda: self.cache)
        if self.pipeline is not None:
            # the model's own cache is allocated in full otherwise, beside the plan's
            make = MethodType(_initialize_kv_cache, self.pipeline)
            patch(self.pipeline, "_initialize_kv_cache", make)
            self._drop_own()
            self.patches.on_undo(self._drop_own)  # allocated again with its next video

    def _drop_own(self) -> None:
        for name in _own_caches(self.pipeline):
            setattr(self.pipeline, name, None)

    def _forward(self, inner: Any) -> Any:
        names = inspect.signature(inner)

        def forward(model: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            given = names.bind(x, *args, **kwargs)
            stores = given.arguments.get("kv_cache")
            if stores is None:
                raise TachyscopeError(
                    "an accelerated model needs its kv_cache: pass a list of one dict a layer"
                )
            _, time, rows, columns = (
                size // patch
                for size, patch in zip(x[0].shape, (1, *model.patch_size), strict=True)
            )
            if self.recomputes and model.block_mask is not None:
                return self._recompute(inner, given, time, (rows, columns))
            frame = int(given.arguments.get("current_start") or 0) // (rows * columns)
            clean = self.rolls and kwargs.get("updating_cache")
            self._begin(stores, frame, time, (rows, columns), 0.0 if clean else 1.0)
            return inner(*given.args, **given.kwargs)

        # this frame alone: the model inside is compiled where the host compiles it
        outside_graphs: Any = torch.compiler.disable(forward, recursive=False)
        return outside_graphs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(
        self, stores: Any, frame: int, frames: int, grid: tuple[int, int], noise: float
    ) -> None:
        if frames > self.chunk:
            raise TachyscopeError(
                f"a pass over {frames} latent frames, where a chunk has {self.chunk}: give "
                f"accelerate(…, chunk={frames}), or more for a later new prompt"
            )
        self.cache = stores[0].get(KEY) or self._new_cache(self.model.text_len)
        stores[0][KEY] = self.cache
        self.cache.begin(frame, frames, grid, noise)
        self._end = (frame + frames) * grid[0] * grid[1]

    def _recompute(self, inner: Any, given: Any, time: int, grid: tuple[int, int]) -> Tensor:
        """Clean frames behind a block-causal mask, from position 0 on, whatever `current_start`."""
        what, out = given.arguments, []
        x, t, size = torch.stack(list(what["x"])), what["t"], self.model.patch_size[0]
        for frame in range(0, time, self.block):
            frames = min(self.block, time - frame)
            what["x"] = x.narrow(2, frame * size, frames * size)
            if t.dim() == 2 and t.shape[1] == time:
                what["t"] = t.narrow(1, frame, frames)
            what["current_start"] = frame * grid[0] * grid[1]
            self._begin(what["kv_cache"], frame, frames, grid, 0.0)
            out.append(inner(*given.args, **given.kwargs))
        return torch.cat(out, 2)

    def _self_attention(self, layer: int, part: Any, x: Tensor, *_: Any, **__: Any) -> Any:
        out = attend(self.cache, layer, part, x)
        # where the model writes its caches itself: where it ends, and nothing to write
        return (out, (self._end, self._end, None)) if hasattr(self.model, UPDATES) else out

    def _cross_attention(
        self,
        layer: int,
        part: Any,
        x: Tensor,
        context: Tensor,
        context_lens: Any = None,
        crossattn_cache: dict[str, Any] | None = None,
        **_: Any,
    ) -> Tensor:
        store = {} if crossattn_cache is None else crossattn_cache
        # the host's own flag says that the prompt is a new one
        if not store.get("is_init") or not self.cache.has_prompt:
            store["is_init"] = True
            set_prompt(self.cache, layer, part, context, self._prompt_lengths(context))
        return cross(self.cache, layer, part, x)

    def _prompt_lengths(self, context: Tensor) -> list[int]:
        if self._lengths is None or self._lengths[0] is not context:
            self._lengths = context, prompt_lengths(context)
        return self._lengths[1]


def attend(cache: VideoCache, layer: int, part: Any, x: Tensor) -> Tensor:
    """The output of `part`, a self-attention module, for x [B, S, W] behind the cache's past."""
    if getattr(part, "fused_projections", False):
        q, k, v = part.to_qkv(x).chunk(3, dim=-1)
    else:
        q, k, v = part.q(x), part.k(x), part.v(x)
    v = _heads(part, v)
    q = _heads(part, part.norm_q(q)).type_as(v)
    k = _heads(part, part.norm_k(k)).type_as(v)
    out: Tensor = part.o(cache.attend(layer, q, k, v).transpose(1, 2).flatten(2))
    return out


def set_prompt(
    cache: VideoCache, layer: int, part: Any, context: Tensor, lengths: Sequence[int]
) -> None:
    """Give the cache the prompt of `part`, a cross-attention module."""
    k, v = _heads(part, part.norm_k(part.k(context))), _heads(part, part.v(context))
    cache.set_prompt(layer, k.type_as(v), v, lengths)


def cross(cache: VideoCache, layer: int, part: Any, x: Tensor) -> Tensor:
    """The output of `part`, a cross-attention module, for x [B, S, W] over the cache's prompt."""
    q = _heads(part, part.norm_q(part.q(x)))
    out: Tensor = part.o(cache.cross(layer, q).transpose(1, 2).flatten(2))
    return out


def prompt_lengths(context: Tensor) -> list[int]:
    """Tokens of each row of embedded prompts [B, L, W] before its padding, which is all alike."""
    same = (context == context[:, -1:]).all(-1).flip(1)
    pads = same.long().cumprod(1).sum(1).tolist()
    return [context.shape[1] - (n if n > 1 else 0) for n in pads]


@torch.no_grad()
def check_parity(model: Any, frames: int) -> None:
    """Raise unless dense attention, over two random chunks and a prompt, equals the model's own."""
    part = model.blocks[0].self_attn
    weight = (part.to_qkv if getattr(part, "fused_projections", False) else part.q).weight
    grid = (2, 3)
    tokens = frames * grid[0] * grid[1]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2 * tokens, weight.shape[1], generator=rng).to(weight)
    cache = VideoCache("dense", layers=1, chunk=frames, passes=1)
    for chunk, part_of_x in enumerate(x.split(tokens, 1)):
        cache.begin(chunk * frames, frames, grid)
        ours = attend(cache, 0, part, part_of_x)
    error = math.inf
    for per_frame in (grid[0] * grid[1], TOKENS_480P):  # by which it counts latent frames
        with suppress(RuntimeError):  # where it counts otherwise, shapes may not meet
            theirs = _theirs(model, x, frames, grid, per_frame)
            error = min(error, float((ours - theirs).float().norm() / theirs.float().norm()))
        if error <= LIMIT:
            break
    what = "dense attention"
    if error <= LIMIT:
        what, error = "cross-attention", _cross_error(model, x[:, :tokens])
    if not error <= LIMIT:
        raise TachyscopeError(
            f"the plan's {what} differs from the model's own by {error:.1e} of its length, "
            f"{LIMIT:g} is allowed: this model is not of Self-Forcing's shape"
        )


def _cross_error(model: Any, x: Tensor) -> float:
    """The relative error to the model's own cross-attention of x [1, S, W] over a random prompt."""
    part, lengths = model.blocks[0].cross_attn, [WORDS]
    size = 1, WORDS, part.k.weight.shape[1]
    context = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(part.k.weight)
    cache = VideoCache("dense", layers=1, chunk=1, passes=1, prompt_tokens=WORDS)
    cache.begin(0, 1, (1, x.shape[1]))
    set_prompt(cache, 0, part, context, lengths)
    ours = cross(cache, 0, part, x)
    try:
        theirs = part(x, context, None, crossattn_cache={"is_init": False})
    except (RuntimeError, TypeError):  # it takes more than a prompt
        return math.inf
    return float((ours - theirs).float().norm() / theirs.float().norm())


def _theirs(model: Any, x: Tensor, frames: int, grid: tuple[int, int], per_frame: int) -> Tensor:
    """The output of the model's own attention for the second of two chunks x [1, 2 S, W]."""
    part, patches, tokens = model.blocks[0].self_attn, Patches(), x.shape[1] // 2
    store: dict[str, Any] = {
        name: x.new_zeros(1, 2 * tokens, part.num_heads, part.head_dim) for name in ("k", "v")
    }
    for name, size in {"frame_length": tokens // frames, "block_length": tokens}.items():
        if name in vars(part):
            patches.set(part, name, size)
    try:
        for chunk, part_of_x in enumerate(x.split(tokens, 1)):
            start = chunk * frames * per_frame
            for name, end in {"global_end_index": start, "local_end_index": chunk * tokens}.items():
                store[name] = torch.tensor([end], dtype=torch.long, device=x.device)
            call = {
                "seq_lens": torch.tensor([tokens]), "block_mask": None, "kv_cache": store,
                "grid_sizes": torch.tensor([[frames, *grid]]), "current_start": start,
                "current_end": start + tokens, "freqs": model.freqs.to(x.device),
            }  # fmt: skip
            taken = inspect.signature(part.forward).parameters
            theirs = part(part_of_x, **{key: value for key, value in call.items() if key in taken})
            if isinstance(theirs, tuple):
                theirs, update = theirs
                getattr(model, UPDATES)([store], [(0, update)])
    finally:
        patches.undo()
    out: Tensor = theirs
    return out


def _model_of(thing: Any) -> Any:
    """The model behind a pipeline or wrapper, or None where it is none of this shape."""
    inner = uncompiled(getattr(thing, "generator", thing))
    model = uncompiled(getattr(inner, "model", inner))
    blocks = getattr(model, "blocks", None)
    if not hasattr(model, "_forward_inference") or not blocks:
        return None
    parts = [getattr(blocks[0], name, None) for name in ("self_attn", "cross_attn")]
    known = all(hasattr(part, name) for part in parts for name in PARTS)
    return model if known else None


def _heads(part: Any, x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, part.num_heads, part.head_dim).transpose(1, 2)


def _by_layer(fn: Any, layer: int, part: Any, *args: Any, **kwargs: Any) -> Any:
    return fn(layer, part, *args, **kwargs)


def _initialize_kv_cache(
    pipeline: Any, batch_size: int, dtype: torch.dtype, device: torch.device | str, **_: Any
) -> None:
    """In place of the pipeline's own: dicts of the same keys that hold nothing."""

    def store() -> dict[str, Any]:
        empty: Sequence[str] = ("k", "v")
        ends = ("global_end_index", "local_end_index")
        return {name: torch.zeros(batch_size, 0, dtype=dtype, device=device) for name in empty} | {
            name: torch.zeros(1, dtype=torch.long, device=device) for name in ends
        }

    for name in _own_caches(pipeline):
        setattr(pipeline, name, [store() for _ in range(pipeline.num_transformer_blocks)])


def _own_caches(pipeline: Any) -> list[str]:
    return [name for name in OWN if hasattr(pipeline, name)]
