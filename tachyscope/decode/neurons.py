"""A slice of an MLP as kernels read it: calibrated neurons, and a map in place of the others."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.io.calibration import Cut
from tachyscope.kernels.decode_mlp import MlpWeights
from tachyscope.kernels.gemv import Weight
from tachyscope.kernels.gemv.weights import MULTIPLE


def slice_mlp(mlp: MlpWeights, cut: Cut) -> MlpWeights:
    """The neurons of a cut, copied, and its map as neurons that are linear.

    Rows keep their codes. Columns of `down` are rounded again where they are codes, since other
    columns now share their scale.
    """
    into, out_of = _low_rank(cut.maps)
    down = mlp.down.dense(cut.bias.dtype)[:, cut.index]
    spare = -(len(cut.index) + len(into)) % MULTIPLE[mlp.down.bits]
    into = torch.cat([into, into.new_zeros(spare, into.shape[1])])
    out_of = torch.cat([out_of, out_of.new_zeros(len(out_of), spare)], 1)
    if mlp.down.bits < 16:
        # of a size with down's columns, with which they share a scale
        size = out_of.abs().amax(0).clamp_min(1e-12) / down.abs().amax()
        into, out_of = into * size[:, None], out_of / size
    joined = mlp.down.like(torch.cat([down, out_of], 1))
    return MlpWeights(
        mlp.norm,
        None if mlp.gate is None else mlp.gate.pick(cut.index),
        mlp.up.pick(cut.index).below(mlp.up.like(into)),
        Weight(joined.data, joined.scale, cut.bias),
        len(into),
    )


def _low_rank(maps: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """A linear map of x as two matrices, [R, W] and [W, R]; a square one of a small model as is."""
    if len(maps) == 2:
        return maps[0].T, maps[1].T
    (square,) = maps
    return square.T, torch.eye(len(square), dtype=square.dtype, device=square.device)
