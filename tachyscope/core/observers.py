"""Watch a session: what an observer is told, and when."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import PassContext


class Observer:
    """Told of a session's calls, on every device; here every method does nothing.

    It must leave the session's tensors as they are, and copy what it keeps: their memory is used
    again. One observer watches one session.
    """

    host: bool = True  # the host reads what it is told, so that no CUDA graph is recorded
    times: bool = False  # the meter's row gets a span of time for every part of a chunk

    def on_open(self, session: Any) -> None:
        """The session begins anew: it was opened, reset or restored."""

    def on_pass(self, ctx: PassContext) -> None:
        """A pass starts."""

    def on_write(self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor) -> None:
        """q [B, H, S, D] and k, v [B, Hkv, S, D], unrotated, are about to enter the cache."""

    def on_attend(
        self, ctx: PassContext, q: Tensor, k: Tensor, v: Tensor, rotated_q: Tensor, out: Tensor
    ) -> None:
        """They have entered, and attention has the output `out` [B, H, S, D]."""

    def on_cross(self, ctx: PassContext, q: Tensor) -> None:
        """Attention over the prompt is done."""

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        """An MLP of input x has output y [B, S, W], computed or replayed."""

    def on_merge(self, ctx: PassContext, source: Tensor, root: Tensor) -> None:
        """Slots `source` joined slots `root` [B, Hkv or 1, e], as they stood before the commit."""

    def on_commit(self, ctx: PassContext, n: int) -> None:
        """The first n tokens of now are final; nothing has moved yet."""

    def on_committed(self) -> None:
        """They are past, within budget."""


def parse_observers(given: Any) -> tuple[Observer, ...]:
    """Observers as they were handed in: one, or several."""
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
    commit  bringing the past within budget
    index   ordering it, for attention policies that do
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
