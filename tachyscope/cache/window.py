"""Keep the first latent frames and the newest (StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from tachyscope.cache import (
    CachePolicy,
    checked_capacity,
    stand_at,
)
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import ENTRIES, LATENTS, SHARE
from tachyscope.core.policy import setting
from tachyscope.core.types import OptionalSizeSetting, Shape, Size, SizeSetting
from tachyscope.store import KVStore, LayerPass


@final
@dataclass(frozen=True)
class Window(CachePolicy, name="window"):
    """Keep the first `sink` latent frames and the newest that fit the budget.

    With positions "reindexed" the sink moves along, so as to stand right before the window. That
    is the same as counting positions inside the window: a query meets only differences. With
    `fold`, frames that leave are folded into the sink, place by place: sink · fold + frame ·
    (1 - fold). Those of a commit go to the sink's frames in order, and where they are fewer than
    these, as behind given frames that are no whole chunks, to the first so many.

    With `view` a pass sees so many latent frames, its own counted: the newest, and right before
    them the sink, which a clean pass does not see once older frames are out of view.
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
        "Of what is kept, how much a pass reads, its own chunk included: latent frames (12f) or "
        "entries; needs positions=reindexed.",
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
                f"cache policy 'window': view={self.view} lets the sink stand right before what is "
                f"seen, got positions={self.positions}: set positions=reindexed"
            )

    @property
    def keeps_unrotated(self) -> bool:
        return self.positions == "reindexed"

    @property
    def view_depends_on_pass(self) -> bool:
        return self.view is not None

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        slots = checked_capacity("window", self.budget, shape, prompt, self.sink, 0)
        # so that what leaves for a whole chunk covers the sink a whole number of times
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
        """Bring unrotated keys and values from slot `sink` on nearer to those of slots that leave.

        Where more leave than the sink has, they go round.
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
        """Let the sink stand right before the newest `behind` of the entries up to slot `end`."""
        tokens, prompt = p.ctx.shape.tokens_per_frame, p.ctx.prompt
        sink = slice(prompt, prompt + self.sink * tokens)
        # in whole frames; with nothing behind the sink, the frame that comes next
        oldest = p.layer.pos[:, :, end - 1 : end, 0] - (behind - 1) // tokens
        stand_at(p.layer, sink, oldest - self.sink, tokens, p.rotate)
