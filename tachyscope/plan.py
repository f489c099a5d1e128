"""Which methods to use: a policy of every kind, their text form, and named plans."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tachyscope.attention import AttentionPolicy, TextPolicy
from tachyscope.attention.ann import Ann
from tachyscope.attention.ann_text import AnnText
from tachyscope.attention.dense import Dense, DenseText
from tachyscope.attention.pads import Pads
from tachyscope.attention.radial import Radial
from tachyscope.attention.svg import Svg
from tachyscope.attention.svg2 import Svg2
from tachyscope.attention.window import Window as ReadWindow
from tachyscope.cache import CachePolicy
from tachyscope.cache.bank import Bank
from tachyscope.cache.dedup import Dedup
from tachyscope.cache.deep_forcing import DeepForcing
from tachyscope.cache.frames import Frames
from tachyscope.cache.keep_all import KeepAll
from tachyscope.cache.memrope import MemRope
from tachyscope.cache.merge import Merge
from tachyscope.cache.window import Window
from tachyscope.cache.worldkv import WorldKv
from tachyscope.errors import TachyscopeError, shown
from tachyscope.passes import PassPolicy
from tachyscope.passes.all import All
from tachyscope.passes.draft import Draft
from tachyscope.passes.every_k import EveryK as EveryKPass
from tachyscope.passes.flowcache import FlowCache
from tachyscope.passes.teacache import TeaCache
from tachyscope.replay import ReplayPolicy
from tachyscope.replay.attentive import Attentive
from tachyscope.replay.every_k import EveryK
from tachyscope.replay.input import Input
from tachyscope.replay.neurons import NeuronReplay, Neurons
from tachyscope.replay.prune import Prune
from tachyscope.replay.random import Random
from tachyscope.settings import settings as settings_of
from tachyscope.store import StorePolicy
from tachyscope.store.fp8 import Fp8
from tachyscope.store.int2 import Int2
from tachyscope.store.int4 import Int4
from tachyscope.store.int8 import Int8
from tachyscope.store.native import Native
from tachyscope.types import Shape, Size

# every kind of policy, as `Plan` has them, and its policies by name
POLICIES: dict[str, dict[str, Any]] = {
    "cache": {
        "keep_all": KeepAll,
        "window": Window,
        "merge": Merge,
        "dedup": Dedup,
        "frames": Frames,
        "bank": Bank,
        "memrope": MemRope,
        "worldkv": WorldKv,
        "deep_forcing": DeepForcing,
    },
    "store": {"native": Native, "int8": Int8, "fp8": Fp8, "int4": Int4, "int2": Int2},
    "attention": {
        "dense": Dense,
        "window": ReadWindow,
        "ann": Ann,
        "radial": Radial,
        "svg": Svg,
        "svg2": Svg2,
    },
    "text": {"dense": DenseText, "pads": Pads, "ann": AnnText},
    "passes": {
        "all": All,
        "every_k": EveryKPass,
        "teacache": TeaCache,
        "flowcache": FlowCache,
        "draft": Draft,
    },
    "replay": {
        "attentive": Attentive,
        "random": Random,
        "every_k": EveryK,
        "input": Input,
        "neurons": Neurons,
        "prune": Prune,
    },
}

LABEL = 40  # letters of a plan's text that still serve as its name
# kinds that a plan's text leaves out at their default: it stays as it was before there were such
SHORT = ("store", "passes")
# what a plan for chunks remembers: everything, most of it in host memory
BANK = "cache=bank:resident=21f,host=int8"
# "stock" is the model's own; docs/eval.md and eval_tokens.md tell why the others are as they are
NAMED: dict[str, dict[str, str]] = {
    "chunks": {
        "dense": "cache=keep_all attention=dense text=dense replay=none",
        "lossless": "cache=keep_all attention=dense text=pads replay=none",
        "balanced": f"{BANK} attention=ann:read=1 text=pads replay=none",
        "fast": f"{BANK} attention=ann:read=0.4 text=pads replay=none",
        # nothing in host memory: a server's sessions are many, and their snapshots stay small
        "live": "cache=dedup:budget=21f,newest=3 attention=ann:read=0.3 text=pads replay=none",
        "fastcar": "cache=keep_all attention=dense text=dense replay=attentive:share=0.8",
        "fast-ar": "cache=merge:threshold=0.9,heads=shared "
        "attention=ann:read=0.28,hash=lsh,block=1,tile=1,sink=0,newest=0,"
        "dense_passes=0.3,dense_layers=0.3 text=ann:hash=lsh replay=none",
    },
    "tokens": {
        "dense": "cache=keep_all attention=dense text=none replay=none",
        # drafts lose nothing and save more than any replay does (docs/eval_tokens.md)
        "lossless": "cache=keep_all attention=dense text=none passes=draft replay=none",
        "balanced": "cache=keep_all attention=dense text=none passes=draft replay=none",
        "fast": "cache=keep_all attention=dense text=none passes=draft:places=64 replay=none",
        "live": "cache=keep_all attention=dense text=none passes=draft:places=64 replay=none",
        "fastcar": "cache=keep_all attention=dense text=none "
        "replay=attentive:threshold=-4,cfg=free,authors=true",
        "fast-ar": "cache=merge:threshold=0.9,heads=shared "
        "attention=ann:read=0.28,hash=lsh,block=1,tile=1,sink=0,newest=0,dense_layers=0.3 "
        "text=none replay=none",
    },
}
# a budget counts what is under way, five chunks there: this one holds as much past
NAMED["rolling"] = {name: plan.replace("=21f", "=33f") for name, plan in NAMED["chunks"].items()}
NAMES = ("dense", "stock", "lossless", "balanced", "fast", "live", "fastcar", "fast-ar")


@dataclass(frozen=True)
class Plan(Mapping[str, Any]):
    """One policy of every kind: a mapping from kind to policy, None where there is none.

    What to remember, how to store it, what to read (of the video, of the prompt), which passes to
    run, what to compute again.
    """

    cache: CachePolicy = KeepAll()
    store: StorePolicy = Native()
    attention: AttentionPolicy = Dense()
    text: TextPolicy | None = None
    passes: PassPolicy = All()
    replay: ReplayPolicy | None = None

    def __getitem__(self, kind: str) -> Any:
        return vars(self)[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    @classmethod
    def parse(cls, text: str, kind: str = "chunks", stock: str = "") -> Plan:
        """A base name, then changes: `fast cache=bank:resident=12f replay=none`.

        A change within the base's policy keeps its other settings; another policy starts from its
        own defaults. The base is `dense` where none is named; `kind` (one of NAMED) and the model's
        own `stock` say what a name stands for.
        """
        words, _ = _read(text, kind, stock)
        return cls(**{part: _policy(part, word) for part, word in words.items()})

    def check(self, shape: Shape) -> None:
        """Raise where the plan cannot serve a model of this shape."""
        if self.text is None and shape.text:
            raise TachyscopeError(
                f"this model reads its prompt by cross-attention, so text=none is not possible: "
                f"use text={', '.join(POLICIES['text'])}"
            )
        own = self.cache.view_depends_on_pass or self.cache.dense_only
        if own and not isinstance(self.attention, Dense):
            then = ", or leave view out" if self.cache.view_depends_on_pass else ""
            raise TachyscopeError(
                f"cache={spell(self.cache)} says itself what a pass reads, got "
                f"attention={spell(self.attention)}: use attention=dense{then}"
            )
        if isinstance(self.cache, Bank):
            self._check_bank(shape)
        if isinstance(self.cache, WorldKv):
            self._check_worldkv(shape)
        if self.store.whole_frames:
            whole = {"cache": self.cache.whole_frames, "attention": not self.attention.reorders}
            for kind, serves in whole.items():
                if not serves:
                    raise TachyscopeError(
                        f"store={spell(self.store)} keeps groups of entries together, which "
                        f"{kind}={spell(self[kind])} would part: use store=int4"
                    )
        # a slice of neurons that is the same for every token needs no decision
        static = isinstance(self.replay, NeuronReplay) and not self.replay.turns
        decides = self.replay is not None and not static
        why = self.passes.refusal(shape, replays=decides)
        if why is not None:
            raise TachyscopeError(f"{why}, got passes={spell(self.passes)}: use passes=all")
        if self.text is not None and not shape.text:
            raise TachyscopeError(
                f"this model has no cross-attention, got text={spell(self.text)}: leave text out"
            )
        if isinstance(self.replay, NeuronReplay) and not shape.token_by_token:
            raise TachyscopeError(
                f"this model makes no video token by token, got replay={spell(self.replay)}: use "
                f"replay=attentive, random or every_k"
            )

    def _check_bank(self, shape: Shape) -> None:
        """Raise where a bank, which is read by its index alone, cannot be."""
        ann = self.attention if isinstance(self.attention, Ann) else None
        faults = {
            f"attention={spell(self.attention)}: use attention=ann:k=1280": ann is None,
            "top_p: give ann a k or read": ann is not None and ann.top_p is not None,
            "dense_passes or dense_layers: leave them out": ann is not None
            and bool(ann.dense_passes or ann.dense_layers),
            f"store={spell(self.store)}: leave it out, and set host": self.store != Native(),
            "a model that writes token by token: use another cache": shape.token_by_token,
        }
        for fault, applies in faults.items():
            if applies:
                raise TachyscopeError(f"cache=bank cannot serve {fault}")

    def _check_worldkv(self, shape: Shape) -> None:
        """Raise where chunks cannot be retrieved by pose, or what is retrieved cannot be read."""
        faults = {
            "a model that does not know its camera's poses: use another cache": not shape.poses
            or shape.token_by_token
            or bool(shape.rolling_frames),
            f"store={spell(self.store)}: leave it out": self.store != Native(),
        }
        for fault, applies in faults.items():
            if applies:
                raise TachyscopeError(f"cache=worldkv cannot serve {fault}")

    def __str__(self) -> str:
        written = {k: x for k, x in self.items() if k not in SHORT or x != DEFAULT[k]}
        return " ".join(f"{kind}={spell(policy)}" for kind, policy in written.items())


DEFAULT = Plan()
# kinds that a plan may do without
OPTIONAL = tuple(kind for kind, policy in DEFAULT.items() if policy is None)


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


class Word(NamedTuple):
    """One part of a plan's text: a policy's name, and its settings as they are written."""

    policy: str
    settings: dict[str, str]

    def __str__(self) -> str:
        settings = _settings(self.settings)
        return f"{self.policy}:{settings}" if settings else self.policy


def _settings(settings: Mapping[str, str], between: str = ",") -> str:
    return between.join(f"{key}={value}" for key, value in settings.items())


def check_text(text: str, kind: str = "chunks") -> None:
    """Raise for what can be known of a plan before its model: only that knows its stock plan."""
    if text.split()[:1] == ["stock"]:
        words, _ = _read(text, kind, NAMED[kind]["dense"])
        for part, word in words.items():
            _values(part, word)
    else:
        Plan.parse(text, kind)


def replaced(text: str, kind: str = "chunks", stock: str = "") -> list[str]:
    """What of its base a plan's changes undo besides what they name, a sentence a part."""
    return _read(text, kind, stock)[1]


