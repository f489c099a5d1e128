"""One core of the decoder: a row's attention, or its MLP, or the last norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from tachyscope.fpga.attention_unit import AttentionUnit
from tachyscope.fpga.decoder_job import THRESHOLD_BITS, Phase, Work, job_layout
from tachyscope.fpga.decoder_model import DecoderShape
from tachyscope.fpga.fixed import ACC_HIGH, ACC_LOW, check_multiple, index
from tachyscope.fpga.gemv import GemvArray
from tachyscope.fpga.int8_buffer import Int8Buffer
from tachyscope.fpga.pipe import send
from tachyscope.fpga.requant import Requant
from tachyscope.fpga.rms_norm import RmsNorm
from tachyscope.fpga.rope import Rope
from tachyscope.fpga.silu_mul import SiluMul
from tachyscope.fpga.streamers import ADDRESS_BITS, KvStreamer
from tachyscope.fpga.tas_gate import TasGate
from tachyscope.fpga.vector import MAX_EXPONENT, WIDE, wide_vector


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
        ATTEND takes those of qkv and o, MLP those of gate_up and down. Neither's `ready` hangs on
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
        p = self.params
        s, lanes = p.shape, p.lanes
        m.submodules.norm = norm = p.norm.create()
        m.submodules.rope = rope = p.rope.create()
        m.submodules.silu = silu = SiluMul(lanes).create()
        m.submodules.array = array = p.array.create()
        m.submodules.requant = requant = p.requant.create()
        m.submodules.gate = gate = p.gate.create()
        m.submodules.attention = attention = p.attention.create()
        buffers: dict[str, Any] = {}
        for name, buffer in p.buffers.items():
            m.submodules[f"buffer_{name}"] = buffers[name] = buffer.create()
        outer, inner, q, k, v = buffers.values()
        entry = p.attention.entry_layout()
        m.submodules.k_reader = k_reader = KvStreamer().create(entry)
        m.submodules.v_reader = v_reader = KvStreamer().create(entry)
        for port, unit in (("k", k_reader), ("v", v_reader)):
            wiring.connect(m, wiring.flipped(getattr(self, f"{port}_request")), unit.request)
            wiring.connect(m, wiring.flipped(getattr(self, f"{port}_response")), unit.response)

        job = Signal(job_layout(s))
        attend, mlp, only_norm = (job.work == work for work in (Work.ATTEND, Work.MLP, Work.NORM))
        begin, attending = Signal(), Signal()

        macs, tile = p.array.macs, p.array.lanes
        outer_in = Signal()  # attention's output comes, not the norm's
        start_attend, start_mlp = begin & attend, begin & mlp
        qkv_tiles, o_tiles = (s.sizes(part)[0] // tile for part in ("qkv", "o"))
        up_tiles, down_tiles = (s.sizes(part)[0] // tile for part in ("gate_up", "down"))
        send(
            m,
            outer.job,
            start_attend | start_mlp | attending,
            words=Mux(outer_in, s.heads * s.head_dim // macs, s.width // macs),
            times=Mux(outer_in, o_tiles, Mux(attend, qkv_tiles, up_tiles)),
        )
        send(m, inner.job, start_mlp, words=s.inner // macs, times=down_tiles)
        send(m, rope.position, start_attend, payload=job.index)
        send(m, q.job, start_attend, words=s.heads, times=1 + job.gate)
        send(m, k.job, start_attend, words=s.kv_heads, times=1)
        send(m, v.job, start_attend, words=s.kv_heads, times=1)

        # norm: to the array, or out
        m.d.comb += [
            norm.i.valid.eq(self.x.valid),
            norm.i.payload.eq(self.x.payload),
            self.x.ready.eq(norm.i.ready),
            outer.i.payload.eq(Mux(outer_in, attention.o.payload, norm.o.payload)),
            outer.i.valid.eq(Mux(outer_in, attention.o.valid, norm.o.valid & ~only_norm)),
            attention.o.ready.eq(outer_in & outer.i.ready),
        ]

        # the array: weights meet the vector that they are for
        up_left = Signal(range(p.beats("gate_up") + 1))  # beats of gate_up to come
        from_inner = mlp & (up_left == 0)
        source_valid = Mux(from_inner, inner.o.valid, outer.o.valid)
        source = Mux(from_inner, inner.o.payload.as_value(), outer.o.payload.as_value())
        vector = data.View(outer.beat, source)
        fed = array.i.valid & array.i.ready
        exponent = Signal(range(MAX_EXPONENT + 1))
        m.d.comb += [
            array.i.valid.eq(self.weights.valid & source_valid),
            array.i.p.w.eq(self.weights.payload),
            array.i.p.x.eq(vector.x),
            array.i.p.last.eq(vector.last),
            self.weights.ready.eq(array.i.ready & source_valid),
            outer.o.ready.eq(fed & ~from_inner),
            inner.o.ready.eq(fed & from_inner),
        ]
        with m.If(fed):
            m.d.sync += exponent.eq(vector.exponent)
            with m.If(mlp & ~from_inner):
                m.d.sync += up_left.eq(up_left - 1)
        with m.If(begin):
            m.d.sync += up_left.eq(p.beats("gate_up"))

        # requantised `lanes` at a time; a vector's exponent takes off from the shift
        parts = tile // lanes
        part = Signal(index(parts))
        fired = requant.acc.valid & requant.acc.ready
        m.d.comb += [
            requant.acc.valid.eq(array.o.valid),
            requant.acc.payload.as_value().eq(
                array.o.payload.as_value().word_select(part, 32 * lanes)
            ),
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

        # where a result goes hangs on how many there were
        turned = (s.heads + s.kv_heads) * s.head_dim // lanes
        rest = s.kv_heads * s.head_dim // lanes
        ups = 2 * s.inner // lanes
        done = Signal(range(max(turned + rest, ups) + 1))
        to_rope = attend & (done < turned)
        to_v = attend & ~to_rope & (done < turned + rest)
        to_silu = mlp & (done < ups)
        to_y = ~to_rope & ~to_v & ~to_silu & ~only_norm
        result = requant.o
        sent = result.valid & result.ready
        for target, when in ((rope.i, to_rope), (v.i, to_v), (silu.i, to_silu)):
            m.d.comb += [target.valid.eq(result.valid & when), target.payload.eq(result.payload)]
        m.d.comb += [
            self.y.valid.eq(Mux(only_norm, norm.o.valid, result.valid & to_y)),
            self.y.payload.eq(Mux(only_norm, norm.o.payload, result.payload)),
            norm.o.ready.eq(Mux(only_norm, self.y.ready, ~outer_in & outer.i.ready)),
            result.ready.eq(
                (to_rope & rope.i.ready)
                | (to_v & v.i.ready)
                | (to_silu & silu.i.ready)
                | (to_y & self.y.ready)
            ),
            inner.i.valid.eq(silu.o.valid),
            inner.i.payload.eq(silu.o.payload),
            silu.o.ready.eq(inner.i.ready),
        ]
        with m.If(sent & ~to_y):
            m.d.sync += done.eq(done + 1)
        queries = s.heads * s.head_dim // lanes
        turned_done = Signal(range(turned + 1))
        to_q = turned_done < queries
        m.d.comb += [
            q.i.valid.eq(rope.o.valid & to_q),
            k.i.valid.eq(rope.o.valid & ~to_q),
            q.i.payload.eq(rope.o.payload),
            k.i.payload.eq(rope.o.payload),
            rope.o.ready.eq(Mux(to_q, q.i.ready, k.i.ready)),
        ]
        with m.If(rope.o.valid & rope.o.ready):
            m.d.sync += turned_done.eq(turned_done + 1)
        out = Signal(range(s.width // lanes))
        finished = self.y.valid & self.y.ready & (out == s.width // lanes - 1)
        with m.If(self.y.valid & self.y.ready):
            m.d.sync += out.eq(Mux(finished, 0, out + 1))
        with m.If(begin):
            m.d.sync += [done.eq(0), turned_done.eq(0)]

        # keys, values and queries on their ways
        head = Signal(index(s.kv_heads))
        query = Signal(index(s.group))
        q_exponent = Signal(range(MAX_EXPONENT + 1))
        with m.If(q.o.valid):
            m.d.sync += q_exponent.eq(q.o.p.exponent)

        def base(kind: int) -> Any:
            """The address of entry 0 of the head."""
            return ((job.slot * 2 + kind) * s.kv_heads + head) * s.context

        gating = Signal()
        k_order, v_order = Signal(), Signal()
        before = job.index - s.tokens_per_frame
        all_entries = job.index + 1
        waits_k = send(
            m,
            k_reader.job,
            k_order,
            address=base(0) + Mux(gating, before, 0),
            entries=Mux(gating, 1, all_entries),
            sink=Mux(gating, 0, job.sink),
            window=Mux(gating, 0, job.window),
        )
        waits_v = send(
            m,
            v_reader.job,
            v_order,
            address=base(1),
            entries=all_entries,
            sink=job.sink,
            window=job.window,
        )
        few = (job.window == 0) | (all_entries <= job.sink + job.window)
        waits_attention = send(
            m,
            attention.job,
            v_order,
            entries=Mux(few, all_entries, job.sink + job.window),
            exponent=q_exponent,
        )
        scored = gate.i.valid & gate.i.ready
        m.d.comb += [
            gate.i.valid.eq(gating & q.o.valid & k_reader.o.valid),
            gate.i.p.q_rotated.eq(q.o.p.x),
            gate.i.p.k.eq(k_reader.o.p.x),
            attention.q.valid.eq(~gating & q.o.valid),
            attention.q.payload.eq(q.o.p.x),
            q.o.ready.eq(Mux(gating, scored, attention.q.ready)),
            attention.k.valid.eq(~gating & k_reader.o.valid),
            attention.k.payload.eq(k_reader.o.payload),
            k_reader.o.ready.eq(Mux(gating, scored & (query == s.group - 1), attention.k.ready)),
            attention.v.valid.eq(v_reader.o.valid),
            attention.v.payload.eq(v_reader.o.payload),
            v_reader.o.ready.eq(attention.v.ready),
        ]
        # the threshold is shifted by both exponents, not the score
        k_exponent = Signal(range(MAX_EXPONENT + 1))
        with m.If(scored):
            m.d.sync += [
                query.eq(Mux(query == s.group - 1, 0, query + 1)),
                k_exponent.eq(k_reader.o.p.exponent),
            ]
        shifted = Signal(signed(THRESHOLD_BITS))
        m.d.comb += [
            shifted.eq(job.threshold >> (q_exponent + k_exponent)),
            gate.threshold.payload.eq(
                Mux(shifted > ACC_HIGH, ACC_HIGH, Mux(shifted < ACC_LOW, ACC_LOW, shifted))
            ),
        ]

        write = self.kv_write
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += [self.phase.eq(Phase.IDLE), self.job.ready.eq(1)]
                m.d.sync += [outer_in.eq(0), head.eq(0)]
                with m.If(self.job.valid):
                    m.d.sync += job.eq(self.job.payload)
                    m.next = "BEGIN"
            with m.State("BEGIN"):
                m.d.comb += [self.phase.eq(Phase.PROJECT), begin.eq(1)]
                with m.Switch(job.work):
                    with m.Case(Work.ATTEND):
                        m.next = "STORE_K"
                    with m.Case(Work.MLP):
                        m.next = "MLP"
                    with m.Default():
                        m.next = "NORM"
            for name, buffer, after in (("K", k, "STORE_V"), ("V", v, "GATE")):
                with m.State(f"STORE_{name}"):
                    m.d.comb += [
                        self.phase.eq(Mux(buffer.o.valid, Phase.STORE, Phase.PROJECT)),
                        write.valid.eq(buffer.o.valid),
                        write.p.address.eq(base(name == "V") + job.index),
                        write.p.entry.x.eq(buffer.o.p.x),
                        write.p.entry.exponent.eq(buffer.o.p.exponent),
                        buffer.o.ready.eq(write.ready),
                    ]
                    with m.If(write.valid & write.ready):
                        m.d.sync += head.eq(head + 1)
                        with m.If(head == s.kv_heads - 1):
                            m.d.sync += head.eq(0)
                            m.next = after
            with m.State("GATE"):
                m.d.comb += self.phase.eq(Phase.GATE)
                with m.If(job.gate):
                    m.d.comb += [gating.eq(1), k_order.eq(1)]
                    m.next = "SCORE"
                with m.Else():
                    m.d.comb += self.verdict.valid.eq(1)
                    with m.If(self.verdict.ready):
                        m.next = "ORDER"
            with m.State("SCORE"):
                m.d.comb += [self.phase.eq(Phase.GATE), gating.eq(1)]
                with m.If(scored & (query == s.group - 1)):
                    m.d.sync += head.eq(head + 1)
                    with m.If(head == s.kv_heads - 1):
                        m.d.sync += head.eq(0)
                        m.next = "VERDICT"
                    with m.Else():
                        m.next = "GATE"
            with m.State("VERDICT"):
                m.d.comb += [
                    self.phase.eq(Phase.GATE),
                    gating.eq(1),
                    gate.threshold.valid.eq(1),
                    self.verdict.valid.eq(gate.o.valid),
                    self.verdict.payload.eq(gate.o.payload),
                    gate.o.ready.eq(self.verdict.ready),
                ]
                with m.If(self.verdict.valid & self.verdict.ready):
                    m.next = "ORDER"
            with m.State("ORDER"):
                m.d.comb += self.phase.eq(Phase.ATTEND)
                m.d.sync += outer_in.eq(1)
                with m.If(outer_in):
                    m.d.comb += attending.eq(head == 0)
                    m.d.comb += [k_order.eq(1), v_order.eq(1)]
                    m.next = "ATTEND"
            with m.State("ATTEND"):
                m.d.comb += self.phase.eq(Phase.ATTEND)
                with m.If(~waits_k & ~waits_v & ~waits_attention & (head != s.kv_heads - 1)):
                    m.d.sync += head.eq(head + 1)
                    m.next = "ORDER"
                with m.If(finished):
                    m.next = "IDLE"
            with m.State("MLP"):
                m.d.comb += self.phase.eq(Phase.MLP)
                with m.If(finished):
                    m.next = "IDLE"
            with m.State("NORM"):
                m.d.comb += self.phase.eq(Phase.NORM)
                with m.If(finished):
                    m.next = "IDLE"
        return m
