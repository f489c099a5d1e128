"""Train the model of a world, Atrium's or another, on walks rendered and encoded as it goes.

    python lab/scripts/train_atrium_world.py --autoencoder out/autoencoder --out out/world

--world is one of training_worlds.py's: what is drawn, walked through, said and seen.

Every clip is laid out twice, clean frames and noisy ones. A clean frame sees the clean frames up
to itself; a noisy one sees the clean ones before it and itself. So every noisy frame is trained
just as it is made later: from what clean passes left in the cache. Rows of the batch hold 256
frames in both forms, as 1, 2, 4 or 8 clips, so that one compiled program serves every length.

The model is given the camera's rays, in the room turned so that the clip's first frame faces wall
0: where the walker stands is known from its start and its actions. Clips have paces from 1 to 15
degrees a frame.

Against drift, a share --rolled of the steps has contexts that begin with true frames and go on with
the model's own, made by the sampler as they are later. The camera's way is given, so such a context
agrees with the truth; surfaces that its true frames did not show do not count in the loss.

--out gets a folder that loads as a model: config.json, weights in float16 (averaged), the text
encoder, the decoder; and log.jsonl and sheet-world.png. --state DIR also keeps what exact
resumption needs. --resume DIR goes on from such a state, or from the weights in an --out folder.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import atrium_clips
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
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
from training_worlds import CELLS, WORLDS, World

from tachyscope.core.types import Mlp, Rope, Shape
from tachyscope.models.atrium.autoencoder import Autoencoder
from tachyscope.models.atrium.words import WordEncoder
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.sampler import noised, schedule
from tachyscope.models.wan.transformer import OCTAVES, RAY, WanCausal

WEIGHTS = "diffusion_pytorch_model"
GENERATIONS = 4  # drawings of drawings, at most, that a step is trained on
PARTS_OF_ROW = 8  # the most clips that a row holds
OBJECT_WEIGHT = 4.0  # of the loss where an object is seen
ROLLS, ROLL_EVERY = 288, 400  # clips that are rolled out at once, and steps between
SHOWN = 1, 160  # true frames that a rollout begins with, of 256
RUNS = ("dense", "teacher", "window8", "prompt")
KNOWN = 12, 3  # cells of 256 that make a surface, or an object, known
GAP = 256  # positions: whole periods of what moves on its own, at every tempo
# compiled on its own too: uncompiled it would hold every score
masked_attention = torch.compile(flex_attention)


def make_config(args: argparse.Namespace, world: World) -> WanConfig:
    return WanConfig(
        dim=args.width,
        ffn_dim=4 * args.width,
        layers=world.layers if args.layers is None else args.layers,
        heads=args.width // 64,
        in_channels=world.channels,
        text_dim=128,
        text_len=world.prompts.LENGTH,
        chunk=1,
        actions=world.camera.ACTIONS,
        camera=True,
        steps=(1000, 750, 500, 250),
        shift=args.shift,
        prediction="x0",
        size=(CELLS, CELLS),
        stride=(1, world.stride, world.stride),
        fps=8,
        stock="cache=keep_all attention=dense text=dense replay=none",
        text_encoder=world.text_encoder,
        decoder=world.decoder,
    )


def initialise(model: WanCausal) -> None:
    """Start near the mean: no prediction, modest layers, no modulation by time yet."""
    nn.init.zeros_(model.head.head.weight)
    nn.init.zeros_(model.head.head.bias)
    nn.init.zeros_(model.head.modulation)
    if model.config.actions:
        nn.init.normal_(model.action_embedding.weight, std=0.5)
    nn.init.normal_(model.time_projection[1].weight, std=0.02)
    nn.init.zeros_(model.time_projection[1].bias)
    for block in model.blocks:
        nn.init.zeros_(block.modulation)
        block.modulation.data[:, 2::3] = 0.3  # the gates


PARTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
         "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")  # fmt: skip


class Packing:
    """How one row's tokens are laid out for clips of a length, in tensors that keep their shape.

    A row has slots (clip, clean or noisy, frame). `use` changes the length in place, so that
    the program compiled for one length serves all.
    """

    def __init__(self, rope: Rope, shape: Shape, row: int, device: str) -> None:
        self.rope, self.shape, self.row, self.device = rope, shape, row, device
        self.length = 0
        self.known: dict[int, list[Tensor]] = {}
        self.clip, self.noisy, self.frame = (
            torch.zeros(2 * row, dtype=torch.int32, device=device) for _ in range(3)
        )
        tokens = 2 * row * shape.tokens_per_frame
        self.cos, self.sin = (torch.zeros(tokens, shape.head_dim, device=device) for _ in range(2))
        self.mask = self._mask()

    def use(self, length: int, cut: int = 0, gap: int = 0) -> None:
        """Clips of a length, whose frames from `cut` on stand `gap` positions later."""
        pos = self.shape.positions(0, length, self.device)
        pos[cut * self.shape.tokens_per_frame :, 0] += gap
        angles = self.rope.cos_sin(pos, torch.float32)
        for old, new in zip((self.cos, self.sin), angles, strict=True):
            old.copy_(new.repeat(2 * self.row // length, 1))
        if length == self.length:
            return
        self.length = length
        slot = torch.arange(2 * self.row, dtype=torch.int32, device=self.device)
        self.clip.copy_(slot // (2 * length))
        self.noisy.copy_(slot // length % 2)
        self.frame.copy_(slot % length)
        if length not in self.known:
            self.known[length] = _tensors(self._mask())
        for old, new in zip(_tensors(self.mask), self.known[length], strict=True):
            old.copy_(new)

    def _mask(self) -> BlockMask | Tensor:
        clip, noisy, frame, places = self.clip, self.noisy, self.frame, self.shape.tokens_per_frame

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            q, k = q // places, k // places
            before = (noisy[k] == 0) & (frame[k] < frame[q])
            same = (noisy[k] == noisy[q]) & (frame[k] == frame[q])
            return (clip[q] == clip[k]) & (before | same)

        tokens = 2 * self.row * places
        if self.device == "cpu":  # flex attention has no backward there
            at = torch.arange(tokens)
            return sees(at, at, at[:, None], at[None])
        return create_block_mask(sees, None, None, tokens, tokens, device=self.device)


def _tensors(mask: BlockMask | Tensor) -> list[Tensor]:
    return [mask] if isinstance(mask, Tensor) else [getattr(mask, name) for name in PARTS]


class Teaching:
    """Stands in for a session in training: the whole clip at once, masked."""

    def __init__(self, packing: Packing, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]):
        self.packing, self.keys, self.values = packing, keys, values

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.packing
        q, k = (p.rope.apply(x, p.cos, p.sin).to(v.dtype) for x in (q, k))
        if isinstance(p.mask, Tensor):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=p.mask)
        return masked_attention(q, k, v, block_mask=p.mask)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        # a row's parts may be different clips: each part reads its own prompt
        rows, parts = len(q), len(self.keys[layer]) // len(q)
        v = self.values[layer]
        k, q = self.keys[layer].to(v.dtype), q.to(v.dtype)
        q = q.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)
        out = F.scaled_dot_product_attention(q, k, v)
        return out.unflatten(0, (rows, parts)).transpose(1, 2).flatten(2, 3)

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        return fn(x)


class Playing:
    """Stands in for a session in sampling: a dense cache, or one of the last `window` frames."""

    def __init__(
        self, rope: Rope, shape: Shape, keys: tuple[Tensor, ...], values: tuple[Tensor, ...],
        frames: int, window: int = 0,
    ) -> None:  # fmt: skip
        self.rope, self.shape, self.window = rope, shape, window
        self.text = list(zip(keys, values, strict=True))
        size = (len(keys[0]), shape.heads, frames * shape.tokens_per_frame, shape.head_dim)
        like = keys[0].bfloat16() if keys[0].is_cuda else keys[0]
        self.cache = [(like.new_zeros(size), like.new_zeros(size)) for _ in keys]
        self.frame = 0

    def begin(self) -> None:
        pos = self.shape.positions(self.frame, 1, self.text[0][0].device)
        self.angles = self.rope.cos_sin(pos, torch.float32)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (self.rope.apply(x, *self.angles).to(v.dtype) for x in (q, k))
        n = self.shape.tokens_per_frame
        first = max(0, self.frame + 1 - self.window) * n if self.window else 0
        for mine, new in zip(self.cache[layer], (k, v), strict=True):
            mine[:, :, self.frame * n : (self.frame + 1) * n] = new
        kept = [mine[:, :, first : (self.frame + 1) * n] for mine in self.cache[layer]]
        return F.scaled_dot_product_attention(q.to(kept[0]), *kept).to(v.dtype)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        k, v = (x.to(q.dtype) for x in self.text[layer])
        return F.scaled_dot_product_attention(q, k, v)

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        return fn(x)


@dataclass
class Pool:
    """Clips as latents in the device's memory, the oldest replaced by new ones."""

    world: World
    latents: Tensor  # [N, frames, channels, 16, 16] bfloat16
    context: Tensor  # the same frames as the model will find them in its past
    actions: Tensor  # [N, frames]
    pose: Tensor  # [N, frames, 3]
    surface: Tensor  # [N, frames, 16, 16] what is seen
    counts: Tensor  # [N, frames, surfaces] whether a surface counts in the loss
    tokens: Tensor  # [N, 4, LENGTH] the prompt for each wall in front
    made: int = 0

    @classmethod
    def empty(cls, world: World, count: int, frames: int, device: str, drawn: bool = False) -> Pool:
        """drawn: whether contexts are drawings, not the true frames."""

        def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        latents = zeros(frames, world.channels, CELLS, CELLS, dtype=torch.bfloat16)
        return cls(
            world=world,
            latents=latents,
            context=torch.zeros_like(latents) if drawn else latents,
            actions=zeros(frames),
            pose=zeros(frames, 3, dtype=torch.float32),
            surface=zeros(frames, CELLS, CELLS),
            counts=zeros(frames, world.surfaces, dtype=torch.bool),
            tokens=zeros(4, world.prompts.LENGTH),
        )

    @property
    def filled(self) -> int:
        return min(self.made, len(self.latents))

    def _next(self, count: int) -> slice:
        """Where the next clips go."""
        at = self.made % len(self.latents)
        assert at + count <= len(self.latents)
        self.made += count
        return slice(at, at + count)

    def put(
        self, latents: Tensor, clips: atrium_clips.Clips, surface: Tensor, tokens: Tensor
    ) -> None:
        to = self._next(len(latents))
        self.latents[to], self.surface[to], self.counts[to] = latents, surface, True
        self.actions[to] = clips.actions.to(self.actions)
        self.pose[to] = clips.pose
        self.tokens[to] = tokens.to(self.tokens)

    def put_drawn(self, drawn: Tensor, truth: Pool, rows: Tensor, given: Tensor) -> None:
        """Add clips `rows` of another pool, drawn from their true frame `given` [n] on."""
        to = self._next(len(rows))
        self.context[to] = drawn
        for name in ("latents", "actions", "pose", "surface", "tokens"):
            getattr(self, name)[to] = getattr(truth, name)[rows]
        shown = torch.arange(drawn.shape[1], device=drawn.device) < given[:, None]
        for i in range(self.world.surfaces):
            cells = (self.surface[to] == i).sum((2, 3)) * shown
            known = cells.amax(1) >= KNOWN[i >= self.world.objects]
            self.counts[to, :, i] = shown | known[:, None]

    def draw(self, count: int, length: int, whole: bool = False) -> Batch:
        """Crops of clips; from their first frame on, where they are to begin as a whole does."""
        device = self.latents.device
        row = torch.randint(self.filled, (count, 1), device=device)
        latest = 0 if whole else self.latents.shape[1] - length
        start = torch.randint(latest + 1, (count, 1), device=device)
        at = start + torch.arange(length, device=device)
        actions = self.actions[row, at].long()
        actions[:, 0] = 0
        pose = self.pose[row, at]
        front = self.world.camera.facing(pose[:, :1])
        surface = self.surface[row, at].long()
        counts = self.counts[row, at].gather(2, surface.flatten(2)).view_as(surface)
        return Batch(
            self.latents[row, at], self.context[row, at], actions,
            self.world.camera.seen_from(pose, front),
            counts * (1 + (OBJECT_WEIGHT - 1) * (surface >= self.world.objects)),
            self.tokens[row, front][:, 0].long(),
        )  # fmt: skip


