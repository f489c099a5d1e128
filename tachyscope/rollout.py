"""The loop: chunks of video, each yielded when it is made."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tachyscope.adapters import Adapter
from tachyscope.cache.window import Window
from tachyscope.errors import TachyscopeError, is_out_of_memory, shown, warn
from tachyscope.making import repeating
from tachyscope.plan import Plan, replaced
from tachyscope.session import Session
from tachyscope.types import Chunk

S = TypeVar("S", bound=Session)
# latents that are remembered in one pass, and the action of each of their frames
Part = tuple[Tensor, list[int]]


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
        if first is not None and model.shape((first.shape[1], first.shape[2])) != shape:
            given_size = f"{first.shape[1]}x{first.shape[2]}"
            raise TachyscopeError(
                f"first frames have the video's size, got {given_size} of them for another: "
                f"resize them, or set size to {given_size}"
            )
        coming = None
        if frames is not None:
            coming = known + chunks_for(model, shape.chunk, known, frames) * shape.chunk
        parsed = parse_plan(model, plan)
        try:
            session = make(
                shape,
                parsed,
                model.rope(shape),
                frames=coming,
                lengths=encoded.lengths,
                seed=seed,
                device=model.device,
                dtype=model.dtype,
            )
        except RuntimeError as fault:
            if not is_out_of_memory(fault):
                raise
            raise TachyscopeError(
                f"the memory of {model.device} does not hold the cache of {parsed}: give it a "
                f"budget, for example cache=merge:budget=21f, or take a smaller size; "
                f"tachyscope bench fit tells what fits"
            ) from fault
        model.start(session, encoded)
        if given is not None:
            _remember(model, session, _parts(model, given, shape.chunk, first_actions))
        session.meter.take()
    return session


def runs_beside(device: torch.device) -> bool:
    """Whether work that is asked for goes on while the host does something else."""
    return device.type == "cuda"


def parse_plan(model: Adapter, plan: Plan | str) -> Plan:
    """A plan as the model means it; what its changes undo of its base is warned of."""
    if isinstance(plan, Plan):
        return plan
    for line in replaced(plan, model.kind, model.stock):
        warn(f"plan {shown(plan)}: {line}")
    return Plan.parse(plan, model.kind, model.stock)


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
    then: Sequence[tuple[int, str]] = (),
    session: Session | None = None,
    ahead: bool | None = None,
) -> Generator[Chunk]:
    """Yield chunks until `frames` new frames are made; the last is cut to fit.

    `then` are changes of prompt, each with the new frame from which on it is meant: there, or where
    the next chunk begins, the newest latents that the cache has room for are remembered again
    under the new prompt. Of what a session made before, that is its last chunk.

    Same model, plan, prompt, actions, seed, size and first frames: same frames. A `session` is
    gone on with, for `frames` more; all but the actions are then its own. On a GPU, `ahead` begins
    the next chunk before it decodes the last, on a second stream: until the end a session is then
    a chunk further than what was yielded, so unless asked for it is done only without one.
    """
    if frames < 1:
        raise TachyscopeError(f"frames must be 1 or more, got {frames}")
    ahead = session is None if ahead is None else ahead
    ahead = ahead and not model.looks and runs_beside(model.device)
    if session is None:
        session = open_session(
            model, plan, prompt=prompt, frames=frames, seed=seed, size=size, first=first,
            first_actions=first_actions,
        )  # fmt: skip
    shape = session.shape
    done = model.frames(session.frame)
    moves = parse_actions(actions, model.actions, frames)
    left = frames
    changes = [(at, model.encode(to)) for at, to in change_frames(model, session, then, frames)]
    for _, encoded in changes:
        # raises where a longer prompt leaves no room
        session.slots_for(encoded.lengths)
    held = _newest(model, session, first_actions) if changes else deque[Part]()
    stock = parse_plan(model, "stock") if model.together else None
    index = session.chunk
    beside = torch.cuda.Stream(model.device) if model.device.type == "cuda" and ahead else None

    maker = repeating(model, session)

    def make(session: Session) -> Tensor:
        told = _moves_of(session, model, moves, done, shape.chunk)
        session.meter.add("entries_before", session.past)
        with session.meter.span("chunk"):
            latents = maker(told)
        if changes:
            held.append((latents, told))
        return latents

    coming: Tensor | None = None
    while left:
        if changes and changes[0][0] == frames - left:
            maker.forget()
            change = _retell if model.together and session.plan == stock else _change
            change(model, session, changes.pop(0)[1], held)
            done = model.frames(session.frame) - (frames - left)
        latents = make(session) if coming is None else coming
        made = min(left, model.frames(session.frame) - done - (frames - left))
        session.meter.add("frames", made)
        session.meter.add("cache_mb", session.cache_bytes() / 1e6)
        session.meter.add("entries", session.past)
        # waits for the chunk, so that decoding it need not
        stats = session.meter.take()
        left -= made
        # a change is made between what is shown before and after it
        changing = bool(changes) and changes[0][0] == frames - left
        coming = make(session) if ahead and left and not changing else None
        with torch.cuda.stream(beside):
            pixels = model.decode(session, latents)[:made]
        yield Chunk(index, pixels, stats)
        index += 1


@torch.inference_mode()
def refill(
    model: Adapter, session: Session, latents: Tensor, prompt: str, actions: str = ""
) -> None:
    """Forget, then remember given latents chunk by chunk: a first frame, a prompt switch.

    latents are as `sample` returns them; the last chunk of them need not be whole. Noise goes on
    where it was, and where the video's end is known, as much is to come as before.
    """
    parts = _parts(model, latents, session.shape.chunk, actions)
    _refill(model, session, model.encode(prompt), parts)


def change_frames(
    model: Adapter, session: Session, then: Sequence[tuple[int, str]], frames: int
) -> list[tuple[int, str]]:
    """Changes of prompt in order, each moved to the new frame at which the next chunk begins."""
    chunk, start = session.shape.chunk, session.frame

    def begins(chunks: int) -> int:
        return model.frames(start + chunks * chunk) - model.frames(start)

    last = begins(chunks_for(model, chunk, start, frames) - 1)
    found: dict[int, str] = {}
    for frame, prompt in sorted(then):
        if not 0 < frame <= last:
            allowed = f"from frame 1 to {last} of {frames}" if last else "of which there is one"
            raise TachyscopeError(
                f"a prompt changes where a chunk begins, {allowed}, got frame {frame}: choose "
                f"another, or raise frames"
            )
        at = begins(chunks_for(model, chunk, start, frame))
        if at in found:
            raise TachyscopeError(
                f"two prompts begin with the chunk at frame {at}, {found[at]!r} and {prompt!r}: "
                f"leave one out, or set them further apart"
            )
        found[at] = prompt
    return list(found.items())


def _change(model: Adapter, session: Session, encoded: Any, held: Sequence[Part]) -> None:
    """Go on under another prompt, with the newest latents remembered again under it."""
    pictures = model.showing(session)
    _refill(model, session, encoded, held, shown=True)
    # what is told changes, what was shown does not
    session.features |= pictures


def _retell(model: Adapter, session: Session, encoded: Any, held: Sequence[Part]) -> None:
    """`_change` where a full window is remembered in one pass, behind its sink as it was."""
    cache, shape = session.plan.cache, session.shape
    assert isinstance(cache, Window)
    most = cache.budget.entries(shape) // shape.places
    keep = cache.sink if session.frame > most else 0
    frames = min(session.frame, most) - keep
    latents = torch.cat([latents for latents, _ in held], model.frame_dim)
    before = latents.shape[model.frame_dim] - frames
    if before < 0:  # of a session that is gone on with, no more than its last chunk is known
        return _change(model, session, encoded, held)
    model.start(session, encoded)
    session.rewind(frames, keep)
    newest = latents.narrow(model.frame_dim, before, frames)
    _remember(model, session, [(newest, [])], shown=True)
    session.meter.take()


def _refill(
    model: Adapter, session: Session, encoded: Any, parts: Sequence[Part], shown: bool = False
) -> None:
    session.slots_for(encoded.lengths)  # raises while the session is still as it was
    if session.frames is not None:
        known = sum(latents.shape[model.frame_dim] for latents, _ in parts)
        session.frames = known + max(0, session.frames - session.frame)
    session.lengths = tuple(encoded.lengths)
    # a video goes on: the noise and the steps of its first chunk must not come again
    generator, dice, made = session.generator, session.dice, session.made
    session.layers.clear()  # else the old and the new would be in memory together
    session.reset()
    session.generator, session.dice, session.made = generator, dice, made
    model.start(session, encoded)
    _remember(model, session, parts, shown)
    session.meter.take()


def _remember(model: Adapter, session: Session, parts: Sequence[Part], shown: bool = False) -> None:
    """Clean passes over given latents."""
    for latents, told in parts:
        model.clean(session, latents, told, shown)
        session.commit()
    if parts:
        session.latents = torch.cat([latents for latents, _ in parts], model.frame_dim)


def _parts(model: Adapter, latents: Tensor, chunk: int, actions: str) -> list[Part]:
    """Latents of a video's beginning by chunks, with actions that are given by frames."""
    count = latents.shape[model.frame_dim]
    moves = parse_actions(actions, model.actions, model.frames(count))
    told = [moves[model.frames(i)] for i in range(count)] if model.actions else []
    return [
        (part, told[i * chunk :][: part.shape[model.frame_dim]])
        for i, part in enumerate(latents.to(model.device).split(chunk, model.frame_dim))
    ]


