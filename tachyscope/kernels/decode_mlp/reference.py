"""The definition of a decode step's MLP, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.decode_mlp.mlp import Error, Kept, MlpWeights
from tachyscope.kernels.gemv.reference import gemv_reference, norm_reference


def decode_mlp_reference(x: Tensor, mlp: MlpWeights, kept: Kept | Error | None = None) -> Tensor:
    """x + the MLP's output, token by token in float64; outputs and ages are kept in place."""
    out = []
    for b in range(x.shape[0]):
        a = norm_reference(x[b : b + 1], mlp.norm)
        h = gemv_reference(a, (mlp.up,))
        for n in range(mlp.up.rows - mlp.linear):
            if mlp.gate is None:
                h[0, n] *= 0.5 * (1 + torch.erf(h[0, n] / 2**0.5))
            else:
                gate = (mlp.gate.dense(torch.float64)[n] * a[0]).sum()
                h[0, n] *= gate * torch.sigmoid(gate)
        y = gemv_reference(h, (mlp.down,))
        if isinstance(kept, Error):
            i = int(kept.place)
            old = kept.input[b, i].double()
            far = (a[0] - old).square().sum() / old.square().sum()
            y = y + kept.error[b, i].double() * torch.exp(-kept.beta * far)
        elif kept is not None:
            i = int(kept.place)
            if kept.input is not None:
                kept.input[b, i] = a[0].to(kept.input.dtype)
            old = kept.output[b : b + 1, i].double()
            drift = 0.0 if kept.drift is None else kept.drift[b].double()
            if kept.skip[b]:
                y = old + drift
                kept.age[b, i] += 1
            else:
                if kept.drift is not None and kept.ready is not None and int(kept.ready):
                    kept.drift[b] = drift + ((y - old)[0] - drift) / kept.memory
                kept.age[b, i] = 0
            kept.output[b, i] = y[0].to(kept.output.dtype)
        out.append(x[b : b + 1].double() + y)
    return torch.cat(out)
