"""A decoder in Amaranth's simulator with memories around it, and its integer model beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from amaranth.hdl import Value
from amaranth.sim import Simulator

from tachyscope_fpga.decoder.core import DecoderCore
from tachyscope_fpga.decoder.memory import scale_beats, weight_beats
from tachyscope_fpga.decoder.model import DecoderModel, DecoderShape, Layer, Token, eps_of, layer_of
from tachyscope_fpga.decoder.top import Top
from tachyscope_fpga.parts.fixed import Ints
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.rope import Rope
from tachyscope_fpga.tools.simulate import from_bits, to_bits

EPS = 1e-5


def small_layers(shape: DecoderShape, rng: np.random.Generator) -> list[Layer]:
    """Random layers by LLaMA's names."""
    inner, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def draw(*size: int) -> Any:
        return rng.normal(0, 1.5 / size[-1] ** 0.5, size)

    return [
        layer_of(
            {
                "input_layernorm": rng.uniform(0.5, 1.5, shape.width),
                "post_attention_layernorm": rng.uniform(0.5, 1.5, shape.width),
                "q_proj": draw(inner, shape.width),
                "k_proj": draw(shared, shape.width),
                "v_proj": draw(shared, shape.width),
                "o_proj": draw(shape.width, inner),
                "gate_proj": draw(shape.inner, shape.width),
                "up_proj": draw(shape.inner, shape.width),
                "down_proj": draw(shape.width, shape.inner),
            },
            shape.head_dim,
        )
        for _ in range(shape.layers)
    ]


def small_top(
    shape: DecoderShape,
    rows: int = 1,
    cores: int = 1,
    array: tuple[int, int] = (4, 4),
    lanes: int = 2,
) -> Top:
    rope = Rope.of(shape.head_dim, 100.0, lanes=lanes)
    core = DecoderCore(shape, GemvArray(*array), rope, eps_of(EPS, shape.width), lanes)
    return Top(core, rows, cores, prefetch=8)


def small_model(
    top: Top, layers: Sequence[Layer], thresholds: Sequence[int], sink: int = 0, window: int = 0
) -> DecoderModel:
    return DecoderModel(top.core.shape, layers, top.core.rope, EPS, thresholds, sink, window)


SMALL = DecoderShape(
    width=8, inner=12, layers=2, heads=2, kv_heads=1, head_dim=4, tokens_per_frame=2, context=16
)


