"""SGLang's diffusion server by a plan: a plugin that each of its processes loads by itself.

    TACHYSCOPE_PLAN=fast sglang serve --model-path …

It acts where a model's passes are those of `CausalWanTransformer3DModel` (LongLive 2), whose
attention takes queries and keys before RoPE; other models run as ever. State lives beside the
server's own cache of a request, of which no more than the bookkeeping is allocated.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan
from tachyscope.integrations.video_cache import VideoCache

VARIABLE = "TACHYSCOPE_PLAN"  # of the environment: what a plugin is configured by
KEY = "tachyscope"  # of our cache beside the server's
RUNTIME = "sglang.multimodal_gen.runtime"
MODEL = f"{RUNTIME}.models.dits.causal_wanvideo.CausalWanTransformer3DModel"
ATTENTION = f"{RUNTIME}.models.dits.causal_wanvideo.CausalWanSelfAttention"
STAGE = f"{RUNTIME}.pipelines_core.stages.causal_denoising.CausalDMDDenoisingStage"
LIMIT = 1e-2  # of a chunk's relative error to the server's own attention, which may be bfloat16
_log = logging.getLogger(__name__)


def register() -> None:
    """What SGLang calls, by the entry point group `sglang.multimodal_gen.plugins`."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    try:
        plugin = Plugin(Plan.parse(name))
    except TachyscopeError as fault:  # an exception is logged there, and the server goes on without
        sys.exit(f"{VARIABLE}: {fault}")
    for target, hook in plugin.hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)


class Plugin:
    """A plan at work in a process; one pass of one model runs there at a time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cache = self._new_cache(1, 1)  # a wrong plan is refused here, not in a request
        self.layers: dict[int, int] = {}  # of the present pass, by the server's caches
        self.now = (1, (1, 1))  # latent frames of the pass and their grid
        self.checked = False

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """By what they go around."""
        return {
            f"{MODEL}.forward": self.model,
            f"{ATTENTION}.forward": self.attention,
            f"{STAGE}._allocate_causal_kv_cache": self.allocate,
        }

    def _new_cache(self, layers: int, chunk: int) -> VideoCache:
        return VideoCache(self.plan, layers=layers, chunk=chunk)

    def model(self, inner: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """A pass over a chunk begins."""
        given = inspect.signature(inner).bind(module, *args, **kwargs)
        given.apply_defaults()
        what = given.arguments
        stores = what["kv_cache"]
        if stores is None or not _served(module):
            return inner(module, *args, **kwargs)
        time, rows, columns = (
            size // patch
            for size, patch in zip(what["hidden_states"].shape[2:], module.patch_size, strict=True)
        )
        frame = int(what["current_start"]) // (rows * columns)
        if what["start_frame"] != frame:
            raise TachyscopeError(
                f"latent frame {frame} takes its positions from frame {what['start_frame']}, which "
                f"a plan does not serve: send no image and no second shot, or unset {VARIABLE}"
            )
        held = stores[0].global_end_index  # a tensor: a cache itself takes no attribute more
        cache = getattr(held, KEY, None)
        if cache is None:
            cache = self._new_cache(len(stores), max(time, module.num_frame_per_block))
            setattr(held, KEY, cache)
        elif not frame and cache.session is not None and cache.session.memory.past:
            density = cache.stats()["density"]
            _log.info("a video by %s read %.0f %% of all pairs", self.plan, 100 * density)
        cache.begin(frame, time, (rows, columns))
        self.cache, self.now = cache, (time, (rows, columns))
        self.layers = {id(store): layer for layer, store in enumerate(stores)}
        return inner(module, *args, **kwargs)

    def attention(
        self, inner: Any, part: Any, q: Tensor, k: Tensor, v: Tensor, freqs_cis: Any,
        block_mask: Any, kv_cache: Any = None, *rest: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """One layer of it, of q, k and v [B, S, H, D]."""
        layer = self.layers.get(id(kv_cache))
        if layer is None:
            return inner(part, q, k, v, freqs_cis, block_mask, kv_cache, *rest, **named)
        heads = q.type_as(v), k.type_as(v), v
        if not self.checked:
            self._check(inner, part, heads, freqs_cis, kv_cache)
        return _attend(self.cache, layer, heads)

    def allocate(self, inner: Any, stage: Any, *, kv_cache_size: int, **more: Any) -> Any:
        """Their caches as they would be, without room for keys and values."""
        if not _served(stage.transformer):
            return inner(stage, kv_cache_size=kv_cache_size, **more)
        stores = inner(stage, kv_cache_size=0, **more)
        for store in stores:
            store.cache_size = kv_cache_size
        return stores

    @torch.no_grad()
    def _check(self, inner: Any, part: Any, heads: Any, freqs_cis: Any, like: Any) -> None:
        """Raise unless this chunk by itself, dense, equals what the server makes of it."""
        time, grid = self.now
        q, k, v = heads
        end = torch.zeros(1, dtype=torch.long, device=q.device)
        store = type(like)(
            torch.zeros_like(k), torch.zeros_like(v), global_end_index=end,
            local_end_index=end.clone(),
        )  # fmt: skip
        theirs = inner(part, q, k, v, freqs_cis, None, store, 0, 0)
        cache = VideoCache("dense", layers=1, chunk=time, passes=1)
        cache.begin(0, time, grid)
        ours = _attend(cache, 0, heads)
        error = float((ours - theirs).float().norm() / theirs.float().norm())
        if not error <= LIMIT:
            raise TachyscopeError(
                f"the plan's dense attention differs from the server's own by {error:.1e} of its "
                f"length, {LIMIT:g} is allowed: unset {VARIABLE} for this model"
            )
        self.checked = True


def _attend(cache: VideoCache, layer: int, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in heads)
    return cache.attend(layer, q, k, v).transpose(1, 2)


def _served(model: Any) -> bool:
    """Whether a model's `forward` and its attention's are those hooked, not a subclass's own."""
    blocks = getattr(model, "blocks", None)
    parts = (model, getattr(blocks[0], "attn1", None)) if blocks else (model,)
    kinds = [next(kind for kind in type(x).__mro__ if "forward" in vars(kind)) for x in parts]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds] == [MODEL, ATTENTION]
