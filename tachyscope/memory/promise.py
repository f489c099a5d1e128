"""What a run will take of GPU memory and of RAM: told before it starts, and held against it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan
from tachyscope.io.machine import memory_of, peak_gb, ram
from tachyscope.memory.predict import Need, need
from tachyscope.models.base import VideoModel

# of RAM, beside tensors: code that is first run with a video, the threads' and the writer's memory
LIBRARIES = 45_000_000


class Promise(NamedTuple):
    """Bytes that a run takes at most."""

    vram: int  # of tensors on a GPU; 0 on a CPU
    ram: int  # of the process
    kept: int  # of that, what no file backs: a text encoder's weights can be read again

    def __str__(self) -> str:
        taken = f"{self.ram / 1e9:.2f} GB of RAM"
        return f"{self.vram / 1e9:.2f} GB of GPU memory and {taken}" if self.vram else taken

    def check(self, model: VideoModel) -> None:
        """Raise where the machine has less in all."""
        for name, needed, device in (
            ("GPU memory", self.vram, model.device),
            ("RAM", self.kept, torch.device("cpu")),
        ):
            there = memory_of(device)
            if there is not None and needed > there:
                raise TachyscopeError(
                    f"the run would take {needed / 1e9:.1f} GB of {name}, and there are "
                    f"{there / 1e9:.1f}: tachyscope fit with --vram and --ram tells what fits"
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
    """What a rollout of a loaded model will take; None where the model does not tell."""
    own = type(model)
    if own.on_meta is VideoModel.on_meta or own.memory_parts is VideoModel.memory_parts:
        return None
    found = need(
        model.on_meta(), plan, frames=frames, size=size, prompt=prompt, given=given,
        follows=follows,
    )  # fmt: skip
    return promised(found, model, on_cpu=model.device.type == "cpu", loaded=True)


def promised(found: Need, model: VideoModel, *, on_cpu: bool, loaded: bool = False) -> Promise:
    """What comes of a prediction; `loaded` where this process has the model already.

    A text encoder's weights are in RAM while a prompt is encoded, before the cache is allocated.
    """
    weights = found.weights + found.decoder if on_cpu else 0
    process = (ram() or 0) - (weights if loaded else 0) + LIBRARIES
    kept = process + (found.on_cpu if on_cpu else found.host)
    encoding = process + weights + encoder_bytes(model)
    return Promise(0 if on_cpu else found.peak, max(kept, encoding), kept)


def encoder_bytes(model: VideoModel) -> int:
    """Of a text encoder in RAM."""
    return int(getattr(getattr(model, "text", None), "host_bytes", 0))


def measured(device: torch.device, told: Promise | None) -> dict[str, float]:
    """What was taken since the count began, in GB, beside what was promised."""
    found: dict[str, float] = {}
    if device.type == "cuda":
        found["peak_gb"] = peak_gb(device)
    if (taken := ram(most=True)) is not None:
        found["ram_gb"] = taken / 1e9
    if told is not None:
        found |= {"promised_gb": told.vram / 1e9, "promised_ram_gb": told.ram / 1e9}
    return found
