"""A bank of latent frames that are retrieved by the poses of their cameras (`attention=pose`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from tachyscope.store.frame_bank import FrameBank

if TYPE_CHECKING:
    from tachyscope.store.kv import KVStore

POSE = 12  # numbers of a camera-to-world matrix of 3 rows and 4 columns


@dataclass(slots=True)
class PoseBank(FrameBank):
    """Keys are camera-to-world matrices; `spread` is an angle in radians and a length."""

    key_dtype: ClassVar[torch.dtype] = torch.float64
    key_width: ClassVar[int] = POSE

    def bring(self, layer: KVStore, poses: Tensor, total: int) -> None:
        """Retrieve the frames whose poses are nearest to the mean of poses [B, F, 3, 4], and weigh
        the resident ones by how near they are; `total` entries came before."""
        layout, own = self.layout, self.tensors
        assert layout.group == 1
        self.now = _orthonormal(poses.double()).flatten(2)
        here = self.now.mean(1)
        if layout.sealed(total) >= layout.resident_slots:
            self.retrieve(layer, here)
        index = self.resident.clamp(min=0).long().unsqueeze(-1).expand(-1, -1, POSE)
        distance = self.squared_distance(own["key"].gather(1, index), here)
        self.weigh(layout.log_weight * torch.exp(-distance / 2))

    def squared_distance(self, keys: Tensor, key: Tensor) -> Tensor:
        angle, length = self.layout.spread
        squared, turn = pose_differences(keys, key)
        return squared / length**2 + (turn / angle).square()


def pose_differences(poses: Tensor, pose: Tensor) -> tuple[Tensor, Tensor]:
    """The squared distances [B, n] of cameras at poses [B, n, 12] from one [B, 12], and the angles
    between them in radians."""
    (rotation, origin), (turned, here) = (_parts(x) for x in (poses, pose.unsqueeze(1)))
    cosine = ((rotation * turned).sum((-2, -1)) - 1) / 2
    return (origin - here).square().sum(-1), cosine.clamp(-1, 1).arccos()


def _orthonormal(poses: Tensor) -> Tensor:
    """Poses [..., 3, 4] in float64, their rotations made orthonormal (one Newton step).

    A float32 rotation is orthonormal to 1e-7; the arc cosine near 1 turns that into an angle of
    0.03 degrees, enough to prefer one frame over another of the same pose.
    """
    rotation = poses[..., :3]
    rotation = 1.5 * rotation - 0.5 * rotation @ (rotation.mT @ rotation)
    return torch.cat([rotation, poses[..., 3:]], -1)


def _parts(pose: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation [..., 3, 3] and camera centre [..., 3] of a pose [..., 12]."""
    matrix = pose.unflatten(-1, (3, 4))
    return matrix[..., :3], matrix[..., 3]
