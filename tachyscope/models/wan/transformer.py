"""Wan's transformer under its published names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.types import Mlp

if TYPE_CHECKING:
    from tachyscope.models.wan.config import WanConfig

# layer, q, k, v, as `attend` takes them
WriteKV = Callable[[int, Tensor, Tensor, Tensor], object]


RAY, OCTAVES = 8, 5  # numbers of a ray; octaves at which a network is told them


class Calls(Protocol):
    """What the transformer asks of a session, or of what stands in for one in training.

    q, k, v and results are [B, H, S, D]; q and k are normed and not yet rotated.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def cross(self, layer: int, q: Tensor) -> Tensor: ...
    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor: ...


class Stages(NamedTuple):
    """What a layer computes between the session's calls, as functions of tensors alone.

    No layer is named in them, so that all layers can share one compiled program.
    """

    to_attention: Callable[..., tuple[Tensor, Tensor, Tensor]]
    to_text: Callable[..., tuple[Tensor, Tensor]]
    to_mlp: Callable[..., tuple[Tensor, Tensor]]
    from_mlp: Callable[..., Tensor]
    feed_forward: Callable[..., Tensor]


def _to_attention(
    x: Tensor,
    time: Tensor,
    modulation: Tensor,
    linears: Sequence[tuple[Tensor, Tensor]],
    norms: tuple[Tensor, Tensor],
    eps: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the stream x [B, S, W]; time [B, F, 6, W]."""
    shift, scale = (modulation + time)[:, :, 0:2].unbind(2)
    return _query_key_value(_modulate(x, shift, scale, eps), linears, norms, eps, heads)


def _to_text(
    x: Tensor,
    y: Tensor,
    time: Tensor,
    modulation: Tensor,
    out: Tensor,
    out_bias: Tensor,
    norm: Tensor,
    norm_bias: Tensor,
    query: Tensor,
    query_bias: Tensor,
    query_norm: Tensor,
    eps: float,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """The stream after attention, which gave y [B, S, W]; queries for the prompt."""
    x = _add(x, F.linear(y, out, out_bias), (modulation + time)[:, :, 2])
    wide = wider(x.dtype)
    a = F.layer_norm(x.to(wide), x.shape[-1:], norm.to(wide), norm_bias.to(wide), eps).to(x.dtype)
    return x, _split(_rms(F.linear(a, query, query_bias), query_norm, eps), heads)


def _to_mlp(
    x: Tensor,
    y: Tensor,
    time: Tensor,
    modulation: Tensor,
    out: Tensor,
    out_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The stream after the prompt, which gave y [B, S, W]; what the MLP is given."""
    x = x + F.linear(y, out, out_bias)
    shift, scale = (modulation + time)[:, :, 3:5].unbind(2)
    return x, _modulate(x, shift, scale, eps)


def _from_mlp(x: Tensor, y: Tensor, time: Tensor, modulation: Tensor) -> Tensor:
    """The stream after the MLP, which gave y [B, S, W]."""
    return _add(x, y, (modulation + time)[:, :, 5])


def _feed_forward(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, up_bias), approximate="tanh"), down, down_bias)


EAGER = Stages(_to_attention, _to_text, _to_mlp, _from_mlp, _feed_forward)


@functools.cache
def compiled(backend: str) -> Stages:
    """The stages compiled, a program for every shape they meet; models share them."""
    stages: Any = (torch.compile(stage, dynamic=False, backend=backend) for stage in EAGER)
    return Stages(*stages)


