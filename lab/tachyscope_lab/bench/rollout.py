"""One real rollout, chunk by chunk: does it stay as fast, as busy and as large as it was?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tachyscope.core.arguments import parse_plan
from tachyscope.core.kv_allocation import cache_bytes
from tachyscope.core.limits import check
from tachyscope.core.meter import summary
from tachyscope.core.opening import open as open_stream
from tachyscope.core.rollout import rollout
from tachyscope.core.session import Session
from tachyscope.io.machine import count_peak, peak_gb
from tachyscope.io.results import Document, Parts, document
from tachyscope.measure.rates import Clock, rates
from tachyscope.memory.predict import need
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.stages import wider
from tachyscope_lab.bench.recorded_kv import Traced, trace_for
from tachyscope_lab.bench.single_chunk import (
    PROMPT,
    clear,
    shown_size,
    turning,
)

SETTLED = 300  # pixel frames, after which a bounded plan must cost the same for ever
STRETCHES = 10  # parts of the rest, whose median times are compared
TIME, PEAK = 0.05, 0.02  # how far apart they may lie
DECODES = 10  # of one chunk, of which the later half is timed


def bench_rollout(
    model: WanModel,
    plans: Mapping[str, str],
    *,
    frames: int,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    decode: bool = False,
    traced: bool = False,
    command: str = "",
    parts: Parts | None = None,
    on_row: Callable[[Document], None] | None = None,
) -> Document:
    """Make so many frames by each plan, undecoded; a results document that says what stayed flat.

    decode: make them once more, as a user does, and shown. traced: fill caches from a trained model
    instead of by the model's own weights. parts: keeps rows, and has those of before. `on_row` is
    handed the document after every row.
    """
    check("rollout", frames)
    rows: list[Document] = []
    parts = Parts() if parts is None else parts
    parts.begin(_suite(model), model.name, model.fingerprint)
    for name, text in plans.items():
        row = parts.get(name)
        if row is None:
            options: Any = {"frames": frames, "size": size, "seed": seed}
            row = {"name": name, **play(model, text, **options, traced=traced)}
            if decode:
                row |= show(model, text, **options)
            row = parts.add(name, row)
        rows.append(row)
        if on_row is not None:
            on_row(_document(model, rows, command))
    return _document(model, rows, command)


def _document(model: WanModel, rows: Sequence[Document], command: str) -> Document:
    return document(_suite(model), rows, command)


def _suite(model: WanModel) -> str:
    return f"bench-wan-rollout-{model.device.type}"


@torch.inference_mode()
def play(
    model: WanModel,
    plan: str,
    *,
    frames: int,
    size: tuple[int, int] | None,
    seed: int,
    traced: bool = False,
) -> Document:
    """One rollout's row."""
    parsed = parse_plan(model, plan)
    clear(model.device)
    begun = time.perf_counter()
    stream = open_stream(model, parsed, prompt=PROMPT, frames=frames, size=size, seed=seed)
    opened, session = time.perf_counter() - begun, stream.session
    chunks, peaks = list[Mapping[str, float]](), [0.0, 0.0]
    if traced:
        session.watch(Traced(trace_for(session, seed)))
    begun = time.perf_counter()
    while model.pixel_frames(session.memory.latent_frame) < frames:
        settled = model.pixel_frames(session.memory.latent_frame) >= SETTLED
        if settled and not peaks[0]:
            peaks[0] = peak_gb(model.device)
            count_peak(model.device)
        chunks.append(stream.generate(turning(model, session)).stats)
    wall = time.perf_counter() - begun
    peaks[1] = peak_gb(model.device)
    made = model.pixel_frames(session.memory.latent_frame)
    ms = [chunk["chunk_ms"] for chunk in chunks]
    row: Document = {
        "plan": str(parsed),
        "model": model.name,
        "size": shown_size(model, session.shape),
        "frames": made,
        "latents": session.memory.latent_frame,
        "traced": traced,
        "open_s": opened,  # of a bank mostly page-locking its host memory
        "fps": 1e3 * made / sum(ms),
        "fps_wall": made / wall,
        "cache_mb": cache_bytes(session.memory.layers) / 1e6,
        "finite": finite(session),
        "chunk_ms": [round(x, 3) for x in ms],
        "macs": [chunk["macs"] for chunk in chunks],
    }
    predicted = need(model.on_meta(), parsed, frames=frames, size=size, prompt=PROMPT)
    row |= {"fit_gb": predicted.undecoded / 1e9, "host_gb": predicted.host / 1e9}
    row |= bank_counts(chunks)
    if model.device.type == "cuda":
        row |= {"peak_gb_before": peaks[0] or peaks[1], "peak_gb": peaks[1]}
    starts = [model.pixel_frames(i * session.shape.chunk) for i in range(len(ms))]
    first = sum(start < SETTLED for start in starts)
    if first < len(ms):
        row |= flatness(ms[first:], [chunk["macs"] for chunk in chunks[first:]], peaks)
    return row


def bank_counts(chunks: Sequence[Mapping[str, float]]) -> Document:
    """What a bank fetched a chunk, and how much of what was wanted came late or not at all."""
    if "blocks_wanted" not in chunks[-1]:
        return {}
    total = summary(chunks)
    fetched = [chunk.get("fetched_mb", 0.0) for chunk in chunks]
    return {
        "late_share": total["late_share"],
        "denied_share": total["denied_share"],
        "fetched_mb": statistics.median(fetched),
        "fetched_mb_all": [round(x, 3) for x in fetched],
    }


