"""Runs MLPs by a slice of their neurons, with a memory of what that leaves out."""

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
    """Computes the calibrated neurons of every MLP; given frames and first ones whole.

    A policy that remembers keeps, of every place of a frame, from when it was last computed whole:

    error  [1, B, N, W]  what the slice was off by
    input  [1, B, N, W]  the MLP's input
    """

    def __init__(self, policy: NeuronReplay, calibration: Calibration | None) -> None:
        self.policy, self.calibration = policy, calibration
        self.ready: set[int] = set()  # passes for which the last chunk left errors
        self._slices: dict[int, Slice] = {}  # by layer

    def begin(self) -> None:
        """A pass starts."""

    def score(self, p: LayerPass, q: Tensor, rotated_q: Tensor, k: Tensor) -> None:
        """Queries and keys tell nothing here."""

    def mlp(self, p: LayerPass, x: Tensor, fn: Mlp) -> Tensor:
        """fn(x) for x [B, S, W], or the slice of it with what is remembered of the rest."""
        ctx, work, own = p.ctx, p.work, p.layer.own["replay"]
        rows, policy = x.shape[:2].numel(), self.policy
        part = self._slice(ctx.layer, fn) if policy.share else None
        if part is None or ctx.prefilling:
            work.add_mlps(fn.macs, rows, rows)
            return fn(x)
        ready = ctx.pass_index in self.ready or not policy.remembers
        # what is given is computed whole: the video rests on it
        whole = ctx.given or not ready or policy.whole(ctx.chunk, ctx.start)
        work.rows_eligible += rows * (ready and not ctx.given)
        work.add_mlps(fn.macs, rows * (1.0 if whole else part.mlp.macs / fn.macs), rows)
        if whole and not policy.remembers:
            return fn(x)
        more = part.macs if whole else part.macs - part.mlp.macs  # beside what was counted
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
        """The chunk is final, after these passes over it."""
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
    """Fixed tensors to keep beside a layer."""
    if not policy.remembers or not policy.share:
        return {}
    size = (1, shape.batch, shape.tokens_per_frame, shape.width)
    return {name: torch.zeros(size, dtype=dtype, device=device) for name in ("error", "input")}