class FeedForward(nn.Sequential):
    """down(gelu(up(x))), as a value that can be called, or opened by a kernel."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU("tanh"), nn.Linear(hidden, dim))
        self.macs = 2 * dim * hidden
        self.stages = EAGER

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        return self.stages.feed_forward(x, up.weight, up.bias, down.weight, down.bias)

    @property
    def up(self) -> nn.Linear:
        return cast(nn.Linear, self[0])

    @property
    def down(self) -> nn.Linear:
        return cast(nn.Linear, self[2])


class Attention(nn.Module):
    """Projections and norms around an attention that the session computes."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.o = nn.Linear(config.dim, config.dim)
        # over all heads together
        self.norm_q = nn.RMSNorm(config.dim, config.eps)
        self.norm_k = nn.RMSNorm(config.dim, config.eps)
        self.fused: tuple[Tensor, Tensor] | None = None

    def fuse(self) -> None:
        """Put q, k and v side by side in memory, where one linear can read them."""
        if self.fused is not None:
            return
        parts = (self.q, self.k, self.v)
        weight = torch.cat([part.weight.detach() for part in parts])
        bias = torch.cat([part.bias.detach() for part in parts])
        for i, part in enumerate(parts):
            part.weight.data, part.bias.data = weight.chunk(3)[i], bias.chunk(3)[i]
        self.fused = weight, bias

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.fused = None  # moved or cast, the three are no longer side by side
        return super()._apply(fn, recurse)

    @property
    def linears(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Weight and bias of q, k and v, as one pair where they are fused."""
        # gradients must reach the three themselves
        if self.fused is None or torch.is_grad_enabled():
            return tuple((part.weight, part.bias) for part in (self.q, self.k, self.v))
        return (self.fused,)

    @property
    def norms(self) -> tuple[Tensor, Tensor]:
        return self.norm_q.weight, self.norm_k.weight

    def query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _query_key_value(x, self.linears, self.norms, self.norm_q.eps or 0.0, self.heads)

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = _rms(self.k(x), self.norm_k.weight, self.norm_k.eps or 0.0)
        return _split(k, self.heads), _split(self.v(x), self.heads)


class Block(nn.Module):
    """One layer: self-attention and MLP modulated by each latent frame's time, the text between."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)
        self.self_attn = Attention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)
        self.cross_attn = Attention(config)
        self.ffn = FeedForward(config.dim, config.ffn_dim)
        self.eps = config.eps
        self.stages = EAGER

    def forward(self, session: Calls, layer: int, x: Tensor, time: Tensor) -> Tensor:
        """x [B, S, W] after the layer; time [B, F, 6, W]."""
        first, second, stages = self.self_attn, self.cross_attn, self.stages
        six = (time, self.modulation)
        y = _join(session.attend(layer, *self._to_attention(x, time)))
        x, q = stages.to_text(
            x, y, *six, first.o.weight, first.o.bias, self.norm3.weight, self.norm3.bias,
            second.q.weight, second.q.bias, second.norm_q.weight, self.eps, second.heads,
        )  # fmt: skip
        y = _join(session.cross(layer, q))
        x, a = stages.to_mlp(x, y, *six, second.o.weight, second.o.bias, self.eps)
        return stages.from_mlp(x, session.mlp(layer, a, self.ffn), *six)

    def prefill(self, write_kv: WriteKV, layer: int, x: Tensor, time: Tensor) -> None:
        """Hand over what attention would be given, and compute nothing from it."""
        write_kv(layer, *self._to_attention(x, time))

    def _to_attention(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        part = self.self_attn
        return self.stages.to_attention(
            x, time, self.modulation, part.linears, part.norms, self.eps, part.heads
        )


class Head(nn.Module):
    """From the stream to the prediction's patches, modulated by time."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)
        self.head = nn.Linear(config.dim, config.in_channels * config.patch[1] * config.patch[2])
        self.eps = config.eps

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.modulation + time[:, :, None]).unbind(2)
        return self.head(_modulate(x, shift, scale, self.eps))


class WanCausal(nn.Module):
    """Wan's transformer with attention, cross-attention and MLPs left to the session.

    Its parameters have the published names. Additions, each only where the configuration asks for
    it: `action_embedding`, and `camera_embedding` of the ray behind every token.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        # holds the published weight; a stride equal to the kernel makes it a linear of patches
        self.patch_embedding = nn.Conv3d(config.in_channels, dim, config.patch, config.patch)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU("tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        if config.actions:
            self.action_embedding = nn.Embedding(len(config.actions), dim)
            # a model that gains actions starts as it was
            nn.init.zeros_(self.action_embedding.weight)
        if config.camera:
            last = nn.Linear(dim, dim)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            first = nn.Linear(RAY * (1 + 2 * OCTAVES), dim)
            self.camera_embedding = nn.Sequential(first, nn.SiLU(), last)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)

    def forward(
        self,
        session: Calls,
        latents: Tensor,
        t: Tensor,
        actions: Tensor | None = None,
        rays: Tensor | None = None,
    ) -> Tensor:
        """The prediction [B, C, F, h, w] for latents at timesteps t [B, F], from 0 to 1000.

        actions [F] or [B, F] are indices; rays [B, S, 8] are where the camera stands (x, y), the
        direction in which each token lies and the point of the walls that lies there; None for a
        model without them.
        """
        frames, rows = latents.shape[2], latents.shape[3] // self.config.patch[1]
        x, time, six = self._embed(latents, t, actions, rays)
        for layer, block in enumerate(self.blocks):
            x = block(session, layer, x, six)
        y = self.head(x, time).unflatten(1, (frames, rows, -1))
        y = y.unflatten(-1, (*self.config.patch[1:], -1))  # [B, F, h', w', ph, pw, C]
        y = y.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4)
        return y.to(latents.dtype)

    def prefill(
        self,
        session: Calls,
        write_kv: WriteKV,
        latents: Tensor,
        t: Tensor,
        actions: Tensor | None = None,
        rays: Tensor | None = None,
    ) -> None:
        """`forward` for the sake of what it leaves in the session.

        It ends in the last layer, where `write_kv` takes what attention would, and reads nothing.
        """
        x, _, six = self._embed(latents, t, actions, rays)
        *blocks, last = cast(list[Block], self.blocks)
        for layer, block in enumerate(blocks):
            x = block(session, layer, x, six)
        last.prefill(write_kv, len(blocks), x, six)

    def fuse(self) -> Self:
        """The model with q, k and v of self-attention as one linear; names and numbers stay."""
        for block in cast(list[Block], self.blocks):
            block.self_attn.fuse()
        return self

    def compile_layers(self, backend: str = "inductor") -> Self:
        """The model with its layers' arithmetic compiled: one program, which all of them run."""
        self.fuse()
        for block in cast(list[Block], self.blocks):
            block.stages = block.ffn.stages = compiled(backend)
        return self

    def _embed(
        self, latents: Tensor, t: Tensor, actions: Tensor | None, rays: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The stream [B, S, W] before the first layer; times [B, F, W], and [B, F, 6, W]."""
        x, time = self.embed_patches(latents), self.embed_time(t)
        if actions is not None:
            time = time + self.action_embedding(actions)
        if rays is not None:
            x = x + _through(self.camera_embedding, _octaves(rays)).to(x.dtype)
        wide = wider(x.dtype)
        six = _through(self.time_projection, time).unflatten(-1, (6, -1)).to(wide)
        return x, time.to(wide), six

    def embed_patches(self, latents: Tensor) -> Tensor:
        """The tokens [B, S, W] of latents."""
        weight = self.patch_embedding.weight
        patches = self._patches(latents).to(weight.dtype)
        return F.linear(patches, weight.flatten(1), self.patch_embedding.bias)

    def embed_time(self, t: Tensor) -> Tensor:
        """The embedding [..., W] of timesteps t, from 0 to 1000."""
        return _through(self.time_embedding, self._sinusoid(t))

    def keys_values(self, context: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Each layer's keys and values [B, H, L, D] of a prompt embedded as [B, L, text_dim]."""
        text = _through(self.text_embedding, context)
        pairs = [block.cross_attn.key_value(text) for block in cast(list[Block], self.blocks)]
        return tuple(k for k, _ in pairs), tuple(v for _, v in pairs)

    def cast(self, dtype: torch.dtype) -> Self:
        """The model in dtype; small tensors whose rounding every token would feel stay finer."""
        fine = ("time_embedding", "action_embedding", "camera_embedding", "modulation", "norm3")
        for name, parameter in self.named_parameters():
            small = any(part in name for part in fine)
            parameter.data = parameter.data.to(wider(dtype) if small else dtype)
        return self

    def _patches(self, latents: Tensor) -> Tensor:
        """Tokens [B, S, C · ph · pw] by frame, row, column."""
        _, high, wide = self.config.patch
        x = latents.unflatten(4, (-1, wide)).unflatten(3, (-1, high))  # [B, C, F, h', ph, w', pw]
        return x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)

    def _sinusoid(self, t: Tensor) -> Tensor:
        # in float64: at t = 1000 a float32 angle is off by 1e-4
        half = self.config.freq_dim // 2
        i = torch.arange(half, dtype=torch.float64, device=t.device)
        angle = t.double()[..., None] * 10000.0 ** (-i / half)
        return torch.cat([angle.cos(), angle.sin()], -1)


