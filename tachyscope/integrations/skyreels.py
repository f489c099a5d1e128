"""diffusers' SkyReels-V2 by diffusion forcing in blocks: finished ones are run no more.

Its passes go over a whole clip: blocks of latent frames at several noise levels, each of which
reads itself and those before. Here a pass goes block by block, from the first that is not final, so
that no pair behind the mask is computed, and a finished block keeps its keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any, final

import torch
from diffusers import SkyReelsV2Transformer3DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor

from tachyscope.cache.keep_all import KeepAll
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan, spell
from tachyscope.integrations.accelerate import Accelerated, Patches
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
    """One `cache_context`'s: what its final blocks were made of."""

    def __init__(self, cache: VideoCache) -> None:
        self.cache, self.final = cache, 0  # latent frames whose keys and values are final
        self.made: Tensor | None = None
        self.prompt: Tensor | None = None

    def known(self, x: Tensor, prompt: Tensor) -> int:
        """How many leading latent frames of x [B, C, F, h, w] are those that are final."""
        if self.made is None or self.prompt is None or not self.final:
            return 0
        same = self.made.shape == x[:, :, : self.final].shape and self.prompt.shape == prompt.shape
        same = same and torch.equal(self.made, x[:, :, : self.final])
        return self.final if same and torch.equal(self.prompt, prompt) else 0


@final
class DiffusersSkyReels(Accelerated):
    @staticmethod
    def matches(thing: Any) -> bool:
        return isinstance(getattr(thing, "transformer", thing), SkyReelsV2Transformer3DModel)

    def __init__(self, thing: Any, plan: str | Plan, options: Mapping[str, Any]) -> None:
        transformer = getattr(thing, "transformer", thing)
        check_host(thing, transformer)
        if options:
            raise TachyscopeError(
                f"accelerate has no {', '.join(sorted(options))} for this model: it takes a plan"
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
        self.frames = self.run = 0  # latent frames of all passes, and those that were computed
        patch = self.patches.set
        patch(transformer, KEY, self)
        patch(transformer, "cache_context", cache_contexts(self, transformer.cache_context))
        patch(transformer, "enable_cache", enable_cache)
        patch(transformer, "forward", MethodType(self._forward(transformer.forward), transformer))
        for layer, block in enumerate(transformer.blocks):
            patch(block.attn1, "processor", Processor(layer, self))

    def remove(self) -> None:
        self.patches.undo()

    def stats(self) -> dict[str, float]:
        """`frames_share`: of latent frames in passes, how many were computed."""
        return self.cache.stats() | {"frames_share": self.run / max(self.frames, 1)}

    def _new_cache(self, chunk: int) -> VideoCache:
        layers = len(self.transformer.blocks)
        return VideoCache(self.plan, layers=layers, chunk=chunk, passes=1)

    def _forward(self, inner: Any) -> Any:
        names = inspect.signature(inner)

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            given = names.bind(*args, **kwargs)
            given.apply_defaults()
            what = given.arguments
            out = self._blocks(inner, module, dict(what))
            return Transformer2DModelOutput(sample=out) if what["return_dict"] else (out,)

        return forward

    def _blocks(self, inner: Any, module: Any, what: dict[str, Any]) -> Tensor:
        """A pass, block by block; what is final comes back as zeros, which nobody steps by."""
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
        self.frames, self.run = self.frames + frames, self.run + frames - first
        video.final = finished
        video.made, video.prompt = x[:, :, :finished].clone(), prompt
        return out
