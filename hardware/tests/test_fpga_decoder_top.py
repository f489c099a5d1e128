"""The whole decoder, its registers, counters and streamers."""

import shutil
import subprocess

import numpy as np
import pytest
from amaranth.sim import Simulator

from tachyscope_fpga.decoder.memory import pack, unpack
from tachyscope_fpga.decoder.model import (
    DecoderModel,
    DecoderShape,
    Linear,
    Token,
    interleave,
    threshold_of,
)
from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.counters import Counters
from tachyscope_fpga.parts.csr import CsrBank, Register
from tachyscope_fpga.parts.streamers import KvStreamer, Streamer
from tachyscope_fpga.parts.vector import FRACTION, from_wide, to_wide
from tachyscope_fpga.tools.decoder_bench import (
    EPS,
    SMALL,
    Bench,
    small_layers,
    small_model,
    small_top,
)
from tachyscope_fpga.tools.decoder_sim import DecoderSim
from tachyscope_fpga.tools.simulate import stalls

BANK = CsrBank(
    (
        Register("ID", "ro", "what this is"),
        Register("CTRL", "wo", "bit 0: start"),
        Register("LEVEL", "rw", "a level a layer", 3, 7),
    )
)


def test_registers_have_addresses_in_order():
    assert [BANK.address("ID"), BANK.address("CTRL"), BANK.address("LEVEL", 2)] == [0, 4, 16]
    assert BANK.size == 20
    with pytest.raises(TachyscopeError) as fault:
        BANK.address("LEVELS")
    assert str(fault.value) == "there is no register 'LEVELS': there are ID, CTRL, LEVEL"
    with pytest.raises(TachyscopeError) as fault:
        BANK.address("LEVEL", 3)
    assert str(fault.value) == "register LEVEL's number must be an integer from 0 to 2, got 3"
    with pytest.raises(TachyscopeError) as fault:
        Register("X", "r", "")
    assert str(fault.value) == "register X's access must be one of ro, rw, wo, got 'r'"
    with pytest.raises(TachyscopeError, match="registers need names of their own, got"):
        CsrBank((BANK.registers[0], BANK.registers[0]))


def test_map_and_header_come_from_the_table():
    assert "| 0x0008 + 4 n | LEVEL[3] | rw | 0x7 | a level a layer |" in BANK.register_map()
    header = BANK.c_header("TS")
    assert "#define TS_CTRL 0x0004u /* wo: bit 0: start */" in header
    assert "#define TS_LEVEL(n) (0x0008u + 4u * (n)) /* rw: a level a layer */" in header
    assert "#define TS_LEVEL_COUNT 3u" in header and "#define TS_SIZE 0x0014u" in header


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_header_is_c(tmp_path):
    (tmp_path / "ts.h").write_text(small_top(SMALL).csr.c_header("TS"))
    (tmp_path / "main.c").write_text(
        '#include "ts.h"\nint a[TS_SIZE / 4], b = TS_THRESHOLD_LOW(1);\n'
    )
    command = ["gcc", "-std=c99", "-Wall", "-Werror", "-fsyntax-only", "main.c"]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_registers_read_and_write():
    unit = BANK.create()
    accesses = [(0, 0, 0), (8, 0, 0), (12, 1, 99), (12, 0, 0), (4, 1, 5), (4, 0, 0), (400, 0, 0)]
    names = ("address", "write", "data")
    strobes = []

    async def drive(ctx):
        ctx.set(unit.reg_id[0], 1234)
        ctx.set(unit.response.ready, 1)
        found = []
        for beat in accesses:
            ctx.set(unit.request.payload, dict(zip(names, beat, strict=True)))
            ctx.set(unit.request.valid, 1)
            strobes.append(ctx.get(unit.reg_ctrl[0]))
            await ctx.tick().until(unit.request.ready)
            ctx.set(unit.request.valid, 0)
            (value,) = await ctx.tick().sample(unit.response.payload).until(unit.response.valid)
            found.append(value)
        assert [found[n] for n in (0, 1, 3, 5, 6)] == [1234, 7, 99, 0, 0]
        assert ctx.get(unit.reg_level[1]) == 99

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
    assert strobes == [0, 0, 0, 0, 5, 0, 0]


