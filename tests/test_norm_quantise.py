"""Between linears: every backend against the float64 definition, and linears of float8 codes."""

import pytest
import torch

from tachyscope.kernels.linear_fp8 import fp8_weight, linear_fp8
from tachyscope.kernels.linear_fp8.reference import linear_fp8_reference
from tachyscope.kernels.norm_quantise import __all__ as names
from tachyscope.kernels.norm_quantise import operators
from tachyscope.kernels.norm_quantise import torch as stock
from tachyscope.kernels.norm_quantise.reference import (
    add_reference,
    gelu_reference,
    norm_reference,
    quantise_reference,
)

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime import interpreter

from tachyscope.kernels.norm_quantise import triton as fast

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted where no GPU is")
BACKENDS = pytest.mark.parametrize("backend", [stock, fast], ids=["torch", "triton"])
EPS = 1e-6


@pytest.fixture(autouse=True)
def _round_as_the_gpu_does(monkeypatch):
    """The interpreter loses the carry where a number is rounded up to the next power of two."""
    convert = interpreter._convert_float

    def exact(data, source, target, mode):
        if target != tl.float8e4nv:
            return convert(data, source, target, mode)
        return torch.from_numpy(data).to(stock.FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", exact)


@pytest.fixture
def given(rng):
    """x, y [B, S, W], a modulation's shift, scale and gate a frame as a part of six."""
    x, y = (2 * torch.randn(2, 12, 40, generator=rng) + 1 for _ in range(2))
    six = torch.randn(2, 3, 6, 40, generator=rng)
    return x, y, six[:, :, 1], six[:, :, 2], six[:, :, 5]


def _codes_are_near(got, want):
    """Codes of nearly the same numbers: one in a thousand may fall to the other side of a step."""
    code, scale = got
    number, step = quantise_reference(want)
    torch.testing.assert_close(scale.double(), step, rtol=1e-5, atol=0)
    back = code.double() * scale.double()
    assert (back - want).abs().le((want.abs() / 16).maximum(step * 2**-10) * (1 + 1e-4)).all()
    assert ((back - number).abs() > 1e-4 * step + 1e-4 * number.abs()).float().mean() < 2e-3


@BACKENDS
def test_rows_become_codes_by_their_largest_number(given, backend):
    x = given[0]
    x[0, 3], x[1, 2, 4] = 0, 1e4
    _codes_are_near(backend.quantise(x), x.double())
    _codes_are_near(backend.quantise(x[0]), x[0].double())
    assert (backend.quantise(x)[0][0, 3].float() == 0).all()


@BACKENDS
def test_gelu_and_codes(given, backend):
    _codes_are_near(backend.gelu_quantise(given[0]), gelu_reference(given[0]))


@BACKENDS
def test_a_sum_of_a_tensor_with_itself_is_added(given, backend):
    x, *_, gate = given
    got, want = backend.add_gated(x, x, gate), add_reference(x, x, gate)
    torch.testing.assert_close(got, want.float())


@BACKENDS
def test_norm_modulation_and_codes(given, backend):
    x, _, shift, scale, _ = given
    want = norm_reference(x, shift, scale, EPS)
    _codes_are_near(backend.norm_quantise(x, shift, scale, EPS), want)


@BACKENDS
def test_gated_residual_and_affine_norm(given, backend, rng):
    x, y, _, _, gate = given
    weight, bias = torch.randn(2, 40, generator=rng)
    total, normed = backend.add_norm(x, y, gate, weight, bias, EPS)
    want = add_reference(x, y, gate)
    torch.testing.assert_close(total.double(), want, rtol=1e-6, atol=2e-6)
    affine = (one.expand(2, 1, 40) for one in (bias, weight))
    want = norm_reference(want, *affine, EPS, plus_one=False)
    torch.testing.assert_close(normed.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(backend.add_gated(x, y, gate), total)


def test_operators_tell_their_shapes_without_data(given):
    x, y, shift, scale, gate = given
    cases = {
        "quantise": (x,),
        "gelu_quantise": (x,),
        "norm_quantise": (x, shift, scale, EPS),
        "add_norm": (x, y, gate, shift[0, 0], scale[0, 0], EPS),
        "add_gated": (x, y, gate),
    }
    assert set(cases) == set(names)
    for name, args in cases.items():
        meta = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in args]
        for got, want in zip(
            *(getattr(operators, name)(*some) for some in (meta, args)), strict=True
        ):
            assert got.shape == want.shape[-got.dim() :] and got.dtype == want.dtype


def test_a_linear_of_codes_equals_its_definition(given, rng):
    weight, bias = torch.randn(24, 40, generator=rng), torch.randn(24, generator=rng)
    held = fp8_weight(weight)
    got = linear_fp8(*stock.quantise(given[0]), held, bias, torch.float32)
    want = linear_fp8_reference(*stock.quantise(given[0]), held, bias)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    exact = given[0] @ weight.mT + bias
    assert 1e-3 < ((got - exact).norm() / exact.norm()).item() < 0.05
