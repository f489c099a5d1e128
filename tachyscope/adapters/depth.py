"""The depth transformer: from the trunk's state at a place to that place's D codes, one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.adapters.vqgan import Codebooks
from tachyscope.errors import TachyscopeError


@dataclass(frozen=True, slots=True)
class DepthConfig:
    """The depth transformer's own sizes."""

    width: int
    layers: int
    heads: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise TachyscopeError(
                f"the depth transformer's width must be a multiple of its heads, got "
                f"{self.width} and {self.heads}: change one"
            )


@dataclass(frozen=True, slots=True)
class Sampler:
    """How a code is drawn from logits; rows are [conditional…, unconditional…] unless cfg is 1."""

    cfg: float = 3.0
    temperature: float = 1.0
    top_k: int = 900
    top_p: float = 0.96

    def __post_init__(self) -> None:
        rules = {
            "temperature": self.temperature > 0,
            "top_k": self.top_k >= 1,
            "top_p": 0 < self.top_p <= 1,
        }
        for name, kept in rules.items():
            if not kept:
                raise TachyscopeError(
                    f"sampling needs temperature > 0, top_k >= 1 and 0 < top_p <= 1, "
                    f"got {name}={getattr(self, name)}: change it"
                )

    @property
    def guided(self) -> bool:
        """Whether every video takes two rows."""
        return self.cfg != 1

    def guide(self, logits: Tensor) -> Tensor:
        """Logits [V, ...] of V videos from those of their rows, in float32 or better."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not self.guided:
            return logits
        with_prompt, without = logits.chunk(2)
        return without + self.cfg * (with_prompt - without)

    def probabilities(self, logits: Tensor) -> Tensor:
        """What `pick` draws from: of guided logits [..., K], 0 where a code is ruled out."""
        kept, index = self._keep(logits)
        return torch.zeros_like(logits).scatter(-1, index, kept.softmax(-1))

    def pick(self, logits: Tensor, noise: Tensor) -> Tensor:
        """A code [...] of guided logits [..., K], for exponential noise [..., K].

        The noise belongs to codes, not ranks: runs that share it draw the same code wherever
        their logits nearly agree.
        """
        kept, index = self._keep(logits)
        best = (kept - noise.gather(-1, index).log()).argmax(-1, keepdim=True)
        return index.gather(-1, best)[..., 0]

    def _keep(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The top k logits, best first, -inf from where the mass before one reaches top_p."""
        kept, index = (logits / self.temperature).topk(min(self.top_k, logits.shape[-1]))
        if self.top_p < 1:
            mass = kept.softmax(-1).cumsum(-1)
            kept = torch.cat(
                [
                    kept[..., :1],
                    kept[..., 1:].masked_fill(mass[..., :-1] >= self.top_p, float("-inf")),
                ],
                -1,
            )
        return kept, index


def draw_noise(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Exponential noise for `Sampler.pick`: all the randomness of a video comes from here."""
    noise = torch.empty(shape, device=generator.device).exponential_(generator=generator)
    return noise.clamp_min_(torch.finfo(noise.dtype).tiny).to(device, non_blocking=True)


class DepthTransformer(nn.Module):
    """Causal over a place's D codes; parameter names are the published ones."""

    def __init__(self, config: DepthConfig, depth: int, codes: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.in_mlp_1 = nn.Linear(dim, config.width)
        self.in_mlp_2 = nn.Linear(hidden, config.width)
        self.pos_emb_d = nn.Parameter(0.02 * torch.randn(1, depth, config.width))
        self.head_transformer = nn.Module()
        self.head_transformer.blocks = nn.ModuleList(
            Block(config.width, config.heads) for _ in range(config.layers)
        )
        self.classifier_mlp = nn.Module()
        self.classifier_mlp.layer_norm = nn.LayerNorm(config.width)
        self.classifier_mlp.linear = nn.Linear(config.width, codes)

    def forward(self, hidden: Tensor, sums: Tensor) -> Tensor:
        """Logits [..., D, K] of all D codes at once.

        `hidden` [..., W] is the trunk's state that predicts the place, `sums` [..., D, dim] the
        place's given code sums, of which each position sees those before it.
        """
        first = self.in_mlp_2(hidden)[..., None, :]
        x = torch.cat([first, self.in_mlp_1(sums[..., :-1, :])], -2) + self.pos_emb_d[0]
        x = x.flatten(0, -3)
        for block in self.head_transformer.blocks:
            x = block(x)
        return self._classify(x).unflatten(0, hidden.shape[:-1])

    def generate(self, hidden: Tensor, books: Codebooks, sampler: Sampler, noise: Tensor) -> Tensor:
        """Codes [V, D] for trunk states [B, W] and noise [V, D, K]; a video's rows share codes."""
        rows, depth = hidden.shape[0], noise.shape[1]
        blocks = self.head_transformer.blocks
        caches = [block.cache(rows, depth) for block in blocks]
        x, total, codes = self.in_mlp_2(hidden), hidden.new_zeros(()), []
        for d in range(depth):
            x = (x + self.pos_emb_d[0, d])[:, None]
            for block, cache in zip(blocks, caches, strict=True):
                x = block(x, cache, d)
            codes.append(sampler.pick(sampler.guide(self._classify(x[:, 0])), noise[:, d]))
            if d + 1 < depth:
                total = total + books.codebooks[d](codes[-1])
                x = self.in_mlp_1(total).repeat(rows // noise.shape[0], 1)
        return torch.stack(codes, -1)

    def _classify(self, x: Tensor) -> Tensor:
        return self.classifier_mlp.linear(self.classifier_mlp.layer_norm(x))


class Block(nn.Module):
    """Attention and an MLP, each normed before and added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)
        self.attn = nn.Module()
        for name in ("key", "query", "value", "proj"):
            self.attn.add_module(name, nn.Linear(width, width))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def cache(self, rows: int, depth: int) -> tuple[Tensor, Tensor]:
        """Room for the keys and values [B, H, D, head size] of `depth` positions."""
        like = self.attn.key.weight
        shape = rows, self.heads, depth, like.shape[0] // self.heads
        return like.new_empty(shape), like.new_empty(shape)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None, at: int = 0) -> Tensor:
        """x [B, S, E]: all positions, or with a cache the one position `at`."""
        y = self.ln1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, S, head size]
            for part in (self.attn.query, self.attn.key, self.attn.value)
        )
        if cache is not None:
            for kept, new in zip(cache, (k, v), strict=True):
                kept[:, :, at : at + 1] = new
            k, v = (kept[:, :, : at + 1] for kept in cache)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.attn.proj(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))
