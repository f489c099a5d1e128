"""Train Atrium's autoencoder on pictures rendered as it goes.

    python lab/scripts/train_atrium_autoencoder.py --out out/autoencoder --minutes 3

Writes autoencoder.safetensors (float32, averaged), log.jsonl and sheet-autoencoder.png (truth,
decoded, decoded from noisy latents) into --out; --resume DIR goes on from such a folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import atrium_clips
import torch
from torch import Generator, Tensor, nn
from training import Average, Clock, Log, read_weights, sheet, write_weights

from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.autoencoder import Autoencoder

NOISE = 0.25  # the strongest noise on latents, whose variance is one: errors of the world model


def draw(count: int, generator: Generator, device: str) -> tuple[atrium.Rooms, Tensor, Tensor]:
    """Rooms, poses and times of one picture each, headings between the steps too."""
    rooms = atrium.make_rooms(count, generator)
    pose = atrium.make_starts(count, generator)
    pose[:, 2] += torch.rand(count, generator=generator) * (
        torch.rand(count, generator=generator) < 0.5
    )
    time = torch.randint(atrium.PERIOD, (count,), generator=generator)
    return rooms.to(device), pose.to(device), time.to(device)


@torch.no_grad()
def judge(
    model: Autoencoder, device: str, count: int = 256
) -> tuple[dict[str, float], list[Tensor]]:
    """Quality on pictures of unseen rooms, the same ones at every call."""
    model.eval()
    generator = Generator().manual_seed(2**31)
    scores: dict[str, list[Tensor]] = {"psnr": [], "psnr_noisy": [], "mean": [], "var": []}
    rows: list[Tensor] = []
    for _ in range(count // 32):
        truth = atrium.render(*draw(32, generator, device))
        latents = model.encode(truth)
        clean = model.decode(latents).clamp(0, 1)
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        noisy = model.decode(latents + 0.2 * noise).clamp(0, 1)
        scores["psnr"].append(atrium_clips.psnr(clean, truth))
        scores["psnr_noisy"].append(atrium_clips.psnr(noisy, truth))
        scores["mean"].append(latents.mean((0, 2, 3)).abs())
        scores["var"].append(latents.var((0, 2, 3)))
        rows = [truth[:10], clean[:10], noisy[:10]]
    model.train()
    return {key: torch.cat(value).mean().item() for key, value in scores.items()}, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--decay", type=float, default=0.3, help="last share of the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--decoder-only", action="store_true", help="keep the latents that a world model knows"
    )
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    generator = Generator().manual_seed(args.seed)
    clock = Clock(args.minutes, args.decay, warm=200, reserve=5)
    log = Log(args.out / "log.jsonl")
    model = Autoencoder().to(args.device, memory_format=torch.channels_last)
    if args.resume:
        model.load_state_dict(read_weights(args.resume, "autoencoder"))
    if args.decoder_only:
        model.encoder.requires_grad_(False)
    average = Average({"autoencoder": model})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.rate, betas=(0.9, 0.99), weight_decay=1e-4,
        fused=args.device == "cuda",
    )  # fmt: skip
    render, forward = atrium.render, model.forward
    if not args.no_compile:
        render, forward = torch.compile(render), torch.compile(forward)

    def write() -> None:
        write_weights(average.weights("autoencoder"), args.out, "autoencoder", torch.float32)

    step, saved, logged = 0, clock.elapsed, 0.0
    model.norm.train(not args.decoder_only)
    while clock.share < 1:
        with torch.no_grad():
            truth = render(*draw(args.batch, generator, args.device))
        noise = NOISE * torch.rand(len(truth), 1, 1, 1, device=args.device)
        with torch.autocast(args.device, torch.bfloat16):
            made = forward(truth.contiguous(memory_format=torch.channels_last), noise)
        error = made.float() - truth
        # the square is what the target counts; a little of the absolute keeps flat walls flat
        loss = error.square().mean() + 0.05 * error.abs().mean()
        for group in optimizer.param_groups:
            group["lr"] = args.rate * clock.rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update()
        step += 1
        if step == 1 or clock.elapsed - logged > 5:
            logged = clock.elapsed
            log(step=step, seconds=logged, loss=loss.item(), mse=error.square().mean().item())
        if clock.elapsed - saved > 60:
            saved = clock.elapsed
            write()

    average.swap()
    score, rows = judge(model, args.device)
    average.swap()
    write()
    log(step=step, seconds=clock.elapsed, final=True, **score)
    sheet(rows, args.out / "sheet-autoencoder.png")


if __name__ == "__main__":
    main()