class Batch(NamedTuple):
    """Clips of T frames."""

    latents: Tensor  # [B, T, channels, 16, 16]
    context: Tensor  # [B, T, channels, 16, 16]
    actions: Tensor  # [B, T]
    pose: Tensor  # [B, T, 3] in the room as the first frame faces it
    weight: Tensor  # [B, T, 16, 16]
    prompts: Tensor  # [B, LENGTH]


Encode = Callable[[Any, Tensor, Tensor], Tensor]


def make_batches(
    world: World, count: int, frames: int, generator: Generator, encode: Encode, device: str
) -> Iterator[tuple[Tensor, atrium_clips.Clips, Tensor, Tensor]]:
    """New clips for ever: latents, the clips, what each cell shows, prompts by front wall."""
    while True:
        clips = world.make_clips(count, frames, generator)
        texts = [text for i in range(count) for text in world.prompts.descriptions(clips.rooms, i)]
        tokens = world.tokens(texts).unflatten(0, (count, 4))
        clips = clips.to(device)
        pose, time, scene = clips.pose.flatten(0, 1), clips.time.flatten(), clips.scene.flatten()
        latents, surfaces = [], []
        for s, p, t in zip(*(x.split(world.at_once) for x in (scene, pose, time)), strict=True):
            rooms = clips.rooms.rows(s)
            latents.append(encode(rooms, p, t))
            surfaces.append(world.see(rooms, p, t, CELLS).to(torch.uint8))
        size = (count, frames)
        yield (
            torch.cat(latents).unflatten(0, size), clips,
            torch.cat(surfaces).unflatten(0, size), tokens,
        )  # fmt: skip


