"""Opens a stream: parses a request, allocates the cache, prefills prompt and given frames."""

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
    """Open a stream: the prompt is read, and the next `step` makes the first new chunk.

    `frames` is the number of new frames, if it is known. `size` is (height, width) or
    "HEIGHTxWIDTH". `first` are frames that the video continues: a path, PIL images, or uint8 or
    floats from 0 to 1 as [F, H, W, 3]; `first_actions` are the actions that led to each of them, in
    the forms that `rollout` takes. `noise` replaces the seed's, for models that start from noise: a
    tensor [draws, latent frames, C, h, w], or the path of a file with such a tensor `noise`. Each
    generated latent frame takes the next one. Draw 0 is what a chunk starts from; the other draws
    are added before its later passes, and come from the seed if they are not given.

    `video` is a source video to follow (video-to-video), one chunk behind it: each chunk starts
    from the source's next frames, encoded and noised to the level `strength` (over 0 to 1; default
    0.6), and runs the passes below that level. At 1 nothing of the source is left. It is the path
    of a file or a camera (`/dev/video0`), whose frames are center-cropped, scaled, and taken at the
    model's frame rate; an array; or an iterator of frames uint8 [H, W, 3] of the video's size. If
    `first` is given, the video continues from there.

    `observers` get a callback for every event of the session. With a torch.distributed `mesh` its
    ranks make one stream: all make the same calls and get the same chunks.

    A model with a camera takes `start`, the camera's position before the first frame (x and y in
    sides of the room, and degrees to the left of the front wall; default the middle and 0), and
    `pace`, the part of a step that a frame takes: the default 1 is 15 degrees of a turn or a
    twentieth of the room's side.

    If `prompt` or `seed` is a list, one video is made for each item, all in the same passes, with
    the same actions; `first` and `start` are then lists too. A video of a batch equals the video
    made alone, except for rounding where a kernel sums in another order for more rows.
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
    """`open` of a request; its `actions` are left to the caller that advances the stream."""
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
                    # by the source's encoder, which continues after them
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
                f"tachyscope fit shows what fits"
            ) from fault
        memory = session.memory
        memory.noise = video.noise
        keys = read.key, first_key(*video.pictures), noise_key(video.noise)
        memory.source = Source(model.fingerprint, *keys, model.decoder_name)
        memory.features.image, memory.features.seen = image, seen
        model.prefill_prompt(session, read.encoded)
        if camera is None and session.wants_poses:
            world = model.known_world()
            camera = world.at([world.START] * shape.batch, 1.0, model.device)
        if camera is not None:
            memory.features.camera = camera.clone()
        if ranks is not None:
            agree_on_session(session, ranks)
        if given is not None:
            prefill(model, session, by_chunk(model, given, shape.chunk, moves, camera))
        session.meter.take()
        return Stream(model, session, moves, video.batch, camera, source)