def test_counters_count():
    counters = Counters((("A", "as"), ("B", "bs")))
    assert [r.name for r in counters.registers()] == ["COUNT_A", "COUNT_B"]
    unit, events = counters.create(), [(1, 0), (1, 1), (0, 0), (1, 1)]

    async def drive(ctx):
        for a, b in events:
            ctx.set(unit.event, a | b << 1)
            await ctx.tick()
        ctx.set(unit.event, 0)
        assert [ctx.get(unit.counts[n]) for n in range(2)] == counters.compute(events) == [3, 2]
        ctx.set(unit.clear, 1)
        await ctx.tick()
        assert ctx.get(unit.counts[0]) == 0

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
    with pytest.raises(TachyscopeError, match="counters need names of their own, got"):
        Counters((("A", ""), ("A", "")))


def serve_streamer(unit, jobs, count, latency, stalled):
    """What a streamer delivers from a memory whose beats are their addresses, and in which cycle."""
    traces = [stalls(n, 0.4) if stalled else iter(lambda: False, None) for n in range(3)]
    found, cycles = [], []

    async def drive(ctx):
        waiting, given, cycle = [], 0, 0
        while len(found) < count:
            assert cycle < 2000
            if given < len(jobs):
                ctx.set(unit.job.payload, jobs[given])
            ctx.set(unit.job.valid, given < len(jobs))
            asks, takes = not next(traces[0]), not next(traces[1])
            ctx.set(unit.request.ready, asks)
            ctx.set(unit.o.ready, takes)
            answers = bool(waiting and waiting[0][0] <= cycle and not next(traces[2]))
            ctx.set(unit.response.valid, answers)
            if answers:
                ctx.set(unit.response.payload, waiting.pop(0)[1] & 0xFFFF)
            _, _, ready, valid, address, out, beat = await ctx.tick().sample(
                unit.job.ready,
                unit.request.valid,
                unit.request.payload,
                unit.o.valid,
                unit.o.payload,
            )
            given += bool(ready and given < len(jobs))
            if valid and asks:
                waiting.append((cycle + latency, address))
            if out and takes:
                found.append(beat)
                cycles.append(cycle)
            cycle += 1

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
    return found, cycles


@pytest.mark.parametrize("stalled", (False, True), ids=("free", "stalled"))
def test_streamer_reads_runs(stalled):
    streamer = Streamer(depth=8)
    jobs = [(5, 4), (100, 1), (0, 0), (7, 12)]
    beats = [{"address": a, "count": n} for a, n in jobs]
    want = [x for job in jobs for x in streamer.compute(*job).tolist()]
    found, _ = serve_streamer(streamer.create(16), beats, len(want), 3, stalled)
    assert found == want
    if not stalled:
        _, cycles = serve_streamer(streamer.create(16), beats[-1:], 12, 3, False)
        assert cycles[-1] + 1 == streamer.cycles(12, 3)


@pytest.mark.parametrize("stalled", (False, True), ids=("free", "stalled"))
def test_kv_streamer_reads_sink_and_window(stalled):
    streamer = KvStreamer(Streamer(depth=8))
    jobs = [(10, 0, 0), (3, 2, 4), (6, 2, 4), (7, 2, 4), (9, 0, 3), (5, 1, 1)]
    names = ("entries", "sink", "window")
    beats = [{"address": 50, **dict(zip(names, job, strict=True))} for job in jobs]
    want = [50 + x for job in jobs for x in streamer.compute(*job).tolist()]
    found, _ = serve_streamer(streamer.create(16), beats, len(want), 3, stalled)
    assert found == want
    assert streamer.compute(7, 2, 4).tolist() == [0, 1, 3, 4, 5, 6]
    if not stalled:
        _, cycles = serve_streamer(streamer.create(16), beats[:1], 10, 3, False)
        assert cycles[-1] + 1 == streamer.cycles(*jobs[0], 3)


def run_both(top, count, thresholds, wait=0.0, sink=0, window=0, seed=0):
    """Tokens on the hardware and in the integer model of every row; the bench."""
    rng = np.random.default_rng(seed)
    shape = top.core.shape
    layers = small_layers(shape, rng)
    models = [small_model(top, layers, thresholds, sink, window) for _ in range(top.rows)]
    tokens, want, replayed = [], [], []
    for i in range(count):
        token = Token(i, i % shape.tokens_per_frame, i >= shape.tokens_per_frame)
        x = to_wide(rng.normal(0, 1, (top.rows, shape.width)))
        tokens.append((x, token))
        results = [model.step(a, token) for model, a in zip(models, x, strict=True)]
        want.append([state.tolist() for state, _ in results])
        replayed.append(
            [
                sum(flags[n] << row for row, (_, flags) in enumerate(results))
                for n in range(shape.layers)
            ]
        )
    bench = Bench(top, layers, thresholds, sink, window, wait=wait)
    found, flags = bench.run(tokens)
    assert [state.tolist() for state in found] == want
    assert flags == replayed
    ran = sum(bits.bit_count() for token in replayed for bits in token)
    assert bench.counts["REPLAYED"] == ran
    assert bench.counts["COMPUTED"] == count * top.rows * shape.layers - ran
    assert bench.counts["TOKENS"] == count * top.rows
    return bench, ran