def _newest(model: Adapter, session: Session, actions: str) -> deque[Part]:
    """The last latents, to be gone on with: as many as the cache has room for."""
    shape, slots = session.shape, session.layers[0].k.shape[2]
    most = None if session.plan.cache.grows else (slots - session.prompt) // shape.places
    found: deque[Part] = deque(maxlen=most and most // shape.chunk)
    if session.latents is not None:
        found.extend(_parts(model, session.latents, shape.chunk, actions))
    return found


def parse_actions(text: str, letters: str, frames: int) -> list[int]:
    """`w*20 a*24`: one action a frame, repeated by `*`; frames beyond the last one stay."""
    moves: list[int] = []
    for word in text.split():
        match = re.fullmatch(r"(\S)(?:\*(\d{1,6}))?", word)
        if not letters:
            raise TachyscopeError(f"this model takes no actions, got {word!r}: leave them out")
        if match is None or match[1] not in letters:
            raise TachyscopeError(
                f"actions: this model takes letters of {letters!r}, each with *count, got "
                f"{word!r}: try {letters[:2][-1]}*20"
            )
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


def parse_change(text: str) -> tuple[int, str]:
    """`24: a blue room`: a frame, and the prompt from there on."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*:(.*)", text, re.DOTALL)
    if match is None:
        raise TachyscopeError(
            f"a change of prompt is FRAME: PROMPT, got {text!r}: try '24: a blue room'"
        )
    return int(match[1]), match[2].strip()


def chunks_for(model: Adapter, chunk: int, start: int, frames: int) -> int:
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
