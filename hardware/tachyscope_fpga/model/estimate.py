"""What a board would do with a published model: cycles, bytes, tokens a second, joules.

Nothing here was measured on a board. Cycles come from the port scheduler's schedule, which equals
its hardware in every cycle; the memory from ``hbm.py``; all else is in the list of assumptions,
each with a low and a high value, and every result is given for the three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.model import hbm
from tachyscope_fpga.model.board import Assumption, Board, cases
from tachyscope_fpga.model.workload import WORKLOADS, Workload
from tachyscope_fpga.parts.drs import DEALS, RowScheduler
from tachyscope_fpga.parts.fixed import check_choice, check_range
from tachyscope_fpga.parts.ports import Environment, PortScheduler

METHODS = ("tokens", "neurons")


def assumptions(board: Board, model: Workload) -> list[Assumption]:
    """Every number behind an estimate that nobody measured here."""
    low, high = cases(board)["low"], cases(board)["high"]

    def of(name: str, unit: str, why: str) -> Assumption:
        return Assumption(
            name, getattr(board, name), getattr(low, name), getattr(high, name), unit, why
        )

    usual, least, most = (round(hbm.efficiency(case.timing), 3) for case in (board, low, high))
    listed = [
        of("clock_mhz", "MHz", "no open tool routes UltraScale+: a usual clock for such designs"),
        Assumption(
            "memory_efficiency", usual, least, most, "of peak",
            "the command-level model with the timings of the memory's class",
        ),
        of("latency_ns", "ns", "from a read's command to its data, controller and switch included"),
        of("vector_cycles", "cycles", "between two matrices: pipelines, norm, RoPE, softmax"),
        of("pj_per_byte", "pJ", "HBM2 at 3.9-7 pJ a bit, interface included"),
        of("pj_per_mac", "pJ", "int8 multiply-accumulate in FPGA logic"),
        of("static_w", "W", "the board at rest"),
        Assumption("cores", board.cores, board.cores, board.cores, "32x32", "see the verb synth"),
    ]  # fmt: skip
    if model in WORKLOADS.values():  # a recorded model's sizes are known
        listed += [
            Assumption(
                "prompt", model.prompt, model.prompt, model.prompt, "tokens", "a usual prompt"
            ),
            Assumption(
                "depth_transformer", model.depth_bytes / 1e9, model.depth_bytes / 1e9,
                model.depth_bytes / 1e9, "GB a token",
                "width 2,560, six layers: defaults of the model's code, not the checkpoint's",
            ),
        ]  # fmt: skip
    return listed


@dataclass(frozen=True)
class Settings:
    """What is estimated."""

    replay: float = 0.8
    """Share of a video's MLPs that replay, as the authors count: all steps and layers."""
    window: int = 0
    """Newest tokens that attention reads, besides the sink; 0 reads all."""
    batch: int = 1
    drs: bool = True
    deal: str = "tiles"
    """How rows are dealt to the cores with DRS on; "static" with DRS off."""
    method: str = "tokens"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.replay <= 1:
            raise TachyscopeError(f"replay must be from 0 to 1, got {self.replay}")
        check_range("window", self.window, 0, 2**20)
        check_range("batch", self.batch, 1, 32)
        check_choice("deal", self.deal, DEALS)
        check_choice("method", self.method, METHODS)


@dataclass(frozen=True)
class Cost:
    """One token of every row."""

    seconds: float
    trunk_seconds: float
    bytes: dict[str, float]
    macs: float
    joules: float
    utilisation: dict[str, float]

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes.values())

    @property
    def trunk_bytes(self) -> float:
        return self.total_bytes - self.bytes["depth"]


def check_memory(model: Workload, board: Board, settings: Settings) -> dict[str, int]:
    """What lies in the board's memory; raises where it does not fit.

    The dense run that an estimate is compared with is not checked: with a window, a batch may fit
    whose dense run would not.
    """
    context = model.prompt + model.frames * model.tokens_per_frame
    kept = context if not settings.window else model.sink + settings.window + model.tokens_per_frame
    row = {
        "kv": 2 * model.kv_width * kept * model.layers,
        "replay_cache": model.tokens_per_frame * model.width * model.layers,
    }
    held = {"weights": model.weights, "depth": model.depth_weights}
    held |= {name: size * settings.batch for name, size in row.items()}
    need = sum(held.values())
    if need > board.memory:
        most = (board.memory - model.weights - model.depth_weights) // sum(row.values())
        raise TachyscopeError(
            f"batch {settings.batch} needs {need / 1e9:.2f} GB and the {board.name} has "
            f"{board.memory / 1e9:.2f} GB: use batch {most} or less, or a window"
        )
    return held


