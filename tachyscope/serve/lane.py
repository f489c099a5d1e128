"""A stream that goes along an action log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tachyscope.models.base import VideoModel
from tachyscope.models.registry import MODELS
from tachyscope.observers import Observer
from tachyscope.serve.action_log import Opening, Step
from tachyscope.stream import open as open_stream
from tachyscope.types import Chunk
from tachyscope.worlds.visit import Visit


class Lane:
    """One stream of a session, and how many steps of the log it has done."""

    def __init__(
        self,
        model: VideoModel,
        name: str,
        opening: Opening,
        prompt: str,
        plan: str,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`name` is the model's in the registry; `prompt` the one that holds where it begins."""
        options: dict[str, Any] = {"prompt": prompt}
        if opening.world is not None:
            entry = MODELS[name]
            visit = Visit(opening.world, [], pace=entry.pace, tempo=entry.tempo)
            options = {"prompt": prompt or visit.prompt, "first": visit.frames(0, 1)}
            if model.camera:
                options["start"] = visit.view
        self.prompt = options["prompt"]
        self.stream = open_stream(model, plan, seed=opening.seed, observers=observers, **options)
        self.chunk = 0
        self._given = self.stream.session.latent_frame

    @property
    def frames(self) -> int:
        """Frames made so far: by the steps done, since a change of prompt lets a session forget."""
        model, made = self.stream.model, self.chunk * self.stream.session.shape.chunk
        return model.pixel_frames(self._given + made) - model.pixel_frames(self._given)

    def step(self, step: Step, show: Callable[[np.ndarray], None] | None = None) -> Chunk:
        """The next chunk; `show` gets its frames as soon as they can be seen."""
        if step.prompt is not None:
            self.stream.set_prompt(step.prompt)
            self.prompt = step.prompt
        made = self.stream.step(list(step.actions) or None, show)
        self.chunk += 1
        return made

    def restore(self, state: Mapping[str, Tensor], chunk: int) -> None:
        """Stand where a snapshot was taken, after so many steps."""
        self.stream.restore(state)
        self.chunk = chunk

    def dense_bytes(self) -> int:
        """Keys and values of all that was seen, as the dense model would hold them."""
        session = self.stream.session
        shape = session.shape
        entry = 2 * shape.kv_heads * shape.head_dim * session.dtype.itemsize
        return shape.layers * shape.batch * session.total_entries * entry

    def close(self) -> None:
        self.stream.close()
