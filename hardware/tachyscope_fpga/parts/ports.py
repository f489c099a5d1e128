"""Dynamic Resource Scheduling over memory ports: what to fetch next, once an MLP is replayed.

With one row a decoder waits for memory: the arrays are idle most of the time and moving them about
gains nothing. What a replayed MLP frees are memory ports and prefetch slots. With DRS on, the
scheduler hands them to the next layer's projections as soon as the gate has decided, which is
before the MLP's turn where the output projection takes longer to fetch than the gate to decide;
with DRS off, the next layer's fetches wait for the end of the layer, as a
program compiled in layer order does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from amaranth.hdl import Array, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.fixed import check_range, index

QKV, KV, OUT, MLP, TAIL = range(5)
SEGMENTS = ("qkv", "kv", "o", "mlp", "tail")
MOST_BLOCKS = 2**20 - 1


@dataclass(frozen=True)
class Environment:
    """What stands around the scheduler: a memory, and arrays that use up blocks in order.

    All in cycles. A block holds the ports for `service` cycles and is there `latency` cycles later.
    A segment's first block is used once the vector it multiplies is known: `depends` cycles after
    the segment before it was used up (pipelines, RoPE, softmax, norms).
    """

    service: int = 1
    latency: int = 8
    use: tuple[int, int, int, int, int] = (1, 1, 1, 1, 1)
    """Cycles in which the arrays use up one block of each segment."""
    depends: tuple[int, int, int, int, int] = (2, 2, 2, 2, 2)
    verdict: int = 2
    """From the last projection to the gate's verdict."""
    replay: int = 2
    """From the output projection to the end of a layer whose MLP is replayed."""
    refresh_every: int = 0
    refresh_for: int = 0
    """The memory does nothing in the first `refresh_for` of every `refresh_every` cycles."""

    def __post_init__(self) -> None:
        for name in ("service", "latency", "verdict", "replay"):
            check_range(f"Environment {name}", getattr(self, name), 1, 2**20)
        for name in ("use", "depends"):
            for segment, value in zip(SEGMENTS, getattr(self, name), strict=True):
                check_range(f"Environment {name} of {segment}", value, 1, 2**20)
        check_range("Environment refresh_every", self.refresh_every, 0, 2**20)
        check_range("Environment refresh_for", self.refresh_for, 0, max(0, self.refresh_every - 1))

    def takes(self, cycle: int) -> int:
        """The first cycle from this one on in which the memory is not refreshing."""
        if self.refresh_every and cycle % self.refresh_every < self.refresh_for:
            return cycle - cycle % self.refresh_every + self.refresh_for
        return cycle

    def busy_until(self, cycle: int) -> int:
        """When a block that was taken in this cycle has passed; refreshes come in between."""
        left, every = self.service, self.refresh_every
        if not every:
            return cycle + left
        first = every - cycle % every
        if left <= first:
            return cycle + left
        periods, rest = divmod(left - first, every - self.refresh_for)
        return cycle + first + periods * every + (self.refresh_for + rest if rest else 0)


@dataclass
class Flow:
    """When every block was fetched and used up, and how long the tokens took."""

    fetches: list[tuple[int, int]] = field(default_factory=list)
    """(cycle, segment)."""
    released: list[int] = field(default_factory=list)
    verdicts: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    """The cycle in which each layer's output was there."""
    ends: list[int] = field(default_factory=list)
    """The same for each token."""

    @property
    def blocks(self) -> dict[str, int]:
        counts = [0] * len(SEGMENTS)
        for _, segment in self.fetches:
            counts[segment] += 1
        return dict(zip(SEGMENTS, counts, strict=True))