def _flags(layers: int, batch: int, share: float, seed: int, tokens: int) -> np.ndarray[Any, Any]:
    """Flags [tokens, layers, batch] of which exactly the nearest share is set, in random order."""
    count = tokens * layers * batch
    flags = np.arange(count) < round(share * count)
    return np.random.default_rng(seed).permutation(flags).reshape(tokens, layers, batch)


def token_cost(
    model: Workload,
    board: Board,
    settings: Settings,
    context: int,
    flags: np.ndarray[Any, Any] | None = None,
) -> Cost:
    """The mean cost of a token at a context; `flags` [tokens, layers, batch] is a replay trace."""
    batch, neurons = settings.batch, settings.method == "neurons"
    if flags is None:
        share = 0.0 if neurons else settings.replay
        flags = _flags(model.layers, batch, share, settings.seed, 5 if share else 1)
    if flags.ndim != 3 or flags.shape[1:] != (model.layers, batch):
        raise TachyscopeError(
            f"a replay trace for {model.name} must be [tokens, {model.layers}, {batch}], "
            f"got {list(flags.shape)}"
        )
    tokens = len(flags)
    # a fixed slice of the neurons, and a linear map for the rest
    mlp = model.mlp * (1 - settings.replay) + model.width**2 if neurons else model.mlp
    kv = batch * (model.kv(context, settings.window) + 2 * model.width)  # and a row of the cache

    def blocks(size: float) -> int:
        return max(1, math.ceil(size / model.block))

    deal = settings.deal if settings.drs else "static"
    if batch == 1:
        deal = "tiles"  # one row is always spread over the cores: there is nothing else to deal
    per_core = model.block / (board.lanes * board.macs)

    def use(computing: np.ndarray[Any, Any]) -> int:
        """Cycles in which the cores use up one block for the rows that compute."""
        if deal == "tiles":
            return math.ceil(int(computing.sum()) * per_core / board.cores)
        drs = RowScheduler(batch, board.cores, 1, deal)
        on_core = [0] * board.cores
        for job in drs.compute((~computing).tolist(), 1000):
            on_core[job.core] += 1
        return math.ceil(max(on_core) * per_core)

    everyone = np.ones(batch, bool)
    all_rows = max(1, use(everyone))
    attend = max(1, math.ceil(per_core / board.cores))
    latency = math.ceil(board.latency_ns * board.clock_mhz / 1e3)
    scale = board.clock_mhz / board.timing.clock_mhz
    around = Environment(
        service=board.service(model.block),
        latency=latency,
        use=(all_rows, attend, all_rows, 1, all_rows),
        depends=(board.vector_cycles,) * 5,
        verdict=board.vector_cycles,
        replay=board.vector_cycles,
        refresh_every=round(board.timing.refresh_every * scale),
        refresh_for=round(board.timing.refresh_for * scale),
    )
    computing = np.logical_not(flags)
    skipped = np.logical_not(computing.any(axis=2))  # weights are left out where no row needs them
    mlp_use = [[max(1, use(rows)) for rows in token] for token in computing]
    trunk = PortScheduler(
        layers=model.layers,
        qkv=blocks(model.qkv),
        o=blocks(model.out),
        mlp=blocks(mlp),
        slots=board.slots,
        drs=settings.drs,
    )
    lengths = [blocks(kv)] * tokens
    cycles = {}
    for name, tail in (("trunk", 0), ("whole", blocks(model.depth_bytes))):
        ports = replace(trunk, tail=tail)
        cycles[name] = ports.compute(lengths, skipped.tolist(), around, mlp_use).ends[-1] / tokens
    seconds, trunk_seconds = (cycles[name] / board.clock_mhz / 1e6 for name in ("whole", "trunk"))
    held = {
        "projections": model.layers * (model.qkv + model.out),
        "kv": model.layers * kv,
        "mlp": float(mlp * (~skipped).sum() / tokens),
        "depth": float(model.depth_bytes),
    }
    macs = (
        batch * (held["projections"] + held["depth"])
        + held["kv"]
        + float(mlp * computing.sum() / tokens)
    )
    moved = sum(held.values())
    joules = (
        board.static_w * seconds
        + moved * board.pj_per_byte * 1e-12
        + macs * board.pj_per_mac * 1e-12
    )
    return Cost(
        seconds,
        trunk_seconds,
        held,
        macs,
        joules,
        {
            "memory": moved / (seconds * board.peak),
            "arrays": macs / (seconds * board.clock_mhz * 1e6 * board.macs_per_cycle),
        },
    )


