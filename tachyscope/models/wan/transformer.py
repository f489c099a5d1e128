"""Wan's transformer under its published names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.exchange import Exchange
from tachyscope.core.types import Mlp
from tachyscope.models.wan import action_modules, camera_rays
from tachyscope.models.wan.action_modules import ActionModule
from tachyscope.models.wan.camera_rays import Injected
from tachyscope.models.wan.clip_vision import ImageEmbedding
from tachyscope.models.wan.key_adapter import KeyAdapter
from tachyscope.models.wan.parts import Controls
from tachyscope.models.wan.stages import (
    EAGER,
    Stages,
    compiled,
    join,
    modulate,
    query_key_value,
    rms,
    split,
    wider,
)
from tachyscope.models.wan.stages_fp8 import Fp8Linear, Fp8Operations, fp8_stages

if TYPE_CHECKING:
    from tachyscope.models.wan.config import WanConfig

# layer, q, k, v, as `attend` takes them
WriteKV = Callable[[int, Tensor, Tensor, Tensor], object]


RAY, OCTAVES = 8, 5  # numbers of a ray; octaves of its sinusoidal embedding


class Calls(Protocol):
    """The session's methods that the transformer calls; training has its own.

    q, k, v and results are [B, H, S, D]; q and k are normed and not yet rotated.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def cross(self, layer: int, q: Tensor) -> Tensor: ...
    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor: ...


