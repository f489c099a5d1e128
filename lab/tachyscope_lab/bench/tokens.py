"""A token model of full size: what a token costs by plan, and what of memory's rate that reaches.

Weights are random, which changes no time. A video's time is added up: the first frame, in which
nothing can be replayed, and the others by straight lines between three of them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tachyscope.attention.window import WindowAttention
from tachyscope.core.arguments import parse_calibration
from tachyscope.core.errors import TachyscopeError, first_line
from tachyscope.core.plan import Plan
from tachyscope.core.session import Session
from tachyscope.decode import DecodeEngine, TokenStep, can_compile, quantise
from tachyscope.decode.cpu import Operations
from tachyscope.decode.cpu_library import CODE
from tachyscope.decode.depth import Depth
from tachyscope.decode.launches import Launches
from tachyscope.decode.layer import Layers
from tachyscope.decode.program import Program
from tachyscope.io.calibration import Calibration
from tachyscope.io.results import Document, document
from tachyscope.models.registry import find_device
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.replay.neurons import NeuronReplay
from tachyscope_lab.bench.device_clock import EnergyCounter, memory_rates, milliseconds, recorded
from tachyscope_lab.bench.drafts import bench_drafts
from tachyscope_lab.bench.llama_peer import bench_llama
from tachyscope_lab.bench.random_vila import RANK, random_calibration, random_vila
from tachyscope_lab.bench.single_chunk import clear
from tachyscope_lab.bench.token_rows import DRAFTS, FRAMES, NAMES, PAPER, ROWS

PROMPT = 64  # tokens
LATER = (1, 4, 7)  # frames at which the rest is timed
TOKENS = 24  # timed in the midst of a frame
JOULES_S = 0.7  # of work that the GPU's counter is read over
WEIGHTS = ("bf16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Clock:
    """How a row is timed."""

    device: torch.device
    rounds: int
    tokens: int
    start: int


class StepPart(Program):
    """Of a token's step the "trunk" or the codes ("depth") alone; natively also "hollow", a trunk
    less its MLPs."""

    def __init__(self, engine: DecodeEngine, whole: bool, part: str) -> None:
        super().__init__(engine)
        self.whole, self.part = whole, part

    def run(self, to: Launches | Operations) -> None:
        engine, whole = self.engine, self.whole
        if self.part == "depth":
            engine.depth.step(to, engine.codes, engine.noise, engine.place)
            return
        to.clear(engine.barriers)
        kept = engine.kept if whole else engine.errors
        engine.trunk.step(to, engine.steps, kept, engine.barriers, not whole, engine.input_gates)
        to.raise_numbers(engine.numbers)
        if self.part == "hollow" and isinstance(to, Operations):
            to.ops = [(code, x) for code, x in to.ops if code != CODE["MLP"]]


def weight_bytes(layers: Layers, sliced: bool = False) -> int:
    """Of weights, what a step reads that computes all of them, or slices of the MLPs."""
    mlps = layers.slices if sliced else [layer.mlp for layer in layers.weights]
    parts = [weight for layer in layers.weights for weight in (*layer.qkv, layer.out)]
    return sum(weight.bytes for weight in (*parts, *(x for mlp in mlps for x in mlp.parts)))


def _depth_bytes(depth: Depth) -> int:
    """Of weights, what a token's codes read."""
    per_pass = weight_bytes(depth.blocks) + depth.classifier.bytes
    return len(depth.inputs) * per_pass + sum(x.bytes for x in depth.inputs)