def _read(text: str, kind: str, stock: str) -> tuple[dict[str, Word], list[str]]:
    """The words of a plan's text by part, and what of the base no longer applies."""
    given = text.split()
    base = given.pop(0) if given and "=" not in given[0] else "dense"
    words, changed, gone = _named(base, kind, stock), dict[str, Word](), []
    for word in given:
        part, equals, spec = word.partition("=")
        if not equals:
            raise TachyscopeError(
                f"a plan is one base name, then part=policy words, got {shown(word)} behind: "
                f"parts are {', '.join(POLICIES)}"
            )
        if part not in POLICIES:
            raise TachyscopeError(f"a plan has no {shown(part)}; it has: {', '.join(POLICIES)}")
        if part in changed:
            first = shown(f"{part}={changed[part]}")
            raise TachyscopeError(
                f"{part} is given twice, {first} and {shown(word)}: leave one out"
            )
        changed[part] = _word(part, spec)
        words[part], lost = _changed(part, words[part], changed[part])
        gone += [lost] if lost else []
    return words, gone


def _changed(part: str, base: Word, new: Word) -> tuple[Word, str]:
    """A part after a change, and what of the base that undoes."""
    if new.policy != base.policy:
        lost = _settings(base.settings, ", ")
        what = f"{part}={new.policy} replaces {part}={base.policy} and its {lost}"
        return new, what if lost else ""
    given = [key for key, value in new.settings.items() if value != "none"]
    known = settings_of(POLICIES[part][new.policy]) if given else {}
    out = {name for key in given for name in known[key].instead_of} - new.settings.keys()
    kept = {key: value for key, value in base.settings.items() if key not in out}
    lost = _settings({key: base.settings[key] for key in base.settings if key in out}, ", ")
    what = f"{part}={new} replaces {lost} of {part}={base.policy}"
    return Word(new.policy, kept | new.settings), what if lost else ""


