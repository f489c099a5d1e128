"""Read the latent frames of the past that a rule chooses, each with a weight: rules to be tried.

A policy of the laboratory over a cache that keeps all. What a chunk reads is settled before its
first pass, frame by frame, as `attention=pose` does, by the rule that `by` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.attention import AttentionPolicy
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.policy import setting
from tachyscope.core.types import PassContext, Shape
from tachyscope.kernels.attention import attention
from tachyscope.store import KVStore, LayerPass
from tachyscope.store.frame_bank import NEAR
from tachyscope.store.pose_bank import pose_differences

POOL = 4  # places a side of what a frame is compared by
SLIP = (0.5, 0.004)  # degrees, and a part of the room, that dead reckoning is off by a frame


@final
@dataclass(frozen=True)
class FrameWeights(AttentionPolicy, name="frames"):
    """Read `count` latent frames of the past, chosen before a chunk by a rule, and weigh them."""

    by: Literal["pose", "slip", "keys", "values", "random", "oldest", "all"] = setting(
        "pose",
        "Nearness of the camera's pose, the same with errors that add up, likeness of keys or of "
        "values to the frame just made, chance, age, or everything.",
    )
    count: int = setting(10, "Latent frames that are chosen.")
    weight: float = setting(8.0, "Weight of what is nearest.")
    floor: float = setting(1.0, "Weight of what is read and not near.")
    angle: float = setting(5.0, "Degrees of one standard deviation.")
    distance: float = setting(0.04, "The same of a way between cameras.")
    spread: float = setting(0.2, "The same of one less the cosine.")
    newest: int = setting(1, "Latest latent frames that are read with weight 1.")
    gate: float = setting(0.0, "Power of the newest frame's likeness to what was seen from there.")
    mask: float = setting(0.0, "Power of a place's likeness to the frame just drawn there.")
    begin: int = setting(0, "The first pass that weighs.")
    end: int = setting(99, "The last pass that weighs.")
    level: float = setting(0.0, "Likeness from which the gate opens.")

    wants_poses: ClassVar[bool] = True
    paper: ClassVar[str] = "rules that were tried"

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if plan["cache"].name != "keep_all" or not shape.poses:
            raise TachyscopeError("attention=frames is for cache=keep_all and models with poses")

    def before_chunk(self, p: LayerPass, poses: Tensor) -> None:
        own, frames = p.layer.own["attention"], p.ctx.total // p.ctx.shape.tokens_per_frame
        poses = poses.double().flatten(2)
        held = own.get("poses", poses[:, :0])[:, :frames]
        if self.by == "slip" and frames:
            poses = self._slipped(poses, frames)
        own["poses"] = torch.cat([held, poses], 1)
        own.pop("chosen", None)

    def _slipped(self, poses: Tensor, frames: int) -> Tensor:
        """Poses as dead reckoning has them: the same errors in every room and layer."""
        random = torch.Generator().manual_seed(0)
        walk = torch.randn(4096, 3, generator=random, dtype=torch.float64).cumsum(0)[frames - 1]
        turn = math.radians(SLIP[0]) * float(walk[0])
        matrix = poses.unflatten(-1, (3, 4)).clone()
        cos, sin = math.cos(turn), math.sin(turn)
        off = matrix.new_tensor([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
        matrix[..., :3] = off @ matrix[..., :3]
        matrix[..., :2, 3] += SLIP[1] * walk[1:].to(matrix)
        out: Tensor = matrix.flatten(-2)
        return out

    def log_weights(self, p: LayerPass) -> Tensor:
        """What is added to the scores of past and now, [B, 1, end]; -inf is not read."""
        layer, ctx = p.layer, p.ctx
        own, tokens = layer.own["attention"], ctx.shape.tokens_per_frame
        if "chosen" not in own:
            own["chosen"], own["read"] = self._chosen(layer, ctx)
        weighs = self.begin <= ctx.pass_index <= self.end and not ctx.given
        frames = torch.where(own["read"], own["chosen"] * float(weighs), -torch.inf)
        out = F.pad(frames.repeat_interleave(tokens, 1), (0, ctx.end - ctx.past))
        if self.mask and weighs and ctx.before:
            v = layer.v[:, :, ctx.past : ctx.past + tokens].transpose(1, 2).flatten(2)
            old = layer.v[:, :, : ctx.past].transpose(1, 2).flatten(2).unflatten(1, (-1, tokens))
            mean = old.mean((1, 2), keepdim=True)
            alike = F.cosine_similarity(old - mean, (v.unsqueeze(1) - mean), dim=-1)
            factor = alike.clamp(min=0) ** self.mask
            some = torch.where(
                own["read"].unsqueeze(2), own["chosen"].unsqueeze(2) * factor, -torch.inf
            )
            out[:, : ctx.past] = some.flatten(1)
        return out.unsqueeze(1).float()

    def _chosen(self, layer: KVStore, ctx: PassContext) -> tuple[Tensor, Tensor]:
        """Log-weights of the past's frames [B, F], and which of them are read."""
        tokens, poses = ctx.shape.tokens_per_frame, layer.own["attention"]["poses"]
        frames = ctx.past // tokens
        index = torch.arange(frames, device=poses.device)
        always = (index == 0) | (index >= frames - self.newest)
        apart = self._apart(layer, ctx, poses, frames)
        high = math.log(self.weight / self.floor)
        weight = math.log(self.floor) + high * torch.exp(-apart / 2)
        if self.gate and frames > 1:
            weight = weight * self._agreement(layer, ctx, poses, frames)
        ranked = (apart / NEAR).round().masked_fill(always, torch.inf)
        order = ranked.argsort(dim=1, stable=True)[:, : self.count]
        read = always | torch.zeros_like(apart, dtype=torch.bool).scatter(1, order, True)
        weight = weight.masked_fill(index >= frames - self.newest, 0.0)
        return weight, read

    def _apart(self, layer: KVStore, ctx: PassContext, poses: Tensor, frames: int) -> Tensor:
        """How many standard deviations, squared, each frame [B, F] is from the coming one."""
        if self.by in ("pose", "slip"):
            return self._by_pose(poses[:, :frames], poses[:, frames : frames + 1].mean(1))
        batch = len(poses)
        if self.by == "random":
            random = torch.Generator().manual_seed(ctx.total)
            return torch.rand(1, frames, generator=random).expand(batch, -1).to(poses) + 100
        if self.by in ("oldest", "all"):
            index = torch.arange(frames, device=poses.device).expand(batch, -1)
            return index.to(poses) * 0 if self.by == "all" else index.to(poses) + 100
        alike = self._likeness(layer, ctx, frames)
        near = F.max_pool1d(F.pad(alike, (1, 1), value=-1.0).unsqueeze(1), 3, 1).squeeze(1)
        return ((1 - near) / self.spread).square().to(poses)

    def _by_pose(self, held: Tensor, now: Tensor) -> Tensor:
        way, angle = pose_differences(held, now)
        return way / self.distance**2 + (angle / math.radians(self.angle)).square()

    def _likeness(self, layer: KVStore, ctx: PassContext, frames: int) -> Tensor:
        """How alike each frame [B, F] is to the newest, by means over a few places."""
        rows, columns = ctx.shape.grid
        x = (layer.k if self.by == "keys" else layer.v)[:, :, : ctx.past].float()
        x = x.transpose(1, 2).flatten(2).unflatten(1, (frames, rows, columns))
        x = F.adaptive_avg_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), POOL)
        x = x.flatten(1).unflatten(0, (-1, frames))
        x = x - x.mean(1, keepdim=True)
        return F.cosine_similarity(x, x[:, -1:], dim=-1)

    def _agreement(self, layer: KVStore, ctx: PassContext, poses: Tensor, frames: int) -> Tensor:
        """How like the frame just made is to what was seen from its pose before, [B, 1]: 1 where
        nothing was."""
        tokens = ctx.shape.tokens_per_frame
        v = layer.v[:, :, : ctx.past].float().transpose(1, 2).flatten(2)
        v = v.unflatten(1, (frames, tokens))
        v = v - v.mean((1, 2), keepdim=True)
        alike = F.cosine_similarity(v[:, :-1], v[:, -1:], dim=-1)  # [B, F - 1, N]
        alike = alike.mean(2).clamp(min=0)
        alike = ((alike - self.level) / (1 - self.level)).clamp(min=0) ** self.gate
        near = torch.exp(-self._by_pose(poses[:, : frames - 1], poses[:, frames - 1]) / 2)
        best = near.argmax(1, keepdim=True)
        nearness = near.gather(1, best)
        return 1 - nearness + nearness * alike.gather(1, best)

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        layer, ctx = p.layer, p.ctx
        weights = self.log_weights(p) if ctx.past else None
        read = ctx.end
        if weights is not None:  # what is masked counts as not read
            read = int((weights[0] > -torch.inf).sum())
        p.work.add_reads(q, read)
        return attention(q, *layer.read(ctx, slice(0, ctx.end), log_count=weights))
