"""A request for a video: the options of callers, and the same parsed for one model."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.arguments import check_prompt, check_whole, items_of
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.limits import check
from tachyscope.core.pictures import check_first_size, parse_first, parse_firsts
from tachyscope.core.source_video import SourceVideo, comes_once, parse_video
from tachyscope.core.types import Shape
from tachyscope.models.base import VideoModel
from tachyscope.models.checkpoint import read_tensors

if TYPE_CHECKING:
    from tachyscope.core.arguments import Actions
    from tachyscope.core.pictures import Pictures
    from tachyscope.core.source_video import Video

    # HEIGHTxWIDTH, or the two numbers
    PixelSize = str | tuple[int, int] | Sequence[int]
    # x, y and degrees; in a batch a list of them
    Start = Sequence[float] | Sequence[Sequence[float]]
    # a file, or [draws, latent frames, C, h, w]
    Noise = str | os.PathLike[str] | np.ndarray | Tensor


class VideoOptions(TypedDict, total=False):
    """Keywords of a request for one video, for functions with a `frames` of their own."""

    prompt: str
    actions: Actions
    seed: int
    size: PixelSize | None
    first: Pictures | None
    first_actions: Actions
    start: Start | None
    pace: float | None
    noise: Noise | None
    video: Video | None
    strength: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoRequest:
    """What to make, but not how: the keywords of `rollout` besides plan and stream."""

    prompt: str | Sequence[str] = ""
    frames: int | None = None  # new ones; None if unknown
    actions: Actions = ""  # that lead to the new frames
    seed: int | Sequence[int] = 0
    size: PixelSize | None = None
    first: Pictures | Sequence[Pictures] | None = None
    first_actions: Actions = ""
    start: Start | None = None
    pace: float | None = None
    noise: Noise | None = None
    video: Video | None = None
    strength: float | None = None

    def one_video(self) -> VideoRequest:
        """The request with its first frames read; a batch is refused."""
        check_prompt(self.prompt)
        check_whole("seed", self.seed)
        first = None if self.first is None else parse_first(self.first)
        if comes_once(self.video):
            raise TachyscopeError(
                "every plan reads the `video` from its start, and this one comes once: give a file "
                "or an array"
            )
        return replace(self, first=first)

    def parse(self, model: VideoModel) -> ParsedRequest:
        """The request checked and parsed for a model, except for its actions."""
        size = parse_size(self.size)
        prompts, seeds, batch = parse_batch(self.prompt, self.seed)
        frames = None if self.frames is None else check_whole("frames", self.frames)
        pictures = parse_firsts(self.first, batch)
        if self.first is None and model.opening is not None:
            pictures = [model.opening] * (batch or 1)
        camera = parse_camera(model, self.start, self.pace, batch)
        shape = model.shape(size)
        for each in pictures:
            check_first_size(model, each, size)
        if batch is not None:
            shape = _batched(model, shape, batch, self.noise)
        noise = None if self.noise is None else parse_noise(self.noise, model, shape)
        if batch is not None and self.video is not None:
            raise TachyscopeError("`video` is for one video, got it for a batch: leave one out")
        source = parse_video(
            self.video, self.strength, model, size or model.size, shape.chunk, frames
        )
        return ParsedRequest(shape, prompts, seeds, batch, frames, pictures, camera, noise, source)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request parsed for one model."""

    shape: Shape  # of all its videos together
    prompts: list[str]  # one per video
    seeds: list[int]  # one per video
    batch: int | None  # how many videos; None: one, and chunks have no batch dimension
    frames: int | None
    pictures: list[np.ndarray]  # each video's first frames, uint8 [F, H, W, 3]; or none
    camera: Tensor | None
    noise: Tensor | None
    source: SourceVideo | None


def parse_batch(prompt: Any, seed: Any) -> tuple[list[str], list[int], int | None]:
    """Every video's prompt and seed, and the batch size; None if neither is a list."""
    given = {"prompt": prompt, "seed": seed}
    lists = {name: list(x) for name, x in given.items() if isinstance(x, list | tuple)}
    counts = {len(x) for x in lists.values()}
    if counts == {0} or len(counts) > 1:
        lengths = " and ".join(f"{len(x)} of `{name}`" for name, x in lists.items())
        raise TachyscopeError(
            f"a batch takes one prompt and one seed a video, got {lengths}: give as many of each"
        )
    batch = counts.pop() if counts else None
    prompts, seeds = (lists.get(name, [x] * (batch or 1)) for name, x in given.items())
    return [check_prompt(x) for x in prompts], [check_whole("seed", x) for x in seeds], batch


def _batched(model: VideoModel, shape: Shape, batch: int, noise: Noise | None) -> Shape:
    """The shape of `batch` videos made at once."""
    if not model.overlaps_decode and batch > 1:
        raise TachyscopeError(
            f"{model.name} encodes its own frames again and makes one video at a time, got "
            f"{batch}: open a stream for each"
        )
    if noise is not None:
        raise TachyscopeError("`noise` is for one video, got it for a batch: give seeds instead")
    return replace(shape, batch=shape.batch * batch)


