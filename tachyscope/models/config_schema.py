"""Schemas of configuration files: each field with its type, bound and key in the files.

    @dataclass(frozen=True, slots=True)
    class WanConfig(Config):
        subject, section = "a Wan configuration's", "tachyscope"
        layers: int = entry(30, LAYERS, at="num_layers")

A configuration checks its fields when it is constructed. `Tables` reads it from JSON objects, with
errors that name the file's own keys; `written` returns these objects.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeGuard

from tachyscope.core.errors import TachyscopeError, spelled
from tachyscope.core.limits import Bound, fault, within

# bounds that several models share
WIDTH = Bound(1, 65_536)  # channels
INNER = Bound(1, 1_048_576)  # of an MLP
LAYERS = Bound(1, 256)
HEADS = Bound(1, 1_024)
SIDE = Bound(1, 1_024)  # positions, codes of a position, channels of latents
WORDS = Bound(1, 10_000_000)  # of a vocabulary or a codebook
EPS = Bound(1e-30, 0.1)
THETA = Bound(1e-6, 1e12)
FPS = Bound(1, 1_000)
ACTIONS = Bound(0, 256)  # letters
NUMBERS = Bound(0, 16)  # in a list


class Entry(NamedTuple):
    """A field of a configuration."""

    field: str
    kind: Any  # its type; a tuple's is that of its elements
    bound: Bound | None  # of a number, of each element of a tuple, or of a text's length
    length: Bound | None  # of a tuple; None for other types
    optional: bool  # whether it may be None
    default: Any
    path: tuple[str, ...] | None  # of keys in the files; None if it is not read from them


def entry(
    default: Any = dataclasses.MISSING,
    bound: Bound | None = None,
    *,
    at: str | None = None,
    length: Bound = NUMBERS,
) -> Any:
    """A configuration's field; `at` is its key in the files, as `llm.hidden_size`; "" for none."""
    return dataclasses.field(default=default, metadata={"bound": bound, "at": at, "length": length})


class Config:
    """Base of frozen dataclasses whose fields are made by `entry`."""

    __slots__ = ()
    subject: ClassVar[str]  # begins an error: "a Wan configuration's"
    section: ClassVar[str | None] = None  # of the files, for entries without a key

    def __post_init__(self) -> None:
        for one in entries(type(self)):
            given = getattr(self, one.field)
            value = checked(f"{self.subject} {one.field}", one, given, "change it")
            if value is not given:
                object.__setattr__(self, one.field, value)
        self.check_fields()

    def check_fields(self) -> None:
        """Raise if valid fields do not fit together."""
        return

    def demand(self, right: bool, rule: str, got: object) -> None:
        """Raise with the rule unless `right`."""
        if not right:
            raise TachyscopeError(f"{self.subject} {rule}, got {got}: change it")


def entries(config: type[Config]) -> tuple[Entry, ...]:
    """A configuration's fields."""
    hints = typing.get_type_hints(config)
    found = []
    for field in dataclasses.fields(typing.cast(Any, config)):
        kind, length = hints[field.name], None
        optional = typing.get_origin(kind) is types.UnionType
        if optional:
            kind = next(x for x in typing.get_args(kind) if x is not types.NoneType)
        if typing.get_origin(kind) is tuple:
            kinds = typing.get_args(kind)
            kind = kinds[0]
            length = field.metadata["length"] if kinds[-1] is ... else Bound(len(kinds), len(kinds))
        at = field.metadata["at"]
        if at is None and config.section is not None:
            at = f"{config.section}.{field.name}" if config.section else field.name
        path = tuple(at.split(".")) if at else None
        bound = field.metadata["bound"]
        found.append(Entry(field.name, kind, bound, length, optional, field.default, path))
    return tuple(found)


