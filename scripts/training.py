"""What the training scripts share: the schedule by the clock, averages, files, sheets."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LARGEST = 14 * 2**20  # bytes of a weights file; more is split


class Clock:
    """Warm up over steps, hold, then fall to zero over the last share of the minutes given.

    A run with `decay` 0 ends at full rate, to be resumed; the last one decays.
    """

    def __init__(self, minutes: float, decay: float, warm: int, reserve: float) -> None:
        self.start = time.monotonic()
        self.end = max(minutes * 60 - reserve, 1.0)  # the reserve is for what follows training
        self.decay, self.warm = decay, warm

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def share(self) -> float:
        return self.elapsed / self.end

    def rate(self, step: int) -> float:
        """The factor of the learning rate, `step` counted from this run's start."""
        fall = min(1.0, (1 - self.share) / self.decay) if self.decay else 1.0
        return min(1.0, (step + 1) / self.warm) * max(fall, 0.0)


class Average:
    """An exponential moving average of a module's parameters, in float32; buffers are copied."""

    def __init__(self, modules: dict[str, nn.Module], decay: float = 0.998) -> None:
        self.modules, self.decay, self.count = modules, decay, 0
        self.live = [p for m in modules.values() for p in m.parameters()]
        self.mean = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self) -> None:
        self.count += 1
        pull = 1 - min(self.decay, self.count / (self.count + 10))
        torch._foreach_lerp_(self.mean, self.live, pull)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange live and mean weights; call again to go back."""
        for live, mean in zip(self.live, self.mean, strict=True):
            kept = live.detach().clone()
            live.copy_(mean)
            mean.copy_(kept)

    def weights(self, name: str) -> dict[str, Tensor]:
        """The averaged state of one module."""
        at = {id(p): mean for p, mean in zip(self.live, self.mean, strict=True)}
        module = self.modules[name]
        named = {key: at[id(p)] for key, p in module.named_parameters()}
        return {**dict(module.named_buffers()), **named}


class Log:
    """JSON lines, on disk and on the screen as they come."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a")

    def __call__(self, **row: Any) -> None:
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


def save_atomically(tensors: dict[str, Tensor], path: Path) -> None:
    """A file that is whole or not there, even if the run is killed."""
    part = path.with_suffix(".part")
    save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, part)
    os.replace(part, path)


def write_weights(tensors: dict[str, Tensor], folder: Path, name: str, dtype: torch.dtype) -> None:
    """Weights in safetensors, in as many files as keep each small."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Tensor]] = [{}]
    room = LARGEST
    for key, value in tensors.items():
        value = value.to(dtype) if value.is_floating_point() else value
        if value.nbytes > room:
            files.append({})
            room = LARGEST
        files[-1][key] = value
        room -= value.nbytes
    for i, part in enumerate(files):
        tail = f"-{i + 1:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        save_atomically(part, folder / f"{name}{tail}.safetensors")


def read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of `name`, from one file or several."""
    files = sorted(
        [*folder.glob(f"{name}.safetensors"), *folder.glob(f"{name}-*-of-*.safetensors")]
    )
    if not files:
        raise SystemExit(f"no {name}.safetensors in {folder}: give a folder that training wrote")
    return {key: value for file in files for key, value in load_file(file).items()}


def flat(tensors: Iterable[tuple[str, Tensor]], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{key}": value for key, value in tensors}


def sheet(rows: list[Tensor], path: Path) -> None:
    """A picture of rows of frames, each [T, 3, S, S] in 0..1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [torch.cat(list(row.float().cpu().clamp(0, 1)), -1) for row in rows]
    picture = (torch.cat(lines, -2) * 255).round().byte().permute(1, 2, 0)
    Image.fromarray(np.ascontiguousarray(picture.numpy())).save(path)
