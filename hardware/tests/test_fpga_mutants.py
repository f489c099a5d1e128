"""A list of faults put into the hardware one at a time; the tests must see every one of them."""

import importlib
import sys
import types
from dataclasses import dataclass

import pytest
import test_fpga_decoder as decoder
import test_fpga_decoder_top as decoder_top
import test_fpga_drs as drs
import test_fpga_engine as engine
import test_fpga_parts as parts
import test_fpga_ports as ports

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.ports import Environment


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in one file; the named units are then the mutated file's."""

    file: str
    old: str
    new: str
    units: dict[str, str]
    """name -> the modules that use it, beside its own"""
    tests: tuple

    def __str__(self):
        return f"{self.file}: {self.old} -> {self.new}"


def requant():
    parts.test_requantiser_hardware_equals_its_integers(0.0)


def requant_stalled():
    parts.test_requantiser_hardware_equals_its_integers(0.4)
    parts.test_a_full_buffer_takes_no_more()


def gate():
    for query in ("before_rope", "after_rope"):
        parts.test_gate_is_strict_at_its_threshold_and_scores_the_chosen_query(query)


def array():
    parts.test_array_hardware_equals_its_integers(4, 4, 1, 0.4)
    parts.test_array_hardware_equals_its_integers(2, 4, 2, 0.0)


def cache():
    parts.test_a_cache_entry_is_replayed_only_once_it_is_whole()
    parts.test_clearing_the_cache_forgets_every_entry()


def scheduler():
    for deal in ("static", "rows", "tiles"):
        drs.test_hardware_deals_as_its_schedule(deal, 5, 3)


def whole():
    for shape in (engine.SHAPES[0], engine.SHAPES[3]):
        engine.compare(shape, 0.0, 1, limit=3000)
        engine.compare(shape, 0.4, 2, limit=3000)
    for port in ("o", "x"):
        engine.compare((1, 1, "tiles", 1, 2, 1, 2, 40, 3), 0.0, 4, {port: 150}, limit=3000)


def memory():
    around = Environment(service=3, latency=9, depends=(4, 3, 5, 6, 2), verdict=7, replay=30)
    for on in (True, False):
        ports.test_hardware_fetches_in_the_cycles_of_its_schedule(on, 3, around)


def norm():
    decoder.test_rms_norm_hardware_equals_integers(16, 8, 1, True)


def rope():
    decoder.test_rope_hardware_equals_integers(8, 4, True)


def silu():
    decoder.test_silu_hardware_equals_integers(4, True)


def buffer():
    decoder.test_buffer_hardware_equals_integers(16, 4, 8, True)


def attention():
    decoder.test_attention_hardware_equals_integers(4, 2, 8, 4, True)


def serial():
    decoder.test_division_and_root_a_bit_a_cycle()


def streamer():
    decoder_top.test_kv_streamer_reads_sink_and_window(True)


GATE, REQUANT, ARRAY = (
    {"TasGateUnit": ""},
    {"RequantUnit": ""},
    {"GemvArrayUnit": "", "_packed": "", "_plain": ""},
)
CACHE, DRS, CORE = {"ReplayCacheUnit": ""}, {"RowSchedulerUnit": ""}, {"CoreUnit": ""}
ENGINE, PORTS, CLIP = (
    {"EngineUnit": ""},
    {"PortSchedulerUnit": ""},
    {"saturated": "requant neuron_replay"},
)
OUTBOX = {"Outbox": "gemv requant replay_cache"}

