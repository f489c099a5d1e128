"""Waypoint's transformer: predicts a latent frame's velocity from noise level and controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.types import Mlp
from tachyscope.models.waypoint.config import FOURIER, WaypointConfig

BASE = 10_000.0  # of a noise level's frequencies

Write = Callable[[int, Tensor, Tensor, Tensor], Any]


class Attends(Protocol):
    """The session's methods that the transformer calls."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor: ...


class FeedForward(nn.Module):
    """Two linears without biases, SiLU between them."""

    def __init__(self, wide: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(wide, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, out, bias=False)
        self.macs = hidden * (wide + out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(x)))


class Embedding(nn.Module):
    """A feed-forward network under its published name."""

    def __init__(self, wide: int, config: WaypointConfig) -> None:
        super().__init__()
        self.mlp = FeedForward(wide, config.mlp_ratio * config.d_model, config.d_model)


class Attention(nn.Module):
    """Projections around an attention that the session computes."""

    def __init__(self, config: WaypointConfig) -> None:
        super().__init__()
        wide, head = config.d_model, config.head_dim
        self.head = head
        self.q_proj = nn.Linear(wide, config.n_heads * head, bias=False)
        self.k_proj = nn.Linear(wide, config.n_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(wide, config.n_kv_heads * head, bias=False)
        self.out_proj = nn.Linear(config.n_heads * head, wide, bias=False)
        self.v_lamb = nn.Parameter(torch.empty(()))  # weight of the first layer's values

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values of x [B, S, W] as [B, H, S, D]; and the first layer's values."""
        q, k, v = (self._split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        first = v if first is None else first
        return rms(q), rms(k), torch.lerp(v, first, self.v_lamb), first

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


class Fusion(nn.Module):
    """An MLP of the stream and the controls, added to the stream."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.fc1_x = nn.Linear(wide, wide, bias=False)
        self.fc1_c = nn.Linear(wide, wide, bias=False)
        self.fc2 = nn.Linear(wide, wide, bias=False)

    def forward(self, x: Tensor, control: Tensor) -> Tensor:
        """What is added to x [B, S, W], for a control embedding [1, 1, W]."""
        return self.fc2(F.silu(self.fc1_x(rms(x)) + self.fc1_c(rms(control))))


class Block(nn.Module):
    """A layer; its modulation by noise has biases of its own, and linears that layers share."""

    def __init__(self, config: WaypointConfig, layer: int) -> None:
        super().__init__()
        wide = config.d_model
        self.attn = Attention(config)
        self.dit_mlp = FeedForward(wide, config.mlp_ratio * wide, wide)
        self.bias_in = nn.Parameter(torch.empty(2, wide))  # of attention and of the MLP
        self.ctrl_mlpfusion = Fusion(wide) if config.fuses(layer) else None


class Waypoint(nn.Module):
    """The whole transformer, its linears without biases."""

    def __init__(self, config: WaypointConfig) -> None:
        super().__init__()
        wide, patch = config.d_model, config.patch
        self.config = config
        self.patchify = nn.Conv2d(config.channels, wide, patch, patch, bias=False)
        self.denoise_step_emb = Embedding(FOURIER, config)
        self.ctrl_emb = Embedding(config.n_buttons + 3, config)
        # scale, shift and gate of attention, then of the MLP; every layer's
        self.cond_proj = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in range(6))
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.out_norm = nn.Linear(wide, 2 * wide, bias=False)
        self.unpatchify = nn.ConvTranspose2d(wide, config.channels, patch, patch)

    def embed_patches(self, x: Tensor) -> Tensor:
        """The tokens [B, S, W] of latents x [B, C, 1, h, w]."""
        return self.patchify(x[:, :, 0].to(self.patchify.weight.dtype)).flatten(2).mT

    def embed_noise(self, sigma: Tensor) -> Tensor:
        """The embedding [W] of a noise level, in float32 or wider."""
        wide = torch.promote_types(self.patchify.weight.dtype, torch.float32)
        kind: dict[str, Any] = {"dtype": wide, "device": sigma.device}
        speeds = torch.logspace(0, -1, FOURIER // 2, BASE, **kind)
        angle = 1000 * sigma.to(wide) * speeds
        e = 2**0.5 * torch.cat([angle.sin(), angle.cos()])
        mlp = self.denoise_step_emb.mlp
        return F.linear(F.silu(F.linear(e, mlp.fc1.weight.to(wide))), mlp.fc2.weight.to(wide))

    def forward(
        self,
        session: Attends,
        x: Tensor,
        sigma: Tensor,
        control: Tensor,
        write: Write | None = None,
    ) -> Tensor | None:
        """The velocity [B, C, 1, h, w] of latents x at noise level `sigma`, a scalar tensor.

        `control` [buttons + 3] are the pressed buttons, mouse and wheel. With `write` the pass ends
        in the last layer, whose q, k and v are passed to it.
        """
        dtype, last = self.patchify.weight.dtype, self.config.n_layers - 1
        y, c = self.embed_patches(x), self.embed_noise(sigma).to(dtype)
        pressed = self.ctrl_emb.mlp(control.to(dtype))[None, None]
        blocks = cast(list[Block], self.blocks)
        biases = torch.stack([block.bias_in for block in blocks])
        hidden = F.silu(c + biases)  # [layers, 2, W]
        parts = [part(hidden[:, i // 3]) for i, part in enumerate(self.cond_proj)]
        first: Tensor | None = None
        for i, block in enumerate(blocks):
            scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = (part[i] for part in parts)
            q, k, v, first = block.attn(modulated(y, scale, shift), first)
            if write is not None and i == last:
                write(i, q, k, v)
                return None
            seen = session.attend(i, q, k, v).transpose(1, 2).flatten(2)
            y = y + gate * block.attn.out_proj(seen)
            if block.ctrl_mlpfusion is not None:
                y = y + block.ctrl_mlpfusion(y, pressed)
            a = modulated(y, mlp_scale, mlp_shift)
            y = y + mlp_gate * session.mlp(i, a, block.dit_mlp)
        y = F.silu(modulated(y, *self.out_norm(F.silu(c)).chunk(2)))
        places = y.mT.unflatten(2, (x.shape[3] // self.config.patch[0], -1))
        return self.unpatchify(places)[:, :, None].to(x.dtype)


def rms(x: Tensor) -> Tensor:
    """x by its root mean square, without a weight."""
    return F.rms_norm(x, x.shape[-1:])


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return rms(x) * (1 + scale) + shift
