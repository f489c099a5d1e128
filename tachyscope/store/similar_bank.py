"""A layer's past in host memory by latent frames, found by how like their values are."""

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

POOL = 4  # places a side of what a frame is compared by
WIDTH = 1024  # numbers of a key: a sum of channels with signs drawn once keeps cosines to 0.03


@dataclass(slots=True)
class SimilarBank(FrameBank):
    """Keys are a frame's values, averaged over parts of the picture; near is a large cosine of what
    sets them apart from the mean of all. `spread` has the difference of cosines."""

    key_dtype: ClassVar[torch.dtype] = torch.float32

    @classmethod
    def width_of(cls, shape: Shape) -> int:
        return WIDTH

    @classmethod
    def constants(cls, shape: Shape, device: torch.device) -> dict[str, Tensor]:
        channels = shape.kv_heads * shape.head_dim * POOL**2  # of this rank's heads
        rng = torch.Generator().manual_seed(0)  # of every layer and video the same
        signs = torch.randint(2, (shape.ranks * channels,), generator=rng, dtype=torch.float32)
        own = 2 * signs[shape.rank * channels :][:channels] - 1
        # they begin at the number of a key that they would be added to in one process
        return {"signs": F.pad(own, (shape.rank * channels % WIDTH, 0)).to(device)}

    def bring(self, layer: KVStore, total: int) -> None:
        """Bring the frames most like the newest one, behind `total` entries."""
        layout, own = self.layout, self.tensors
        if layout.sealed(total) >= layout.places:
            self.retrieve(layer, own["tail"][:, layout.tail(total) - 1])
        self.weigh(torch.full_like(own["place"], layout.log_weight, dtype=torch.float32))

    def note(self, p: LayerPass, n: int) -> None:
        new = slice(p.ctx.past, p.ctx.past + n)
        values = p.layer.vectors("v", new).transpose(1, 2).flatten(2).float()
        frames = values.unflatten(1, (-1, *self.layout.grid)).permute(0, 1, 4, 2, 3)
        parts = F.adaptive_avg_pool2d(frames.flatten(0, 1), POOL).flatten(1)
        signs = self.work["signs"]
        sums = F.pad(parts, (len(signs) - parts.shape[1], 0)) * signs
        sums = F.pad(sums, (0, -len(signs) % WIDTH)).unflatten(1, (-1, WIDTH)).sum(1)
        self.now = p.mean_heads(sums).unflatten(0, (len(values), -1))

    def spread_apart(self, keys: Tensor, key: Tensor) -> Tensor:
        (spread,) = self.layout.spread
        own = self.tensors
        there = (own["age"] >= 0).float()
        mean = (own["key"] * there[:, None]).sum(1, keepdim=True) / there.sum().clamp(min=1)
        alike = F.cosine_similarity(keys - mean, (key - mean[:, 0]).unsqueeze(1), dim=-1)
        return ((1 - alike) / spread).square()

    def distances(self, keys: Tensor, key: Tensor, none: Tensor) -> Tensor:
        """A frame is as near as the nearest of it and its two neighbours: what comes next is what
        came next then."""
        apart = self.spread_apart(keys, key).masked_fill(none, torch.inf)
        return -F.max_pool1d(F.pad(-apart, (1, 1), value=-torch.inf).unsqueeze(1), 3, 1).squeeze(1)
