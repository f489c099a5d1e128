"""The engine: equal to its integers, and to its cycle model in every cycle, with stalls."""

import pytest

from tachyscope_fpga.parts.engine import Engine
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.tas_gate import TasGate
from tachyscope_fpga.tools import verify

# rows (batch), cores, how rows are dealt, lanes, macs, products a DSP, depth, outputs, steps
SHAPES = [
    (1, 1, "tiles", 2, 4, 1, 8, 6, 8),
    (1, 4, "tiles", 2, 2, 2, 8, 12, 6),
    (4, 1, "rows", 1, 2, 1, 4, 3, 4),
    (4, 4, "rows", 2, 3, 1, 9, 4, 4),
    (4, 8, "tiles", 2, 2, 1, 10, 4, 4),
    (4, 4, "static", 2, 2, 1, 6, 4, 4),
    (32, 4, "tiles", 1, 2, 1, 6, 2, 3),
    (32, 8, "rows", 1, 2, 1, 6, 2, 3),
    (32, 8, "static", 1, 1, 1, 2, 1, 3),
]


def engine_of(rows, cores, deal, lanes, macs, products, depth, outputs, steps):
    return Engine(
        GemvArray(lanes, macs, products),
        depth,
        outputs,
        TasGate(2, 2 * macs, macs),
        rows,
        cores,
        deal,
        positions=2,
    )


def compare(shape, probability, seed, late=None, limit=20_000):
    vectors = verify.Vectors.draw(engine_of(*shape), shape[-1], seed)
    found = verify.compare(vectors, probability, seed, limit, late)
    assert 0 < found.replayed < found.tokens
    assert (found.mismatches, found.cycle_mismatches) == (0, 0)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=lambda shape: "-".join(map(str, shape)))
def test_hardware_equals_integers_and_cycle_model(shape):
    compare(shape, 0.0, 1)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=lambda shape: "-".join(map(str, shape)))
def test_hardware_equals_both_under_stalls(shape):
    compare(shape, 0.4, 2)


@pytest.mark.parametrize("port", ["o", "x", "command", "scale[0]", "dealt"])
def test_a_port_that_waits_long_loses_and_doubles_nothing(port):
    compare((1, 1, "tiles", 1, 2, 1, 2, 40, 3), 0.0, 4, {port: 150})


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_hardware_equals_both_on_every_shape(shape, probability):
    compare(shape, probability, 3)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[:6], ids=lambda shape: "-".join(map(str, shape)))
def test_hardware_equals_both_where_ports_mostly_wait(shape):
    compare(shape, 0.8, 3)