class Bench:
    """Runs tokens on the hardware; memories answer after `latency` cycles, or later by `wait`."""

    def __init__(
        self, top: Top, layers: Sequence[Layer], thresholds: Sequence[int],
        sink: int = 0, window: int = 0, latency: int = 3, wait: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.top, self.latency, self.wait = top, latency, wait
        self.rng = np.random.default_rng(seed)
        self.weights = weight_beats(top.core, layers).tolist()
        self.scales = [
            {"multiplier": pair[0], "shift": pair[1]}
            for pair in scale_beats(top.core, layers).tolist()
        ]
        self.kv: dict[int, Any] = {}
        self.counts: dict[str, int] = {}
        self.settings = {"SINK": sink, "WINDOW": window}
        self.thresholds = thresholds
        self.cycles: list[int] = []

    def run(
        self,
        tokens: Sequence[tuple[Ints, Token]],
        watch: Callable[[int], None] | None = None,
    ) -> tuple[list[Ints], list[list[int]]]:
        """States [tokens][rows, W] and replayed rows by layer, for tokens of (inputs, Token).

        watch: takes how many tokens are done.
        """
        top, unit = self.top, self.top.create()
        lanes = top.core.lanes
        memories: list[tuple[Any, Any, Callable[[int], Any]]] = [
            (unit.weight_request, unit.weight_response, self.weights.__getitem__),
            (unit.scale_request, unit.scale_response, self.scales.__getitem__),
        ]
        for ports in ((unit.k_request, unit.k_response), (unit.v_request, unit.v_response)):
            memories += [(*pair, self.kv.__getitem__) for pair in zip(*ports, strict=True)]
        states: list[Ints] = []
        replayed: list[list[int]] = []
        counts: dict[str, int] = {}

        async def serve(ctx: Any) -> None:
            waiting: list[deque[tuple[int, Any]]] = [deque() for _ in memories]
            ready = [False] * len(memories)
            writes = list(unit.kv_write)
            cycle = 0
            sampled = [s for q, _, _ in memories for s in (q.valid, q.payload)]
            sampled += [s for w in writes for s in (w.valid, Value.cast(w.payload))]
            for write in writes:
                ctx.set(write.ready, 1)
            while True:
                for n, (request, response, _) in enumerate(memories):
                    ready[n] = self.rng.random() >= self.wait
                    ctx.set(request.ready, ready[n])
                    due = waiting[n] and waiting[n][0][0] <= cycle
                    answers = bool(due and self.rng.random() >= self.wait)
                    ctx.set(response.valid, answers)
                    if answers:
                        beat = waiting[n].popleft()[1]
                        ctx.set(Value.cast(response.payload), to_bits(response.payload, beat))
                _, _, *values = await ctx.tick().sample(*sampled)
                for n, (_, _, read) in enumerate(memories):
                    valid, address = values[2 * n : 2 * n + 2]
                    if valid and ready[n]:
                        waiting[n].append((cycle + self.latency, read(address)))
                for n, write in enumerate(writes):
                    valid, bits = values[2 * (len(memories) + n) :][:2]
                    if valid:
                        found = from_bits(write.payload, bits)
                        self.kv[found["address"]] = found["entry"]
                cycle += 1

        async def access(ctx: Any, name: str, value: int | None = None, number: int = 0) -> int:
            request = {"address": top.csr.address(name, number), "write": value is not None}
            request["data"] = 0 if value is None else value
            bits = to_bits(unit.csr_request.payload, request)
            ctx.set(Value.cast(unit.csr_request.payload), bits)
            ctx.set(unit.csr_request.valid, 1)
            ctx.set(unit.csr_response.ready, 1)
            await ctx.tick().until(unit.csr_request.ready)
            ctx.set(unit.csr_request.valid, 0)
            (found,) = (
                await ctx.tick().sample(unit.csr_response.payload).until(unit.csr_response.valid)
            )
            return int(found)

        async def drive(ctx: Any) -> None:
            for name, value in self.settings.items():
                await access(ctx, name, value)
            for n, threshold in enumerate(self.thresholds):
                await access(ctx, "THRESHOLD_LOW", threshold & (2**32 - 1), n)
                await access(ctx, "THRESHOLD_HIGH", (threshold >> 32) & 0xFFFF, n)
            before = 0
            for inputs, token in tokens:
                await access(ctx, "INDEX", token.index)
                await access(ctx, "PLACE", token.place)
                await access(ctx, "REPLAY", int(token.replay))
                await access(ctx, "CTRL", 1)
                for beat in np.asarray(inputs).reshape(-1, lanes).tolist():
                    ctx.set(Value.cast(unit.x.payload), to_bits(unit.x.payload, beat))
                    ctx.set(unit.x.valid, 1)
                    await ctx.tick().until(unit.x.ready)
                ctx.set(unit.x.valid, 0)
                found: list[int] = []
                for _ in range(np.size(inputs) // lanes):
                    while self.rng.random() < self.wait:
                        await ctx.tick()
                    ctx.set(unit.o.ready, 1)
                    (bits,) = (
                        await ctx.tick().sample(Value.cast(unit.o.payload)).until(unit.o.valid)
                    )
                    ctx.set(unit.o.ready, 0)
                    found += from_bits(unit.o.payload, bits)
                states.append(np.reshape(found, np.shape(inputs)))
                if watch is not None:
                    watch(len(states))
                while await access(ctx, "STATUS"):
                    pass
                layers = top.core.shape.layers
                replayed.append([await access(ctx, "REPLAYED", None, n) for n in range(layers)])
                now = await access(ctx, "COUNT_CYCLES")
                self.cycles.append(now - before)
                before = now
            for name, _ in top.counters.events:
                counts[name] = await access(ctx, f"COUNT_{name}")

        simulator = Simulator(unit)
        simulator.add_clock(1e-6)
        simulator.add_testbench(serve, background=True)
        simulator.add_testbench(drive)
        simulator.run()
        self.counts = counts
        return states, replayed