MUTANTS = [
    Mutant(
        "tas_gate", "array.o.p[0] > self.threshold", "array.o.p[0] >= self.threshold", GATE, (gate,)
    ),
    Mutant(
        "tas_gate",
        'query = self.i.p.q if gate.query == "before_rope"',
        'query = self.i.p.q if gate.query == "after_rope"',
        GATE,
        (gate,),
    ),
    Mutant(
        "tas_gate", "array.i.p.last.eq(left == 0)", "array.i.p.last.eq(left == 1)", GATE, (gate,)
    ),
    Mutant("requant", "Const(1 << s, 48)", "Const((1 << s) - 1, 48)", REQUANT, (requant,)),
    Mutant(
        "requant",
        "low.eq(acc[:HALF] * factor)",
        "low.eq(acc[:HALF].as_signed() * factor)",
        REQUANT,
        (requant,),
    ),
    Mutant(
        "requant",
        "product.eq((high << HALF) + low)",
        "product.eq((high << HALF) - low)",
        REQUANT,
        (requant,),
    ),
    Mutant(
        "requant",
        "self.acc.ready.eq(self.scale.valid & outbox.room)",
        "self.acc.ready.eq(outbox.room)",
        REQUANT,
        (requant_stalled,),
    ),
    Mutant(
        "fixed",
        "Const((1 << (bits - 1)) - 1, signed(bits))",
        "Const((1 << (bits - 1)) - 2, signed(bits))",
        CLIP,
        (requant,),
    ),
    Mutant(
        "fixed",
        "Const(-(1 << (bits - 1)), signed(bits))",
        "Const(1 - (1 << (bits - 1)), signed(bits))",
        CLIP,
        (requant,),
    ),
    Mutant(
        "pipe", "self.room.eq(held != self.depth)", "self.room.eq(1)", OUTBOX, (requant_stalled,)
    ),
    Mutant(
        "pipe",
        "held.eq(held + self.start - taken)",
        "held.eq(held + self.start)",
        OUTBOX,
        (requant,),
    ),
    Mutant("gemv", "Mux(first, 0, acc) + total", "acc + total", ARRAY, (array,)),
    Mutant(
        "gemv",
        "both[SPLIT:].as_signed() + both[SPLIT - 1]",
        "both[SPLIT:].as_signed()",
        ARRAY,
        (array,),
    ),
    Mutant("gemv", "m.d.sync += first.eq(last)", "m.d.sync += first.eq(0)", ARRAY, (array,)),
    Mutant(
        "replay_cache",
        "clearing | self.seal.valid | self.write.valid",
        "clearing | self.seal.valid",
        CACHE,
        (cache,),
    ),
    Mutant(
        "replay_cache",
        "reading & (known.data | checked) & outbox.room",
        "reading & outbox.room",
        CACHE,
        (cache,),
    ),
    Mutant(
        "replay_cache", "sweep == cache.entries - 1", "sweep == cache.entries - 2", CACHE, (cache,)
    ),
    Mutant(
        "drs",
        "waiting.bit_select(row, 1).eq(~replay)",
        "waiting.bit_select(row, 1).eq(1)",
        DRS,
        (scheduler,),
    ),
    Mutant(
        "drs",
        "~slot.valid | slot.ready for slot in slots",
        "~slot.valid for slot in slots",
        DRS,
        (scheduler,),
    ),
    Mutant(
        "drs",
        "~slot.valid | slot.ready for slot in slots",
        "Const(1) for slot in slots",
        DRS,
        (scheduler,),
    ),
    Mutant("drs", "tile == drs.tiles - 1", "tile == drs.tiles - 2", DRS, (scheduler,)),
    Mutant("core", "tile.eq(self.job.p.tile + part)", "tile.eq(self.job.p.tile)", CORE, (whole,)),
    Mutant("core", "room.eq(~full | array.i.ready)", "room.eq(1)", CORE, (whole,)),
    Mutant(
        "core",
        "self.job.ready.eq(taken & last_beat & last_tile)",
        "self.job.ready.eq(taken & last_beat)",
        CORE,
        (whole,),
    ),
    Mutant("engine", "gate.o.payload & cache.hit.payload", "gate.o.payload", ENGINE, (whole,)),
    Mutant("engine", "(s.x_done | ~last)", "(s.x_done | 1)", ENGINE, (whole,)),
    Mutant("engine", "out.replayed.eq(1)", "out.replayed.eq(0)", ENGINE, (whole,)),
    Mutant(
        "engine",
        "cache.seal.payload.eq(s.entries[s.sealing])",
        "cache.seal.payload.eq(0)",
        ENGINE,
        (whole,),
    ),
    Mutant(
        "ports",
        "self.fetch.valid.eq(held != ports.slots)",
        "self.fetch.valid.eq(1)",
        PORTS,
        (memory,),
    ),
    Mutant("ports", "with m.If(behind == 0)", "with m.If(1)", PORTS, (memory,)),
    Mutant(
        "ports",
        "self.verdict.valid & ~self.verdict.payload",
        "self.verdict.valid",
        PORTS,
        (memory,),
    ),
    Mutant("rms_norm", "total.eq(p.eps)]", "total.eq(0)]", {"RmsNormUnit": ""}, (norm,)),
    Mutant("rms_norm", "half.eq(halfway[shift])", "half.eq(0)", {"RmsNormUnit": ""}, (norm,)),
    Mutant(
        "rope",
        "sums[0].eq(products[0] - products[1]",
        "sums[0].eq(products[0] + products[1]",
        {"RopeUnit": ""},
        (rope,),
    ),
    Mutant(
        "silu_mul",
        "Mux(steps[TABLE_BITS:].any(), top, steps)",
        "steps",
        {"SiluMulUnit": ""},
        (silu,),
    ),
    Mutant(
        "int8_buffer", "used.eq(used | every)", "used.eq(every)", {"Int8BufferUnit": ""}, (buffer,)
    ),
    Mutant(
        "int8_buffer",
        "Mux(length > 7, length - 7, 0)",
        "Mux(length > 8, length - 7, 0)",
        {"Int8BufferUnit": ""},
        (buffer,),
    ),
    Mutant(
        "attention_unit",
        "s.first | (logit > highest)",
        "logit > highest",
        {"AttentionHardware": ""},
        (attention,),
    ),
    Mutant(
        "attention_unit",
        "whole >= WEIGHT_BITS",
        "whole > WEIGHT_BITS",
        {"AttentionHardware": ""},
        (attention,),
    ),
    Mutant(
        "serial", "fits = rest >= divisor", "fits = rest > divisor", {"DivideUnit": ""}, (serial,)
    ),
    Mutant("serial", "fits = more >= trial", "fits = more > trial", {"RootUnit": ""}, (serial,)),
    Mutant(
        "streamers",
        "given.entries - given.window",
        "given.sink",
        {"KvStreamerUnit": ""},
        (streamer,),
    ),
]
QUICK = [MUTANTS[0], MUTANTS[7], MUTANTS[14], MUTANTS[17]]


