"""The whole decoder: layers token by token, for several rows on several cores."""

from __future__ import annotations

from dataclasses import dataclass

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.decoder.core import DecoderCore
from tachyscope_fpga.decoder.job import Phase, Work
from tachyscope_fpga.decoder.model import PARTS
from tachyscope_fpga.decoder.registers import EVENTS, IDENTITY, VERSION, decoder_registers
from tachyscope_fpga.decoder.token_states import TokenSignals, Units, states
from tachyscope_fpga.parts.counters import Counters
from tachyscope_fpga.parts.csr import REQUEST, CsrBank
from tachyscope_fpga.parts.drs import RowScheduler
from tachyscope_fpga.parts.fixed import check_range, saturated
from tachyscope_fpga.parts.replay_cache import ReplayCache
from tachyscope_fpga.parts.streamers import ADDRESS_BITS, Streamer
from tachyscope_fpga.parts.vector import WIDE, wide_vector


@dataclass(frozen=True)
class Top:
    """`rows` videos at once on `cores` cores.

    All rows are at the same token. Cores run in step on one stream of weights: in a pass every core
    has a row of its own. Rows whose TAS passes replay; the scheduler deals the others, so that
    the MLPs' weights are read once for every `cores` rows that compute, and not at all when none
    does.
    """

    core: DecoderCore
    rows: int = 1
    cores: int = 1
    prefetch: int = 32

    def __post_init__(self) -> None:
        check_range("Top rows", self.rows, 1, 32)
        check_range("Top cores", self.cores, 1, 32)
        _ = self.scheduler, self.cache, self.csr, Streamer(self.prefetch)

    @property
    def scheduler(self) -> RowScheduler:
        return RowScheduler(self.rows, self.cores, 1, "rows")

    @property
    def cache(self) -> ReplayCache:
        """A wide number is three of the cache's bytes."""
        shape, lanes = self.core.shape, self.core.lanes
        entries = self.rows * shape.layers * shape.tokens_per_frame
        return ReplayCache(entries, shape.width // lanes, WIDE // 8 * lanes)

    @property
    def counters(self) -> Counters:
        return Counters(EVENTS)

    @property
    def csr(self) -> CsrBank:
        return decoder_registers(self.core.shape.layers, self.counters)

    def create(self) -> TopUnit:
        return TopUnit(self)


class TopUnit(wiring.Component):
    """A token of every row: started by CTRL, with its index, place and flags in their registers.

    Members
    -------
    csr_request, csr_response : the register bus (``csr.CsrBankUnit``)
    x : In(stream of `lanes` signed(24))
        The rows' inputs, one after another, `width / lanes` beats each; taken once started.
    o : Out(stream of `lanes` signed(24))
        The rows' states, normed.
    weight_request, weight_response, scale_request, scale_response : memory ports
    k_request, k_response, v_request, v_response, kv_write : arrays of memory ports, a core each
    """

    def __init__(self, params: Top) -> None:
        self.params = params
        core = params.core
        wide = stream.Signature(wide_vector(core.lanes))
        address = stream.Signature(ADDRESS_BITS)
        entry = stream.Signature(core.attention.entry_layout())
        self.bank = params.csr.create()
        super().__init__(
            {
                "csr_request": In(stream.Signature(REQUEST)),
                "csr_response": Out(stream.Signature(32)),
                "x": In(wide),
                "o": Out(wide),
                "weight_request": Out(address),
                "weight_response": In(stream.Signature(core.weight_layout())),
                "scale_request": Out(address),
                "scale_response": In(stream.Signature(core.requant.scale_layout())),
                "k_request": Out(address).array(params.cores),
                "k_response": In(entry).array(params.cores),
                "v_request": Out(address).array(params.cores),
                "v_response": In(entry).array(params.cores),
                "kv_write": Out(stream.Signature(core.write_layout())).array(params.cores),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        units = self._units(m)
        token = TokenSignals(self.params, units)
        self._connect(m, units)
        self._broadcast(m, units, token)
        self._order_weights(m, units, token)
        self._drive_cores(m, units, token)
        self._add_to_rows(m, units, token)
        self._address_cache(m, units, token)
        self._deal(m, units, token)
        self._registers(m, units, token)
        self._count(m, units, token)
        states(m, self, units, token)
        return m

    def _units(self, m: Module) -> Units:
        p, c = self.params, self.params.core
        m.submodules.bank = bank = self.bank
        m.submodules.counters = counters = p.counters.create()
        m.submodules.cache = cache = p.cache.create()
        m.submodules.drs = drs = p.scheduler.create()
        m.submodules.weights = weights = Streamer(p.prefetch).create(c.weight_layout())
        m.submodules.scales = scales = Streamer(p.prefetch).create(c.requant.scale_layout())
        wide, beats = wide_vector(c.lanes), c.shape.width // c.lanes
        m.submodules.held = held = Memory(shape=wide, depth=p.rows * beats, init=[])
        cores, outs = [], []
        for number in range(p.cores):
            m.submodules[f"core{number}"] = core = c.create()
            out = fifo.SyncFIFOBuffered(width=len(core.y.payload.as_value()), depth=beats)
            m.submodules[f"out{number}"] = out
            cores.append(core)
            outs.append(out)
        put, get = held.write_port(), held.read_port()
        return Units(bank, counters, cache, drs, weights, scales, put, get, cores, outs)

    def _connect(self, m: Module, units: Units) -> None:
        """The ports of memory and registers, and the buffers of the cores' results."""

        def outside(port: object, inside: object) -> None:
            wiring.connect(m, wiring.flipped(port), inside)

        for number, (core, out) in enumerate(zip(units.cores, units.outs, strict=True)):
            m.d.comb += [
                out.w_data.eq(core.y.payload),
                out.w_en.eq(core.y.valid),
                core.y.ready.eq(out.w_rdy),
            ]
            for name in ("k_request", "k_response", "v_request", "v_response", "kv_write"):
                outside(getattr(self, name)[number], getattr(core, name))
        outside(self.weight_request, units.weights.request)
        outside(self.weight_response, units.weights.response)
        outside(self.scale_request, units.scales.request)
        outside(self.scale_response, units.scales.response)
        outside(self.csr_request, units.bank.request)
        outside(self.csr_response, units.bank.response)

    def _broadcast(self, m: Module, units: Units, token: TokenSignals) -> None:
        """All active cores take weights and scales in one cycle."""
        active = token.active
        for source, name in ((units.weights, "weights"), (units.scales, "scale")):
            can = Cat(getattr(core, name).ready for core in units.cores) | ~active
            m.d.comb += source.o.ready.eq(can.all() & active.any())
            for number, core in enumerate(units.cores):
                others = (can | (1 << number)).all()
                port = getattr(core, name)
                m.d.comb += [
                    port.valid.eq(source.o.valid & active[number] & others),
                    Value.cast(port.payload).eq(Value.cast(source.o.payload)),
                ]

    def _order_weights(self, m: Module, units: Units, token: TokenSignals) -> None:
        """A pass's weights and scales: those of qkv and o, or of gate_up and down."""
        core, bank = self.params.core, units.bank
        for unit, count, base, send in (
            (units.weights, core.beats, bank.reg_weight_base[0], token.send_w),
            (units.scales, core.scales, bank.reg_scale_base[0], token.send_s),
        ):
            sizes = [count(part) for part in PARTS]
            attend, mlp = sum(sizes[:2]), sum(sizes[2:])
            before = token.layer * (attend + mlp) + Mux(token.in_mlp, attend, 0)
            m.d.comb += [
                unit.job.valid.eq(send),
                unit.job.p.address.eq(base + before),
                unit.job.p.count.eq(Mux(token.in_mlp, mlp, attend)),
            ]
            with m.If(unit.job.valid & unit.job.ready):
                m.d.sync += send.eq(0)

    def _drive_cores(self, m: Module, units: Units, token: TokenSignals) -> None:
        """A job and a row for the core at hand; every core's verdict is kept for its row."""
        t, bank, layers = token, units.bank, self.params.core.shape.layers
        thresholds = Array(
            Cat(bank.reg_threshold_low[n], bank.reg_threshold_high[n])[:48].as_signed()
            for n in range(layers)
        )
        for number, core in enumerate(units.cores):
            mine = t.core_at == number
            m.d.comb += [
                core.job.valid.eq(t.give & mine),
                core.job.p.work.eq(Mux(t.in_norm, Work.NORM, Mux(t.in_mlp, Work.MLP, Work.ATTEND))),
                core.job.p.index.eq(bank.reg_index[0]),
                core.job.p.slot.eq(t.row * layers + t.layer),
                core.job.p.gate.eq(bank.reg_replay[0][0]),
                core.job.p.threshold.eq(thresholds[t.layer]),
                core.job.p.sink.eq(bank.reg_sink[0]),
                core.job.p.window.eq(bank.reg_window[0]),
                core.x.valid.eq(t.feed & mine),
                core.x.payload.eq(units.get.data),
                core.verdict.ready.eq(1),
            ]
            with m.If(core.verdict.valid):
                m.d.sync += t.verdicts.bit_select(t.rows_of[number], 1).eq(core.verdict.payload)

    def _add_to_rows(self, m: Module, units: Units, token: TokenSignals) -> None:
        """A row's memory is read one beat ahead; the sum is written in the cycle of the read."""
        t, put, get, lanes = token, units.put, units.get, self.params.core.lanes
        beats = self.params.core.shape.width // lanes
        at = Signal(range(self.params.rows * beats))
        m.d.comb += [
            at.eq(t.row * beats + t.beat),
            get.addr.eq(Mux(t.step, t.row * beats + t.beat + 1, at)),
            put.addr.eq(at),
        ]
        with m.If(t.step):
            m.d.sync += t.beat.eq(Mux(t.last_beat, 0, t.beat + 1))
        kept = data.View(wide_vector(lanes), units.cache.o.p.y.as_value())
        for lane in range(lanes):
            other = Mux(t.from_cache, kept[lane], t.out_data[lane])
            total = Signal(signed(WIDE + 1), name=f"total{lane}")
            m.d.comb += [
                total.eq(get.data[lane] + other),
                put.data[lane].eq(Mux(t.add, saturated(total, WIDE), self.x.p[lane])),
            ]

    def _address_cache(self, m: Module, units: Units, token: TokenSignals) -> None:
        """The replay cache at the row at hand; it is cleared when CTRL says so."""
        t, cache, bank, shape = token, units.cache, units.bank, self.params.core.shape
        entry = (t.row * shape.layers + t.layer) * shape.tokens_per_frame + bank.reg_place[0]
        clear = Signal()
        m.d.comb += [
            cache.ask.payload.eq(entry),
            cache.read.p.entry.eq(entry),
            cache.seal.payload.eq(entry),
            cache.write.p.entry.eq(entry),
            cache.write.p.tile.eq(t.beat),
            cache.write.p.y.as_value().eq(t.out_data.as_value()),
            cache.clear.payload.eq(1),
            cache.clear.valid.eq(clear),
        ]
        with m.If(bank.reg_ctrl[0][1]):
            m.d.sync += clear.eq(1)
        with m.Elif(cache.clear.ready):
            m.d.sync += clear.eq(0)

    def _deal(self, m: Module, units: Units, token: TokenSignals) -> None:
        """The scheduler gets the verdict of the row at hand, and keeps jobs until a pass ends."""
        t, drs = token, units.drs
        passed = t.verdicts.bit_select(t.row, 1) & units.bank.reg_replay[0][0]
        m.d.comb += [
            drs.verdict.p.row.eq(t.row),
            drs.verdict.p.replay.eq(units.cache.hit.payload & passed),
            drs.dealt.ready.eq(1),
            t.dealt.eq(sum(slot.valid for slot in drs.jobs)),
            *(slot.ready.eq(t.finish) for slot in drs.jobs),
        ]

    def _registers(self, m: Module, units: Units, token: TokenSignals) -> None:
        """What software reads."""
        p, bank = self.params, units.bank
        sizes = (p.core.shape.layers, p.rows, p.cores, p.core.array.lanes)
        m.d.comb += [
            bank.reg_status[0].eq(token.busy),
            bank.reg_id[0].eq(IDENTITY),
            bank.reg_version[0].eq(VERSION),
            bank.reg_params[0].eq(Cat(Const(n, 8) for n in sizes)),
            *(bank.reg_replayed[n].eq(bits) for n, bits in enumerate(token.replayed)),
        ]
        for number, (name, _) in enumerate(EVENTS):
            count = getattr(bank, f"reg_count_{name.lower()}")[0]
            m.d.comb += count.eq(units.counters.counts[number])

    def _count(self, m: Module, units: Units, token: TokenSignals) -> None:
        """The events, in the order of ``decoder.registers.EVENTS``."""
        t, weights, cores = token, units.weights, units.cores
        all_ready = (Cat(core.weights.ready for core in cores) | ~t.active).all()
        m.d.comb += [
            units.counters.clear.eq(units.bank.reg_ctrl[0][2]),
            units.counters.event.eq(
                Cat(
                    t.busy,
                    t.busy & t.in_norm & t.give & t.job_taken,
                    t.computed,
                    t.replays,
                    weights.o.valid & weights.o.ready,
                    all_ready & t.active.any() & ~weights.o.valid,
                    self.k_response[0].valid,
                    self.v_response[0].valid,
                    *(cores[0].phase == wanted for wanted in Phase if wanted is not Phase.IDLE),
                )
            ),
        ]