class Timed:
    """An engine whose steps are timed at any length of the video, on memory of random content."""

    def __init__(self, model: VilaModel, plan: str, clock: Clock) -> None:
        self.clock = clock
        shape, parsed = model.shape(), Plan.parse(f"dense text=none {plan}", "tokens")
        self.session = Session(
            shape, parsed, model.rope(shape), latent_frames=FRAMES, lengths=_lengths(shape.batch),
            device=model.device, dtype=model.dtype,
            calibration=_calibration(model, parsed),
        )  # fmt: skip
        parts = model.decode_parts()
        native = model.device.type == "cpu" and can_compile(model.dtype)
        self.engine = DecodeEngine(parts, self.session, graph=native)
        self.engine.meet_memory()
        for layer in self.session.memory.layers:
            layer.k.normal_()
            layer.v.normal_()
            layer.log_count.zero_()
            for name in {"error", "input"} & layer.own["replay"].keys():
                layer.own["replay"][name].normal_()
        self.engine.noise.exponential_()
        self.engine.draw_luck()
        if self.engine.gates:
            self.engine.set_limits()
        self._runs: dict[tuple[str, bool], Callable[[], object]] = {}

    def run(self, part: str, frame: int) -> Callable[[], object]:
        """The step, or one of its parts, in a frame: see `StepPart`."""
        engine = self.engine
        key = part, engine.whole_places(frame > 0)[0]
        if key not in self._runs:
            whole = key[1]
            program = TokenStep(engine, whole) if part == "step" else StepPart(engine, whole, part)
            if self.clock.device.type == "cpu" and can_compile(engine.x.dtype):
                self._runs[key] = program.replay
            else:
                self._stand(0)
                self._runs[key] = recorded(program.launch, self.clock.device)
        return self._runs[key]

    def ms(self, part: str, frame: int) -> float:
        """A token's time in the midst of a frame."""
        run = self.run(part, frame)
        self._stand(frame)
        return milliseconds(run, self.clock.tokens, self.clock.device)

    def _stand(self, frame: int) -> None:
        engine = self.engine
        engine.place.fill_(self.clock.start)
        engine.slot.fill_(self._past(frame) + self.clock.start)
        engine.ready.fill_(frame > 0)
        engine.x.normal_()
        engine.hidden.normal_()

    def _past(self, frame: int) -> int:
        """Entries before a frame: as many as came, or as a bounded cache holds beside the frame."""
        places, slots = (
            self.session.shape.tokens_per_frame,
            self.session.memory.layers[0].k.shape[2],
        )
        return min(self.session.memory.prompt + frame * places, slots - places)

    def entries_read(self, frame: int) -> int:
        """Of a token in the midst of a frame."""
        end = self._past(frame) + self.clock.start + self.clock.tokens // 2
        policy = self.session.plan.attention
        return min(end, policy.tokens + policy.sink) if isinstance(policy, WindowAttention) else end


