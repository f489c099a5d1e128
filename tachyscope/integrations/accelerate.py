"""`accelerate(thing, plan)`: a plan on a model that runs in its own code."""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan
from tachyscope.integrations.versions import too_old

if TYPE_CHECKING:
    from torch import Tensor

    from tachyscope.integrations.video_cache import VideoCache

BY_HAND = (
    "or call the cache in your own attention: cache = ts.VideoCache(plan, layers=…, chunk=…); "
    "cache.begin(frame=…, frames=…, grid=(rows, columns)) once a pass; "
    "y = cache.attend(layer, q, k, v) in each layer"
)


class Adapter(NamedTuple):
    """Where an adapter is, and which models it serves."""

    serves: str  # as a refusal names them
    path: str  # module:Class
    package: str  # of its models: the adapter is imported only after this package


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


class Patches:
    """Attributes set on others' objects, and how to restore them, newest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        held = vars(owner)
        back = partial(setattr, owner, name, held[name]) if name in held else None
        self._undo.append(back or partial(delattr, owner, name))
        setattr(owner, name, value)

    def on_undo(self, call: Callable[[], object]) -> None:
        self._undo.append(call)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


class FeedForward:
    """A host's feed-forward layer, as a plan's replay calls it."""

    def __init__(self, layer: Any) -> None:
        self.inner = layer.forward
        self.macs = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def replay_through(
    patches: Patches, blocks: Any, plan: Plan, cache: Callable[[], VideoCache]
) -> None:
    """Let the plan's replay act on each block's `ffn`; `cache` returns the present pass's."""
    if plan.replay is None:
        return
    for layer, block in enumerate(blocks):
        fn = FeedForward(block.ffn)

        def forward(x: Tensor, layer: int = layer, fn: FeedForward = fn) -> Tensor:
            return cache().mlp(layer, x, fn)

        patches.set(block.ffn, "forward", forward)


class Accelerated(abc.ABC):
    """A plan at work in a host's model, until `remove` or the end of a `with`."""

    patches: Patches

    @staticmethod
    @abc.abstractmethod
    def matches(thing: Any) -> bool:
        """Whether this is a model, or a pipeline around one, that the adapter knows."""

    @abc.abstractmethod
    def __init__(self, thing: Any, plan: str | Plan, options: Mapping[str, Any]) -> None:
        """Put the plan to work."""

    def remove(self) -> None:
        """Restore the model; a second call does nothing."""
        self.patches.undo()

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


def uncompiled(module: Any) -> Any:
    """The module itself where it is wrapped by torch.compile."""
    return getattr(module, "_orig_mod", module)


def check_options(options: Mapping[str, Any], *known: str) -> None:
    """Raise where `accelerate` was given an option that this model's adapter does not take."""
    if unknown := options.keys() - set(known):
        raise TachyscopeError(
            f"accelerate has no {', '.join(sorted(unknown))} for this model: "
            f"it takes {', '.join(sorted(known)) or 'a plan'}"
        )


def accelerate(thing: Any, plan: str | Plan = "fast", **options: Any) -> Accelerated:
    """Run a model or pipeline by a plan, in its own code.

        with ts.accelerate(pipe, "fast"):
            pipe(...)

    chunk, passes: latent frames that are denoised together and passes over them, if the model does
    not say. latent_frames: of the video, if known. tokens_per_frame: of a language model's video
    frames. preset: of diffusers' Wan, "self-forcing" if not given. check: compare random chunks
    with the model's own attention first, and refuse where they differ (the default).
    """
    for entry in ADAPTERS:
        if entry.package not in sys.modules:
            continue
        if fault := too_old(entry.package):
            if entry.package in _packages_of(thing):
                raise TachyscopeError(fault)
            continue
        module, name = entry.path.split(":")
        adapter: type[Accelerated] = getattr(importlib.import_module(module), name)
        if adapter.matches(thing):
            return adapter(thing, plan, options)
    known = "; ".join(entry.serves for entry in ADAPTERS)
    raise TachyscopeError(
        f"accelerate does not know {type(thing).__module__}.{type(thing).__qualname__}: give "
        f"{known}; {BY_HAND}"
    )


def _packages_of(thing: Any) -> set[str]:
    """Packages that a model, or a pipeline's, gets its classes from."""
    parts = (uncompiled(thing), uncompiled(getattr(thing, "transformer", None)))
    return {kind.__module__.partition(".")[0] for part in parts for kind in type(part).__mro__}
