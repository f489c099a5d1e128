"""Train the town's world model (tachyscope_lab.worlds) on walks that are rendered as it goes.

    python lab/scripts/train_second_world.py --out out/town --minutes 40

The recipe is that of Atrium's (train_atrium_world.py): every clip laid out twice, clean and noisy,
a share --own of the steps on contexts that the model drew itself, jumps of position. Latents are
pixels, there is no prompt, and no context is a rollout. The model is told where its window stands.
One CPU core is enough: give it --rows 1 --width 96 --layers 4.

--out gets a folder that loads as a model (config.json, averaged weights), log.jsonl and sheet.png:
for some unseen towns a row of the truth, one of frames that are each made from the true past, one
of a free rollout, and one with a window of 8 frames. Weights are written every minute. --resume DIR
goes on from the weights in such a folder. A run whose loss has not fallen after an eighth of its
time ends itself.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from train_atrium_world import (
    Batch,
    Packing,
    Playing,
    Teaching,
    choose_gap,
    choose_length,
    initialise,
    teach,
)
from training import (
    Average,
    Clock,
    Log,
    Optimizer,
    descend,
    read_weights,
    sheet,
    write_weights,
)

from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.plain_parts import BytesText
from tachyscope.models.wan.sampler import noised, schedule
from tachyscope.models.wan.transformer import WanCausal
from tachyscope_lab.worlds import town
from tachyscope_lab.worlds.model import (
    WEIGHTS,
    TownCausal,
    as_model,
    make_config,
    to_latents,
    to_pictures,
)

PACES = 1.0, 1.0, 0.5, 0.25
WALKS, RENEW = 2048, 200  # walks that are kept, and steps between new ones
# how often each action is begun, and goes on: ways around the map, short ways up and down, rests
BEGUN = 0.5, 1.0, 1.0, 2.0, 2.0
LASTS = 0.6, 0.7, 0.7, 0.94, 0.94
BACK = 0, 2, 1, 4, 3  # what takes an action back
FALLEN = 0.8  # of its first value, what the loss must have fallen below
GIVEN, WAY = "." + "d" * town.AROUND, "d" * town.AROUND + "wwaaaasssaaaawdd"  # of the sheets


@dataclass(frozen=True)
class Walks:
    """Walks [N, T] of the window, from anywhere."""

    place: Tensor  # [N, T, 2]
    time: Tensor

    def draw(self, count: int, length: int, generator: Generator, render: Render) -> Batch:
        """Crops of walks, each through a town of its own; actions are places."""
        device = self.place.device

        def choose(options: int) -> Tensor:
            return torch.randint(options, (count, 1), generator=generator, device=device)

        row = choose(len(self.place))
        at = choose(self.place.shape[1] - length + 1) + torch.arange(length, device=device)
        place = self.place[row, at]
        towns = town.make_towns(count, generator)
        scene = torch.arange(count, device=device).repeat_interleave(length)
        pictures = render(towns.rows(scene), place.flatten(0, 1), self.time[row, at].flatten())
        latents = to_latents(pictures).unflatten(0, (count, length))
        none = torch.zeros(count, length, 1, device=device)
        one = torch.ones(1, 1, 1, 1, device=device)
        return Batch(latents, latents, town.told(place), none, one, torch.zeros_like(row))


Render = Callable[[town.Towns, Tensor, Tensor], Tensor]


def make_walks(count: int, frames: int, generator: Generator) -> Walks:
    """Actions that last, are often taken back, and are held for as many frames as make a step."""
    device = generator.device
    begun, lasts = (torch.tensor(x, device=device) for x in (BEGUN, LASTS))
    back = torch.tensor(BACK, device=device)

    def uniform() -> Tensor:
        return torch.rand(count, frames, generator=generator, device=device)

    drawn = torch.multinomial(begun, count * frames, True, generator=generator)
    drawn, turns, goes_on = drawn.view(count, frames), uniform() < 0.35, uniform()
    rows = [drawn[:, 0]]
    for t in range(1, frames):
        before = rows[-1]
        new = torch.where(turns[:, t], back[before], drawn[:, t])
        rows.append(torch.where(goes_on[:, t] < lasts[before], before, new))
    which = torch.randint(len(PACES), (count,), generator=generator, device=device)
    pace = torch.tensor(PACES, device=device)[which, None]
    frame = torch.arange(frames, device=device)
    held = (frame * pace).long()
    actions = torch.stack(rows, 1).gather(1, held)
    place = town.walk(town.make_starts(count, generator), actions, pace)
    return Walks(place, pace * frame)


@torch.no_grad()
def play(
    model: WanCausal, adapter: WanModel, context: Tensor, truth: Tensor, actions: Tensor,
    given: int, window: int = 0, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Latents [B, C, T, h, w] as the sampler makes them, the first `given` frames being true.

    With given < 0 each later frame is made after a clean pass over the true one before it.
    """
    shape, frames, device = adapter.shape(), truth.shape[2], truth.device
    keys, values = model.keys_values(context.expand(len(truth), -1, -1))
    session = Playing(adapter.rope(shape), shape, keys, values, frames, window)
    generator = Generator(device).manual_seed(seed)
    made = []

    def run(x: Tensor, t: float) -> Tensor:
        at = slice(session.frame, session.frame + 1)
        return model(session, x, torch.full((len(x), 1), t, device=device), actions[:, at])

    for i in range(frames):
        session.frame = i
        session.begin()
        clean = true = truth[:, :, i : i + 1]
        if i >= abs(given):
            for t, sigma in schedule(model.config):
                noise = torch.randn(true.shape, generator=generator, device=device)
                clean = run(noised(clean, noise, sigma) if sigma < 1 else noise, t)
        run(true if given < 0 else clean, 0.0)
        made.append(clean)
    return torch.cat(made, 2)


