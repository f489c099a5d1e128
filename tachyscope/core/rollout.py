"""Rollouts: videos of a given length, by a loop over a stream's chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from tachyscope.core.arguments import (
    check_changes,
    check_model,
    check_whole,
    listed_actions,
    parse_actions,
    parse_plan,
)
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import check
from tachyscope.core.opening import open_request
from tachyscope.core.pictures import parse_firsts
from tachyscope.core.plan import Plan
from tachyscope.core.prefill import Prompt
from tachyscope.core.request import (
    VideoRequest,
    check_noise,
    chunks_for,
    parse_batch,
    parse_noise,
    parse_size,
)
from tachyscope.core.session import Session
from tachyscope.core.source_video import video_key
from tachyscope.core.stream import Stream
from tachyscope.core.types import Chunk
from tachyscope.io.fingerprint import first_key, noise_key
from tachyscope.models.base import VideoModel

if TYPE_CHECKING:
    from tachyscope.core.arguments import Actions
    from tachyscope.core.pictures import Pictures
    from tachyscope.core.request import Noise, PixelSize, Start
    from tachyscope.core.source_video import Video


def runs_beside(device: torch.device) -> bool:
    """Whether launched work runs while the host does something else."""
    return device.type == "cuda"


def rollout(
    model: VideoModel,
    plan: Plan | str | None = None,
    *,
    frames: int,
    prompt: str | Sequence[str] | None = None,
    actions: Actions = "",
    seed: int | Sequence[int] | None = None,
    size: PixelSize | None = None,
    first: Pictures | Sequence[Pictures] | None = None,
    first_actions: Actions = "",
    start: Start | None = None,
    pace: float | None = None,
    then: Sequence[tuple[int, str]] = (),
    noise: Noise | None = None,
    video: Video | None = None,
    strength: float | None = None,
    stream: Stream | None = None,
    overlap_decode: bool | None = None,
) -> Generator[Chunk]:
    """Yield chunks until `frames` new frames are made; the last chunk is cut to fit.

    Arguments are checked and the stream is opened by this call; chunks are made lazily. The
    defaults are plan "dense", prompt "" and seed 0; `size`, `first`, `first_actions`, `start`,
    `pace`, `noise`, `video` and `strength` are as in `open`. `actions` are text ("w*20 a*24"), or a
    list, an array or a tensor with one letter or index per frame.

    `then` are prompt changes (frame, prompt): each applies from the first chunk that begins at or
    after its new frame.

    The same model, plan, prompt, actions, seed, size and first frames make the same video; another
    device or number of threads may change single pixels by one level of 255. With a `stream`, the
    rollout continues it by `frames` more; another plan, prompt, seed, size, first, pace or noise
    than the stream's is refused, and so is a second rollout at the same time. On a GPU,
    `overlap_decode` launches the next chunk before it decodes the last, on a second CUDA stream.
    The stream is then one chunk ahead of what was yielded, so the default is to do this only
    without a given stream.
    """
    check_model(model)
    frames, moves = check_whole("frames", frames), parse_actions(actions, model.actions, frames)
    wanted = check_changes(then)
    if not isinstance(overlap_decode, bool | None):
        raise TachyscopeError(f"overlap_decode must be True, False or None, got {overlap_decode!r}")
    overlap_decode = stream is None if overlap_decode is None else overlap_decode
    overlap_decode = overlap_decode and model.overlaps_decode and runs_beside(model.device)
    given: dict[str, Any] = {
        "prompt": prompt, "seed": seed, "size": size, "first": first,
        "first_actions": first_actions, "start": start, "pace": pace, "noise": noise,
        "video": video, "strength": strength,
    }  # fmt: skip
    asked = {name: value for name, value in given.items() if value is not None}
    if stream is None:
        request = VideoRequest(frames=frames, **asked)
        stream = open_request(model, "dense" if plan is None else plan, request)
    else:
        _check_stream(model, stream, plan, asked)
        session = stream.session
        needed = chunks_for(model, session.shape.chunk, session.memory.latent_frame, frames)
        check_noise(session.memory.noise, session.memory.made + needed * session.shape.chunk)
    changes = [
        (at, stream.read_prompt(text))
        for at, text in change_frames(model, stream.session, wanted, frames)
    ]
    chunks = _chunks(stream, frames, moves, changes, overlap_decode)
    stream.guard.rollout = ref(chunks)
    return chunks


def _chunks(
    stream: Stream,
    frames: int,
    moves: Sequence[int],
    changes: list[tuple[int, Prompt]],
    overlap_decode: bool,
) -> Generator[Chunk]:
    done, count, coming = 0, 0, None

    def work() -> Chunk:
        nonlocal done, count, coming
        if coming is None:
            stream.need_source()
        stream.guard.interrupted = True
        if changes and changes[0][0] == done:
            stream.next_prompt = changes.pop(0)[1]
        made = stream.make(moves[done:]) if coming is None else coming
        count = min(frames - done, made.frames)
        done += count
        # the chunk before a prompt change is decoded before the change
        changing = bool(changes) and changes[0][0] == done
        coming = None
        if overlap_decode and done < frames and not changing:
            coming = stream.make(moves[done:])
        chunk = stream.pictures(made, beside=overlap_decode)
        # only this loop can continue a stream with a chunk that is not decoded yet
        stream.guard.interrupted = coming is not None
        return chunk

    while done < frames:
        chunk = stream.alone(work, interrupted=coming is not None)
        counted = {"frames": float(count * (stream.batch or 1))}
        shown = chunk.frames[..., :count, :, :, :]
        yield replace(chunk, frames=shown, stats=chunk.stats | counted)


def _check_stream(
    model: VideoModel, stream: Stream, plan: Plan | str | None, asked: Mapping[str, Any]
) -> None:
    """Raise if a stream is busy, or has other options than those `asked`."""
    if not isinstance(stream, Stream):
        raise TachyscopeError(
            f"stream must be a Stream, got a {type(stream).__name__}: use tachyscope.open"
        )
    stream.guard.check()
    stream.guard.check_free()
    session = stream.session
    source, followed = session.memory.source, stream.video
    same: dict[str, Callable[[Any], bool]] = {
        "prompt": lambda x: Prompt.key_of(model, stream.parse_prompt(x)) == source.prompt,
        "seed": lambda x: tuple(parse_batch("", x)[1]) == session.memory.seeds,
        "size": lambda x: model.shape(parse_size(x)).grid == session.shape.grid,
        "first": lambda x: first_key(*parse_firsts(x, stream.batch)) == source.first,
        "first_actions": lambda x: not (x if isinstance(x, str) else listed_actions(x)),
        "start": lambda x: False,
        "pace": lambda x: math.isclose(check("pace", x), stream.pace or 0, rel_tol=1e-6),
        "noise": lambda x: noise_key(parse_noise(x, model, session.shape)) == source.noise,
        "video": lambda x: followed is not None and followed.key == video_key(x) != "",
        "strength": lambda x: followed is not None and followed.strength == x,
    }
    kind = session.device, session.dtype
    other = []
    if source.weights not in ("", model.fingerprint) or kind != (model.device, model.dtype):
        other.append("model")
    if plan is not None and parse_plan(model, plan) != session.plan:
        other.append("plan")
    other += [name for name, value in asked.items() if not same[name](value)]
    if other:
        raise TachyscopeError(
            f"a rollout continues a stream with its own options, and this one has another "
            f"{' and '.join(other)}: leave that out, or open a stream with it"
        )


def change_frames(
    model: VideoModel, session: Session, then: Sequence[tuple[int, str]], frames: int
) -> list[tuple[int, str]]:
    """Prompt changes in order, each moved to the first frame of the next chunk."""
    chunk, start = session.shape.chunk, session.memory.latent_frame

    def begins(chunks: int) -> int:
        return model.pixel_frames(start + chunks * chunk) - model.pixel_frames(start)

    last = begins(chunks_for(model, chunk, start, frames) - 1)
    prompts: dict[int, str] = {}
    for frame, prompt in sorted(then):
        if not 0 < frame <= last:
            allowed = f"from frame 1 to {last} of {frames}" if last else "of which there is one"
            raise TachyscopeError(
                f"a prompt changes where a chunk begins, {allowed}, got frame {frame}: choose "
                f"another, or raise `frames`"
            )
        at = begins(chunks_for(model, chunk, start, frame))
        if at in prompts:
            raise TachyscopeError(
                f"two prompts begin with the chunk at frame {at}, {prompts[at]!r} and {prompt!r}: "
                f"leave one out, or set them further apart"
            )
        prompts[at] = prompt
    return list(prompts.items())
