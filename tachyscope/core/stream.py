"""A stream: a video that is made chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.arguments import check_prompt, check_whole, listed_actions, parse_actions
from tachyscope.core.chunk_runner import make_runner
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.guard import Guard
from tachyscope.core.kv_allocation import cache_stats
from tachyscope.core.prefill import Part, Prompt, by_chunk, refill
from tachyscope.core.prompt_switch import RecentLatents, switch_prompt
from tachyscope.core.request import parse_batch, parse_camera
from tachyscope.core.session import Session
from tachyscope.core.source_video import SourceVideo
from tachyscope.core.stream_state import restore
from tachyscope.core.types import Chunk, Latents
from tachyscope.io.torch_defaults import no_autocast
from tachyscope.models.base import Ready, VideoModel

if TYPE_CHECKING:
    from tachyscope.core.arguments import Actions
    from tachyscope.core.request import Start

T = TypeVar("T")


class Stream:
    """A video that is made chunk by chunk; `step` makes the next one.

    It owns the session, the runner that replays a chunk as a CUDA graph once the cache is full, and
    the CUDA stream that decodes while the next chunk is made. As a context manager it frees its
    memory at the end.

    Only one call can run at a time: one from a second thread, or from `show` or an observer, is
    refused. After an exception or Ctrl-C within a chunk, all calls but `restore` and `close` are
    refused.
    """

    def __init__(
        self,
        model: VideoModel,
        session: Session,
        actions: Sequence[int] = (),
        batch: int | None = None,
        camera: Tensor | None = None,
        video: SourceVideo | None = None,
    ) -> None:
        """Continue a session; `actions` led to its latents, one per frame.

        `batch` is the number of videos it makes at once, None if its chunks have no batch
        dimension. `camera` is its position before the session's latents. `video` is its source.
        """
        self.model, self.session, self.batch, self.video = model, session, batch, video
        self.guard = Guard()
        self.runner = make_runner(model, session)
        self.next_prompt: Prompt | None = None  # that the next chunk begins with
        self._beside: torch.cuda.Stream | None = None
        self._closed = False
        self._unchecked = True  # until a chunk was found to be finite
        self.recent = RecentLatents(model, session, actions, camera)
        self.index = session.memory.chunk  # of the next chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    @property
    def next_frames(self) -> int:
        """Pixel frames that the next chunk decodes to."""
        return self._coming(1)

    def _coming(self, chunks: int) -> int:
        known, more = self.session.memory.latent_frame, chunks * self.session.shape.chunk
        return self.model.pixel_frames(known + more) - self.model.pixel_frames(known)

    @property
    def pace(self) -> float | None:
        """The part of a step that a frame takes; None for a model without a camera."""
        camera = self.session.memory.features.camera
        return None if camera is None else float(camera[0, 3])

    def step(
        self, actions: Actions | None = None, show: Callable[[np.ndarray], None] | None = None
    ) -> Chunk:
        """Make the next chunk.

        `actions` are as in `rollout`, for the frames of this chunk; a single one is held for all of
        them. The same actions, in steps or in a rollout, make the same video.

        `show` is called with the chunk's frames as soon as they are decoded, before the clean pass
        and the commit to the cache: on a CPU a third of a step earlier. The recorded chunk is then
        two CUDA graphs with decoding between them, if `show` was given when it was recorded.
        """
        self.guard.check_free()
        given = [] if isinstance(actions, str | None) else listed_actions(actions)
        if self.batch and len(given) == self.batch > 1:
            raise TachyscopeError(
                f"the videos of a batch take the same actions, one letter a frame, got a list of "
                f"{len(given)} for {self.batch} videos: give text for all of them, as 'w q', or "
                f"open a stream for each"
            )

        def work() -> Chunk:
            frames = self.next_frames
            moves = parse_actions("" if actions is None else actions, self.model.actions, frames)
            if len(given) == 1 or (isinstance(actions, str) and len(actions) == 1):
                moves = moves[:1] * frames
            self.need_source()
            return self.guard.change(lambda: self._step(moves, show))

        return self.alone(work)

    def take(self, chunks: int, actions: Actions = "") -> Iterator[Chunk]:
        """The next chunks, lazily: `for chunk in stream.take(20)`. A source video's end ends them.

        `actions` are as in `rollout`, for the frames of all of these chunks.
        """
        chunks = check_whole("frames", chunks, "the number of chunks")
        moves = parse_actions(actions, self.model.actions, self._coming(chunks))

        def made() -> Iterator[Chunk]:
            done = 0
            for _ in range(chunks):
                part = moves[done : done + self.next_frames]
                if self.video is not None and not self.alone(self._fill):
                    return
                yield self._advance(partial(self._step, part))
                done += len(part)

        return made()

    def _advance(self, work: Callable[[], T]) -> T:
        """Run `work`, which changes the video; if it does not finish, later calls are refused."""
        self.guard.check_free()
        return self.alone(lambda: self.guard.change(work))

    def __repr__(self) -> str:
        memory = self.session.memory
        videos = f", {self.batch} videos" if self.batch else ""
        return (
            f"<Stream of {self.model.name}: {memory.chunk} chunks, {memory.latent_frame} latent "
            f"frames{videos}, plan {self.session.plan}{', closed' if self._closed else ''}>"
        )

    def _step(
        self, moves: Sequence[int], show: Callable[[np.ndarray], None] | None = None
    ) -> Chunk:
        if show is None or not self.model.overlaps_decode:
            chunk = self.pictures(self.make(moves))
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

        made = self.make(moves, ready)
        taken = {name: made.stats.get(name, 0.0) - 1e3 * s for name, s in spent.items()}
        return Chunk(made.index, shown[0], made.stats | taken)

    def generate(self, actions: Sequence[int] = (), ready: Ready | None = None) -> Latents:
        """The next chunk's latents: `step` without decoding.

        `actions` are indices, one per frame; missing ones are 0, "stay". `ready` is called with the
        final latents before they are written to the cache.
        """
        self.guard.check_free()

        def work() -> Latents:
            self.need_source()
            return self.guard.change(lambda: self.make(actions, ready))

        return self.alone(work)

    def need_source(self) -> None:
        """Within `alone`: read a source video's frames for the next chunk; raises at its end."""
        if self.video is not None:
            self.video.need(self.next_frames)

    def _fill(self) -> bool:
        return self.video is None or self.video.fill(self.next_frames)

    def decode(self, made: Latents, beside: bool = False) -> Chunk:
        """Decode a generated chunk; on a GPU, `beside` decodes on a second CUDA stream."""
        if not isinstance(made, Latents):
            raise TachyscopeError(f"decode takes what `generate` returned, got {shown(made)}")
        return self.alone(lambda: self.guard.change(lambda: self.pictures(made, beside)))

    def alone(self, work: Callable[[], T], interrupted: bool = False) -> T:
        """Run `work` exclusively, as `Guard.alone` does, if the stream is open."""

        def checked() -> T:
            self._check_open()
            return work()

        return self.guard.alone(checked, interrupted)

    @torch.inference_mode()
    @no_autocast()
    def make(self, actions: Sequence[int] = (), ready: Ready | None = None) -> Latents:
        """`generate` within `alone`."""
        self.take_up_prompt()
        model, session = self.model, self.session
        dropped = {} if self.video is None else self.video.lay(model, session, self.next_frames)
        memory = session.memory
        begun, before = time.perf_counter(), memory.latent_frame
        start = model.pixel_frames(before)
        chunk_actions = []
        if model.actions:
            # a latent frame's action is that of its first pixel frame
            at = [model.pixel_frames(before + i) - start for i in range(session.shape.chunk)]
            chunk_actions = [actions[i] if i < len(actions) else 0 for i in at]
        entries_before, camera = memory.past, memory.features.camera
        stood = None if camera is None else camera.clone()
        with session.meter.span("chunk"):
            latents = self.runner(chunk_actions, ready)
        if self._unchecked:
            self._check_finite(latents)
        session.count_bank()
        spent = time.perf_counter() - begun
        self.recent.add([Part(latents, chunk_actions, stood)])
        frames = model.pixel_frames(memory.latent_frame) - start
        stats = {
            # on CUDA, the time of the launches: if it is near chunk_ms, the GPU waits for the host
            "host_ms": 1e3 * spent,
            "cuda_graph": float(self.runner.replayed),
            "frames": float(frames * (self.batch or 1)),
            "frames_made": float(frames * (self.batch or 1)),
            "entries_before": float(entries_before),
            **dropped,
        } | cache_stats(memory.layers, memory.past, session.shape.max_pass_tokens)
        # waits for the chunk, so that decoding does not
        made = Latents(self.index, latents, frames, session.meter.take() | stats)
        self.index += 1
        return made

    @torch.inference_mode()
    @no_autocast()
    def pictures(self, made: Latents, beside: bool = False) -> Chunk:
        """`decode` within `alone`."""
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
        """Change the prompt from the next chunk on; in a batch, one for all or one for each video.

        The newest latents that the cache has room for are then prefilled again under it.
        """
        read = self.read_prompt(prompt)
        # not while a chunk applies an earlier one
        self.alone(lambda: setattr(self, "next_prompt", read))

    @torch.inference_mode()
    @no_autocast()
    def read_prompt(self, prompt: str | Sequence[str]) -> Prompt:
        """The encoded prompt; raises if the plan has no room for it."""
        self._check_open()
        read = Prompt.read(self.model, self.parse_prompt(prompt))
        self.session.memory.slots_for(read.encoded.lengths)
        return read

    def parse_prompt(self, prompt: str | Sequence[str]) -> list[str]:
        """One prompt per video; a single one is for all."""
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
        """Start over from given latents, prefilled chunk by chunk under a prompt.

        `latents` are as `generate` returns them; the last chunk may be incomplete. `actions` led to
        their frames, from `start`, both in the forms that `open` takes. The noise continues, and a
        known number of frames still to come stays the same.
        """
        model, session = self.model, self.session
        model.check_latents(session.shape, latents)
        frames = model.pixel_frames(latents.shape[model.frame_dim])
        moves = parse_actions(actions, model.actions, frames)
        camera = parse_camera(model, start, self.pace, self.batch)
        parts = by_chunk(model, latents, session.shape.chunk, moves, camera)
        read = self.read_prompt(prompt)

        def work() -> None:
            refill(model, session, read, parts)
            self.next_prompt = None
            self.runner.forget()
            self.restart(moves, camera)

        self._advance(work)

    def snapshot(self, host: bool = True) -> dict[str, Tensor]:
        """The state between two chunks as tensors by name, ready for a safetensors file.

        Without `host`, a bank's blocks in host memory are left out: `Snapshots` writes them apart.
        """
        return self.alone(lambda: self.state(host))

    @torch.inference_mode()
    @no_autocast()
    def state(self, host: bool = True) -> dict[str, Tensor]:
        """`snapshot` within `alone`."""
        followed = {} if self.video is None else self.video.tensors()
        if self.next_prompt is not None:
            self.guard.change(self.take_up_prompt)
        return self.session.state(host, self.recent.tensors(self.index) | followed)

    def restore(
        self, state: Mapping[str, Tensor], segments: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        """Continue from a snapshot, taken from a stream of the same model, size, plan and prompt.

        A snapshot that does not fit is refused and changes nothing. `segments` are a bank's blocks,
        if the snapshot was taken without them.
        """
        restore(self, state, segments)

    def close(self) -> None:
        """Free the cache, the prompt and the CUDA graph; the session's counts stay readable."""
        self.guard.alone(self._close, interrupted=True)

    def _close(self) -> None:
        self._closed, self.guard.interrupted = True, False
        if self.video is not None:
            self.video.close()
        self.runner.forget()
        self.recent.parts.clear()
        self.session.free()
        self.next_prompt = None

    def _check_finite(self, latents: Tensor) -> None:
        """Raise if a first chunk has NaN; later ones are not checked, which would synchronise."""
        if not bool(self.model.finite(self.session, latents)):
            raise TachyscopeError(
                f"{self.model.name} makes NaN or infinity in {self.session.dtype}: get its "
                f"checkpoint again, or load it in a wider dtype"
            )
        self._unchecked = False

    def _check_open(self) -> None:
        if self._closed:
            raise TachyscopeError("this stream is closed: open another")

    def restart(self, actions: Sequence[int] = (), camera: Tensor | None = None) -> None:
        """Take over the session's chunk number and latents after it was refilled or restored."""
        self.index = self.session.memory.chunk
        self.recent = RecentLatents(self.model, self.session, actions, camera)

    def take_up_prompt(self) -> None:
        if self.next_prompt is not None:
            self.runner.forget()
            switch_prompt(self.model, self.session, self.next_prompt, self.recent.parts)
            self.next_prompt = None
