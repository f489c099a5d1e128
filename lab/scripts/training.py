"""What the training scripts share: the schedule by the clock, averages, files, sheets."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import atrium_clips
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LARGEST = 14 * 2**20  # bytes of a weights file; more is split


def check_device(device: str) -> None:
    """Stop at once where training would fail or learn from wrong pictures."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is usable here: give --device cpu")
    generator = torch.Generator().manual_seed(0)
    clips = atrium_clips.make_clips(4, 1, generator)
    here, there = (atrium_clips.film(c, 64)[:, 0].cpu() for c in (clips, clips.to(device)))
    # a ray that meets an edge may fall to either side of it
    wrong = ((here - there).abs().amax(1) > 1e-3).float().mean().item()
    if wrong > 1e-3:
        raise SystemExit(f"{wrong:.2%} of the pixels drawn on {device} are not those of the CPU")


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
        ctx = {id(p): mean for p, mean in zip(self.live, self.mean, strict=True)}
        module = self.modules[name]
        named = {key: ctx[id(p)] for key, p in module.named_parameters()}
        return {**dict(module.named_buffers()), **named}


def orthogonal(x: Tensor) -> Tensor:
    """Matrices [N, a, b] with their singular values brought near one (Newton-Schulz, quintic)."""
    tall = x.shape[1] > x.shape[2]
    y = x.mT if tall else x
    y = y.bfloat16() if x.is_cuda else y
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)


class Muon:
    """Momentum whose step is made orthogonal, for matrices; those of one shape go together.

    The step is scaled to the size of Adam's, so that both take one learning rate.
    """

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.01):
        self.momentum, self.decay, self.rate = momentum, decay, 0.0
        shapes = sorted({tuple(p.shape) for p in params})
        self.groups = [[p for p in params if tuple(p.shape) == shape] for shape in shapes]
        self.trace = [torch.zeros_like(torch.stack(list(group))) for group in self.groups]

    @torch.no_grad()
    def step(self) -> None:
        for group, trace in zip(self.groups, self.trace, strict=True):
            grad = torch.stack([p.grad for p in group])
            trace.lerp_(grad, 1 - self.momentum)
            move = orthogonal(grad.lerp(trace, self.momentum))
            size = 0.2 * max(move.shape[1:]) ** 0.5
            torch._foreach_mul_(group, 1 - self.rate * self.decay)
            torch._foreach_add_(group, list(move.unbind(0)), alpha=-self.rate * size)

    def state(self) -> dict[str, Tensor]:
        return {f"trace.{i}": trace for i, trace in enumerate(self.trace)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for i, trace in enumerate(self.trace):
            trace.copy_(tensors[f"trace.{i}"])


class Optimizer:
    """Muon for the matrices inside the layers, AdamW for all else."""

    def __init__(self, modules: dict[str, nn.Module], fused: bool) -> None:
        named = [(f"{m}.{k}", p) for m, mod in modules.items() for k, p in mod.named_parameters()]
        inner = [p for k, p in named if (".blocks." in k or ".layers." in k) and p.dim() == 2]
        chosen = {id(p) for p in inner}
        self.rest = [p for _, p in named if id(p) not in chosen]
        self.muon = Muon(inner)
        self.adam = torch.optim.AdamW(self.rest, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    def step(self, rate: float) -> None:
        self.muon.rate = rate
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.muon.step()
        self.adam.step()

    def zero(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        for group in self.muon.groups:
            for p in group:
                p.grad = None

    def state(self) -> dict[str, Tensor]:
        values = self.muon.state()
        for i, p in enumerate(self.rest):
            values |= {f"adam.{i}.{key}": value for key, value in self.adam.state[p].items()}
        return values

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.muon.restore(tensors)
        for i, p in enumerate(self.rest):
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors[f"adam.{i}.{key}"]
                # a fused step counts on the device
                far = key != "step" or self.adam.defaults["fused"]
                self.adam.state[p][key] = value.to(p.device) if far else value


def descend(loss: Tensor, average: Average, optimizer: Optimizer, rate: float) -> Tensor:
    """One step down the loss, then its average; the norm of the gradient, which is cut at 1."""
    optimizer.zero()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(average.live, 1.0)
    optimizer.step(rate)
    average.update()
    return norm


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
    """Weights in safetensors; in several files and an index of them where one would be large."""
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
    if len(files) == 1:
        return save_atomically(files[0], folder / f"{name}.safetensors")
    names = [f"{name}-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for part, file in zip(files, names, strict=True):
        save_atomically(part, folder / file)
    where = {key: file for part, file in zip(files, names, strict=True) for key in part}
    total = sum(value.nbytes for part in files for value in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=1))


def read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of `name`, from one file or several."""
    files = sorted(
        [*folder.glob(f"{name}.safetensors"), *folder.glob(f"{name}-*-of-*.safetensors")]
    )
    if not files:
        raise SystemExit(f"no {name}.safetensors in {folder}: give a folder that training wrote")
    return {key: value for file in files for key, value in load_file(file).items()}


def sheet(rows: list[Tensor], path: Path) -> None:
    """A picture of rows of frames, each [T, 3, S, S] in 0..1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [torch.cat(list(row.float().cpu().clamp(0, 1)), -1) for row in rows]
    picture = (torch.cat(lines, -2) * 255).round().byte().permute(1, 2, 0)
    Image.fromarray(np.ascontiguousarray(picture.numpy())).save(path)


def save_state(folder: Path, average: Average, optimizer: Optimizer, step: int) -> None:
    """What exact resumption needs, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"step": torch.tensor(step), **optimizer.state()}
    for i, (live, mean) in enumerate(zip(average.live, average.mean, strict=True)):
        tensors |= {f"live.{i}": live, f"mean.{i}": mean}
    save_atomically(tensors, folder / "state.safetensors")


@torch.no_grad()
def load_state(folder: Path, average: Average, optimizer: Optimizer) -> int | None:
    """Take up a state, where the folder holds one; the number of steps that were made."""
    if not (folder / "state.safetensors").is_file():
        return None
    tensors = load_file(folder / "state.safetensors")
    for i, (live, mean) in enumerate(zip(average.live, average.mean, strict=True)):
        live.copy_(tensors[f"live.{i}"])
        mean.copy_(tensors[f"mean.{i}"])
    optimizer.restore(tensors)
    average.count = 10**6  # an average long since warm
    return int(tensors["step"])
