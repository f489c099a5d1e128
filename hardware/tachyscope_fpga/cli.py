"""The command `tachyscope-fpga`: simulate, estimate, build and synthesise the accelerator."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from amaranth.lib import wiring

from tachyscope_fpga.decoder.core import DecoderCore
from tachyscope_fpga.decoder.model import DecoderShape, eps_of
from tachyscope_fpga.decoder.top import Top
from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.model import estimate as estimates
from tachyscope_fpga.model.board import BOARDS, Assumption
from tachyscope_fpga.model.workload import WORKLOADS, Trace
from tachyscope_fpga.parts.engine import Engine
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.rope import Rope
from tachyscope_fpga.parts.tas_gate import TasGate
from tachyscope_fpga.results import Row, check_folder, check_writable, write
from tachyscope_fpga.tools import draw, verify
from tachyscope_fpga.tools import synth as synthesis
from tachyscope_fpga.tools.verilate import to_verilog
from tachyscope_fpga.verb import Measuring, Verb, counter, option, run_command

T = TypeVar("T")

TRUNK = DecoderShape(
    width=256,
    inner=1024,
    layers=6,
    heads=4,
    kv_heads=1,
    head_dim=64,
    tokens_per_frame=256,
    context=8192,
)
"""The sizes of atrium-tokens, with room for 32 frames of 256 tokens."""
THETA, ROPE_SCALE, EPS = 2.0**32, 1 / math.pi, 1e-5


@dataclass(frozen=True, kw_only=True)
class _Hardware(Verb):
    """Sizes of the engine."""

    array: str = option(
        "16x16", "Dot products at once x products of each a cycle; 16x16x2 packs two into a DSP."
    )
    matrix: str = option("64x64", "Outputs x length of a dot product: N x K of the matrix.")
    rows: int = option(1, "Rows of the batch.")
    cores: int = option(1, "Cores that rows or tiles are dealt to.")
    deal: str = option("tiles", "rows or tiles: what is dealt to cores; static: DRS is off.")
    positions: int = option(256, "Tokens of a frame.")
    query: str = option(
        "before_rope",
        "The gate scores the query before_rope (the authors' code) or after_rope.",
    )

    def gemv(self) -> GemvArray:
        return _array(self.array)

    def engine(self) -> Engine:
        array = self.gemv()
        outputs, depth = _sizes("matrix", self.matrix, 2)
        gate = TasGate(4, max(16, array.macs // 4), array.macs, self.query)
        return Engine(array, depth, outputs, gate, self.rows, self.cores, self.deal, self.positions)


@dataclass(frozen=True, kw_only=True)
class Build(_Hardware):
    """Write Verilog; of the decoder also its register map and C header."""

    out: Path = option(..., "Folder for the files, made if missing.", positional=True)
    part: Literal["decoder", "engine"] = option(
        "decoder",
        "decoder: of atrium-tokens' sizes, with this array, rows and cores. engine: gate, replay "
        "cache, scheduler and cores around one matrix.",
    )

    def run(self, command: str) -> None:
        folder = check_folder(self.out)
        written = {}
        if self.part == "engine":
            unit: wiring.Component = self.engine().create()
        else:
            rope, eps = Rope.of(TRUNK.head_dim, THETA, ROPE_SCALE), eps_of(EPS, TRUNK.width)
            top = Top(DecoderCore(TRUNK, self.gemv(), rope, eps), self.rows, self.cores)
            written["registers.md"] = top.csr.register_map()
            written["registers.h"] = top.csr.c_header("TACHYSCOPE")
            unit = top.create()
        written[f"{self.part}.v"] = to_verilog(unit, self.part)
        for name, content in written.items():
            write(folder / name, content)
            print(f"{folder / name}: {len(content.splitlines())} lines")


@dataclass(frozen=True, kw_only=True)
class Simulate(_Hardware, Measuring):
    """Run random tokens through the hardware; compare with integers and cycle model."""

    tokens: int = option(8, "Tokens of every row.")
    stall: float = option(0.3, "Probability that a port waits in a cycle.")
    seed: int = option(0, "Same seed, same tokens and stalls.")
    verilator: bool = option(
        False, "Use Verilator, for tens of thousands of tokens of one row on one core."
    )

    def run(self, command: str) -> None:
        if self.tokens < 1:
            raise TachyscopeError(f"tokens must be 1 or more, got {self.tokens}")
        if not 0 <= self.stall < 1:
            raise TachyscopeError(f"stall must be from 0 to below 1, got {self.stall}")
        engine = self.engine()
        vectors = verify.Vectors.draw(engine, self.tokens, self.seed)
        if self.verilator:
            with tempfile.TemporaryDirectory() as folder:
                rows = verify.verilated(vectors, Path(folder), sorted({0.0, self.stall}))
        else:
            result = verify.compare(vectors, self.stall, self.seed)
            rows = [asdict(result) | {"stall": self.stall}]
        sizes = asdict(engine.array) | {"depth": engine.depth, "outputs": engine.outputs}
        sizes |= {name: getattr(self, name) for name in ("rows", "cores", "deal", "positions")}
        rows = [sizes | {"query": self.query} | row for row in rows]
        for row in rows:
            self._print(row)
        self.emit("fpga-simulate", rows, command)
        if any(row["mismatches"] or row.get("cycle_mismatches") for row in rows):
            raise TachyscopeError(
                "the hardware differs from its model: please report it with the seed"
            )

    def _print(self, row: Mapping[str, object]) -> None:
        self.print(f"{row['tokens']} tokens, {row['replayed']} replayed, stalls {row['stall']}:")
        self.print(f"  {row['mismatches']} mismatches with the integers in {row['cycles']} cycles")
        if self.verilator:
            self.print(f"  {row['cycles_per_s']:,} cycles a second of processor time")
            return
        by_phase = row["by_phase"]
        assert isinstance(by_phase, dict)
        phases = ", ".join(f"{name} {count}" for name, count in by_phase.items())
        self.print(f"  {row['cycle_mismatches']} differences to the cycle model; {phases}")


@dataclass(frozen=True, kw_only=True)
class Draw(Verb):
    """Draw a small test frame by the whole decoder in Amaranth's simulator; compare every state."""

    out: Path = option(
        ..., "A PNG: the test picture, its frame computed, its frame with replay.", positional=True
    )
    seed: int = option(0, "Of the decoder's random weights.")

    def run(self, command: str) -> None:
        check_writable(str(self.out))
        drawn = draw.draw(self.seed, counter(draw.TOKENS, "tokens"))
        write(self.out, draw.to_png(drawn.pictures))
        print(f"{self.out}: {drawn.tokens} tokens in {drawn.cycles:,} cycles")
        print(f"  {drawn.replayed} MLPs replayed, {drawn.mismatches} states unlike the integers")
        if drawn.mismatches:
            raise TachyscopeError(
                "the hardware differs from its model: please report it with the seed"
            )


