"""How far replayed MLP outputs may be off, while a video is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.observers import Observer
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext
from tachyscope.io.calibration import MARGIN, Calibration
from tachyscope.replay import TokenReplay
from tachyscope.replay.neurons import NeuronReplay


class Certificate(Observer):
    """Bounds, token by token, the error of every MLP output that a token model replayed.

    An output that was kept of input x_old is off by at most gain · |x - x_old|, where `gain` is
    MARGIN times the most that calibration has seen in the layer; what neurons leave out, by the
    same with a gain of its own, and by no more than MARGIN times the most seen at any distance.
    A computed output has bound 0. This holds for inputs like those of the calibration.

    bounds  [L, B, N]  of the last frame, in the units of the MLPs' outputs
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration

    def on_open(self, session: Session) -> None:
        shape, policy = session.shape, session.plan.replay
        if not shape.token_by_token or policy is None:
            raise TachyscopeError(
                f"a certificate is of a token model's replay, got {session.plan}: add replay=..."
            )
        if isinstance(policy, TokenReplay) and policy.drift:
            raise TachyscopeError("drift moves what is replayed, which no certificate covers: off")
        gain = self.calibration.gain
        if len(gain) != shape.layers:
            raise TachyscopeError(
                f"this calibration is of {len(gain)} layers and the model has {shape.layers}: "
                f"run tachyscope-lab calibrate for this one"
            )
        self.session, self.policy = session, policy
        kind: dict[str, Any] = {"dtype": session.dtype, "device": session.device}
        size = (shape.layers, shape.batch, shape.tokens_per_frame)
        self._inputs = torch.zeros(*size, shape.width, **kind)  # of the present frame
        self._bases = torch.zeros(*size, shape.width, **kind)  # what kept outputs were made of
        self.bounds = torch.zeros(size, device=session.device)
        limits = torch.stack([gain, torch.full_like(gain, torch.inf)])
        if isinstance(policy, NeuronReplay):
            limits = self.calibration.off[policy.share].T
        self._gain, self._most, *self._alone = (
            MARGIN * limit.to(session.device)[:, None, None] for limit in limits
        )

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        if not ctx.prefilling:
            self._inputs[ctx.layer, :, ctx.start : ctx.start + ctx.tokens] = x

    def on_commit(self, ctx: PassContext, n: int) -> None:
        if ctx.prefilling:
            return
        if isinstance(self.policy, TokenReplay):
            ages = torch.stack(
                [layer.own["replay"]["age"][0] for layer in self.session.memory.layers]
            )
            computed = (ages == 0).unsqueeze(-1)
            self._bases = torch.where(computed, self._inputs, self._bases)
        elif isinstance(self.policy, NeuronReplay) and self.policy.remembers:
            bases = [layer.own["replay"]["input"][0] for layer in self.session.memory.layers]
            self._bases = torch.stack(bases)
        else:
            whole = torch.zeros_like(self.bounds)
            self.bounds = whole if ctx.given else whole + self._alone[0]
            return
        fine = torch.promote_types(self._inputs.dtype, torch.float32)
        distance = torch.linalg.vector_norm(self._inputs - self._bases, dim=-1, dtype=fine)
        self.bounds = torch.minimum(self._gain * distance.float(), self._most)
