"""Parses given first frames: paths, PIL images, arrays and tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.models.base import VideoModel

if TYPE_CHECKING:
    from PIL.Image import Image

    # a file, or pictures: uint8 or floats from 0 to 1, [F, H, W, 3] or [H, W, 3]
    Pictures = str | os.PathLike[str] | Image | Sequence[Image] | np.ndarray | Tensor


def parse_first(first: Any) -> np.ndarray:
    """Given pictures as uint8 [F, H, W, 3].

    A path of an image or a video, one PIL image or a list of them, an array or a tensor: uint8, or
    floats from 0 to 1; [F, H, W, 3], or [H, W, 3] for one.
    """
    if isinstance(first, str | os.PathLike):
        # PyAV is not loaded where no file is read
        from tachyscope.io.video import read_frames

        return read_frames(first)
    if _is_pil(first):
        return _from_pil([first])
    if isinstance(first, list | tuple):
        return _from_pil(first)
    if isinstance(first, Tensor):
        # NumPy has no bfloat16
        first = (first.float() if first.is_floating_point() else first).detach().cpu().numpy()
    if not isinstance(first, np.ndarray):
        raise TachyscopeError(
            f"first must be a path, PIL images, an array or a tensor, got {shown(first)}: give "
            f"uint8 [F, H, W, 3]"
        )
    frames = first[None] if first.ndim == 3 else first
    if problem := _layout_problem(first.shape, frames.shape):
        raise TachyscopeError(f"first must be [F, H, W, 3], got {list(first.shape)}: {problem}")
    if frames.dtype == np.uint8:
        return np.ascontiguousarray(frames)
    if not np.issubdtype(frames.dtype, np.floating):
        raise TachyscopeError(
            f"first must be uint8, or floats from 0 to 1, got {frames.dtype}: convert it to uint8"
        )
    if not np.isfinite(frames).all():
        raise TachyscopeError("first must be finite, it has NaN or infinity: mend the pictures")
    low, high = float(frames.min()), float(frames.max())
    if low < 0 or high > 1:
        hint = "(x + 1) / 2" if low >= -1 and high <= 1 else "x / 255"
        raise TachyscopeError(
            f"first as floats must be from 0 to 1, got {low:.4g} to {high:.4g}: scale it, here "
            f"probably by {hint}"
        )
    return np.ascontiguousarray((frames * 255).round().astype(np.uint8))


def parse_firsts(first: Any, batch: int | None) -> list[np.ndarray]:
    """The first frames of every video of a batch; an empty list if there are none."""
    if first is None:
        return []
    if batch is None:
        return [parse_first(first)]
    listed = isinstance(first, list | tuple) or getattr(first, "ndim", 0) > 0
    count = len(first) if listed else 1
    if not listed or count != batch:
        raise TachyscopeError(
            f"`first` of a batch is a list of each video's frames, here {batch}, got {count}: "
            f"give as many"
        )
    firsts = [parse_first(each) for each in first]
    if len({x.shape for x in firsts}) > 1:
        raise TachyscopeError(
            f"first frames of a batch have one size and number, got "
            f"{', '.join(str(list(x.shape)) for x in firsts)}: cut them alike"
        )
    return firsts


def check_first_size(model: VideoModel, frames: np.ndarray, size: tuple[int, int] | None) -> None:
    """Raise unless given frames have the video's size."""
    height, width = frames.shape[1:3]
    wanted = size or model.size
    if (height, width) == wanted:
        return
    makes = "this model makes" if size is None else "size is"
    resize = f"resize them, in PIL by image.resize(({wanted[1]}, {wanted[0]}))"
    try:
        model.shape((height, width))
    except TachyscopeError:
        other = ""
    else:
        other = f", or set `size` to {height}x{width}"
    raise TachyscopeError(
        f"first frames are {height}x{width} (height x width), {makes} {wanted[0]}x{wanted[1]}: "
        f"{resize}{other}"
    )


def _is_pil(x: Any) -> bool:
    return hasattr(x, "mode") and hasattr(x, "convert") and hasattr(x, "getbands")


def _from_pil(images: Sequence[Any]) -> np.ndarray:
    if not images:
        raise TachyscopeError("first must hold one picture or more, got none: leave first out")
    for image in images:
        if not _is_pil(image):
            raise TachyscopeError(
                f"first as a list holds PIL images, got {shown(image)}: stack arrays to one, "
                f"[F, H, W, 3]"
            )
        if image.mode != "RGB":
            raise TachyscopeError(
                f"first must be RGB, got a PIL image of mode {image.mode}: use image.convert('RGB')"
            )
    sizes = {f"{image.height}x{image.width}" for image in images}
    if len(sizes) > 1:
        raise TachyscopeError(
            f"first frames share one size, got {' and '.join(sorted(sizes))}: resize them"
        )
    return np.stack([np.asarray(image, np.uint8) for image in images])


def _layout_problem(given: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """What is wrong with the shape of frames: `given`, and `shape` with a frame dimension."""
    if len(given) == 2:
        return "a gray picture: repeat it, np.stack([x] * 3, -1)"
    if len(shape) != 4:
        return "give [F, H, W, 3], or [H, W, 3] for one picture"
    if 0 in shape:
        return "it is empty: give one picture or more, or leave first out"
    if shape[-1] == 3:
        return ""
    if shape[1] == 3:
        return "channels must come last: use np.moveaxis(x, -3, -1)"
    if shape[-1] == 4:
        return "drop the transparency: x[..., :3]"
    if shape[-1] == 1:
        return "gray pictures: repeat them, np.repeat(x, 3, -1)"
    return "give three channels, red, green and blue, in the last place"