def show(
    model: WanModel, plan: str, *, frames: int, size: tuple[int, int] | None, seed: int
) -> Document:
    """The same rollout as a user meets it: frames decoded, on a GPU beside the next chunk."""
    # first: what a compiled decoder does once is no part of the rollout
    alone = decode_ms(model, size)
    clear(model.device)
    rows = []
    with Clock() as clock:
        for chunk in rollout(model, plan, frames=frames, prompt=PROMPT, size=size, seed=seed):
            clock.lap(chunk)
            rows.append(chunk.stats)
    speeds = rates(rows)
    return {
        "decoder": model.decoder_name,
        "decode_ms": alone,
        "shown_fps": speeds["fps_avg"],
        "shown_fps_steady": speeds.get("fps_steady"),
        "shown_first_ms": 1e3 * speeds["first_frame_s"],
        "shown_ms": speeds.get("steady_ms"),
        "shown_peak_gb": peak_gb(model.device),
    }


@torch.inference_mode()
def decode_ms(model: WanModel, size: tuple[int, int] | None) -> float:
    """What decoding a chunk takes with nothing beside it, until its frames are on the host."""
    c, shape = model.config, model.shape(size)
    high, wide = shape.grid[0] * c.patch[1], shape.grid[1] * c.patch[2]
    rng = torch.Generator(model.device).manual_seed(0)
    latents = torch.randn(
        1, c.in_channels, shape.chunk, high, wide, generator=rng, device=model.device
    ).to(wider(model.dtype))
    takes, features = [], dict[str, torch.Tensor]()
    assert model.decoder is not None
    for _ in range(DECODES):
        begun = time.perf_counter()
        model.decoder(latents, features)
        takes.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(takes[DECODES // 2 :])


def finite(session: Session) -> bool:
    """Whether every number that the session remembers is one."""
    held = [x for layer in session.memory.layers for x in layer.entries().values()]
    if session.memory.latents is not None:
        held.append(session.memory.latents)
    return all(bool(x.isfinite().all()) for x in held)


def flatness(ms: Sequence[float], macs: Sequence[float], peaks: Sequence[float]) -> Document:
    """How far apart a settled rollout's stretches lie, and whether that is flat."""
    size = max(1, len(ms) // STRETCHES)
    medians = [statistics.median(ms[i : i + size]) for i in range(0, len(ms) - size + 1, size)]
    middle = statistics.median(ms)
    spread = max(medians) / min(medians) - 1
    grown = peaks[1] / peaks[0] - 1 if peaks[0] else 0.0
    values: dict[str, Any] = {
        "settled_ms": middle,
        "time_spread": spread,
        "chunks_within": sum(abs(x / middle - 1) <= TIME for x in ms) / len(ms),
        "slowest": max(ms) / middle,
        "work_equal": len(set(macs)) == 1,
        "peak_growth": grown,
    }
    return values | {"flat": spread <= TIME and values["work_equal"] and grown <= PEAK}


def flat_lines(results: Document) -> list[str]:
    """A document of `bench_rollout` as a reader wants it."""
    out = []
    for row in results["rows"]:
        out.append(
            f"{row['name']}: {row['frames']} frames ({row['latents']} latent) of {row['size']} by "
            f"{row['model']}, {row['fps']:.1f} frames/s ({row['fps_wall']:.1f} by the wall clock), "
            f"{'all numbers finite' if row['finite'] else 'NOT ALL NUMBERS FINITE'}"
        )
        if "peak_gb" in row:
            out[-1] += f", peak {row['peak_gb']:.2f} GB ({row['fit_gb']:.2f} predicted)"
        if "late_share" in row:
            out.append(
                f"  bank: {row['host_gb']:.1f} GB of host memory, {row['fetched_mb']:.1f} MB "
                f"fetched a chunk; of the blocks wanted {row['late_share']:.2%} late, "
                f"{row['denied_share']:.2%} denied"
            )
        if "shown_fps" in row:
            steady = "too short for a steady rate"
            if row["shown_ms"] is not None:
                steady = (
                    f"{row['shown_fps_steady']:.1f} frames/s once warm, {row['shown_ms']:.1f} ms a "
                    f"chunk"
                )
            out.append(
                f"  decoded by {row['decoder']}: {steady}; {row['shown_fps']:.1f} on average by "
                f"the wall clock, the first chunk after {row['shown_first_ms']:.0f} ms; decoding "
                f"alone {row['decode_ms']:.1f} ms a chunk"
            )
        if "flat" in row:
            out.append(
                f"  from frame {SETTLED} on: {row['settled_ms']:.1f} ms a chunk, stretches within "
                f"{row['time_spread']:.1%}, {row['chunks_within']:.0%} of the chunks within "
                f"{TIME:.0%} of the median, the slowest {row['slowest']:.2f}x; counted work "
                f"{'equal' if row['work_equal'] else 'NOT equal'}; peak memory grew "
                f"{row['peak_growth']:.1%}: {'flat' if row['flat'] else 'NOT FLAT'}"
            )
    return out