@pytest.mark.slow
def test_decoder_equals_its_integers():
    bench, ran = run_both(small_top(SMALL), 6, [0, 0])
    assert 0 < ran < 8
    # a replayed MLP is weights that are not read
    core = bench.top.core
    attend, mlp = (
        sum(core.beats(part) for part in parts) for parts in (("qkv", "o"), ("gate_up", "down"))
    )
    assert bench.counts["WEIGHT_BEATS"] == 12 * attend + (12 - ran) * mlp


@pytest.mark.slow
@pytest.mark.parametrize("rows,cores", ((3, 2), (2, 1)))
def test_rows_on_cores_with_stalls_and_a_window(rows, cores):
    _, ran = run_both(small_top(SMALL, rows, cores), 6, [0, 0], wait=0.3, sink=1, window=3)
    assert 0 < ran < 16 * rows


@pytest.mark.slow
def test_two_kv_heads():
    shape = DecoderShape(8, 8, 1, heads=4, kv_heads=2, head_dim=4, tokens_per_frame=2, context=8)
    _, ran = run_both(small_top(shape), 5, [-(2**30)], wait=0.2)
    assert ran > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("verilator") is None, reason="verilator is not installed")
@pytest.mark.parametrize("stall", (0.0, 0.3))
def test_verilator_equals_integers(tmp_path_factory, stall):
    rng = np.random.default_rng(0)
    top = small_top(SMALL)
    layers = small_layers(SMALL, rng)
    model = small_model(top, layers, [0, 0], 1, 5)
    sim = DecoderSim(top, layers, tmp_path_factory.getbasetemp() / "decoder", 3, stall)
    if not sim.program.exists():
        sim.build()
    sim.start(model)
    for i in range(SMALL.context):
        token = Token(i, i % 2, i >= 2)
        x = to_wide(rng.normal(0, 1, SMALL.width))
        (want, flags), (got, seen) = model.step(x, token), sim.step(x, token)
        assert got.tolist() == want.tolist() and seen == flags
    assert sim.counts()["TOKENS"] == SMALL.context
    sim.close()


def test_packing_is_undone():
    values = np.random.default_rng(0).integers(-(2**23), 2**23, (5, 4))
    assert unpack(pack(values, 24), 24, 4).tolist() == values.tolist()


def test_interleaved_rows_are_pairs():
    rows = np.arange(8.0)[:, None]
    assert interleave(rows, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_linear_is_near_the_real_one():
    rng = np.random.default_rng(0)
    weight, x = rng.normal(0, 0.1, (16, 64)), rng.normal(0, 1, 64)
    real = weight @ x
    got = from_wide(Linear.of(weight).compute(to_wide(x)))
    assert np.abs(got - real).max() < 0.03 * np.abs(real).max()


def test_replay_needs_a_frame_before():
    layers = small_layers(SMALL, np.random.default_rng(0))
    model = DecoderModel(SMALL, layers, small_top(SMALL).core.rope, EPS, [-(2**46)] * 2)
    x = to_wide(np.ones(8))
    _, first = model.step(x, Token(0, 0, False))
    kept = model.kept[:, 0].copy()
    model.step(x, Token(1, 1, False))
    _, second = model.step(-x, Token(2, 0, True))
    assert first == [False, False] and second == [True, True]
    assert (model.kept[:, 0] == kept).all()


def test_threshold_is_a_tas():
    assert threshold_of(1.0, SMALL) == 2 * 2 * 2 ** (2 * FRACTION)
    assert threshold_of(-4.0, SMALL) == -4 * threshold_of(1.0, SMALL)


def test_layers_must_be_as_many_as_the_shape_says():
    with pytest.raises(TachyscopeError) as fault:
        DecoderModel(SMALL, [], small_top(SMALL).core.rope, EPS)
    assert str(fault.value) == "the decoder has 2 layers, got weights of 0"
