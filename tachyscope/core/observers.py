"""Observers: callbacks for every event of a session."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import PassContext


class Observer:
    """Callbacks for a session's events; a subclass overrides those that it needs.

    An observer must not change the session's tensors, and must copy what it keeps, since their
    memory is reused. Each session needs an observer of its own.
    """

    host: bool = True  # whether it reads tensors on the host: then no CUDA graph is recorded
    times: bool = False  # whether the meter's row gets a time for every part of a chunk

    def on_open(self, session: Any) -> None:
        """The session was opened, reset or restored."""

    def on_pass(self, ctx: PassContext) -> None:
        """A pass starts."""

    def on_write(self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor) -> None:
        """q [B, H, S, D] and k, v [B, Hkv, S, D], unrotated, are about to enter the cache."""

    def on_attend(
        self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor, rotated_q: Tensor, out: Tensor
    ) -> None:
        """They were written, and attention returned `out` [B, H, S, D]."""

    def on_cross(self, ctx: PassContext, q: Tensor) -> None:
        """Attention over the prompt is done."""

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        """An MLP with input x returned y [B, S, W], computed or replayed."""

    def on_merge(self, ctx: PassContext, source: Tensor, root: Tensor) -> None:
        """Slots `source` were merged into slots `root` [B, Hkv or 1, e], numbered as before."""

    def on_commit(self, ctx: PassContext, n: int) -> None:
        """The first n tokens of now are final; nothing has moved yet."""

    def on_committed(self) -> None:
        """They are part of the past, which is within budget."""


def parse_observers(given: Any) -> tuple[Observer, ...]:
    """The observers of an argument: one observer, or a list of them."""
    several = given if isinstance(given, list | tuple) else [given]
    for one in several:
        if not isinstance(one, Observer):
            raise TachyscopeError(
                f"an observer must be an Observer, got a {type(one).__name__}: derive a class from "
                f"tachyscope.Observer, and hand in one or a list of them"
            )
    return tuple(several)


class Timing(Observer):
    """Times a session's calls: the meter's row gets the spans, and the number of queries.

    attend  rotation, writing into the cache, attention; of it read_0, read_1, …: attention itself,
            by pass
    cross   attention over the prompt
    mlp     MLPs, as far as they are computed
    commit  bringing the past within its budget
    index   ordering the past, for attention policies that need it
    """

    times = True

    def __init__(self, host: bool = True) -> None:
        self.host = host

    def on_open(self, session: Any) -> None:
        self.work = session.work

    def on_attend(
        self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor, rotated_q: Tensor, out: Tensor
    ) -> None:
        self.work.queries += q.shape[:3].numel()
