"""The whole decoder: layers token by token, for several rows on several cores."""

from __future__ import annotations

from dataclasses import dataclass

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from tachyscope.fpga.counters import Counters
from tachyscope.fpga.csr import REQUEST, CsrBank
from tachyscope.fpga.decoder_core import DecoderCore
from tachyscope.fpga.decoder_job import Phase, Work
from tachyscope.fpga.decoder_model import PARTS
from tachyscope.fpga.decoder_registers import EVENTS, IDENTITY, VERSION, decoder_registers
from tachyscope.fpga.drs import RowScheduler
from tachyscope.fpga.fixed import check_range, index, saturated
from tachyscope.fpga.replay_cache import ReplayCache
from tachyscope.fpga.streamers import ADDRESS_BITS, Streamer
from tachyscope.fpga.vector import WIDE, wide_vector


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
        p = self.params
        c, shape = p.core, p.core.shape
        rows, beats = p.rows, shape.width // c.lanes
        wide = wide_vector(c.lanes)
        m.submodules.bank = bank = self.bank
        m.submodules.counters = counters = p.counters.create()
        m.submodules.cache = cache = p.cache.create()
        m.submodules.drs = drs = p.scheduler.create()
        m.submodules.weights = weights = Streamer(p.prefetch).create(c.weight_layout())
        m.submodules.scales = scales = Streamer(p.prefetch).create(c.requant.scale_layout())
        m.submodules.held = held = Memory(shape=wide, depth=rows * beats, init=[])
        put, get = held.write_port(), held.read_port()
        cores, outs = [], []
        for number in range(p.cores):
            m.submodules[f"core{number}"] = core = c.create()
            out = fifo.SyncFIFOBuffered(width=len(core.y.payload.as_value()), depth=beats)
            m.submodules[f"out{number}"] = out
            m.d.comb += [
                out.w_data.eq(core.y.payload),
                out.w_en.eq(core.y.valid),
                core.y.ready.eq(out.w_rdy),
            ]
            for name in ("k_request", "k_response", "v_request", "v_response", "kv_write"):
                wiring.connect(m, wiring.flipped(getattr(self, name)[number]), getattr(core, name))
            cores.append(core)
            outs.append(out)
        for name, unit in (("weight", weights), ("scale", scales)):
            wiring.connect(m, wiring.flipped(getattr(self, f"{name}_request")), unit.request)
            wiring.connect(m, wiring.flipped(getattr(self, f"{name}_response")), unit.response)
        wiring.connect(m, wiring.flipped(self.csr_request), bank.request)
        wiring.connect(m, wiring.flipped(self.csr_response), bank.response)

        # all active cores take weights and scales in one cycle
        active = Signal(p.cores)
        for source, name in ((weights, "weights"), (scales, "scale")):
            can = Cat(getattr(core, name).ready for core in cores) | ~active
            m.d.comb += source.o.ready.eq(can.all() & active.any())
            for number, core in enumerate(cores):
                others = (can | (1 << number)).all()
                port = getattr(core, name)
                m.d.comb += [
                    port.valid.eq(source.o.valid & active[number] & others),
                    Value.cast(port.payload).eq(Value.cast(source.o.payload)),
                ]

        # the token
        start, layer = Signal(), Signal(index(shape.layers))
        row, beat = Signal(index(rows)), Signal(index(beats))
        first = Signal(range(rows + p.cores))  # the first row of a pass
        core_at = Signal(index(p.cores))
        in_mlp, in_norm = Signal(), Signal()
        verdicts = Signal(rows)
        gates = bank.reg_replay[0][0]
        place = bank.reg_place[0]
        rows_of = Signal(data.ArrayLayout(index(rows), p.cores))  # the row that a core has

        # jobs: one for the core at hand
        give = Signal()
        thresholds = Array(
            Cat(bank.reg_threshold_low[n], bank.reg_threshold_high[n])[:48].as_signed()
            for n in range(shape.layers)
        )
        feed = Signal()  # the row at hand goes to the core at hand
        for number, core in enumerate(cores):
            mine = core_at == number
            m.d.comb += [
                core.job.valid.eq(give & mine),
                core.job.p.work.eq(Mux(in_norm, Work.NORM, Mux(in_mlp, Work.MLP, Work.ATTEND))),
                core.job.p.index.eq(bank.reg_index[0]),
                core.job.p.slot.eq(row * shape.layers + layer),
                core.job.p.gate.eq(gates),
                core.job.p.threshold.eq(thresholds[layer]),
                core.job.p.sink.eq(bank.reg_sink[0]),
                core.job.p.window.eq(bank.reg_window[0]),
                core.x.valid.eq(feed & mine),
                core.x.payload.eq(get.data),
                core.verdict.ready.eq(1),
            ]
            with m.If(core.verdict.valid):
                m.d.sync += verdicts.bit_select(rows_of[number], 1).eq(core.verdict.payload)
        job_taken = Array(core.job.ready for core in cores)[core_at]
        x_taken = Array(core.x.ready for core in cores)[core_at]
        out_valid = Array(out.r_rdy for out in outs)[core_at]
        out_data = data.View(wide, Array(out.r_data for out in outs)[core_at])

        # a row's memory is read one beat ahead; what is added to it is written in the same cycle
        step, add = Signal(), Signal()
        last_beat = beat == beats - 1
        at = Signal(range(rows * beats))
        m.d.comb += [
            at.eq(row * beats + beat),
            get.addr.eq(Mux(step, row * beats + beat + 1, at)),
            put.addr.eq(at),
        ]
        with m.If(step):
            m.d.sync += beat.eq(Mux(last_beat, 0, beat + 1))
        from_cache = Signal()
        kept = data.View(wide, cache.o.p.y.as_value())
        for lane in range(c.lanes):
            other = Mux(from_cache, kept[lane], out_data[lane])
            total = Signal(signed(WIDE + 1), name=f"total{lane}")
            m.d.comb += [
                total.eq(get.data[lane] + other),
                put.data[lane].eq(Mux(add, saturated(total, WIDE), self.x.p[lane])),
            ]

        entry = (row * shape.layers + layer) * shape.tokens_per_frame + place
        m.d.comb += [
            cache.ask.payload.eq(entry),
            cache.read.p.entry.eq(entry),
            cache.seal.payload.eq(entry),
            cache.write.p.entry.eq(entry),
            cache.write.p.tile.eq(beat),
            cache.write.p.y.as_value().eq(out_data.as_value()),
            cache.clear.payload.eq(1),
            drs.verdict.p.row.eq(row),
            drs.verdict.p.replay.eq(cache.hit.payload & verdicts.bit_select(row, 1) & gates),
            drs.dealt.ready.eq(1),
        ]

        # weights of a pass: qkv and o, or gate_up and down
        counts = {name: [getattr(c, name)(part) for part in PARTS] for name in ("beats", "scales")}
        send_w, send_s = Signal(), Signal()
        for unit, name, base, send in (
            (weights, "beats", bank.reg_weight_base[0], send_w),
            (scales, "scales", bank.reg_scale_base[0], send_s),
        ):
            attend, mlp = sum(counts[name][:2]), sum(counts[name][2:])
            m.d.comb += [
                unit.job.valid.eq(send),
                unit.job.p.address.eq(base + layer * (attend + mlp) + Mux(in_mlp, attend, 0)),
                unit.job.p.count.eq(Mux(in_mlp, mlp, attend)),
            ]
            with m.If(unit.job.valid & unit.job.ready):
                m.d.sync += send.eq(0)

        left = Signal(range(rows + 1))  # rows that still compute
        ready_jobs = Cat(slot.valid for slot in drs.jobs)
        dealt = Signal(range(p.cores + 1))
        m.d.comb += dealt.eq(sum(slot.valid for slot in drs.jobs))
        finish = Signal()  # the pass is over: its jobs are taken
        m.d.comb += [slot.ready.eq(finish) for slot in drs.jobs]
        busy = Signal()
        replayed_bits = [Signal(rows, name=f"replayed{n}") for n in range(shape.layers)]
        m.d.comb += [
            start.eq(bank.reg_ctrl[0][0]),
            bank.reg_status[0].eq(busy),
            bank.reg_id[0].eq(IDENTITY),
            bank.reg_version[0].eq(VERSION),
            bank.reg_params[0].eq(
                Cat(Const(n, 8) for n in (shape.layers, rows, p.cores, c.array.lanes))
            ),
            *(bank.reg_replayed[n].eq(bits) for n, bits in enumerate(replayed_bits)),
        ]
        clear = Signal()
        with m.If(bank.reg_ctrl[0][1]):
            m.d.sync += clear.eq(1)
        with m.Elif(cache.clear.ready):
            m.d.sync += clear.eq(0)
        m.d.comb += cache.clear.valid.eq(clear)

        computed, replays = Signal(), Signal()
        phase = cores[0].phase
        all_ready = (Cat(core.weights.ready for core in cores) | ~active).all() & active.any()
        m.d.comb += [
            counters.clear.eq(bank.reg_ctrl[0][2]),
            counters.event.eq(
                Cat(
                    busy,
                    busy & in_norm & give & job_taken,
                    computed,
                    replays,
                    weights.o.valid & weights.o.ready,
                    all_ready & ~weights.o.valid,
                    self.k_response[0].valid,
                    self.v_response[0].valid,
                    *(phase == wanted for wanted in Phase if wanted is not Phase.IDLE),
                )
            ),
        ]
        for number, (name, _) in enumerate(EVENTS):
            m.d.comb += getattr(bank, f"reg_count_{name.lower()}")[0].eq(counters.counts[number])

        with m.FSM():
            with m.State("IDLE"):
                with m.If(start):
                    m.d.sync += [busy.eq(1), row.eq(0), beat.eq(0), layer.eq(0)]
                    m.next = "LOAD"
            with m.State("LOAD"):
                m.d.comb += [
                    self.x.ready.eq(1),
                    put.en.eq(self.x.valid),
                    step.eq(self.x.valid),
                ]
                with m.If(step & last_beat):
                    m.d.sync += row.eq(row + 1)
                    with m.If(row == rows - 1):
                        m.d.sync += [row.eq(0), first.eq(0), in_mlp.eq(0), in_norm.eq(0)]
                        m.next = "PASS"
            with m.State("PASS"):
                # attention's passes take rows in order; its first core's row is `first`
                m.d.sync += [core_at.eq(0), active.eq(0)]
                with m.If(in_mlp):
                    with m.If(left == 0):
                        m.next = "NEXT"
                    with m.Elif(dealt == Mux(left > p.cores, p.cores, left)):
                        m.d.sync += [
                            *(rows_of[n].eq(slot.p.row) for n, slot in enumerate(drs.jobs)),
                            active.eq(ready_jobs),
                            send_w.eq(1),
                            send_s.eq(1),
                        ]
                        m.next = "GIVE"
                with m.Else():
                    m.d.sync += [rows_of[n].eq(first + n) for n in range(p.cores)]
                    m.d.sync += [
                        active.eq(Cat(first + n < rows for n in range(p.cores))),
                        send_w.eq(~in_norm),
                        send_s.eq(~in_norm),
                    ]
                    m.next = "GIVE"
            with m.State("GIVE"):
                # cores without a row are passed over
                with m.If(active.bit_select(core_at, 1)):
                    m.d.sync += [row.eq(rows_of[core_at]), beat.eq(0)]
                    m.next = "JOB"
                with m.Elif(core_at == p.cores - 1):
                    m.d.sync += core_at.eq(0)
                    m.next = "TAKE"
                with m.Else():
                    m.d.sync += core_at.eq(core_at + 1)
            with m.State("JOB"):
                m.d.comb += give.eq(1)
                with m.If(job_taken):
                    m.next = "FEED"
            with m.State("FEED"):
                m.d.comb += [feed.eq(1), step.eq(x_taken)]
                with m.If(step & last_beat):
                    with m.If(core_at == p.cores - 1):
                        m.d.sync += core_at.eq(0)
                        m.next = "TAKE"
                    with m.Else():
                        m.d.sync += core_at.eq(core_at + 1)
                        m.next = "GIVE"
            with m.State("TAKE"):
                with m.If(active.bit_select(core_at, 1)):
                    m.d.sync += [row.eq(rows_of[core_at]), beat.eq(0)]
                    m.next = "AHEAD"
                with m.Elif(core_at == p.cores - 1):
                    m.next = "TAKEN"
                with m.Else():
                    m.d.sync += core_at.eq(core_at + 1)
            with m.State("AHEAD"):
                m.next = "ADD"
            with m.State("ADD"):
                store = in_mlp
                goes = Mux(in_norm, self.o.ready, Mux(store, cache.write.ready, 1))
                m.d.comb += [
                    self.o.valid.eq(in_norm & out_valid),
                    self.o.payload.eq(out_data),
                    cache.write.valid.eq(in_mlp & out_valid),
                    add.eq(1),
                    step.eq(out_valid & goes),
                    put.en.eq(step & ~in_norm),
                    *(out.r_en.eq(step & (core_at == number)) for number, out in enumerate(outs)),
                ]
                with m.If(step & last_beat):
                    m.next = "ADDED"
            with m.State("ADDED"):
                m.d.comb += [cache.seal.valid.eq(in_mlp), computed.eq(in_mlp & cache.seal.ready)]
                with m.If(~in_mlp | cache.seal.ready):
                    with m.If(core_at == p.cores - 1):
                        m.next = "TAKEN"
                    with m.Else():
                        m.d.sync += core_at.eq(core_at + 1)
                        m.next = "TAKE"
            with m.State("TAKEN"):
                m.d.sync += active.eq(0)
                with m.If(in_mlp):
                    m.d.comb += finish.eq(1)
                    m.d.sync += left.eq(left - dealt)
                    m.next = "PASS"
                with m.Elif(first + p.cores >= rows):
                    m.d.sync += [row.eq(0), first.eq(0), left.eq(0)]
                    with m.If(in_norm):
                        m.d.sync += busy.eq(0)
                        m.next = "IDLE"
                    with m.Else():
                        m.next = "ASK"
                with m.Else():
                    m.d.sync += first.eq(first + p.cores)
                    m.next = "PASS"
            with m.State("ASK"):
                m.d.comb += cache.ask.valid.eq(1)
                with m.If(cache.ask.ready):
                    m.next = "DECIDE"
            with m.State("DECIDE"):
                m.d.comb += [
                    drs.verdict.valid.eq(cache.hit.valid),
                    cache.hit.ready.eq(drs.verdict.ready),
                    replays.eq(cache.hit.valid & drs.verdict.ready & drs.verdict.p.replay),
                ]
                with m.If(cache.hit.valid & drs.verdict.ready):
                    m.d.sync += (
                        Array(replayed_bits)[layer].bit_select(row, 1).eq(drs.verdict.p.replay)
                    )
                    m.d.sync += [left.eq(left + ~drs.verdict.p.replay), row.eq(row + 1)]
                    m.next = "ASK"
                    with m.If(row == rows - 1):
                        m.d.sync += in_mlp.eq(1)
                        m.next = "REPLAYS"
            with m.State("REPLAYS"):
                # the scheduler names the rows; then it deals
                m.d.comb += drs.replays.ready.eq(1)
                with m.If(drs.replays.valid):
                    m.d.sync += [row.eq(drs.replays.payload), beat.eq(0)]
                    m.next = "READ"
                with m.Else():
                    m.next = "PASS"
            with m.State("READ"):
                m.d.comb += cache.read.valid.eq(1)
                with m.If(cache.read.ready):
                    m.next = "REPLAY"
            with m.State("REPLAY"):
                m.d.comb += [
                    from_cache.eq(1),
                    add.eq(1),
                    cache.o.ready.eq(1),
                    step.eq(cache.o.valid),
                    put.en.eq(step),
                ]
                with m.If(step & last_beat):
                    m.next = "REPLAYS"
            with m.State("NEXT"):
                m.d.sync += [in_mlp.eq(0), layer.eq(layer + 1), first.eq(0)]
                with m.If(layer == shape.layers - 1):
                    m.d.sync += [in_norm.eq(1), layer.eq(0)]
                m.next = "PASS"
        return m
