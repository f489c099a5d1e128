"""Wan-type models at full size: what a chunk takes after so many latent frames, plan by plan.

What a chunk costs depends on how much its plan remembers. So caches are filled instead of made,
single chunks are timed at some lengths, and a rollout's rate is the sum over its chunks.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tachyscope.attention.dense import Dense
from tachyscope.core.arguments import parse_plan
from tachyscope.core.chunk_runner import is_steady
from tachyscope.core.errors import TachyscopeError, first_line
from tachyscope.core.kv_allocation import cache_bytes
from tachyscope.core.limits import check
from tachyscope.core.meter import summary
from tachyscope.core.opening import open as open_stream
from tachyscope.core.plan import Plan
from tachyscope.core.request import chunks_for
from tachyscope.core.session import Session
from tachyscope.core.stream import Stream
from tachyscope.core.types import Shape
from tachyscope.io.machine import memory_of, peak_gb
from tachyscope.io.results import Document, Parts, document
from tachyscope.measure.fill import fill
from tachyscope.measure.noise import noise
from tachyscope.memory.predict import ROOM, need
from tachyscope.models.atrium.world import ACTIONS
from tachyscope.models.registry import MODELS, PRECISIONS, find_dtype, in_precision, load
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.presets import SIZES
from tachyscope.models.wan.random import random_wan
from tachyscope_lab.bench.recorded_kv import Chunks, Traced, trace_for
from tachyscope_lab.bench.single_chunk import (
    PROMPT,
    clear,
    parts,
    repeat_chunk,
    shown_size,
    taken_back,
    watched,
)
from tachyscope_lab.bench.stand_ins import with_toy_parts

# Wan 1.3B that takes a camera's steps as actions, so that its poses are known: for the plan pose
CAMERA = "wan_1.3b_camera"
FULL = "the GPU's memory ran out: ask for shorter lengths, or a smaller budget"
# latent frames before a timed chunk, where nothing is forgotten; shrunk to what the GPU holds
LENGTHS = (21, 48, 96, 168, 252, 357, 468)
# chunks beyond a budget: from there on a bounded plan must cost the same
BEYOND = (1, 12, 33)
WARM = 3  # chunks before those that are timed
RIVALS = ("dense", "stock", "window21")
FRAMES = (480, 1880, 3000)  # pixel frames over which a rate is told


@dataclass(frozen=True)
class Clock:
    """How a plan is timed: at what size, how often, with which contents."""

    size: tuple[int, int] | None
    rounds: int
    seed: int
    trace: Chunks | None = None  # queries, keys and values in the place of the model's

    def open(self, model: WanModel, plan: Plan, frames: int) -> Stream:
        return open_stream(
            model, plan, prompt=PROMPT, frames=frames, size=self.size, seed=self.seed,
            observers=[] if self.trace is None else [Traced(self.trace)],
        )  # fmt: skip


def load_sized(name: str, weights: str | None, device: str, dtype: str) -> WanModel:
    """A Wan-type model by its name or its published size, by default with random weights.

    A dtype that is a precision of `load` is that, of a bfloat16 model.
    """
    if dtype in PRECISIONS:
        return in_precision(load_sized(name, weights, device, "bfloat16"), dtype)
    sizes = SIZES | {CAMERA: dataclasses.replace(SIZES["wan_1.3b"], actions=ACTIONS)}
    if name in sizes:
        if weights is not None:
            raise TachyscopeError(f"{name} is a size, for random weights: leave `weights` out")
        return random_wan(sizes[name], device=device, dtype=find_dtype(dtype), name=name)
    if weights is None and name in MODELS and MODELS[name].weights:
        weights = "random"
    model = load(name, weights, device=device, dtype=dtype)
    fault = f"{name} is no Wan-type model: try tachyscope bench cpu"
    return with_toy_parts(WanModel.narrow(model, fault))


def bench_wan(
    model: WanModel,
    plans: Mapping[str, str],
    *,
    size: tuple[int, int] | None = None,
    lengths: Sequence[int] = (),
    rounds: int = 5,
    seed: int = 0,
    traced: bool = False,
    command: str = "",
    parts: Parts | None = None,
    on_row: Callable[[Document], None] | None = None,
) -> Document:
    """Time each plan's chunks at some lengths; a results document, a row a plan.

    `lengths` are latent frames, by default spread over what the GPU holds, or beyond a bounded
    plan's budget. `traced` fills caches from a trained model instead of at random. parts: keeps
    rows, and has those of before; one that failed is tried again. `on_row` is handed the document
    after every row.
    """
    if check("rounds", rounds) < 2:
        raise TachyscopeError(f"`rounds` must be 2 or more here, got {rounds}: give as many")
    for length in lengths:
        check("lengths", length)
    parsed = {name: parse_plan(model, text) for name, text in plans.items()}
    shapes, memory = model.on_meta(), memory_of(model.device)
    room = ROOM * memory if memory and model.device.type == "cuda" else None
    started = time.perf_counter()
    clock = Clock(size, rounds, seed)
    with torch.inference_mode():
        stream = open_stream(model, "dense", prompt=PROMPT, size=size, seed=seed)
        if traced:
            clock = dataclasses.replace(clock, trace=trace_for(stream.session, seed))
        for _ in range(2):
            stream.generate()  # what a process does once
        del stream
    warm_s = time.perf_counter() - started
    rows: list[Document] = []

    def results() -> Document:
        more: Document = {"warm_s": warm_s, "traced": traced}
        return document(f"bench-wan-{model.device.type}", rows, command, **more)

    parts = Parts() if parts is None else parts
    parts.begin(f"bench-wan-{model.device.type}", model.name, model.fingerprint)
    for name, plan in parsed.items():
        row = parts.get(name) or {"name": name, "plan": str(plan), "model": model.name}
        rows.append(row)
        if "part" not in row:
            try:
                at = lengths or default_lengths(shapes, plan, size, room)
                _measure(row, model, plan, at, clock)
                row["fit_gb"] = _fit_gb(shapes, plan, at, clock)
            except Exception as error:  # one plan's fault must not cost the others their turn
                row["failed"] = _fault(error)
        _rates(row, model)
        if "failed" not in row and "part" not in row:
            rows[-1] = row = parts.add(name, row)
        _compare(row, rows)
        if on_row is not None:
            on_row(results())
    return results()


def default_lengths(
    shapes: WanModel, plan: Plan, size: tuple[int, int] | None, room: float | None
) -> list[int]:
    """Latent frames at which a plan's chunks are timed, whole chunks."""
    shape = shapes.shape(size)
    if not plan.cache.grows:
        return [shape.chunk * (_held(plan, shape) + more) for more in BEYOND]
    most = LENGTHS[-1]
    if room is not None:
        one, two = (
            need(shapes, plan, frames=shapes.pixel_frames(n * shape.chunk), size=size).undecoded
            for n in (1, 2)
        )
        # the last timed chunk needs its own place
        most = min(most, shape.chunk * int((room - one) / (two - one)))
    scaled = {shape.chunk * round(n * most / LENGTHS[-1] / shape.chunk) for n in LENGTHS}
    return sorted(scaled - {0})


