"""Every part of the accelerator: hardware equal to its integers, and to its cycles."""

import itertools

import numpy as np
import pytest

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts import fixed
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.neuron_replay import SaturatedSum
from tachyscope_fpga.parts.replay_cache import ReplayCache
from tachyscope_fpga.parts.requant import Requant
from tachyscope_fpga.parts.tas_gate import TasGate
from tachyscope_fpga.tools.simulate import simulate, stalls

STALLS = [0.0, 0.4]


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


def test_a_full_buffer_takes_no_more():
    """The output waits until everything that can be under way is: nothing is lost or doubled."""
    part = Requant(lanes=1)
    acc = [[value] for value in range(40)]
    scale = [{"multiplier": [1], "shift": [0]}] * 40
    held = (cycle < 60 for cycle in itertools.count())
    trace = simulate(part.create(), {"acc": acc, "scale": scale}, {"o": 40}, {"o": held}, settle=20)
    assert trace.payloads["o"] == acc
    assert len([cycle for cycle in trace.cycles["acc"] if cycle < 60]) == part.LATENCY + 2


def int8s(rng, *shape):
    """Random int8 with many numbers at the ends of the range."""
    ends = rng.choice([-128, -127, -1, 0, 1, 127], shape)
    return np.where(rng.random(shape) < 0.3, ends, rng.integers(-128, 128, shape))


@pytest.mark.parametrize("stall", STALLS)
@pytest.mark.parametrize(
    ("lanes", "macs", "products"), [(1, 1, 1), (2, 3, 1), (4, 4, 1), (2, 4, 2), (4, 2, 2)]
)
def test_array_hardware_equals_its_integers(lanes, macs, products, stall):
    rng = np.random.default_rng(lanes * 10 + macs)
    array = GemvArray(lanes, macs, products)
    w, x = int8s(rng, 6 * lanes, 4 * macs), int8s(rng, 4 * macs)
    w[0], x[:] = -128, np.where(np.arange(4 * macs) < macs, -128, x)  # the largest product
    trace = simulate(
        array.create(),
        {"i": array.pack(w, x)},
        {"o": 6},
        {"i": stalls(1, stall), "o": stalls(2, stall)},
        settle=20,
    )
    assert np.concatenate(trace.payloads["o"]).tolist() == array.compute(w, x).tolist()
    if not stall:
        assert trace.span("i", "o") == array.cycles(4 * macs, 6 * lanes)


@pytest.mark.parametrize("query", ["before_rope", "after_rope"])
def test_gate_is_strict_at_its_threshold_and_scores_the_chosen_query(query):
    rng = np.random.default_rng(5)
    gate = TasGate(heads=2, head_dim=8, macs=4, query=query)
    q, rotated, k = (int8s(rng, 12, 16) for _ in range(3))
    chosen = q if query == "before_rope" else rotated
    scores = [int(score) for score in (chosen * k).sum(1)]
    thresholds = [score + step for score, step in zip(scores, itertools.cycle((-1, 0, 1)))]
    beats = [beat for token in zip(q, rotated, k, strict=True) for beat in gate.pack(*token)]
    trace = simulate(gate.create(), {"i": beats, "threshold": thresholds}, {"o": 12})
    assert trace.payloads["o"] == [1, 0, 0] * 4
    assert trace.payloads["o"] == [
        gate.compute(*token) for token in zip(q, rotated, k, thresholds, strict=True)
    ]
    assert trace.span("i", "o") == gate.cycles(12)


def test_the_folded_threshold_decides_as_the_score_in_floats():
    """The authors' score: mean over heads of q . k / sqrt(head_dim), with q before RoPE."""
    rng = np.random.default_rng(3)
    gate = TasGate(heads=4, head_dim=16, macs=4)
    for tau in (-4.0, -0.3, 0.0, 0.5):
        q, q_scale = fixed.quantise(rng.normal(size=64))
        k, k_scale = fixed.quantise(rng.normal(size=64))
        score = ((q * q_scale).reshape(4, 16) * (k * k_scale).reshape(4, 16)).sum(1).mean() / 4
        assert gate.compute(q, q, k, gate.threshold(tau, float(q_scale[0]), float(k_scale[0]))) == (
            score > tau
        )


