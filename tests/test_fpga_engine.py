"""The engine: equal to its integers, and to its cycle model in every cycle, with stalls."""

import numpy as np
import pytest

from tachyscope.fpga import cycle_model
from tachyscope.fpga.engine import Engine, Token
from tachyscope.fpga.gemv import GemvArray
from tachyscope.fpga.simulate import simulate, stalls
from tachyscope.fpga.tas_gate import TasGate

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
    (32, 8, "static", 1, 1, 1, 2, 1, 2),
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


def vectors(engine, steps, seed, share=0.6):
    """Weights, scales and steps; places come round every two steps, so that most could replay."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(-128, 128, (engine.outputs, engine.depth))
    multiplier = rng.integers(2**14, 2**15, engine.outputs)
    shift = rng.integers(17, 22, engine.outputs)
    tokens = [
        [Token.draw(rng, engine, step % 2, share) for _ in range(engine.rows)]
        for step in range(steps)
    ]
    return weights, multiplier, shift, tokens


def beats_of(engine, weights, multiplier, shift, tokens, jobs):
    """The beats of every input, given the order in which the jobs are dealt."""
    lanes = engine.array.lanes
    tiles = engine.core.pack_weights(weights)
    scales = [
        {"multiplier": multiplier[t : t + lanes].tolist(), "shift": shift[t : t + lanes].tolist()}
        for t in range(0, engine.outputs, lanes)
    ]
    flat = [token for step in tokens for token in step]
    inputs = {
        "command": [{"position": token.position, "threshold": token.threshold} for token in flat],
        "score": [
            beat for token in flat for beat in engine.gate.pack(token.q, token.q_rotated, token.k)
        ],
        "x": [beat for token in flat for beat in token.x.reshape(-1, engine.array.macs).tolist()],
    }
    for core in range(engine.cores):
        mine = [job for job in jobs if job[0] == core]
        run = [first + t for _, _, first in mine for t in range(engine.core.tiles_per_job)]
        inputs[f"weights[{core}]"] = [beat for t in run for beat in tiles[t]]
        inputs[f"scale[{core}]"] = [scales[t] for t in run]
    return inputs


def compare(shape, probability, seed):
    engine, steps = engine_of(*shape), shape[-1]
    weights, multiplier, shift, tokens = vectors(engine, steps, seed)
    replays, outputs = engine.compute(weights, multiplier, shift, tokens)
    ports = [
        *("command", "score", "x", "dealt", "o"),
        *(f"{p}[{c}]" for p in ("weights", "scale") for c in range(engine.cores)),
    ]

    def traces():
        return {name: stalls(seed * 100 + number, probability) for number, name in enumerate(ports)}

    model = cycle_model.run(engine, replays, traces())
    inputs = beats_of(engine, weights, multiplier, shift, tokens, model.jobs)
    unit = engine.create()
    phases = []
    trace = simulate(
        unit,
        inputs,
        {"o": steps * engine.rows * engine.core.tiles, "dealt": len(model.jobs)},
        traces(),
        watch={"phase": unit.phase},
        on_cycle=lambda cycle, seen: phases.append(seen["phase"]),
    )
    # the numbers
    got = {}
    for number, beat in enumerate(trace.payloads["o"]):
        step = number // (engine.rows * engine.core.tiles)
        key = (step, beat["row"], beat["tile"])
        assert key not in got
        got[key] = (beat["y"], bool(beat["replayed"]))
    lanes = engine.array.lanes
    assert got == {
        (step, row, tile): (outputs[step][row][tile * lanes :][:lanes].tolist(), replays[step][row])
        for step in range(steps)
        for row in range(engine.rows)
        for tile in range(engine.core.tiles)
    }
    assert any(map(any, replays)) and not all(map(all, replays))
    # the cycles
    assert [(b["core"], b["row"], b["tile"]) for b in trace.payloads["dealt"]] == model.jobs
    assert phases[: len(model.phases)] == model.phases
    for name, seen in model.cycles.items():
        assert trace.cycles[name] == seen, name
    return trace.length


@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: "-".join(map(str, shape)))
def test_hardware_equals_integers_and_cycle_model(shape):
    compare(shape, 0.0, 1)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: "-".join(map(str, shape)))
def test_hardware_equals_both_under_stalls(shape):
    compare(shape, 0.4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_hardware_equals_both_on_every_shape(shape, probability):
    compare(shape, probability, 3)