def paths(config: type[Config], under: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of a configuration's fields, including those of nested configurations."""
    for one in entries(config):
        if one.path is None:
            continue
        if is_config(one.kind):
            yield from paths(one.kind, (*under, *one.path))
        else:
            yield (*under, *one.path)


def is_config(kind: Any) -> TypeGuard[type[Config]]:
    return isinstance(kind, type) and issubclass(kind, Config)


def checked(what: str, one: Entry, value: Any, advice: str) -> Any:
    """The value, converted to its entry's type; raises if it is of another or out of bounds."""
    if value is None and one.optional:
        return None
    if is_config(one.kind):
        if not isinstance(value, one.kind):
            _refuse(what, f"of type {one.kind.__name__}", value, advice)
        return value
    if one.length is None:
        if rule := fault(one.kind, one.bound, value):
            _refuse(what, rule, value, advice)
        return float(value) if one.kind is float else value
    numbers = value if isinstance(value, list | tuple) else ()
    right = numbers is value and within(one.length, len(numbers))
    if not right or any(fault(one.kind, one.bound, x) for x in numbers):
        many = one.length.high if one.length.low == one.length.high else one.length
        numbers_of = "whole numbers" if one.kind is int else "numbers"
        _refuse(what, f"{many} {numbers_of}, each {one.bound}", value, advice)
    return tuple(numbers)


def _refuse(what: str, rule: str, value: Any, advice: str) -> NoReturn:
    raise TachyscopeError(f"{what} must be {rule}, got {spelled(value)}: {advice}")


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """The objects of one or several config files, read by paths of keys."""

    values: Mapping[str, Any]
    where: str  # the file; "" if the first key of a path is the file's folder
    advice: str = "mend it or get it again"

    def split(self, path: Sequence[str]) -> tuple[str, str]:
        """The file of a path, and the key in it."""
        if self.where:
            return self.where, ".".join(path)
        file = f"{path[0]}/config.json" if path[0] else "config.json"
        return file, ".".join(path[1:])

    def name(self, path: Sequence[str]) -> str:
        """A path as errors name it."""
        return ": ".join(self.split(path))

    def at(self, path: str | tuple[str, ...]) -> Any:
        """The value at a path, or None."""
        keys = tuple(path.split(".")) if isinstance(path, str) else path
        value: Any = self.values
        for i, key in enumerate(keys):
            if not isinstance(value, Mapping):
                _refuse(self.name(keys[:i]), "an object", value, self.advice)
            value = value.get(key)
            if value is None:
                return None
        return value

    def must(self, path: str, *allowed: Any, advice: str = "") -> None:
        """Raise unless the value at a path is one of `allowed`; None allows its absence."""
        value = self.at(path)
        if value not in allowed:
            # None means absent, which is not a value to state
            rule = " or ".join(spelled(x) for x in allowed if x is not None) or "null"
            _refuse(self.name(path.split(".")), rule, value, advice or self.advice)

    def only(
        self,
        config: type[Config],
        path: str = "",
        also: Collection[str] = (),
        *,
        under: tuple[str, ...] = (),
        advice: str = "remove it",
    ) -> None:
        """Raise if the object at a path has a key that is not a field of the configuration."""
        inner = tuple(path.split(".")) if path else ()
        found = [p[len(inner)] for p in paths(config, under) if p[: len(inner)] == inner]
        keys = list(dict.fromkeys((*found, *also)))
        held = self.at(inner)
        for key in held if isinstance(held, Mapping) else ():
            if key not in keys:
                file, odd = self.split((*inner, key))
                raise TachyscopeError(
                    f"{file} has an unknown {odd!r}; it takes {', '.join(keys)}: {advice}"
                )

    def value(self, path: str, kind: Any, bound: Bound, length: Bound | None = None) -> Any:
        """The number or numbers at a path; raises if there are none."""
        keys = tuple(path.split("."))
        one = Entry("", kind, bound, length, False, None, None)
        return checked(self.name(keys), one, self.at(keys), self.advice)

    def fields(self, config: type[Config], under: tuple[str, ...] = ()) -> dict[str, Any]:
        """A configuration's fields in the files, checked; raises if a required one is missing."""
        given: dict[str, Any] = {}
        for one in entries(config):
            if one.path is None:
                continue
            path = (*under, *one.path)
            if is_config(one.kind):
                made = self.fields(one.kind, path)
                if one.default is dataclasses.MISSING:
                    given[one.field] = one.kind(**made)
                elif made:
                    given[one.field] = dataclasses.replace(one.default, **made)
                continue
            value = self.at(path)
            if value is not None or (one.default is dataclasses.MISSING and not one.optional):
                given[one.field] = checked(self.name(path), one, value, self.advice)
        return given


def check_numbers(values: Mapping[str, Any], bounds: Mapping[str, Bound], where: str) -> None:
    """Raise if a number in another package's configuration is out of its bound."""
    for name, bound in bounds.items():
        if (value := values.get(name)) is not None:
            length = Bound(0, 1_024) if isinstance(value, list | tuple) else None
            one = Entry(name, int, bound, length, False, None, None)
            checked(f"{where}: {name}", one, value, "mend it")


def written(config: Config) -> dict[str, Any]:
    """A configuration as the objects of its files."""
    values: dict[str, Any] = {}
    for one in entries(type(config)):
        if one.path is None:
            continue
        table = values
        for key in one.path[:-1]:
            table = table.setdefault(key, {})
        value = getattr(config, one.field)
        if isinstance(value, Config):
            merge(table, {one.path[-1]: written(value)})
        else:
            table[one.path[-1]] = list(value) if isinstance(value, tuple) else value
    return values


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path, creating the objects on the way."""
    *through, last = path.split(".")
    for key in through:
        values = values.setdefault(key, {})
    values[last] = value


def merge(into: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge an object into another, recursively."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            merge(into.setdefault(key, {}), value)
        else:
            into[key] = value
    return into
