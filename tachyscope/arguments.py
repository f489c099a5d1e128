"""What callers hand in, checked and brought to one form before any work begins."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tachyscope.bounds import ASKED, check
from tachyscope.calibration import Calibration
from tachyscope.errors import TachyscopeError, shown, warn
from tachyscope.models.atrium.camera import START, place
from tachyscope.models.base import VideoModel
from tachyscope.models.checkpoint import read_tensors
from tachyscope.plan import Plan, replaced
from tachyscope.replay.input import Input
from tachyscope.replay.neurons import NeuronReplay
from tachyscope.types import Shape
from tachyscope.worlds.atrium import NEAR

if TYPE_CHECKING:
    from PIL.Image import Image

    # letters with counts, or one letter or index a frame
    Actions = str | Sequence[str] | Sequence[int] | np.ndarray | Tensor
    # HEIGHTxWIDTH, or the two numbers
    PixelSize = str | tuple[int, int] | Sequence[int]
    # a file, or pictures: uint8 or floats from 0 to 1, [F, H, W, 3] or [H, W, 3]
    Pictures = str | os.PathLike[str] | Image | Sequence[Image] | np.ndarray | Tensor
    # x, y and degrees; in a batch a list of them
    Start = Sequence[float] | Sequence[Sequence[float]]
    # a file, or [draws, latent frames, C, h, w]
    Noise = str | os.PathLike[str] | np.ndarray | Tensor


def check_model(model: Any) -> VideoModel:
    load = f"tachyscope.load({model!r})" if isinstance(model, str) else "tachyscope.load(NAME)"
    return VideoModel.narrow(model, f"model must be a loaded model, got {_told(model)}: use {load}")


def check_whole(name: str, value: Any, what: str = "") -> int:
    """A whole number within the bound of that name; Python's, NumPy's or a tensor of one."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TachyscopeError(
            f"{what or f'`{name}`'} must be a whole number {ASKED[name]}, got {_told(value)}"
        )
    return check(name, number, what)


def check_prompt(prompt: Any, name: str = "prompt") -> str:
    if not isinstance(prompt, str):
        raise TachyscopeError(
            f"{name} must be text, got {_told(prompt)}: give one string, '' for no prompt"
        )
    return prompt


def check_changes(then: Any) -> list[tuple[int, str]]:
    """Changes of prompt, (frame, prompt) each."""
    changes = []
    for change in _items(then, "then", "(frame, prompt) pairs", "[(24, 'a blue room')]"):
        if not isinstance(change, tuple | list) or len(change) != 2:
            raise TachyscopeError(
                f"then must be (frame, prompt) pairs, got {_told(change)}: "
                f"try [(24, 'a blue room')]"
            )
        frame = check_whole("frames", change[0], "a frame of `then`")
        changes.append((frame, check_prompt(change[1], "a prompt of then")))
    return changes


def parse_change(text: str) -> tuple[int, str]:
    """`24: a blue room`: a frame, and the prompt from there on."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*:(.*)", text, re.DOTALL)
    if match is None:
        raise TachyscopeError(
            f"a change of prompt is FRAME: PROMPT, got {shown(text)}: try '24: a blue room'"
        )
    return int(match[1]), match[2].strip()


def parse_prompt_files(words: Sequence[str]) -> tuple[str | None, list[tuple[int, str]]]:
    """`a.safetensors` and `24: b.safetensors`: the file a video begins with, and later ones."""
    later = [parse_change(word) for word in words if re.match(r"\s*\d{1,9}\s*:", word)]
    first = [word for word in words if not re.match(r"\s*\d{1,9}\s*:", word)]
    if len(first) > 1 or (later and not first):
        raise TachyscopeError(
            f"a video begins with one prompt file, got {' and '.join(first) or 'none'}: give FILE "
            f"once, and 'FRAME: FILE' where another prompt begins"
        )
    return (first[0] if first else None), later


def parse_plan(model: VideoModel, plan: Plan | str) -> Plan:
    """A plan as the model means it; what its changes undo of its base is warned of."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str):
        raise TachyscopeError(
            f"plan must be text or a Plan, got {_told(plan)}: try 'fast', or "
            f"'fast cache=bank:resident=12f'"
        )
    for line in replaced(plan, model.kind, model.stock):
        warn(f"plan {shown(plan)}: {line}")
    return Plan.parse(plan, model.kind, model.stock)


