"""Keep the first latent frames and the newest (StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from tachyscope.cache import CachePolicy, checked_capacity, set_times
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import ENTRIES, LATENTS, SHARE
from tachyscope.core.policy import setting
from tachyscope.core.types import OptionalSizeSetting, Shape, Size, SizeSetting
from tachyscope.store import KVStore, LayerPass


@final
@dataclass(frozen=True)
class Window(CachePolicy, name="window"):
    """Keep the first `sink` latent frames and the newest that fit the budget.

    With positions "reindexed" the sink's positions are right before the window's. That equals
    positions counted inside the window, since attention depends on differences alone. With `fold`,
    frames that leave the window are averaged into the sink, token by token: sink · fold + frame ·
    (1 - fold). The frames of a commit go to the sink's in order; if they are fewer, after given
    frames that fill no whole chunk, the last ones of the sink stay.

    With `view` a pass reads only so many latent frames, its own included: the newest, and right
    before them the sink, which a clean pass does not read once older frames are out of view.
    """

    budget: SizeSetting = setting(
        Size(21, True),
        "Most entries that a layer holds, the present chunk included: latent frames (21f) or "
        "entries (1344).",
        bound=ENTRIES,
    )
    sink: int = setting(1, "First latent frames that are always kept.", bound=LATENTS)
    positions: Literal["absolute", "reindexed"] = setting(
        "absolute",
        "RoPE positions of the sink: its own (absolute), or right before the oldest frame of the "
        "window (reindexed).",
    )
    fold: float | None = setting(
        None,
        "Fold frames that leave the window into the sink, sink * fold + frame * (1 - fold), from 0 "
        "to 1; needs a sink and positions=reindexed.",
        bound=SHARE,
    )
    view: OptionalSizeSetting = setting(
        None,
        "How much of that a pass reads, its own chunk included: latent frames (12f) or entries; "
        "needs positions=reindexed.",
        bound=ENTRIES,
    )
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    splits_heads: ClassVar[bool] = True
    whole_frames: ClassVar[bool] = True

    def check_settings(self) -> None:
        moves = self.positions == "reindexed"
        if self.fold is not None and not (self.sink and moves):
            raise TachyscopeError(
                f"cache policy 'window': fold needs a sink and "
                f"positions=reindexed, got fold={self.fold},sink={self.sink},"
                f"positions={self.positions}: set these"
            )
        if self.view is not None and self.positions != "reindexed":
            raise TachyscopeError(
                f"cache policy 'window': view={self.view} moves the sink to right before what is "
                f"read, got positions={self.positions}: set positions=reindexed"
            )

    @property
    def keeps_unrotated(self) -> bool:
        return self.positions == "reindexed"

    @property
    def view_depends_on_pass(self) -> bool:
        return self.view is not None

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        slots = checked_capacity("window", self.budget, shape, prompt, self.sink, 0)
        # so that the frames that leave for a chunk fill the sink a whole number of times
        if self.fold is not None and (
            shape.chunk % self.sink or (slots - prompt) % shape.max_pass_tokens
        ):
            raise TachyscopeError(
                f"cache policy 'window': fold needs a sink that divides the chunk of "
                f"{shape.chunk}f, and a budget of whole chunks, got sink={self.sink}f, "
                f"budget={self.budget}: change these"
            )
        now = shape.chunk + shape.rolling_frames
        least = prompt + (self.sink + now) * shape.tokens_per_frame
        if self.view is not None and self.view.entries(shape) < least:
            frames = -(-least // shape.tokens_per_frame)
            raise TachyscopeError(
                f"cache policy 'window': view={self.view} is less than the sink and the present "
                f"chunk of {now}f: raise it to {frames}f or more"
            )
        return slots

    def commit(self, p: LayerPass, n: int) -> int:
        layer, ctx = p.layer, p.ctx
        total = ctx.past + n
        keep = self.budget.entries(ctx.shape) - ctx.shape.max_pass_tokens
        if total <= keep:
            return total
        first = ctx.prompt + self.sink * ctx.shape.tokens_per_frame
        if self.fold is not None:
            self._fold_in(layer, slice(first, first + total - keep), ctx.prompt)
        layer.move(first + total - keep, first, keep - first)
        if self.positions == "reindexed" and self.view is None:
            self._bring_sink(p, total, keep - first)
        return keep

    def hidden_slots(self, p: LayerPass) -> tuple[int, int]:
        assert self.view is not None
        ctx = p.ctx
        first = ctx.prompt + self.sink * ctx.shape.tokens_per_frame
        seen = min(ctx.past, self.view.entries(ctx.shape) - ctx.tokens)
        if ctx.past < first:
            return 0, 0
        if seen < ctx.past and not any(ctx.noise):
            return ctx.prompt, ctx.prompt + ctx.past - seen
        self._bring_sink(p, ctx.past, seen - first)
        return first, first + ctx.past - seen

    def _fold_in(self, layer: KVStore, leaving: slice, sink: int) -> None:
        """Average slots that leave into the unrotated keys and values from slot `sink` on.

        If more leave than the sink has, they go to it again from its start.
        """
        assert self.fold is not None
        for name in ("unrotated", "v"):
            span = slice(sink, leaving.start)
            x = layer.vectors(name, span)
            for part in layer.vectors(name, leaving).split(leaving.start - sink, 2):
                x[:, :, : part.shape[2]].lerp_(part, 1 - self.fold)
            if layer.scales:
                layer.put(name, span, x)

    def _bring_sink(self, p: LayerPass, end: int, behind: int) -> None:
        """Move the sink's positions to right before the newest `behind` entries before `end`."""
        tokens, prompt = p.ctx.shape.tokens_per_frame, p.ctx.prompt
        sink = slice(prompt, prompt + self.sink * tokens)
        # in whole frames; without entries behind the sink, the next frame
        oldest = p.layer.pos[:, :, end - 1 : end, 0] - (behind - 1) // tokens
        set_times(p.layer, sink, oldest - self.sink, tokens, p.rotate)
