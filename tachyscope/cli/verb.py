"""A verb: a frozen dataclass of its options, which cyclopts reads, and `run`."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NewType

from tachyscope.core.limits import number, whole
from tachyscope.io.files import user_path

# torch is loaded when a verb runs: help must not wait for it
if TYPE_CHECKING:
    from tachyscope.io.results import Document, Parts

# a path that stays text: Path would take a slash out of http://
PathText = NewType("PathText", str)
# what every verb takes beside its own options
TRACEBACK = "--traceback"
# options that do not change what is measured; of `paces` each row of rivals has its own
NO_SETTINGS = ("json", "out", "rows", "paces", "resume", "plot", "jobs", "seconds", "quiet")
RESUME = "Go on with the file of results: what it has of the same options is not measured again."


class Option(NamedTuple):
    """One option of a verb, as both parsers need it."""

    name: str
    type: Any  # bool, int, float, str, Path, PathText or a Literal
    default: Any  # dataclasses.MISSING: it must be given
    help: str
    positional: bool
    many: bool  # may be given several times
    optional: bool  # None where it is left out

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def option(default: Any, help: str, positional: bool = False) -> Any:
    """A dataclass field for an option, as `options_of` reads it."""
    return dataclasses.field(default=default, metadata={"help": help, "positional": positional})


def required(help: str, positional: bool = False) -> Any:
    """A dataclass field for an option that must be given."""
    return dataclasses.field(metadata={"help": help, "positional": positional})


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A verb: its docstring and its fields' help are what --help tells."""

    by_ranks: ClassVar[bool] = False  # whether several processes can do it together

    def run(self, command: str) -> None:
        """Do what the options ask for. command: the words that were typed, for the results."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ResultsVerb(Verb):
    """A verb whose results go to a file of their own, or to stdout."""

    json: str | None = option(None, "A file for the results, or - for the last line of stdout.")

    def check_json(self) -> None:
        """Raise where the results could not be written, before anything is measured."""
        from tachyscope.io.results import check_json

        check_json(self.json)

    def emit(self, results: Document) -> None:
        """Write the results where --json says."""
        from tachyscope.io.results import emit

        emit(results, self.json)

    def parts(self, command: str, where: str | None = None) -> Parts:
        """Where a measurement of these options is kept as it grows: --json's file unless given."""
        from tachyscope.io.results import Parts

        options = {one.name: getattr(self, one.name) for one in options_of(type(self))}
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in options.items()
            if name not in NO_SETTINGS
        }
        resume = bool(options.get("resume"))
        return Parts(self.json if where is None else where, settings, resume, command)

    @property
    def prints(self) -> bool:
        """Whether tables are printed: not where stdout is for the results."""
        return self.json != "-"


def options_of(verb: type[Verb]) -> list[Option]:
    """A verb's options in the order of its fields, `json` last."""
    hints = typing.get_type_hints(verb)
    options = [_option(field, hints[field.name]) for field in dataclasses.fields(verb)]
    return sorted(options, key=lambda one: one.name == "json")


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    choices = typing.get_args(hint)
    many = typing.get_origin(hint) is tuple
    optional = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    if many or optional:
        hint = choices[0]
    positional = field.metadata.get("positional", False)
    return Option(
        field.name, hint, field.default, field.metadata["help"], positional, many, optional
    )


def choices_of(kind: Any) -> tuple[str, ...]:
    """The words that an option of this type takes; none where it takes any."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def read_word(kind: Any, text: str, name: str) -> Any:
    """What a typed word stands for in an option of this type."""
    if kind is int:
        return whole(text, name)
    if kind is float:
        return number(text, name)
    if kind is Path:
        return user_path(text, name)
    if kind is PathText:
        user_path(text, name)
        return os.path.expanduser(text)
    return text
