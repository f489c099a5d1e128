"""One core of the decoder: a row's attention, or its MLP, or the last norm."""

from __future__ import annotations

from dataclasses import dataclass

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.decoder.job import THRESHOLD_BITS, Phase, job_layout
from tachyscope_fpga.decoder.job_states import JobSignals, Units, states
from tachyscope_fpga.decoder.model import PARTS, DecoderShape
from tachyscope_fpga.parts.attention_unit import AttentionUnit
from tachyscope_fpga.parts.fixed import ACC_HIGH, ACC_LOW, check_multiple, index
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.int8_buffer import Int8Buffer
from tachyscope_fpga.parts.pipe import send
from tachyscope_fpga.parts.requant import Requant
from tachyscope_fpga.parts.rms_norm import RmsNorm
from tachyscope_fpga.parts.rope import Rope
from tachyscope_fpga.parts.silu_mul import SiluMul
from tachyscope_fpga.parts.streamers import ADDRESS_BITS, KvStreamer
from tachyscope_fpga.parts.tas_gate import TasGate
from tachyscope_fpga.parts.vector import MAX_EXPONENT, WIDE, wide_vector


@dataclass(frozen=True)
class DecoderCore:
    """The parts of one core and how they fit together.

    Parameters
    ----------
    shape : the decoder's sizes
    array : the int8 array; its lanes are outputs of a tile, its macs inputs of a beat
    rope, eps : of the model
    lanes : wide numbers that move at once between the parts
    """

    shape: DecoderShape
    array: GemvArray
    rope: Rope
    eps: int
    lanes: int = 4

    def __post_init__(self) -> None:
        shape = self.shape
        check_multiple("array lanes", self.array.lanes, "lanes", self.lanes)
        for part in ("qkv", "o", "gate_up", "down"):
            outputs, depth = shape.sizes(part)
            self.array.tiles(outputs)
            self.array.beats(depth)
        _ = self.buffers, self.norm, self.attention, self.gate
        check_multiple("decoder head_dim", shape.head_dim, "lanes", self.lanes)

    @property
    def norm(self) -> RmsNorm:
        return RmsNorm(self.shape.width, self.lanes, self.eps)

    @property
    def attention(self) -> AttentionUnit:
        s = self.shape
        return AttentionUnit(s.head_dim, s.group, s.context, self.lanes)

    @property
    def gate(self) -> TasGate:
        s = self.shape
        return TasGate(s.heads, s.head_dim, s.head_dim, query="after_rope")

    @property
    def buffers(self) -> dict[str, Int8Buffer]:
        """A vector for the array, the MLP's inner one, and q, k, v of a token."""
        s, lanes = self.shape, self.lanes
        return {
            "outer": Int8Buffer(max(s.width, s.heads * s.head_dim), lanes, self.array.macs),
            "inner": Int8Buffer(s.inner, lanes // 2, self.array.macs),
            "q": Int8Buffer(s.heads * s.head_dim, lanes, s.head_dim),
            "k": Int8Buffer(s.kv_heads * s.head_dim, lanes, s.head_dim),
            "v": Int8Buffer(s.kv_heads * s.head_dim, lanes, s.head_dim),
        }

    @property
    def requant(self) -> Requant:
        return Requant(self.lanes, WIDE)

    def beats(self, part: str) -> int:
        """Beats of weights of one of a layer's matrices."""
        outputs, depth = self.shape.sizes(part)
        return self.array.tiles(outputs) * self.array.beats(depth)

    def scales(self, part: str) -> int:
        """Beats of scales."""
        return self.shape.sizes(part)[0] // self.lanes

    def weight_layout(self) -> data.ArrayLayout:
        return data.ArrayLayout(data.ArrayLayout(signed(8), self.array.macs), self.array.lanes)

    def write_layout(self) -> data.StructLayout:
        return data.StructLayout({"address": ADDRESS_BITS, "entry": self.attention.entry_layout()})

    def create(self) -> DecoderCoreUnit:
        return DecoderCoreUnit(self)


class DecoderCoreUnit(wiring.Component):
    """A job at a time: `x` in, the weights through it, `y` out.

    The residual is not added here: `y` is attention's output projection, the MLP's output, or the
    norm.

    Members
    -------
    job : In(stream of {work, index, slot, gate, threshold, sink, window})
    x : In(stream of `lanes` signed(24)), y : Out(the same)
        `width / lanes` beats each a job.
    weights : In(stream of array lanes x macs signed(8)), scale : In(stream of a Requant's scales)
        ATTEND takes those of qkv and o, MLP those of gate_up and down. Neither's `ready` depends on
        its `valid`, so that cores can be fed together.
    k_request, k_response, v_request, v_response, kv_write
        The KV cache in memory. Entry i of head g of keys (kind 0) or values (1) of a slot is at
        ((slot * 2 + kind) * kv_heads + g) * context + i.
    verdict : Out(stream of 1 bit)
        One for every ATTEND: the TAS is above the threshold. Taken before attention goes on.
    phase : Out(Phase)
    """

    def __init__(self, params: DecoderCore) -> None:
        self.params = params
        wide = stream.Signature(wide_vector(params.lanes))
        address = stream.Signature(ADDRESS_BITS)
        entry = stream.Signature(params.attention.entry_layout())
        super().__init__(
            {
                "job": In(stream.Signature(job_layout(params.shape))),
                "x": In(wide),
                "y": Out(wide),
                "weights": In(stream.Signature(params.weight_layout())),
                "scale": In(stream.Signature(params.requant.scale_layout())),
                "k_request": Out(address),
                "k_response": In(entry),
                "v_request": Out(address),
                "v_response": In(entry),
                "kv_write": Out(stream.Signature(params.write_layout())),
                "verdict": Out(stream.Signature(1)),
                "phase": Out(Phase),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        units = self._units(m)
        job = JobSignals(self.params)
        self._begin(m, units, job)
        self._norm(m, units, job)
        exponent = self._multiply(m, units, job)
        self._requantise(m, units, exponent)
        self._route_results(m, units, job)
        self._route_turned(m, units, job)
        self._read_cache(m, units, job)
        self._attend(m, units, job)
        self._score(m, units, job)
        states(m, self, units, job)
        return m

    def _units(self, m: Module) -> Units:
        p = self.params
        m.submodules.norm = norm = p.norm.create()
        m.submodules.rope = rope = p.rope.create()
        m.submodules.silu = silu = SiluMul(p.lanes).create()
        m.submodules.array = array = p.array.create()
        m.submodules.requant = requant = p.requant.create()
        m.submodules.gate = gate = p.gate.create()
        m.submodules.attention = attention = p.attention.create()
        buffers = {name: buffer.create() for name, buffer in p.buffers.items()}
        for name, buffer in buffers.items():
            m.submodules[f"buffer_{name}"] = buffer
        entry = p.attention.entry_layout()
        m.submodules.k_reader = k_reader = KvStreamer().create(entry)
        m.submodules.v_reader = v_reader = KvStreamer().create(entry)
        for port, unit in (("k", k_reader), ("v", v_reader)):
            wiring.connect(m, wiring.flipped(getattr(self, f"{port}_request")), unit.request)
            wiring.connect(m, wiring.flipped(getattr(self, f"{port}_response")), unit.response)
        return Units(
            norm, rope, silu, array, requant, gate, attention, **buffers,
            k_reader=k_reader, v_reader=v_reader,
        )  # fmt: skip

    def _begin(self, m: Module, units: Units, job: JobSignals) -> None:
        """Every unit gets its part of a job."""
        p, s, u, j = self.params, self.params.shape, units, job
        macs, tile = p.array.macs, p.array.lanes
        qkv, o, gate_up, down = (s.sizes(part)[0] // tile for part in PARTS)
        attend, mlp = j.begin & j.attend, j.begin & j.mlp
        send(
            m,
            u.outer.job,
            attend | mlp | j.attending,
            words=Mux(j.outer_in, s.heads * s.head_dim // macs, s.width // macs),
            times=Mux(j.outer_in, o, Mux(j.attend, qkv, gate_up)),
        )
        send(m, u.inner.job, mlp, words=s.inner // macs, times=down)
        send(m, u.rope.position, attend, payload=j.job.index)
        send(m, u.q.job, attend, words=s.heads, times=1 + j.job.gate)
        send(m, u.k.job, attend, words=s.kv_heads, times=1)
        send(m, u.v.job, attend, words=s.kv_heads, times=1)

    def _norm(self, m: Module, units: Units, job: JobSignals) -> None:
        """The array's input is the norm of x, or attention's output."""
        u, norm, attention, outer_in = units, units.norm, units.attention, job.outer_in
        m.d.comb += [
            norm.i.valid.eq(self.x.valid),
            norm.i.payload.eq(self.x.payload),
            self.x.ready.eq(norm.i.ready),
            u.outer.i.payload.eq(Mux(outer_in, attention.o.payload, norm.o.payload)),
            u.outer.i.valid.eq(Mux(outer_in, attention.o.valid, norm.o.valid & ~job.only_norm)),
            attention.o.ready.eq(outer_in & u.outer.i.ready),
        ]

    def _multiply(self, m: Module, units: Units, job: JobSignals) -> Signal:
        """The weights meet the vector that they are for; the exponent of that vector."""
        u, array, beats = units, units.array, self.params.beats("gate_up")
        up_left = Signal(range(beats + 1))  # beats of gate_up to come
        from_inner = job.mlp & (up_left == 0)
        source_valid = Mux(from_inner, u.inner.o.valid, u.outer.o.valid)
        source = Mux(from_inner, u.inner.o.payload.as_value(), u.outer.o.payload.as_value())
        vector = data.View(u.outer.beat, source)
        fed = array.i.valid & array.i.ready
        exponent = Signal(range(MAX_EXPONENT + 1))
        m.d.comb += [
            array.i.valid.eq(self.weights.valid & source_valid),
            array.i.p.w.eq(self.weights.payload),
            array.i.p.x.eq(vector.x),
            array.i.p.last.eq(vector.last),
            self.weights.ready.eq(array.i.ready & source_valid),
            u.outer.o.ready.eq(fed & ~from_inner),
            u.inner.o.ready.eq(fed & from_inner),
        ]
        with m.If(fed):
            m.d.sync += exponent.eq(vector.exponent)
            with m.If(job.mlp & ~from_inner):
                m.d.sync += up_left.eq(up_left - 1)
        with m.If(job.begin):
            m.d.sync += up_left.eq(beats)
        return exponent

    def _requantise(self, m: Module, units: Units, exponent: Signal) -> None:
        """`lanes` results at a time; a vector's exponent takes off from the shift."""
        lanes, array, requant = self.params.lanes, units.array, units.requant
        parts = self.params.array.lanes // lanes
        part = Signal(index(parts))
        fired = requant.acc.valid & requant.acc.ready
        accumulators = array.o.payload.as_value().word_select(part, 32 * lanes)
        m.d.comb += [
            requant.acc.valid.eq(array.o.valid),
            requant.acc.payload.as_value().eq(accumulators),
            array.o.ready.eq(fired & (part == parts - 1)),
            requant.scale.valid.eq(self.scale.valid),
            requant.scale.p.multiplier.eq(self.scale.p.multiplier),
            self.scale.ready.eq(requant.scale.ready),
        ]
        for lane in range(lanes):
            shift = self.scale.p.shift[lane]
            m.d.comb += requant.scale.p.shift[lane].eq(Mux(shift > exponent, shift - exponent, 0))
        with m.If(fired):
            m.d.sync += part.eq(Mux(part == parts - 1, 0, part + 1))

    def _route_results(self, m: Module, units: Units, job: JobSignals) -> None:
        """Where a result goes depends on how many there were: to RoPE, v, SiLU, or out."""
        u, s, lanes = units, self.params.shape, self.params.lanes
        turned = (s.heads + s.kv_heads) * s.head_dim // lanes
        rest = s.kv_heads * s.head_dim // lanes
        ups = 2 * s.inner // lanes
        done = Signal(range(max(turned + rest, ups) + 1))
        to_rope = job.attend & (done < turned)
        to_v = job.attend & ~to_rope & (done < turned + rest)
        to_silu = job.mlp & (done < ups)
        to_y = ~to_rope & ~to_v & ~to_silu & ~job.only_norm
        result, norm = u.requant.o, u.norm
        sent = result.valid & result.ready
        for target, when in ((u.rope.i, to_rope), (u.v.i, to_v), (u.silu.i, to_silu)):
            m.d.comb += [target.valid.eq(result.valid & when), target.payload.eq(result.payload)]
        m.d.comb += [
            self.y.valid.eq(Mux(job.only_norm, norm.o.valid, result.valid & to_y)),
            self.y.payload.eq(Mux(job.only_norm, norm.o.payload, result.payload)),
            norm.o.ready.eq(Mux(job.only_norm, self.y.ready, ~job.outer_in & u.outer.i.ready)),
            result.ready.eq(
                (to_rope & u.rope.i.ready)
                | (to_v & u.v.i.ready)
                | (to_silu & u.silu.i.ready)
                | (to_y & self.y.ready)
            ),
            u.inner.i.valid.eq(u.silu.o.valid),
            u.inner.i.payload.eq(u.silu.o.payload),
            u.silu.o.ready.eq(u.inner.i.ready),
        ]
        with m.If(sent & ~to_y):
            m.d.sync += done.eq(done + 1)
        with m.If(job.begin):
            m.d.sync += done.eq(0)
        out, last = Signal(range(s.width // lanes)), s.width // lanes - 1
        leaves = self.y.valid & self.y.ready
        m.d.comb += job.finished.eq(leaves & (out == last))
        with m.If(leaves):
            m.d.sync += out.eq(Mux(job.finished, 0, out + 1))

    def _route_turned(self, m: Module, units: Units, job: JobSignals) -> None:
        """RoPE turns the queries first, then the keys."""
        s, rope, q, k = self.params.shape, units.rope, units.q, units.k
        queries, keys = (heads * s.head_dim // self.params.lanes for heads in (s.heads, s.kv_heads))
        turned = Signal(range(queries + keys + 1))
        to_q = turned < queries
        m.d.comb += [
            q.i.valid.eq(rope.o.valid & to_q),
            k.i.valid.eq(rope.o.valid & ~to_q),
            q.i.payload.eq(rope.o.payload),
            k.i.payload.eq(rope.o.payload),
            rope.o.ready.eq(Mux(to_q, q.i.ready, k.i.ready)),
        ]
        with m.If(rope.o.valid & rope.o.ready):
            m.d.sync += turned.eq(turned + 1)
        with m.If(job.begin):
            m.d.sync += turned.eq(0)

    def _read_cache(self, m: Module, units: Units, job: JobSignals) -> None:
        """Orders for one head: the key one frame back for the gate, else keys and values."""
        s, j, given = self.params.shape, job, job.job
        before, entries = given.index - s.tokens_per_frame, given.index + 1
        waits_k = send(
            m,
            units.k_reader.job,
            j.k_order,
            address=j.base(0) + Mux(j.gating, before, 0),
            entries=Mux(j.gating, 1, entries),
            sink=Mux(j.gating, 0, given.sink),
            window=Mux(j.gating, 0, given.window),
        )
        waits_v = send(
            m,
            units.v_reader.job,
            j.v_order,
            address=j.base(1),
            entries=entries,
            sink=given.sink,
            window=given.window,
        )
        with m.If(units.q.o.valid):
            m.d.sync += j.q_exponent.eq(units.q.o.p.exponent)
        few = (given.window == 0) | (entries <= given.sink + given.window)
        waits_attention = send(
            m,
            units.attention.job,
            j.v_order,
            entries=Mux(few, entries, given.sink + given.window),
            exponent=j.q_exponent,
        )
        m.d.comb += j.waits.eq(waits_k | waits_v | waits_attention)

    def _attend(self, m: Module, units: Units, job: JobSignals) -> None:
        """Queries and keys go to the gate first, then to attention; values to attention."""
        j, q, gate, attention = job, units.q, units.gate, units.attention
        k_reader, v_reader = units.k_reader, units.v_reader
        m.d.comb += [
            j.scored.eq(gate.i.valid & gate.i.ready),
            gate.i.valid.eq(j.gating & q.o.valid & k_reader.o.valid),
            gate.i.p.q_rotated.eq(q.o.p.x),
            gate.i.p.k.eq(k_reader.o.p.x),
            attention.q.valid.eq(~j.gating & q.o.valid),
            attention.q.payload.eq(q.o.p.x),
            q.o.ready.eq(Mux(j.gating, j.scored, attention.q.ready)),
            attention.k.valid.eq(~j.gating & k_reader.o.valid),
            attention.k.payload.eq(k_reader.o.payload),
            k_reader.o.ready.eq(Mux(j.gating, j.scored & j.last_query, attention.k.ready)),
            attention.v.valid.eq(v_reader.o.valid),
            attention.v.payload.eq(v_reader.o.payload),
            v_reader.o.ready.eq(attention.v.ready),
        ]

    def _score(self, m: Module, units: Units, job: JobSignals) -> None:
        """The gate's threshold is shifted by both exponents, not the score."""
        j, gate = job, units.gate
        k_exponent = Signal(range(MAX_EXPONENT + 1))
        with m.If(j.scored):
            m.d.sync += [
                j.query.eq(Mux(j.last_query, 0, j.query + 1)),
                k_exponent.eq(units.k_reader.o.p.exponent),
            ]
        shifted = Signal(signed(THRESHOLD_BITS))
        m.d.comb += [
            shifted.eq(j.job.threshold >> (j.q_exponent + k_exponent)),
            gate.threshold.payload.eq(
                Mux(shifted > ACC_HIGH, ACC_HIGH, Mux(shifted < ACC_LOW, ACC_LOW, shifted))
            ),
        ]
