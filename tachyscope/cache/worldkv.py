"""Keep latent frames in host memory, and retrieve those seen from alike poses (WorldKV)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from tachyscope.cache import CachePolicy, OnMerge, Rotate
from tachyscope.errors import TachyscopeError
from tachyscope.meter import Meter
from tachyscope.settings import check_settings, setting
from tachyscope.store import KVStore
from tachyscope.store.pose_bank import PoseBank, PoseLayout
from tachyscope.types import PassContext, Shape, Size

GROUP = 3  # latent frames of a group in models that make one at a time


@final
@dataclass(frozen=True)
class WorldKv(CachePolicy):
    """Keep the first latent frames, the newest, and those whose cameras stood most like now.

    Frames that leave the newest go to host memory by groups: a chunk, or three frames where that is
    one. Of a group the first frame is kept whole, and of the others the entries whose keys are
    least like its mean key. Before every chunk the groups whose cameras stood most like the
    chunk's are retrieved. Needs a model that knows its camera's poses, and attention=dense.
    """

    retrieve: int = setting(18, "Latent frames that are retrieved: whole groups.")
    keep: float = setting(
        0.5, "Share of entries that is kept of a group's frames after the first, over 0 to 1."
    )
    sink: int = setting(3, "First latent frames that are always kept.")
    newest: int = setting(3, "Latest latent frames that are always kept.")
    budget: Size = setting(
        Size(240, True),
        "Latent frames whose groups host memory holds, reserved at the start (240f), or their "
        "entries; when it is full the oldest group leaves.",
    )

    paper: ClassVar[str] = "WorldKV, arXiv 2605.22718"
    wants_poses: ClassVar[bool] = True
    dense_only: ClassVar[bool] = True
    traceable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_settings(self, "cache", "worldkv")

    def layout(self, shape: Shape) -> PoseLayout:
        """How a layer is cut up; raises where settings do not fit the model."""
        group = shape.chunk if shape.chunk > 1 else GROUP
        tokens, stored = shape.tokens_per_frame, self.budget.entries(shape)
        most = stored // (group * tokens)
        if self.retrieve % group or most * group < self.retrieve:
            raise TachyscopeError(
                f"cache policy 'worldkv': retrieve={self.retrieve} must be whole groups of {group} "
                f"latent frames, and at most budget={self.budget}: change these"
            )
        kept = tokens + (group - 1) * math.ceil(self.keep * tokens)
        places = self.retrieve // group
        return PoseLayout(self.sink, places, self.newest, group, kept, most, tokens)

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        return self.layout(shape).room + shape.max_pass_tokens

    def is_full(self, shape: Shape, past: int, room: int, total: int) -> bool:
        layout = self.layout(shape)
        return layout.group == shape.chunk and layout.sealed(total) > layout.places

    def retrieve_by(
        self, layer: KVStore, shape: Shape, total: int, poses: Tensor, meter: Meter
    ) -> None:
        bank = layer.bank
        assert isinstance(bank, PoseBank)
        bank.now = poses.double().flatten(2)
        if bank.layout.sealed(total) >= bank.layout.places > 0:
            bank.retrieve(layer, bank.now)
            meter.add("macs", shape.batch * bank.layout.most * bank.now.shape[2])

    def commit(
        self,
        layer: KVStore,
        ctx: PassContext,
        n: int,
        rotate: Rotate,
        meter: Meter,
        on_merge: OnMerge | None = None,
    ) -> int:
        bank, shape = layer.bank, ctx.shape
        assert isinstance(bank, PoseBank)
        past = bank.seal(layer, ctx.past, n, ctx.total)
        groups = bank.layout.sealed(ctx.total + n) - bank.layout.sealed(ctx.total)
        entries = groups * bank.layout.group * shape.tokens_per_frame
        meter.add("macs", shape.batch * shape.kv_heads * entries * shape.head_dim)
        return past
