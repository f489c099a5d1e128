"""diffusers' Wan transformer as a chunk-causal one, by a plan, in diffusers' own code.

A hook on the transformer says where a pass stands, and processors in place of its self-attention's
read a `VideoCache`, one for each `cache_context`. LoRA, offloading and compiling stay diffusers':
the hook is torch's, since offloading exchanges `forward` between two videos. A pipeline around it
gains Self-Forcing's loop: chunk by chunk, few steps, no guidance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.plan import Plan
from tachyscope.integrations.accelerate import (
    Accelerated,
    Patches,
    check_options,
    replay_through,
    uncompiled,
)
from tachyscope.integrations.video_cache import VideoCache
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.context import Absolute
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.sampler import clean_from, noised, schedule

KEY = "tachyscope"  # of the adapter at work
CONTEXT = "inference"  # where the host opens none
FRAME = "current_frame"  # in attention_kwargs: the first latent frame of a pass
# why a plan does not act in diffusers' other video transformers
WHOLE = "denoises a whole clip or picture at once, and keeps no past"
OTHERS = {
    "AnyFlowFARTransformer3DModel": "patches what lies behind 4 times coarser than the chunk, so "
    "that its past has two grids of tokens, and a cache has one",
    "HeliosTransformer3DModel": "runs its history through every layer again in each pass, where it "
    "reads the chunk: its keys and values change with every pass",
    "SanaVideoTransformer3DModel": "has linear attention: its state does not grow",
    "SanaWMTransformer3DModel": "has linear attention: its state does not grow",
}
LIMIT = 1e-2  # of a chunk's relative error to the host's own attention, which may be bfloat16


@final
class DiffusersWan(Accelerated):
    @staticmethod
    def matches(thing: Any) -> bool:
        module = type(uncompiled(getattr(thing, "transformer", thing))).__module__
        return module.startswith("diffusers.models.transformers.")

    def __init__(self, thing: Any, plan: str | Plan, options: Mapping[str, Any]) -> None:
        called = getattr(thing, "transformer", thing)  # may be wrapped by torch.compile
        transformer = uncompiled(called)
        _check(thing, transformer)
        check_host(thing, transformer)
        check_options(options, "check", "latent_frames", "preset")
        self.called = called
        self.transformer, self.patches = transformer, Patches()
        self.config = _config(options.get("preset", "self-forcing"))
        layers, passes = len(transformer.blocks), len(self.config.steps) + 1

        def make() -> VideoCache:
            return VideoCache(
                plan, layers=layers, chunk=self.config.chunk, passes=passes,
                latent_frames=options.get("latent_frames"),
            )  # fmt: skip

        self.passes = _Passes(make)  # a wrong plan is refused here, not in the first pass
        if options.get("check", True):
            _check_parity(transformer, self.config.chunk)
        patch = self.patches.set
        patch(transformer, KEY, self)
        patch(transformer, "cache_context", cache_contexts(self.passes, transformer.cache_context))
        patch(transformer, "enable_cache", enable_cache)
        begin = torch.compiler.disable(self.passes.begin)
        hook = transformer.register_forward_pre_hook(begin, with_kwargs=True)
        self.patches.on_undo(hook.remove)
        for layer, block in enumerate(transformer.blocks):
            patch(block.attn1, "processor", Processor(layer, self.passes))
        plan, caches = self.passes.cache.plan, self.passes
        replay_through(self.patches, transformer.blocks, plan, lambda: caches.cache)
        if thing is not called:  # a pipeline: its call is looked up in its class
            kind = type(thing)
            self.patches.on_undo(partial(setattr, thing, "__class__", kind))
            thing.__class__ = type(kind.__name__, (_Causal, kind), {"accelerated": self})

    def reset(self) -> None:
        """Forget every video."""
        self.passes.reset()

    def stats(self) -> dict[str, float]:
        return self.passes.cache.stats() or self.passes.counted

    @torch.no_grad()
    def latents(
        self, context: Tensor, noise: Callable[[], Tensor], latent_frames: int
    ) -> Iterator[Tensor]:
        """Clean latents [B, C, F, h, w], chunk by chunk, of embedded prompts [B, L, W].

        noise: draws a chunk's, as often as it is called.
        """
        config, levels = self.config, schedule(self.config)
        for start in range(0, latent_frames, config.chunk):
            steps = (not start and config.first_steps) or config.steps

            def predict(x: Tensor, timestep: float, start: int = start) -> Tensor:
                times = torch.full((len(x), x.shape[2]), timestep, device=x.device)
                out: Tensor = self.called(
                    x.to(self.transformer.dtype), times, context, return_dict=False,
                    attention_kwargs={FRAME: start},
                )[0]  # fmt: skip
                return out

            clean = noise()
            x = clean
            for i, step in enumerate(steps):
                timestep, sigma = levels[config.levels.index(step)]
                if i:
                    x = noised(clean, noise(), sigma)
                clean = clean_from(config, x, predict(x, timestep), sigma)
            predict(clean, 0.0)  # leaves its keys and values for the next
            yield clean


class _Causal:
    """A pipeline's `__call__` while it is accelerated."""

    accelerated: DiffusersWan

    @torch.no_grad()
    def __call__(
        self: Any,
        prompt: str | list[str] | None = None,
        *,
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        max_sequence_length: int = 512,
        callback_on_step_end: Callable[[Any, int, Any, dict[str, Any]], Any] | None = None,
        **others: Any,
    ) -> Any:
        """A video of at least `num_frames`, in whole chunks, with a callback for each of them."""
        if others:
            raise TachyscopeError(
                f"an accelerated pipeline takes no {', '.join(sorted(others))}: steps, guidance "
                f"and noise are the preset's, leave it out"
            )
        if num_frames < 1:
            raise TachyscopeError(f"`num_frames` must be 1 or more, got {num_frames}")
        accelerated, device = self.accelerated, self._execution_device
        config, transformer = accelerated.config, accelerated.transformer
        scale, steps = self.vae_scale_factor_spatial, transformer.config.patch_size[1:]
        if height % (scale * steps[0]) or width % (scale * steps[1]):
            raise TachyscopeError(
                f"`height` must be a multiple of {scale * steps[0]} and `width` of "
                f"{scale * steps[1]}, got {height} x {width}"
            )
        prompt_embeds, _ = self.encode_prompt(
            prompt, do_classifier_free_guidance=False, prompt_embeds=prompt_embeds, device=device,
            max_sequence_length=max_sequence_length, dtype=transformer.dtype,
        )  # fmt: skip
        size = (
            len(prompt_embeds), transformer.config.in_channels, config.chunk,
            height // scale, width // scale,
        )  # fmt: skip
        latent_frames = 1 + -(-(num_frames - 1) // self.vae_scale_factor_temporal)
        latent_frames = config.chunk * -(-latent_frames // config.chunk)

        def noise() -> Tensor:
            drawn: Tensor = randn_tensor(size, generator, device, torch.float32)
            return drawn

        chunks = []
        for number, chunk in enumerate(accelerated.latents(prompt_embeds, noise, latent_frames)):
            chunks.append(chunk)
            if callback_on_step_end is not None:
                callback_on_step_end(self, number, 0, {"latents": chunk})
        video: Any = torch.cat(chunks, 2)
        if output_type != "latent":
            mean, std = (
                torch.tensor(numbers).view(1, -1, 1, 1, 1).to(video)
                for numbers in (self.vae.config.latents_mean, self.vae.config.latents_std)
            )
            video = self.vae.decode((video * std + mean).to(self.vae.dtype), return_dict=False)[0]
            video = self.video_processor.postprocess_video(video, output_type=output_type)
        self.maybe_free_model_hooks()
        accelerated.reset()
        return WanPipelineOutput(frames=video) if return_dict else (video,)


class _Passes:
    """A cache for each `cache_context`, and the one of the present pass."""

    def __init__(self, make: Callable[[], VideoCache]) -> None:
        self.make, self.name = make, CONTEXT
        self.cache = make()  # of the present pass
        self.caches: dict[str, VideoCache] = {}
        self.counted: dict[str, float] = {}  # of the last video, once it is forgotten

    def begin(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Before each pass of the transformer."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        x, timestep = given["hidden_states"], given["timestep"]
        more = dict(given.get("attention_kwargs") or {})
        if FRAME not in more:
            raise TachyscopeError(
                f"an accelerated transformer needs the first latent frame of the pass: give "
                f"attention_kwargs={{{FRAME!r}: …}}, or accelerate the pipeline and call that"
            )
        time, rows, columns = (
            size // patch for size, patch in zip(x.shape[2:], module.config.patch_size, strict=True)
        )
        if self.name not in self.caches:
            self.caches[self.name] = self.make()
        self.cache = self.caches[self.name]
        self.cache.begin(int(more.pop(FRAME)), time, (rows, columns))
        if timestep.ndim == 2 and timestep.shape[1] == time:  # one a latent frame: one a token
            timestep = timestep.repeat_interleave(rows * columns, 1)
        given |= {"timestep": timestep, "attention_kwargs": more or None}
        return (), given

    def reset(self) -> None:
        self.counted = self.cache.stats()
        for cache in self.caches.values():
            cache.reset()


def cache_contexts(passes: Any, inner: Any) -> Any:
    """`cache_context` of a transformer, which leaves its name in `passes`."""

    @contextmanager
    def cache_context(name: str, **more: Any) -> Iterator[None]:
        passes.name = name
        try:
            with inner(name, **more):
                yield
        finally:
            passes.name = CONTEXT

    return cache_context


class Processor:
    """In place of a self-attention's own: keys and values are the cache's."""

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, layer: int, passes: Any) -> None:
        self.layer, self.passes = layer, passes  # whose `cache` is the present pass's

    def __call__(self, attn: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return attend(self.passes.cache, self.layer, attn, hidden_states)


def enable_cache(*_: Any, **__: Any) -> None:
    raise TachyscopeError(
        "this transformer is accelerated, and another cache skips layers whose keys and values "
        "stay behind: remove() the plan first"
    )


def attend(cache: VideoCache, layer: int, attn: Any, x: Tensor) -> Tensor:
    """What a self-attention makes of x [B, S, W] with the cache's past."""
    if attn.fused_projections:
        q, k, v = attn.to_qkv(x).chunk(3, dim=-1)
    else:
        q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
    q, k, v = (
        part.unflatten(2, (attn.heads, -1)).transpose(1, 2)
        for part in (attn.norm_q(q), attn.norm_k(k), v)
    )
    y = cache.attend(layer, q.type_as(v), k.type_as(v), v)
    out: Tensor = attn.to_out[1](attn.to_out[0](y.transpose(1, 2).flatten(2)))
    return out


def _config(preset: str) -> WanConfig:
    """A preset whose chunks are remembered as they were made: Self-Forcing's own rule."""
    served = [name for name, one in PRESETS.items() if isinstance(one.config.context, Absolute)]
    if preset not in served:
        raise TachyscopeError(
            f"accelerate runs diffusers' Wan as one of {', '.join(served)}, got preset "
            f"{shown(preset)}: use `tachyscope generate` for other presets"
        )
    return PRESETS[preset].config


def _check(thing: Any, transformer: Any) -> None:
    name = type(transformer).__name__
    if not isinstance(transformer, WanTransformer3DModel):
        raise TachyscopeError(
            f"{name} {OTHERS.get(name, WHOLE)}: give diffusers' Wan with chunk-causal weights"
        )
    if uncompiled(thing) is not transformer and not isinstance(thing, WanPipeline):
        raise TachyscopeError(
            f"{type(thing).__name__} has a loop over whole clips: give a WanPipeline of the same "
            f"parts, or the transformer alone for a loop of your own"
        )


def check_host(thing: Any, transformer: Any) -> None:
    """Raise where a feature of diffusers is on that a plan cannot be combined with."""
    if getattr(thing, "transformer_2", None) is not None:
        fault = "this pipeline has two transformers, of which a chunk-causal model has one"
    elif getattr(transformer, "is_cache_enabled", False):
        fault = "another cache of diffusers is enabled, which skips layers: disable_cache() first"
    elif getattr(transformer, "_parallel_config", None) is not None:
        fault = "context parallelism splits what a pass attends to: leave it out"
    elif KEY in vars(transformer):
        fault = "this transformer is accelerated already: remove() that first"
    else:
        return
    raise TachyscopeError(fault)


@torch.no_grad()
def _check_parity(transformer: Any, frames: int) -> None:
    """Raise unless a random chunk, dense, equals what the transformer's own attention makes."""
    attn = transformer.blocks[0].attn1
    weight, grid = attn.to_q.weight, (2, 3)
    if weight.device.type == "meta":
        return  # offloaded layer by layer: its weights are not here now
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(1, frames * grid[0] * grid[1], weight.shape[1], generator=rng).to(weight)
    sizes = (
        n * patch for n, patch in zip((frames, *grid), transformer.config.patch_size, strict=True)
    )
    video = weight.new_empty(1, transformer.config.in_channels, *sizes)
    theirs = attn.processor(attn, x, rotary_emb=transformer.rope(video))
    cache = VideoCache("dense", layers=1, chunk=frames, passes=1)
    cache.begin(0, frames, grid)
    error = float((attend(cache, 0, attn, x) - theirs).float().norm() / theirs.float().norm())
    if not error <= LIMIT:
        raise TachyscopeError(
            f"the plan's dense attention differs from the transformer's own by {error:.1e} of its "
            f"length, {LIMIT:g} is allowed: its attention is not Wan's"
        )
