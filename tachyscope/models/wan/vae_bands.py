"""Decode Wan's VAE in bands of rows: the same frames with a fraction of the working memory.

A 3 by 3 convolution keeps the last two rows of its input, as it keeps frames, and its output is one
row late: no row is computed twice, and none is blended. Every stage has the same number of bands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# diffusers' mark of a time convolution that has had the first frame alone
REPEAT = "Rep"
FRAMES = 2  # frames that a causal convolution keeps
Seen = list[Any]  # the kept frames of each causal convolution, None or REPEAT


class Rows:
    """A queue of rows [..., H, W] between two stages, from the top of the frame down."""

    def __init__(self, rows: int = 0) -> None:
        self.parts: deque[Tensor] = deque()
        self.count, self.band, self.ended = 0, rows, False

    def put(self, x: Tensor | None, last: bool = False) -> None:
        self.ended = last
        if x is not None:
            self.parts.append(x)
            self.count += x.shape[-2]

    @property
    def ready(self) -> bool:
        """Whether it has a band, or the last rows of the frame."""
        return self.count >= self.band or (self.ended and self.count > 0)

    def next_band(self) -> Tensor:
        parts = [*self.take(min(self.band, self.count))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def take(self, rows: int) -> Iterator[Tensor]:
        """The next rows, in parts."""
        self.count -= rows
        while rows:
            part = self.parts.popleft()
            if part.shape[-2] > rows:
                # not a view, which would keep the whole part
                self.parts.appendleft(part[..., rows:, :].clone())
                part = part[..., :rows, :]
            rows -= part.shape[-2]
            yield part

    def add_to(self, x: Tensor) -> Tensor:
        """Add the next rows to x in place."""
        row = 0
        for part in self.take(x.shape[-2]):
            x[..., row : row + part.shape[-2], :] += part
            row += part.shape[-2]
        return x


class Halo:
    """Pads bands by their neighbouring rows; zeros are above and below the frame."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def around(self, x: Tensor, last: bool) -> Tensor | None:
        """The rows that have both neighbours, with a row more on each side; None if none has."""
        edge = torch.zeros_like(x[..., :1, :])
        above = edge if self.kept is None else self.kept
        x = torch.cat([above, x, edge] if last else [above, x], -2)
        self.kept = x[..., -2:, :].clone()
        return x if x.shape[-2] > 2 else None


class Before:
    """The kept frames of a causal convolution, read and updated in place by bands of rows."""

    def __init__(self, seen: Seen, at: int, height: int) -> None:
        self.seen, self.at, self.height, self.row = seen, at, height, 0

    def joined(self, x: Tensor) -> Tensor:
        """x [B, C, F, H, W] after the kept frames; zeros before a video's first frame."""
        held, rows = self._held(x), slice(self.row, self.row + x.shape[-2])
        self.row = rows.stop
        x = torch.cat([held[..., rows, :], x], 2)
        held[..., rows, :] = x[:, :, -FRAMES:]
        return x

    def _held(self, like: Tensor) -> Tensor:
        held = self.seen[self.at]
        if isinstance(held, Tensor) and held.shape[2] == FRAMES:
            return held
        size = (*like.shape[:2], FRAMES, self.height, like.shape[-1])
        new = torch.empty(
            size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last_3d
        ).zero_()
        if isinstance(held, Tensor):  # a video's first frame alone
            new[:, :, -1:] = held
        self.seen[self.at] = new
        return new


class Causal:
    """A causal 3 x 3 x 3 convolution."""

    def __init__(self, module: Any, before: Before) -> None:
        self.module, self.before, self.halo = module, before, Halo()

    def run(self, x: Tensor, last: bool) -> Tensor | None:
        x = self.before.joined(x)
        wide = self.halo.around(x, last)
        del x
        if wide is None:
            return None
        return F.conv3d(wide, self.module.weight, self.module.bias, padding=(0, 0, 1))


class Residual:
    """Two convolutions and a skip connection."""

    def __init__(self, block: Any, before: Iterator[Before]) -> None:
        self.block, self.past = block, Rows()
        self.first = Causal(block.conv1, next(before))
        self.second = Causal(block.conv2, next(before))

    def run(self, x: Tensor, last: bool) -> Tensor | None:
        b = self.block
        self.past.put(b.conv_shortcut(x))
        made = self.first.run(b.nonlinearity(b.norm1(x)), last)
        del x
        if made is not None:
            made = self.second.run(b.nonlinearity(b.norm2(made)), last)
        return None if made is None else self.past.add_to(made)


