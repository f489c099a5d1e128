"""Verbs by argparse: `python -m tachyscope.bench` needs no cyclopts, rich, av or matplotlib."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tachyscope.cli.verb import TRACEBACK, Option, Verb, choices_of, options_of, read_word
from tachyscope.errors import TachyscopeError, as_typed
from tachyscope.process import run_command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TachyscopeError(message)


def run_verb(verb: type[Verb], program: str, argv: Sequence[str] | None = None) -> int:
    """Run one verb; its exit code."""
    return _run(verb, program, list(sys.argv[1:] if argv is None else argv))


def run_one_of(
    verbs: Mapping[str, type[Verb]], program: str, about: str, argv: Sequence[str] | None = None
) -> int:
    """Run the verb that the first word names; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(program, description=about)
    parser.add_argument("suite", choices=list(verbs), help="`SUITE --help` lists its options")
    code = run_command(lambda: parser.parse_args(words[:1]))
    return code or _run(verbs[words[0]], f"{program} {words[0]}", words[1:])


def _run(verb: type[Verb], program: str, words: list[str]) -> int:
    given = [word for word in words if word != TRACEBACK]
    parser = _Parser(program, description=verb.__doc__)
    options = options_of(verb)
    for one in options:
        _add(parser, one)

    def command() -> None:
        values = vars(parser.parse_args(given))
        values |= {one.name: tuple(values[one.name]) for one in options if one.many}
        try:
            verb(**values).run(shlex.join([*program.split(), *words]))
        except TachyscopeError as error:
            raise TachyscopeError(as_typed(str(error), values)) from error

    return run_command(command, show_traceback=len(given) < len(words))


def _add(parser: argparse.ArgumentParser, one: Option) -> None:
    about = one.help.replace("%", "%%")
    if one.type is bool:
        action: Any = argparse.BooleanOptionalAction
        if one.default is False:
            action = "store_true"
        parser.add_argument(one.flag, action=action, default=one.default, help=about)
        return
    more: dict[str, Any] = {"help": about, "choices": choices_of(one.type) or None}
    if not one.positional:
        more |= {"required": one.default is dataclasses.MISSING, "default": one.default}
        more["action"] = "extend" if one.many else "store"
    elif one.default is not dataclasses.MISSING:
        more |= {"nargs": "?", "default": one.default}
    if one.many:
        more |= {"nargs": 1, "default": []}
    name = one.name if one.positional else one.flag
    parser.add_argument(name, type=functools.partial(_read, one.type, name), **more)


def _read(kind: Any, name: str, text: str) -> Any:
    return read_word(kind, text, name)
