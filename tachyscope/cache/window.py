"""Keep the first latent frames and the newest (StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from tachyscope.cache import (
    CachePolicy,
    OnMerge,
    Rotate,
    checked_capacity,
    clamp_distance,
    stand_at,
)
from tachyscope.errors import TachyscopeError
from tachyscope.meter import Meter
from tachyscope.settings import check_settings, setting
from tachyscope.store import KVStore
from tachyscope.types import PassContext, Shape, Size


@final
@dataclass(frozen=True)
class Window(CachePolicy):
    """Keep `sink` first latent frames and the newest ones that fit the budget.

    With positions "reindexed" the sink moves along, so as to stand right before the window. That
    is the same as counting positions inside the window: a query meets only differences. With
    `fold`, frames that leave are folded into the sink, place by place: sink · fold + frame ·
    (1 - fold). Those of a commit go to the sink's frames in order, and where they are fewer than
    these, as behind given frames that are no whole chunks, to the first so many.

    With `view` a pass sees so many latent frames, its own counted: the newest, and right before
    them the sink, which a clean pass does not see once older frames are out of view.
    With `max_distance` an entry further back than so many latent frames before the next chunk
    stands at that distance.
    """

    budget: Size = setting(
        Size(21, True),
        "Most entries that a layer holds, the present chunk included: latent frames (21f) or "
        "entries (1344).",
    )
    sink: int = setting(1, "First latent frames that are always kept.")
    positions: Literal["absolute", "reindexed"] = setting(
        "absolute",
        "RoPE positions of the sink: its own (absolute), or right before the oldest frame of the "
        "window (reindexed).",
    )
    fold: float | None = setting(
        None,
        "Fold frames that leave the window into the sink, sink * fold + frame * (1 - fold), from 0 "
        "to 1; needs a sink and positions=reindexed.",
    )
    view: Size | None = setting(
        None,
        "Of what is kept, how much a pass reads, its own chunk included: latent frames (12f) or "
        "entries; needs positions=reindexed.",
    )
    max_distance: int | None = setting(
        None,
        "Latent frames before the next chunk: an entry further back gets the position at that "
        "distance.",
    )

    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    whole_frames: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(self, "cache", "window")
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
        return self.positions == "reindexed" or self.max_distance is not None

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
        now = self.sink + shape.chunk + shape.rolling_frames
        if (
            self.view is not None
            and self.view.entries(shape) < prompt + now * shape.tokens_per_frame
        ):
            raise TachyscopeError(
                f"cache policy 'window': view={self.view} is less than the sink and the present "
                f"chunk of {shape.chunk + shape.rolling_frames}f: raise it to {now}f or more"
            )
        return slots

    def commit(
        self,
        layer: KVStore,
        ctx: PassContext,
        n: int,
        rotate: Rotate,
        meter: Meter,
        on_merge: OnMerge | None = None,
    ) -> int:
        past, total = self._drop(layer, ctx, n, rotate), ctx.past + n
        if self.max_distance is not None:
            # what was newest may have moved down, but its position still lies at the end
            nearest = layer.pos[:, :, total - 1 : total, 0] + 1 - self.max_distance
            clamp_distance(layer, past, nearest, rotate)
        return past

    def _drop(self, layer: KVStore, ctx: PassContext, n: int, rotate: Rotate) -> int:
        total = ctx.past + n
        keep = self.budget.entries(ctx.shape) - ctx.shape.max_pass_tokens
        if total <= keep:
            return total
        first = ctx.prompt + self.sink * ctx.shape.tokens_per_frame
        if self.fold is not None:
            layer.blend(slice(first, first + total - keep), ctx.prompt, 1 - self.fold)
        layer.move(first + total - keep, first, keep - first)
        if self.positions == "reindexed" and self.view is None:
            self._bring_sink(layer, ctx, total, keep - first, rotate)
        return keep

    def hidden_slots(self, layer: KVStore, ctx: PassContext, rotate: Rotate) -> tuple[int, int]:
        assert self.view is not None
        first = ctx.prompt + self.sink * ctx.shape.tokens_per_frame
        seen = min(ctx.past, self.view.entries(ctx.shape) - ctx.tokens)
        if ctx.past < first:
            return 0, 0
        if seen < ctx.past and not any(ctx.noise):
            return ctx.prompt, ctx.prompt + ctx.past - seen
        self._bring_sink(layer, ctx, ctx.past, seen - first, rotate)
        return first, first + ctx.past - seen

    def _bring_sink(
        self, layer: KVStore, ctx: PassContext, end: int, behind: int, rotate: Rotate
    ) -> None:
        """Let the sink stand right before the newest `behind` of the entries up to slot `end`."""
        sink = slice(ctx.prompt, ctx.prompt + self.sink * ctx.shape.tokens_per_frame)
        # in whole frames; with nothing behind the sink, the frame that comes next
        oldest = layer.pos[:, :, end - 1 : end, 0] - (behind - 1) // ctx.shape.tokens_per_frame
        stand_at(layer, sink, oldest - self.sink, ctx.shape.tokens_per_frame, rotate)
