"""LLaMA's layers with attention and MLPs in the session, and Qwen3's optional norms of q and k.

Modules and parameters have transformers' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.core.types import Shape, SliceableMlp
from tachyscope.models.token_model import Attends


class TrunkConfig(Protocol):
    """The sizes of a trunk."""

    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normed before they are rotated."""


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
            parameter = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
            getattr(part, f"{name}_proj").weight = parameter
        return part


class SelfAttention(nn.Module):
    """The projections around attention, which the session computes."""

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inner, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden, shared, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden, bias=False)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.eps)

    def forward(self, session: Attends, layer: int, x: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        q = self.q_proj(x).unflatten(-1, heads).transpose(1, 2)  # [B, H, S, D]
        k = self.k_proj(x).unflatten(-1, heads).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, heads).transpose(1, 2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(session.attend(layer, q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One layer of LLaMA."""

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.mlp = SwiGlu(config.hidden, config.intermediate)
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)

    def forward(self, session: Attends, layer: int, x: Tensor) -> Tensor:
        x = x + self.self_attn(session, layer, self.input_layernorm(x))
        return x + session.mlp(layer, self.post_attention_layernorm(x), self.mlp)


class Trunk(nn.Module):
    """LLaMA without its head; the session computes attention and MLPs."""

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps)

    def forward(self, session: Attends, x: Tensor) -> Tensor:
        """Normed states [B, S, W] for inputs x [B, S, W]."""
        for i, layer in enumerate(self.layers):
            x = layer(session, i, x)
        return self.norm(x)

    @property
    def mlps(self) -> Sequence[SliceableMlp]:
        layers: Any = self.layers  # a ModuleList has no element type
        return [layer.mlp for layer in layers]


def trunk_shape(config: TrunkConfig, grid: tuple[int, int], guided: bool) -> Shape:
    """The shape of a token model with such a trunk."""
    c = config
    projections = 2 * c.hidden * (c.heads + c.kv_heads) * c.head_dim
    return Shape(
        layers=c.layers,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        width=c.hidden,
        grid=grid,
        token_by_token=True,
        batch=2 if guided else 1,
        paired=guided,
        macs=c.layers * projections,
    )
