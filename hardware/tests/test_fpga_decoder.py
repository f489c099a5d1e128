"""The decoder's parts: hardware against their integers, stalls, cycles, ranges."""

import math

import numpy as np
import pytest

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.attention_unit import AttentionUnit
from tachyscope_fpga.parts.int8_buffer import Int8Buffer
from tachyscope_fpga.parts.rms_norm import RmsNorm
from tachyscope_fpga.parts.rope import Rope
from tachyscope_fpga.parts.serial import Divide, Root
from tachyscope_fpga.parts.silu_mul import SiluMul
from tachyscope_fpga.parts.vector import ONE, WIDE, exponents, from_wide, to_int8, to_wide
from tachyscope_fpga.tools.simulate import simulate, stalls

TOP = 2 ** (WIDE - 1)
SLOW = pytest.mark.slow
STALLED = pytest.mark.parametrize(
    "stalled", (pytest.param(False, marks=SLOW), True), ids=("free", "stalled")
)


def also(*case):
    """A shape that is left to make test-all."""
    return pytest.param(*case, marks=SLOW)


def waits(stalled, *ports):
    return {port: stalls(n, 0.4) for n, port in enumerate(ports)} if stalled else {}


def draws(rng, count):
    """Wide vectors of every size of number, and the extremes."""
    sizes = (1, 8, 2**9, 2**15, TOP)
    found = [rng.integers(-size, size, count) for size in sizes]
    return [*found, np.full(count, -TOP), np.full(count, TOP - 1)]


def test_exponents_are_the_least_that_fit():
    values = np.array([[0, 0], [127, -128], [128, 0], [-129, 5], [255, 256], [TOP - 1, -TOP]])
    assert exponents(values).tolist() == [0, 0, 1, 1, 2, 16]
    found, exponent = to_int8(values)
    assert found.tolist() == [[0, 0], [127, -128], [64, 0], [-64, 3], [64, 64], [127, -128]]
    assert (np.abs(found * 2 ** exponent[:, None] - values) <= 2 ** exponent[:, None]).all()