def draw_noise(clips: int, length: int, device: torch.device) -> Tensor:
    """Noise levels [B, T] of frames to be made: mostly high, a tenth of them all noise."""
    u = torch.rand(clips, length, device=device)
    t = 3 * u / (1 + 2 * u)
    return torch.where(torch.rand_like(u) < 0.1, 1.0, t).clamp(min=0.02)


def choose_length(share: float, row: int) -> int:
    """The context of a step: an eighth of a row at first, longer ones later, whole rows at the end.

    Short clips stay many: what the prompt names is drawn from it in first views alone.
    """
    r = float(torch.rand(()))
    if share < 0.3:
        return row // 8 if r < 0.5 else row // 4
    if share < 0.6:
        return row // 8 if r < 0.3 else row // 4 if r < 0.7 else row // 2
    return row // 8 if r < 0.25 else row // 4 if r < 0.5 else row // 2 if r < 0.75 else row


def choose_gap(share: float, length: int) -> tuple[int, int]:
    """Where a clip's positions jump, and how far: memory must serve beyond any trained length."""
    if share < 0.3 or float(torch.rand(())) < 0.5:
        return 0, 0
    return int(torch.randint(1, length, ())), GAP * int(8.0 ** float(torch.rand(())))


@torch.no_grad()
def play(
    model: WanCausal, words: WordEncoder, adapter: WanModel, truth: Tensor, actions: Tensor,
    rays: Tensor, tokens: Tensor, given: int | Tensor, window: int = 0, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Latents [B, C, T, h, w] as the sampler makes them, the first `given` frames being true.

    Clips may have so many each [B]. With given < 0 each frame is made after a clean pass over the
    true one before it.
    """
    device = truth.device
    shown = torch.as_tensor(given, device=device).expand(len(truth))[:, None, None, None, None]
    least = int(shown.min())
    keys, values = model.keys_values(words(tokens))
    frames = truth.shape[2]
    session = Playing(adapter.rope(adapter.shape()), adapter.shape(), keys, values, frames, window)
    generator = Generator(device).manual_seed(seed)
    made = []

    def run(x: Tensor, t: float) -> Tensor:
        times = torch.full((len(x), 1), t, device=device)
        at = session.frame
        return model(session, x, times, actions[:, at, None], rays[:, at])

    for i in range(frames):
        session.frame = i
        session.begin()
        true = truth[:, :, i : i + 1]
        clean = true
        if i >= least:
            for t, sigma in schedule(model.config):
                noise = torch.randn(true.shape, generator=generator, device=device)
                clean = run(noised(clean, noise, sigma) if sigma < 1 else noise, t)
            clean = torch.where(i < shown, true, clean)
        run(true if least < 0 else clean, 0.0)
        made.append(clean)
    return torch.cat(made, 2)


def judge(
    world: World,
    model: WanCausal,
    words: WordEncoder,
    adapter: WanModel,
    autoencoder: Autoencoder,
    worlds: int,
    out: Path,
    pace: float,
    names: Sequence[str],
    most: int = 10**9,
    seed: int = 2**31,
) -> dict[str, float]:
    """Scores and a sheet on unseen rooms: a full turn is given, then made again, then a walk.

    At a slower pace the same way takes more frames; it is cut after `most`.
    """
    device = next(model.parameters()).device
    generator = Generator().manual_seed(seed)
    times = round(1 / pace)
    walk = ("." + "".join(letter * times for letter in world.way))[:most]
    frames = len(walk)
    given = min(1 + 24 * times, frames // 2)
    rooms = world.make_scenes(worlds, generator)
    actions = world.camera.letters(walk).expand(worlds, frames)
    pose = world.camera.walk(world.camera.make_starts(worlds, generator), actions, pace)
    scene = torch.arange(worlds)[:, None].expand(worlds, frames)
    time = pace * torch.arange(frames).expand(worlds, frames)
    clips = atrium_clips.Clips(rooms, scene, actions, pose, time).to(device)
    front = world.camera.facing(pose[:, :1])
    texts = [world.prompts.descriptions(rooms, i)[int(front[i])] for i in range(worlds)]
    tokens = world.tokens(texts).to(device)
    shown = [
        x.split(16) for x in (clips.scene.flatten(), clips.pose.flatten(0, 1), clips.time.flatten())
    ]
    drawn, seen = [], []
    for s, p, t in zip(*shown, strict=True):
        drawn.append(world.render(clips.rooms.rows(s), p, t))
        seen.append(world.see(clips.rooms.rows(s), p, t, drawn[0].shape[-1]))
    truth = torch.cat(drawn).unflatten(0, (worlds, frames))
    objects = (torch.cat(seen) >= world.objects).unflatten(0, (worlds, frames))
    with torch.no_grad():
        parts = [autoencoder.encode(part) for part in truth.flatten(0, 1).split(256)]
        latents = torch.cat(parts).unflatten(0, (worlds, frames))
    latents = latents.transpose(1, 2).contiguous()
    rays = world.camera.rays(world.camera.seen_from(clips.pose, front.to(device)), CELLS // 2)

    def show(made: Tensor) -> Tensor:
        parts = made.transpose(1, 2).flatten(0, 1).float().split(256)
        with torch.no_grad():
            pictures = torch.cat([autoencoder.decode(part) for part in parts])
        return pictures.unflatten(0, (worlds, frames)).clamp(0, 1)

    def mean(values: Tensor) -> float:
        return values.mean().item()

    runs = {
        "teacher": {"given": -1},
        "dense": {"given": given},
        "window8": {"given": given, "window": 8},
        "prompt": {"given": 0},
    }
    turn = min(given + 24 * times, frames - 1)  # where the turn has been made again
    scores = {"autoencoder_db": mean(atrium_clips.psnr(show(latents), truth))}
    scores["repeat_db"] = mean(atrium_clips.psnr(truth[:, :-1], truth[:, 1:]))
    videos = {"truth": truth}
    for name in names:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            made = play(
                model, words, adapter, latents, actions.to(device), rays, tokens, **runs[name]
            )
        video = show(made)
        db = atrium_clips.psnr(video, truth)
        scores[f"{name}_revisit_db"] = mean(db[:, given:turn])
        scores[f"{name}_new_db"] = mean(db[:, turn:])
        scores[f"{name}_49_96_db"] = mean(db[:, min(given + 48 * times, frames - 1) :])
        scores[f"{name}_worst_db"] = db[:, turn:].mean(1).min().item()
        error = (video - truth).square().mean(2)
        scores[f"{name}_objects_db"] = -10 * math.log10(error[:, turn:][objects[:, turn:]].mean())
        scores[f"{name}_sharp"] = mean(
            atrium_clips.sharpness(video[:, turn:].flatten(0, 1))
            / atrium_clips.sharpness(truth[:, turn:].flatten(0, 1))
        )
        videos[name] = video
    shown = [0, *torch.linspace(given, frames - 1, 15).long().tolist()]
    sheet([video[i, shown] for i in range(min(4, worlds)) for video in videos.values()],
          out / f"sheet-world-{times}.png")  # fmt: skip
    return {f"{key}_{times}": value for key, value in scores.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--world", choices=WORLDS, default="atrium")
    parser.add_argument("--autoencoder", type=Path, required=True)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--reserve", type=float, default=60.0, help="seconds left for the sheets")
    parser.add_argument("--decay", type=float, default=0.25, help="last share of the time")
    parser.add_argument("--begin", type=float, default=0.0, help="share of the whole plan done")
    parser.add_argument("--finish", type=float, default=1.0, help="share of the plan at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, help="the world's own number unless given")
    parser.add_argument("--shift", type=float, default=2.0)
    parser.add_argument("--row", type=int, default=256, help="frames of the longest context")
    parser.add_argument("--rows", type=int, default=4, help="as many frames of clips a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--own", type=float, default=0.3, help="steps on the model's own context")
    parser.add_argument("--rolled", type=float, default=0.4, help="steps on its own rollouts")
    parser.add_argument("--pool", type=int, default=10240, help="clips of a row's frames")
    parser.add_argument("--fresh", type=int, default=32, help="clips made at a time")
    parser.add_argument("--fill", type=float, default=30.0, help="seconds of filling at first")
    parser.add_argument("--every", type=int, default=20, help="steps between new clips")
    parser.add_argument(
        "--drawing",
        type=float,
        default=1.0,
        help="the most of training's time that new clips may take; they come more seldom then",
    )
    parser.add_argument("--steps", type=int, default=10**9, help="end after so many, if sooner")
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--judge-frames", type=int, default=10**9, help="of the walks that score")
    parser.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS, help="runs to be scored")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args(arguments)
    device, world = args.device, WORLDS[args.world]

    warm = 100 if args.resume else 300
    clock = Clock(args.minutes, args.decay, warm, args.reserve)
    log = Log(args.out / "log.jsonl")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(args.seed)

    config = make_config(args, world)
    model = WanCausal(config)
    initialise(model)
    model = model.to(device)
    words = WordEncoder(len(world.prompts.WORDS), world.prompts.LENGTH, config.text_dim).to(device)
    autoencoder = world.make_autoencoder().to(device).eval().requires_grad_(False)
    autoencoder.load_state_dict(read_weights(args.autoencoder, "autoencoder"))
    adapter = WanModel(f"{args.world}-world", model)
    modules = {"model": model, "words": words}
    average = Average(modules)
    optimizer = Optimizer(modules, fused=device == "cuda")
    first = step = 0
    if args.resume:
        taken = args.resume if any(args.resume.glob("*.safetensors")) else args.out
        first = step = load(taken, average, optimizer)
    # a resumed run sees other worlds and other noise than the one before
    torch.manual_seed(args.seed * 1_000_003 + step)
    generator = Generator().manual_seed(args.seed * 1_000_003 + step)
    log(parameters=sum(p.numel() for p in average.live), step=step, torch=torch.__version__)

    packing = Packing(adapter.rope(adapter.shape()), adapter.shape(), args.row, device)

    def predict(
        latents: Tensor, t: Tensor, actions: Tensor, pose: Tensor, tokens: Tensor
    ) -> Tensor:
        keys, values = model.keys_values(words(tokens))
        rays = world.camera.rays(pose, CELLS // 2).flatten(1, 2)
        return model(Teaching(packing, keys, values), latents, 1000 * t, actions, rays)

    def encode(rooms: Any, pose: Tensor, time: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            return autoencoder.encode(world.render(rooms, pose, time)).bfloat16()

    if not args.no_compile:
        predict, encode = torch.compile(predict), torch.compile(encode)

    pool = Pool.empty(world, args.pool // args.fresh * args.fresh, args.row, device)
    fresh = make_batches(world, args.fresh, args.row, generator, torch.no_grad()(encode), device)
    while not pool.made or (clock.elapsed < args.fill and pool.made < args.pool):
        pool.put(*next(fresh))
        synchronised(clock, device)  # so that the clock sees the work, not its launch
    log(pool=pool.filled, seconds=clock.elapsed)

    rolls = min(ROLLS, args.pool)
    rolled = Pool.empty(world, 4 * rolls if args.rolled else 0, args.row, device, drawn=True)

    def roll() -> None:
        began = clock.elapsed
        rows = torch.randint(pool.filled, (rolls,), device=device)
        truth = pool.latents[rows].float().transpose(1, 2)
        pose = pool.pose[rows]
        front = world.camera.facing(pose[:, :1])
        least, most = (args.row * count // 256 for count in SHOWN)
        given = torch.randint(max(least, 1), most + 1, (rolls,), device=device)
        actions = pool.actions[rows].long()
        actions[:, 0] = 0
        average.swap()  # by the weights that will be kept
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            drawn = play(
                model, words, adapter, truth, actions,
                world.camera.rays(world.camera.seen_from(pose, front), CELLS // 2),
                pool.tokens[rows, front[:, 0]].long(), given, seed=step,
            )  # fmt: skip
        average.swap()
        drift = (drawn - truth).square().mean((1, 3, 4))[:, -args.row // 4 :].mean().item()
        rolled.put_drawn(drawn.transpose(1, 2).to(rolled.context), pool, rows, given)
        log(step=step, rolled=rolls, seconds=clock.elapsed, took=clock.elapsed - began, drift=drift)

    def write() -> None:
        write_model(args.out, config, average, args.autoencoder)
        if args.state:
            save_state(args.state, average, optimizer, step)

    saved, logged, logged_step, rolled_at = clock.elapsed, clock.elapsed, step, step
    sums = torch.zeros(6, device=device)
    trained_from, drawing = clock.elapsed, 0.0
    while clock.share < 1 and step - first < args.steps:
        share = args.begin + (args.finish - args.begin) * clock.share
        length = choose_length(share, args.row)
        kind = float(torch.rand(())) if share > 0.35 else 1.0
        from_rolled, own = kind < args.rolled, args.rolled <= kind < args.rolled + args.own
        if from_rolled:
            length = max(length, args.row // 2)
            if not rolled.made or step - rolled_at >= ROLL_EVERY:
                roll()
                rolled_at = step
        packing.use(length, *choose_gap(share, length))
        source = rolled if from_rolled else pool
        batch = source.draw(args.rows * args.row // length, length, whole=from_rolled)
        error, t = teach(predict, args.rows, own, batch)
        loss = (error / (t * t + 0.1)).mean()
        norm = descend(loss, average, optimizer, args.rate * clock.rate(step - first))
        step += 1
        with torch.no_grad():
            high = t > 0.8
            # late frames of a clip have seen much of the room: there memory shows
            late = high & (torch.arange(length, device=device) >= length * 3 // 4)
            errors = (error * high).sum(), high.sum(), (error * late).sum(), late.sum()
            sums += torch.stack([loss.detach(), norm.detach(), *errors])
        most = args.drawing * (clock.elapsed - trained_from)
        if step % args.every == 0 and drawing <= most:
            began = synchronised(clock, device)
            pool.put(*next(fresh))
            drawing += synchronised(clock, device) - began
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
                clips=pool.made,
                drawing=drawing / (clock.elapsed - trained_from),
                tokens_s=round(
                    steps * args.rows * 2 * args.row * packing.shape.tokens_per_frame / seconds
                ),
            )
            if not math.isfinite(total):
                raise SystemExit("the loss is not finite: resume with a lower --rate")
            sums.zero_()
            logged, logged_step = clock.elapsed, step
        if clock.elapsed - saved > 60:
            write()
            saved = clock.elapsed

    write()
    log(step=step, seconds=clock.elapsed, trained=True)
    average.swap()
    for pace, names in {world.pace: args.runs, world.pace / 2: ["dense"]}.items():
        scores = judge(
            world, model, words, adapter, autoencoder, args.worlds, args.out, pace, names,
            args.judge_frames,
        )  # fmt: skip
        log(step=step, seconds=clock.elapsed, **scores)
    log.file.close()


def synchronised(clock: Clock, device: str) -> float:
    """The time when the device has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize()
    return clock.elapsed


def teach(
    predict: Callable[..., Tensor], rows: int, own: bool, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Square errors and noise levels [clips, T] of one batch of clips.

    With `own`, frames of the context are replaced by what the model makes of them, some of them
    again by what it makes of that: in a long rollout every drawing is one of drawings.
    """
    actions, pose = batch.actions, batch.pose
    clips, length = actions.shape
    device, x0 = actions.device, batch.latents.float()
    # one prompt for each part of a row, which has so many clips at most
    prompts = batch.prompts.repeat_interleave(PARTS_OF_ROW * rows // clips, 0)

    def lay(clean: Tensor, noisy: Tensor) -> Tensor:
        both = torch.stack([clean, noisy], 1)  # [clips, 2, T, ...]
        return both.reshape(rows, -1, *both.shape[3:])

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device)

    def make(context: Tensor, x: Tensor, t: Tensor) -> Tensor:
        noisy = torch.lerp(x, torch.randn_like(x), t[..., None, None, None])
        latents = lay(context, noisy).transpose(1, 2)
        with torch.autocast(device.type, torch.bfloat16):
            levels = lay(torch.zeros_like(t), t)
            made = predict(latents, levels, lay(actions, actions), lay(pose, pose), prompts)
        return made.float().transpose(1, 2).reshape(clips, 2, *x0.shape[1:])[:, 1]

    # slight noise on the context, untold: what is made later is never quite right either
    strength = 0.3 * uniform(clips, 1, 1, 1, 1) ** 2 * uniform(clips, length, 1, 1, 1)
    context = batch.context.float() + strength * torch.randn_like(x0)
    if own:
        replaced = (uniform(clips, length) < uniform(clips, 1))[..., None, None, None]
        drawn = x0
        for _ in range(int(torch.randint(1, GENERATIONS + 1, ()))):
            drawn = make(context, drawn, 0.3 + 0.65 * uniform(clips, length)).detach()
            context = torch.where(replaced, drawn, context)
    t = draw_noise(clips, length, device)
    error = (make(context, x0, t) - x0).square().mean(2)
    return (batch.weight * error).mean((2, 3)), t


def write_model(out: Path, config: WanConfig, average: Average, autoencoder: Path) -> None:
    """A folder that loads as a model."""
    (out / "config.json").write_text(json.dumps(config.to_json(), indent=1))
    write_weights(average.weights("model"), out, WEIGHTS, torch.float16)
    write_weights(average.weights("words"), out, "text_encoder", torch.float16)
    tensors = read_weights(autoencoder, "autoencoder")
    write_weights(tensors, out, "decoder", torch.float16)


@torch.no_grad()
def load(folder: Path, average: Average, optimizer: Optimizer) -> int:
    """Take up a state, or weights alone; the number of steps that were made."""
    step = load_state(folder, average, optimizer)
    if step is not None:
        return step
    model = average.modules["model"]
    tensors = read_weights(folder, WEIGHTS)
    first = tensors.get("camera_embedding.0.weight")
    if first is not None and first.shape[1] == 5 * (1 + 2 * OCTAVES):
        # rays had five numbers once: those that they gained begin by doing nothing
        first = F.pad(first.unflatten(1, (-1, 5)), (0, RAY - 5)).flatten(1)
        tensors["camera_embedding.0.weight"] = first
    # weights without a camera lack its embedding, which then begins by doing nothing
    model.load_state_dict(model.state_dict() | tensors)
    average.modules["words"].load_state_dict(read_weights(folder, "text_encoder"))
    for live, mean in zip(average.live, average.mean, strict=True):
        mean.copy_(live)
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return max((row.get("step", 0) for row in rows), default=0)


if __name__ == "__main__":
    main()
