"""Cluster queries and keys, and read the likely clusters (Sparse VideoGen 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from tachyscope.attention.blocks import DENSE_LAYERS, DENSE_PASSES, power_of_two
from tachyscope.core.limits import PART, SHARE, Bound
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape
from tachyscope.core.work import Work
from tachyscope.kernels.hashing import order_of
from tachyscope.kernels.slots import permute
from tachyscope.store import LayerPass, Tensors
from tachyscope_lab.rivals.block_lists import RaggedAttention, check_frames, list_blocks
from tachyscope_lab.rivals.kmeans import kmeans

FIRST, LATER = 50, 2  # Lloyd's iterations from random vectors, and from the last centroids
FRAMES = 21  # latent frames of the video that the paper's numbers of clusters are for
LEAST = 4  # vectors of a cluster in the mean, at least: small frames have fewer clusters


@final
@dataclass(frozen=True)
class Svg2(RaggedAttention, name="svg2"):
    """A cluster of queries reads the clusters of keys that hold `top_p` of its likely attention.

    Past keys are clustered at every commit, and stand in the order of their clusters; queries are
    clustered in every pass. Both go on from the last centroids. A cluster's likely share is that of
    its centroid, times its entries. A block that holds an entry of a cluster is read whole.
    """

    top_p: float = setting(
        0.9,
        "Share of the estimated attention mass of the past that the clusters read add up to, over "
        "0 and at most 1.",
        bound=PART,
    )
    min_ratio: float = setting(
        0.1, "Share of the clusters of keys that is read at least, from 0 to 1.", bound=SHARE
    )
    q_clusters: int = setting(
        300,
        "Clusters of queries for 21 latent frames; a chunk has its part of them, of 4 queries or "
        "more in the mean.",
        bound=Bound(1, 100_000),
    )
    k_clusters: int = setting(
        1000,
        "Clusters of past keys for 21 latent frames or more; fewer have their part of them, of 4 "
        "keys or more in the mean.",
        bound=Bound(1, 100_000),
    )
    dense_passes: float = setting(0.2, DENSE_PASSES, bound=SHARE)
    dense_layers: float = setting(0.025, DENSE_LAYERS, bound=SHARE)

    paper: ClassVar[str] = "Sparse VideoGen 2, arXiv 2505.18875"
    reorders: ClassVar[bool] = True

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        check_frames("svg2", shape, self._block(shape))

    def _clusters(self, clusters: int, shape: Shape, vectors: int) -> int:
        """How many clusters so many vectors have."""
        part = min(1.0, vectors / (FRAMES * shape.tokens_per_frame))
        return max(1, min(round(clusters * part), vectors // LEAST))

    def _block(self, shape: Shape) -> int:
        return self._mean_size(self.k_clusters, shape)

    def _tile(self, shape: Shape) -> int:
        return self._mean_size(self.q_clusters, shape)

    def _mean_size(self, clusters: int, shape: Shape) -> int:
        """About as many as a cluster holds in the mean."""
        vectors = FRAMES * shape.tokens_per_frame
        return power_of_two(vectors // self._clusters(clusters, shape, vectors))

    def _between(self, shape: Shape, prompt: int, past: int) -> slice:
        return slice(0, past)

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
        fine: dict[str, Any] = {"dtype": torch.float32, "device": device}
        keys = self._clusters(self.k_clusters, shape, slots)
        queries = self._clusters(self.q_clusters, shape, shape.max_pass_tokens)
        q, kv = (shape.batch, shape.heads), (shape.batch, shape.kv_heads)
        seeded = torch.Generator().manual_seed(0)
        draw = torch.rand(1, 1, max(keys, queries), generator=seeded, dtype=torch.float32)
        return {
            **super().tensors(shape, slots, device),
            # whose key and value each slot holds, and of which cluster they are
            "order": torch.zeros(*kv, slots, **whole),
            "k_label": torch.zeros(*kv, slots, **whole),
            "k_centroid": torch.zeros(*kv, keys, shape.head_dim, **fine),
            "k_size": torch.zeros(*kv, keys, **fine),
            "q_order": torch.zeros(*q, shape.max_pass_tokens, **whole),
            "q_centroid": torch.zeros(*q, queries, shape.head_dim, **fine),
            # where clusters begin: from 0 to 1 in their share of the vectors
            "draw": draw.to(device),
        }

    def grow(self, own: dict[str, Tensor], larger: Mapping[str, Tensor], kept: int) -> None:
        for name in ("q_centroid", "k_centroid"):
            larger[name][:, :, : own[name].shape[2]] = own[name]
        super().grow(own, larger, kept)

    def build_index(self, p: LayerPass, past: int, kept: int = 0) -> None:
        """Cluster the past's keys, and order it by cluster."""
        layer, ctx = p.layer, p.ctx
        layer.scratch = ()
        if self._dense_layer(ctx) or past == kept:
            return  # there is nothing new: a cache has grown
        own, keys = layer.own["attention"], layer.vectors("k", slice(0, past))
        # what stands in the slots so far: of entries that were kept, as they were ordered
        held = torch.arange(past, device=keys.device).expand(*keys.shape[:2], -1)
        held = torch.cat([own["order"][:, :, :kept].long(), held[:, :, kept:]], 2)
        weight = layer.log_count[:, :, :past].exp().expand(*keys.shape[:2], -1).gather(2, held)
        count = self._clusters(self.k_clusters, ctx.shape, past)
        known = self._clusters(self.k_clusters, ctx.shape, ctx.past) if ctx.past else 0
        centroids = own["k_centroid"][:, :, :count]
        if count > known:
            # new clusters begin at new entries
            new = past - ctx.past
            begin = ctx.past + _spread(own["draw"], count - known, new)
            centroids[:, :, known:] = keys[:, :, begin]
        label, size = self._cluster(keys, weight, centroids, own["draw"], known == 0, p.work)
        order = order_of(label, count)
        layer.permute(slice(0, past), order)
        held = held.gather(2, order)
        own["order"][:, :, :past] = held
        own["k_label"][:, :, :past] = label.gather(2, order)
        own["k_size"][:, :, :count] = size
        self._weigh(layer, ctx.shape, past, held)

    def _cluster(
        self,
        x: Tensor,
        weight: Tensor,
        centroids: Tensor,
        draw: Tensor,
        first: bool,
        work: Work,
    ) -> tuple[Tensor, Tensor]:
        """Labels and sizes of x [B, H, n, D], whose centroids are moved."""
        iterations, count = FIRST if first else LATER, centroids.shape[2]
        work.macs += iterations * x.numel() * count
        spare = _spread(draw, count, x.shape[2])
        moved = centroids.contiguous()
        clusters = kmeans(x, weight, moved, spare, iterations)
        centroids.copy_(moved)
        return clusters

    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        layer, ctx = p.layer, p.ctx
        again = ctx.pass_index in ctx.before  # an observer asks
        if self._reads_all(ctx):
            # centroids follow the queries of dense passes too: the first sparse one goes on there
            if not (again or self._dense_layer(ctx) or (ctx.given and ctx.past)):
                self._cluster_queries(p, q)
            return self._attend_all(p, q)
        if not again:
            self._choose(p, q)
        order = layer.own["attention"]["q_order"][:, :, : ctx.tokens].long()
        sorted_q = q.clone(memory_format=torch.contiguous_format)
        permute(sorted_q, order)
        blocks = -(-ctx.past // self._block(ctx.shape))
        out = self._read_blocks(p, sorted_q, blocks).contiguous()
        permute(out, order, back=True)
        return out

    def _cluster_queries(self, p: LayerPass, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Labels, sizes and centroids of a pass's queries."""
        layer, ctx = p.layer, p.ctx
        own = layer.own["attention"]
        count = self._clusters(self.q_clusters, ctx.shape, ctx.tokens)
        centroids, first = own["q_centroid"][:, :, :count], ctx.past == 0 and not ctx.before
        if first:
            centroids.copy_(q[:, :, _spread(own["draw"], count, ctx.tokens)])
        one = torch.ones(q.shape[:3], dtype=torch.float32, device=q.device)
        label, size = self._cluster(q, one, centroids, own["draw"], first, p.work)
        return label, size, centroids

    def _choose(self, p: LayerPass, q: Tensor) -> None:
        """Order the queries by cluster, and list the blocks that each tile of them reads."""
        layer, ctx = p.layer, p.ctx
        layer.scratch = ()
        own, group = layer.own["attention"], q.shape[1] // layer.k.shape[1]
        label, size, centroids = self._cluster_queries(p, q)
        order = order_of(label, size.shape[2])
        own["q_order"][:, :, : ctx.tokens] = order
        label = label.gather(2, order)
        count = self._clusters(self.k_clusters, ctx.shape, ctx.past)
        k_centroid, k_size, k_label = (
            own[name][:, :, :n].repeat_interleave(group, 1)
            for name, n in (("k_centroid", count), ("k_size", count), ("k_label", ctx.past))
        )
        p.work.macs += centroids.numel() * count
        score = centroids @ k_centroid.mT / math.sqrt(q.shape[3]) + k_size.log().unsqueeze(2)
        chosen = self._likely(score.softmax(-1))
        # a cluster without members asks for nothing, and has nothing to read
        chosen &= (size > 0).unsqueeze(-1) & (k_size > 0).unsqueeze(2)
        tiles = _any_between(chosen.mT, *_ends(label, self._tile(ctx.shape)))
        list_blocks(_any_between(tiles.mT, *_ends(k_label.long(), self._block(ctx.shape))), own)

    def _likely(self, share: Tensor) -> Tensor:
        """The clusters of keys that each cluster of queries reads, of their shares [..., Q, K]."""
        order = share.sort(-1, descending=True)
        # a GPU adds in pieces, and its sums may fall by a rounding
        before = (order.values.cumsum(-1) - order.values).cummax(-1).values
        kept = before <= self.top_p
        kept[..., : max(1, int(self.min_ratio * share.shape[-1]))] = True
        return torch.zeros_like(kept).scatter_(-1, order.indices, kept)


def _spread(draw: Tensor, count: int, vectors: int) -> Tensor:
    """So many of the vectors' indices, drawn at random, one from each share of them."""
    share = torch.arange(count, device=draw.device) + draw[0, 0, :count]
    return (share * (vectors / count)).long().clamp(max=vectors - 1)


def _ends(label: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first and the last label of every `size` in a row of label [B, H, n], in order."""
    first = torch.arange(0, label.shape[2], size, device=label.device)
    last = (first + size - 1).clamp(max=label.shape[2] - 1)
    return label[:, :, first], label[:, :, last]


def _any_between(mask: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Whether mask [B, H, m, n] is true anywhere from `first` to `last` [B, H, r]: [B, H, m, r]."""
    total = pad(mask.cumsum(-1, dtype=torch.int32), (1, 0))
    rows = mask.shape[2]
    low, high = (x.unsqueeze(2).expand(-1, -1, rows, -1) for x in (first, last + 1))
    return total.gather(3, high) > total.gather(3, low)
