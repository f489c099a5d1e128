"""The command `tachyscope`: verbs are parsed by cyclopts, errors are one line on stderr."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter, Token

from tachyscope import __version__
from tachyscope.cli.bench import Bench
from tachyscope.cli.compare import Compare
from tachyscope.cli.doctor import Doctor
from tachyscope.cli.faults import worded
from tachyscope.cli.fit import Fit
from tachyscope.cli.generate import Generate
from tachyscope.cli.inspect import Inspect
from tachyscope.cli.list import List
from tachyscope.cli.ranks import check_alone
from tachyscope.cli.serve import Play, Serve
from tachyscope.cli.verb import TRACEBACK, Option, Verb, choices_of, options_of, read_word
from tachyscope.core.errors import TachyscopeError, TachyscopeWarning, as_typed
from tachyscope.io.process import run_command

VERBS: dict[str, type[Verb]] = {
    "generate": Generate,
    "compare": Compare,
    "play": Play,
    "serve": Serve,
    "inspect": Inspect,
    "bench": Bench,
    "fit": Fit,
    "list": List,
    "doctor": Doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code of `run_command`."""
    return run_app(app, "tachyscope", argv)


def run_app(app: App, program: str, argv: Sequence[str] | None = None) -> int:
    """Run a command line of a program's verbs; returns the exit code of `run_command`."""
    words = list(sys.argv[1:] if argv is None else argv)
    given = [word for word in words if word != TRACEBACK]
    return run_command(lambda: _run(app, program, given), show_traceback=len(given) < len(words))


def make_app(name: str, about: str, version: str, verbs: Mapping[str, type[Verb]]) -> App:
    """A program of verbs; 'bench wan' is the verb `wan` of the group `bench`."""
    app = App(
        name,
        help=about,
        version=version,
        help_format="plaintext",  # else the stars of 'w*20 a*24' are taken for emphasis
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    groups: dict[str, App] = {"": app}
    for words, verb in verbs.items():
        group, _, own = words.rpartition(" ")
        if group not in groups:
            groups[group] = App(group)
            app.command(groups[group])
        groups[group].command(as_function(verb), name=own)
    return app


def _run(app: App, program: str, words: Sequence[str]) -> None:
    try:
        verb, given, unparsed = app.parse_args(words)
    except CycloptsError as error:
        raise TachyscopeError(worded(error, program)) from error
    # a verb's `command` is not parsed: it is the words that were typed
    more = dict.fromkeys(unparsed, shlex.join([program, *words]))
    try:
        with _printing_warnings():
            verb(*given.args, **given.kwargs, **more)
    except TachyscopeError as error:
        raise TachyscopeError(as_typed(str(error), inspect.signature(verb).parameters)) from error


def as_function(verb: type[Verb]) -> Callable[..., None]:
    """A function with the verb's options as its parameters, for cyclopts to read."""

    def run(*args: Any, command: str = "", **options: Any) -> None:
        if not verb.by_ranks:
            check_alone(verb.__name__.lower())
        verb(**dict(zip(positional, args, strict=False)), **options).run(command)

    options = options_of(verb)
    positional = [one.name for one in options if one.positional]
    parameters = sorted((_parameter(one) for one in options), key=lambda one: one.kind)
    unread = Annotated[str, Parameter(parse=False)]
    parameters.append(
        inspect.Parameter("command", inspect.Parameter.KEYWORD_ONLY, default="", annotation=unread)
    )
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__doc__ = verb.__doc__
    return run


def _parameter(one: Option) -> inspect.Parameter:
    kind: Any = one.type
    if one.many:
        kind = tuple[one.type, ...]  # type: ignore[name-defined]
    elif one.optional:
        kind = one.type | None
    more: dict[str, Any] = {"help": one.help}
    if one.type is bool:
        # a flag that is off by default needs no --no-…
        more["negative"] = () if one.default is False else None
    elif one.many:
        more["negative"] = ()  # no --empty-prompt
    elif not choices_of(one.type):

        def read(kind: Any, tokens: Sequence[Token]) -> Any:
            return read_word(one.type, tokens[0].value, tokens[0].keyword or "it")

        more["converter"] = read
    if one.name == "json":
        more["allow_leading_hyphen"] = True  # a lone "-" would be taken for an option
    missing = one.default is dataclasses.MISSING
    return inspect.Parameter(
        one.name,
        inspect.Parameter.POSITIONAL_ONLY if one.positional else inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if missing else one.default,
        annotation=Annotated[kind, Parameter(**more)],
    )


@contextmanager
def _printing_warnings() -> Iterator[None]:
    """Print each of our own warnings once, as a line on stderr."""
    with warnings.catch_warnings():
        # Python's own "once" is reset by every change of filters
        warnings.simplefilter("always", TachyscopeWarning)
        others, printed = warnings.showwarning, set[str]()

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if not issubclass(category, TachyscopeWarning):
                others(message, category, *rest, **more)
            elif str(message) not in printed:
                printed.add(str(message))
                print(f"tachyscope: note: {message}", file=sys.stderr)

        warnings.showwarning = show
        yield


app = make_app(
    "tachyscope",
    "Fast autoregressive video generation without retraining, and what the speed cost. "
    f"With {TRACEBACK}, any verb also shows where in the code an error was raised.",
    __version__,
    VERBS,
)