def _lengths(batch: int) -> tuple[int, ...]:
    """A prompt's tokens, and beside it those of the shorter one without words."""
    return (PROMPT, PROMPT // 2)[:batch]


def _calibration(model: VilaModel, plan: Plan) -> Calibration | None:
    if not isinstance(plan.replay, NeuronReplay):
        return None
    if model.calibration is not None:
        return parse_calibration(model, plan)
    width = model.shape().width
    return random_calibration(model, (plan.replay.share,), min(RANK, width // 2))


def bench_tokens(
    config: VilaConfig,
    names: Sequence[str] = NAMES,
    *,
    device: str = "cuda",
    weights: Sequence[str] = WEIGHTS,
    batch: Sequence[int] = (1, 2),
    rounds: int = 3,
    seconds: float = 420,
    peer: bool = True,
    accepted: Sequence[Document] = (),
    command: str = "",
    on_row: Callable[[Document], None] | None = None,
) -> Document:
    """Time each row with one row of the batch and with a guidance pair, of each kind of weights.

    After so many seconds no further row is begun. `on_row` is handed the document after every row.
    `accepted` are rows of lab/scripts/bench_drafts.py: places that a pass over drafts settles.
    """
    for what, given, known in (("row", names, NAMES), ("weights", weights, WEIGHTS)):
        for name in given:
            if name not in known:
                raise TachyscopeError(f"no {what} {name!r}; there are: {', '.join(known)}")
    if not batch or any(count not in (1, 2) for count in batch):
        raise TachyscopeError(f"`batch` must be 1, 2 or 1,2, got {list(batch)}: give one of these")
    if not 1 <= config.layers <= 256:
        raise TachyscopeError(f"`layers` must be from 1 to 256, got {config.layers}: change it")
    on, begun = find_device(device), time.perf_counter()
    places = config.grid[0] * config.grid[1]
    tokens = min(TOKENS, places // 2)
    clock = Clock(on, rounds, tokens, (places - tokens) // 2)
    energy = EnergyCounter(on)
    head: Document = {"model": "vila-u-random", "places": places, **memory_rates(on)}
    rows: list[Document] = []

    def report(row: Document) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(document(f"bench-tokens-{on.type}", rows, command, **head))

    def left() -> bool:
        return time.perf_counter() - begun < seconds

    with torch.inference_mode():
        dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
        for kind in weights:
            model = random_vila(config, on, dtype)
            if kind != "bf16":
                for part in (model.transformer.trunk, model.transformer.head):
                    quantise(part, "int8" if kind == "int8" else "int4")
            clear(on)
            for count in batch:
                one = _guided(model, count == 2)
                dense: Document = {}
                for name in [name for name in names if name in ROWS]:
                    key = {"name": name, "weights": kind, "rows": count}
                    if not left():
                        report(key | {"failed": "no time was left"})
                        continue
                    try:
                        row = _time(one, ROWS[name], clock, energy, head["copy_tb_s"], dense)
                        row["paper"] = PAPER.get(name)
                    except Exception as fault:
                        traceback.print_exc()
                        row = {"failed": first_line(fault)}
                    if name == "dense":
                        dense = row
                    report(key | row)
                    clear(on)
                for name in [name for name in names if name in DRAFTS]:
                    if left():
                        key = {"name": name, "weights": kind, "rows": count}
                        report(key | _drafts(one, DRAFTS[name], clock, dense, accepted))
                        clear(on)
            if peer and kind == weights[0] and left():
                for count in batch:
                    key = {"name": "transformers", "weights": "bf16", "rows": count}
                    report(key | _peer(config, count, clock, head["copy_tb_s"], rows))
                    clear(on)
    results = document(f"bench-tokens-{on.type}", rows, command, _noise(rows), **head)
    if on_row is not None:
        on_row(results)
    return results


def _guided(model: VilaModel, guided: bool) -> VilaModel:
    sampler = dataclasses.replace(model.config.sampler, cfg=3.0 if guided else 1.0)
    config = dataclasses.replace(model.config, sampler=sampler)
    return VilaModel(model.transformer, config, model.tokenizer, name=model.name)


def _time(
    model: VilaModel, plan: str, clock: Clock, energy: EnergyCounter, copy: float, dense: Document
) -> Document:
    timed = Timed(model, plan, clock)
    places = timed.session.shape.tokens_per_frame
    out: Document = {"plan": str(timed.session.plan)}
    takes: dict[str, list[list[float]]] = {"trunk": [], "step": []}
    for _ in range(clock.rounds):
        for part, times in takes.items():
            times.append([timed.ms(part, frame) for frame in (0, *LATER)])
    for part, times in takes.items():
        points = [statistics.median(x) for x in zip(*times, strict=True)]
        later = statistics.mean(points[1:])
        out[f"{part}_points_ms"] = points
        out[f"{part}_later_ms"] = later
        out[f"{part}_ms"] = (points[0] + (FRAMES - 1) * later) / FRAMES
        out[f"{part}_video_s"] = places * FRAMES * out[f"{part}_ms"] / 1e3
        out[f"{part}_takes_ms"] = times
        if dense:
            out[f"{part}_speedup"] = dense[f"{part}_ms"] / out[f"{part}_ms"]
            out[f"{part}_speedup_later"] = dense[f"{part}_later_ms"] / later
    out["depth_ms"] = statistics.median(timed.ms("depth", 1) for _ in range(clock.rounds))
    out |= _bandwidth(timed, out, copy)
    watts = energy.watts(lambda: timed.ms("step", LATER[1]), JOULES_S, clock.device)
    if watts is not None:
        out |= {"watts": watts, "joules_video": watts * out["step_video_s"]}
    if timed.engine.gates:
        timed.engine.counts.zero_()
        timed.ms("trunk", LATER[0])
        skipped, masked = timed.engine.counts.sum(0).tolist()
        total = clock.tokens * timed.session.shape.layers * timed.session.shape.batch
        out |= {"skipped_share_later": skipped / total, "simulated_share_later": masked / total}
    return out


def _bandwidth(timed: Timed, out: Mapping[str, Any], copy: float) -> Document:
    """Bytes that a token in the video's middle reads, and at what rate."""
    engine, shape = timed.engine, timed.session.shape
    entry = 2 * shape.batch * shape.kv_heads * shape.head_dim * timed.session.dtype.itemsize
    entries = entry * shape.layers * timed.entries_read(LATER[1])
    weights, depth = (
        weight_bytes(engine.trunk, engine.neurons is not None),
        _depth_bytes(engine.depth),
    )
    row: Document = {"depth_bytes": depth, "trunk_bytes": weights + entries}
    row["depth_tb_s"] = depth / out["depth_ms"] / 1e9
    row["depth_of_copy"] = row["depth_tb_s"] / copy
    if not engine.gates:
        row["trunk_tb_s"] = (weights + entries) / out["trunk_points_ms"][2] / 1e9
        row["trunk_of_copy"] = row["trunk_tb_s"] / copy
    return row


def _drafts(
    model: VilaModel, plan: str, clock: Clock, dense: Document, accepted: Sequence[Document]
) -> Document:
    """A pass's time, and where drafts were counted a token's, by kind of clip."""
    parsed = Plan.parse(f"dense text=none {plan}", "tokens")
    try:
        out = bench_drafts(
            model, parsed, clock.rounds, lengths=_lengths(model.shape().batch), frame=LATER[1],
            frames=FRAMES, calibration=_calibration(model, parsed),
        )  # fmt: skip
    except Exception as fault:
        traceback.print_exc()
        return {"failed": first_line(fault)}
    settled = places_a_pass(accepted, plan)
    for part in ("trunk", "step"):
        out[f"{part}_ms_a_token"] = {clip: out[f"{part}_ms"] / n for clip, n in settled.items()}
        if f"{part}_ms" in dense:
            out[f"{part}_speedup_by_clip"] = {
                clip: dense[f"{part}_ms"] / ms for clip, ms in out[f"{part}_ms_a_token"].items()
            }
    return out | {"places_a_pass": settled}


def places_a_pass(accepted: Sequence[Document], plan: str) -> dict[str, float]:
    """By kind of clip, what a pass over a plan's drafts settles."""
    return {row["camera"]: row["places_a_pass"] for row in accepted if row["plan"] == plan}


def _peer(
    config: VilaConfig, batch: int, clock: Clock, copy: float, rows: Sequence[Document]
) -> Document:
    places = config.grid[0] * config.grid[1]
    entries = PROMPT + LATER[1] * places + clock.start
    try:
        peer = bench_llama(
            config, batch, entries, PROMPT + FRAMES * places, clock.device, clock.rounds
        )
    except Exception as fault:
        traceback.print_exc()
        return {"failed": first_line(fault)}
    rate = peer["bytes"] / peer["ms"] / 1e9
    out: Document = {
        "trunk_ms": peer["ms"], "trunk_takes_ms": [[x] for x in peer["takes_ms"]],
        "compile_s": peer["compile_s"], "trunk_tb_s": rate, "trunk_of_copy": rate / copy,
    }  # fmt: skip
    same = [r for r in rows if r["name"] == "dense" and r["rows"] == batch and "trunk_ms" in r]
    if same:
        out["ours_faster"] = peer["ms"] / same[0]["trunk_points_ms"][2]
    return out


def _noise(rows: Sequence[Document]) -> tuple[float, float]:
    """The widest ratio between rounds of one row at one length."""
    high = 1.0
    for row in rows:
        for points in zip(*row.get("trunk_takes_ms", ()), strict=True):
            high = max(high, max(points) / min(points))
    return 1 / high, high
