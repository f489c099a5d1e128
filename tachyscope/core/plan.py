"""Plans: one policy for each of six questions, as objects or as text; and the named plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_origin

from tachyscope.attention import AttentionPolicy, TextPolicy
from tachyscope.attention.dense import Dense, DenseText
from tachyscope.cache import CachePolicy
from tachyscope.cache.keep_all import KeepAll
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.policy import OPTIONAL, QUESTIONS, Policy, Setting, find_policy, policies
from tachyscope.core.policy import settings as settings_of
from tachyscope.core.types import Shape, Size
from tachyscope.passes import PassPolicy
from tachyscope.passes.all import AllPasses
from tachyscope.replay import ReplayPolicy
from tachyscope.store import StorePolicy
from tachyscope.store.native import Native

LABEL = 40  # letters of a plan's text that still serve as its name
# questions that a plan's text leaves out at their default, so that older texts stay the same
SHORT = ("store", "passes")
# keeps everything, most of it in host memory
BANK = "cache=bank:resident=21f,host=int8"
# the past weighs more than the present chunk, and blocks are neighbours in time: a scene that comes
# back then loses least (docs/results.md, quality by regime)
TRUST = "past_weight=4,order=time"
# "stock" is the model's own; docs/results.md has what the others cost
NAMED: dict[str, dict[str, str]] = {
    "chunks": {
        "dense": "cache=keep_all attention=dense text=dense replay=none",
        "lossless": "cache=keep_all attention=dense text=pads replay=none",
        "balanced": f"{BANK.replace('21', '42')} attention=ann:read=0.5,{TRUST} "
        "text=pads replay=none",
        "fast": f"{BANK} attention=ann:read=0.4,{TRUST} text=pads replay=none",
        # nothing in host memory, for servers with many sessions; snapshots stay small
        "live": "cache=dedup:budget=21f,newest=3 attention=ann:read=0.3,past_weight=4 "
        "text=pads replay=none",
        # for models with camera poses: reads the ten latent frames of the nearest poses
        "pose": "cache=bank:resident=13f attention=pose text=pads replay=none",
        # for others, with a slow camera: reads the frames most similar to the newest one
        "similar": f"{BANK} attention=similar text=pads replay=none",
        "fastcar": "cache=keep_all attention=dense text=dense replay=attentive:share=0.8",
        "fast-ar": "cache=merge:threshold=0.9,heads=shared "
        "attention=ann:read=0.28,hash=lsh,block=1,tile=1,sink=0,newest=0,"
        "dense_passes=0.3,dense_layers=0.3 text=ann:hash=lsh replay=none",
    },
    "tokens": {
        "dense": "cache=keep_all attention=dense text=none replay=none",
        # drafts are lossless and save more than any replay (docs/token-models.md)
        "lossless": "cache=keep_all attention=dense text=none passes=draft replay=none",
        "balanced": "cache=keep_all attention=dense text=none passes=draft replay=none",
        "fast": "cache=keep_all attention=dense text=none passes=draft:places=64 replay=none",
        "live": "cache=keep_all attention=dense text=none passes=draft:places=64 replay=none",
        # token models cannot read a bank
        "pose": "cache=keep_all attention=dense text=none passes=draft:places=64 replay=none",
        "similar": "cache=keep_all attention=dense text=none passes=draft:places=64 replay=none",
        "fastcar": "cache=keep_all attention=dense text=none "
        "replay=attentive:threshold=-4,cfg=free,authors=true",
        "fast-ar": "cache=merge:threshold=0.9,heads=shared "
        "attention=ann:read=0.28,hash=lsh,block=1,tile=1,sink=0,newest=0,dense_layers=0.3 "
        "text=none replay=none",
    },
}
# in a rolling model five chunks in flight count against the budget: +12f keeps as much past
NAMED["rolling"] = {
    name: plan.replace("=21f", "=33f").replace("=42f", "=54f")
    for name, plan in NAMED["chunks"].items()
}
# its chunks overlap, and none is final before the next: so `similar` falls back to blocks
NAMED["rolling"]["similar"] = NAMED["rolling"]["balanced"]
NAMES = (
    "dense", "stock", "lossless", "balanced", "fast", "live", "pose", "similar", "fastcar",
    "fast-ar",
)  # fmt: skip


@dataclass(frozen=True)
class Plan(Mapping[str, Any]):
    """One policy for each question, as a mapping from question to policy or None.

    The questions: what to keep (`cache`), how to store it (`store`), what of the video and of the
    prompt to read (`attention`, `text`), which denoising passes to run (`passes`), which MLP
    outputs to reuse (`replay`). A policy may be given as text: `Plan(cache="window:budget=9f")`.
    """

    cache: CachePolicy = KeepAll()
    store: StorePolicy = Native()
    attention: AttentionPolicy = Dense()
    text: TextPolicy | None = DenseText()
    passes: PassPolicy = AllPasses()
    replay: ReplayPolicy | None = None

    def __post_init__(self) -> None:
        for question, given in self.items():
            policy = _made(question, given)
            if policy is not given:
                object.__setattr__(self, question, policy)

    def __getitem__(self, kind: str) -> Any:
        return vars(self)[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    @classmethod
    def parse(cls, text: str, kind: str = "chunks", stock: str = "") -> Plan:
        """Parse a base name and changes: `fast cache=bank:resident=12f replay=none`.

        A change of the base's own policy keeps its other settings; another policy starts from its
        defaults. The default base is `dense`. What a name stands for depends on the model: its
        `kind` (one of NAMED) and its `stock` plan.
        """
        words, _ = _read(text, kind, stock)
        return cls(**{part: _policy(part, word) for part, word in words.items()})

    def for_shape(self, shape: Shape) -> Plan:
        """The plan, without its text policy if a model of this shape has no cross-attention."""
        return self if shape.text or self.text is None else replace(self, text=None)

    def check(self, shape: Shape) -> None:
        """Raise if the plan cannot serve a model of this shape."""
        if self.text is None and shape.text:
            raise TachyscopeError(
                f"this model reads its prompt by cross-attention, so text=none is not possible: "
                f"use text={', '.join(policies('text'))}"
            )
        for question, policy in self.items():
            if policy is None:
                continue
            policy.check_plan(self, shape)
            if shape.ranks > 1 and not policy.splits_heads:
                raise TachyscopeError(
                    f"{question}={policy} looks at all heads together, and {shape.ranks} ranks "
                    f"hold some each: start one process, or take a named plan's {question}"
                )

    def __str__(self) -> str:
        written = {k: x for k, x in self.items() if k not in SHORT or x != DEFAULT[k]}
        return " ".join(f"{kind}={spell(policy)}" for kind, policy in written.items())


def plan(
    base: str = "dense",
    *,
    cache: CachePolicy | str = "",
    store: StorePolicy | str = "",
    attention: AttentionPolicy | str = "",
    text: TextPolicy | str | None = "",
    passes: PassPolicy | str = "",
    replay: ReplayPolicy | str | None = "",
) -> str:
    """A named plan with some policies replaced, as text: `plan("fast", cache=Window("9f"))`.

    It is text because a name's meaning depends on the model. A policy object replaces the base's
    policy; a text changes only the settings that it names.
    """
    if not isinstance(base, str):
        raise TachyscopeError(f"a plan's base is text, got a {type(base).__name__}: try 'fast'")
    given = dict(zip(QUESTIONS, (cache, store, attention, text, passes, replay), strict=True))
    words = [base]
    for question, change in given.items():
        if change == "":
            continue
        if isinstance(change, str):
            words.append(f"{question}={change}")
            continue
        policy = _made(question, change)
        spec = "none" if policy is None else policy.in_full()
        if len(spec.split()) != 1 or _policy(question, _word(question, spec)) != policy:
            raise TachyscopeError(
                f"{question}={shown(spec)} cannot be written in a plan's text: give a whole Plan"
            )
        words.append(f"{question}={spec}")
    return " ".join(words)


def _made(question: str, given: Any) -> Policy | None:
    """The policy of a question, given as an object or as text."""
    if isinstance(given, str):
        if given in NAMES and given not in policies(question):
            raise TachyscopeError(
                f"{shown(given)} is a named plan, and Plan takes a policy for each question: use "
                f"tachyscope.plan({given!r})"
            )
        made: Policy | None = _policy(question, _word(question, given))
        return made
    if given is None and question in OPTIONAL:
        return None
    if not isinstance(given, Policy) or given.question != question:
        raise TachyscopeError(
            f"{question} must be a {question} policy or its text, got {_described(given)}: there "
            f"are {', '.join(policies(question))}"
        )
    return given


def _described(given: Any) -> str:
    if isinstance(given, Policy):
        return f"{given.question}={given}"
    return repr(given) if given is None else f"a {type(given).__name__}"


DEFAULT = Plan()


def spell(policy: Policy | None) -> str:
    """A policy as a plan's text writes it: `name:key=value,…`, with all settings but None."""
    return "none" if policy is None else str(policy)


