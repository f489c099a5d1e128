"""The loop: chunks of video, each yielded when it is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tachyscope.adapters import Adapter
from tachyscope.errors import TachyscopeError
from tachyscope.making import repeating
from tachyscope.plan import Plan
from tachyscope.session import Session
from tachyscope.types import Chunk

S = TypeVar("S", bound=Session)


def open_session(
    model: Adapter,
    plan: Plan | str = "dense",
    *,
    prompt: str = "",
    frames: int | None = None,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    first: np.ndarray | None = None,
    first_actions: str = "",
    make: Callable[..., S] = Session,  # type: ignore[assignment]
) -> S:
    """A session that has read the prompt and stands before its first new chunk.

    `first` are given frames, uint8 [F, H, W, 3], that the video goes on from, and
    `first_actions` the actions that led to each of them. `make` is called for the session: a
    class that also looks on.
    """
    with torch.inference_mode():
        encoded = model.encode(prompt)
        given = None if first is None else model.latents(first)
        known = 0 if given is None else given.shape[model.frame_dim]
        shape = model.shape(size)
        coming = None
        if frames is not None:
            coming = known + _chunks(model, shape.chunk, known, frames) * shape.chunk
        session = make(
            shape,
            parse_plan(model, plan),
            model.rope(shape),
            frames=coming,
            lengths=encoded.lengths,
            seed=seed,
            device=model.device,
            dtype=model.dtype,
        )
        model.start(session, encoded)
        if given is not None:
            _remember(model, session, given, first_actions)
        session.meter.take()
    return session


def runs_beside(device: torch.device) -> bool:
    """Whether work that is asked for goes on while the host does something else."""
    return device.type == "cuda"


def parse_plan(model: Adapter, plan: Plan | str) -> Plan:
    """A plan as the model means it."""
    return plan if isinstance(plan, Plan) else Plan.parse(plan, model.kind, model.stock)


# a decorator, not a with-block: in a generator a with-block would leave the caller in
# inference mode at every yield
@torch.inference_mode()
def rollout(
    model: Adapter,
    plan: Plan | str = "dense",
    *,
    frames: int,
    prompt: str = "",
    actions: str = "",
    seed: int = 0,
    size: tuple[int, int] | None = None,
    first: np.ndarray | None = None,
    first_actions: str = "",
    session: Session | None = None,
) -> Generator[Chunk]:
    """Yield chunks until `frames` new frames are made; the last is cut to fit.

    Same model, plan, prompt, actions, seed, size and first frames: same frames. A `session` is
    gone on with, for `frames` more; all but the actions are then its own. On a GPU a rollout
    without one begins the next chunk before it decodes the last, on a second stream.
    """
    if frames < 1:
        raise TachyscopeError(f"frames must be 1 or more, got {frames}")
    # a session that others hold must not be a chunk further than what they were given
    ahead = session is None and not model.looks and runs_beside(model.device)
    if session is None:
        session = open_session(
            model, plan, prompt=prompt, frames=frames, seed=seed, size=size, first=first,
            first_actions=first_actions,
        )  # fmt: skip
    shape = session.shape
    done = model.frames(session.frame)
    moves = parse_actions(actions, model.actions, frames)
    left = frames
    beside = torch.cuda.Stream(model.device) if model.device.type == "cuda" and ahead else None

    maker = repeating(model, session)

    def make(session: Session) -> Tensor:
        with session.meter.span("chunk"):
            return maker(_moves_of(session, model, moves, done, shape.chunk))

    count = _chunks(model, shape.chunk, session.frame, frames)
    coming: Tensor | None = None
    for i in range(count):
        latents = make(session) if coming is None else coming
        made = min(left, model.frames(session.frame) - done - (frames - left))
        session.meter.add("frames", made)
        session.meter.add("cache_mb", session.cache_bytes() / 1e6)
        session.meter.add("entries", session.past)
        index = session.chunk - 1
        # waits for the chunk, so that decoding it need not
        stats = session.meter.take()
        coming = make(session) if ahead and i + 1 < count else None
        with torch.cuda.stream(beside):
            pixels = model.decode(session, latents)[:left]
        left -= made
        yield Chunk(index, pixels, stats)


@torch.inference_mode()
def refill(
    model: Adapter, session: Session, latents: Tensor, prompt: str, actions: str = ""
) -> None:
    """Forget, then remember given latents chunk by chunk: a first frame, a prompt switch.

    latents are as `sample` returns them, along their frame dimension a whole number of chunks.
    """
    encoded = model.encode(prompt)
    session.lengths = tuple(encoded.lengths)
    session.reset()
    model.start(session, encoded)
    _remember(model, session, latents, actions)
    session.meter.take()


def _remember(model: Adapter, session: Session, latents: Tensor, actions: str) -> None:
    """Clean passes over given latents, chunk by chunk."""
    moves = parse_actions(actions, model.actions, model.frames(latents.shape[model.frame_dim]))
    for part in latents.split(session.shape.chunk, model.frame_dim):
        count = part.shape[model.frame_dim]
        model.clean(session, part, _moves_of(session, model, moves, 0, count))
        session.commit()
        session.latents = part


def parse_actions(text: str, letters: str, frames: int) -> list[int]:
    """`w*20 a*24`: one action a frame, repeated by `*`; frames beyond the last one stay."""
    moves: list[int] = []
    for word in text.split():
        match = re.fullmatch(r"(\S)(?:\*(\d{1,6}))?", word)
        if match is None or match[1] not in letters:
            allowed = f"letters of {letters!r}, each with *count" if letters else "none at all"
            raise TachyscopeError(f"actions: this model takes {allowed}, got {word!r}: try w*20")
        moves += [letters.index(match[1])] * int(match[2] or 1)
    if len(moves) > frames:
        raise TachyscopeError(
            f"actions are given for {len(moves)} frames, but only {frames} are made: "
            f"raise frames or shorten the actions"
        )
    return moves + [0] * (frames - len(moves))


def parse_size(text: str | None) -> tuple[int, int] | None:
    """`480x832`, or None for the model's own."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if match is None:
        raise TachyscopeError(f"size is HEIGHTxWIDTH, got {text!r}: try 480x832")
    return int(match[1]), int(match[2])


def _chunks(model: Adapter, chunk: int, start: int, frames: int) -> int:
    """Chunks that give `frames` more frames, after `start` latent frames."""
    wanted, latents = model.frames(start) + frames, start
    while model.frames(latents) < wanted:
        latents += chunk
    return (latents - start) // chunk


def _moves_of(
    session: Session, model: Adapter, moves: Sequence[int], done: int, count: int
) -> list[int]:
    """The action of each of the coming latent frames: that of its first pixel frame."""
    if not model.actions:
        return []
    found = []
    for latent in range(session.frame, session.frame + count):
        first = model.frames(latent) - done
        found.append(moves[first] if first < len(moves) else 0)
    return found