def parse_camera(
    model: VideoModel, start: Start | None, pace: float | None, batch: int | None
) -> Tensor | None:
    """Every video's camera at its start, with its pace; None for a model without a camera."""
    if not model.camera:
        given = [name for name, x in {"start": start, "pace": pace}.items() if x is not None]
        if given:
            raise TachyscopeError(f"{model.name} has no camera, got `{given[0]}`: leave it out")
        return None
    world = model.known_world()
    starts: list[Any] = [world.START] * (batch or 1)
    if start is not None:
        starts = (
            [start] if batch is None else items_of(start, "start", "one a video", "[(x, y, 0)]")
        )
    if len(starts) != (batch or 1):
        raise TachyscopeError(
            f"`start` of a batch is a list of each video's, here {batch}, got {len(starts)}: give "
            f"as many"
        )
    low, high = world.NEAR, 1 - world.NEAR
    for each in starts:
        right = isinstance(each, list | tuple) and len(each) == 3 and all(map(_is_number, each))
        if not (right and low <= each[0] <= high and low <= each[1] <= high):
            raise TachyscopeError(
                f"`start` is (x, y, degrees) with x and y from {low} to {high}, got "
                f"{shown(each)}: try {world.START}"
            )
    pace = 1.0 if pace is None else check("pace", pace)
    return world.at(starts, pace, model.device)


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)


def parse_size(size: PixelSize | None) -> tuple[int, int] | None:
    """(height, width) from `480x832` or two numbers; None for the model's own size."""
    if size is None:
        return None
    if isinstance(size, str):
        match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", size)
        if match is None:
            raise TachyscopeError(f"`size` is HEIGHTxWIDTH, got {shown(size)}: try 480x832")
        return int(match[1]), int(match[2])
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise TachyscopeError(
            f"size is (height, width) or 'HEIGHTxWIDTH', got {shown(size)}: try (480, 832)"
        )
    height, width = size
    return (
        check_whole("height", height, "the height of `size`"),
        check_whole("width", width, "the width of `size`"),
    )


def parse_noise(noise: Noise, model: VideoModel, shape: Shape) -> Tensor:
    """Given noise as a tensor of floats [draws, latent frames, C, h, w].

    A path names a file with a tensor `noise`.
    """
    if not model.draws:
        raise TachyscopeError(
            f"{model.name} is not made from noise that could be handed in: leave `noise` out"
        )
    if isinstance(noise, str | os.PathLike):
        tensors = read_tensors(Path(noise))
        if "noise" not in tensors:
            raise TachyscopeError(
                f"{noise} must hold a tensor 'noise', it has {', '.join(sorted(tensors)[:3])}: "
                f"save it under that name"
            )
        tensor = tensors["noise"]
    elif isinstance(noise, np.ndarray) and np.issubdtype(noise.dtype, np.floating):
        # torch reads no long doubles, no other byte order and no negative strides
        kind = noise.dtype.newbyteorder("=") if noise.dtype.itemsize <= 8 else np.float64
        tensor = torch.from_numpy(np.ascontiguousarray(noise, kind))
    elif isinstance(noise, Tensor):
        tensor = noise
    else:
        raise TachyscopeError(
            f"`noise` must be a path, or an array or a tensor of floats, got {shown(noise)}"
        )
    one, channels, _, *grid = model.latent_size(shape, 1)
    wanted = f"[1 to {model.draws}, latent frames, {channels}, {grid[0]}, {grid[1]}]"
    fits = tensor.dim() == 5 and [*tensor.shape[2:]] == [channels, *grid] and one == 1
    if not fits or not 1 <= len(tensor) <= model.draws or not tensor.is_floating_point():
        raise TachyscopeError(
            f"`noise` must be floats {wanted}, got {shown(tensor)}: the first dimension counts the "
            f"draws of a chunk"
        )
    if not bool(tensor.isfinite().all()):
        raise TachyscopeError("`noise` must be finite, this has NaN or infinity: draw it again")
    return tensor


def check_noise(noise: Tensor | None, frames: int) -> None:
    """Raise if noise is given for fewer than `frames` latent frames."""
    if noise is not None and noise.shape[1] < frames:
        raise TachyscopeError(
            f"`noise` must be for the {frames} latent frames to be made, got {noise.shape[1]}: "
            f"give more, or take fewer `frames`"
        )


def chunks_for(model: VideoModel, chunk: int, start: int, frames: int) -> int:
    """The number of chunks that make `frames` more frames after `start` latent frames."""
    wanted, enough = model.pixel_frames(start) + frames, 1

    def shown_by(chunks: int) -> int:
        return model.pixel_frames(start + chunks * chunk)

    while shown_by(enough) < wanted:
        enough *= 2
    return bisect_left(range(enough), wanted, key=shown_by)
