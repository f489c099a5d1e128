"""Keep the newest latent frames in most layers, and some of a longer past in the others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, final

from tachyscope.cache import CachePolicy, checked_capacity
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import LATENTS, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import PassContext, Shape, Size, SizeSetting
from tachyscope.store import LayerPass


@final
@dataclass(frozen=True)
class Strided(CachePolicy, name="strided"):
    """Most layers keep the newest latent frames; the last of every `period` layers keeps each
    `every`-th latent frame of the last `far`, counted from the video's first one.

    All layers have equally many slots. The entries that a layer reads are right before the present
    chunk; the slots before them are empty or out of its window, and no pass reads them.
    """

    budget: SizeSetting = setting(
        Size(16, True),
        "Newest latent frames of most layers, the present chunk included (16f), or entries.",
        bound=Bound(1, 100_000_000),
    )
    far: int = setting(
        128,
        "Latent frames that the other layers look back, the present chunk included.",
        bound=Bound(1, int(LATENTS.high)),
    )
    every: int = setting(
        8,
        "Of these, keep the frames whose number it divides.",
        bound=Bound(1, int(LATENTS.high)),
    )
    period: int = setting(
        4, "The last of every `period` layers is one of the others.", bound=Bound(1, 1_000)
    )
    paper: ClassVar[str] = "Waypoint 1.5, Overworld's world model"
    splits_heads: ClassVar[bool] = True
    whole_frames: ClassVar[bool] = True

    @property
    def view_depends_on_pass(self) -> bool:
        return True

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        checked_capacity("strided", self.budget, shape, prompt, 0, 0)
        if self.far < shape.chunk + shape.rolling_frames:
            raise TachyscopeError(
                f"cache policy 'strided': far={self.far} is less than the present chunk of "
                f"{shape.chunk + shape.rolling_frames}f: raise it to that or more"
            )
        return self._most(shape, prompt) + shape.max_pass_tokens

    def hidden_slots(self, p: LayerPass) -> tuple[int, int]:
        ctx = p.ctx
        past = ctx.past - ctx.prompt
        if past <= 0:
            return 0, 0
        if self._is_far(ctx):
            frame, tokens = self._frame(ctx), ctx.shape.tokens_per_frame
            oldest = frame + ctx.shape.chunk + ctx.shape.rolling_frames - self.far
            seen = tokens * (self._multiples(frame) - self._multiples(max(0, oldest)))
        else:
            seen = self._near(ctx.shape) - ctx.prompt
        return ctx.prompt, ctx.prompt + max(0, past - seen)

    def commit(self, p: LayerPass, n: int) -> int:
        ctx, end = p.ctx, p.ctx.past + n
        if ctx.prefilling:
            return end
        past = min(end, self._most(ctx.shape, ctx.prompt))
        if self._is_far(ctx):
            self._keep_some(p, n, past)
        else:
            kept = past - ctx.prompt
            p.layer.move(end - kept, ctx.prompt, kept)
        return past

    def _keep_some(self, p: LayerPass, n: int, past: int) -> None:
        """Move the latent frames that are kept to right before slot `past`."""
        ctx, tokens = p.ctx, p.ctx.shape.tokens_per_frame
        frame, most = self._frame(ctx), self._multiples(self.far)
        held = min(most, self._multiples(frame))
        stay = [ctx.past - (held - i) * tokens for i in range(held)]
        new = range(-frame % self.every, n // tokens, self.every)
        stay = (stay + [ctx.past + i * tokens for i in new])[-most:]
        first = past - len(stay) * tokens
        steps = [(source, first + i * tokens) for i, source in enumerate(stay)]
        runs = [list(run) for _, run in groupby(steps, lambda step: step[1] - step[0])]
        # the oldest move up; moved first, and the newest of them first, none is overwritten
        up = [run for run in runs if run[0][1] > run[0][0]]
        for run in up[::-1] + runs[len(up) :]:
            p.layer.move(*run[0], len(run) * tokens)

    def _is_far(self, ctx: PassContext) -> bool:
        return ctx.layer % self.period == self.period - 1

    def _frame(self, ctx: PassContext) -> int:
        """The number of the present chunk's first latent frame."""
        return (ctx.total - ctx.prompt) // ctx.shape.tokens_per_frame

    def _multiples(self, frame: int) -> int:
        """Latent frames before this one whose number `every` divides."""
        return -(-frame // self.every)

    def _near(self, shape: Shape) -> int:
        """Past entries that most layers keep."""
        return self.budget.entries(shape) - shape.max_pass_tokens

    def _most(self, shape: Shape, prompt: int) -> int:
        """Slots of the past, equally many in all layers."""
        some = prompt + self._multiples(self.far) * shape.tokens_per_frame
        return max(self._near(shape), some)