def dense(settings: Settings) -> Settings:
    """The same board and batch with nothing left out."""
    return replace(settings, replay=0.0, window=0, method="tokens", drs=True, deal="tiles")


def _video(model: Workload, board: Board, settings: Settings, points: int = 4) -> Cost:
    """The mean token of a video: the first frame has nothing to replay."""
    ceiling = 1 - (model.tokens_per_frame - 1) / model.steps
    if settings.method == "tokens" and settings.replay > ceiling:
        raise TachyscopeError(
            f"replay over a video must be from 0 to {ceiling:.3f}, since its first frame has "
            f"nothing to replay; got {settings.replay}"
        )
    first = (model.tokens_per_frame - 1) / model.steps
    share = settings.replay / (1 - first) if settings.method == "tokens" else settings.replay
    later = replace(settings, replay=share)
    none = replace(settings, replay=0.0, method="tokens")
    beginning = token_cost(model, board, none, model.prompt + model.tokens_per_frame // 2)
    rest = model.steps - (model.tokens_per_frame - 1)
    costs, weights = [beginning], [first]
    for point in range(points):
        context = model.prompt + model.tokens_per_frame + round((point + 0.5) * rest / points)
        costs.append(token_cost(model, board, replace(later, seed=settings.seed + point), context))
        weights.append((1 - first) / points)

    def mean(values: Sequence[float]) -> float:
        return float(np.dot(values, weights))

    return Cost(
        mean([cost.seconds for cost in costs]),
        mean([cost.trunk_seconds for cost in costs]),
        {name: mean([cost.bytes[name] for cost in costs]) for name in beginning.bytes},
        mean([cost.macs for cost in costs]),
        mean([cost.joules for cost in costs]),
        {k: mean([cost.utilisation[k] for cost in costs]) for k in beginning.utilisation},
    )


def estimate(
    model: Workload,
    board: Board,
    settings: Settings,
    context: int | None = None,
    flags: np.ndarray[Any, Any] | None = None,
) -> dict[str, Any]:
    """One row: a token at a context, or the mean token of a video where none is given.

    With a trace, the mean of its tokens, at the middle of the video where no context is given.
    """
    check_memory(model, board, settings)
    if context is None and flags is not None:
        context = model.prompt + model.steps // 2
    if context is not None:
        check_range("context", context, 1, 2**20)

    def cost(case: Board, what: Settings, trace: np.ndarray[Any, Any] | None = None) -> Cost:
        if context is None:
            return _video(model, case, what)
        return token_cost(model, case, what, context, trace)

    row: dict[str, Any] = {
        "model": model.name,
        "board": board.name,
        "method": settings.method,
        "replay": settings.replay if flags is None else round(float(flags.mean()), 4),
        "trace": "random" if flags is None else "recorded",
        "window": settings.window,
        "batch": settings.batch,
        "drs": "on" if settings.drs else "off",
        "deal": settings.deal if settings.drs else "static",
        "context": "video" if context is None else context,
    }
    for name, case in cases(board).items():
        ours, whole = cost(case, settings, flags), cost(case, dense(settings))
        suffix = "" if name == "usual" else f"_{name}"
        row |= {
            f"tokens_per_s{suffix}": round(settings.batch / ours.seconds, 2),
            f"trunk_tokens_per_s{suffix}": round(settings.batch / ours.trunk_seconds, 2),
            f"seconds_per_video{suffix}": round(ours.seconds * model.steps, 2),
            f"joules_per_video{suffix}": round(ours.joules * model.steps / settings.batch, 1),
            f"speedup_dense{suffix}": round(whole.trunk_seconds / ours.trunk_seconds, 4),
            f"speedup_whole{suffix}": round(whole.seconds / ours.seconds, 4),
        }
        if name == "usual":
            row |= {
                "roofline_dense": round(whole.trunk_bytes / ours.trunk_bytes, 4),
                "roofline_whole": round(whole.total_bytes / ours.total_bytes, 4),
                "bytes": {kind: round(size) for kind, size in ours.bytes.items()},
                "utilisation": {kind: round(share, 3) for kind, share in ours.utilisation.items()},
            }
    row["of_roofline"] = round(row["speedup_dense"] / row["roofline_dense"], 4)
    return row
