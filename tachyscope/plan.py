"""Which methods to use: four policies, their text form, and named plans."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from tachyscope.attention import AttentionPolicy, TextPolicy
from tachyscope.attention.ann import Ann
from tachyscope.attention.ann_text import AnnText
from tachyscope.attention.dense import Dense, DenseText
from tachyscope.attention.pads import Pads
from tachyscope.attention.window import Window as ReadWindow
from tachyscope.cache import CachePolicy
from tachyscope.cache.keep_all import KeepAll
from tachyscope.cache.merge import Merge
from tachyscope.cache.window import Window
from tachyscope.errors import TachyscopeError
from tachyscope.replay import ReplayPolicy
from tachyscope.replay.attentive import Attentive
from tachyscope.replay.every_k import EveryK
from tachyscope.replay.random import Random
from tachyscope.types import Shape, Size

POLICIES: dict[str, dict[str, Any]] = {
    "cache": {"keep_all": KeepAll, "window": Window, "merge": Merge},
    "attention": {"dense": Dense, "window": ReadWindow, "ann": Ann},
    "text": {"dense": DenseText, "pads": Pads, "ann": AnnText},
    "replay": {"attentive": Attentive, "random": Random, "every_k": EveryK},
}

# what a bounded plan for chunks remembers
MERGED = "cache=merge:budget=21f,newest=3,others=dropped"
# "stock" is the model's own; docs/eval.md and eval_tokens.md tell why the others are as they are
NAMED: dict[str, dict[str, str]] = {
    "chunks": {
        "dense": "cache=keep_all attention=dense text=dense replay=none",
        "lossless": "cache=keep_all attention=dense text=pads replay=none",
        "balanced": f"{MERGED} attention=dense text=pads replay=none",
        "fast": f"{MERGED} attention=ann:read=0.3 text=pads replay=none",
        "fastcar": "cache=keep_all attention=dense text=dense replay=attentive:share=0.8",
        "fast-ar": "cache=merge:threshold=0.9,heads=shared "
        "attention=ann:read=0.28,hash=lsh,block=1,tile=1,sink=0,newest=0,"
        "dense_passes=0.3,dense_layers=0.3 text=ann:hash=lsh replay=none",
    },
    "tokens": {
        "dense": "cache=keep_all attention=dense text=none replay=none",
        "lossless": "cache=keep_all attention=dense text=none replay=none",
        "balanced": "cache=keep_all attention=dense text=none "
        "replay=attentive:share=0.5,age=2,drift=true",
        "fast": "cache=keep_all attention=window:tokens=256,sink=4 text=none "
        "replay=attentive:share=0.75,age=4,drift=true",
        "fastcar": "cache=keep_all attention=dense text=none "
        "replay=attentive:threshold=-4,cfg=free,authors=true",
        "fast-ar": "cache=merge:threshold=0.9,heads=shared "
        "attention=ann:read=0.28,hash=lsh,block=1,tile=1,sink=0,newest=0,dense_layers=0.3 "
        "text=none replay=none",
    },
}
# a budget counts what is under way, five chunks there: this one holds as much past
NAMED["rolling"] = {
    name: plan.replace("budget=21f", "budget=33f") for name, plan in NAMED["chunks"].items()
}
NAMES = ("dense", "stock", "lossless", "balanced", "fast", "fastcar", "fast-ar")


@dataclass(frozen=True)
class Plan:
    """What to remember, what to read (of the video, of the prompt), what to compute again."""

    cache: CachePolicy = dataclasses.field(default_factory=KeepAll)
    attention: AttentionPolicy = dataclasses.field(default_factory=Dense)
    text: TextPolicy | None = None
    replay: ReplayPolicy | None = None

    @classmethod
    def parse(cls, text: str, kind: str = "chunks", stock: str = "") -> Plan:
        """A base name, then overrides: `fast cache=merge:budget=12f replay=none`.

        The base is `dense` where none is named; `kind` (one of NAMED) and the model's own `stock`
        say what a name stands for.
        """
        words = text.split()
        base = words.pop(0) if words and "=" not in words[0] else "dense"
        specs = _named(base, kind, stock)
        for word in words:
            part, equals, spec = word.partition("=")
            if not equals:
                raise TachyscopeError(
                    f"a plan is one base name, then part=policy words, got {word!r} behind: "
                    f"parts are {', '.join(POLICIES)}"
                )
            if part not in POLICIES:
                raise TachyscopeError(f"a plan has no {part!r}; it has: {', '.join(POLICIES)}")
            specs[part] = spec
        return cls(**{part: _policy(part, spec) for part, spec in specs.items()})

    def check(self, shape: Shape) -> None:
        """Raise where the plan cannot serve a model of this shape."""
        if self.text is None and shape.text:
            raise TachyscopeError(
                f"this model reads its prompt by cross-attention, so text=none is not possible: "
                f"use text={', '.join(POLICIES['text'])}"
            )
        if self.cache.moves and not isinstance(self.attention, Dense):
            raise TachyscopeError(
                f"cache={spell(self.cache)} says itself what a pass reads, got "
                f"attention={spell(self.attention)}: use attention=dense, or leave view out"
            )
        if self.text is not None and not shape.text:
            raise TachyscopeError(
                f"this model has no cross-attention, got text={spell(self.text)}: leave text out"
            )

    def __str__(self) -> str:
        parts = (self.cache, self.attention, self.text, self.replay)
        return " ".join(f"{p}={spell(x)}" for p, x in zip(POLICIES, parts, strict=True))


def spell(policy: Any) -> str:
    """A policy as `name:key=value,…`, every set parameter written out."""
    if policy is None:
        return "none"
    named = {make: name for table in POLICIES.values() for name, make in table.items()}
    values = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    settings = ",".join(f"{k}={_spell_value(v)}" for k, v in values.items() if v is not None)
    return named[type(policy)] + (f":{settings}" if settings else "")


def _spell_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _named(name: str, kind: str, stock: str) -> dict[str, str]:
    if name not in NAMES:
        raise TachyscopeError(f"no plan {name!r}; there are: {', '.join(NAMES)}")
    text = stock if name == "stock" else NAMED[kind][name]
    if not text:
        raise TachyscopeError("this model names no stock plan: use another base, dense for one")
    return {word.partition("=")[0]: word.partition("=")[2] for word in text.split()}


def _policy(part: str, spec: str) -> Any:
    name, _, settings = spec.partition(":")
    if name == "none" and part in ("text", "replay"):
        if settings:
            raise TachyscopeError(f"{part}=none takes no settings, got {settings!r}")
        return None
    known = POLICIES[part]
    if name not in known:
        also = ", none" if part in ("text", "replay") else ""
        raise TachyscopeError(f"no {part} policy {name!r}; there are: {', '.join(known)}{also}")
    return _build(f"{part} policy {name!r}", known[name], settings)


def _build(what: str, make: Any, settings: str) -> Any:
    kinds = parameters(make)
    values: dict[str, Any] = {}
    for pair in filter(None, settings.split(",")):
        key, _, text = pair.partition("=")
        if key not in kinds:
            raise TachyscopeError(
                f"{what} has no {key!r}; it takes: {', '.join(kinds) or 'nothing'}"
            )
        if key in values:
            raise TachyscopeError(f"{what} is given {key!r} twice: leave one out")
        values[key] = _value(f"{what}: {key}", kinds[key], text)
    return make(**values)


def parameters(make: Any) -> dict[str, Any]:
    """A policy's settings by name, each with its type."""
    hints = typing.get_type_hints(make)
    return {f.name: hints[f.name] for f in dataclasses.fields(make)}


def _value(what: str, kind: Any, text: str) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if text == "none":
            return None
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        words = typing.get_args(kind)
        if text not in words:
            raise TachyscopeError(f"{what} must be one of {', '.join(words)}, got {text!r}")
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise TachyscopeError(f"{what} must be true or false, got {text!r}")
        return text == "true"
    if kind is Size:
        return Size.parse(text)
    try:
        number = kind(text)
    except ValueError:
        raise TachyscopeError(
            f"{what} must be {'a whole number' if kind is int else 'a number'}, got {text!r}"
        ) from None
    if number != number:
        raise TachyscopeError(f"{what} must be a number, got {text!r}")
    return number
