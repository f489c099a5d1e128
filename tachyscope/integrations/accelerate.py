"""`accelerate(thing, plan)`: a plan on a model that runs in its own code."""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from tachyscope.integrations.video_cache import VideoCache

BY_HAND = (
    "or call the cache in your own attention: cache = ts.VideoCache(plan, layers=…, chunk=…); "
    "cache.begin(frame=…, frames=…, grid=(rows, columns)) once a pass; "
    "y = cache.attend(layer, q, k, v) in each layer"
)


class Adapter(NamedTuple):
    """Where an adapter is, and what it is for."""

    serves: str  # what `accelerate` says that it knows
    path: str  # module:Class
    package: str  # its models' own: the adapter is imported where this package has been


ADAPTERS = (
    Adapter(
        "a model of Self-Forcing's shape (Self-Forcing, Causal-Forcing, CausVid, Reward-Forcing, "
        "Infinite-Forcing, Rolling-Forcing, LongLive 1, Krea), its wrapper or its pipeline",
        "tachyscope.integrations.self_forcing:SelfForcing",
        "torch",
    ),
    Adapter(
        "diffusers' SkyReels-V2 by blocks",
        "tachyscope.integrations.skyreels:DiffusersSkyReels",
        "diffusers",
    ),
    Adapter(
        "diffusers' WanPipeline or WanTransformer3DModel with chunk-causal weights",
        "tachyscope.integrations.diffusers:DiffusersWan",
        "diffusers",
    ),
    Adapter(
        "a causal language model of transformers",
        "tachyscope.integrations.transformers:TransformersLm",
        "transformers",
    ),
)

_ABSENT = object()


class Patches:
    """Attributes of objects set for a time, and put back as they were."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._held.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._held:
            owner, name, value = self._held.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class FeedForward:
    """A host's feed-forward layer, computed where a plan does not replay it."""

    def __init__(self, layer: Any) -> None:
        self.inner = layer.forward
        self.macs = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def replay_through(
    patches: Patches, blocks: Any, plan: Plan, cache: Callable[[], VideoCache]
) -> None:
    """Let the plan's replay act on every block's `ffn`, by the present pass's cache."""
    if plan.replay is None:
        return
    for layer, block in enumerate(blocks):
        fn = FeedForward(block.ffn)

        def forward(x: Tensor, layer: int = layer, fn: FeedForward = fn) -> Tensor:
            return cache().mlp(layer, x, fn)

        patches.set(block.ffn, "forward", forward)


class Accelerated(abc.ABC):
    """A plan at work in somebody's model, until `remove` or the end of a `with`."""

    @staticmethod
    @abc.abstractmethod
    def matches(thing: Any) -> bool:
        """Whether this is a model, or a pipeline around one, that the adapter knows."""

    @abc.abstractmethod
    def __init__(self, thing: Any, plan: str | Plan, options: Mapping[str, Any]) -> None:
        """Put the plan to work."""

    @abc.abstractmethod
    def remove(self) -> None:
        """Put everything back as it was found."""

    @abc.abstractmethod
    def stats(self) -> dict[str, float]:
        """Counted work of the newest video since the last call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.remove()


def accelerate(thing: Any, plan: str | Plan = "fast", **options: Any) -> Accelerated:
    """Run somebody's model or pipeline by a plan, in its own code.

        with ts.accelerate(pipe, "fast"):
            pipe(...)

    chunk, passes: latent frames that are denoised together, and passes over them, where the model
    does not say. latent_frames: of the video, where known. tokens_per_frame: of a language model's
    video frames. check: compare one random chunk with
    the model's own attention first, and refuse where they differ (on unless False).
    """
    for entry in ADAPTERS:
        if entry.package in sys.modules:
            module, name = entry.path.split(":")
            adapter: type[Accelerated] = getattr(importlib.import_module(module), name)
            if adapter.matches(thing):
                return adapter(thing, plan, options)
    known = "; ".join(entry.serves for entry in ADAPTERS)
    raise TachyscopeError(
        f"accelerate does not know {type(thing).__module__}.{type(thing).__qualname__}: give "
        f"{known}; {BY_HAND}"
    )