def test_wide_numbers_saturate():
    assert to_wide([0.5, 1e9, -1e9, 2.0**-13]).tolist() == [ONE // 2, TOP - 1, -TOP, 1]
    assert from_wide([ONE, -TOP]).tolist() == [1.0, -2048.0]


def test_division_and_root_a_bit_a_cycle():
    squares = [0, 1, 3, 4, 2**32 - 1, 2**30, 2**30 - 1, 65535**2, 65535**2 - 1]
    found = simulate(Root().create(), {"i": squares}, {"o": len(squares)})
    assert found.payloads["o"] == [Root().compute(n) for n in squares]
    assert found.cycles["o"][0] - found.cycles["i"][0] + 1 == Root().cycles()
    pairs = [(2**31, 2**15), (2**31 - 1, 65535), (0, 1), (131071, 1), (2**31, 65535)]
    beats = [{"numerator": a, "divisor": b} for a, b in pairs]
    found = simulate(Divide().create(), {"i": beats}, {"o": len(beats)})
    assert found.payloads["o"] == [Divide().compute(a, b) for a, b in pairs]
    assert found.cycles["o"][0] - found.cycles["i"][0] + 1 == Divide().cycles()
    with pytest.raises(TachyscopeError, match="quotient must be an integer from 0 to 131071"):
        Divide().compute(2**31, 1)


@STALLED
@pytest.mark.parametrize("width,lanes,eps", ((16, 8, 1), also(24, 2, 43)))
def test_rms_norm_hardware_equals_integers(width, lanes, eps, stalled):
    norm = RmsNorm(width, lanes, eps)
    x = np.stack(draws(np.random.default_rng(0), width))
    beats = x.reshape(-1, lanes).tolist()
    found = simulate(
        norm.create(), {"i": beats}, {"o": len(beats)}, stall=waits(stalled, "i", "o"), settle=60
    )
    assert found.payloads["o"] == norm.compute(x).reshape(-1, lanes).tolist()
    if not stalled:
        first = simulate(norm.create(), {"i": beats[: norm.beats]}, {"o": norm.beats})
        assert first.span("i", "o") == norm.cycles()


def test_rms_norm_is_near_the_real_one():
    rng = np.random.default_rng(1)
    for size in (0.02, 1.0, 300.0):
        x = to_wide(rng.normal(0, size, (8, 256)))
        real = x / np.sqrt(np.square(x.astype(float)).mean(-1, keepdims=True) + 1e-5 * ONE**2)
        got = from_wide(RmsNorm(256, eps=round(1e-5 * 256 * ONE**2)).compute(x))
        assert np.abs(got - real).max() < 2.0**-12 + 2.0**-13 * np.abs(real).max()


@STALLED
@pytest.mark.parametrize("size,lanes", ((8, 4), also(12, 6), also(16, 2)))
def test_rope_hardware_equals_integers(size, lanes, stalled):
    rope = Rope.of(size, 10000.0, 1.0, lanes)
    x = np.stack(draws(np.random.default_rng(0), size))
    beats = x.reshape(-1, lanes).tolist()
    for position in (123_457,) if stalled else (0, 1, 123_457, 2**32 - 1):
        found = simulate(
            rope.create(),
            {"position": [position], "i": beats},
            {"o": len(beats)},
            stall=waits(stalled, "i", "o", "position"),
        )
        assert found.payloads["o"] == rope.compute(x, position).reshape(-1, lanes).tolist()
        if not stalled:
            assert found.span("position", "o") == rope.cycles(len(x))


def test_rope_turns_as_angles_say():
    rope = Rope.of(64, 2.0**32, 1 / math.pi)
    x = to_wide(np.random.default_rng(0).normal(0, 3, (4, 64)))
    for position in (1, 255, 4097):
        angle = position * math.pi * 2.0 ** -np.arange(32.0)
        a, b = from_wide(x[:, 0::2]), from_wide(x[:, 1::2])
        real = np.stack(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        )
        got = from_wide(rope.compute(x, position)).reshape(4, 32, 2).transpose(2, 0, 1)
        # half a 4096th of a turn
        assert np.abs(got - real).max() < 1.01 * math.pi / 4096 * np.abs(real).max() + 2.0**-12


@STALLED
@pytest.mark.parametrize("lanes", (also(2), 4))
def test_silu_hardware_equals_integers(lanes, stalled):
    silu = SiluMul(lanes)
    edges = [8 * ONE, 8 * ONE - 1, -8 * ONE, -8 * ONE - 1, 31, 32, -32, -33]
    edge = np.stack([edges, [ONE] * 8], 1).reshape(-1)
    x = np.concatenate([*draws(np.random.default_rng(0), 8), edge])
    beats = x.reshape(-1, lanes).tolist()
    found = simulate(
        silu.create(), {"i": beats}, {"o": len(beats)}, stall=waits(stalled, "i", "o"), settle=20
    )
    assert found.payloads["o"] == silu.compute(x).reshape(-1, lanes // 2).tolist()
    if not stalled:
        assert found.span("i", "o") == silu.cycles(len(x) // 2)


def test_silu_is_near_the_real_one():
    gate = np.linspace(-20, 20, 4001)
    x = to_wide(np.stack([gate, np.full(4001, 3.0)], 1).reshape(-1))
    real = 3 * gate / (1 + np.exp(-gate))
    assert np.abs(from_wide(SiluMul().compute(x)) - real).max() < 0.01


@STALLED
@pytest.mark.parametrize("depth,lanes,macs", ((16, 4, 8), also(32, 2, 16), also(24, 4, 4)))
def test_buffer_hardware_equals_integers(depth, lanes, macs, stalled):
    buffer = Int8Buffer(depth, lanes, macs)
    rng = np.random.default_rng(0)
    vectors = [(x, 1 + n % 3) for n, x in enumerate(draws(rng, macs) + draws(rng, depth))]
    vectors += [(np.full(macs, n), 1) for n in (127, 128, 255, -128, -129)]
    want = []
    for x, times in vectors:
        found, exponent = buffer.compute(x)
        rows = found.reshape(-1, macs).tolist()
        want += times * [
            {"x": row, "exponent": exponent, "last": n == len(rows) - 1}
            for n, row in enumerate(rows)
        ]
    jobs = [{"words": len(x) // macs, "times": times} for x, times in vectors]
    beats = [beat for x, _ in vectors for beat in x.reshape(-1, lanes).tolist()]
    trace = simulate(
        buffer.create(),
        {"job": jobs, "i": beats},
        {"o": len(want)},
        stall=waits(stalled, "i", "o", "job"),
        settle=20,
    )
    assert trace.payloads["o"] == want
    if not stalled:
        first = depth // lanes
        one = simulate(
            buffer.create(),
            {"job": [{"words": depth // macs, "times": 2}], "i": beats[-first:]},
            {"o": 2 * depth // macs},
        )
        assert one.span("i", "o") == buffer.cycles(depth, 2)


def attention_case(unit, rng, entries, exponent):
    size = unit.head_dim
    q = rng.integers(-128, 128, (unit.group, size))
    k, v = rng.integers(-128, 128, (2, entries, size))
    near = rng.integers(max(0, exponent - 1), min(exponent + 2, 17), entries)
    return q, exponent, k, near, v, rng.integers(0, 17, entries)


def entry_beats(x, exponent):
    return [{"x": a, "exponent": b} for a, b in zip(x.tolist(), exponent.tolist(), strict=True)]


@STALLED
@pytest.mark.parametrize(
    "size,group,context,lanes", ((4, 2, 8, 4), also(4, 1, 8, 2), also(8, 2, 16, 4))
)
def test_attention_hardware_equals_integers(size, group, context, lanes, stalled):
    unit = AttentionUnit(size, group, context, lanes)
    rng = np.random.default_rng(0)
    sizes = ((1, 3), (2, 8), (context, 7), (context // 2, 9), (5, 0), (context, 16))
    cases = [attention_case(unit, rng, *case) for case in sizes]
    trace = simulate(
        unit.create(),
        {
            "job": [{"entries": n, "exponent": e} for n, e in sizes],
            "q": [row for case in cases for row in case[0].tolist()],
            "k": [beat for case in cases for beat in entry_beats(*case[2:4])],
            "v": [beat for case in cases for beat in entry_beats(*case[4:6])],
        },
        {"o": len(cases) * group * size // lanes},
        stall=waits(stalled, "job", "q", "k", "v", "o"),
        settle=20,
    )
    want = [beat for case in cases for beat in unit.compute(*case).reshape(-1, lanes).tolist()]
    assert trace.payloads["o"] == want
    if not stalled:
        q, exponent, k, near, v, scale = cases[2]
        one = simulate(
            unit.create(),
            {
                "job": [{"entries": context, "exponent": exponent}],
                "q": q.tolist(),
                "k": entry_beats(k, near),
                "v": entry_beats(v, scale),
            },
            {"o": group * size // lanes},
        )
        assert one.span("job", "o") == unit.cycles(context)


def test_attention_is_near_the_real_one():
    rng = np.random.default_rng(0)
    unit = AttentionUnit(64, 4)
    q, k, v = (to_wide(rng.normal(0, 2, shape)) for shape in ((4, 64), (300, 64), (300, 64)))
    (q8, qe), (k8, ke), (v8, ve) = to_int8(q.reshape(-1)), to_int8(k), to_int8(v)
    got = from_wide(unit.compute(q8.reshape(4, 64), int(qe), k8, ke, v8, ve))
    logits = (q8.reshape(4, 64) * 2.0**qe) @ (k8 * 2.0 ** ke[:, None]).T / ONE**2 / 8
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    real = weights / weights.sum(-1, keepdims=True) @ (v8 * 2.0 ** ve[:, None]) / ONE
    assert np.abs(got - real).max() < 0.02


@pytest.mark.parametrize(
    "make,words",
    (
        (lambda: RmsNorm(1), "RmsNorm width must be an integer from 2 to 16384, got 1"),
        (lambda: RmsNorm(18, 4), "RmsNorm width must be a multiple of lanes = 4, got 18"),
        (lambda: Rope((1, 2), 3), "Rope lanes must be a multiple of a pair's channels = 2, got 3"),
        (
            lambda: Rope((2**32,)),
            "Rope step must be an integer from 0 to 4294967295, got 4294967296",
        ),
        (lambda: SiluMul(1), "SiluMul lanes must be an integer from 2 to 64, got 1"),
        (lambda: Int8Buffer(8, 3, 8), "Int8Buffer macs must be a multiple of lanes = 3, got 8"),
        (
            lambda: AttentionUnit(64, 0),
            "AttentionUnit group must be an integer from 1 to 64, got 0",
        ),
        (
            lambda: AttentionUnit(66, 1),
            "AttentionUnit head_dim must be a multiple of lanes = 4, got 66",
        ),
    ),
)
def test_parameters_out_of_range_are_told(make, words):
    with pytest.raises(TachyscopeError) as fault:
        make()
    assert str(fault.value) == words
