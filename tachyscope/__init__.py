"""Fast autoregressive video generation without retraining."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tachyscope.attention.ann import Ann as Ann
    from tachyscope.attention.ann_text import AnnText as AnnText
    from tachyscope.attention.dense import Dense as Dense
    from tachyscope.attention.dense import DenseText as DenseText
    from tachyscope.attention.pads import Pads as Pads
    from tachyscope.attention.pose import Pose as Pose
    from tachyscope.attention.similar import Similar as Similar
    from tachyscope.attention.window import WindowAttention as WindowAttention
    from tachyscope.cache.bank import Bank as Bank
    from tachyscope.cache.dedup import Dedup as Dedup
    from tachyscope.cache.keep_all import KeepAll as KeepAll
    from tachyscope.cache.merge import Merge as Merge
    from tachyscope.cache.strided import Strided as Strided
    from tachyscope.cache.window import Window as Window
    from tachyscope.core.errors import TachyscopeError as TachyscopeError
    from tachyscope.core.observers import Observer as Observer
    from tachyscope.core.opening import open as open
    from tachyscope.core.plan import Plan as Plan
    from tachyscope.core.plan import plan as plan
    from tachyscope.core.rollout import rollout as rollout
    from tachyscope.core.session import Session as Session
    from tachyscope.core.stream import Stream as Stream
    from tachyscope.core.types import Chunk as Chunk
    from tachyscope.core.types import Rope as Rope
    from tachyscope.core.types import Shape as Shape
    from tachyscope.integrations.accelerate import accelerate as accelerate
    from tachyscope.integrations.drafts import drafts as drafts
    from tachyscope.integrations.token_adapter import token_adapter as token_adapter
    from tachyscope.integrations.video_cache import VideoCache as VideoCache
    from tachyscope.io.video import VideoWriter as VideoWriter
    from tachyscope.measure.inspection.any_model import inspect as inspect
    from tachyscope.models.base import VideoModel as VideoModel
    from tachyscope.models.registry import load as load
    from tachyscope.models.registry import register as register
    from tachyscope.passes.all import AllPasses as AllPasses
    from tachyscope.passes.draft import Draft as Draft
    from tachyscope.passes.every_k import EveryKPass as EveryKPass
    from tachyscope.passes.flowcache import FlowCache as FlowCache
    from tachyscope.passes.teacache import TeaCache as TeaCache
    from tachyscope.replay.attentive import Attentive as Attentive
    from tachyscope.replay.every_k import EveryKReplay as EveryKReplay
    from tachyscope.replay.input import InputReplay as InputReplay
    from tachyscope.replay.neurons import Neurons as Neurons
    from tachyscope.replay.prune import Prune as Prune
    from tachyscope.replay.random import RandomReplay as RandomReplay
    from tachyscope.store.fp8 import Fp8 as Fp8
    from tachyscope.store.int2 import Int2 as Int2
    from tachyscope.store.int4 import Int4 as Int4
    from tachyscope.store.int8 import Int8 as Int8
    from tachyscope.store.native import Native as Native

__version__ = "0.1.0"

# Imported on first use: `import tachyscope` must not load torch.
_HOMES = {
    # videos
    "load": "models.registry",
    "register": "models.registry",
    "VideoModel": "models.base",
    "Shape": "core.types",
    "Rope": "core.types",
    "open": "core.opening",
    "rollout": "core.rollout",
    "plan": "core.plan",
    "accelerate": "integrations.accelerate",
    "VideoCache": "integrations.video_cache",
    "inspect": "measure.inspection.any_model",
    "drafts": "integrations.drafts",
    "token_adapter": "integrations.token_adapter",
    "Plan": "core.plan",
    "Session": "core.session",
    "Stream": "core.stream",
    "Chunk": "core.types",
    "Observer": "core.observers",
    "VideoWriter": "io.video",
    "TachyscopeError": "core.errors",
    # what to remember
    "KeepAll": "cache.keep_all",
    "Strided": "cache.strided",
    "Window": "cache.window",
    "Bank": "cache.bank",
    "Dedup": "cache.dedup",
    "Merge": "cache.merge",
    # how to store it
    "Native": "store.native",
    "Int8": "store.int8",
    "Fp8": "store.fp8",
    "Int4": "store.int4",
    "Int2": "store.int2",
    # what to read, of the video and of the prompt
    "Dense": "attention.dense",
    "Ann": "attention.ann",
    "Pose": "attention.pose",
    "Similar": "attention.similar",
    "WindowAttention": "attention.window",
    "DenseText": "attention.dense",
    "Pads": "attention.pads",
    "AnnText": "attention.ann_text",
    # which passes to run
    "AllPasses": "passes.all",
    "Draft": "passes.draft",
    "EveryKPass": "passes.every_k",
    "FlowCache": "passes.flowcache",
    "TeaCache": "passes.teacache",
    # what to compute again
    "Attentive": "replay.attentive",
    "EveryKReplay": "replay.every_k",
    "InputReplay": "replay.input",
    "Neurons": "replay.neurons",
    "Prune": "replay.prune",
    "RandomReplay": "replay.random",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
