"""Train Atrium's tokenizer: pictures to residual-quantised codes and back.

    python lab/scripts/train_atrium_tokenizer.py --out out/tokenizer --minutes 5.5

At first the convolutions learn without codes; then codebooks are laid into what the encoder makes
and follow it as running means, entries that nothing uses being moved to where something is.

Writes config.json, tokenizer.safetensors (float16, averaged), log.jsonl and sheet-tokenizer.png
(truth, decoded) into --out; --resume DIR goes on from such a folder. A run whose pictures are not
good enough by `CHECKS` stops there.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import atrium_clips
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from train_atrium_autoencoder import draw
from training import Average, Clock, Log, check_device, read_weights, sheet, write_weights

from tachyscope.models.atrium import world as atrium
from tachyscope.models.vila_u.vqgan import Codebooks, PixelConfig, RqVae

NAME = "tokenizer"
CHECKS = {0.3: 22.0, 0.6: 27.0}  # share of the time -> dB in training that must have been reached


def pixel_config(config: dict[str, Any]) -> PixelConfig:
    """The convolutions of a tokenizer's config.json, which has lists for tuples."""
    values = config["pixels"].items()
    return PixelConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in values})


def run(module: nn.Module, x: Tensor) -> Tensor:
    """The module in x's dtype: under autocast group norms would double the traffic."""
    params = {name: p.to(x.dtype) for name, p in module.named_parameters()}
    return functional_call(module, params, (x,))


class Following:
    """Codebooks as running means of what is assigned to their entries."""

    def __init__(self, books: Codebooks, decay: float = 0.99) -> None:
        self.tables = [book.weight for book in books.codebooks]
        self.decay = decay
        entries = [table[:-1] for table in self.tables]
        # as if each entry had been used a little, so that a resumed run starts where it is
        self.counts = [entry.new_full((len(entry),), 16.0) for entry in entries]
        self.sums = [16.0 * entry.detach().clone() for entry in entries]

    @torch.no_grad()
    def lay(self, x: Tensor, rounds: int = 8) -> None:
        """Begin with k-means of vectors x [n, dim], one codebook after another."""
        for d, table in enumerate(self.tables):
            entries = x[torch.randperm(len(x), device=x.device)[: len(table) - 1]].clone()
            for _ in range(rounds):
                near = torch.cdist(x, entries).argmin(1)
                total = torch.zeros_like(entries).index_add_(0, near, x)
                count = torch.bincount(near, minlength=len(entries))[:, None]
                entries = torch.where(count > 0, total / count.clamp(min=1), entries)
            table[:-1] = entries
            self.counts[d].fill_(16.0)
            self.sums[d].copy_(16.0 * entries)
            x = x - entries[torch.cdist(x, entries).argmin(1)]

    @torch.no_grad()
    def follow(self, x: Tensor, codes: Tensor, revive: bool) -> None:
        """Move towards vectors x [n, dim] that were given codes [n, D]."""
        for d, table in enumerate(self.tables):
            counts, sums, used = self.counts[d], self.sums[d], codes[:, d]
            one = torch.ones_like(used, dtype=counts.dtype)
            counts.lerp_(torch.zeros_like(counts).index_add_(0, used, one), 1 - self.decay)
            sums.lerp_(torch.zeros_like(sums).index_add_(0, used, x), 1 - self.decay)
            if revive:
                dead = counts < 0.02 * counts.mean()
                others = x[torch.randint(len(x), (len(counts),), device=x.device)]
                fresh = torch.where(dead, counts.mean() * 0.2, counts)
                sums.copy_(torch.where(dead[:, None], others * fresh[:, None], sums))
                counts.copy_(fresh)
            table[:-1] = sums / counts.clamp(min=1e-5)[:, None]
            x = x - table[used]


