"""The definition of a decode step's MLP, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.decode_mlp.mlp import Kept, MlpWeights
from tachyscope.kernels.gemv.reference import gemv_reference, norm_reference


def decode_mlp_reference(x: Tensor, mlp: MlpWeights, kept: Kept | None = None) -> Tensor:
    """x + the MLP's output, token by token in float64; outputs and ages are kept in place."""
    out = []
    for b in range(x.shape[0]):
        a = norm_reference(x[b : b + 1], mlp.norm)
        if mlp.gate is None:
            h = gemv_reference(a, (mlp.up,), gelu=True)
        else:
            gate, up = (gemv_reference(a, (part,)) for part in (mlp.gate, mlp.up))
            h = gate * torch.sigmoid(gate) * up
        y = gemv_reference(h, (mlp.down,))
        if kept is not None:
            i = int(kept.place)
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
