"""Options as they are typed: numbers and paths that are what they say, and faults in our words."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import cyclopts
from cyclopts import Parameter, Token

from tachyscope.bounds import number, whole
from tachyscope.errors import shown
from tachyscope.files import user_path


def _read_whole(kind: Any, tokens: Sequence[Token]) -> int:
    return whole(tokens[0].value, _name(tokens[0]))


def _read_number(kind: Any, tokens: Sequence[Token]) -> float:
    return number(tokens[0].value, _name(tokens[0]))


def _read_path(kind: Any, tokens: Sequence[Token]) -> Path:
    return user_path(tokens[0].value, _name(tokens[0]))


def _read_path_text(kind: Any, tokens: Sequence[Token]) -> str:
    _read_path(kind, tokens)
    return os.path.expanduser(tokens[0].value)  # Path would take a slash out of http://


def _name(token: Token) -> str:
    return token.keyword or "it"


# cyclopts alone would take 1.5 and 0x10 for whole numbers, and "" for this folder
Whole = Annotated[int, Parameter(converter=_read_whole)]
PathOption = Annotated[Path, Parameter(converter=_read_path)]
OptionalWhole = Annotated[int | None, Parameter(converter=_read_whole)]
OptionalNumber = Annotated[float | None, Parameter(converter=_read_number)]
OptionalPathText = Annotated[str | None, Parameter(converter=_read_path_text)]


def worded(error: cyclopts.CycloptsError) -> str:
    """What is wrong with a command line, in the words that our own errors use."""
    verb = " ".join(["tachyscope", *(error.command_chain or ())])
    unused = error.unused_tokens or []
    if isinstance(error, cyclopts.UnknownCommandError):
        verbs = [name for name in error.app or () if not name.startswith("-")]
        return f"{verb} has no verb {shown(unused[0])}; there are: {', '.join(verbs)}"
    if isinstance(error, cyclopts.UnknownOptionError):
        given = (error.token.keyword or error.token.value).split("=")[0]
        known = [name for one in error.argument_collection for name in one.names]
        near = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}" if near else f"{verb} --help lists them"
        return f"{verb} has no option {shown(given)[1:-1]}: {hint}"
    if isinstance(error, cyclopts.MissingArgumentError) and error.argument is not None:
        return f"{verb} needs a value for {error.argument.name}, got none: {verb} --help tells more"
    if isinstance(error, cyclopts.RepeatArgumentError):
        return f"{error.token.keyword} is given twice: leave one out"
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return (
            f"{verb} takes no {shown(unused[0])} there: leave it out, or put what has spaces in "
            f"quotes"
        )
    if isinstance(error, cyclopts.CoercionError) and error.token is not None:
        return _refused(error, verb)
    # whatever else there is has one sentence for people
    return f"{str(error).splitlines()[-1]} {verb} --help tells more"


def _refused(error: cyclopts.CoercionError, verb: str) -> str:
    token = error.token
    assert token is not None
    argument = error.argument.name.lstrip("-").upper() if error.argument is not None else "it"
    name = token.keyword or argument
    if choices := [choice for choice in get_args(error.target_type) if isinstance(choice, str)]:
        return f"no {name} {shown(token.value)}; there are: {', '.join(choices)}"
    return f"{name} cannot be {shown(token.value)}: {verb} --help tells what it takes"


def option_names(verb: Any) -> set[str]:
    """The parameters that a verb takes as options, those of its dataclasses too."""
    found: set[str] = set()
    for name, parameter in inspect.signature(verb).parameters.items():
        fields = getattr(parameter.default, "__dataclass_fields__", {})
        found |= set(fields) or {name}
    return found
