"""A verb: a frozen dataclass of its options, which argparse reads, and `run`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NoReturn

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.results import Row, check_writable, document, emit

TRACEBACK = "--traceback"
FAULT, UNEXPECTED, INTERRUPTED, CLOSED_PIPE = 2, 1, 130, 141


def option(default: Any, help: str, positional: bool = False) -> Any:
    """A dataclass field for an option; `...` as default: it must be given."""
    more: dict[str, Any] = {} if default is ... else {"default": default}
    return dataclasses.field(**more, metadata={"help": help, "positional": positional})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verb:
    """Its docstring and its fields' help are what --help prints."""

    def run(self, command: str) -> None:
        """Do what the options say. command: the words that were typed, for the results."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measuring(Verb):
    """A verb with results."""

    json: str | None = option(None, "A file for the results, or - for the last line of stdout.")

    def __post_init__(self) -> None:
        check_writable(self.json)  # before anything is measured

    def emit(self, suite: str, rows: Sequence[Row], command: str, **more: Any) -> None:
        """Write the results where --json says."""
        emit(document(suite, rows, command, **more), self.json)

    def print(self, line: str) -> None:
        """A line for the reader: not where stdout is for the results."""
        if self.json != "-":
            print(line)


def counter(total: int, unit: str) -> Callable[[int], None]:
    """Says on a terminal how many are done, none at first; elsewhere nothing."""

    def say(done: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{done} of {total} {unit}", end=end, file=sys.stderr, flush=True)

    say(0)
    return say


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TachyscopeError(message)


def parser_of(verb: type[Verb], program: str) -> argparse.ArgumentParser:
    """A parser of the verb's fields."""
    parser = _Parser(program, description=verb.__doc__, allow_abbrev=False)
    hints = typing.get_type_hints(verb)
    for field in dataclasses.fields(verb):
        kind, choices = hints[field.name], ()
        if isinstance(kind, types.UnionType):  # `int | None`: None where it is left out
            kind = typing.get_args(kind)[0]
        if typing.get_origin(kind) is Literal:
            kind, choices = str, typing.get_args(kind)
        about = field.metadata["help"].replace("%", "%%")
        flag = f"--{field.name.replace('_', '-')}"
        if field.metadata["positional"]:
            parser.add_argument(field.name, type=reader(field.name, kind), help=about)
        elif kind is bool:
            parser.add_argument(flag, action="store_true", help=about)
        else:
            metavar = "|".join(choices) if choices else kind.__name__.upper()
            parser.add_argument(
                flag, type=reader(flag, kind, choices), default=field.default, help=about,
                metavar=metavar,
            )  # fmt: skip
    return parser


def reader(name: str, kind: type, choices: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """What a typed word stands for; what it cannot be is one line."""

    def read(word: str) -> Any:
        if choices and word not in choices:
            raise TachyscopeError(f"{name} must be one of {', '.join(choices)}, got {word!r}")
        try:
            return kind(word)
        except ValueError:
            what = {int: "an integer", float: "a number"}.get(kind, f"a {kind.__name__}")
            raise TachyscopeError(f"{name} must be {what}, got {word!r}") from None

    return read


def run_command(
    verbs: Mapping[str, type[Verb]], program: str, about: str, argv: Sequence[str] | None = None
) -> int:
    """Run a command line; its exit code, after at most one line on stderr.

    0; 2 after a wrong option, parameter or file; 1 after a fault of ours; 130 after Ctrl-C; 141
    where stdout was closed.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    given = [word for word in words if word != TRACEBACK]
    listed = "\n".join(f"  {name:10}{verb.__doc__}" for name, verb in verbs.items())
    parser = _Parser(
        program, description=about, epilog=f"verbs:\n{listed}\n\n`{program} VERB --help` lists "
        f"options; with {TRACEBACK} a fault also shows its place in the code.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("verb", type=reader("VERB", str, tuple(verbs)), metavar="VERB")
    try:
        verb = verbs[parser.parse_args(given[:1]).verb]
        options = vars(parser_of(verb, f"{program} {given[0]}").parse_args(given[1:]))
        verb(**options).run(shlex.join([program, *words]))
        sys.stdout.flush()
        return 0
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if len(given) < len(words):
            traceback.print_exc()
        return _ended(error, program)


def _ended(error: BaseException, program: str) -> int:
    if isinstance(error, BrokenPipeError):
        with suppress(OSError, ValueError):  # else Python would flush again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    if isinstance(error, KeyboardInterrupt):
        line, code = "interrupted", INTERRUPTED
    elif isinstance(error, TachyscopeError):
        line, code = str(error), FAULT
    elif isinstance(error, OSError):
        reason = (error.strerror or str(error)).lower()
        line, code = f"{error.filename} cannot be used ({reason}): choose another place", FAULT
    else:
        line = f"{type(error).__name__}: {error}: a fault of {program}'s own: run the command again"
        line, code = f"{line} with {TRACEBACK} and report what it shows", UNEXPECTED
    print(f"{program}: {' '.join(line.split())}", file=sys.stderr)
    return code
