"""Fill a session's cache with random entries, for timing at a length of video."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.core.kv_allocation import check_memory
from tachyscope.core.session import Session
from tachyscope.models.atrium import camera
from tachyscope.models.atrium.world import TURN


@torch.inference_mode()
def fill(session: Session, frames: int) -> None:
    """Fill a session's cache with random keys and values, up to `frames` latent frames in all.

    A chunk's time depends on the number of entries, not on their values.
    """
    shape, dtype, device = session.shape, session.dtype, session.device
    if session.plan.cache.grows:
        slots = session.memory.prompt + frames * shape.tokens_per_frame
        check_memory(session.plan, shape, slots, dtype, device)
    rng = torch.Generator(device).manual_seed(session.memory.seeds[0] + session.memory.latent_frame)

    def draw(heads: int, tokens: int) -> Tensor:
        size = (shape.batch, heads, tokens, shape.head_dim)
        return torch.randn(size, generator=rng, dtype=dtype, device=device)

    while session.memory.latent_frame < frames:
        if session.wants_poses:
            poses = torch.rand(shape.batch, shape.chunk, 3, generator=rng, device=device)
            session.set_poses(camera.matrices(poses * poses.new_tensor((1, 1, TURN))))
        pos = shape.positions(session.memory.latent_frame, shape.chunk, device)
        session.begin(pos, shape.passes - 1, shape.passes, (0.0,) * shape.chunk)
        for i in range(shape.layers):
            q, k, v = (draw(h, len(pos)) for h in (shape.heads, *[shape.kv_heads] * 2))
            session.write_kv(i, q, k, v)
        session.commit()
    session.memory.made = frames  # the chunk that is timed next is not a video's first
    session.meter.take()
