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
# options that do not change what is measured; each row of rivals records its own `paces`
NO_SETTINGS = ("json", "out", "rows", "paces", "resume", "plot", "jobs", "seconds", "quiet")
RESUME = "Continue the results file: rows it has for the same options are not measured again."


class Option(NamedTuple):
    """One option of a verb, for the parser and the reference."""

    name: str
    type: Any  # bool, int, float, str, Path, PathText or a Literal
    default: Any  # dataclasses.MISSING: it must be given
    help: str
    positional: bool
    many: bool  # may be given several times
    optional: bool  # None if left out

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
    """A verb; --help shows its docstring and its fields' help."""

    by_ranks: ClassVar[bool] = False  # whether torchrun may start several processes of it

    def run(self, command: str) -> None:
        """Run the verb. command: the words that were typed, for the results."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ResultsVerb(Verb):
    """A verb that can write its results as JSON to a file or to stdout."""

    json: str | None = option(
        None, "A file for the results as JSON, or - for the last line of stdout."
    )

    def check_json(self) -> None:
        """Raise if the results could not be written, before anything is measured."""
        from tachyscope.io.results import check_json

        check_json(self.json)

    def emit(self, results: Document) -> None:
        """Write the results to --json."""
        from tachyscope.io.results import emit

        emit(results, self.json)

    def parts(self, command: str, where: str | None = None) -> Parts:
        """The file that keeps partial results of these options: that of --json, or `where`."""
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
        """Whether tables are printed: not if stdout is for the results."""
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
    """The words that an option of a Literal type takes; () for other types."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def read_word(kind: Any, text: str, name: str) -> Any:
    """The value of a typed word, for an option of this type."""
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
