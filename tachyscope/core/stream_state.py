"""Restores a stream from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tachyscope.core.prefill import Part
from tachyscope.core.prompt_switch import read_recent
from tachyscope.core.source_video import KEPT
from tachyscope.snapshot.format import prompt_of, refuse

if TYPE_CHECKING:
    from tachyscope.core.stream import Stream


def restore(
    stream: Stream, state: Mapping[str, Tensor], segments: Sequence[Mapping[str, Tensor]] | None
) -> None:
    """`Stream.restore`."""
    stream.guard.check_free()
    recent: tuple[int, list[Part]] | None = None
    seek: Callable[[], None] | None = None

    def check(kept: Mapping[str, Tensor]) -> None:
        nonlocal recent, seek
        recent = read_recent(stream.model, stream.session, kept)
        if stream.video is not None:
            seek = stream.video.read(kept, stream.session.device)
        elif any(name.startswith(KEPT) for name in kept):
            refuse("follows a `video`", "open the stream with it")
        stream.guard.interrupted = True  # what comes now changes the session

    interrupted = stream.guard.interrupted

    def work() -> None:
        pending = stream.next_prompt
        # the state may be of a prompt that was set and waits for the next chunk
        if pending is not None and not interrupted and prompt_of(state) == pending.key:
            stream.guard.change(stream.take_up_prompt)
        stream.session.restore(state, segments, check)
        stream.session.meter.take()  # what an interrupted chunk counted
        stream.next_prompt = None
        stream.runner.forget()
        with torch.inference_mode():
            stream.restart()
        if recent is not None:
            stream.index, stream.recent.parts = recent
        if seek is not None:
            seek()
        stream.guard.interrupted = False

    stream.alone(work, interrupted=True)