@dataclass(frozen=True)
class PortScheduler:
    """Fetches the blocks of a token's layers in order, at most `slots` of them not used up yet.

    A layer is the blocks of its projections (`qkv`), of the keys and values it reads (a number
    that comes with every token), of its output projection (`o`) and of its MLP. After the layers
    come `tail` blocks: what else a token needs.

    Parameters
    ----------
    drs : bool
        On: a replayed MLP's slots go to the next layer at once. Off: after the layer's end.
    """

    layers: int = 32
    qkv: int = 3
    o: int = 1
    mlp: int = 8
    tail: int = 0
    slots: int = 8
    drs: bool = True

    def __post_init__(self) -> None:
        check_range("PortScheduler layers", self.layers, 1, 1024)
        for name in ("qkv", "o", "mlp"):
            check_range(f"PortScheduler {name}", getattr(self, name), 1, MOST_BLOCKS)
        check_range("PortScheduler tail", self.tail, 0, MOST_BLOCKS)
        check_range("PortScheduler slots", self.slots, 1, 2**16)

    def compute(
        self,
        kv: Sequence[int],
        replay: Sequence[Sequence[bool]],
        around: Environment,
        mlp_use: Sequence[Sequence[int]] | None = None,
    ) -> Flow:
        """Tokens with `kv` blocks of keys and values, and a flag a layer: its MLP replays.

        `mlp_use` sets for each layer how long a block of its MLP takes the arrays, where that
        differs: with more rows, as many as compute.
        """
        return _Flow(self, kv, replay, around, mlp_use).run()

    def cycles(
        self, kv: Sequence[int], replay: Sequence[Sequence[bool]], around: Environment
    ) -> int:
        """From the first token's beat to the end of the last token."""
        return self.compute(kv, replay, around).ends[-1] + 1

    def create(self) -> PortSchedulerUnit:
        return PortSchedulerUnit(self)


