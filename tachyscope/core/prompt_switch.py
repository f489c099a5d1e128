"""Changes the prompt within a video: the newest latents are prefilled again under the new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tachyscope.core.prefill import Part, Prompt, by_chunk, prefill, refill
from tachyscope.core.session import Session
from tachyscope.models.base import VideoModel
from tachyscope.snapshot.format import AGAIN, MAX_COUNT, check_tensor, refuse


class RecentLatents:
    """A session's newest latents by chunks, as many as its cache has room for."""

    def __init__(
        self,
        model: VideoModel,
        session: Session,
        actions: Sequence[int] = (),
        camera: Tensor | None = None,
    ) -> None:
        """Starts with the session's latents; `actions`, one per pixel frame, led to them.

        `camera` is its position before them; if unknown, its present position is taken.
        """
        self.model, self.session = model, session
        self.parts: list[Part] = []
        if session.memory.latents is not None:
            count = model.pixel_frames(session.memory.latents.shape[model.frame_dim])
            moves = [*actions, *[0] * (count - len(actions))]
            stood = session.memory.features.camera if camera is None else camera
            self.add(by_chunk(model, session.memory.latents, session.shape.chunk, moves, stood))

    def add(self, parts: Sequence[Part]) -> None:
        session, shape = self.session, self.session.shape
        self.parts += parts
        if session.memory.room is not None:
            room = session.memory.room + shape.max_pass_tokens - session.memory.prompt
            most = room // shape.tokens_per_frame // shape.chunk
            del self.parts[: max(0, len(self.parts) - most)]

    def tensors(self, chunk: int) -> dict[str, Tensor]:
        """Tensors for a state: these latents, and the next chunk's number."""
        tensors = {"chunk": torch.tensor(chunk)}
        if not self.parts:
            return tensors
        dim = self.model.frame_dim
        cameras = [part.camera for part in self.parts if part.camera is not None]
        if cameras:
            tensors["cameras"] = torch.stack(cameras)
        actions = [action for part in self.parts for action in part.actions]
        return tensors | {
            "held": torch.cat([part.latents for part in self.parts], dim),
            "sizes": torch.tensor([part.latents.shape[dim] for part in self.parts]),
            "actions": torch.tensor(actions, dtype=torch.int64),
        }


def read_recent(
    model: VideoModel, session: Session, tensors: Mapping[str, Tensor]
) -> tuple[int, list[Part]] | None:
    """The next chunk's number and the recent latents of a state; None if a session saved it.

    Raises unless the tensors are as `RecentLatents.tensors` makes them.
    """
    if "chunk" not in tensors:
        return None
    check_tensor(tensors, "chunk", torch.tensor(0), (0, MAX_COUNT))
    chunk = int(tensors["chunk"])
    if "held" not in tensors:
        return chunk, []
    held, sizes = tensors["held"], tensors.get("sizes", torch.zeros(0))
    whole = sizes.dtype == torch.int64 and sizes.dim() == 1 and len(sizes)
    if not whole or int(sizes.min()) < 1 or int(sizes.max()) > session.shape.chunk:
        refuse("has no lengths of the chunks that it holds", AGAIN)
    model.check_latents(session.shape, held)
    count = int(sizes.sum())
    if held.shape[model.frame_dim] != count:
        refuse(f"holds {held.shape[model.frame_dim]} latent frames instead of {count}", AGAIN)
    actions = torch.zeros(count if model.actions else 0, dtype=torch.int64)
    check_tensor(tensors, "actions", actions, (0, max(0, len(model.actions) - 1)))
    cameras: list[Tensor | None] = [None] * len(sizes)
    if (camera := session.memory.features.camera) is not None:
        check_tensor(tensors, "cameras", camera.new_zeros(len(sizes), *camera.shape), (0, 0))
        cameras = list(tensors["cameras"].to(session.device, copy=True))
    lengths = sizes.tolist()
    latents = held.to(session.device, copy=True).split(lengths, model.frame_dim)
    moves = tensors["actions"].split(lengths if model.actions else [0] * len(lengths))
    return chunk, [
        Part(part, one.tolist(), stood)
        for part, one, stood in zip(latents, moves, cameras, strict=True)
    ]


def switch_prompt(
    model: VideoModel, session: Session, prompt: Prompt, recent: Sequence[Part]
) -> None:
    """Change the prompt, and prefill the newest latents again under it."""
    again = model.rewind(session, [part.latents for part in recent]) if recent else None
    if again is None:
        decoders = session.memory.features.decoders
        refill(model, session, prompt, recent, shown=True)
        session.memory.features.decoders = decoders  # decoding continues without a cut
        return
    session.memory.source = replace(session.memory.source, prompt=prompt.key)
    model.prefill_prompt(session, prompt.encoded)
    if again.shape[model.frame_dim]:
        prefill(model, session, [Part(again, [])], shown=True)
    session.meter.take()
