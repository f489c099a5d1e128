"""The depth transformer: from the trunk's state to a token's D codes, one by one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.models.config_schema import HEADS, LAYERS, WIDTH, Config, entry
from tachyscope.models.token_model import Sampler
from tachyscope.models.vila_u.vqgan import Codebooks


@dataclass(frozen=True, slots=True)
class DepthConfig(Config):
    """The sizes of the depth transformer."""

    subject = "a depth transformer's"

    width: int = entry(bound=WIDTH, at="embed_dim")
    layers: int = entry(bound=LAYERS, at="head.n_layer")
    heads: int = entry(bound=HEADS, at="head.block.n_head")

    def check_fields(self) -> None:
        sizes = f"{self.width} and {self.heads}"
        self.demand(self.width % self.heads == 0, "width must be a multiple of its heads", sizes)


class DepthTransformer(nn.Module):
    """A transformer that is causal over a token's D codes; published parameter names."""

    def __init__(self, config: DepthConfig, depth: int, codes: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.in_mlp_1 = nn.Linear(dim, config.width)
        self.in_mlp_2 = nn.Linear(hidden, config.width)
        self.pos_emb_d = nn.Parameter(0.02 * torch.randn(1, depth, config.width))
        self.head_transformer = Stack(config)
        parts = {"layer_norm": nn.LayerNorm(config.width), "linear": nn.Linear(config.width, codes)}
        self.classifier_mlp = nn.Sequential(OrderedDict(parts))
        # of a token's D codes: inputs, blocks of 12 W², classifier
        per_code = 12 * config.layers * config.width**2 + codes * config.width
        self.macs = depth * per_code + config.width * (hidden + (depth - 1) * dim)

    def forward(self, hidden: Tensor, sums: Tensor) -> Tensor:
        """Logits [..., D, K] of all D codes at once.

        `hidden` [..., W] is the trunk's state that predicts the token, `sums` [..., D, dim] are the
        cumulative sums of its given code vectors, of which each code sees those before it.
        """
        first = self.in_mlp_2(hidden)[..., None, :]
        x = torch.cat([first, self.in_mlp_1(sums[..., :-1, :])], -2) + self.pos_emb_d[0]
        x = self.head_transformer(x.flatten(0, -3))
        return self.classifier_mlp(x).unflatten(0, hidden.shape[:-1])

    def generate(
        self,
        hidden: Tensor,
        books: Codebooks,
        sampler: Sampler,
        noise: Tensor,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Codes [V, D] for trunk states [B, W] and noise [V, D, K]; a video's rows share codes.

        The guided logits are written to `logits` [V, D, K], if it is given.
        """
        rows, (videos, depth) = len(hidden), noise.shape[:2]
        caches = self.head_transformer.caches(rows, depth, hidden)
        x, total, codes = self.in_mlp_2(hidden), hidden.new_zeros(()), []
        for d in range(depth):
            x = self.head_transformer((x + self.pos_emb_d[0, d])[:, None], caches, d)[:, 0]
            guided = sampler.guide(self.classifier_mlp(x))
            codes.append(sampler.pick(guided, noise[:, d]))
            if logits is not None:
                logits[:, d] = guided
            if d + 1 < depth:
                total = total + books.codebooks[d](codes[-1])
                x = self.in_mlp_1(total).repeat(rows // videos, 1)
        return torch.stack(codes, -1)


Cache = tuple[Tensor, Tensor]  # keys and values [B, H, D, head size] of D positions


class Stack(nn.Module):
    """The blocks, over all positions, or over one with caches."""

    def __init__(self, config: DepthConfig) -> None:
        super().__init__()
        self.heads, self.size = config.heads, config.width // config.heads
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))

    def caches(self, rows: int, depth: int, like: Tensor) -> list[Cache]:
        shape = rows, self.heads, depth, self.size
        return [(like.new_empty(shape), like.new_empty(shape)) for _ in self.blocks]

    def forward(self, x: Tensor, caches: Sequence[Cache] = (), at: int = 0) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None, at)
        return x


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, cache: Cache | None, at: int) -> Tensor:
        x = x + self.attn(self.ln1(x), cache, at)
        return x + self.mlp(self.ln2(x))


class Attention(nn.Module):
    """Causal attention of x [B, S, E]: all positions, or with a cache position `at` alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key = nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: Cache | None, at: int) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, S, head size]
            for part in (self.query, self.key, self.value)
        )
        if cache is not None:
            for kept, new in zip(cache, (k, v), strict=True):
                kept[:, :, at : at + 1] = new
            k, v = (kept[:, :, : at + 1] for kept in cache)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.proj(o.transpose(1, 2).flatten(2))
