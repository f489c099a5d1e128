"""The loop: chunks of video, each yielded when it is made."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from tachyscope.arguments import (
    check_changes,
    check_first_size,
    check_frames,
    check_model,
    check_prompt,
    check_seed,
    parse_actions,
    parse_first,
    parse_noise,
    parse_plan,
    parse_size,
)
from tachyscope.errors import TachyscopeError, is_out_of_memory
from tachyscope.fingerprint import digest, of_tensors
from tachyscope.graph_runner import repeating
from tachyscope.models.base import VideoModel
from tachyscope.numerics import no_autocast, own_numerics
from tachyscope.plan import Plan
from tachyscope.session import Session, Source
from tachyscope.types import Chunk

if TYPE_CHECKING:
    from tachyscope.arguments import Actions, Noise, Pictures, PixelSize

S = TypeVar("S", bound=Session)
# latents that are remembered in one pass, and the action of each of their frames
Part = tuple[Tensor, list[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model reads it, and the hash by which a session knows it."""

    encoded: Any
    key: str

    @classmethod
    def read(cls, model: VideoModel, text: str) -> Self:
        with own_numerics():
            return cls(model.encode_prompt(text), model.prompt_key(text))


def open_session(
    model: VideoModel,
    plan: Plan | str = "dense",
    *,
    prompt: str = "",
    frames: int | None = None,
    seed: int = 0,
    size: PixelSize | None = None,
    first: Pictures | None = None,
    first_actions: Actions = "",
    noise: Noise | None = None,
    make: Callable[..., S] = Session,  # type: ignore[assignment]
) -> S:
    """A session that has read the prompt and stands before its first new chunk.

    `frames` is how many new frames will come, where that is known. `size` is (height, width) or
    "HEIGHTxWIDTH". `first` are given frames that the video goes on from: a path, PIL images, or
    uint8 or floats from 0 to 1 as [F, H, W, 3]; `first_actions` are the actions that led to each of
    them, as `rollout` takes actions. `noise` is used instead of the seed's, where a model is made
    from noise: a tensor [draws, latent frames, C, h, w], or a path of a file that holds it as
    `noise`. Each latent frame that is generated takes the next; the first draw is what a chunk
    begins as, the others are added before its later passes, and come from the seed where they are
    not given. `make` is called for the session: a class that also looks on.
    """
    check_model(model)
    parsed = parse_plan(model, plan)
    check_prompt(prompt)
    seed, pixels = check_seed(seed), parse_size(size)
    frames = None if frames is None else check_frames(frames)
    pictures = None if first is None else parse_first(first)
    shape = model.shape(pixels)
    if pictures is not None:
        check_first_size(model, pictures, pixels)
    with torch.inference_mode(), no_autocast():
        read = Prompt.read(model, prompt)
        with own_numerics():
            given = None if pictures is None else model.encode_frames(pictures)
        known = 0 if given is None else given.shape[model.frame_dim]
        moves = parse_actions(first_actions, model.actions, model.pixel_frames(known))
        drawn = None if noise is None else parse_noise(noise, model, shape)
        coming = None
        if frames is not None:
            coming = known + chunks_for(model, shape.chunk, known, frames) * shape.chunk
            _check_noise(drawn, coming - known)
        try:
            session = make(
                shape,
                parsed,
                model.rope(shape),
                latent_frames=coming,
                lengths=read.encoded.lengths,
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
        session.noise = drawn
        keys = read.key, _key(pictures), _noise_key(drawn)
        session.source = Source(model.fingerprint, *keys, model.decoder_name)
        model.prefill_prompt(session, read.encoded)
        if given is not None:
            _remember(model, session, _parts(model, given, shape.chunk, moves))
        session.meter.take()
    return session


def runs_beside(device: torch.device) -> bool:
    """Whether work that is asked for goes on while the host does something else."""
    return device.type == "cuda"


# the rollout that each session is being played by, as long as that goes on
_PLAYED: WeakKeyDictionary[Session, ref[Generator[Chunk]]] = WeakKeyDictionary()


def rollout(
    model: VideoModel,
    plan: Plan | str | None = None,
    *,
    frames: int,
    prompt: str | None = None,
    actions: Actions = "",
    seed: int | None = None,
    size: PixelSize | None = None,
    first: Pictures | None = None,
    first_actions: Actions = "",
    then: Sequence[tuple[int, str]] = (),
    noise: Noise | None = None,
    session: Session | None = None,
    overlap_decode: bool | None = None,
) -> Generator[Chunk]:
    """Yield chunks until `frames` new frames are made; the last is cut to fit.

    All is checked and the session opened when this is called; chunks are made as they are asked
    for. Without a session, plan is "dense", prompt "" and seed 0 unless given; `size`, `first`,
    `first_actions` and `noise` are as `open_session` takes them. `actions` are text
    ("w*20 a*24"), or one letter or index a frame in a list, an array or a tensor.

    `then` are changes of prompt, each with the new frame from which on it is meant: there, or where
    the next chunk begins, the newest latents that the cache has room for are remembered again
    under the new prompt. Of what a session made before, that is its last chunk.

    Same model, plan, prompt, actions, seed, size and first frames: same frames; another device or
    number of threads may change a level of 255 here and there. A `session` is gone on with, for
    `frames` more, by one rollout at a time; another plan, prompt, seed, size, first or noise than
    its own is refused. On a GPU, `overlap_decode` begins the next chunk before it decodes the last,
    on a second stream: until the end a session is then a chunk further than what was yielded, so
    unless asked for it is done only without one.
    """
    check_model(model)
    frames, moves = check_frames(frames), parse_actions(actions, model.actions, frames)
    wanted = check_changes(then)
    if not isinstance(overlap_decode, bool | None):
        raise TachyscopeError(f"overlap_decode must be True, False or None, got {overlap_decode!r}")
    overlap_decode = session is None if overlap_decode is None else overlap_decode
    overlap_decode = overlap_decode and model.overlaps_decode and runs_beside(model.device)
    if session is None:
        session = open_session(
            model, "dense" if plan is None else plan, frames=frames, size=size, first=first,
            prompt="" if prompt is None else prompt, seed=0 if seed is None else seed,
            first_actions=first_actions, noise=noise,
        )  # fmt: skip
    else:
        _check_session(model, session, plan, prompt, seed, size, first, noise)
        needed = chunks_for(model, session.shape.chunk, session.latent_frame, frames)
        _check_noise(session.noise, session.made + needed * session.shape.chunk)
    with torch.inference_mode(), no_autocast():
        changes = [
            (at, Prompt.read(model, text))
            for at, text in change_frames(model, session, wanted, frames)
        ]
        for _, read in changes:
            # raises where a longer prompt leaves no room
            session.slots_for(read.encoded.lengths)
        held = _newest(model, session, first_actions) if changes else deque[Part]()
    chunks = _stepping(_chunks(model, session, frames, moves, changes, held, overlap_decode))
    _PLAYED[session] = ref(chunks)
    return chunks


def _stepping(chunks: Generator[Chunk]) -> Generator[Chunk]:
    """Chunks, each made in inference mode and without autocast; at a yield the caller has theirs.

    A with-block around a yield would leave the caller in its modes.
    """
    try:
        while True:
            with torch.inference_mode(), no_autocast():
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk
    finally:
        chunks.close()


def _chunks(
    model: VideoModel,
    session: Session,
    frames: int,
    moves: Sequence[int],
    changes: list[tuple[int, Prompt]],
    held: deque[Part],
    overlap_decode: bool,
) -> Generator[Chunk]:
    shape, left = session.shape, frames
    done = model.pixel_frames(session.latent_frame)
    index = session.chunk
    beside = (
        torch.cuda.Stream(model.device) if model.device.type == "cuda" and overlap_decode else None
    )

    maker = repeating(model, session)

    def make(session: Session) -> Tensor:
        told = _moves_of(session, model, moves, done, shape.chunk)
        session.meter.add("entries_before", session.past)
        with session.meter.span("chunk"):
            latents = maker(told)
        session.meter.add("cuda_graph", maker.replayed)
        if changes:
            held.append((latents, told))
        return latents

    coming: Tensor | None = None
    while left:
        if changes and changes[0][0] == frames - left:
            maker.forget()
            _change(model, session, changes.pop(0)[1], held)
            done = model.pixel_frames(session.latent_frame) - (frames - left)
        latents = make(session) if coming is None else coming
        whole = model.pixel_frames(session.latent_frame) - done - (frames - left)
        made = min(left, whole)
        session.meter.add("frames", made)
        session.meter.add("frames_made", whole)
        session.meter.add("cache_mb", session.used_bytes() / 1e6)
        session.meter.add("cache_allocated_mb", session.cache_bytes() / 1e6)
        session.meter.add("entries", session.past)
        # waits for the chunk, so that decoding it need not
        stats = session.meter.take()
        left -= made
        # a change is made between what is shown before and after it
        changing = bool(changes) and changes[0][0] == frames - left
        coming = make(session) if overlap_decode and left and not changing else None
        with torch.cuda.stream(beside):
            pixels = model.decode_latents(session, latents)[:made]
        yield Chunk(index, pixels, stats)
        index += 1


def _check_session(
    model: VideoModel,
    session: Session,
    plan: Plan | str | None,
    prompt: str | None,
    seed: int | None,
    size: PixelSize | None,
    first: Pictures | None,
    noise: Noise | None,
) -> None:
    """Raise where a session cannot be gone on with, or is asked for what it is not."""
    if not isinstance(session, Session):
        raise TachyscopeError(
            f"session must be a Session, got a {type(session).__name__}: use open_session"
        )
    playing = _PLAYED.get(session)
    chunks = None if playing is None else playing()
    if chunks is not None and chunks.gi_frame is not None:  # type: ignore[attr-defined]
        raise TachyscopeError(
            "this session is being played by another rollout: go through that to its end, or "
            "close() it, or open a second session"
        )
    source = session.source
    other = [
        name
        for name, differs in {
            "model": source.weights not in ("", model.fingerprint)
            or (session.device, session.dtype) != (model.device, model.dtype),
            "plan": plan is not None and parse_plan(model, plan) != session.plan,
            "prompt": prompt is not None
            and model.prompt_key(check_prompt(prompt)) != source.prompt,
            "seed": seed is not None and check_seed(seed) != session.seed,
            "size": size is not None and model.shape(parse_size(size)) != session.shape,
            "first": first is not None and _key(parse_first(first)) != source.first,
            "noise": noise is not None
            and _noise_key(parse_noise(noise, model, session.shape)) != source.noise,
        }.items()
        if differs
    ]
    if other:
        raise TachyscopeError(
            f"a session is gone on with as it is, and this one has another {' and '.join(other)}: "
            f"leave that out, or open a session with it"
        )


def _key(pictures: np.ndarray | None) -> str:
    """The hash by which a session knows its first frames."""
    return "" if pictures is None else digest(str(pictures.shape), pictures.tobytes())


def _noise_key(noise: Tensor | None) -> str:
    return "" if noise is None else of_tensors({"noise": noise})


def _check_noise(noise: Tensor | None, frames: int) -> None:
    if noise is not None and noise.shape[1] < frames:
        raise TachyscopeError(
            f"`noise` must be for the {frames} latent frames to be made, got {noise.shape[1]}: "
            f"give more, or take fewer `frames`"
        )


@torch.inference_mode()
@no_autocast()
def refill(
    model: VideoModel, session: Session, latents: Tensor, prompt: str, actions: Actions = ""
) -> None:
    """Forget, then remember given latents chunk by chunk: a first frame, a prompt switch.

    latents are as `sample` returns them; the last chunk of them need not be whole. `actions` are
    those that led to each of their frames, as `rollout` takes actions. Noise goes on where it was,
    and where the video's end is known, as much is to come as before.
    """
    check_model(model)
    model.check_latents(session.shape, latents)
    moves = parse_actions(
        actions, model.actions, model.pixel_frames(latents.shape[model.frame_dim])
    )
    parts = _parts(model, latents, session.shape.chunk, moves)
    _refill(model, session, Prompt.read(model, check_prompt(prompt)), parts)


def change_frames(
    model: VideoModel, session: Session, then: Sequence[tuple[int, str]], frames: int
) -> list[tuple[int, str]]:
    """Changes of prompt in order, each moved to the new frame at which the next chunk begins."""
    chunk, start = session.shape.chunk, session.latent_frame

    def begins(chunks: int) -> int:
        return model.pixel_frames(start + chunks * chunk) - model.pixel_frames(start)

    last = begins(chunks_for(model, chunk, start, frames) - 1)
    found: dict[int, str] = {}
    for frame, prompt in sorted(then):
        if not 0 < frame <= last:
            allowed = f"from frame 1 to {last} of {frames}" if last else "of which there is one"
            raise TachyscopeError(
                f"a prompt changes where a chunk begins, {allowed}, got frame {frame}: choose "
                f"another, or raise `frames`"
            )
        at = begins(chunks_for(model, chunk, start, frame))
        if at in found:
            raise TachyscopeError(
                f"two prompts begin with the chunk at frame {at}, {found[at]!r} and {prompt!r}: "
                f"leave one out, or set them further apart"
            )
        found[at] = prompt
    return list(found.items())


def _change(model: VideoModel, session: Session, prompt: Prompt, held: Sequence[Part]) -> None:
    """Go on under another prompt, with the newest latents remembered again under it."""
    again = model.switch_prompt(session, [latents for latents, _ in held])
    if again is None:
        decoding = model.decoder_state(session)
        _refill(model, session, prompt, held, shown=True)
        session.features |= decoding  # the VAE's streaming state goes on
        return
    session.source = replace(session.source, prompt=prompt.key)
    model.prefill_prompt(session, prompt.encoded)
    _remember(model, session, [(again, [])], shown=True)
    session.meter.take()


def _refill(
    model: VideoModel, session: Session, prompt: Prompt, parts: Sequence[Part], shown: bool = False
) -> None:
    session.slots_for(prompt.encoded.lengths)  # raises while the session is still as it was
    if session.latent_frames is not None:
        known = sum(latents.shape[model.frame_dim] for latents, _ in parts)
        session.latent_frames = known + max(0, session.latent_frames - session.latent_frame)
    session.lengths = tuple(prompt.encoded.lengths)
    session.source = replace(session.source, prompt=prompt.key)
    # a video goes on: the noise and the steps of its first chunk must not come again
    generator, policy_rng, made = session.generator, session.policy_rng, session.made
    session.layers.clear()  # else the old and the new would be in memory together
    session.reset()
    session.generator, session.policy_rng, session.made = generator, policy_rng, made
    model.prefill_prompt(session, prompt.encoded)
    _remember(model, session, parts, shown)
    session.meter.take()


def _remember(
    model: VideoModel, session: Session, parts: Sequence[Part], shown: bool = False
) -> None:
    """Clean passes over given latents."""
    for latents, told in parts:
        model.prefill_latents(session, latents, told, shown)
        session.commit()
    if parts:
        session.latents = torch.cat([latents for latents, _ in parts], model.frame_dim)


def _parts(model: VideoModel, latents: Tensor, chunk: int, moves: Sequence[int]) -> list[Part]:
    """Latents of a video's beginning by chunks, with actions that are given by frames."""
    count = latents.shape[model.frame_dim]
    told = [moves[model.pixel_frames(i)] for i in range(count)] if model.actions else []
    return [
        (part, told[i * chunk :][: part.shape[model.frame_dim]])
        for i, part in enumerate(latents.to(model.device).split(chunk, model.frame_dim))
    ]


def _newest(model: VideoModel, session: Session, actions: Actions) -> deque[Part]:
    """The last latents, to be gone on with: as many as the cache has room for."""
    shape, slots = session.shape, session.layers[0].k.shape[2]
    most = None if session.plan.cache.grows else (slots - session.prompt) // shape.tokens_per_frame
    found: deque[Part] = deque(maxlen=most and most // shape.chunk)
    if session.latents is not None:
        frames = model.pixel_frames(session.latents.shape[model.frame_dim])
        moves = parse_actions(actions, model.actions, frames)
        found.extend(_parts(model, session.latents, shape.chunk, moves))
    return found


def chunks_for(model: VideoModel, chunk: int, start: int, frames: int) -> int:
    """Chunks that give `frames` more frames, after `start` latent frames."""
    wanted, enough = model.pixel_frames(start) + frames, 1

    def shown_by(chunks: int) -> int:
        return model.pixel_frames(start + chunks * chunk)

    while shown_by(enough) < wanted:
        enough *= 2
    return bisect_left(range(enough), wanted, key=shown_by)


def _moves_of(
    session: Session, model: VideoModel, moves: Sequence[int], done: int, count: int
) -> list[int]:
    """The action of each of the coming latent frames: that of its first pixel frame."""
    if not model.actions:
        return []
    found = []
    for latent in range(session.latent_frame, session.latent_frame + count):
        first = model.pixel_frames(latent) - done
        found.append(moves[first] if first < len(moves) else 0)
    return found
