"""Every part of the accelerator: hardware equal to its integers, and to its cycles."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from tachyscope.errors import TachyscopeError
from tachyscope.fpga import fixed
from tachyscope.fpga.requant import Requant
from tachyscope.fpga.simulate import simulate, stalls

STALLS = [0.0, 0.4]


def test_importing_the_accelerator_imports_no_torch():
    code = "import sys, tachyscope.fpga.requant, tachyscope.fpga.simulate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Requant(lanes=0), "Requant lanes must be an integer from 1 to 256, got 0"),
        (lambda: fixed.ints([200], "x"), "x must be integers from -128 to 127"),
        (lambda: fixed.multiplier_and_shift(-1.0), "scales must be from 0 to 32767, got [-1.0]"),
        (
            lambda: Requant(1).compute([0], [1 << 15], [0]),
            "multiplier must be integers from 0 to 32767",
        ),
    ],
)
def test_bad_parameters_name_the_allowed_range(make, message):
    with pytest.raises(TachyscopeError) as fault:
        make()
    assert str(fault.value) == message


def test_rounding_is_half_up_and_saturates():
    assert fixed.round_shift([5, 6, -5, -6, -7], 2).tolist() == [1, 2, -1, -1, -2]
    assert fixed.requantise([508, 509, 510, -512, -514, -515], 1, 2).tolist() == [
        127,
        127,
        127,
        -128,
        -128,
        -128,
    ]


def test_the_longest_dot_product_of_llama_7b_fits_the_accumulator():
    assert 11_008 * 2**14 < 2**31 and fixed.MAX_DEPTH == 131_071
    assert (fixed.MAX_DEPTH + 1) * 2**14 > 2**31 - 1


def test_a_multiplier_and_shift_are_within_half_a_unit_of_the_scale():
    scales = np.concatenate([np.exp(np.linspace(-12, 10, 300)), [0.99999, 0.5, 1.0, 32767.0]])
    multiplier, shift = fixed.multiplier_and_shift(scales)
    assert multiplier.max() <= fixed.MAX_MULTIPLIER and shift.max() <= fixed.MAX_SHIFT
    np.testing.assert_allclose(multiplier / 2.0**shift, scales, rtol=2.0**-14)


def boundary_accumulators():
    """Accumulators and scales at rounding ties, saturation limits and the ends of int32."""
    rows = []
    for shift, multiplier in itertools.product((0, 1, 7, 8, 31, 46), (1, 3, 16384, 32767)):
        for target in (127, 127.5, 128, -128, -128.5, -129, 0.5, -0.5, 0):
            near = int(target * 2**shift / multiplier)
            rows += [(near + step, multiplier, shift) for step in (-1, 0, 1)]
        rows += [(2**31 - 1, multiplier, shift), (-(2**31), multiplier, shift)]
    return [row for row in rows if -(2**31) <= row[0] < 2**31]


@pytest.mark.parametrize("stall", STALLS)
def test_requantiser_hardware_equals_its_integers(stall):
    rng = np.random.default_rng(0)
    rows = boundary_accumulators()
    rows += [
        (int(rng.integers(-(2**31), 2**31)), int(rng.integers(2**15)), int(rng.integers(47)))
        for _ in range(100)
    ]
    rows += rows[: -len(rows) % 4]
    acc, multiplier, shift = (np.array(column).reshape(-1, 4) for column in zip(*rows, strict=True))
    part = Requant(lanes=4)
    trace = simulate(
        part.create(),
        {
            "acc": acc.tolist(),
            "scale": [
                {"multiplier": m, "shift": s}
                for m, s in zip(multiplier.tolist(), shift.tolist(), strict=True)
            ],
        },
        {"o": len(acc)},
        {name: stalls(seed, stall) for seed, name in enumerate(("acc", "scale", "o"))},
    )
    assert trace.payloads["o"] == part.compute(acc, multiplier, shift).tolist()
    if not stall:
        assert trace.span("acc", "o") == part.cycles(len(acc))
