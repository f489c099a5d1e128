"""The definition of folding, in float64."""

from __future__ import annotations

from torch import Tensor


def fold_reference(
    v: Tensor, log_count: Tensor, source: Tensor, root: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, one entry after the other in float64."""
    out, weights = v.double().clone(), log_count.double().exp()
    for b in range(v.shape[0]):
        for h in range(v.shape[1]):
            g = h if root.shape[1] > 1 else 0
            w = log_count[b, g].double().exp()
            for s, r in zip(source[b, g].tolist(), root[b, g].tolist(), strict=True):
                if s != r:
                    joint = w[s] + w[r]
                    out[b, h, r] = (w[s] * v[b, h, s].double() + w[r] * out[b, h, r]) / joint
                    w[r], w[s] = joint, 0.0
            weights[b, g] = w
    return out.to(v.dtype), weights.log().to(log_count.dtype)
