"""Predicts what memory a plan takes, part by part, and how it fits a machine; nothing runs."""

from __future__ import annotations

import dataclasses

from tachyscope.core.arguments import parse_plan
from tachyscope.core.limits import check
from tachyscope.core.plan import Plan
from tachyscope.core.types import dtype_name
from tachyscope.io.results import Document, document
from tachyscope.memory.choose import Choice, Video
from tachyscope.memory.predict import ROOM, Need, meta_session, model_parts, need_of
from tachyscope.memory.promise import encoder_bytes, promised
from tachyscope.models.base import VideoModel

CARDS = (12.0, 16.0, 24.0)  # GB of usual GPUs


def fit(
    model: VideoModel,
    plan: Plan | str,
    *,
    frames: int,
    size: tuple[int, int] | None = None,
    prompt: str = "",
    vram_gb: float | None = None,
    ram_gb: float | None = None,
    on_cpu: bool = False,
    command: str = "",
) -> Document:
    """A document on the memory that a plan takes, and the best way within GB of GPU and RAM.

    Without limits, it has the best way for each of the usual GPUs, CARDS.
    """
    check("frames", frames)
    for name, gb in (("vram", vram_gb), ("ram", ram_gb)):
        if gb is not None:
            check("memory_gb", gb, f"`{name}`")
    parsed, text = parse_plan(model, plan), str(plan)
    session = meta_session(model, parsed, frames, size, prompt)
    result = need_of(session, model_parts(model, session))
    told = promised(result, model, on_cpu=on_cpu)
    bytes_of = dataclasses.asdict(result)
    beside = bytes_of.pop("beside")
    row: Document = {
        "name": "plan" if isinstance(plan, Plan) else plan,
        "plan": str(parsed),
        "model": model.name,
        "frames": frames,
        "grid": list(session.shape.grid),
        "dtype": dtype_name(model.dtype),
        **{f"{key}_bytes": value for key, value in bytes_of.items()},
        "decoding_beside": beside,
        "on_cpu": on_cpu,
        "decoder": getattr(getattr(model, "decoder", None), "kind", ""),
        "peak_bytes": told.vram,
        "session_bytes": result.of_session,
        # with the process itself; a text encoder runs on the CPU, before the cache is allocated
        "ram_bytes": told.ram,
        "kept_ram_bytes": told.kept,
        "prompt_encoder_bytes": encoder_bytes(model),
    }
    limits = [(vram_gb, ram_gb)]
    if vram_gb is None and ram_gb is None:
        limits = [] if on_cpu else [(card, None) for card in CARDS]
    choice = Choice(Video(model, text, parsed, frames, size, prompt, on_cpu))
    row["recipes"] = [_row(choice, result, *limit) for limit in limits]
    return document("fit", [row], command)


def _row(choice: Choice, found: Need, vram_gb: float | None, ram_gb: float | None) -> Document:
    """The best way within the limits, or what the smallest one lacks."""
    vram, ram = (None if gb is None else 1e9 * gb for gb in (vram_gb, ram_gb))
    recipe = choice.best(vram, ram)
    told = recipe.promise
    row: Document = {
        "vram_gb": vram_gb, "ram_gb": ram_gb, "fits": recipe.fits, "weights": [*recipe.weights],
        "plan": recipe.plan, "peak_bytes": told.vram, "ram_bytes": told.ram, "sessions": 0,
    }  # fmt: skip
    if vram is not None:  # of the given plan, not of the recipe
        left = ROOM * vram - found.weights - found.decoder - found.beside_sessions
        row["sessions"] = max(0, int(left // found.of_session))
    if not recipe.fits:
        row["missing_bytes"] = 0 if vram is None else max(0.0, told.vram - ROOM * vram)
        row["missing_ram_bytes"] = 0 if ram is None else max(0.0, told.ram - ram)
    return row
