"""diffusers' SkyReels-V2 by diffusion forcing in blocks: finished blocks are not computed again.

Its passes cover a whole clip: blocks of latent frames at several noise levels, each of which
attends to itself and to earlier ones. Here a pass goes block by block from the first unfinished one
on, so that no masked pair is computed, and finished blocks keep their keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, final

import torch
from diffusers import SkyReelsV2Transformer3DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor

from tachyscope.cache.keep_all import KeepAll
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan, spell
from tachyscope.integrations.accelerate import Accelerated, Patches, check_options, uncompiled
from tachyscope.integrations.diffusers import (
    CONTEXT,
    KEY,
    Processor,
    cache_contexts,
    check_host,
    enable_cache,
)
from tachyscope.integrations.video_cache import VideoCache


class _Video:
    """The video of one `cache_context`, and the input of its finished blocks."""

    def __init__(self, cache: VideoCache) -> None:
        self.cache, self.final = cache, 0  # latent frames whose keys and values are final
        self.made: Tensor | None = None
        self.prompt: Tensor | None = None

    def known(self, x: Tensor, prompt: Tensor) -> int:
        """How many leading latent frames of x [B, C, F, h, w] have final keys and values."""
        if self.made is None or self.prompt is None or not self.final:
            return 0
        same = self.made.shape == x[:, :, : self.final].shape and self.prompt.shape == prompt.shape
        same = same and torch.equal(self.made, x[:, :, : self.final])
        return self.final if same and torch.equal(self.prompt, prompt) else 0


@final
class DiffusersSkyReels(Accelerated):
    @staticmethod
    def matches(thing: Any) -> bool:
        transformer = uncompiled(getattr(thing, "transformer", thing))
        return isinstance(transformer, SkyReelsV2Transformer3DModel)

    def __init__(self, thing: Any, plan: str | Plan, options: Mapping[str, Any]) -> None:
        called = getattr(thing, "transformer", thing)
        transformer = uncompiled(called)
        check_host(thing, transformer)
        check_options(options)
        if called is not transformer:
            raise TachyscopeError(
                "this transformer is wrapped by torch.compile, which calls it past the plan: use "
                "transformer.compile() instead"
            )
        self.plan = Plan.parse(plan) if isinstance(plan, str) else plan
        if not isinstance(self.plan.cache, KeepAll) or self.plan.replay is not None:
            raise TachyscopeError(
                f"cache={spell(self.plan.cache)}: SkyReels goes back over blocks until they are "
                f"finished, which takes cache=keep_all and replay=none: give plan 'dense', with an "
                f"attention if you like"
            )
        self.transformer, self.patches, self.name = transformer, Patches(), CONTEXT
        self.videos: dict[str, _Video] = {}
        self.cache = self._new_cache(1)  # of the present pass; a wrong plan is refused here
        self.given = self.computed = 0  # latent frames of all passes, and those computed
        patch = self.patches.set
        patch(transformer, KEY, self)
        patch(transformer, "cache_context", cache_contexts(self, transformer.cache_context))
        patch(transformer, "enable_cache", enable_cache)
        for layer, block in enumerate(transformer.blocks):
            patch(block.attn1, "processor", Processor(layer, self))
        # the class, since offloading exchanges `forward` between two videos
        kind = type(transformer)
        self.patches.on_undo(partial(setattr, transformer, "__class__", kind))
        transformer.__class__ = type(kind.__name__, (_Blocks, kind), {"accelerated": self})

    def stats(self) -> dict[str, float]:
        """`frames_share`: of latent frames in passes, how many were computed."""
        return self.cache.stats() | {"frames_share": self.computed / max(self.given, 1)}

    def _new_cache(self, chunk: int) -> VideoCache:
        layers = len(self.transformer.blocks)
        return VideoCache(self.plan, layers=layers, chunk=chunk, passes=1)

    def call(self, inner: Any, args: Any, kwargs: Any) -> Any:
        """A pass, block by block; final blocks come back as zeros, which no step uses."""
        module = self.transformer
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        given.apply_defaults()
        what = given.arguments
        del what["self"]
        as_object = what["return_dict"]
        x, times, size = what["hidden_states"], what["timestep"], module.config.num_frame_per_block
        frames = x.shape[2]
        if size < 2 or times.dim() != 2 or frames % size:
            raise TachyscopeError(
                f"SkyReels' blocks are what a plan serves: call the pipeline with ar_step=… and "
                f"causal_block_size=… of 2 or more that divides {frames} latent frames"
            )
        prompt = what["encoder_hidden_states"]
        video = self.videos.get(self.name)
        if video is None or video.cache.chunk != size:
            video = self.videos[self.name] = _Video(self._new_cache(size))
        first, self.cache = video.known(x, prompt), video.cache
        done = (times.view(len(times), -1, size) == 0).all(2).all(0).int().cumprod(0).sum()
        finished = size * int(done)
        grid = tuple(
            n // patch for n, patch in zip(x.shape[3:], module.config.patch_size[1:], strict=True)
        )
        out: Tensor = x.new_zeros(len(x), module.config.out_channels, *x.shape[2:])
        for start in range(first, frames, size):
            part = slice(start, start + size)
            self.cache.begin(start, size, grid)
            what |= {
                "hidden_states": x[:, :, part], "timestep": times[:, part], "return_dict": False,
            }  # fmt: skip
            out[:, :, part] = inner(**what)[0]
        self.given, self.computed = self.given + frames, self.computed + frames - first
        video.final = finished
        video.made, video.prompt = x[:, :, :finished].clone(), prompt
        return Transformer2DModelOutput(sample=out) if as_object else (out,)


class _Blocks:
    """A transformer's call while it is accelerated; hooks and compiled code act inside of it."""

    accelerated: DiffusersSkyReels

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.accelerated.call(super().__call__, args, kwargs)  # type: ignore[misc]