def apply(mutant, monkeypatch):
    original = importlib.import_module(f"tachyscope_fpga.parts.{mutant.file}")
    with open(original.__file__) as file:
        source = file.read()
    assert mutant.old in source, f"the text of {mutant} is not there any more"
    mutated = types.ModuleType(original.__name__)
    mutated.__file__ = original.__file__
    monkeypatch.setitem(sys.modules, original.__name__, mutated)  # where dataclasses look
    exec(compile(source.replace(mutant.old, mutant.new), original.__file__, "exec"), vars(mutated))
    monkeypatch.setitem(sys.modules, original.__name__, original)
    for unit, users in mutant.units.items():
        for module in (mutant.file, *users.split()):
            monkeypatch.setattr(f"tachyscope_fpga.parts.{module}.{unit}", getattr(mutated, unit))


def killed(mutant):
    for test in mutant.tests:
        try:
            test()
        except (AssertionError, TachyscopeError):
            return True
    return False


@pytest.mark.parametrize("mutant", QUICK, ids=str)
def test_a_fault_is_seen(mutant, monkeypatch):
    apply(mutant, monkeypatch)
    monkeypatch.setattr(parts, "simulate", limited(parts.simulate))
    monkeypatch.setattr(drs, "simulate", limited(drs.simulate))
    assert killed(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_fault_is_seen(mutant, monkeypatch):
    apply(mutant, monkeypatch)
    for module in (parts, drs, ports, decoder):
        monkeypatch.setattr(module, "simulate", limited(module.simulate))
    assert killed(mutant)


def test_the_tests_pass_without_a_fault():
    gate()
    cache()
    scheduler()


@pytest.mark.slow
def test_the_engine_passes_without_a_fault():
    whole()


def limited(simulate):
    """A fault that makes the hardware wait for ever ends after some thousand cycles."""

    def run(*args, **kwargs):
        return simulate(*args, **kwargs, limit=4000)

    return run
