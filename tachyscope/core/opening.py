"""A stream is opened: a request is read, the cache allocated, prompt and given frames prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tachyscope.core.arguments import (
    check_model,
    parse_actions,
    parse_calibration,
    parse_mesh,
    parse_plan,
)
from tachyscope.core.errors import TachyscopeError, is_out_of_memory
from tachyscope.core.exchange import agree_on_session
from tachyscope.core.observers import Observer, parse_observers
from tachyscope.core.plan import Plan
from tachyscope.core.prefill import Prompt, by_chunk, prefill
from tachyscope.core.request import VideoRequest, check_noise, chunks_for
from tachyscope.core.session import Session
from tachyscope.core.session_state import Source
from tachyscope.core.stream import Stream
from tachyscope.io.fingerprint import first_key, noise_key
from tachyscope.io.torch_defaults import no_autocast, own_numerics
from tachyscope.models.base import VideoModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tachyscope.core.arguments import Actions
    from tachyscope.core.pictures import Pictures
    from tachyscope.core.request import Noise, PixelSize, Start
    from tachyscope.core.source_video import Video


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
    video: Video | None = None,
    strength: float | None = None,
    observers: Observer | Sequence[Observer] = (),
    mesh: DeviceMesh | None = None,
) -> Stream:
    """A stream that has read the prompt and stands before its first new chunk.

    `frames` is how many new frames will come, where that is known. `size` is (height, width) or
    "HEIGHTxWIDTH". `first` are given frames that the video goes on from: a path, PIL images, or
    uint8 or floats from 0 to 1 as [F, H, W, 3]; `first_actions` are the actions that led to each of
    them, as `rollout` takes actions. `noise` is used instead of the seed's, where a model is made
    from noise: a tensor [draws, latent frames, C, h, w], or a path of a file that holds it as
    `noise`. Each latent frame that is generated takes the next; the first draw is what a chunk
    begins as, the others are added before its later passes, and come from the seed where they are
    not given.

    `video` is followed, a chunk behind it: each chunk begins as the next frames of it, encoded and
    brought to the noise level `strength` (over 0 to 1; 0.6 unless given), and takes the passes
    below that level. At 1 nothing of it is left. A file's path or a camera's (`/dev/video0`), which
    is cut in the middle, scaled, and taken at the model's frames a second; an array; or an iterator
    of frames uint8 [H, W, 3] of the video's size. It goes on from `first`, where that is given.

    `observers` are told of all that the session does. With a `mesh` of torch.distributed
    its ranks make one stream: all are called alike, and get the same chunks.

    A model that is told where its camera stands takes `start`, where that is before the first frame
    (x and y in sides of the room, and degrees to the left of the front wall; in the middle and 0
    unless given), and `pace`, the part of a step that a frame takes: 1, unless given, is 15 degrees
    of a turn or a twentieth of the room's side.

    Where `prompt` or `seed` is a list, one video is made of each, all in the same passes, with the
    same actions; `first` and `start` are then lists of each one's. A video of a batch is the video
    that is made alone, but for rounding where a kernel sums in another order for more rows.
    """
    request = VideoRequest(
        prompt=prompt, frames=frames, seed=seed, size=size, first=first,
        first_actions=first_actions, start=start, pace=pace, noise=noise, video=video,
        strength=strength,
    )  # fmt: skip
    return open_request(model, plan, request, observers, mesh)


def open_request(
    model: VideoModel,
    plan: Plan | str,
    request: VideoRequest,
    observers: Observer | Sequence[Observer] = (),
    mesh: DeviceMesh | None = None,
) -> Stream:
    """`open` of a request; its actions are for who advances the stream."""
    check_model(model)
    watchers = parse_observers(observers)
    parsed, video = parse_plan(model, plan), request.parse(model)
    camera, source, ranks = video.camera, video.source, parse_mesh(model, mesh)
    if ranks is not None and source is not None:
        raise TachyscopeError(
            "a `video` is followed by one process, got a mesh of ranks: leave one of them out"
        )
    shape = video.shape if ranks is None else ranks.share(video.shape)
    with torch.inference_mode(), no_autocast():
        read = Prompt.read(model, video.prompts)
        given = None
        if video.pictures:
            with own_numerics():
                if source is not None and not model.conditions:
                    # the source goes on behind them
                    given = model.encode_next(video.pictures[0], source.encoder)
                else:
                    given = torch.cat([model.encode_frames(x) for x in video.pictures])
        image = seen = None
        if model.conditions:
            given, image, seen = None, given, model.embed_images(video.pictures)
        known = 0 if given is None else given.shape[model.frame_dim]
        moves = parse_actions(request.first_actions, model.actions, model.pixel_frames(known))
        coming = None
        if video.frames is not None:
            coming = known + chunks_for(model, shape.chunk, known, video.frames) * shape.chunk
            check_noise(video.noise, coming - known)
        try:
            session = Session(
                shape,
                parsed,
                model.rope(shape),
                latent_frames=coming,
                lengths=read.encoded.lengths,
                seed=video.seeds,
                device=model.device,
                dtype=model.dtype,
                observers=watchers,
                calibration=parse_calibration(model, parsed),
                ranks=ranks,
            )
        except RuntimeError as fault:
            if not is_out_of_memory(fault):
                raise
            raise TachyscopeError(
                f"the memory of {model.device} does not hold the cache of {parsed}: give it a "
                f"budget, for example cache=merge:budget=21f, or take a smaller size; "
                f"tachyscope fit tells what fits"
            ) from fault
        session.memory.noise = video.noise
        keys = read.key, first_key(*video.pictures), noise_key(video.noise)
        session.memory.source = Source(model.fingerprint, *keys, model.decoder_name)
        session.memory.features.image, session.memory.features.seen = image, seen
        model.prefill_prompt(session, read.encoded)
        if camera is None and session.wants_poses:
            world = model.known_world()
            camera = world.at([world.START] * shape.batch, 1.0, model.device)
        if camera is not None:
            session.memory.features.camera = camera.clone()
        if ranks is not None:
            agree_on_session(session, ranks)
        if given is not None:
            prefill(model, session, by_chunk(model, given, shape.chunk, moves, camera))
        session.meter.take()
        return Stream(model, session, moves, video.batch, camera, source)