def _named(name: str, kind: str, stock: str) -> dict[str, Word]:
    if name not in NAMES:
        raise TachyscopeError(f"no plan {shown(name)}; there are: {', '.join(NAMES)}")
    if name == "stock":
        if not stock:
            raise TachyscopeError("this model names no stock plan: use another base, dense for one")
        return _read(stock, kind, "")[0]
    words = {part: spell(policy) for part, policy in DEFAULT.items()}
    words |= {part: spec for part, _, spec in (w.partition("=") for w in NAMED[kind][name].split())}
    return {part: _word(part, spec) for part, spec in words.items()}


def _word(part: str, spec: str) -> Word:
    name, _, settings = spec.partition(":")
    known = POLICIES[part]
    if name == "none" and part in OPTIONAL:
        if settings:
            raise TachyscopeError(f"{part}=none takes no settings, got {shown(settings)}")
    elif name not in known:
        also = ", none" if part in OPTIONAL else ""
        raise TachyscopeError(
            f"no {part} policy {shown(name)}; there are: {', '.join(known)}{also}"
        )
    parts: dict[str, str] = {}
    for pair in filter(None, settings.split(",")):
        key, _, text = pair.partition("=")
        what, allowed = f"{part} policy {name!r}", settings_of(known[name])
        if key not in allowed:
            raise TachyscopeError(
                f"{what} has no {shown(key)}; it takes: {', '.join(allowed) or 'nothing'}"
            )
        if key in parts:
            raise TachyscopeError(f"{what} is given {key!r} twice: leave one out")
        parts[key] = text
    return Word(name, parts)


