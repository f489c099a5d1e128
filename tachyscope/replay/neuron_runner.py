"""Computes MLPs by a slice of their neurons, corrected by the last error at each position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Mlp, Shape
from tachyscope.io.calibration import Calibration, Slice
from tachyscope.kernels.replay import remembered_error
from tachyscope.replay.neurons import NeuronReplay
from tachyscope.store import LayerPass


class NeuronRunner:
    """Computes the calibrated neurons of every MLP, and all of them for given and first frames.

    A policy that `remembers` keeps, for every place of a latent frame, from the last time that the
    whole MLP was computed there:

    error  [1, B, N, W]  its output less that of the slice
    input  [1, B, N, W]  its input
    """

    def __init__(self, policy: NeuronReplay, calibration: Calibration | None) -> None:
        self.policy, self.calibration = policy, calibration
        self.ready: set[int] = set()  # passes with errors from the last chunk
        self._slices: dict[int, Slice] = {}  # by layer

    def begin(self) -> None:
        """Start a pass."""

    def score(self, p: LayerPass, q: Tensor, rotated_q: Tensor, k: Tensor) -> None:
        """Not needed: nothing depends on queries and keys."""

    def mlp(self, p: LayerPass, x: Tensor, fn: Mlp) -> Tensor:
        """fn(x) for x [B, S, W], or the slice of it and the last error at each position."""
        ctx, work, own = p.ctx, p.work, p.layer.own["replay"]
        rows, policy = x.shape[:2].numel(), self.policy
        part = self._slice(ctx.layer, fn) if policy.share else None
        if part is None or ctx.prefilling:
            work.add_mlps(fn.macs, rows, rows)
            return fn(x)
        ready = ctx.pass_index in self.ready or not policy.remembers
        # given frames are computed whole: the rest of the video depends on them
        whole = ctx.given or not ready or policy.computes_all(ctx.chunk, ctx.start)
        work.rows_eligible += rows * (ready and not ctx.given)
        work.add_mlps(fn.macs, rows * (1.0 if whole else part.mlp.macs / fn.macs), rows)
        if whole and not policy.remembers:
            return fn(x)
        more = part.macs if whole else part.macs - part.mlp.macs  # the rest is counted above
        work.add_mlp_macs(rows * more)
        about = part(x)
        if not policy.remembers:
            return about
        error, base = (own[name][0].narrow(1, ctx.start, ctx.tokens) for name in ("error", "input"))
        if not whole:
            return about + remembered_error(error, base, x, part.beta)
        y = fn(x)
        torch.sub(y, about, out=error)
        base.copy_(x)
        return y

    def commit(self, passes: set[int]) -> None:
        """End a chunk over which these passes ran."""
        self.ready |= passes

    def _slice(self, layer: int, fn: Any) -> Slice:
        if layer not in self._slices:
            if self.calibration is None:
                raise TachyscopeError(
                    "replay by neurons needs a calibration of the model, and it has none: run "
                    "tachyscope inspect MODEL --fit-neurons FILE, then add file=FILE to the policy"
                )
            self._slices |= self.calibration.slices(self.policy.share, {layer: fn})
        return self._slices[layer]


def neuron_tensors(
    policy: NeuronReplay, shape: Shape, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The policy's tensors of a layer."""
    if not policy.remembers or not policy.share:
        return {}
    size = (1, shape.batch, shape.tokens_per_frame, shape.width)
    return {name: torch.zeros(size, dtype=dtype, device=device) for name in ("error", "input")}
