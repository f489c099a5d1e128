"""Frames that a user gives in the middle of a video, instead of generated ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tachyscope.core.arguments import parse_actions
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.kv_allocation import cache_stats
from tachyscope.core.prefill import Part, prefill
from tachyscope.core.stream import Stream
from tachyscope.core.types import Chunk
from tachyscope.io.torch_defaults import no_autocast, own_numerics

if TYPE_CHECKING:
    from tachyscope.core.arguments import Actions


@torch.inference_mode()
@no_autocast()
def give(stream: Stream, pictures: np.ndarray, actions: Actions = "") -> Chunk:
    """Append a chunk of given frames, uint8 [F, H, W, 3], to a stream's video.

    `actions` are as in `rollout`. Frames given chunk by chunk fill the cache exactly as those that
    `open` gets at once. Only for models that encode each frame by itself, and for single videos.
    """
    model, session = stream.model, stream.session
    frames = stream.next_frames
    if frames != session.shape.chunk or stream.batch is not None:
        raise TachyscopeError(
            f"{model.name} encodes several frames together, or makes a batch: give frames to open"
        )
    if len(pictures) != frames:
        raise TachyscopeError(f"a chunk has {frames} frames, got {len(pictures)}: give these")
    moves = parse_actions(actions, model.actions, frames)

    def work() -> Chunk:
        stream.take_up_prompt()
        with own_numerics():
            latents = model.encode_frames(pictures).to(model.device)
        camera = session.memory.features.camera
        part = Part(latents, moves, None if camera is None else camera.clone())
        prefill(model, session, [part])
        stream.recent.add([part])
        held = cache_stats(
            session.memory.layers, session.memory.past, session.shape.max_pass_tokens
        )
        stream.index += 1
        return Chunk(stream.index - 1, pictures, session.meter.take() | held)

    return stream._advance(work)
