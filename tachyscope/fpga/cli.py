"""`tachyscope fpga`: build, simulate, synthesise and estimate the accelerator."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from amaranth.lib import wiring
from cyclopts import App, Parameter

from tachyscope.errors import TachyscopeError
from tachyscope.fpga import estimate as estimates
from tachyscope.fpga import synth as synthesis
from tachyscope.fpga import verify
from tachyscope.fpga.board import BOARDS
from tachyscope.fpga.decoder_core import DecoderCore
from tachyscope.fpga.decoder_model import DecoderShape, eps_of
from tachyscope.fpga.engine import Engine
from tachyscope.fpga.gemv import GemvArray
from tachyscope.fpga.rope import Rope
from tachyscope.fpga.tas_gate import TasGate
from tachyscope.fpga.top import Top
from tachyscope.fpga.verilate import to_verilog
from tachyscope.fpga.workload import WORKLOADS, Trace

Json = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
Said = Annotated[str, Parameter(parse=False)]

app = App("fpga", help="The accelerator: build, simulate, synthesise, estimate.")


@Parameter(name="*")
@dataclass(frozen=True)
class Shape:
    """The engine that is built or simulated."""

    lanes: int = 16
    "Dot products an array does at once."
    macs: int = 16
    "Products of each dot product a cycle."
    products_per_dsp: int = 1
    "2 packs two products into one wide multiplier."
    depth: int = 64
    "Length of a dot product: K of the matrix [N, K]."
    outputs: int = 64
    "Outputs: N of the matrix."
    rows: int = 1
    "Rows of the batch."
    cores: int = 1
    "Cores that rows or tiles are dealt to."
    deal: str = "tiles"
    "static, rows or tiles: how work is dealt to the cores; static is DRS off."
    positions: int = 256
    "Places of a frame."
    query: str = "before_rope"
    "before_rope as the authors' code, or after_rope: which query the gate scores."

    def engine(self) -> Engine:
        gate = TasGate(4, max(16, self.macs // 4), self.macs, self.query)
        array = GemvArray(self.lanes, self.macs, self.products_per_dsp)
        return Engine(
            array, self.depth, self.outputs, gate, self.rows, self.cores, self.deal, self.positions
        )


SHAPE = Shape()


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


@app.command
def build(
    out: Path, *, part: Literal["decoder", "engine"] = "decoder", shape: Shape = SHAPE
) -> None:
    """Write Verilog; of the decoder also its register map and C header, from the same table.

    Parameters
    ----------
    out
        Folder for the files, made if missing.
    part
        decoder: a whole decoder of atrium-tokens' sizes, with the array, rows and cores given.
        engine: gate, cache, scheduler and cores around one matrix.
    """
    from tachyscope.files import check_folder, write_atomically

    folder = check_folder(out)
    written = {}
    if part == "engine":
        unit: wiring.Component = shape.engine().create()
    else:
        rope, eps = Rope.of(TRUNK.head_dim, THETA, ROPE_SCALE), eps_of(EPS, TRUNK.width)
        array = GemvArray(shape.lanes, shape.macs, shape.products_per_dsp)
        top = Top(DecoderCore(TRUNK, array, rope, eps), shape.rows, shape.cores)
        written["registers.md"] = top.csr.register_map()
        written["registers.h"] = top.csr.c_header("TACHYSCOPE")
        unit = top.create()
    written[f"{part}.v"] = to_verilog(unit, part)
    for name, content in written.items():
        write_atomically(folder / name, content)
        print(f"{folder / name}: {len(content.splitlines())} lines")


@app.command
def simulate(
    *,
    shape: Shape = SHAPE,
    tokens: int = 8,
    stall: float = 0.3,
    seed: int = 0,
    verilator: Annotated[bool, Parameter(negative="")] = False,
    out: Path = Path("out/fpga"),
    json: Json = None,
    said: Said = "",
) -> None:
    """Run random tokens through the hardware and compare with integers and cycle model.

    Parameters
    ----------
    tokens
        Tokens of every row.
    stall
        Probability that a port waits in a cycle.
    seed
        Same seed, same tokens and stalls.
    verilator
        Use Verilator, for tens of thousands of tokens of one row on one core.
    out
        Folder for Verilator's files.
    json
        Write the rows to this file; - prints them.
    """
    if tokens < 1:
        raise TachyscopeError(f"tokens must be 1 or more, got {tokens}")
    if not 0 <= stall < 1:
        raise TachyscopeError(f"stall must be from 0 to below 1, got {stall}")
    engine = shape.engine()
    vectors = verify.Vectors.draw(engine, tokens, seed)
    if verilator:
        rows = verify.verilated(vectors, out / "verilator", sorted({0.0, stall}))
    else:
        result = verify.compare(vectors, stall, seed)
        rows = [asdict(result) | {"stall": stall}]
    rows = [asdict(shape) | row for row in rows]
    for row in rows:
        _say(json, f"{row['tokens']} tokens, {row['replayed']} replayed, stalls {row['stall']}:")
        _say(json, f"  {row['mismatches']} mismatches with the integers in {row['cycles']} cycles")
        if verilator:
            _say(json, f"  {row['cycles_per_s']:,} cycles a second of processor time")
        else:
            phases = ", ".join(f"{name} {count}" for name, count in row["by_phase"].items())
            _say(json, f"  {row['cycle_mismatches']} differences to the cycle model; {phases}")
    _emit(json, "fpga-simulate", rows, said)
    if any(row["mismatches"] or row.get("cycle_mismatches") for row in rows):
        raise TachyscopeError("the hardware differs from its model: please report it with the seed")


@app.command
def synth(
    *,
    target: Literal["xcup", "ecp5"] = "xcup",
    lanes: int | None = None,
    macs: int | None = None,
    products_per_dsp: int | None = None,
    seeds: str = "1,2,3",
    out: Path = Path("out/fpga"),
    json: Json = None,
    said: Said = "",
) -> None:
    """Synthesise one core with open tools; on ECP5 also place and route it, once a seed.

    Parameters
    ----------
    target
        xcup: cells on UltraScale+, and how many cores a U280 holds. ecp5: cells and the routed
        clock on an LFE5U-85F.
    lanes, macs
        The array: 32 x 32 on xcup, 8 x 8 on ecp5 where nothing else is given.
    products_per_dsp
        2 on xcup, 1 on ecp5, whose multipliers are too narrow for two.
    seeds
        Of place and route, set apart by commas.
    out
        Folder for the tools' files.
    json
        Write the rows to this file; - prints them.
    """
    usual = synthesis.TARGETS[target].array
    array = GemvArray(lanes or usual.lanes, macs or usual.macs, usual.products_per_dsp)
    engine = synthesis.engine_for(array, products_per_dsp)
    numbers = _numbers("seeds", seeds)
    folder = out / target
    result = synthesis.synthesise(target, engine, folder)
    row = {"lanes": array.lanes, "macs": array.macs} | result
    row["products_per_dsp"] = engine.array.products_per_dsp
    _say(json, f"{target}, one {array.lanes}x{array.macs} core: {_cells(result['cells'])}")
    if target == "xcup":
        row["u280"] = fits = synthesis.fit(result["cells"])
        _say(json, f"a U280 holds {fits['cores']} by its {fits['scarcest']}, with")
        _say(
            json,
            f"{fits['shell_assumed']:.0%} left to shell and memory (assumed); no clock is known",
        )
    else:
        row["routed"] = runs = synthesis.route(folder, numbers)
        for run in runs:
            _say(json, f"seed {run['seed']}: {run['mhz']} MHz routed ({run['seconds']} s)")
        row["best_mhz"] = max(run["mhz"] for run in runs)
        _say(json, f"best: {row['best_mhz']} MHz; it says nothing of UltraScale+")
    _emit(json, f"fpga-synth-{target}", [row], said)


@app.command
def estimate(
    *,
    model: str | None = None,
    board: str = "u280",
    replay: float | None = None,
    window: int = 0,
    batch: int | None = None,
    context: int | None = None,
    method: str = "tokens",
    trace: Path | None = None,
    seed: int = 0,
    json: Json = None,
    said: Said = "",
) -> None:
    """What a board would do, DRS off and on. Nothing of it was measured on a board.

    Parameters
    ----------
    model
        vila-u-7b, which is the usual one.
    board
        u280.
    replay
        Share of all MLPs that replay, the first frame's included, which cannot; 0.8 unless given.
    window
        Newest tokens that attention reads, besides four first ones; 0 reads all.
    batch
        Rows decoded together, which share the weights; 1 unless given.
    context
        One token at this context instead of the mean of a video.
    method
        tokens: whole MLPs replay, by the gate. neurons: a fixed slice of every MLP does.
    trace
        What a real run replayed, instead of random flags: a file of scripts/fpga_trace.py. It
        has its own model, replay and batch.
    seed
        Of the random flags.
    json
        Write the rows to this file; - prints them.
    """
    card = _of("board", board, BOARDS)
    flags = None
    if trace is None:
        shape = _of("model", "vila-u-7b" if model is None else model, WORKLOADS)
        batch, replay = 1 if batch is None else batch, 0.8 if replay is None else replay
    elif (model, batch, replay) != (None, None, None):
        raise TachyscopeError("a trace has its own model, batch and replay: give the trace alone")
    elif method != "tokens":
        raise TachyscopeError(f"a trace is of token replay: it takes method tokens, got {method!r}")
    else:
        loaded = Trace.load(trace)
        shape, flags, batch = loaded.workload, loaded.replayed, loaded.replayed.shape[2]
        replay = float(flags.mean())
    rows = []
    for drs in (False, True):
        settings = estimates.Settings(
            replay=replay, window=window, batch=batch, drs=drs, method=method, seed=seed
        )
        rows.append(estimates.estimate(shape, card, settings, context, flags))
    listed = estimates.assumptions(card, shape)
    share, read, where = rows[0]["replay"], window or "all", rows[0]["context"]
    _say(json, f"{shape.name} on {board}, estimated; replay {share}, window {read}, batch {batch},")
    _say(json, f"{'a video' if where == 'video' else f'context {where}'}, method {method}")
    _say(json, f"{'':24}{'DRS off':>12}{'DRS on':>12}   low to high, DRS on")
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
        _say(json, f"{name:24}{off:>12}{on:>12}   {ends[0]} to {ends[1]}")
    _say(json, f"{'bytes alone allow, x':24}{'':12}{rows[1]['roofline_dense']:>12}   trunk")
    moved = ", ".join(f"{kind} {size / 1e9:.3f}" for kind, size in rows[1]["bytes"].items())
    _say(json, f"GB a token: {moved}")
    _say(json, "assumed (low to high):")
    for one in listed:
        _say(
            json, f"  {one.name} {one.value:g} ({one.low:g} to {one.high:g}) {one.unit}: {one.why}"
        )
    _emit(json, "fpga-estimate", rows, said, assumptions=[asdict(one) for one in listed])


def _of(name: str, given: str, known: dict[str, Any]) -> Any:
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


def _cells(cells: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in cells.items() if count)


def _say(json: str | None, line: str) -> None:
    if json != "-":
        print(line)


def _emit(json: str | None, suite: str, rows: list[dict[str, Any]], said: str, **more: Any) -> None:
    """The rows in the envelope of all results, which needs the rest of the package."""
    if json is not None:
        from tachyscope.results import check_json, document, emit

        check_json(json)
        emit(document(suite, rows, said, **more), json)