@dataclass(frozen=True, kw_only=True)
class Synth(Measuring):
    """Synthesise one core with open tools; on ECP5 also place and route it."""

    target: Literal["xcup", "ecp5"] = option(
        "xcup",
        "xcup: cells on UltraScale+, and how many cores a U280 holds. ecp5: cells and the routed "
        "clock on an LFE5U-85F.",
    )
    array: str | None = option(None, "As of simulate: 32x32x2 on xcup, 8x8 on ecp5 unless given.")
    seeds: str = option("1,2,3", "Of place and route, set apart by commas.")
    out: Path = option(Path("out/fpga"), "Folder for the tools' files.")

    def run(self, command: str) -> None:
        usual = synthesis.TARGETS[self.target].array
        engine = synthesis.engine_for(usual if self.array is None else _array(self.array))
        array, numbers = engine.array, _numbers("seeds", self.seeds)
        folder = self.out / self.target
        result = synthesis.synthesise(self.target, engine, folder)
        row = {"lanes": array.lanes, "macs": array.macs} | result
        row["products_per_dsp"] = array.products_per_dsp
        cells = ", ".join(f"{count:,} {kind}" for kind, count in result["cells"].items() if count)
        self.print(f"{self.target}, one {array.lanes}x{array.macs} core: {cells}")
        if self.target == "xcup":
            row["u280"] = fits = synthesis.fit(result["cells"])
            self.print(f"a U280 holds {fits['cores']} by its {fits['scarcest']}, with")
            share = f"{fits['shell_assumed']:.0%}"
            self.print(f"{share} left to shell and memory (assumed); no clock is known")
        else:
            row["routed"] = runs = synthesis.route(folder, numbers)
            for run in runs:
                self.print(f"seed {run['seed']}: {run['mhz']} MHz routed ({run['seconds']} s)")
            row["best_mhz"] = max(run["mhz"] for run in runs)
            self.print(f"best: {row['best_mhz']} MHz; it says nothing of UltraScale+")
        self.emit("fpga-synth", [row], command)


