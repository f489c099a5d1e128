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

from tachyscope.arguments import parse_calibration
from tachyscope.attention.window import Window
from tachyscope.bench.device_clock import EnergyCounter, memory_rates, milliseconds, recorded
from tachyscope.bench.drafts import bench_drafts
from tachyscope.bench.llama_peer import bench_llama
from tachyscope.bench.random_vila import RANK, random_calibration, random_vila
from tachyscope.bench.single_chunk import clear
from tachyscope.calibration import Calibration
from tachyscope.decode import DecodeEngine, StepProgram, can_compile, quantise
from tachyscope.errors import TachyscopeError, first_line
from tachyscope.models.registry import find_device
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.plan import Plan
from tachyscope.replay.neurons import NeuronReplay
from tachyscope.results import Document, document
from tachyscope.session import Session
from tachyscope.tables import format_table

PROMPT = 64  # tokens
FRAMES = 8  # of a video
LATER = (1, 4, 7)  # frames at which the rest is timed
TOKENS = 24  # timed in the midst of a frame
JOULES_S = 0.7  # of work that the GPU's counter is read over
WEIGHTS = ("bf16", "int8", "int4")
NEVER, ALWAYS = 1e9, -1e9  # thresholds


def _share(of_all: float) -> float:
    """Of tokens that can be replayed, when so many of all are: frame 0 cannot."""
    return of_all * FRAMES / (FRAMES - 1)


SHORT, LONG = ("attention=window:tokens=16,sink=4", "attention=window:tokens=256,sink=4")
ALL = f"replay=attentive:threshold={ALWAYS:g}"
# what matters most first: time may run out
ROWS = {
    "dense": "cache=keep_all",
    "all": ALL,
    "all-window16": f"{SHORT} {ALL}",
    "replay80": f"replay=random:share={_share(0.8):.4f}",
    "neurons75": "replay=neurons:share=0.75",
    "neurons75-window16": f"{SHORT} replay=neurons:share=0.75",
    "prune75": "replay=prune:share=0.75",
    "window16": SHORT,
    "input-all": "replay=input:threshold=1e6",
    "scored": f"replay=attentive:threshold={NEVER:g}",
    "replay50": f"replay=random:share={_share(0.5):.4f}",
    "neurons50": "replay=neurons:share=0.5",
    "replay20": f"replay=random:share={_share(0.2):.4f}",
    "all-window256": f"{LONG} {ALL}",
    "all-merge4f": f"cache=merge:budget=4f {ALL}",
    "window256": LONG,
    "merge4f": "cache=merge:budget=4f",
}
# passes over a token and so many drafts
DRAFTS = {f"draft{count}": f"passes=draft:places={count}" for count in (32, 16, 64)}
DRAFTS["draft32-neurons75"] = f"{DRAFTS['draft32']} {ROWS['neurons75']}"
NAMES = (*ROWS, *DRAFTS)
# FastCar's table for VILA-U-7B-256, 8 frames, on an Alveo U280 (docs/tokens.md)
PAPER = {
    "dense": 1.0, "window256": 1.02, "window16": 1.04, "replay20": 1.24, "replay50": 1.45,
    "replay80": 1.76, "all-window256": 1.95, "all-window16": 2.13,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Clock:
    """How a row is timed."""

    device: torch.device
    rounds: int
    tokens: int
    start: int


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
        for layer in self.session.layers:
            layer.k.normal_()
            layer.v.normal_()
            layer.log_count.zero_()
            for name in {"error", "input"} & layer.own["replay"].keys():
                layer.own["replay"][name].normal_()
        self.engine.noise.exponential_()
        self.engine.draw_luck()
        gate = None if self.session.plan.replay is None else self.engine.gate
        if gate is not None:
            self.engine.value.fill_(gate.value)
        self._runs: dict[tuple[str, bool], Callable[[], object]] = {}

    def run(self, part: str, frame: int) -> Callable[[], object]:
        """The step or one of its parts in a frame: "trunk", "depth", "step"; see `StepProgram`."""
        engine = self.engine
        whole = engine.whole_places(frame > 0)[0]

        def trunk() -> None:
            engine.run_trunk(whole)
            engine.numbers.add_(1)

        def depth() -> None:
            engine.depth.step(engine.codes, engine.noise, engine.place)

        key = part, whole
        if (
            key not in self._runs
            and self.clock.device.type == "cpu"
            and can_compile(engine.x.dtype)
        ):
            self._runs[key] = StepProgram(engine, whole, part).replay
        if key not in self._runs:
            self._stand(0)
            works = {"trunk": trunk, "depth": depth, "step": lambda: engine.step(whole)}
            self._runs[key] = recorded(works[part], self.clock.device)
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
        places, slots = self.session.shape.tokens_per_frame, self.session.layers[0].k.shape[2]
        return min(self.session.prompt + frame * places, slots - places)

    def entries_read(self, frame: int) -> int:
        """Of a token in the midst of a frame."""
        end = self._past(frame) + self.clock.start + self.clock.tokens // 2
        policy = self.session.plan.attention
        return min(end, policy.tokens + policy.sink) if isinstance(policy, Window) else end


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
    `accepted` are rows of scripts/bench_drafts.py: places that a pass over drafts settles.
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
    if timed.engine.gate is not None or timed.engine.judges:
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
    weights = engine.trunk.bytes(engine.neurons is not None)
    row: Document = {"depth_bytes": engine.depth.bytes, "trunk_bytes": weights + entries}
    row["depth_tb_s"] = engine.depth.bytes / out["depth_ms"] / 1e9
    row["depth_of_copy"] = row["depth_tb_s"] / copy
    if engine.gate is None and not engine.judges:
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


def token_lines(results: Document) -> list[str]:
    """The document as tables."""
    rows = []
    for row in results["rows"]:
        if "failed" in row:
            rows.append([row["name"], row["weights"], row["rows"], row["failed"]])
            continue

        def shown(name: str, digits: int = 2, row: Document = row) -> str:
            return "" if row.get(name) is None else f"{row[name]:.{digits}f}"

        rows.append([
            row["name"], row["weights"], row["rows"], shown("trunk_ms", 3), shown("trunk_tb_s"),
            shown("trunk_of_copy"), shown("trunk_speedup"), shown("trunk_speedup_later"),
            shown("paper"), shown("step_ms", 3), shown("step_speedup"), shown("depth_ms", 3),
            shown("depth_of_copy"), shown("joules_video", 0),
        ])  # fmt: skip
    columns = [
        "row", "weights", "rows", "trunk ms", "TB/s", "of copy", "x dense", "x after frame 0",
        "paper x", "step ms", "x dense", "depth ms", "of copy", "J a video",
    ]  # fmt: skip
    low, high = (results.get("aa") or {"low": 1.0, "high": 1.0}).values()
    lines = format_table(columns, [[str(x) for x in (*row, *[""] * 14)][:14] for row in rows])
    return [
        f"copy {results['copy_tb_s']:.2f} TB/s, read {results['read_tb_s']:.2f} TB/s; "
        f"A/A {low:.3f} to {high:.3f}",
        *lines,
    ]