class _Flow:
    """The schedule, block by block: each time is the latest of what it waits for."""

    def __init__(
        self,
        params: PortScheduler,
        kv: Sequence[int],
        replay: Sequence[Sequence[bool]],
        around: Environment,
        mlp_use: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if len(kv) != len(replay) or any(len(flags) != params.layers for flags in replay):
            raise TachyscopeError(
                f"replay must have {params.layers} flags for each of {len(kv)} tokens"
            )
        self.params, self.kv, self.replay, self.around = params, kv, replay, around
        self.mlp_use = mlp_use
        self.flow = Flow()
        self.free = 0  # the first cycle in which the memory takes a block
        self.now = 1  # the first cycle in which the scheduler can show one
        self.used = 0  # when the arrays are free
        self.vector = 0  # when the next segment's vector is there
        self.waiting: deque[int] = deque()  # when the last `slots` blocks were used up

    def segment(self, number: int, blocks: int, use: int | None = None) -> None:
        around, flow = self.around, self.flow
        latency = around.latency
        use = around.use[number] if use is None else use
        slots, waiting = self.params.slots, self.waiting
        for _ in range(blocks):
            cycle = self.now if self.now > self.free else self.free
            if len(waiting) == slots:
                cycle = max(cycle, waiting.popleft() + 1)
            cycle = around.takes(cycle)
            flow.fetches.append((cycle, number))
            self.now, self.free = cycle + 1, around.busy_until(cycle)
            self.used = max(self.free + latency, self.used, self.vector) + use
            waiting.append(self.used)
            flow.released.append(self.used)

    def after(self, number: int) -> None:
        """The next segment's vector: after what was used up."""
        self.vector = self.used + self.around.depends[number]

    def run(self) -> Flow:
        params, around, flow = self.params, self.around, self.flow
        for token, kv in enumerate(self.kv):
            check_range("kv", kv, 1, MOST_BLOCKS)
            if token:
                self.now += 1  # the next token's beat is taken
            for layer in range(params.layers):
                self.segment(QKV, params.qkv)
                flow.verdicts.append(self.used + around.verdict)
                self.after(KV)
                self.segment(KV, kv)
                self.after(OUT)
                self.segment(OUT, params.o)
                decided = max(self.now, flow.verdicts[-1])
                self.now = decided + 1
                if self.replay[token][layer]:
                    done = self.used + around.replay
                    if not params.drs:
                        self.now = max(decided + 1, done + 1) + 1
                else:
                    self.after(MLP)
                    use = None if self.mlp_use is None else self.mlp_use[token][layer]
                    self.segment(MLP, params.mlp, use)
                    done = self.used + around.depends[QKV]
                flow.layers.append(done)
                self.vector = done
            self.vector += around.depends[TAIL]
            if params.tail:
                self.segment(TAIL, params.tail)
                self.after(QKV)
            flow.ends.append(self.vector)
        return flow


class PortSchedulerUnit(wiring.Component):
    """One block a cycle, as memory and slots allow; a verdict costs one cycle.

    Members
    -------
    token : In(stream of the token's kv blocks)
        Taken when the token before was fetched, which is before it is finished.
    verdict : In(stream of 1 bit)
        One beat a layer: its MLP replays.
    release : In(stream of 1 bit)
        A block was used up: its slot is free.
    layer : In(stream of 1 bit)
        The layer's output is there. Always ready.
    fetch : Out(stream of {segment, last})
        One beat a block, in the order of the weights in memory; `last` ends the segment.
    """

    def __init__(self, params: PortScheduler) -> None:
        self.params = params
        fetch = data.StructLayout({"segment": index(len(SEGMENTS)), "last": 1})
        super().__init__(
            {
                "token": In(stream.Signature(range(MOST_BLOCKS + 1))),
                "verdict": In(stream.Signature(1)),
                "release": In(stream.Signature(1)),
                "layer": In(stream.Signature(1)),
                "fetch": Out(stream.Signature(fetch)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        ports = self.params
        segment, block = Signal(index(len(SEGMENTS))), Signal(range(MOST_BLOCKS + 1))
        kv, layer = Signal(range(MOST_BLOCKS + 1)), Signal(index(ports.layers))
        held = Signal(range(ports.slots + 1))  # blocks fetched and not used up
        behind = Signal(range(ports.layers + 1))  # layers begun and not finished
        lengths = Array([ports.qkv, kv, ports.o, ports.mlp, max(ports.tail, 1)])
        fetched, begun = Signal(), Signal()
        last = block == lengths[segment] - 1

        m.d.comb += [
            self.fetch.p.segment.eq(segment),
            self.fetch.p.last.eq(last),
            fetched.eq(self.fetch.valid & self.fetch.ready),
            self.release.ready.eq(1),
            self.layer.ready.eq(1),
        ]
        m.d.sync += [
            held.eq(held + fetched - self.release.valid),
            behind.eq(behind + begun - self.layer.valid),
        ]
        after_layer = Mux(layer == ports.layers - 1, TAIL if ports.tail else QKV, QKV)
        with m.FSM():
            with m.State("TOKEN"):
                m.d.comb += self.token.ready.eq(1)
                with m.If(self.token.valid):
                    m.d.sync += [kv.eq(self.token.payload), layer.eq(0), segment.eq(QKV)]
                    m.d.comb += begun.eq(1)
                    m.next = "FETCH"
            with m.State("FETCH"):
                m.d.comb += self.fetch.valid.eq(held != ports.slots)
                with m.If(fetched):
                    m.d.sync += block.eq(block + 1)
                    with m.If(last):
                        m.d.sync += [block.eq(0), segment.eq(segment + 1)]
                        with m.If(segment == OUT):
                            m.next = "DECIDE"
                        with m.Elif(segment == MLP):
                            self._next_layer(m, layer, segment, after_layer, begun)
                        with m.Elif(segment == TAIL):
                            m.next = "TOKEN"
            with m.State("DECIDE"):
                m.d.comb += self.verdict.ready.eq(1)
                with m.If(self.verdict.valid & ~self.verdict.payload):
                    m.next = "FETCH"
                with m.Elif(self.verdict.valid):
                    if ports.drs:
                        self._next_layer(m, layer, segment, after_layer, begun)
                    else:
                        m.next = "WAIT"
            with m.State("WAIT"):
                with m.If(behind == 0):
                    self._next_layer(m, layer, segment, after_layer, begun)
        return m

    def _next_layer(
        self, m: Module, layer: Signal, segment: Signal, after: Signal, begun: Signal
    ) -> None:
        ports = self.params
        m.d.sync += [layer.eq(layer + 1), segment.eq(after)]
        with m.If(layer != ports.layers - 1):
            m.d.comb += begun.eq(1)
            m.next = "FETCH"
        with m.Else():
            m.next = "FETCH" if ports.tail else "TOKEN"