@torch.inference_mode()
def _measure(
    row: Document,
    model: WanModel,
    plan: Plan,
    lengths: Sequence[int],
    clock: Clock,
) -> None:
    """Fill in a row, point by point, so that what was measured before a fault is kept."""
    _build(model, plan, clock)
    if not plan.cache.grows:
        row["begin_ms"] = _begin(model, plan, clock)
    clear(model.device)
    begun = time.perf_counter()
    chunk = model.config.chunk
    reserve = model.pixel_frames(_latents(model, plan, lengths, clock.rounds))
    stream = clock.open(model, plan, reserve)
    session = stream.session
    first = stream.generate().stats  # waits for the device at its end
    row["first_chunk_ms"] = 1e3 * (time.perf_counter() - begun)
    row["size"] = shown_size(model, session.shape)
    row["frames_chunk"] = model.pixel_frames(2 * chunk) - model.pixel_frames(chunk)
    row["grows"] = plan.cache.grows
    row["points"] = [_point(0, [first], session)]
    for length in sorted(lengths):
        fill(session, length)
        _warm(stream)
        at = session.memory.latent_frame
        takes = [repeat_chunk(stream) for _ in range(clock.rounds)]
        row["points"].append(_point((at + session.memory.latent_frame) / 2, takes, session))
    row["peak_gb"] = peak_gb(model.device)
    with watched(session):
        stream = Stream(model, session)
        # the third of a bounded plan is recorded with its spans, and runs without the host
        repeated = stream.runner.record is not None and is_steady(session)
        taken = [repeat_chunk(stream) for _ in range(3 if repeated else 1)][-1]
    if repeated:
        taken |= {"chunk_ms": row["points"][-1]["chunk_ms"]}
    row["parts_ms"] = parts(session, taken)
    pairs = 4 * taken["pairs"] * session.shape.head_dim  # two products, a multiply and an add
    spent = row["parts_ms"]
    row["read_tflops"] = pairs / spent["read"] / 1e9
    row["chosen_tflops"] = pairs / (spent["read"] + spent["choose"] + spent["index"]) / 1e9
    last = row["points"][-1]
    row |= {name: last[name] for name in ("chunk_ms", "host_ms", "aa", "density", "macs")}


def _build(model: WanModel, plan: Plan, clock: Clock) -> None:
    """Have a plan's kernels built, which a process does once: a first chunk must not count it."""
    chunk = model.config.chunk
    stream = clock.open(model, plan, model.pixel_frames(4 * chunk))
    stream.generate()
    if not plan.cache.grows:
        fill(stream.session, chunk * (_held(plan, stream.session.shape) + 1))
    stream.generate()


