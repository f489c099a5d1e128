"""Bounds of every number that a user or a file can give.

They are checked before memory is allocated or a loop begins. Each is far beyond published and
tested values, and low enough that everything within it finishes, or is refused for lack of memory.
"""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from tachyscope.core.errors import TachyscopeError, shown

N = TypeVar("N", int, float)


class Bound(NamedTuple):
    """From `low` to `high`, inclusive; for whole numbers if `low` is an int."""

    low: float
    high: float

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int)

    def __str__(self) -> str:
        if self.low == TINY:
            return f"over 0 and at most {_spelled(self.high)}"
        return f"from {_spelled(self.low)} to {_spelled(self.high)}"

    def rule(self, value: object) -> str:
        """What a value must be, and what it is."""
        return f"must be {self.words(value)}, got {shown(value)}"

    def words(self, value: object) -> str:
        """What a value must be; names the kind of number if the value is not of that kind."""
        if isinstance(value, self.kind) and not isinstance(value, bool):
            return str(self)
        return f"a whole number {self}" if self.whole else f"a number {self}"

    @property
    def kind(self) -> type:
        return Integral if self.whole else Real


TINY = 1e-12  # what "over 0" means
SHARE = Bound(0.0, 1.0)
PART = Bound(TINY, 1.0)  # a share over 0
ENTRIES = Bound(1, 100_000_000)
LATENTS = Bound(0, 1_000_000)  # latent frames
WHOLE, REAL = Bound(-(10**30), 10**30), Bound(-1e300, 1e300)  # without a bound of their own

# options of commands and functions
ASKED = {
    "frames": Bound(1, 1_000_000),
    "seed": Bound(0, 2**63 - 1),
    "world": Bound(0, 1_294_967_295),
    "worlds": Bound(1, 10_000),
    "clips": Bound(1, 1_000),
    "given": Bound(1, 2_000),
    "pace": Bound(1 / 30, 1.0),  # of a step
    "strength": PART,  # of noise
    "rounds": Bound(1, 1_000),
    "runs": Bound(1, 100),
    "at": Bound(1, 10_000),
    "lengths": Bound(1, 10_000),
    "rollout": Bound(1, 1_000_000),
    "memory_gb": Bound(TINY, 1e6),
    "lora_alpha": Bound(TINY, 1e6),
    "queries": Bound(1, 4_096),
    "places": Bound(2, 65_536),
    "decoder_bands": Bound(1, 64),
    "height": Bound(1, 16_384),
    "width": Bound(1, 16_384),
    # not options themselves
    "prompt characters": Bound(0, 100_000),
    "prompt tokens": Bound(0, 2_048),  # that a token model's cache holds
    "tokens of a pass": Bound(1, 1_000_000),
    "plans": Bound(1, 100),  # or lengths
    "fps": Bound(0.001, 1_000.0),
    "port": Bound(0, 65_535),
    "clients": Bound(1, 10_000),
    "minutes": Bound(TINY, 10_000.0),
    "scale": Bound(1, 64),
    "speed": Bound(0.01, 10_000.0),
}

# of any JSON file
JSON_BYTES = 64 * 2**20


def check(name: str, value: N, what: str = "", advice: str = "") -> N:
    """The value, checked against ASKED[name].

    An error calls the value `what` instead of its name if given, and ends with `advice`.
    """
    bound = ASKED[name]
    if not within(bound, value):
        then = f": {advice}" if advice else ""
        raise TachyscopeError(f"{what or f'`{name}`'} {bound.rule(value)}{then}")
    return value


def within(bound: Bound, value: object) -> bool:
    """Whether a value is a number of the bound's kind, and inside it."""
    # Python counts True as a number; NaN is within no bound
    return (
        isinstance(value, bound.kind)
        and not isinstance(value, bool)
        and bool(bound.low <= value <= bound.high)  # type: ignore[operator]
    )


def fault(kind: Any, bound: Bound | None, value: object) -> str | None:
    """What a value of type `kind` must be, in words; None if the value is right."""
    if get_origin(kind) is Literal:
        words = get_args(kind)
        return None if value in words else f"one of {', '.join(words)}"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if kind is str:
        right = isinstance(value, str) and (bound is None or within(bound, len(value)))
        most = "" if bound is None else f" of at most {bound.high:,} letters"
        return None if right else f"text{most}"
    bound = bound or (WHOLE if kind is int else REAL)
    if within(bound, value):
        return None
    if bound in (WHOLE, REAL):
        return "a whole number" if bound.whole else "a number"
    return bound.words(value)


def check_prompt(prompt: str) -> str:
    """The prompt, checked to be encodable and not too long."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise TachyscopeError(
            f"a prompt must be valid UTF-8, got {shown(prompt)}: type it again"
        ) from None
    check("prompt characters", len(prompt), "a prompt's length")
    return prompt


def whole(text: str, what: str) -> int:
    """The whole number of a text, which must be decimal digits with an optional sign."""
    if not re.fullmatch(r"[+-]?[0-9]{1,100}", text):
        raise TachyscopeError(f"{what} must be a whole number, got {shown(text)}: give its digits")
    return int(text)


def number(text: str, what: str) -> float:
    """The finite number of a text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TachyscopeError(f"{what} must be a number, got {shown(text)}: give its digits")
    return value


def _spelled(edge: float) -> str:
    if edge == 2**63 - 1:
        return "2**63 - 1"
    return f"{int(edge):,}" if float(edge).is_integer() else f"{edge:g}"
