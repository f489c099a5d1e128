"""VILA-U: a LLaMA trunk writes video place by place, a depth transformer the codes of a place.

Modules and parameters have the published names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.models.token_model import Attends
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.depth import DepthTransformer
from tachyscope.models.vila_u.vqgan import RqVae


class SwiGlu(nn.Module):
    """LLaMA's MLP: down(silu(gate x) · up x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.macs = 3 * width * inner
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    @property
    def gate(self) -> Tensor:
        return self.gate_proj.weight

    @property
    def up(self) -> Tensor:
        return self.up_proj.weight

    @property
    def down(self) -> Tensor:
        return self.down_proj.weight

    def activations(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activations(x))

    def slice(self, index: Tensor) -> SwiGlu:
        with torch.device("meta"):
            part = SwiGlu(self.gate.shape[1], len(index))
        weights = {"gate": self.gate[index], "up": self.up[index], "down": self.down[:, index]}
        for name, weight in weights.items():
            found = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
            getattr(part, f"{name}_proj").weight = found
        return part


class SelfAttention(nn.Module):
    """The projections around attention, which itself is the session's."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inner, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden, shared, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden, bias=False)

    def forward(self, session: Attends, layer: int, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, S, D]
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(session.attend(layer, q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One layer of LLaMA."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.mlp = SwiGlu(config.hidden, config.intermediate)
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)

    def forward(self, session: Attends, layer: int, x: Tensor) -> Tensor:
        x = x + self.self_attn(session, layer, self.input_layernorm(x))
        return x + session.mlp(layer, self.post_attention_layernorm(x), self.mlp)


class Trunk(nn.Module):
    """LLaMA less its head; attention and MLPs are the session's to run."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps)

    def forward(self, session: Attends, x: Tensor) -> Tensor:
        """States [B, S, W], normed, for inputs x [B, S, W]."""
        for i, layer in enumerate(self.layers):
            x = layer(session, i, x)
        return self.norm(x)


class Llm(nn.Module):
    """The folder `llm`."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.model = Trunk(config)
        # kept so that files hold what other readers of them expect; never run here
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)


class VisionTower(nn.Module):
    """The folder `vision_tower`."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        books = config.depth, config.codes, config.code_dim
        self.rqvaesiglip = RqVae(config.pixels, *books, config.shared_codebook)
        self.rqtransformer = DepthTransformer(config.head, *books, config.hidden)


class Projector(nn.Module):
    """The folder `mm_projector`: code sums, and a frame's action, to the trunk's inputs."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(config.code_dim, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.hidden),
        )
        count = len(config.actions)
        self.action_embedding = nn.Embedding(count, config.hidden) if count else None

    def forward(self, sums: Tensor, actions: Tensor | int | None = None) -> Tensor:
        """Inputs [..., W] of code sums [..., dim]; actions [...], or one for all."""
        x = self.layers(sums)
        return x if self.action_embedding is None else x + self.action_embedding.weight[actions]


class Vila(nn.Module):
    """The three folders' modules."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.llm = Llm(config)
        self.vision_tower = VisionTower(config)
        self.mm_projector = Projector(config)

    @property
    def trunk(self) -> Trunk:
        return self.llm.model

    @property
    def head(self) -> DepthTransformer:
        return self.vision_tower.rqtransformer

    @property
    def vae(self) -> RqVae:
        return self.vision_tower.rqvaesiglip

    def embed(self, codes: Tensor, actions: Tensor | int | None = None) -> Tensor:
        """The trunk's inputs [..., W] for codes [..., D]."""
        return self.mm_projector(self.vae.quantizer.sum(codes), actions)
