"""Videos of a given length: a loop over a stream's steps."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import ref

import torch

from tachyscope.arguments import (
    check_changes,
    check_model,
    check_noise,
    check_whole,
    parse_actions,
    parse_noise,
    parse_plan,
    parse_size,
)
from tachyscope.batch import parse_batch, parse_firsts
from tachyscope.errors import TachyscopeError
from tachyscope.fingerprint import first_key, noise_key
from tachyscope.models.base import VideoModel
from tachyscope.plan import Plan
from tachyscope.prefill import Prompt
from tachyscope.session import Session
from tachyscope.stream import Stream, chunks_for
from tachyscope.stream import open as open_stream
from tachyscope.types import Chunk

if TYPE_CHECKING:
    from tachyscope.arguments import Actions, Noise, Pictures, PixelSize, Start


def runs_beside(device: torch.device) -> bool:
    """Whether work that is asked for goes on while the host does something else."""
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
    stream: Stream | None = None,
    overlap_decode: bool | None = None,
) -> Generator[Chunk]:
    """Yield chunks until `frames` new frames are made; the last is cut to fit.

    All is checked and the stream opened when this is called; chunks are made as they are asked
    for. Without a stream, plan is "dense", prompt "" and seed 0 unless given; `size`, `first`,
    `first_actions`, `start`, `pace` and `noise` are as `open` takes them. `actions` are text
    ("w*20 a*24"), or one letter or index a frame in a list, an array or a tensor.

    `then` are changes of prompt, each with the new frame from which on it is meant: there, or where
    the next chunk begins, the stream's prompt is set.

    Same model, plan, prompt, actions, seed, size and first frames: same frames; another device or
    number of threads may change a level of 255 here and there. A `stream` is gone on with, for
    `frames` more, by one rollout at a time; another plan, prompt, seed, size, first, pace or noise
    than its own is refused. On a GPU, `overlap_decode` launches the next chunk before it decodes
    the last, on a second CUDA stream: until the end a stream is then a chunk further than what was
    yielded, so unless asked for it is done only without one.
    """
    check_model(model)
    frames, moves = check_whole("frames", frames), parse_actions(actions, model.actions, frames)
    wanted = check_changes(then)
    if not isinstance(overlap_decode, bool | None):
        raise TachyscopeError(f"overlap_decode must be True, False or None, got {overlap_decode!r}")
    overlap_decode = stream is None if overlap_decode is None else overlap_decode
    overlap_decode = overlap_decode and model.overlaps_decode and runs_beside(model.device)
    if stream is None:
        stream = open_stream(
            model, "dense" if plan is None else plan, frames=frames, size=size, first=first,
            prompt="" if prompt is None else prompt, seed=0 if seed is None else seed,
            first_actions=first_actions, start=start, pace=pace, noise=noise,
        )  # fmt: skip
    else:
        _check_stream(model, stream, plan, prompt, seed, size, first, start, pace, noise)
        session = stream.session
        needed = chunks_for(model, session.shape.chunk, session.latent_frame, frames)
        check_noise(session.noise, session.made + needed * session.shape.chunk)
    changes = [
        (at, stream.read_prompt(text))
        for at, text in change_frames(model, stream.session, wanted, frames)
    ]
    chunks = _chunks(stream, frames, moves, changes, overlap_decode)
    stream.rollout = ref(chunks)
    return chunks


def _chunks(
    stream: Stream,
    frames: int,
    moves: Sequence[int],
    changes: list[tuple[int, Prompt]],
    overlap_decode: bool,
) -> Generator[Chunk]:
    done, coming = 0, None
    while done < frames:
        if changes and changes[0][0] == done:
            stream.next_prompt = changes.pop(0)[1]
        made = stream.generate(moves[done:]) if coming is None else coming
        count = min(frames - done, made.frames)
        done += count
        # a change is made between what is decoded before and after it
        changing = bool(changes) and changes[0][0] == done
        coming = None
        if overlap_decode and done < frames and not changing:
            coming = stream.generate(moves[done:])
        chunk = stream.decode(made, beside=overlap_decode)
        counted = {"frames": float(count * (stream.batch or 1))}
        shown = chunk.frames[..., :count, :, :, :]
        yield replace(chunk, frames=shown, stats=chunk.stats | counted)


def _check_stream(
    model: VideoModel,
    stream: Stream,
    plan: Plan | str | None,
    prompt: str | Sequence[str] | None,
    seed: int | Sequence[int] | None,
    size: PixelSize | None,
    first: Pictures | Sequence[Pictures] | None,
    start: Start | None,
    pace: float | None,
    noise: Noise | None,
) -> None:
    """Raise where a stream cannot be gone on with, or is asked for what it is not."""
    if not isinstance(stream, Stream):
        raise TachyscopeError(
            f"stream must be a Stream, got a {type(stream).__name__}: use tachyscope.open"
        )
    stream.check_free()
    session = stream.session
    source = session.source
    other = [
        name
        for name, differs in {
            "model": source.weights not in ("", model.fingerprint)
            or (session.device, session.dtype) != (model.device, model.dtype),
            "plan": plan is not None and parse_plan(model, plan) != session.plan,
            "prompt": prompt is not None
            and Prompt.key_of(model, stream.parse_prompt(prompt)) != source.prompt,
            "seed": seed is not None and tuple(parse_batch("", seed)[1]) != session.seeds,
            "size": size is not None and model.shape(parse_size(size)).grid != session.shape.grid,
            "first": first is not None
            and first_key(*parse_firsts(first, stream.batch)) != source.first,
            "start": start is not None,
            "pace": pace is not None and not math.isclose(pace, stream.pace or 0, rel_tol=1e-6),
            "noise": noise is not None
            and noise_key(parse_noise(noise, model, session.shape)) != source.noise,
        }.items()
        if differs
    ]
    if other:
        raise TachyscopeError(
            f"a stream is gone on with as it is, and this one has another {' and '.join(other)}: "
            f"leave that out, or open one with it"
        )


def change_frames(
    model: VideoModel, session: Session, then: Sequence[tuple[int, str]], frames: int
) -> list[tuple[int, str]]:
    """Changes of prompt in order, each moved to the new frame at which the next chunk begins."""
    chunk, start = session.shape.chunk, session.latent_frame

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
