"""A layer's past in host memory by latent frames, found by the poses of their cameras."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from tachyscope.core.types import Shape
from tachyscope.store.frame_bank import FrameBank

if TYPE_CHECKING:
    from tachyscope.store.kv import KVStore

POSE = 12  # numbers of a camera-to-world matrix of 3 rows and 4 columns


@dataclass(slots=True)
class PoseBank(FrameBank):
    """Keys are camera-to-world matrices; `spread` has radians, and a way between cameras."""

    key_dtype: ClassVar[torch.dtype] = torch.float64

    @classmethod
    def width_of(cls, shape: Shape) -> int:
        return POSE

    def bring(self, layer: KVStore, poses: Tensor, total: int) -> None:
        """Bring the frames seen from nearest to poses [B, F, 3, 4], and weigh those that are there.

        `total` entries came before.
        """
        layout, own = self.layout, self.tensors
        assert layout.group == 1
        self.now = _orthonormal(poses.double()).flatten(2)
        here = self.now.mean(1)
        if layout.sealed(total) >= layout.places:
            self.retrieve(layer, here)
        index = own["place"].clamp(min=0).long().unsqueeze(-1).expand(-1, -1, POSE)
        apart = self.spread_apart(own["key"].gather(1, index), here)
        self.weigh(layout.log_weight * torch.exp(-apart / 2))

    def spread_apart(self, keys: Tensor, key: Tensor) -> Tensor:
        angle, distance = self.layout.spread
        way, turn = pose_differences(keys, key)
        return way / distance**2 + (turn / angle).square()


def pose_differences(pose: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """The way between cameras [B, n, 12] and one [B, 12], squared, and the angle in radians."""
    (rotation, place), (turned, here) = (_parts(x) for x in (pose, now.unsqueeze(1)))
    cosine = ((rotation * turned).sum((-2, -1)) - 1) / 2
    return (place - here).square().sum(-1), cosine.clamp(-1, 1).arccos()


def _orthonormal(poses: Tensor) -> Tensor:
    """Poses [..., 3, 4] in float64, their rotations orthonormal to its rounding (a Newton step).

    Those given in float32 are so to 1e-7 alone, and the arc cosine near 1 would make an angle of
    0.03 degrees of that: as much as sets one frame before another.
    """
    rotation = poses[..., :3]
    rotation = 1.5 * rotation - 0.5 * rotation @ (rotation.mT @ rotation)
    return torch.cat([rotation, poses[..., 3:]], -1)


def _parts(pose: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation [..., 3, 3] and place [..., 3] of a pose [..., 12]."""
    matrix = pose.unflatten(-1, (3, 4))
    return matrix[..., :3], matrix[..., 3]
