"""Vectors for the engine, and hardware held against integers and cycle model with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.model import cycle_model
from tachyscope_fpga.parts.engine import Engine, Token
from tachyscope_fpga.parts.fixed import Ints
from tachyscope_fpga.tools import verilate
from tachyscope_fpga.tools.simulate import Stalls, simulate, stalls


@dataclass(frozen=True)
class Vectors:
    """Weights, scales, the tokens of every step, and what the integers say of them."""

    engine: Engine
    weights: Ints
    multiplier: Ints
    shift: Ints
    steps: list[list[Token]]
    replays: list[list[bool]]
    outputs: list[list[Ints]]

    @classmethod
    def draw(cls, engine: Engine, steps: int, seed: int, share: float = 0.6) -> Vectors:
        """Random ones; places come round, and about `share` of the tokens are above threshold."""
        rng = np.random.default_rng(seed)
        weights = rng.integers(-128, 128, (engine.outputs, engine.depth))
        multiplier = rng.integers(2**14, 2**15, engine.outputs)
        around = int(np.log2(engine.depth) / 2) + 21  # results fill int8 and some are clipped
        shift = rng.integers(around - 2, around + 2, engine.outputs)
        tokens = [
            [Token.draw(rng, engine, step % engine.positions, share) for _ in range(engine.rows)]
            for step in range(steps)
        ]
        replays, outputs = engine.compute(weights, multiplier, shift, tokens)
        return cls(engine, weights, multiplier, shift, tokens, replays, outputs)

    def scales(self) -> list[dict[str, Any]]:
        """The requantiser's beat of every tile."""
        lanes = self.engine.array.lanes
        return [
            {
                "multiplier": self.multiplier[first : first + lanes].tolist(),
                "shift": self.shift[first : first + lanes].tolist(),
            }
            for first in range(0, self.engine.outputs, lanes)
        ]

    def beats(self) -> dict[str, list[Any]]:
        """The beats of all inputs but the cores'."""
        engine = self.engine
        flat = [token for step in self.steps for token in step]
        return {
            "command": [{"position": t.position, "threshold": t.threshold} for t in flat],
            "score": [beat for t in flat for beat in engine.gate.pack(t.q, t.q_rotated, t.k)],
            "x": [beat for t in flat for beat in t.x.reshape(-1, engine.array.macs).tolist()],
        }

    def core_beats(self, jobs: Sequence[tuple[int, int, int]]) -> dict[str, list[Any]]:
        """The beats of the cores' inputs, given the jobs (core, row, tile) as they are dealt."""
        engine = self.engine
        tiles, scales = engine.core.pack_weights(self.weights), self.scales()
        beats: dict[str, list[Any]] = {}
        for core in range(engine.cores):
            firsts = [tile for number, _, tile in jobs if number == core]
            run = [first + t for first in firsts for t in range(engine.core.tiles_per_job)]
            beats[f"weights[{core}]"] = [beat for tile in run for beat in tiles[tile]]
            beats[f"scale[{core}]"] = [scales[tile] for tile in run]
        return beats

    def result(self, step: int, row: int, tile: int) -> dict[str, Any]:
        """The beat of one tile of the output."""
        lanes = self.engine.array.lanes
        return {
            "row": row,
            "tile": tile,
            "y": self.outputs[step][row][tile * lanes :][:lanes].tolist(),
            "replayed": int(self.replays[step][row]),
        }


@dataclass(frozen=True)
class Comparison:
    """One engine in Amaranth's simulator, beside its integers and its cycle model."""

    mismatches: int
    """Output beats that differ from the integers, are missing or come twice."""
    cycle_mismatches: int
    """Beats of any port, or phases of any cycle, at another time than in the model."""
    cycles: int
    by_phase: dict[str, int]
    replayed: int
    tokens: int


def compare(
    vectors: Vectors,
    stall: float = 0.0,
    seed: int = 0,
    limit: int = 200_000,
    late: Mapping[str, int] | None = None,
) -> Comparison:
    """Run the hardware and the cycle model under the same stalls on every port.

    The ports in `late` do nothing at all in so many first cycles: buffers before them run full.
    """
    first = dict(late or {})
    engine = vectors.engine
    rows, tiles, steps = engine.rows, engine.core.tiles, len(vectors.steps)
    ports = ["command", "score", "x", "dealt", "o"]
    ports += [f"{kind}[{core}]" for kind in ("weights", "scale") for core in range(engine.cores)]

    def traces() -> dict[str, Stalls]:
        return {
            name: chain(repeat(True, first.get(name, 0)), stalls(seed * 1000 + number, stall))
            for number, name in enumerate(ports)
        }

    model = cycle_model.run(engine, vectors.replays, traces(), limit)
    unit = engine.create()
    phases: list[int] = []
    trace = simulate(
        unit,
        vectors.beats() | vectors.core_beats(model.jobs),
        {"o": steps * rows * tiles, "dealt": len(model.jobs)},
        traces(),
        limit,
        watch={"phase": unit.phase},
        on_cycle=lambda cycle, seen: phases.append(seen["phase"]),
    )
    got: dict[tuple[int, int, int], list[Any]] = {}
    for number, beat in enumerate(trace.payloads["o"]):
        step = number // (rows * tiles)
        got.setdefault((step, beat["row"], beat["tile"]), []).append(beat)
    wrong = sum(
        got.get((step, row, tile)) != [vectors.result(step, row, tile)]
        for step in range(steps)
        for row in range(rows)
        for tile in range(tiles)
    )
    off = sum(a != b for a, b in zip(phases, model.phases, strict=False))
    for name, expected in model.cycles.items():
        seen = trace.cycles[name]
        off += sum(a != b for a, b in zip(seen, expected, strict=False))
        off += abs(len(seen) - len(expected))
    off += [(b["core"], b["row"], b["tile"]) for b in trace.payloads["dealt"]] != model.jobs
    return Comparison(
        wrong, off, trace.length, model.by_phase, sum(map(sum, vectors.replays)), steps * rows
    )


def verilated(vectors: Vectors, folder: Path, stall: Sequence[float]) -> list[dict[str, Any]]:
    """One row and one core in Verilator, once for each probability of a stall."""
    engine = vectors.engine
    if engine.rows != 1 or engine.cores != 1:
        raise TachyscopeError(
            f"the order of beats is known beforehand for 1 row and 1 core alone, "
            f"got {engine.rows} and {engine.cores}"
        )
    unit = engine.create()
    program = verilate.build(unit, folder)
    tiles = range(engine.core.tiles)
    computed = [step for step, flags in enumerate(vectors.replays) if not flags[0]]
    once = [
        (0, 0, tile * engine.core.tiles_per_job)
        for tile in range(len(tiles) // engine.core.tiles_per_job)
    ]
    outputs = []
    for probability in stall:
        verdict = verilate.run(
            program,
            unit,
            vectors.beats() | vectors.core_beats(once),
            {
                "o": [vectors.result(s, 0, t) for s in range(len(vectors.steps)) for t in tiles],
                "dealt": [{"core": c, "row": r, "tile": t} for _ in computed for c, r, t in once],
            },
            probability,
            {"weights[0]": len(computed), "scale[0]": len(computed)},
        )
        outputs.append(
            {
                "tokens": len(vectors.steps),
                "replayed": len(vectors.steps) - len(computed),
                "stall": probability,
                "cycles": verdict.cycles,
                "mismatches": verdict.mismatches + verdict.beats_left,
                "cycles_per_s": round(verdict.cycles_per_second),
            }
        )
    return outputs
