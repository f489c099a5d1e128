"""The GPU memory and RAM that a run will take: shown before it starts, and checked after."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan
from tachyscope.io.machine import memory_of, peak_gb, ram
from tachyscope.memory.predict import Need, need
from tachyscope.models.base import VideoModel

# RAM besides tensors: code that is loaded with the first video, threads, the video writer
LIBRARIES = 45_000_000


class Promise(NamedTuple):
    """The most bytes that a run takes."""

    vram: int  # of tensors on a GPU; 0 on a CPU
    ram: int  # of the process
    kept: int  # of these, what is not backed by a file, as a text encoder's mapped weights are

    def __str__(self) -> str:
        taken = f"{self.ram / 1e9:.2f} GB of RAM"
        return f"{self.vram / 1e9:.2f} GB of GPU memory and {taken}" if self.vram else taken

    def check(self, model: VideoModel) -> None:
        """Raise if the machine has less in total."""
        for name, needed, device in (
            ("GPU memory", self.vram, model.device),
            ("RAM", self.kept, torch.device("cpu")),
        ):
            there = memory_of(device)
            if there is not None and needed > there:
                raise TachyscopeError(
                    f"the run would take {needed / 1e9:.1f} GB of {name}, and there are "
                    f"{there / 1e9:.1f}: tachyscope fit with --vram and --ram shows what fits"
                )


def promise(
    model: VideoModel,
    plan: Plan | str,
    *,
    frames: int,
    size: tuple[int, int] | None = None,
    prompt: str = "",
    given: int = 0,
    follows: bool = False,
) -> Promise | None:
    """What a rollout of a loaded model will take; None if the model defines no estimate."""
    own = type(model)
    if own.on_meta is VideoModel.on_meta or own.memory_parts is VideoModel.memory_parts:
        return None
    found = need(
        model.on_meta(), plan, frames=frames, size=size, prompt=prompt, given=given,
        follows=follows,
    )  # fmt: skip
    return promised(found, model, on_cpu=model.device.type == "cpu", loaded=True)


def promised(found: Need, model: VideoModel, *, on_cpu: bool, loaded: bool = False) -> Promise:
    """The promise of a prediction; `loaded`: this process has the model already.

    A text encoder's weights are in RAM while a prompt is encoded, before the cache is allocated.
    """
    weights = found.weights + found.decoder if on_cpu else 0
    process = (ram() or 0) - (weights if loaded else 0) + LIBRARIES
    kept = process + (found.on_cpu if on_cpu else found.host)
    encoding = process + weights + encoder_bytes(model)
    return Promise(0 if on_cpu else found.peak, max(kept, encoding), kept)


def encoder_bytes(model: VideoModel) -> int:
    """Bytes of a model's text encoder in RAM."""
    return int(getattr(getattr(model, "text", None), "host_bytes", 0))


def measured(device: torch.device, told: Promise | None) -> dict[str, float]:
    """The measured peaks since `count_peak`, in GB, with the promised ones."""
    found: dict[str, float] = {}
    if device.type == "cuda":
        found["peak_gb"] = peak_gb(device)
    if (taken := ram(most=True)) is not None:
        found["ram_gb"] = taken / 1e9
    if told is not None:
        found |= {"promised_gb": told.vram / 1e9, "promised_ram_gb": told.ram / 1e9}
    return found
