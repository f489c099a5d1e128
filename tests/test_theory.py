"""Bounds on what a replayed MLP is off by lie above the change, on random and on learned weights."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tachyscope.io.torch_defaults import own_numerics
from tachyscope.models.llama import SwiGlu
from tachyscope.models.registry import load

PAIRS = 2_000
SILU_SLOPE = 1.0998394  # the greatest of z · sigmoid(z)


@dataclass(frozen=True)
class MlpBound:
    """Of a LLaMA-type MLP: norms of its weights, found once, and what a place's input adds to them.

    gate, up, down  spectral norms
    """

    mlp: Any
    gate: float
    up: float
    down: float

    @classmethod
    def of(cls, mlp: Any):
        """From an MLP with weights gate, up [inner, W] and down [W, inner]."""
        norms = (float(torch.linalg.matrix_norm(w, 2)) for w in (mlp.gate, mlp.up, mlp.down))
        return cls(mlp, *norms)

    def slope(self, x: Tensor) -> Tensor:
        """By how much the output changes at most for a small change of inputs x [..., W]: [...]."""
        columns = self.mlp.down.square().sum(0)
        gate, up = F.silu(x @ self.mlp.gate.T), x @ self.mlp.up.T
        by_gate, by_up = ((part.square() * columns).sum(-1).sqrt() for part in (up, gate))
        return SILU_SLOPE * self.gate * by_gate + self.up * by_up

    def __call__(self, slope: Tensor, distance: Tensor) -> Tensor:
        """The most that outputs can differ by, at these distances of inputs."""
        return slope * distance + SILU_SLOPE * self.down * self.gate * self.up * distance.square()


def random_mlp():
    with own_numerics(0):
        return SwiGlu(24, 72).double().requires_grad_(False)


def learned_mlp():
    return load("atrium-tokens", dtype="float64").mlps[2].requires_grad_(False)


def pairs(mlp, scale):
    """Inputs as a norm leaves them, and others at relative distances up to `scale`."""
    width, rng = mlp.down.shape[0], torch.Generator().manual_seed(1)
    old = F.rms_norm(torch.randn(PAIRS, width, generator=rng, dtype=torch.float64), (width,))
    step = torch.randn(PAIRS, width, generator=rng, dtype=torch.float64)
    far = scale * torch.rand(PAIRS, 1, generator=rng, dtype=torch.float64)
    return old, old + far * step


def test_the_slope_of_silu_is_its_greatest():
    z = torch.linspace(-30, 30, 600_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.silu(z).sum(), z)
    assert 0 <= SILU_SLOPE - float(slope.abs().max()) < 1e-6


@pytest.mark.parametrize("make", [random_mlp, pytest.param(learned_mlp, marks=pytest.mark.slow)])
def test_no_change_of_an_output_exceeds_its_bound(make):
    mlp = make()
    bound = MlpBound.of(mlp)
    for scale in (0.01, 0.3, 3.0):
        old, new = pairs(mlp, scale)
        with torch.inference_mode():
            change = (mlp(new) - mlp(old)).norm(dim=-1)
            most = bound(bound.slope(old), (new - old).norm(dim=-1))
        assert (change <= most).all()
        assert float((most / change).median()) < 2_000  # loose: 27 to 400 times


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_the_error_of_replayed_neurons_is_within_its_bound(scale):
    mlp = random_mlp()
    out = torch.arange(36, 72)
    rest, bound = mlp.slice(out), MlpBound.of(mlp.slice(out))
    rng = torch.Generator().manual_seed(3)
    linear = 0.1 * torch.randn(24, 24, generator=rng, dtype=torch.float64)
    beta, (old, new) = 0.7, pairs(mlp, scale)

    def error(x):
        return rest(x) - x @ linear

    far = (new - old).norm(dim=-1)
    weight = torch.exp(-beta * (far / old.norm(dim=-1)) ** 2)
    off = (error(new) - weight[:, None] * error(old)).norm(dim=-1)
    near = bound(bound.slope(old), far) + torch.linalg.matrix_norm(linear, 2) * far
    most = weight * near + (1 - weight) * error(new).norm(dim=-1)
    assert (off <= most + 1e-12).all()


def test_a_score_bounds_no_change():
    """Two inputs far apart may meet with any score, and equal ones with a low score."""
    rng = torch.Generator().manual_seed(0)
    wq, wk = (torch.randn(16, 24, generator=rng, dtype=torch.float64) for _ in range(2))
    x = torch.randn(24, generator=rng, dtype=torch.float64)
    same = float((wq @ x) @ (wk @ x)) / 4
    other = torch.linalg.lstsq((wk.T @ (wq @ x))[None], torch.tensor([[4 * same + 400.0]]).double())
    far = other.solution[:, 0]
    assert float((wq @ x) @ (wk @ far)) / 4 > same + 50
    assert (far - x).norm() > 0.5 * x.norm()


def test_attention_to_one_key_bounds_the_distance_to_its_value():
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, 40, generator=rng, dtype=torch.float64)
    values = torch.randn(40, 8, generator=rng, dtype=torch.float64)
    paid = logits.softmax(-1)
    off = (paid @ values - values[7]).norm(dim=-1)
    most = (1 - paid[:, 7]) * (values - values[7]).norm(dim=-1).max()
    assert (off <= most + 1e-12).all()


def test_input_change_is_within_what_residuals_scores_and_values_allow():
    """Through one head's attention and an RMS norm with a small epsilon."""
    rng = torch.Generator().manual_seed(0)
    width, dim, count, eps = 24, 8, 400, 1e-3

    def draw(*size, scale=1.0):
        return scale * torch.randn(*size, generator=rng, dtype=torch.float64)

    gain, out = draw(width).abs(), draw(width, dim)

    def attend(logits, values):
        """The head's output, and how far it may be from the value at place 7."""
        paid, old = logits.softmax(-1), values[:, 7]
        far = (values - old[:, None]).norm(dim=-1).amax(-1)
        return torch.einsum("cn,cnd->cd", paid, values), (1 - paid[:, 7]) * far, old

    r0, v0, z0 = draw(count, width), draw(count, 40, dim), draw(count, 40, scale=3.0)
    step = torch.rand(count, 1, generator=rng, dtype=torch.float64)
    r, v = r0 + step * draw(count, width), v0 + step[..., None] * draw(count, 40, dim)
    z = z0 + step * draw(count, 40, scale=3.0)
    (o0, reach0, old0), (o, reach, old) = attend(z0, v0), attend(z, v)
    h0, h = r0 + o0 @ out.T, r + o @ out.T

    def length(x):
        return (x.square().sum(-1) + width * eps).sqrt()

    x0, x = (gain * F.rms_norm(y, (width,), eps=eps) for y in (h0, h))
    spread = reach + reach0 + (old - old0).norm(dim=-1)
    allowed = (r - r0).norm(dim=-1) + torch.linalg.matrix_norm(out, 2) * spread
    most = gain.max() * width**0.5 * 2 / (length(h) + length(h0)) * allowed
    assert ((x - x0).norm(dim=-1) <= most + 1e-12).all()
