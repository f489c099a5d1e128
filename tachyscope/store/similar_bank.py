"""A bank of latent frames that are retrieved by the similarity of values (`attention=similar`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.core.types import Shape
from tachyscope.store.frame_bank import FrameBank

if TYPE_CHECKING:
    from tachyscope.store.kv import KVStore
    from tachyscope.store.layer_pass import LayerPass

POOL = 4  # rows and columns of parts that a frame's values are averaged over
WIDTH = 1024  # numbers of a key: sums of channels with random signs keep cosines to 0.03


@dataclass(slots=True)
class SimilarBank(FrameBank):
    """Keys are a frame's mean values in 16 parts of the picture, projected to WIDTH numbers.

    Frames are near whose keys, less the mean of all the bank's, have a large cosine; `spread` is a
    difference of cosines.
    """

    key_dtype: ClassVar[torch.dtype] = torch.float32
    key_width: ClassVar[int] = WIDTH

    @classmethod
    def constants(cls, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        channels = shape.kv_heads * shape.head_dim * POOL**2  # of this rank's heads
        rng = torch.Generator().manual_seed(0)  # the same in every layer and session
        signs = torch.randint(2, (shape.ranks * channels,), generator=rng, dtype=torch.float32)
        own = 2 * signs[shape.rank * channels :][:channels] - 1
        # padded so that a rank's first channel is added to the same number as in one process
        return {"signs": F.pad(own, (shape.rank * channels % WIDTH, 0)).to(device)}

    def bring(self, layer: KVStore, total: int) -> None:
        """Retrieve the frames most similar to the newest one; `total` entries came before."""
        layout, own = self.layout, self.tensors
        if layout.sealed(total) >= layout.resident_slots:
            self.retrieve(layer, own["tail"][:, layout.tail(total) - 1])
        self.weigh(torch.full_like(self.resident, layout.log_weight, dtype=torch.float32))

    def make_keys(self, p: LayerPass, n: int) -> None:
        new = slice(p.ctx.past, p.ctx.past + n)
        values = p.layer.vectors("v", new).transpose(1, 2).flatten(2).float()
        frames = values.unflatten(1, (-1, *self.layout.grid)).permute(0, 1, 4, 2, 3)
        parts = F.adaptive_avg_pool2d(frames.flatten(0, 1), POOL).flatten(1)
        signs = self.work["signs"]
        sums = F.pad(parts, (len(signs) - parts.shape[1], 0)) * signs
        sums = F.pad(sums, (0, -len(signs) % WIDTH)).unflatten(1, (-1, WIDTH)).sum(1)
        self.now = p.mean_heads(sums).unflatten(0, (len(values), -1))

    def squared_distance(self, keys: Tensor, key: Tensor) -> Tensor:
        (spread,) = self.layout.spread
        held = (self.ages >= 0).float().unsqueeze(2)
        mean = (self.tensors["key"] * held).sum(1, keepdim=True) / held.sum(1, True).clamp(min=1)
        cosine = F.cosine_similarity(keys - mean, (key - mean[:, 0]).unsqueeze(1), dim=-1)
        return ((1 - cosine) / spread).square()

    def distances(self, keys: Tensor, key: Tensor, unused: Tensor) -> Tensor:
        """A frame's distance is the least of its own and those of the frames that the bank holds
        right before and after it: what followed the scene then may follow it again."""
        near = -self.squared_distance(keys, key).masked_fill(unused, torch.inf)
        return -F.max_pool1d(F.pad(near, (1, 1), value=-torch.inf).unsqueeze(1), 3, 1).squeeze(1)