class Pictures:
    """Pictures in the device's memory, the oldest replaced by new ones."""

    def __init__(
        self, count: int, batch: int, size: int, seed: int, device: str, compiled: bool
    ) -> None:
        self.batch, self.device, self.size = batch, device, size
        self.render = torch.compile(atrium.render) if compiled else atrium.render
        self.generator = Generator().manual_seed(seed)
        shape = (max(count // batch, 1) * batch, 3, size, size)
        self.levels = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.made = 0

    @torch.no_grad()
    def put(self) -> None:
        at = self.made % len(self.levels)
        new = self.render(*draw(self.batch, self.generator, self.device), self.size)
        self.levels[at : at + self.batch] = (new * 255).round().byte()
        self.made += self.batch

    def take(self, dtype: torch.dtype) -> Tensor:
        """A batch [B, 3, S, S] in -1..1, channels last."""
        filled = min(self.made, len(self.levels))
        rows = torch.randint(filled, (self.batch,), device=self.device)
        pictures = self.levels[rows].to(dtype) / 127.5 - 1
        return pictures.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def settle(model: RqVae, average: Average, following: Following, pool: Pictures) -> None:
    """Take the averaged convolutions, with codebooks that fit them rather than an average."""
    kept = {name: book.clone() for name, book in model.quantizer.state_dict().items()}
    average.swap()
    model.quantizer.load_state_dict(kept)
    following.decay = 0.9
    for _ in range(40):
        z = model.encode(pool.take(torch.float32)).flatten(0, -2)
        following.follow(z, model.quantizer.quantise(z), revive=False)
    for live, mean in zip(average.live, average.mean, strict=True):
        mean.copy_(live)


@torch.no_grad()
def judge(
    model: RqVae, size: int, device: str, count: int = 256
) -> tuple[dict[str, float], list[Tensor]]:
    """Quality on pictures of unseen rooms, and how many codes' worth of entropy they use."""
    generator = Generator().manual_seed(2**31)
    pictures, codes, rows = [], [], []
    for _ in range(count // 32):
        truth = atrium.render(*draw(32, generator, device), size)
        codes.append(model.quantizer.quantise(model.encode(truth * 2 - 1)))
        made = (model.decode(model.quantizer.sum(codes[-1])) * 0.5 + 0.5).clamp(0, 1)
        pictures.append(atrium_clips.psnr(made, truth))
        rows = [truth[:12], made[:12], truth[12:24], made[12:24]]
    scores = {"psnr_tokenizer": torch.cat(pictures).mean().item()}
    for d, used in enumerate(torch.cat(codes).flatten(0, -2).unbind(-1)):
        share = torch.bincount(used).float() / len(used)
        scores[f"perplexity_{d}"] = torch.special.entr(share).sum().exp().item()
        scores[f"used_{d}"] = float((share > 0).sum())
    return scores, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=5.5)
    parser.add_argument("--decay", type=float, default=0.4, help="last share of the time")
    parser.add_argument("--plain", type=float, default=0.3, help="first share, without codes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--commit", type=float, default=0.05)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--codes", type=int, default=512)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--channels", type=int, default=24)
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 2, 4, 4])
    parser.add_argument("--size", type=int, default=atrium.SIZE)
    parser.add_argument("--pool", type=int, default=16384, help="pictures kept")
    parser.add_argument("--every", type=int, default=3, help="steps between new pictures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    device = args.device
    check_device(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    clock = Clock(args.minutes, args.decay, warm=200, reserve=8)
    log = Log(args.out / "log.jsonl")
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    pixels = PixelConfig(
        ch=args.channels, ch_mult=tuple(args.multiples), num_res_blocks=1, attn_resolutions=(),
        z_channels=args.dim, resolution=args.size, groups=min(8, args.channels), encoder=True,
    )  # fmt: skip
    config = {"pixels": asdict(pixels), "books": [args.depth, args.codes, args.dim]}
    if args.resume:
        config = json.loads((args.resume / "config.json").read_text())
        pixels = pixel_config(config)
    size = pixels.resolution
    model = RqVae(pixels, *config["books"]).to(device, memory_format=torch.channels_last)
    apply = run if args.no_compile else torch.compile(run, dynamic=False)
    books = model.quantizer.requires_grad_(False)
    if args.resume:
        model.load_state_dict(read_weights(args.resume, NAME))
    following = Following(books)
    average = Average({NAME: model})
    learnt = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        learnt, lr=args.rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=device == "cuda"
    )
    log(parameters=sum(p.numel() for p in model.parameters()), torch=torch.__version__)

    (args.out / "config.json").write_text(json.dumps(config, indent=1))

    def write() -> None:
        write_weights(average.weights(NAME), args.out, NAME, torch.float16)

    pool = Pictures(
        args.pool, args.batch, size, args.seed * 1_000_003 + 1, device, not args.no_compile
    )
    while pool.made < min(args.pool // 4, 32 * args.batch):
        pool.put()
    step, saved, logged, coded = 0, clock.elapsed, 0.0, bool(args.resume)
    checks = dict(CHECKS) if device == "cuda" else {}  # a CPU only tries the script out
    while clock.share < 1:
        truth = pool.take(dtype)
        z = apply(model.encoder, truth).movedim(1, -1).float()
        flat = z.detach().flatten(0, -2)
        if not coded and clock.share > args.plain:
            following.lay(flat[torch.randperm(len(flat), device=device)[:16384]])
            coded = True
        lost = z.new_zeros(())
        if coded:
            codes = books.quantise(flat)
            sums = books.sums(codes).view(*z.shape[:-1], -1, z.shape[-1])
            # relative to the spread of z, so that shrinking z gains nothing
            spread = flat.var(0).mean()
            lost = (z[..., None, :] - sums).square().mean() / spread
            vectors = z + (sums[..., -1, :] - z).detach()
            following.follow(flat, codes, revive=step % 10 == 0 and clock.share < 0.7)
        else:
            vectors = z
        made = run(model.post_quant_conv, vectors.movedim(-1, 1).to(dtype))
        error = (apply(model.decoder, made) - truth).float()
        # the square is what the target counts; a little of the absolute keeps flat walls flat
        loss = error.square().mean() + 0.05 * error.abs().mean() + args.commit * lost
        for group in optimizer.param_groups:
            group["lr"] = args.rate * clock.rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        average.update()
        step += 1
        if step % args.every == 0:
            pool.put()
        if step == 1 or clock.elapsed - logged > 5:
            logged = clock.elapsed
            db = -10 * (error.square().mean() / 4).log10().item()
            used = [int((c > 0.05 * c.mean()).sum()) for c in following.counts]
            log(step=step, seconds=logged, loss=loss.item(), db=db, lost=lost.item(), used=used)
            for share in [share for share in checks if clock.share > share]:
                least = checks.pop(share)
                if not db >= least:
                    raise SystemExit(f"{db:.1f} dB after {share:.0%} of the time, not {least}")
        if clock.elapsed - saved > 60:
            saved = clock.elapsed
            write()

    settle(model, average, following, pool)
    write()
    score, rows = judge(model, size, device)
    sheet(rows, args.out / "sheet-tokenizer.png")
    log(step=step, seconds=clock.elapsed, final=True, **score)


if __name__ == "__main__":
    main()