def parse_calibration(model: VideoModel, plan: Plan) -> Calibration | None:
    """The calibration that a plan's replay needs: the file it names, or the model's own."""
    policy = plan.replay
    if isinstance(policy, NeuronReplay):
        needed = policy.share > 0
    else:
        needed = isinstance(policy, Input) and policy.share is None and policy.threshold is None
    if not needed:
        return None
    assert isinstance(policy, NeuronReplay | Input)
    path = model.calibration if policy.file is None else Path(policy.file)
    return None if path is None else Calibration.of(read_tensors(path), str(path))


def parse_camera(
    model: VideoModel, start: Start | None, pace: float | None, batch: int | None
) -> Tensor | None:
    """Where every video's camera stands at first, and its pace; None in a model without one."""
    if not model.camera:
        given = [name for name, x in {"start": start, "pace": pace}.items() if x is not None]
        if given:
            raise TachyscopeError(
                f"{model.name} is not told where its camera stands, got `{given[0]}`: leave it out"
            )
        return None
    starts: list[Any] = [START] * (batch or 1)
    if start is not None:
        starts = [start] if batch is None else _items(start, "start", "one a video", "[(x, y, 0)]")
    if len(starts) != (batch or 1):
        raise TachyscopeError(
            f"`start` of a batch is a list of each video's, here {batch}, got {len(starts)}: give "
            f"as many"
        )
    low, high = NEAR, 1 - NEAR
    for each in starts:
        right = isinstance(each, list | tuple) and len(each) == 3 and all(map(_is_number, each))
        if not (right and low <= each[0] <= high and low <= each[1] <= high):
            raise TachyscopeError(
                f"`start` is (x, y, degrees) with x and y from {low} to {high}, got "
                f"{_told(each)}: try {START}"
            )
    pace = 1.0 if pace is None else check("pace", pace)
    return place(starts, pace, model.device)


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)


def parse_size(size: PixelSize | None) -> tuple[int, int] | None:
    """(height, width) of `480x832` or of two numbers; None for the model's own."""
    if size is None:
        return None
    if isinstance(size, str):
        match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", size)
        if match is None:
            raise TachyscopeError(f"`size` is HEIGHTxWIDTH, got {shown(size)}: try 480x832")
        return int(match[1]), int(match[2])
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise TachyscopeError(
            f"size is (height, width) or 'HEIGHTxWIDTH', got {_told(size)}: try (480, 832)"
        )
    height, width = size
    return (
        check_whole("height", height, "the height of `size`"),
        check_whole("width", width, "the width of `size`"),
    )


def parse_actions(actions: Actions, letters: str, frames: int) -> list[int]:
    """One action a frame, as indices into the model's letters; frames beyond the last one stay.

    Text has letters, repeated by `*` (`w*20 a*24`); a list, array or tensor one letter or index a
    frame.
    """
    if isinstance(actions, str):
        moves = _moves_of_text(actions, letters, frames)
    else:
        given = _items(actions, "actions", "text, or a list of letters or indices", "'w*20 a*24'")
        if given and not letters:
            raise TachyscopeError(
                f"this model takes no actions, got {_told(given[0])}: leave them out"
            )
        _check_count(len(given), frames)
        moves = [_move(action, letters) for action in given]
    return moves + [0] * (frames - len(moves))


def _check_count(actions: int, frames: int) -> None:
    if actions > frames:
        raise TachyscopeError(
            f"`actions` are given for {actions} frames, but only {frames} are made: raise "
            f"`frames` or shorten the actions"
        )


def _moves_of_text(text: str, letters: str, frames: int) -> list[int]:
    runs: list[tuple[int, int]] = []
    for word in text.split():
        match = re.fullmatch(r"(\S)(?:\*(\d{1,6}))?", word)
        if not letters:
            raise TachyscopeError(f"this model takes no actions, got {shown(word)}: leave them out")
        if match is None or match[1] not in letters:
            raise TachyscopeError(
                f"`actions`: this model takes letters of {letters!r}, each with *count, got "
                f"{shown(word)}: try {letters[:2][-1]}*20"
            )
        runs.append((letters.index(match[1]), int(match[2] or 1)))
    _check_count(sum(count for _, count in runs), frames)
    return [action for action, count in runs for _ in range(count)]


