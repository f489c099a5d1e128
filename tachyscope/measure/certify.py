"""A certificate: a published model measured on one machine by a fixed protocol.

Five prompts by four plans, and the first prompt at full length too. Every part is a video and a row
of the certificate, both written when it is done: an interrupted run resumes after the last of them.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan
from tachyscope.core.request import chunks_for
from tachyscope.core.rollout import rollout
from tachyscope.core.types import dtype_name
from tachyscope.io.files import check_folder, write_atomically
from tachyscope.io.machine import count_peak, memory_of
from tachyscope.io.results import Document, Parts, emit
from tachyscope.io.video import VideoWriter, read_video
from tachyscope.measure.certificate import certificate_page, sheet, side_by_side
from tachyscope.measure.metrics.lpips import BATCH, SHORTEST_SIDE, Lpips
from tachyscope.measure.metrics.weights import COMMAND, LPIPS, has_weights
from tachyscope.measure.quality import Frames, Quality, contrast, detail, psnr
from tachyscope.measure.rates import Clock, rates
from tachyscope.memory.choose import largest
from tachyscope.memory.predict import ROOM
from tachyscope.memory.promise import measured, promise
from tachyscope.models.base import VideoModel

SUITE = "certificate"
PROMPTS = (
    "A red fox trots along a snowy forest path at dawn, its breath visible, the camera follows",
    "Waves break on black rocks below a lighthouse at sunset, spray in the wind, seen from a boat",
    "A potter shapes a clay bowl on a turning wheel, close view of wet hands, warm window light",
    "A night market street in the rain, neon signs on wet stones, people with umbrellas walk by",
    "A hot air balloon rises over green hills in morning mist, the camera circles it slowly",
)
CRF = 10  # of the videos: distances are measured on the files, so that anyone can repeat it
ENDS = 5  # drift is between the first and the last fifth of a video


@dataclass(frozen=True)
class Protocol:
    """What is measured: 26 minutes at 5 frames/s with pixels, as expected of a 24 GB card."""

    prompts: tuple[str, ...] = PROMPTS
    plans: tuple[str, ...] = ("dense", "stock", "fast", "live")  # the first is the reference
    frames: int = 240
    long_frames: int = 1000  # of the first prompt


@dataclass(frozen=True)
class Part:
    """One video; `again` marks the second run of the reference (A/A)."""

    prompt: int
    plan: str
    frames: int
    again: bool = False

    @property
    def name(self) -> str:
        again = "-again" if self.again else ""
        return f"{self.prompt + 1}-{self.plan}{again}-{self.frames}"


def parts_of(protocol: Protocol) -> list[Part]:
    """All parts in order: the first prompt completely, so that an early stop leaves the most."""
    reference, parts = protocol.plans[0], []
    for number in range(len(protocol.prompts)):
        parts += [Part(number, plan, protocol.frames) for plan in protocol.plans]
        if number == 0:
            parts.insert(1, Part(number, reference, protocol.frames, again=True))
            parts += [Part(number, plan, protocol.long_frames) for plan in protocol.plans]
    return parts


def certify(
    model: VideoModel,
    out: str | os.PathLike[str],
    *,
    command: str = "",
    protocol: Protocol | None = None,
    weights: Path | None = None,
    watch: Callable[[int, int], None] | None = None,
    tell: Callable[[str], None] = print,
) -> Document:
    """Measure the parts that are missing; write certificate.json, certificate.html and pictures.

    A part that needs more memory than the machine has is shortened to what fits, and says so.
    weights: the folder of LPIPS's weights, if not the user's cache. watch: called with the frames
    done and their total. tell: called with a line for each part.
    """
    protocol = protocol or Protocol()
    folder = check_folder(out)
    file = folder / "certificate.json"
    settings = {
        "model": model.name,
        "size": f"{model.size[0]}x{model.size[1]}",
        "dtype": dtype_name(model.dtype),
        "protocol": dataclasses.asdict(protocol),
        "revisions": dict(getattr(model, "revisions", {})),
    }
    rows = Parts(str(file), settings, resume=file.exists(), command=command)
    rows.begin(SUITE, model.name, model.fingerprint)
    limits = _limits(model.device)
    todo = parts_of(protocol)
    before, every = 0, sum(part.frames for part in todo)

    def report(frames: int) -> None:
        if watch is not None:
            watch(frames, every)

    lpips = None
    if has_weights(LPIPS, weights) and min(model.size) >= SHORTEST_SIDE:
        lpips = Lpips.load(weights, model.device)
    report(before)
    for number, part in enumerate(todo, 1):
        video = folder / f"{part.name}.mp4"
        row = rows.get(part.name)
        if row is None or (row["frames"] and not video.is_file()):
            row = _measure(model, part, protocol, limits, video, report, before)
            row |= _looks(video) if row["frames"] else {}
        reference = _reference(part, protocol, folder) if row["frames"] else None
        # LPIPS's weights may have been installed since
        if reference is not None and ("psnr_dense" if lpips is None else "lpips_dense") not in row:
            row |= _nearness(video, reference, lpips)
        row = rows.add(part.name, row)
        before += part.frames
        report(before)
        tell(f"{number} of {len(todo)}: {_line(row)}")
    made = [row for part in todo if (row := rows.get(part.name)) is not None]
    videos = {row["part"]: folder / f"{row['part']}.mp4" for row in made if row["frames"]}
    if not videos:
        raise TachyscopeError(
            f"{model.name} fits this machine's memory by none of {', '.join(protocol.plans)}: "
            f"tachyscope fit says what each needs"
        )
    sheet(folder / "contact.png", videos)
    named = {plan: f"1-{plan}-{protocol.frames}" for plan in protocol.plans}
    lanes = {plan: videos[name] for plan, name in named.items() if name in videos}
    side_by_side(folder / "compare.mp4", lanes or videos, model.fps)
    missing = "" if lpips is not None else f"LPIPS was not measured: run {COMMAND}, then this again"
    done = rows.document(**({"missing": missing} if missing else {}))
    shown = certificate_page(done, folder / "contact.png", folder / "compare.mp4")
    write_atomically(folder / "certificate.html", shown)
    emit(done, str(file))
    return done


def _limits(device: torch.device) -> tuple[float, float]:
    """The largest predicted bytes of the device and of the host that a part may have."""
    own, host = memory_of(device), memory_of(torch.device("cpu"))
    return tuple(float("inf") if size is None else ROOM * size for size in (own, host))  # type: ignore[return-value]


def _longest(fits: Callable[[int], bool], model: VideoModel, asked: int) -> int:
    """The most frames up to `asked` that fit, in whole chunks; 0 where none do."""
    if fits(asked):
        return asked
    chunk = model.shape().chunk
    best = largest(
        lambda count: fits(model.pixel_frames(count * chunk)), chunks_for(model, chunk, 0, asked)
    )
    return min(asked, model.pixel_frames(best * chunk)) if best else 0


def _measure(
    model: VideoModel,
    part: Part,
    protocol: Protocol,
    limits: tuple[float, float],
    video: Path,
    report: Callable[[int], None],
    before: int,
) -> Document:
    """Make a part's video; time it, and measure its memory beside the predicted one.

    report: called with the frames made so far; other parts made `before` of them.
    """
    prompt = protocol.prompts[part.prompt]

    def fits(frames: int) -> bool:
        promised = promise(model, part.plan, frames=frames, prompt=prompt)
        return promised is None or (promised.vram <= limits[0] and promised.ram <= limits[1])

    row: Document = {
        "plan": part.plan, "again": part.again, "prompt": prompt, "seed": part.prompt,
        "asked": part.frames, "frames": _longest(fits, model, part.frames),
        "policies": str(Plan.parse(part.plan, model.kind, model.stock)),
    }  # fmt: skip
    frames = row["frames"]
    if part.frames == protocol.long_frames and frames <= protocol.frames:
        row["frames"] = frames = 0  # the shorter part has already shown as much
    if frames < part.frames:
        row["bounded_by"] = "memory"
    if not frames:
        return row
    promised = promise(model, part.plan, frames=frames, prompt=prompt)
    model.encode_prompt(prompt)  # cached, so that the clock times the video alone
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    count_peak(model.device)
    rows: list[dict[str, float]] = []
    gpu = model.device.type == "cuda"
    with VideoWriter(video, model.fps, crf=CRF, background=gpu) as file, Clock() as clock:
        for chunk in rollout(model, part.plan, frames=frames, prompt=prompt, seed=part.prompt):
            clock.lap(chunk)
            rows.append(chunk.stats)
            file.write(chunk.frames)
            report(before + min(frames, int(sum(row["frames"] for row in rows))))
    row |= rates(rows)
    return row | measured(model.device, promised)


def _batches(*paths: Path) -> Iterator[list[Frames]]:
    """Equal batches of frames of several videos, up to the end of the shortest."""
    held: list[Sequence[Frames]] = []
    for frames in zip(*(read_video(path) for path in paths), strict=False):
        held.append(frames)
        if len(held) == BATCH:
            yield [np.stack(video) for video in zip(*held, strict=True)]
            held = []
    if held:
        yield [np.stack(video) for video in zip(*held, strict=True)]


def _looks(video: Path) -> Document:
    """Motion, frozen and flat frames, and the drift of colour, contrast and detail."""
    quality, colours, contrasts, details = Quality(), [], [], []
    for (frames,) in _batches(video):
        quality.add(frames)
        colours.append(frames.mean((1, 2)))
        contrasts.append(contrast(frames))
        details.append(detail(frames))
    (red_first, red_last), *others = (
        _ends(np.concatenate(values)) for values in (colours, contrasts, details)
    )
    ratios = [float(last) / float(first) if first else 1.0 for first, last in others]
    return quality.summary() | {
        "drift_colour": float(np.abs(red_last - red_first).mean()),
        "drift_contrast": ratios[0],
        "drift_detail": ratios[1],
    }


def _ends(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over the first fifth of a video and over its last."""
    size = max(1, len(values) // ENDS)
    return values[:size].mean(0), values[-size:].mean(0)


def _reference(part: Part, protocol: Protocol, folder: Path) -> Path | None:
    """The reference's video of the same prompt and length; None for that video itself."""
    first = Part(part.prompt, protocol.plans[0], part.frames)
    path = folder / f"{first.name}.mp4"
    return path if part != first and path.is_file() else None


def _nearness(video: Path, reference: Path, lpips: Lpips | None) -> Document:
    """PSNR and LPIPS to the reference, over the frames that both files have."""
    near: list[float] = []
    differ: list[float] = []
    for ours, theirs in _batches(video, reference):
        near += psnr(ours, theirs).tolist()
        differ += [] if lpips is None else lpips(ours, theirs).tolist()
    if not near:
        raise TachyscopeError(f"{reference} has no frames: remove it, and run this again")
    row: Document = {"psnr_dense": float(np.mean(near)), "compared_frames": len(near)}
    if differ:
        first, last = _ends(np.array(differ))
        row |= {"lpips_dense": float(np.mean(differ))}
        row |= {"lpips_dense_first": float(first), "lpips_dense_last": float(last)}
    return row


def _line(row: Document) -> str:
    """A part in one line."""
    if not row["frames"]:
        return f"{row['part']}: more memory than there is, left out"
    out = f"{row['part']}: {row['frames']} frames"
    if row["frames"] < row["asked"]:
        out += f" of {row['asked']}, what fits the memory"
    speed = row.get("fps_steady", row["fps_avg"])
    out += f", {speed:.1f} frames/s, warm-up {row['warm_s']:.1f} s"
    return f"{out}, LPIPS {row['lpips_dense']:.4f}" if "lpips_dense" in row else out
