"""Errors of cyclopts in the wording of our own."""

from __future__ import annotations

import difflib
from typing import get_args

import cyclopts

from tachyscope.core.errors import shown


def worded(error: cyclopts.CycloptsError, program: str = "tachyscope") -> str:
    """One line for an error of a program's command line."""
    verb = " ".join([program, *(error.command_chain or ())])
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
        return f"{verb} needs a value for {error.argument.name}, got none: {verb} --help shows more"
    if isinstance(error, cyclopts.RepeatArgumentError):
        return f"{error.token.keyword} is given twice: leave one out"
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return (
            f"{verb} takes no {shown(unused[0])} there: leave it out, or put what has spaces in "
            f"quotes"
        )
    if isinstance(error, cyclopts.CoercionError) and error.token is not None:
        return _refused(error, verb)
    # other errors end in a sentence
    return f"{str(error).splitlines()[-1]} {verb} --help shows more"


def _refused(error: cyclopts.CoercionError, verb: str) -> str:
    token = error.token
    assert token is not None
    argument = error.argument.name.lstrip("-").upper() if error.argument is not None else "it"
    name = token.keyword or argument
    if choices := [choice for choice in get_args(error.target_type) if isinstance(choice, str)]:
        return f"no {name} {shown(token.value)}; there are: {', '.join(choices)}"
    return f"{name} cannot be {shown(token.value)}: {verb} --help shows what it takes"