def _begin(model: WanModel, plan: Plan, clock: Clock) -> list[float]:
    """A video's first chunks, until its cache is full and a chunk is recorded.

    They are asked for launch by launch, which no length tells.
    """
    chunk = model.config.chunk
    stream = clock.open(model, plan, model.pixel_frames(4 * chunk))
    count = _held(plan, stream.session.shape) + WARM
    return [stream.generate().stats["chunk_ms"] for _ in range(count)]


def _held(plan: Plan, shape: Shape) -> int:
    """Chunks that fill a bounded plan's cache."""
    return -(-plan.cache.capacity(shape, 0, None) // shape.max_pass_tokens)


def _warm(stream: Stream) -> None:
    """A library chooses its kernels at the first pass of a length; a policy does its first work.

    The third chunk of a bounded plan is recorded, the next ones repeat it.
    """
    model, session = stream.model, stream.session
    plan = session.plan
    if taken_back(plan) and isinstance(plan.attention, Dense):
        # nothing is done once a chunk, and a long one takes seconds: a fifth of it is enough
        assert session.memory.latents is not None
        moves = [0] * session.shape.chunk if model.actions else []
        model.prefill_latents(session, session.memory.latents, moves)
        session.meter.take()
    else:
        for _ in range(WARM):
            repeat_chunk(stream)


def _point(length: float, takes: Sequence[Mapping[str, float]], session: Session) -> Document:
    ms = [take["chunk_ms"] for take in takes]
    half = len(ms) // 2
    point: Document = {
        "length": length,
        "chunk_ms": statistics.median(ms),
        "chunk_ms_all": ms,
        # the same session against itself, turn about
        "aa": noise(ms[0 : 2 * half : 2], ms[1 : 2 * half : 2]) if half else None,
        "host_ms": statistics.median(take["host_ms"] for take in takes),
        "cache_mb": cache_bytes(session.memory.layers) / 1e6,
    }
    total = summary([takes[-1]])
    names = (
        "macs", "pairs", "density", "text_density", "rows_computed", "rows_replayed",
        "late_share", "denied_share", "fetched_mb",
    )  # fmt: skip
    return point | {name: total[name] for name in names if name in total}


def _fault(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return FULL
    if isinstance(error, TachyscopeError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def _fit_gb(shapes: WanModel, plan: Plan, lengths: Sequence[int], clock: Clock) -> float:
    """The peak that was predicted for the row."""
    frames, size = shapes.pixel_frames(_latents(shapes, plan, lengths, clock.rounds)), clock.size
    return need(shapes, plan, frames=frames, size=size, prompt=PROMPT).undecoded / 1e9


def _latents(model: WanModel, plan: Plan, lengths: Sequence[int], rounds: int) -> int:
    """Latent frames that a row's last timed chunk ends with, whole chunks."""
    chunk = model.config.chunk
    more = 1
    if plan.cache.grows and not taken_back(plan):
        more = len(lengths) * (WARM + rounds) + 1
    return -(-max(lengths) // chunk) * chunk + more * chunk


def _rates(row: Document, model: WanModel) -> None:
    """Frames a second over whole rollouts, and at their ends."""
    points, chunk = row.get("points", []), model.config.chunk
    if len(points) < 2:
        return
    row["rates"] = {}
    lengths, times = ([point[key] for point in points] for key in ("length", "chunk_ms"))
    for frames in FRAMES:
        starts = range(0, chunk * chunks_for(model, chunk, 0, frames), chunk)
        if row["grows"] and starts[-1] > lengths[-1]:
            continue  # how it goes on was not measured
        begin = row.get("begin_ms", [])[: len(starts)]
        ms = [*begin, *np.interp(starts[len(begin) :], lengths, times).tolist()]
        made = model.pixel_frames(starts[-1] + chunk)
        row["rates"][str(frames)] = {
            "fps": 1e3 * made / sum(ms),
            "fps_end": 1e3 * row["frames_chunk"] / ms[-1],
        }


def _compare(row: Document, rows: Sequence[Document]) -> None:
    """How many times as fast as the rows that people would run instead, and if beyond noise."""
    row["times"] = {}
    for name in RIVALS:
        other = next((r for r in rows if r["name"] == name and r is not row), {})
        shared = [n for n in row.get("rates", {}) if n in other.get("rates", {})]
        if not shared:
            continue
        wide = max(p["aa"][1] for r in (row, other) for p in r["points"] if p["aa"])
        values: Document = {}
        for frames in shared:
            ours, theirs = row["rates"][frames], other["rates"][frames]
            values[frames] = {key: ours[key] / theirs[key] for key in ours}
        last = values[shared[-1]]["fps_end"]
        row["times"][name] = values | {"real": not 1 / wide <= last <= wide}