class FeedForward(nn.Sequential):
    """down(gelu(up(x))); kernels read its weights by `up` and `down`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU("tanh"), nn.Linear(hidden, dim))
        self.macs = 2 * dim * hidden
        self.stages = EAGER

    def to_fp8(self, operations: Fp8Operations, stages: Stages) -> None:
        for i in (0, 2):
            part = cast(nn.Linear, self[i])
            self[i] = Fp8Linear(part.weight, part.bias, operations)
        self.stages = stages

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
        self.qkv: Fp8Linear | None = None  # replaces q, k and v

    def to_fp8(self, operations: Fp8Operations) -> None:
        """Convert its linears to float8, q, k and v to a single one."""
        self.qkv = Fp8Linear(*self._side_by_side(), operations)
        self.fused = None
        del self.q, self.k, self.v
        self.o = cast(nn.Linear, Fp8Linear(self.o.weight, self.o.bias, operations))

    def _side_by_side(self) -> tuple[Tensor, Tensor]:
        parts = (self.q, self.k, self.v)
        weight = torch.cat([part.weight.detach() for part in parts])
        return weight, torch.cat([part.bias.detach() for part in parts])

    def fuse(self) -> None:
        """Concatenate the weights of q, k and v in memory, so that one linear computes them."""
        if self.fused is not None or self.qkv is not None:
            return
        parts = (self.q, self.k, self.v)
        weight, bias = self._side_by_side()
        for i, part in enumerate(parts):
            part.weight.data, part.bias.data = weight.chunk(3)[i], bias.chunk(3)[i]
        self.fused = weight, bias

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.fused = None  # moved or cast weights are no longer concatenated
        return super()._apply(fn, recurse)

    @property
    def linears(self) -> tuple[tuple[Any, Tensor], ...]:
        """Weight and bias of q, k and v, as one pair if they are fused."""
        if self.qkv is not None:
            return ((self.qkv.weight, self.qkv.bias),)
        # gradients must reach the three themselves
        if self.fused is None or torch.is_grad_enabled():
            q, k, v = self.q, self.k, self.v
            return (q.weight, q.bias), (k.weight, k.bias), (v.weight, v.bias)
        return (self.fused,)

    @property
    def norms(self) -> tuple[Tensor, Tensor]:
        return self.norm_q.weight, self.norm_k.weight

    def query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query_key_value(x, self.linears, self.norms, self.norm_q.eps or 0.0, self.heads)

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = rms(self.k(x), self.norm_k.weight, self.norm_k.eps or 0.0)
        return split(k, self.heads), split(self.v(x), self.heads)


class Block(nn.Module):
    """A layer: self-attention, cross-attention and MLP; timesteps modulate the first and last."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)
        self.self_attn = Attention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)
        self.cross_attn = Attention(config)
        self.ffn = FeedForward(config.dim, config.ffn_dim)
        self.eps = config.eps
        self.stages = EAGER
        self.action_model: ActionModule | None = None
        if config.control == "rays":
            camera_rays.add_to_layer(self, config.dim)

    def to_fp8(self, operations: Fp8Operations, stages: Stages) -> None:
        """Convert its linears to float8, except those of cross-attention."""
        self.self_attn.to_fp8(operations)
        self.ffn.to_fp8(operations, stages)
        self.stages = stages

    def forward(
        self,
        session: Calls,
        layer: int,
        x: Tensor,
        time: Tensor,
        given: Controls | None = None,
    ) -> Tensor:
        """x [B, S, W] after the layer; time [B, F, 6, W]."""
        first, second, stages = self.self_attn, self.cross_attn, self.stages
        six = (time, self.modulation)
        y = join(session.attend(layer, *self._to_attention(x, time)))
        x, q = stages.to_text(
            x, y, *six, first.o.weight, first.o.bias, self.norm3.weight, self.norm3.bias,
            second.q.weight, second.q.bias, second.norm_q.weight, self.eps, second.heads,
            given.injected[layer] if given and given.injected else None,
        )  # fmt: skip
        y = join(session.cross(layer, q))
        if self.action_model is None or given is None or given.inputs is None:
            x, a = stages.to_mlp(x, y, *six, second.o.weight, second.o.bias, self.eps)
        else:
            x = self.action_model(x + second.o(y), given.inputs, layer)
            shift, scale = (self.modulation + time)[:, :, 3:5].unbind(2)
            a = modulate(x, shift, scale, self.eps)
        return stages.from_mlp(x, session.mlp(layer, a, self.ffn), *six)

    def prefill(self, write_kv: WriteKV, layer: int, x: Tensor, time: Tensor) -> None:
        """Call `write_kv` with the layer's q, k and v instead of attention."""
        write_kv(layer, *self._to_attention(x, time))

    def _to_attention(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        part = self.self_attn
        return self.stages.to_attention(
            x, time, self.modulation, part.linears, part.norms, self.eps, part.heads
        )


class Head(nn.Module):
    """From the stream to the prediction's patches, modulated by timesteps."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)
        self.head = nn.Linear(config.dim, config.in_channels * config.patch[1] * config.patch[2])
        self.eps = config.eps

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.modulation + time[:, :, None]).unbind(2)
        return self.head(modulate(x, shift, scale, self.eps))


class WanCausal(nn.Module):
    """Wan's transformer; the session computes attention, cross-attention and MLPs.

    Its parameters have the published names. A configuration may add an `action_embedding`, and a
    `camera_embedding` of each token's ray. LingBot-World's camera linears are in `camera_rays`,
    ABot-World's adapter in `key_adapter`, Matrix-Game's modules in `action_modules`.
    """

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        # the stride equals the kernel, so that it is applied as a linear of patches
        channels = config.in_channels + config.condition_channels
        self.patch_embedding = nn.Conv3d(channels, dim, config.patch, config.patch)
        if config.action_modules:
            self.img_emb = ImageEmbedding(config.text_dim, dim)
        else:
            self.text_embedding = nn.Sequential(
                nn.Linear(config.text_dim, dim), nn.GELU("tanh"), nn.Linear(dim, dim)
            )
        self.time_embedding = nn.Sequential(
            nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        frames, high, wide = config.stride
        if config.control == "rays":
            places = config.patch[1] * config.patch[2]
            camera_rays.add_to_model(self, dim, places * high * wide)
        elif config.control == "keys":
            self.act_control_adapter = KeyAdapter(dim, frames * high * wide, config.patch[1:])
        elif config.actions and not config.action_modules:
            self.action_embedding = nn.Embedding(len(config.actions), dim)
            # actions added to a trained model change nothing at first
            nn.init.zeros_(self.action_embedding.weight)
        if config.camera:
            last = nn.Linear(dim, dim)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            first = nn.Linear(RAY * (1 + 2 * OCTAVES), dim)
            self.camera_embedding = nn.Sequential(first, nn.SiLU(), last)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        if config.action_modules:
            action_modules.add_to_layers(self.blocks, dim, config.control)
        self.stages = EAGER
        self.head = Head(config)

    def forward(self, session: Calls, latents: Tensor, t: Tensor, *controls: Any) -> Tensor:
        """The prediction [B, C, F, h, w] for latents at timesteps t [B, F], from 0 to 1000.

        `controls` are the fields of `Controls` in order; action indices may also be [B, F].
        """
        frames, rows = latents.shape[2], latents.shape[3] // self.config.patch[1]
        x, time, six, given = self._embed(session, latents, t, Controls(*controls))
        for layer, block in enumerate(self.blocks):
            x = block(session, layer, x, six, given)
        y = self.head(x, time)
        if isinstance(session, Exchange):
            y = session.whole(y)
        y = y.unflatten(1, (frames, rows, -1))
        y = y.unflatten(-1, (*self.config.patch[1:], -1))  # [B, F, h', w', ph, pw, C]
        y = y.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4)
        return y.to(latents.dtype)

    def prefill(
        self,
        session: Calls,
        write_kv: WriteKV,
        latents: Tensor,
        t: Tensor,
        *controls: Any,
    ) -> None:
        """`forward` only for its keys and values.

        It ends in the last layer, whose q, k and v are passed to `write_kv`.
        """
        x, _, six, given = self._embed(session, latents, t, Controls(*controls))
        *blocks, last = cast(list[Block], self.blocks)
        for layer, block in enumerate(blocks):
            x = block(session, layer, x, six, given)
        last.prefill(write_kv, len(blocks), x, six)

    def inject(self, rays: Tensor) -> Injected:
        """The scale and shift of every layer by a camera's rays [S, 6 · pixels], for a chunk."""
        return camera_rays.inject(self, self.blocks, rays)

    def fuse(self) -> Self:
        """Fuse q, k and v of self-attention into one linear; names and values stay."""
        for block in cast(list[Block], self.blocks):
            block.self_attn.fuse()
        return self

    def to_fp8(self, operations: Fp8Operations) -> Self:
        """Convert the layers' linears to float8, except those of cross-attention."""
        self.stages = fp8_stages(operations)
        for block in cast(list[Block], self.blocks):
            block.to_fp8(operations, self.stages)
        return self

    def compile_layers(self, backend: str = "inductor") -> Self:
        """Compile the layers' arithmetic, into one program that all layers run."""
        self.fuse()
        for block in cast(list[Block], self.blocks):
            block.stages = block.ffn.stages = compiled(backend, self.stages)
        return self

    def _embed(
        self, session: Calls, latents: Tensor, t: Tensor, given: Controls
    ) -> tuple[Tensor, Tensor, Tensor, Controls]:
        """The stream [B, S, W] before the first layer, times [B, F, W] and [B, F, 6, W], controls.

        Ranks that share a video's tokens get their own part of the stream.
        """
        if given.image is not None:
            latents = torch.cat([latents, given.image.expand(len(latents), -1, -1, -1, -1)], 1)
        x, time = self.embed_patches(latents), self.embed_time(t)
        if given.actions is not None:
            time = time + self.action_embedding(given.actions)
        if given.rays is not None:
            x = x + _through(self.camera_embedding, _octaves(given.rays)).to(x.dtype)
        if given.added is not None:
            x = x + given.added
        wide = wider(x.dtype)
        six = _through(self.time_projection, time).unflatten(-1, (6, -1)).to(wide)
        if isinstance(session, Exchange):
            injected = camera_rays.part(given.injected, session.own)
            x, given = session.own(x), given._replace(injected=injected)
        return x, time.to(wide), six, given

    def embed_patches(self, latents: Tensor) -> Tensor:
        """The tokens [B, S, W] of latents, with the extra channels or without."""
        weight = self.patch_embedding.weight[:, : latents.shape[1]]
        patches = self._patches(latents).to(weight.dtype)
        return F.linear(patches, weight.flatten(1), self.patch_embedding.bias)

    def embed_time(self, t: Tensor) -> Tensor:
        """The embedding [..., W] of timesteps t, from 0 to 1000."""
        return _through(self.time_embedding, self._sinusoid(t))

    def keys_values(self, context: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Each layer's keys and values [B, H, L, D] of a prompt embedded as [B, L, text_dim]."""
        text = _through(
            self.img_emb.proj if self.config.action_modules else self.text_embedding, context
        )
        pairs = [block.cross_attn.key_value(text) for block in cast(list[Block], self.blocks)]
        return tuple(k for k, _ in pairs), tuple(v for _, v in pairs)

    def cast(self, dtype: torch.dtype) -> Self:
        """Cast the model; small tensors that affect every token stay in float32 or wider."""
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
    """x [..., R] with its sines and cosines at OCTAVES octaves: [..., R · (1 + 2 · OCTAVES)]."""
    angles = torch.cat([2.0**i * torch.pi * x for i in range(OCTAVES)], -1)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


def _through(layers: nn.Sequential, x: Tensor) -> Tensor:
    """The layers' output for x cast to their dtype."""
    return layers(x.to(next(layers.parameters()).dtype))