def judge(
    model: WanCausal, adapter: WanModel, context: Tensor, towns: int, path: Path
) -> dict[str, float]:
    """dB to the truth in unseen towns, and a sheet: around the map, around again, then about."""
    device = context.device
    generator = Generator().manual_seed(2**31)
    letters = GIVEN + WAY
    actions = town.letters(letters).expand(towns, -1)
    place = town.walk(town.make_starts(towns, generator), actions).to(device)
    time = torch.arange(len(letters), device=device).float()
    truth = town.film(town.make_towns(towns, generator).to(device), place, time)
    actions = town.told(place)
    latents, given = to_latents(truth).transpose(1, 2).contiguous(), len(GIVEN)
    videos, scores = {"truth": truth}, dict[str, float]()
    for name, first, window in (("forced", -given, 0), ("dense", given, 0), ("window", given, 8)):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            made = play(model, adapter, context, latents, actions, first, window)
        videos[name] = to_pictures(made.transpose(1, 2).float()).clamp(0, 1)
        error = (videos[name] - truth).square().mean((2, 3, 4)).clamp(min=1e-10)
        db = -10 * error.log10()
        scores[f"{name}_db"] = db[:, given:].mean().item()
        scores[f"{name}_again_db"] = db[:, given + 8 : given + town.AROUND].mean().item()
    shown = [0, *torch.linspace(given, len(letters) - 1, 15).long().tolist()]
    rows = [video[i, shown] for i in range(min(4, towns)) for video in videos.values()]
    sheet([F.interpolate(row, scale_factor=3) for row in rows], path)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--reserve", type=float, default=40.0, help="seconds left for the sheet")
    parser.add_argument("--decay", type=float, default=0.25, help="last share of the time")
    parser.add_argument("--begin", type=float, default=0.0, help="share of the whole plan done")
    parser.add_argument("--finish", type=float, default=1.0, help="share of the plan at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--row", type=int, default=64, help="frames of the longest context")
    parser.add_argument("--rows", type=int, default=4, help="as many frames of clips a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--own", type=float, default=0.2, help="steps on the model's own context")
    parser.add_argument("--towns", type=int, default=16, help="of the sheets")
    parser.add_argument("--judge", type=float, default=150.0, help="seconds between sheets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    device = args.device

    clock = Clock(args.minutes, args.decay, 100 if args.resume else 300, args.reserve)
    log = Log(args.out / "log.jsonl")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(args.seed)
    config = make_config(args.width, args.layers)
    text = BytesText.seeded(config, args.seed)
    model = TownCausal(config)
    initialise(model)
    model = model.to(device)
    adapter = as_model(model)
    context = text("")[0].to(device)
    average = Average({"model": model})
    optimizer = Optimizer({"model": model}, fused=device == "cuda")
    first = step = load(args.resume, average) if args.resume else 0
    seed = args.seed * 1_000_003 + step  # a resumed run sees other towns and other noise
    torch.manual_seed(seed)
    generator = Generator(device).manual_seed(seed)
    log(parameters=sum(p.numel() for p in average.live), step=step, torch=torch.__version__)
    alone = device == "cpu"  # a clip is a row there: masked attention computes what it hides
    packings = dict[int, Packing]()

    def predict(latents: Tensor, t: Tensor, actions: Tensor, pose: Tensor, none: Tensor) -> Tensor:
        keys, values = model.keys_values(context.expand(len(latents), -1, -1))
        packing = packings[length if alone else args.row]
        return model(Teaching(packing, keys, values), latents, 1000 * t, actions)

    render: Render = town.render
    if not args.no_compile:
        predict, render = torch.compile(predict), torch.compile(render)

    def write() -> None:
        write_folder(args.out, config, text, average.weights("model"))

    def show() -> None:
        began = clock.elapsed
        average.swap()
        scores = judge(model, adapter, context, args.towns, args.out / "sheet.png")
        average.swap()
        log(step=step, seconds=clock.elapsed, took=clock.elapsed - began, **scores)

    walks = make_walks(WALKS, args.row, generator)
    saved = logged = shown = clock.elapsed
    logged_step, first_loss = step, math.nan
    sums = torch.zeros(6, device=device)
    while clock.share < 1:
        share = args.begin + (args.finish - args.begin) * clock.share
        length = choose_length(share, args.row)
        own = share > 0.35 and float(torch.rand(())) < args.own
        row = length if alone else args.row
        if row not in packings:
            packings[row] = Packing(adapter.rope(adapter.shape()), adapter.shape(), row, device)
        packings[row].use(length, *choose_gap(share, length))
        if (step - first) % RENEW == RENEW - 1:
            walks = make_walks(WALKS, args.row, generator)
        with torch.no_grad():
            clips = args.rows * args.row // length
            batch = walks.draw(clips, length, generator, render)
        error, t = teach(predict, clips if alone else args.rows, own, batch)
        loss = (error / (t * t + 0.1)).mean()
        norm = descend(loss, average, optimizer, args.rate * clock.rate(step - first))
        step += 1
        with torch.no_grad():
            high = t > 0.8
            # late frames of a clip have seen much of the town: there memory shows
            late = high & (torch.arange(length, device=device) >= length * 3 // 4)
            errors = (error * high).sum(), high.sum(), (error * late).sum(), late.sum()
            sums += torch.stack([loss.detach(), norm.detach(), *errors])
        if step == first + 1 or clock.elapsed - logged > 10:
            total, norms, high_sum, highs, late_sum, lates = sums.tolist()
            steps, seconds = step - logged_step, clock.elapsed - logged
            log(
                step=step,
                seconds=clock.elapsed,
                loss=total / steps,
                norm=norms / steps,
                mse_high=high_sum / max(highs, 1),
                mse_late=late_sum / max(lates, 1),
                length=length,
                tokens_s=round(
                    steps * args.rows * 2 * args.row * adapter.shape().tokens_per_frame / seconds
                ),
            )
            if not math.isfinite(total):
                raise SystemExit("the loss is not finite: resume with a lower --rate")
            first_loss = total / steps if math.isnan(first_loss) else first_loss
            if not args.resume and clock.share > 1 / 8 and total / steps > FALLEN * first_loss:
                raise SystemExit(f"the loss has not fallen from {first_loss:.3f}: lower --rate")
            sums.zero_()
            logged, logged_step = clock.elapsed, step
        if clock.elapsed - saved > 60:
            write()
            saved = clock.elapsed
        if clock.elapsed - shown > args.judge:
            show()
            shown = logged = clock.elapsed
    write()
    log(step=step, seconds=clock.elapsed, trained=True)
    show()
    log.file.close()


def write_folder(out: Path, config: WanConfig, text: BytesText, weights: dict[str, Tensor]) -> None:
    """A folder that loads as a model."""
    (out / "config.json").write_text(json.dumps(config.to_json(), indent=1))
    write_weights(weights, out, WEIGHTS, torch.float32)
    text.write(out)


@torch.no_grad()
def load(folder: Path, average: Average) -> int:
    """Take up the weights in a folder; the number of steps that were made."""
    average.modules["model"].load_state_dict(read_weights(folder, WEIGHTS))
    for live, mean in zip(average.live, average.mean, strict=True):
        mean.copy_(live)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return max((row.get("step", 0) for row in rows), default=0)


if __name__ == "__main__":
    main()
