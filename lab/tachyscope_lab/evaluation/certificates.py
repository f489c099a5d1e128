"""Whether the certificate lies above the error of every replayed MLP output, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tachyscope.core.observers import Observer
from tachyscope.core.session import Session
from tachyscope.core.stream import Stream
from tachyscope.core.types import PassContext, SliceableMlp
from tachyscope.io.calibration import Calibration
from tachyscope.io.results import Document
from tachyscope.models.vila_u.model import VilaModel
from tachyscope_lab.evaluation.certificate import Certificate
from tachyscope_lab.evaluation.clips import GIVEN, Clip, true_codes
from tachyscope_lab.evaluation.replay_scores import Way, begin, feed_frame
from tachyscope_lab.evaluation.token_measures import spearman


class ErrorObserver(Observer):
    """Computes what replayed outputs should have been: errors [L, B, N], after every frame."""

    def __init__(self, mlps: Sequence[SliceableMlp]) -> None:
        self.mlps = mlps

    def on_open(self, session: Session) -> None:
        shape = session.shape
        size = (shape.layers, shape.batch, shape.tokens_per_frame, shape.width)
        self.inputs, self.outputs = (torch.zeros(size, device=session.device) for _ in range(2))

    def on_mlp(self, ctx: PassContext, x: Tensor, y: Tensor) -> None:
        if not ctx.prefilling:
            here = slice(ctx.start, ctx.start + ctx.tokens)
            self.inputs[ctx.layer, :, here], self.outputs[ctx.layer, :, here] = x, y

    def on_commit(self, ctx: PassContext, n: int) -> None:
        if not ctx.prefilling:
            whole = torch.stack([mlp(x) for mlp, x in zip(self.mlps, self.inputs, strict=True)])
            self.errors = (whole - self.outputs).norm(dim=-1)


@torch.inference_mode()
def certify(
    model: VilaModel, clip: Clip, plan: str, calibration: Calibration, frames: int = GIVEN
) -> list[Document]:
    """Of every replayed token of frames that a plan makes by itself, by layer, then over all:
    how many, how many errors lie above their bound, bound / error, their rank correlation."""
    certificate, truth = Certificate(calibration), ErrorObserver(model.mlps)
    codes, moves = true_codes(model, clip), clip.moves_on(model.device)
    # observers would have every token made by a pass of its own: one session makes the frames, and
    # another, which is watched, is fed them
    stream = Stream(model, begin(model, Way(plan), clip, codes), batch=len(clip.worlds))
    watched = begin(model, Way(plan), clip, codes, observers=[truth, certificate])
    pairs = []
    for i in range(GIVEN, GIVEN + frames):
        latents = stream.generate(clip.action(i, model.device)).latents
        feed_frame(model, watched, latents, moves[i : i + 1])
        watched.commit()
        pairs.append(torch.stack([certificate.bounds, truth.errors]).flatten(2))
    bounds, errors = torch.cat(pairs, -1).cpu()
    rows = [_row(n, *both) for n, both in enumerate(zip(bounds, errors, strict=True))]
    return [*rows, _row(-1, bounds.flatten(), errors.flatten())]


def _row(layer: int, bound: Tensor, error: Tensor) -> Document:
    """Numbers of one layer's bounds and errors; -1 stands for all layers."""
    replayed = bound > 0
    bound, error = bound[replayed], error[replayed]
    ratio = bound / error.clamp_min(1e-12)
    return {
        "layer": layer, "tokens": len(bound), "above": int((error > bound).sum()),
        "ratio_least": float(ratio.min()) if len(ratio) else 0.0,
        "ratio_median": float(ratio.median()) if len(ratio) else 0.0,
        "rank_correlation": spearman(bound, error) if len(ratio) > 2 else 0.0,
    }  # fmt: skip
