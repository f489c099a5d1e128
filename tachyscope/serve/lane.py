"""A stream whose steps are those of an action log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tachyscope.core.given import give
from tachyscope.core.live_frames import LiveFrames
from tachyscope.core.observers import Observer
from tachyscope.core.opening import open as open_stream
from tachyscope.core.types import Chunk
from tachyscope.models.atrium.world import TURN
from tachyscope.models.base import VideoModel
from tachyscope.models.registry import MODELS
from tachyscope.serve.action_log import ActionLog, Step
from tachyscope.serve.picture import read_picture
from tachyscope.serve.walls import visit_of

# a full turn, then to and fro: a window of 21 frames has then forgotten the other walls
LOOK = TURN * "q" + "wwss"
TOUR = TURN * "q"  # made then, unless keys come: every wall again, by memory
QUARTER = 90


class Lane:
    """One stream of a session: its own (main), or that of the plan beside."""

    def __init__(
        self,
        model: VideoModel,
        log: ActionLog,
        prompt: str,
        plan: str,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`prompt` is the one of the chunk where it begins."""
        self.log, opening = log, log.opening
        options: dict[str, Any] = {"prompt": prompt}
        if opening.image:
            options["first"] = read_picture(opening.image, model.size)
        if opening.world is not None:
            visit = visit_of(log, ())
            options = {"prompt": prompt or visit.prompt, "first": visit.frames(0, 1)}
            if model.camera:
                options["start"] = visit.view
        self.camera: LiveFrames | None = None
        if opening.strength:
            self.camera = LiveFrames(2 * model.pixel_frames(model.shape().chunk))
            options |= {"video": self.camera, "strength": opening.strength}
        self.prompt = options["prompt"]
        self.stream = open_stream(model, plan, seed=opening.seed, observers=observers, **options)
        self.chunk = 0
        self._given = self.stream.session.memory.latent_frame

    @property
    def frames(self) -> int:
        """Frames made so far: by the steps done, since a change of prompt lets a session forget."""
        model, made = self.stream.model, self.chunk * self.stream.session.shape.chunk
        return model.pixel_frames(self._given + made) - model.pixel_frames(self._given)

    @property
    def fed(self) -> bool:
        """Whether the camera that it follows gave the next chunk's frames; True without one."""
        return self.camera is None or len(self.camera) >= self.stream.next_frames

    @property
    def gives(self) -> bool:
        """Whether the last step's frames were the world's true ones."""
        return self.chunk <= self.log.opening.given

    @property
    def pose(self) -> list[float] | None:
        """The camera's x, y and degrees to the left of the front wall; None without a camera."""
        camera = self.stream.session.memory.features.camera
        if camera is None:
            return None
        x, y, heading = camera[0, :3].tolist()
        return [round(x, 4), round(y, 4), round(heading * 360 / TURN % 360, 2)]

    @property
    def facing(self) -> int | None:
        """The number of the wall that the camera faces straight on, or None."""
        if self.log.opening.world is None or (pose := self.pose) is None:
            return None
        return int(pose[2] // QUARTER) if pose[2] % QUARTER == 0 else None

    def read_poses(self) -> list[list[float]] | None:
        """Where the camera had stood for the past that the last step read, by attention=pose."""
        session = self.stream.session
        bank, by_poses = session.memory.layers[0].bank, session.plan.attention.wants_poses
        if bank is None or not by_poses or session.memory.features.camera is None:
            return None
        place, pose = bank.tensors["place"][0].tolist(), bank.tensors["key"][0].tolist()
        return [_stands(pose[i]) for i in place if i >= 0]

    def step(self, step: Step, show: Callable[[np.ndarray], None] | None = None) -> Chunk:
        """The next chunk; `show` gets its frames as soon as they can be seen."""
        if step.prompt is not None:
            self.stream.set_prompt(step.prompt)
            self.prompt = step.prompt
        if self.chunk < self.log.opening.given:
            made = self._give(step)
            if show is not None:
                show(made.frames)
        else:
            made = self.stream.step(list(step.actions) or None, show)
        self.chunk += 1
        return made

    def _give(self, step: Step) -> Chunk:
        """Give the model the world's true frame of a step."""
        walked = [*self.log.steps[: self.chunk], step]
        pictures = visit_of(self.log, walked).frames(len(walked), len(walked) + 1)
        return give(self.stream, pictures, step.actions)

    def restore(self, state: Mapping[str, Tensor], chunk: int) -> None:
        """Restore a snapshot that was taken after `chunk` steps."""
        self.stream.restore(state)
        self.chunk = chunk

    def dense_bytes(self) -> int:
        """Keys and values of all that was seen, as the dense model would hold them."""
        session = self.stream.session
        shape = session.shape
        entry = 2 * shape.kv_heads * shape.head_dim * session.dtype.itemsize
        return shape.layers * shape.batch * session.memory.total_entries * entry

    def close(self) -> None:
        self.stream.close()


def can_look(name: str) -> bool:
    """Whether a model can be given true frames first: a numbered world, one step a chunk."""
    entry = MODELS[name]
    return bool(entry.world) and entry.kind == "chunks" and entry.pace == 1


def _stands(matrix: Sequence[float]) -> list[float]:
    """A camera-to-world matrix of 12 numbers as x, y and degrees."""
    angle = math.degrees(math.atan2(matrix[4], matrix[0]))
    return [round(matrix[3], 4), round(matrix[7], 4), round(angle % 360, 2)]
