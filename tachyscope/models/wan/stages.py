"""A layer of Wan's transformer between the session's calls, as functions of tensors alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Stages(NamedTuple):
    """The functions of a layer between the session's calls.

    They take weights as arguments, so that all layers share one compiled program.
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
    return query_key_value(modulate(x, shift, scale, eps), linears, norms, eps, heads)


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
    injected: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The stream after attention's output y [B, S, W]; queries of cross-attention.

    `injected` are a scale and a shift of that stream.
    """
    x = _add(x, F.linear(y, out, out_bias), (modulation + time)[:, :, 2])
    if injected is not None:
        x = torch.addcmul(injected[1], injected[0], x)
    a = normed(x, norm, norm_bias, eps, time.dtype)
    return x, split(rms(F.linear(a, query, query_bias), query_norm, eps), heads)


def _to_mlp(
    x: Tensor,
    y: Tensor,
    time: Tensor,
    modulation: Tensor,
    out: Tensor,
    out_bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The stream after cross-attention's output y [B, S, W]; the MLP's input."""
    x = x + F.linear(y, out, out_bias)
    shift, scale = (modulation + time)[:, :, 3:5].unbind(2)
    return x, modulate(x, shift, scale, eps)


def _from_mlp(x: Tensor, y: Tensor, time: Tensor, modulation: Tensor) -> Tensor:
    """The stream after the MLP's output y [B, S, W]."""
    return _add(x, y, (modulation + time)[:, :, 5])


def _feed_forward(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, up_bias), approximate="tanh"), down, down_bias)


EAGER = Stages(_to_attention, _to_text, _to_mlp, _from_mlp, _feed_forward)


@functools.cache
def compiled(backend: str, stages: Stages = EAGER) -> Stages:
    """The stages compiled for each shape that they are called with; models share them."""
    each: Any = (torch.compile(stage, dynamic=False, backend=backend) for stage in stages)
    return Stages(*each)


def wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float, wide: torch.dtype) -> Tensor:
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps).to(x.dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # under autocast x is narrower than the weight, for which torch has no fused norm
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, S, D]


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # [B, S, W]


def query_key_value(
    x: Tensor,
    linears: Sequence[tuple[Tensor, Tensor]],
    norms: tuple[Tensor, Tensor],
    eps: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if len(linears) == 1:
        q, k, v = F.linear(x, *linears[0]).chunk(3, -1)
    else:
        q, k, v = F.linear(x, *linears[0]), F.linear(x, *linears[1]), F.linear(x, *linears[2])
    q, k = rms(q, norms[0], eps), rms(k, norms[1], eps)
    return split(q, heads), split(k, heads), split(v, heads)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """norm(x) · (1 + scale) + shift, for x [B, S, W] and one shift and scale a frame [B, F, W]."""
    normed = F.layer_norm(x.to(shift.dtype), x.shape[-1:], eps=eps)
    by_frame = normed.unflatten(1, (shift.shape[1], -1))
    moved = torch.addcmul(shift[:, :, None], by_frame, 1 + scale[:, :, None])
    return moved.flatten(1, 2).to(x.dtype)


def _add(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x + y · gate, for x and y [B, S, W] and one gate a frame [B, F, W]."""
    by_frame = x.to(gate.dtype).unflatten(1, (gate.shape[1], -1))
    y = y.to(gate.dtype).unflatten(1, (gate.shape[1], -1))
    return torch.addcmul(by_frame, y, gate[:, :, None]).flatten(1, 2).to(x.dtype)
