"""A video under way, advanced chunk by chunk."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from tachyscope.arguments import (
    check_first_size,
    check_model,
    check_noise,
    check_prompt,
    check_whole,
    parse_actions,
    parse_calibration,
    parse_camera,
    parse_noise,
    parse_plan,
    parse_size,
)
from tachyscope.batch import batched_shape, parse_batch, parse_firsts
from tachyscope.errors import TachyscopeError, is_out_of_memory
from tachyscope.fingerprint import first_key, noise_key
from tachyscope.graph_runner import repeating
from tachyscope.held import Held, pack_held, unpack_held
from tachyscope.layers import cache_bytes
from tachyscope.models.atrium.camera import START, place
from tachyscope.models.base import Ready, VideoModel
from tachyscope.numerics import no_autocast, own_numerics
from tachyscope.observers import Observer
from tachyscope.plan import Plan
from tachyscope.prefill import Part, Prompt, by_chunk, prefill, refill, switch_prompt
from tachyscope.session import Session
from tachyscope.state import Source
from tachyscope.types import CAMERA, Chunk

if TYPE_CHECKING:
    from tachyscope.arguments import Actions, Noise, Pictures, PixelSize, Start


def open(
    model: VideoModel,
    plan: Plan | str = "dense",
    *,
    prompt: str | Sequence[str] = "",
    frames: int | None = None,
    seed: int | Sequence[int] = 0,
    size: PixelSize | None = None,
    first: Pictures | Sequence[Pictures] | None = None,
    first_actions: Actions = "",
    start: Start | None = None,
    pace: float | None = None,
    noise: Noise | None = None,
    observers: Sequence[Observer] = (),
) -> Stream:
    """A stream that has read the prompt and stands before its first new chunk.

    `frames` is how many new frames will come, where that is known. `size` is (height, width) or
    "HEIGHTxWIDTH". `first` are given frames that the video goes on from: a path, PIL images, or
    uint8 or floats from 0 to 1 as [F, H, W, 3]; `first_actions` are the actions that led to each of
    them, as `rollout` takes actions. `noise` is used instead of the seed's, where a model is made
    from noise: a tensor [draws, latent frames, C, h, w], or a path of a file that holds it as
    `noise`. Each latent frame that is generated takes the next; the first draw is what a chunk
    begins as, the others are added before its later passes, and come from the seed where they are
    not given. `observers` are told of all that the session does.

    A model that is told where its camera stands takes `start`, where that is before the first frame
    (x and y in sides of the room, and degrees to the left of the front wall; in the middle and 0
    unless given), and `pace`, the part of a step that a frame takes: 1, unless given, is 15 degrees
    of a turn or a twentieth of the room's side.

    Where `prompt` or `seed` is a list, one video is made of each, all in the same passes, with the
    same actions; `first` and `start` are then lists of each one's. A video of a batch is the video
    that is made alone, but for rounding where a kernel sums in another order for more rows.
    """
    check_model(model)
    parsed, pixels = parse_plan(model, plan), parse_size(size)
    texts, seeds, batch = parse_batch(prompt, seed)
    frames = None if frames is None else check_whole("frames", frames)
    pictures = parse_firsts(first, batch)
    camera = parse_camera(model, start, pace, batch)
    shape = model.shape(pixels)
    for each in pictures:
        check_first_size(model, each, pixels)
    if batch is not None:
        shape = batched_shape(model, shape, batch, noise)
    with torch.inference_mode(), no_autocast():
        read = Prompt.read(model, texts)
        with own_numerics():
            given = torch.cat([model.encode_frames(x) for x in pictures]) if pictures else None
        known = 0 if given is None else given.shape[model.frame_dim]
        moves = parse_actions(first_actions, model.actions, model.pixel_frames(known))
        drawn = None if noise is None else parse_noise(noise, model, shape)
        coming = None
        if frames is not None:
            coming = known + chunks_for(model, shape.chunk, known, frames) * shape.chunk
            check_noise(drawn, coming - known)
        try:
            session = Session(
                shape,
                parsed,
                model.rope(shape),
                latent_frames=coming,
                lengths=read.encoded.lengths,
                seed=seeds,
                device=model.device,
                dtype=model.dtype,
                observers=observers,
                calibration=parse_calibration(model, parsed),
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
        keys = read.key, first_key(*pictures), noise_key(drawn)
        session.source = Source(model.fingerprint, *keys, model.decoder_name)
        model.prefill_prompt(session, read.encoded)
        if camera is None and session.wants_poses:
            camera = place([START] * shape.batch, 1.0, model.device)
        if camera is not None:
            session.features[CAMERA] = camera.clone()
        if given is not None:
            prefill(model, session, by_chunk(model, given, shape.chunk, moves, camera))
        session.meter.take()
        return Stream(model, session, moves, batch, camera)


@dataclass(frozen=True, slots=True)
class Latents:
    """A chunk before it is decoded: its number, latents, pixel frames, and row of the meter."""

    index: int
    latents: Tensor
    frames: int
    stats: dict[str, float]


class Stream:
    """A video that is advanced chunk by chunk: `step` is the one way.

    It owns the session, the runner that replays a chunk's launches as a CUDA graph once the cache
    is full, and the CUDA stream that decodes beside the next chunk. As a context manager it frees
    what it holds at its end.
    """

    def __init__(
        self,
        model: VideoModel,
        session: Session,
        actions: Sequence[int] = (),
        batch: int | None = None,
        camera: Tensor | None = None,
    ) -> None:
        """Go on with a session; `actions` are those that led to its latents, one a frame.

        `batch` is how many videos it makes at once; chunks then have a frame for each of them.
        `camera` is where it stood before the session's latents.
        """
        self.model, self.session, self.batch = model, session, batch
        self.runner = repeating(model, session)
        self.next_prompt: Prompt | None = None  # what the next chunk begins with
        self.rollout: ref[Generator[Chunk]] | None = None  # the loop that advances it
        self._beside: torch.cuda.Stream | None = None
        self._closed = False
        self._held: list[Part] = []  # the newest latents, for a prompt that changes
        self._stand(actions, camera)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    @property
    def next_frames(self) -> int:
        """Pixel frames that the next chunk decodes to."""
        known, chunk = self.session.latent_frame, self.session.shape.chunk
        return self.model.pixel_frames(known + chunk) - self.model.pixel_frames(known)

    @property
    def pace(self) -> float | None:
        """The part of a step that a frame takes; None in a model without a camera."""
        camera = self.session.features.get(CAMERA)
        return None if camera is None else float(camera[0, 3])

    def step(
        self, actions: Actions | None = None, show: Callable[[np.ndarray], None] | None = None
    ) -> Chunk:
        """Make the next chunk.

        `actions` are as `rollout` takes them, for the frames of this chunk; a single one is held
        for all of them. The same actions, in steps or in a rollout, make the same video.

        `show` is handed the chunk's frames once they are decoded, before the clean pass and the
        cache's upkeep: on a CPU a third of a step. A chunk is then two CUDA graphs, with decoding
        between them, if the first that is recorded is shown.
        """
        self.check_free()
        frames = self.next_frames
        moves = parse_actions("" if actions is None else actions, self.model.actions, frames)
        if actions is not None and len(actions) == 1:
            moves = moves[:1] * frames
        if show is None or not self.model.overlaps_decode:
            chunk = self.decode(self.generate(moves))
            if show is not None:
                show(chunk.frames)
            return chunk
        shown: list[np.ndarray] = []
        spent: dict[str, float] = {}

        def ready(latents: Tensor) -> None:
            begun = time.perf_counter()
            if latents.is_cuda:
                torch.cuda.current_stream(latents.device).synchronize()
            there = time.perf_counter()
            shown.append(self.frames_of(latents))
            show(shown[0])
            now = time.perf_counter()
            spent.update(decode_ms=there - now, chunk_ms=now - there, host_ms=now - begun)

        made = self.generate(moves, ready)
        taken = {name: made.stats.get(name, 0.0) - 1e3 * s for name, s in spent.items()}
        return Chunk(made.index, shown[0], made.stats | taken)

    @torch.inference_mode()
    @no_autocast()
    def generate(self, actions: Sequence[int] = (), ready: Ready | None = None) -> Latents:
        """The next chunk's latents: `step` without decoding.

        `actions` are indices, one a frame; the frames after them stay where they are. `ready` is
        handed the latents once they are final, before they are in the cache.
        """
        self._check_open()
        self._switch_prompt()
        model, session = self.model, self.session
        begun, before = time.perf_counter(), session.latent_frame
        start = model.pixel_frames(before)
        chunk_actions = []
        if model.actions:
            # a latent frame's action is that of its first pixel frame
            at = [model.pixel_frames(before + i) - start for i in range(session.shape.chunk)]
            chunk_actions = [actions[i] if i < len(actions) else 0 for i in at]
        session.meter.add("entries_before", session.past)
        stood = session.features[CAMERA].clone() if CAMERA in session.features else None
        with session.meter.span("chunk"):
            latents = self.runner(chunk_actions, ready)
        session.count_bank()
        # on CUDA, what the launches took: near the chunk's own time, the device waits for the host
        session.meter.add("host_ms", 1e3 * (time.perf_counter() - begun))
        session.meter.add("cuda_graph", self.runner.replayed)
        self._hold([Part(latents, chunk_actions, stood)])
        frames = model.pixel_frames(session.latent_frame) - start
        session.meter.add("frames", frames * (self.batch or 1))
        session.meter.add("frames_made", frames * (self.batch or 1))
        held = session.past + session.shape.max_pass_tokens
        session.meter.add("cache_mb", cache_bytes(session.layers, held) / 1e6)
        session.meter.add("cache_allocated_mb", cache_bytes(session.layers) / 1e6)
        if host := sum(x.nbytes for layer in session.layers for x in layer.host_tensors().values()):
            session.meter.add("host_mb", host / 1e6)
        session.meter.add("entries", session.past)
        # waits for the chunk, so that decoding it need not
        made = Latents(self._index, latents, frames, session.meter.take())
        self._index += 1
        return made

    @torch.inference_mode()
    @no_autocast()
    def decode(self, made: Latents, beside: bool = False) -> Chunk:
        """A generated chunk's frames; on a GPU, `beside` what was launched after it."""
        self._check_open()
        if beside and self._beside is None and self.model.device.type == "cuda":
            self._beside = torch.cuda.Stream(self.model.device)
        begun = time.perf_counter()
        with torch.cuda.stream(self._beside if beside else None):
            frames = self.frames_of(made.latents)
        spent = {"decode_ms": 1e3 * (time.perf_counter() - begun)}
        return Chunk(made.index, frames, made.stats | spent)

    def frames_of(self, latents: Tensor) -> np.ndarray:
        """Latents decoded: [F, H, W, 3], in a batch [B, F, H, W, 3]."""
        decode = self.model.decode_latents
        if self.batch is None:
            return decode(self.session, latents)
        videos = enumerate(latents.split(1))
        return np.stack([decode(self.session, part, video) for video, part in videos])

    def set_prompt(self, prompt: str | Sequence[str]) -> None:
        """Go on under another prompt from the next chunk on; in a batch, one for all or one each.

        The newest latents that the cache has room for are then prefilled again under it.
        """
        self.next_prompt = self.read_prompt(prompt)

    @torch.inference_mode()
    @no_autocast()
    def read_prompt(self, prompt: str | Sequence[str]) -> Prompt:
        """A prompt encoded; raises where the plan has no room for it."""
        self._check_open()
        read = Prompt.read(self.model, self.parse_prompt(prompt))
        self.session.slots_for(read.encoded.lengths)
        return read

    def parse_prompt(self, prompt: str | Sequence[str]) -> list[str]:
        """Every video's prompt: one is for all."""
        if self.batch is None:
            return [check_prompt(prompt)]
        return parse_batch(prompt, [0] * self.batch)[0]

    @torch.inference_mode()
    @no_autocast()
    def refill(
        self,
        latents: Tensor,
        prompt: str | Sequence[str],
        actions: Actions = "",
        start: Start | None = None,
    ) -> None:
        """Forget, then prefill given latents chunk by chunk under a prompt.

        latents are as `session.latents`; the last chunk of them need not be whole. `actions` are
        those that led to each of their frames, as `rollout` takes actions, from `start` as `open`
        takes it. Noise goes on where it was, and where the video's end is known, as much is to come
        as before.
        """
        model, session = self.model, self.session
        model.check_latents(session.shape, latents)
        frames = model.pixel_frames(latents.shape[model.frame_dim])
        moves = parse_actions(actions, model.actions, frames)
        camera = parse_camera(model, start, self.pace, self.batch)
        parts = by_chunk(model, latents, session.shape.chunk, moves, camera)
        refill(model, session, self.read_prompt(prompt), parts)
        self.next_prompt = None
        self.runner.forget()
        self._stand(moves, camera)

    @torch.inference_mode()
    @no_autocast()
    def snapshot(self, host: bool = True) -> dict[str, Tensor]:
        """Everything between two chunks, as tensors by name, ready for a safetensors file.

        Without `host` a bank's blocks in host memory are left out, as `Snapshots` writes them.
        """
        self._check_open()
        self._switch_prompt()
        kept = pack_held(Held(self._index, self._held), self.model.frame_dim)
        return self.session.state(host, kept)

    def restore(
        self, state: Mapping[str, Tensor], segments: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        """Go on where a snapshot was taken, in a stream of the same model, size, plan and prompt.

        A snapshot that does not fit is refused, and the stream goes on as if nothing happened.
        `segments` are a bank's blocks, where it was taken without them.
        """
        self._check_open()
        held: Held | None = None

        def check(kept: Mapping[str, Tensor]) -> None:
            nonlocal held
            held = unpack_held(self.model, self.session, kept)

        self.session.restore(state, segments, check)
        self.next_prompt = None
        self.runner.forget()
        with torch.inference_mode():
            self._stand()
        if held is not None:
            self._index, self._held = held

    def close(self) -> None:
        """Free the cache, the prompt and the CUDA graph; the session's numbers stay readable."""
        self._closed = True
        self.runner.forget()
        self._held.clear()
        self.session.layers.clear()
        self.session.texts.clear()
        self.session.features.clear()
        self.session.latents = self.next_prompt = None

    def check_free(self) -> None:
        """Raise where a rollout goes on, which may be a chunk ahead of what it yielded."""
        chunks = None if self.rollout is None else self.rollout()
        if chunks is not None and chunks.gi_frame is not None:  # type: ignore[attr-defined]
            raise TachyscopeError(
                "this stream is being played by another rollout: go through that to its end, or "
                "close() it, or open a second stream"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise TachyscopeError("this stream is closed: open another")

    def _stand(self, actions: Sequence[int] = (), camera: Tensor | None = None) -> None:
        """Count and hold from where the session stands.

        Where actions are not known, its latents are taken as seen from where the camera is now.
        """
        model, session = self.model, self.session
        self._index = session.chunk
        self._held = []
        if session.latents is not None:
            count = model.pixel_frames(session.latents.shape[model.frame_dim])
            moves = [*actions, *[0] * (count - len(actions))]
            stood = session.features.get(CAMERA) if camera is None else camera
            self._hold(by_chunk(model, session.latents, session.shape.chunk, moves, stood))

    def _hold(self, parts: Sequence[Part]) -> None:
        """Keep the newest latents, as many as the cache has room for: a prompt may change."""
        session, shape = self.session, self.session.shape
        self._held += parts
        if not session.plan.cache.grows:
            room = session.slots_for(session.lengths) - session.prompt
            most = room // shape.tokens_per_frame // shape.chunk
            del self._held[: max(0, len(self._held) - most)]

    def _switch_prompt(self) -> None:
        if self.next_prompt is None:
            return
        self.runner.forget()
        switch_prompt(self.model, self.session, self.next_prompt, self._held)
        self.next_prompt = None


def chunks_for(model: VideoModel, chunk: int, start: int, frames: int) -> int:
    """Chunks that give `frames` more frames, after `start` latent frames."""
    wanted, enough = model.pixel_frames(start) + frames, 1

    def shown_by(chunks: int) -> int:
        return model.pixel_frames(start + chunks * chunk)

    while shown_by(enough) < wanted:
        enough *= 2
    return bisect_left(range(enough), wanted, key=shown_by)
