"""Train Lodge's autoencoder on pictures rendered as it goes, each of them seen several times.

    python lab/scripts/train_lodge_autoencoder.py --out out/lodge-autoencoder --minutes 9

Writes autoencoder.safetensors (float32, averaged), log.jsonl and sheet-autoencoder.png (truth,
decoded, decoded from noisy latents) into --out, each minute and at the end. --state DIR also keeps
what exact resumption needs; --resume DIR goes on from such a state and --out's weights. A run with
--decay 0 ends at its full rate, to be resumed; the last one decays. Pictures are drawn more slowly
than they are learned from: a pool of them lies on the device, and new ones, which may take a share
--drawing of the time, replace the oldest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from atrium_clips import psnr, sharpness
from torch import Generator, Tensor
from training import (
    Average,
    Clock,
    Log,
    Optimizer,
    descend,
    load_state,
    read_weights,
    save_state,
    sheet,
    write_weights,
)

from tachyscope_lab.worlds.lodge import camera
from tachyscope_lab.worlds.lodge.autoencoder import CHANNELS, STRIDE, Autoencoder
from tachyscope_lab.worlds.lodge.furniture import PERIOD
from tachyscope_lab.worlds.lodge.houses import Houses, make_houses
from tachyscope_lab.worlds.lodge.picture import SIZE, render

NOISE = 0.25  # the strongest noise on latents, whose variance is one: errors of the world model
EDGES = 0.1  # of the loss, differences between neighbouring pixels: seams of bricks and books
Render = Callable[[Houses, Tensor, Tensor, int], Tensor]


def draw(count: int, generator: Generator, device: str) -> tuple[Houses, Tensor, Tensor]:
    """Houses, poses and times of one picture each, headings and times between the steps too."""
    houses = make_houses(count, generator)
    pose = camera.make_starts(count, generator)
    pose[:, 2] += torch.rand(count, generator=generator)
    # a third as they are met in doorways: a walk ahead from the start
    ahead = torch.randint(12, (count, 1), generator=generator)
    actions = (torch.arange(12) < ahead) * (torch.rand(count, 1, generator=generator) < 0.33)
    pose = camera.walk(pose, actions.long(), 1.0)[:, -1]
    time = PERIOD * torch.rand(count, generator=generator)
    return houses.to(device), pose.to(device), time.to(device)


class Pictures:
    """A pool of rendered pictures on the device, in 8 bits, the oldest replaced by new ones."""

    def __init__(
        self, make: Render, count: int, size: int, batch: int, generator: Generator, device: str
    ) -> None:
        self.make, self.batch, self.generator, self.device = make, batch, generator, device
        self.held = torch.empty(
            count // batch * batch, 3, size, size, dtype=torch.uint8, device=device
        )
        self.made, self.seconds = 0, 0.0

    @torch.no_grad()
    def add(self) -> None:
        """Render a batch, timed until the device has done it."""
        began = time.monotonic()
        drawn = draw(self.batch, self.generator, self.device)
        pictures = self.make(*drawn, self.held.shape[-1])
        at = self.made % len(self.held)
        self.held[at : at + self.batch] = (255 * pictures).round()
        self.made += self.batch
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.seconds += time.monotonic() - began

    def take(self) -> Tensor:
        """A batch of those that there are, in 0..1."""
        filled = min(self.made, len(self.held))
        row = torch.randint(filled, (self.batch,), device=self.device)
        return self.held[row].float() / 255


def edges(pictures: Tensor) -> tuple[Tensor, Tensor]:
    return pictures.diff(dim=-1), pictures.diff(dim=-2)


@torch.no_grad()
def judge(
    model: Autoencoder, size: int, device: str, count: int
) -> tuple[dict[str, float], list[Tensor]]:
    """Quality on pictures of unseen houses, the same ones at every call."""
    model.eval()
    generator = Generator().manual_seed(2**31)
    scores: dict[str, list[Tensor]] = {}
    rows: list[Tensor] = []
    at_once = min(count, 16)
    for _ in range(count // at_once):
        truth = render(*draw(at_once, generator, device), size)
        latents = model.encode(truth)
        clean = model.decode(latents).clamp(0, 1)
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        noisy = model.decode(latents + 0.2 * noise).clamp(0, 1)
        found = {
            "psnr": psnr(clean, truth), "psnr_noisy": psnr(noisy, truth),
            "sharp": sharpness(clean) / sharpness(truth),
            "mean": latents.mean((0, 2, 3)).abs(), "var": latents.var((0, 2, 3)),
        }  # fmt: skip
        for key, value in found.items():
            scores.setdefault(key, []).append(value)
        rows = [truth[:8], clean[:8], noisy[:8]]
    model.train()
    worst = torch.cat(scores["psnr"]).min().item()
    return {key: torch.cat(value).mean().item() for key, value in scores.items()} | {
        "psnr_worst": worst
    }, rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--steps", type=int, default=10**9, help="end after so many, if sooner")
    parser.add_argument("--decay", type=float, default=0.3, help="last share of the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=SIZE, help="pixels of a picture's side")
    parser.add_argument("--channels", type=int, default=CHANNELS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pool", type=int, default=32768, help="pictures kept to learn from")
    parser.add_argument("--fill", type=float, default=20.0, help="seconds of filling it at first")
    parser.add_argument(
        "--drawing", type=float, default=0.4, help="the most of the time that new pictures take"
    )
    parser.add_argument("--judged", type=int, default=128, help="pictures that are scored")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args(arguments)
    if args.size % STRIDE:
        parser.error(f"--size is a multiple of {STRIDE}, got {args.size}")
    if args.pool < args.batch:
        parser.error(f"--pool holds a batch of {args.batch} at least, got {args.pool}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    device = args.device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(args.seed)
    clock = Clock(args.minutes, args.decay, warm=200, reserve=15)
    log = Log(args.out / "log.jsonl")
    model = Autoencoder(args.channels).to(device, memory_format=torch.channels_last)
    average = Average({"autoencoder": model})
    optimizer = Optimizer({"autoencoder": model}, fused=device == "cuda")
    first = step = 0
    if args.resume:
        model.load_state_dict(read_weights(args.out, "autoencoder"))
        first = step = load_state(args.resume, average, optimizer) or 0
    # a resumed run sees other houses and other noise than the one before
    seed = args.seed * 1_000_003 + step
    torch.manual_seed(seed)
    generator = Generator().manual_seed(seed)
    make, forward = render, model.forward
    if not args.no_compile:
        make, forward = torch.compile(render), torch.compile(forward)
    log(parameters=sum(p.numel() for p in average.live), step=step, torch=torch.__version__)

    def write() -> None:
        write_weights(average.weights("autoencoder"), args.out, "autoencoder", torch.float32)
        if args.state:
            save_state(args.state, average, optimizer, step)

    pool = Pictures(make, args.pool, args.size, args.batch, generator, device)
    while not pool.made or (clock.elapsed < args.fill and pool.made < len(pool.held)):
        pool.add()
    # what compiling took is no part of drawing's share
    filled, pool.seconds, begun = pool.made, 0.0, clock.elapsed
    log(pool=filled, seconds=begun)
    saved, logged, logged_step = clock.elapsed, clock.elapsed, step
    while clock.share < 1 and step - first < args.steps:
        if pool.seconds <= args.drawing * (clock.elapsed - begun):
            pool.add()
        truth = pool.take()
        noise = NOISE * torch.rand(len(truth), 1, 1, 1, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            made = forward(truth.contiguous(memory_format=torch.channels_last), noise)
        made = made.float()
        square = F.mse_loss(made, truth)
        parts = zip(edges(made), edges(truth), strict=True)
        sharp = sum(F.l1_loss(ours, theirs) for ours, theirs in parts)
        # the square is what the target counts; a little of the absolute keeps flat walls flat
        loss = square + 0.05 * F.l1_loss(made, truth) + EDGES * sharp
        norm = descend(loss, average, optimizer, args.rate * clock.rate(step - first))
        step += 1
        if step == first + 1 or clock.elapsed - logged > 5:
            frames = (step - logged_step) * args.batch / max(clock.elapsed - logged, 1e-3)
            logged, logged_step = clock.elapsed, step
            log(step=step, seconds=logged, loss=loss.item(), mse=square.item(), norm=norm.item(),
                frames_s=round(frames), drawn=pool.made,
                drawn_s=round((pool.made - filled) / max(pool.seconds, 1e-3)))  # fmt: skip
        if clock.elapsed - saved > 60:
            saved = clock.elapsed
            write()

    average.swap()
    score, rows = judge(model, args.size, device, args.judged)
    average.swap()
    write()
    log(step=step, seconds=clock.elapsed, final=True, **score)
    log.file.close()
    sheet(rows, args.out / "sheet-autoencoder.png")


if __name__ == "__main__":
    main()
