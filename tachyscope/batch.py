"""Several videos made at once: their prompts, seeds and first frames."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from tachyscope.arguments import check_prompt, check_whole, parse_first
from tachyscope.errors import TachyscopeError
from tachyscope.models.base import VideoModel
from tachyscope.types import Shape

if TYPE_CHECKING:
    from tachyscope.arguments import Noise


def parse_batch(prompt: Any, seed: Any) -> tuple[list[str], list[int], int | None]:
    """Every video's prompt and seed, and how many videos a list was given for; None without one."""
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


def parse_firsts(first: Any, batch: int | None) -> list[np.ndarray]:
    """Every video's first frames; none where none are given."""
    if first is None:
        return []
    if batch is None:
        return [parse_first(first)]
    if isinstance(first, str | PathLike) or len(first) != batch:
        raise TachyscopeError(
            f"`first` of a batch is a list of each video's frames, here {batch}, got "
            f"{1 if isinstance(first, str | PathLike) else len(first)}: give as many"
        )
    firsts = [parse_first(each) for each in first]
    if len({x.shape for x in firsts}) > 1:
        raise TachyscopeError(
            f"first frames of a batch have one size and number, got "
            f"{', '.join(str(list(x.shape)) for x in firsts)}: cut them alike"
        )
    return firsts


def batched_shape(model: VideoModel, shape: Shape, batch: int, noise: Noise | None) -> Shape:
    """The shape of so many videos made at once."""
    if not model.overlaps_decode and batch > 1:
        raise TachyscopeError(
            f"{model.name} encodes its own frames again and makes one video at a time, got "
            f"{batch}: open a stream for each"
        )
    if noise is not None:
        raise TachyscopeError("`noise` is for one video, got it for a batch: give seeds instead")
    return replace(shape, batch=shape.batch * batch)