def _octaves(x: Tensor) -> Tensor:
    """x [..., R], and sine and cosine of it at so many octaves: [..., R · (1 + 2 · OCTAVES)]."""
    angles = torch.cat([2.0**i * torch.pi * x for i in range(OCTAVES)], -1)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


def _through(layers: nn.Sequential, x: Tensor) -> Tensor:
    """The layers' output, x being brought to their dtype."""
    return layers(x.to(next(layers.parameters()).dtype))


def wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # under autocast x is narrower than the weight, for which torch has no fused norm
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, S, D]


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # [B, S, W]


def _query_key_value(
    x: Tensor,
    linears: Sequence[tuple[Tensor, Tensor]],
    norms: tuple[Tensor, Tensor],
    eps: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    projected = [F.linear(x, *linear) for linear in linears]
    q, k, v = projected if len(projected) == 3 else projected[0].chunk(3, -1)
    q, k = (_rms(part, norm, eps) for part, norm in zip((q, k), norms, strict=True))
    return _split(q, heads), _split(k, heads), _split(v, heads)


def _modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """norm(x) · (1 + scale) + shift, for x [B, S, W] and one shift and scale a frame [B, F, W]."""
    normed = F.layer_norm(x.to(wider(x.dtype)), x.shape[-1:], eps=eps)
    by_frame = normed.unflatten(1, (shift.shape[1], -1))
    moved = torch.addcmul(shift[:, :, None], by_frame, 1 + scale[:, :, None])
    return moved.flatten(1, 2).to(x.dtype)


def _add(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + y · gate, for x and y [B, S, W] and one gate a frame [B, F, W]."""
    x_, y_ = (z.to(wider(x.dtype)).unflatten(1, (gate.shape[1], -1)) for z in (x, y))
    return torch.addcmul(x_, y_, gate[:, :, None]).flatten(1, 2).to(x.dtype)