def _move(action: Any, letters: str) -> int:
    if isinstance(action, str) and len(action) == 1 and action in letters:
        return letters.index(action)
    try:
        index = -1 if isinstance(action, str | bool | np.bool_) else operator.index(action)
    except TypeError:
        index = -1
    if not 0 <= index < len(letters):
        raise TachyscopeError(
            f"`actions`: this model takes one letter of {letters!r} a frame, or its index from 0 "
            f"to {len(letters) - 1}, got {_told(action)}: give one of these"
        )
    return index


def parse_first(first: Pictures) -> np.ndarray:
    """Given pictures as uint8 [F, H, W, 3].

    A path of an image or a video, one PIL image or a list of them, an array or a tensor: uint8, or
    floats from 0 to 1; [F, H, W, 3], or [H, W, 3] for one.
    """
    if isinstance(first, str | os.PathLike):
        # PyAV is not loaded where no file is read
        from tachyscope.video import read_frames

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
            f"first must be a path, PIL images, an array or a tensor, got {_told(first)}: give "
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


def check_first_size(model: VideoModel, frames: np.ndarray, size: tuple[int, int] | None) -> None:
    """Raise where given pictures are not of the video's size."""
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


def parse_noise(noise: Noise, model: VideoModel, shape: Shape) -> Tensor:
    """Given noise as a tensor of floats [draws, latent frames, C, h, w].

    A path is that of a file with a tensor `noise`.
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
        tensor = torch.from_numpy(noise)
    elif isinstance(noise, Tensor):
        tensor = noise
    else:
        raise TachyscopeError(
            f"`noise` must be a path, or an array or a tensor of floats, got {_told(noise)}"
        )
    one, channels, _, *grid = model.latent_size(shape, 1)
    wanted = f"[1 to {model.draws}, latent frames, {channels}, {grid[0]}, {grid[1]}]"
    fits = tensor.dim() == 5 and [*tensor.shape[2:]] == [channels, *grid] and one == 1
    if not fits or not 1 <= len(tensor) <= model.draws or not tensor.is_floating_point():
        raise TachyscopeError(
            f"`noise` must be floats {wanted}, got {_told(tensor)}: the first dimension counts the "
            f"draws of a chunk"
        )
    if not bool(tensor.isfinite().all()):
        raise TachyscopeError("`noise` must be finite, this has NaN or infinity: draw it again")
    return tensor


def check_noise(noise: Tensor | None, frames: int) -> None:
    """Raise where noise does not last for so many latent frames."""
    if noise is not None and noise.shape[1] < frames:
        raise TachyscopeError(
            f"`noise` must be for the {frames} latent frames to be made, got {noise.shape[1]}: "
            f"give more, or take fewer `frames`"
        )


def _is_pil(x: Any) -> bool:
    return hasattr(x, "mode") and hasattr(x, "convert") and hasattr(x, "getbands")


def _from_pil(images: Sequence[Any]) -> np.ndarray:
    if not images:
        raise TachyscopeError("first must hold one picture or more, got none: leave first out")
    for image in images:
        if not _is_pil(image):
            raise TachyscopeError(
                f"first as a list holds PIL images, got {_told(image)}: stack arrays to one, "
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
    """What is wrong with the shape of pictures, `given` as they came and `shape` with frames."""
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


def _items(given: Any, name: str, allowed: str, example: str) -> list[Any]:
    """The items of a list, a tuple, or an array or tensor of one dimension."""
    if isinstance(given, np.ndarray | Tensor):
        if given.ndim != 1:
            shape = list(given.shape)
            raise TachyscopeError(f"{name} has one dimension, got {shape}: flatten it")
        items: list[Any] = given.tolist()
        return items
    if not isinstance(given, list | tuple):
        raise TachyscopeError(f"{name} must be {allowed}, got {_told(given)}: try {example}")
    return list(given)


def _told(value: Any) -> str:
    """What was given, short enough for one line."""
    if isinstance(value, np.ndarray | Tensor):
        return f"{type(value).__name__} of {value.dtype} {list(value.shape)}"
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"  # Python does not spell out the longest
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"
