"""Keep latent frames in host memory, and retrieve those seen from alike poses (WorldKV)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from tachyscope.cache import CachePolicy
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import ENTRIES, LATENTS, PART
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape, Size
from tachyscope.store import KVStore, LayerPass
from tachyscope.store.frame_bank import FrameLayout
from tachyscope.store.pose_bank import PoseBank, pose_differences

GROUP = 3  # latent frames of a group in models that make one at a time


class WorldKvBank(PoseBank):
    """Groups by WorldKV's rule, without weights; when all are in use the oldest leaves."""

    __slots__ = ()

    def assign_group(self, age: Tensor, used: Tensor, key: Tensor) -> Tensor:
        oldest = self.ages.argmin(1, keepdim=True).to(torch.int32)
        return torch.where(used < self.layout.capacity, used, oldest)

    def prune(self, layer: KVStore, start: int) -> None:
        """Keep a group's first frame, and of the others what is least like it.

        An entry is as like it as the cosine of its key and the mean key of that frame, all heads in
        one vector.
        """
        layout = self.layout
        slots = slice(start, start + layout.group * layout.tokens)
        if layout.kept == slots.stop - slots.start:
            return
        k = layer.vectors("k", slots)
        k = k.to(torch.promote_types(k.dtype, torch.float32)).transpose(1, 2).flatten(2)
        mean = k[:, : layout.tokens].mean(1, keepdim=True)
        rest = k[:, layout.tokens :]
        alike = (rest * mean).sum(-1) / (rest.norm(dim=-1) * mean.norm(dim=-1) + 1e-8)
        # a stable sort leaves what is kept in order of time
        kept = layout.kept - layout.tokens
        dropped = torch.ones_like(alike, dtype=torch.int8)
        dropped.scatter_(1, alike.argsort(dim=1, stable=True)[:, :kept], 0)
        order = torch.cat([dropped.new_zeros(len(k), layout.tokens), dropped], 1)
        layer.gather(slots, order.argsort(dim=1, stable=True).unsqueeze(1))

    def distances(self, keys: Tensor, key: Tensor, unused: Tensor) -> Tensor:
        """Half of it is how far cameras stand apart, squared, half the angle between them, each as
        a part of the largest among the groups."""
        distance = torch.zeros_like(keys[..., 0])
        for part in pose_differences(keys, key):
            largest = part.masked_fill(unused, 0).amax(1, keepdim=True)
            distance += 0.5 * part / torch.where(largest > 0, largest, 1)
        return distance


@final
@dataclass(frozen=True)
class WorldKv(CachePolicy, name="worldkv"):
    """Keep the first latent frames, the newest, and those with the most similar camera poses.

    Frames that leave the newest go to host memory by groups: a chunk, or three frames where that is
    one. Of a group the first frame is kept whole, and of the others the entries whose keys are
    least like its mean key. Before every chunk the groups whose cameras stood most like the
    chunk's are retrieved. Needs a model that knows its camera's poses, and attention=dense.
    """

    retrieve: int = setting(18, "Latent frames that are retrieved: whole groups.", bound=LATENTS)
    keep: float = setting(
        0.5,
        "Share of entries that is kept of a group's frames after the first, over 0 to 1.",
        bound=PART,
    )
    sink: int = setting(3, "First latent frames that are always kept.", bound=LATENTS)
    newest: int = setting(3, "Latest latent frames that are always kept.", bound=LATENTS)
    budget: Size = setting(
        Size(240, True),
        "Latent frames whose groups host memory holds, reserved at the start (240f), or their "
        "entries; when it is full the oldest group leaves.",
        bound=ENTRIES,
    )

    paper: ClassVar[str] = "WorldKV, arXiv 2605.22718"
    wants_poses: ClassVar[bool] = True
    dense_only: ClassVar[bool] = True
    traceable: ClassVar[bool] = False

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        super().check_plan(plan, shape)
        if not shape.poses or shape.token_by_token or shape.rolling_frames:
            raise TachyscopeError(
                "cache=worldkv cannot serve a model that does not know its camera's poses: use "
                "another cache"
            )
        if plan["store"].name != "native":
            raise TachyscopeError(f"cache=worldkv cannot serve store={plan['store']}: leave it out")

    def host_layout(self, shape: Shape) -> FrameLayout:
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
        return FrameLayout(
            self.sink, places, self.newest, group, kept, most, shape.grid, WorldKvBank
        )

    def bank_layout(
        self, plan: Mapping[str, Any], shape: Shape, slots: int, latent_frames: int | None
    ) -> FrameLayout:
        return self.host_layout(shape)

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        return self.host_layout(shape).room + shape.max_pass_tokens

    def is_full(self, shape: Shape, past: int, room: int, total: int) -> bool:
        layout = self.host_layout(shape)
        return layout.group == shape.chunk and layout.sealed(total) > layout.resident_slots

    def before_chunk(self, p: LayerPass, poses: Tensor) -> None:
        bank = p.layer.bank
        assert isinstance(bank, WorldKvBank)
        bank.now = poses.double().flatten(2)
        if bank.layout.sealed(p.ctx.total) >= bank.layout.resident_slots > 0:
            bank.retrieve(p.layer, bank.now.mean(1))
            p.work.macs += p.ctx.shape.batch * bank.layout.capacity * bank.now.shape[2]

    def commit(self, p: LayerPass, n: int) -> int:
        ctx = p.ctx
        bank, shape = p.layer.bank, ctx.shape
        assert isinstance(bank, WorldKvBank)
        past = bank.seal(p, n)
        groups = bank.layout.sealed(ctx.total + n) - bank.layout.sealed(ctx.total)
        entries = groups * bank.layout.group * shape.tokens_per_frame
        p.work.macs += shape.batch * shape.kv_heads * entries * shape.head_dim
        return past
