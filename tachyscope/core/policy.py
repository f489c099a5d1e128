"""The base of all policies: frozen dataclasses that are their own configuration.

    @dataclass(frozen=True)
    class Dedup(CachePolicy, name="dedup"):
        budget: Size = setting(Size(21, True), "Most entries that a layer holds.", bound=ENTRIES)

A plan writes this class as `cache=dedup:budget=21f`. Policies in the packages below are registered
when their question is first looked up. Other distributions name theirs in the entry point group
`tachyscope.policies`: `"cache.stride" = "my_package.stride"`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import os
import pkgutil
import re
import types
import typing
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, NamedTuple

from tachyscope.core.errors import TachyscopeError, first_line, shown, warn
from tachyscope.core.limits import LATENTS, Bound, fault, within
from tachyscope.core.types import Shape, Size

# a plan's questions, and the package with each one's policies
QUESTIONS = {
    "cache": "tachyscope.cache",
    "store": "tachyscope.store",
    "attention": "tachyscope.attention",
    "text": "tachyscope.attention",
    "passes": "tachyscope.passes",
    "replay": "tachyscope.replay",
}
OPTIONAL = ("text", "replay")  # questions for which a plan may say `none`
GROUP = "tachyscope.policies"
# other papers' methods, which tachyscope-lab has for comparison
LAB = {
    "cache": ("frames", "memrope", "worldkv", "deep_forcing"),
    "attention": ("radial", "svg", "svg2"),
}


class Setting(NamedTuple):
    """One setting of a policy."""

    type: Any  # the annotation
    default: Any  # dataclasses.MISSING if it must be given
    about: str
    bound: Bound | None  # of a number; of a Size that is given as entries
    instead_of: tuple[str, ...]  # settings of the base that a change of this one drops

    @property
    def kind(self) -> Any:
        """The type without None."""
        return next((x for x in _options(self.type) if x is not types.NoneType), self.type)

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def optional(self) -> bool:
        return types.NoneType in _options(self.type)


def _options(kind: Any) -> tuple[Any, ...]:
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else ()


def setting(
    default: Any, about: str, *, bound: Bound | None = None, instead_of: tuple[str, ...] = ()
) -> Any:
    """A policy's field: its default, a sentence for its help, and its bound.

    `instead_of` names settings that cannot be given together with this one.
    """
    about_it = {"about": about, "bound": bound, "instead_of": instead_of}
    return dataclasses.field(default=default, metadata=about_it)


class Policy(abc.ABC):
    """A plan's policy for one question: `class Dedup(CachePolicy, name="dedup")` registers it."""

    question: ClassVar[str]
    name: ClassVar[str] = ""  # in a plan's text; without a name it can only be used as an object
    paper: ClassVar[str] = ""
    # whether ranks can each hold some heads: heads are independent, or coupled by `mean_heads`
    splits_heads: ClassVar[bool] = False

    def __init_subclass__(cls, *, name: str = "", question: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        if question:
            cls.question = question
        cls.name = name
        if name:
            _register(cls)

    def __post_init__(self) -> None:
        for key, one in settings(type(self)).items():
            given = getattr(self, key)
            value = _checked(f"{self.question} policy {self.label!r}: {key}", one, given)
            if value is not given:
                object.__setattr__(self, key, value)
        self.check_settings()

    def check_settings(self) -> None:
        """Raise if settings contradict each other."""
        return

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        """Raise if it cannot serve a model of this shape, or the plan's other policies."""
        return

    @property
    def label(self) -> str:
        """Its name in a plan, or its class name if it has none."""
        return self.name or type(self).__name__

    def __str__(self) -> str:
        """As a plan's text writes it: `dedup:budget=21f,sink=1`, with all settings but None."""
        values = {key: getattr(self, key) for key in settings(type(self))}
        return _spelled(self.label, {k: v for k, v in values.items() if v is not None})

    def in_full(self) -> str:
        """As a plan's text writes it with None too, so that no setting of a base is kept."""
        return _spelled(self.label, {key: getattr(self, key) for key in settings(type(self))})


def _spelled(name: str, values: Mapping[str, Any]) -> str:
    words = [f"{key}={spell_value(value)}" for key, value in values.items()]
    return f"{name}:{','.join(words)}" if words else name


def spell_value(value: Any) -> str:
    """A setting's value as a plan writes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@functools.cache
def settings(policy: type[Policy]) -> Mapping[str, Setting]:
    """A policy's settings by name."""
    hints = typing.get_type_hints(policy)
    if not dataclasses.is_dataclass(policy):
        return {}
    return {
        field.name: Setting(
            hints[field.name],
            field.default,
            field.metadata.get("about", ""),
            field.metadata.get("bound"),
            field.metadata.get("instead_of", ()),
        )
        for field in dataclasses.fields(policy)
    }


def _checked(what: str, one: Setting, value: Any) -> Any:
    """A setting's value in the setting's type; raises if it has another or is out of bounds."""
    if value is None and one.optional:
        return None
    kind, bound = one.kind, one.bound
    if kind is Size:
        size = Size.of(value)
        bound = Bound(1, LATENTS.high) if size.frames else bound
        if bound is not None and not within(bound, size.count):
            raise TachyscopeError(f"{what} must be {bound}, got {size}")
        return size
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind in (bool, int, float, str) or typing.get_origin(kind) is typing.Literal:
        if rule := fault(kind, bound, value):
            raise TachyscopeError(f"{what} must be {rule}, got {shown(value)}")
        return value if kind not in (int, float) or type(value) is kind else kind(value)
    return value


_REGISTERED: dict[str, dict[str, type[Policy]]] = {question: {} for question in QUESTIONS}


def _register(cls: type[Policy]) -> None:
    question, name = getattr(cls, "question", ""), cls.name
    if question not in QUESTIONS:
        raise TachyscopeError(
            f"policy {name!r} answers no question of a plan: derive it from CachePolicy, "
            f"StorePolicy, AttentionPolicy, TextPolicy, PassPolicy or ReplayPolicy"
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or name == "none":
        raise TachyscopeError(
            f"a policy's name has small letters, digits and _, got {shown(name)}: choose another"
        )
    known = _REGISTERED[question].get(name)
    # a notebook cell that runs again defines its class again
    if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TachyscopeError(
            f"there is a {question} policy {name!r} already, {known.__module__}."
            f"{known.__qualname__}: choose another name"
        )
    _REGISTERED[question][name] = cls


def find_policy(question: str, name: str) -> type[Policy]:
    """The policy of that name."""
    known = _REGISTERED[question]
    if name not in known:
        _import_files(QUESTIONS[question])
    if name not in known:
        for entry in _entries(question):
            if entry.name == f"{question}.{name}":
                _load(entry)
    if name in known:
        return known[name]
    if name in LAB.get(question, ()):
        raise TachyscopeError(
            f"{question} policy {name!r} comes with tachyscope-lab, which is not installed here: "
            f"run pip install -e ./lab in a clone of the repository"
        )
    also = ", none" if question in OPTIONAL else ""
    raise TachyscopeError(
        f"no {question} policy {shown(name)}; there are: {', '.join(policies(question))}{also}"
    )


def policies(question: str) -> dict[str, type[Policy]]:
    """Every policy that answers a question, by name."""
    _import_files(QUESTIONS[question])
    known = _REGISTERED[question]
    for entry in _entries(question):
        if entry.name.partition(".")[2] in known:
            continue
        try:
            _load(entry)
        except TachyscopeError as fault:
            warn(str(fault))  # a broken distribution must not hide the other policies
    return dict(sorted(known.items()))


@functools.cache
def _import_files(package: str) -> None:
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{found.name}")


def _entries(question: str) -> Iterator[EntryPoint]:
    for entry in entry_points(group=GROUP):
        if entry.name.startswith(f"{question}."):
            yield entry


def _load(entry: EntryPoint) -> None:
    """Import an entry point's module, whose policy registers itself."""
    question, _, name = entry.name.partition(".")
    try:
        entry.load()
    except Exception as fault:
        raise TachyscopeError(
            f"{question} policy {name!r} of {entry.value} cannot be loaded: {first_line(fault)}"
        ) from fault
    if name not in _REGISTERED[question]:
        raise TachyscopeError(
            f"{entry.value} is to have the {question} policy {name!r} and registers none of that "
            f"name: name the class so, or mend its entry point"
        )