class Sampler:
    """Doubles rows and columns, and in some blocks frames too."""

    def __init__(self, module: Any, before: Iterator[Before]) -> None:
        self.module, self.halo = module, Halo()
        self.before = next(before) if module.mode == "upsample3d" else None
        if self.before is not None and self.before.seen[self.before.at] is None:
            self.before.seen[self.before.at] = REPEAT
            self.before = None  # a video's first frame becomes one

    def run(self, x: Tensor, last: bool) -> Tensor | None:
        if self.before is not None:
            time = self.module.time_conv
            x = F.conv3d(self.before.joined(x), time.weight, time.bias)
            x = x.unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
        frames, (larger, conv) = x.shape[2], self.module.resample
        wide = self.halo.around(larger(x.transpose(1, 2).flatten(0, 1)), last)
        del x
        if wide is None:
            return None
        made = F.conv2d(wide, conv.weight, conv.bias, padding=(0, 1))
        return made.unflatten(0, (-1, frames)).transpose(1, 2)


class Up:
    """An upsampling block; Wan 2.2's has a skip connection that repeats positions."""

    def __init__(self, block: Any, before: Iterator[Before], first: bool) -> None:
        self.residuals = [Residual(x, before) for x in block.resnets]
        sampler = block.upsampler if hasattr(block, "upsampler") else block.upsamplers
        if isinstance(sampler, torch.nn.ModuleList):
            (sampler,) = sampler
        self.sampler = None if sampler is None else Sampler(sampler, before)
        self.repeated, self.first = getattr(block, "avg_shortcut", None), first
        self.past, self.beside = Rows(), Rows()

    def run(self, x: Tensor | None, last: bool) -> Tensor | None:
        if self.repeated is not None:
            self.past.put(x)
        for residual in self.residuals:
            if x is not None:
                x = residual.run(x, last)
        if x is None or self.sampler is None:
            return x
        x = self.sampler.run(x, last)
        if x is None or self.repeated is None:
            return x
        missing = x.shape[-2] - self.beside.count
        for part in self.past.take(-(-missing // 2)):
            self.beside.put(self.repeated(part, first_chunk=self.first))
        return self.beside.add_to(x)


class Head:
    """The last norm and convolution."""

    def __init__(self, decoder: Any, before: Iterator[Before]) -> None:
        self.decoder, self.conv = decoder, Causal(decoder.conv_out, next(before))

    def run(self, x: Tensor, last: bool) -> Tensor | None:
        return self.conv.run(self.decoder.nonlinearity(self.decoder.norm_out(x)), last)


def decode(decoder: Any, x: Tensor, seen: Seen, bands: int, first: bool) -> Tensor:
    """Pixels [1, C, F, H, W] of a latent frame x; `first`: it begins the video."""
    height, index = x.shape[-2], [1]

    def before(height: int) -> Iterator[Before]:
        while True:
            yield Before(seen, next(numbers), height)

    numbers = count()
    whole = Causal(decoder.conv_in, next(before(height))).run(x, True)
    # the middle block attends to a whole frame, and its tensors are small
    x = decoder.mid_block(whole, feat_cache=seen, feat_idx=index)
    numbers = count(index[0])
    stages: list[Up | Head] = []
    waiting: list[Rows] = []
    for block in decoder.up_blocks:
        waiting.append(Rows(-(-height // bands)))
        up = Up(block, before(height), first)
        stages.append(up)
        height *= 1 if up.sampler is None else 2
    waiting += [Rows(-(-height // bands)), Rows()]
    stages.append(Head(decoder, before(height)))
    waiting[0].put(x, True)
    del whole, x
    # the last stage that is ready runs first, so that queues stay short
    while there := [i for i in range(len(stages)) if waiting[i].ready]:
        at = there[-1]
        band = waiting[at].next_band()
        last = waiting[at].ended and not waiting[at].count
        waiting[at + 1].put(stages[at].run(band, last), last)
        del band
    return torch.cat([*waiting[-1].parts], -2)