class Word(NamedTuple):
    """One part of a plan's text: a policy's name, and its settings as text."""

    policy: str
    settings: dict[str, str]

    def __str__(self) -> str:
        settings = _settings(self.settings)
        return f"{self.policy}:{settings}" if settings else self.policy


def _settings(settings: Mapping[str, str], between: str = ",") -> str:
    return between.join(f"{key}={value}" for key, value in settings.items())


def check_text(text: str, kind: str = "chunks") -> None:
    """Raise for faults that show without a model, whose `stock` plan is not yet known."""
    if text.split()[:1] == ["stock"]:
        words, _ = _read(text, kind, NAMED[kind]["dense"])
        for part, word in words.items():
            _values(part, word)
    else:
        Plan.parse(text, kind)


def replaced(text: str, kind: str = "chunks", stock: str = "") -> list[str]:
    """Sentences on the settings of a base that a plan's changes drop without naming them."""
    return _read(text, kind, stock)[1]


def _read(text: str, kind: str, stock: str) -> tuple[dict[str, Word], list[str]]:
    """The parts of a plan's text by question, and sentences on what of the base was dropped."""
    given = text.split()
    base = given.pop(0) if given and "=" not in given[0] else "dense"
    words, changed, gone = _named(base, kind, stock), dict[str, Word](), []
    for word in given:
        part, equals, spec = word.partition("=")
        if not equals:
            raise TachyscopeError(
                f"a plan is one base name, then part=policy words, got {shown(word)} behind: "
                f"parts are {', '.join(QUESTIONS)}"
            )
        if part not in QUESTIONS:
            raise TachyscopeError(f"a plan has no {shown(part)}; it has: {', '.join(QUESTIONS)}")
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
    """A part after a change, and a sentence on what of the base this drops."""
    if new.policy != base.policy:
        lost = _settings(base.settings, ", ")
        what = f"{part}={new.policy} replaces {part}={base.policy} and its {lost}"
        return new, what if lost else ""
    given = [key for key, value in new.settings.items() if value != "none"]
    known = settings_of(find_policy(part, new.policy)) if given else {}
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
    name, _, written = spec.partition(":")
    if name == "none" and part in OPTIONAL:
        if written:
            raise TachyscopeError(f"{part}=none takes no settings, got {shown(written)}")
        return Word(name, {})
    allowed, what = settings_of(find_policy(part, name)), f"{part} policy {name!r}"
    parts: dict[str, str] = {}
    for pair in filter(None, written.split(",")):
        key, _, text = pair.partition("=")
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
    return find_policy(part, word.policy)(**_values(part, word))


def _values(part: str, word: Word) -> dict[str, Any]:
    if word.policy == "none":
        return {}
    known, what = settings_of(find_policy(part, word.policy)), f"{part} policy {word.policy!r}"
    for key, one in known.items():
        if one.required and key not in word.settings:
            raise TachyscopeError(f"{what} needs {key}: {one.about}")
    return {key: _value(f"{what}: {key}", known[key], text) for key, text in word.settings.items()}


def _value(what: str, one: Setting, text: str) -> Any:
    """A setting's value, parsed from text; bounds are checked by the policy."""
    kind = one.kind
    if one.optional and text == "none":
        return None
    if get_origin(kind) is Literal or kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
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
    """A short name of a plan for labels: its text if that is short, else `plan`."""
    return plan if isinstance(plan, str) and len(plan) <= LABEL else "plan"
