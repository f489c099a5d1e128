"""Amaranth's own simulator around one part: beats in, beats out, and the cycle of each.

It needs no tool but Amaranth and runs about a thousand cycles a second: for small shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
from amaranth.hdl import Shape, ShapeLike, Value, ValueLike
from amaranth.lib import data, stream, wiring
from amaranth.sim import Simulator

from tachyscope_fpga.errors import TachyscopeError

Stalls = Iterable[bool]


def stalls(seed: int, probability: float) -> Iterator[bool]:
    """An endless trace: True in a cycle in which that side of a stream waits."""
    rng = np.random.default_rng(seed)
    while True:
        yield from (rng.random(256) < probability).tolist()


@dataclass
class Trace:
    """What a simulation saw: payloads by port, the cycle of every transfer, the cycles run."""

    payloads: dict[str, list[Any]] = field(default_factory=dict)
    cycles: dict[str, list[int]] = field(default_factory=dict)
    length: int = 0

    def span(self, first: str, last: str) -> int:
        """Cycles from the first beat of one port to the last beat of another, both counted."""
        return self.cycles[last][-1] - self.cycles[first][0] + 1


def simulate(
    component: wiring.Component,
    inputs: Mapping[str, Sequence[Any]],
    outputs: Mapping[str, int],
    stall: Mapping[str, Stalls] | None = None,
    limit: int = 100_000,
    settle: int = 0,
    watch: Mapping[str, ValueLike] | None = None,
    on_cycle: Callable[[int, dict[str, int]], None] | None = None,
) -> Trace:
    """Feed every input's beats in order and take the wanted number of beats from every output.

    A stalled input leaves `valid` low (a beat once shown stays until it is taken); a stalled
    output leaves `ready` low. `settle` runs more cycles after the last beat, to see whether a
    part says more than it should. `watch` names signals that `on_cycle` gets in every cycle.
    """
    stall = dict(stall or {})
    traces = {name: iter(stall.get(name, repeat(False))) for name in (*inputs, *outputs)}
    ports = {name: _port(component, name) for name in (*inputs, *outputs)}
    beats = {
        name: [to_bits(ports[name].payload, beat) for beat in given]
        for name, given in inputs.items()
    }
    trace = Trace({name: [] for name in outputs}, {name: [] for name in ports})
    watched = dict(watch or {})

    def unfinished() -> bool:
        return any(len(trace.cycles[name]) < len(beats[name]) for name in beats) or any(
            len(trace.cycles[name]) < count for name, count in outputs.items()
        )

    async def drive(ctx: Any) -> None:
        sampled = [
            *(ports[name].ready for name in beats),
            *(ports[name].valid for name in outputs),
            *(Value.cast(ports[name].payload) for name in outputs),
            *watched.values(),
        ]
        shown = dict.fromkeys(beats, False)
        ready = dict.fromkeys(outputs, False)
        cycle = extra = 0
        while extra < settle or unfinished():
            if cycle >= limit:
                counts = {name: len(seen) for name, seen in trace.cycles.items()}
                raise TachyscopeError(f"no end after {limit} cycles; beats so far: {counts}")
            for name, pending in beats.items():
                waits = next(traces[name])
                sent = len(trace.cycles[name])
                if not shown[name] and not waits and sent < len(pending):
                    ctx.set(Value.cast(ports[name].payload), pending[sent])
                    shown[name] = True
                ctx.set(ports[name].valid, shown[name])
            for name in outputs:
                ready[name] = not next(traces[name])
                ctx.set(ports[name].ready, ready[name])
            _, _, *values = await ctx.tick().sample(*sampled)
            taken = iter(values)
            for name in beats:
                if next(taken) and shown[name]:
                    trace.cycles[name].append(cycle)
                    shown[name] = False
            valid = {name: next(taken) for name in outputs}
            for name in outputs:
                bits = next(taken)
                if valid[name] and ready[name]:
                    trace.cycles[name].append(cycle)
                    trace.payloads[name].append(from_bits(ports[name].payload, bits))
            if on_cycle is not None:
                on_cycle(cycle, {name: next(taken) for name in watched})
            cycle += 1
            extra += not unfinished()
        trace.length = cycle

    simulator = Simulator(component)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
    return trace


def to_bits(payload: ValueLike, value: Any) -> int:
    """A payload's value as one integer: nested lists and mappings by its layout."""
    if isinstance(payload, data.View):
        return _pack(payload.shape(), value)
    return int(value) & ((1 << Shape.cast(Value.cast(payload).shape()).width) - 1)


def from_bits(payload: ValueLike, bits: int) -> Any:
    """The integer of a payload as nested lists and dicts by its layout."""
    shape = payload.shape() if isinstance(payload, data.View) else Value.cast(payload).shape()
    return _unpack(shape, int(bits))


def _pack(shape: ShapeLike, value: Any) -> int:
    if isinstance(shape, data.Layout):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        bits = 0
        for key, item in items:
            spot = shape[key]
            bits |= _pack(spot.shape, item) << spot.offset
        return bits
    return int(value) & ((1 << Shape.cast(shape).width) - 1)


def _unpack(shape: ShapeLike, bits: int) -> Any:
    if isinstance(shape, data.ArrayLayout):
        return [
            _unpack(spot.shape, bits >> spot.offset)
            for spot in (shape[i] for i in range(shape.length))
        ]
    if isinstance(shape, data.Layout):
        return {str(key): _unpack(spot.shape, bits >> spot.offset) for key, spot in shape}
    form = Shape.cast(shape)
    bits &= (1 << form.width) - 1
    return bits - (1 << form.width) if form.signed and bits >> (form.width - 1) else bits


def _port(component: wiring.Component, name: str) -> stream.Interface:
    """`jobs[1]` is one of an array of ports."""
    head, _, index = name.partition("[")
    port = getattr(component, head)
    return port[int(index[:-1])] if index else port