@dataclass(frozen=True, kw_only=True)
class Estimate(Measuring):
    """Compute what a board would do, DRS off and on; nothing of it is a measurement."""

    model: str | None = option(None, "vila-u-7b, which is the default.")
    board: str = option("u280", "u280.")
    replay: float | None = option(
        None, "Share of all MLPs that replay, the first frame's (none) included; 0.8 unless given."
    )
    window: int = option(0, "Newest tokens that attention reads, besides the first 4; 0: all.")
    batch: int | None = option(None, "Rows decoded together, sharing weights; 1 unless given.")
    context: int | None = option(None, "One token at this context, not the mean of a video.")
    method: str = option(
        "tokens", "tokens: whole MLPs replay, by the gate. neurons: a fixed slice of every MLP."
    )
    trace: Path | None = option(
        None, "Recorded replay flags (scripts/trace.py); with their own model, replay and batch."
    )
    seed: int = option(0, "Of the random flags.")

    def run(self, command: str) -> None:
        card = _of("board", self.board, BOARDS)
        batch, replay, flags = self.batch, self.replay, None
        if self.trace is None:
            shape = _of("model", "vila-u-7b" if self.model is None else self.model, WORKLOADS)
            batch, replay = 1 if batch is None else batch, 0.8 if replay is None else replay
        elif (self.model, batch, replay) != (None, None, None):
            raise TachyscopeError(
                "a trace has its own model, batch and replay: give the trace alone"
            )
        elif self.method != "tokens":
            raise TachyscopeError(
                f"a trace is of token replay: it takes method tokens, got {self.method!r}"
            )
        else:
            loaded = Trace.load(self.trace)
            shape, flags, batch = loaded.workload, loaded.replayed, loaded.replayed.shape[2]
            replay = float(flags.mean())
        rows = []
        for drs in (False, True):
            settings = estimates.Settings(
                replay, self.window, batch, drs, method=self.method, seed=self.seed
            )
            rows.append(estimates.estimate(shape, card, settings, self.context, flags))
        listed = estimates.assumptions(card, shape)
        self._print(shape.name, rows, listed)
        self.emit("fpga-estimate", rows, command, assumptions=[asdict(one) for one in listed])

    def _print(self, model: str, rows: Sequence[Row], listed: Sequence[Assumption]) -> None:
        first, where = rows[0], rows[0]["context"]
        self.print(
            f"{model} on {self.board}, estimated; replay {first['replay']}, "
            f"window {self.window or 'all'}, batch {first['batch']},"
        )
        self.print(f"{'a video' if where == 'video' else f'context {where}'}, method {self.method}")
        self.print(f"{'':24}{'DRS off':>12}{'DRS on':>12}   low to high, DRS on")
        for key, name in (
            ("tokens_per_s", "tokens/s"),
            ("trunk_tokens_per_s", "tokens/s, trunk alone"),
            ("seconds_per_video", "s a video"),
            ("joules_per_video", "J a video"),
            ("speedup_dense", "trunk against dense, x"),
            ("speedup_whole", "whole against dense, x"),
        ):
            off, on = (row[key] for row in rows)
            ends = sorted(rows[1][f"{key}_{end}"] for end in ("low", "high"))
            self.print(f"{name:24}{off:>12}{on:>12}   {ends[0]} to {ends[1]}")
        self.print(f"{'bytes alone allow, x':24}{'':12}{rows[1]['roofline_dense']:>12}   trunk")
        moved = ", ".join(f"{kind} {size / 1e9:.3f}" for kind, size in rows[1]["bytes"].items())
        self.print(f"GB a token: {moved}")
        self.print("assumed (low to high):")
        for one in listed:
            span = f"{one.value:g} ({one.low:g} to {one.high:g})"
            self.print(f"  {one.name} {span} {one.unit}: {one.why}")


def _sizes(name: str, given: str, count: int) -> list[int]:
    """Numbers set apart by x."""
    words = given.split("x")
    if len(words) != count or not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        form = "x".join(["16"] * count)
        raise TachyscopeError(f"{name} must be {count} numbers like {form}, got {given!r}")
    return [int(word) for word in words]


def _array(given: str) -> GemvArray:
    """lanes x MACs, or lanes x MACs x products a DSP."""
    count = 3 if given.count("x") == 2 else 2
    return GemvArray(*_sizes("array", given, count))


def _of(name: str, given: str, known: Mapping[str, T]) -> T:
    if given not in known:
        raise TachyscopeError(f"{name} must be one of {', '.join(known)}, got {given!r}")
    return known[given]


def _numbers(name: str, given: str) -> list[int]:
    try:
        return [int(word) for word in given.split(",")]
    except ValueError:
        raise TachyscopeError(
            f"{name} must be integers set apart by commas, got {given!r}"
        ) from None


VERBS: dict[str, type[Verb]] = {
    "simulate": Simulate,
    "draw": Draw,
    "estimate": Estimate,
    "build": Build,
    "synth": Synth,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    about = "FastCar's accelerator: simulate, draw, estimate, build, synthesise."
    return run_command(VERBS, "tachyscope-fpga", about, argv)
