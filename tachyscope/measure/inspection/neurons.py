"""The share of the MLPs' change from frame to frame that few neurons hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tachyscope.core.observers import Observer
from tachyscope.core.session import Session
from tachyscope.core.types import PassContext, SliceableMlp
from tachyscope.io.results import Document

TOP = (12.5, 25.0, 50.0)  # percent of a layer's neurons, those that change most


class NeuronChange(Observer):
    """Adds up, for every neuron of a token model, the squared change of what it adds to the output.

    That is the change of its activation since the last frame at the same position, times the norm
    of its column of W_down. Given frames count too.
    """

    def __init__(self, mlps: Sequence[SliceableMlp]) -> None:
        self.mlps = mlps

    def on_open(self, session: Session) -> None:
        self.changed = [torch.zeros(mlp.down.shape[1], dtype=torch.float64) for mlp in self.mlps]
        self._places = session.shape.tokens_per_frame
        self._now: dict[int, Tensor] = {}  # inputs of the present frame, by layer: [B, N, W]
        self._last: dict[int, Tensor] = {}

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        if not ctx.prefilling:
            if ctx.layer not in self._now:
                self._now[ctx.layer] = x.new_zeros(x.shape[0], self._places, x.shape[2])
            # a rejected draft is replaced
            self._now[ctx.layer][:, ctx.start : ctx.start + ctx.tokens] = x

    def on_commit(self, ctx: PassContext, n: int) -> None:
        for layer, new in self._now.items():
            mlp = self.mlps[layer]
            if layer in self._last:
                change = mlp.activations(new) - mlp.activations(self._last[layer])
                norms = mlp.down.double().square().sum(0)
                self.changed[layer] += (change.double().square().sum((0, 1)) * norms).cpu()
            self._last[layer] = new
        self._now = {}

    def table(self) -> list[Document]:
        """By layer, the share of all change that the top neurons hold."""
        rows: list[Document] = []
        for layer, changed in enumerate(self.changed):
            held = changed.sort(descending=True).values.cumsum(0) / changed.sum().clamp_min(1e-300)
            counts = [max(1, round(percent / 100 * len(held))) for percent in TOP]
            row: Document = {"layer": layer, "neurons": len(held)}
            row |= {f"top_{p:g}": float(held[n - 1]) for p, n in zip(TOP, counts, strict=True)}
            rows.append(row)
        return rows