def _policy(part: str, word: Word) -> Any:
    if word.policy == "none":
        return None
    return POLICIES[part][word.policy](**_values(part, word))


def _values(part: str, word: Word) -> dict[str, Any]:
    if not word.settings:
        return {}
    known = settings_of(POLICIES[part][word.policy])
    what = f"{part} policy {word.policy!r}"
    return {
        key: _value(f"{what}: {key}", known[key].type, text) for key, text in word.settings.items()
    }


def _value(what: str, kind: Any, text: str) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if text == "none":
            return None
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        words = typing.get_args(kind)
        if text not in words:
            raise TachyscopeError(f"{what} must be one of {', '.join(words)}, got {shown(text)}")
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise TachyscopeError(f"{what} must be true or false, got {shown(text)}")
        return text == "true"
    if kind is Size:
        return Size.parse(text)
    try:
        number = kind(text)
    except ValueError:
        raise TachyscopeError(
            f"{what} must be {'a whole number' if kind is int else 'a number'}, got {shown(text)}"
        ) from None
    if number != number:
        raise TachyscopeError(f"{what} must be a number, got {shown(text)}")
    return number


def label(plan: Plan | str) -> str:
    """A short name for a plan: its own, its text where that is short, or `plan`."""
    return plan if isinstance(plan, str) and len(plan) <= LABEL else "plan"