def test_a_cache_entry_is_replayed_only_once_it_is_whole():
    rng = np.random.default_rng(7)
    cache = ReplayCache(entries=4, tiles=3, lanes=2)
    ys = int8s(rng, 3, 2).tolist()
    writes = [{"entry": 2, "tile": tile, "y": y} for tile, y in enumerate(ys)]
    unit = cache.create()
    # beats of different ports are kept apart by stalls: write, seal, ask and read, write again, ask
    at = lambda *cycles: (t not in cycles for t in itertools.count())  # noqa: E731
    trace = simulate(
        unit,
        {
            "write": [*writes, writes[0]],
            "seal": [2],
            "ask": [2, 2, 1, 2],
            "read": [{"entry": 1, "tag": 0}, {"entry": 2, "tag": 0}],
        },
        {"hit": 4, "o": 3},
        {"write": at(0, 1, 2, 20), "seal": at(5), "ask": at(4, 8, 10, 22), "read": at(9, 12)},
        settle=10,
    )
    expected = cache.compute(
        [
            *(("write", 2, t, y) for t, y in enumerate(ys)),
            ("ask", 2),
            ("seal", 2),
            ("ask", 2),
            ("read", 1),
            ("ask", 1),
            ("read", 2),
            ("write", 2, 0, ys[0]),
            ("ask", 2),
        ]
    )
    assert expected == [False, True, None, False, ys, False]
    assert [bool(hit) for hit in trace.payloads["hit"]] == [False, True, False, False]
    assert [beat["y"] for beat in trace.payloads["o"]] == ys
    assert trace.cycles["o"][-1] - trace.cycles["read"][-1] + 1 == cache.cycles()


def test_clearing_the_cache_forgets_every_entry():
    cache = ReplayCache(entries=4, tiles=1, lanes=1)
    at = lambda *cycles: (t not in cycles for t in itertools.count())  # noqa: E731
    trace = simulate(
        cache.create(),
        {
            "write": [{"entry": e, "tile": 0, "y": [e]} for e in range(4)],
            "seal": [0, 1, 2, 3],
            "clear": [1],
            "ask": [3, 0, 1, 2, 3],
        },
        {"hit": 5},
        {
            "seal": at(5, 6, 7, 8),
            "ask": at(10, 12, 13, 14, 15, 16, 17, 18, 19, 20),
            "clear": at(11),
        },
    )
    assert trace.payloads["hit"] == [1, 0, 0, 0, 0]
    assert trace.cycles["ask"][1] == 16  # it waited while four entries were cleared


@pytest.mark.parametrize("stall", STALLS)
@pytest.mark.parametrize("subtract", [False, True])
def test_neuron_replay_adds_a_change_and_clips(subtract, stall):
    part = SaturatedSum(lanes=3, subtract=subtract)
    values = np.array(list(itertools.product((-128, -127, -1, 0, 1, 126, 127), repeat=2)))
    a, b = (np.resize(values[:, side], (20, 3)) for side in (0, 1))
    trace = simulate(
        part.create(),
        {"a": a.tolist(), "b": b.tolist()},
        {"o": 20},
        {name: stalls(seed, stall) for seed, name in enumerate("abo")},
    )
    assert trace.payloads["o"] == part.compute(a, b).tolist()
    if not stall:
        assert trace.span("a", "o") == part.cycles(20)


def test_neuron_replay_is_one_product_of_differences_and_a_sum():
    """Where every neuron is computed and nothing clips, it gives the MLP's output projection again."""
    rng = np.random.default_rng(2)
    array, scale = GemvArray(4, 4), (np.full(8, 16384), np.full(8, 18))
    w, old = rng.integers(-30, 30, (8, 16)), rng.integers(-40, 40, 16)
    new = old + rng.integers(-20, 20, 16)
    change = SaturatedSum(16, subtract=True).compute(new, old)
    cached = Requant(8).compute(array.compute(w, old), *scale)
    moved = Requant(8).compute(array.compute(w, change), *scale)
    exact = Requant(8).compute(array.compute(w, new), *scale)
    assert (
        abs(SaturatedSum(8).compute(cached, moved) - exact).max() <= 1
    )  # two roundings instead of one
