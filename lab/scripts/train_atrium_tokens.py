"""Train Atrium's token model on codes of walks, rendered and encoded beforehand.

    python lab/scripts/train_atrium_tokens.py --tokenizer out/tokenizer --out out/tokens

Clips are of the world's kinds of camera (a resting one with something moving before it, turns that
go on, turns that go back, walks) at paces and tempos of their own. A clip is one row: its prompt,
then the places of its frames, all of them taught at once. Some places of the context are spoilt,
the first of a frame often: that one is made before the frame's action is known, so what follows
must not trust it.

--out gets a folder that loads as a model (float16, averaged), log.jsonl and sheet-KIND.png of each
kind of camera (truth, tokenizer, continuation). --state DIR also keeps what exact resumption needs.
--resume DIR goes on from such a state, or from the weights in an --out folder. With --wait PID that
process may still be training the tokenizer: programs are compiled and walks prepared meanwhile, and
the minutes count from when it is done.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import atrium_clips
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from train_atrium_tokenizer import NAME, pixel_config
from training import (
    Average,
    Clock,
    Log,
    Optimizer,
    check_device,
    load_state,
    read_weights,
    save_state,
    sheet,
)

from tachyscope.core.types import Mlp, Rope, Shape
from tachyscope.models.atrium import prompts
from tachyscope.models.atrium import world as atrium
from tachyscope.models.atrium.words import VOCAB, WordTokenizer
from tachyscope.models.llama import Layer
from tachyscope.models.token_model import Sampler, draw_noise
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.depth import DepthConfig, DepthTransformer
from tachyscope.models.vila_u.model import VilaModel, load_vila, save_vila
from tachyscope.models.vila_u.transformer import Vila

PROMPT = prompts.LENGTH + 1  # ids of every prompt
# what clips are drawn between, evenly by logarithm, so that no speed is learnt by heart
PACES = atrium_clips.degrees(0.35), atrium_clips.degrees(5.0)
TEMPOS = 1 / 30, 2 / 3  # of things that move on their own: periods of 480 to 24 frames
SHARES = {"still": 0.15, "forward": 0.2, "reversing": 0.35, "walk": 0.3}
LEARNT = 4.0  # loss that must be reached in 40 % of the time, else the run stops
PACE, TEMPO = atrium_clips.degrees(1.0), 1 / 3  # of the clips that scores are for


def make_config(args: argparse.Namespace, tokenizer: dict[str, Any]) -> VilaConfig:
    pixels = pixel_config(tokenizer)
    depth, codes, dim = tokenizer["books"]
    side = pixels.resolution // pixels.scale
    return VilaConfig(
        hidden=args.width,
        intermediate=args.inner,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocab=VOCAB,
        eps=1e-5,
        # periods 2, 4, 8, …: those up to a frame's places turn alike in every frame, so that
        # "the same place, whenever" is a direction in which a head can look
        theta=2.0 ** (args.head_dim // 2),
        rope_scale=1 / math.pi,
        grid=(side, side),
        depth=depth,
        codes=codes,
        code_dim=dim,
        head=DepthConfig(args.depth_width, args.depth_layers, args.depth_heads),
        pixels=pixels,
        sampler=Sampler(cfg=1.0, temperature=args.temperature, top_k=min(codes, 900), top_p=0.96),
        fps=24,
        actions=atrium.ACTIONS,
        clip=args.frames,
        tokenizer="words",
    )


@torch.no_grad()
def initialise(model: Vila, spread: float) -> None:
    """Layers that begin as the identity, inputs of about unit size for code sums of a spread."""
    for layer in model.trunk.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    for block in model.head.head_transformer.blocks:
        nn.init.zeros_(block.attn.proj.weight)
        nn.init.zeros_(block.mlp[2].weight)
    nn.init.zeros_(model.head.classifier_mlp.linear.weight)
    nn.init.zeros_(model.llm.lm_head.weight)
    nn.init.normal_(model.trunk.embed_tokens.weight, std=0.7)
    assert model.mm_projector.action_embedding is not None
    nn.init.normal_(model.mm_projector.action_embedding.weight, std=0.5)
    first, last = model.mm_projector.layers[0], model.mm_projector.layers[2]
    for layer in (first, model.head.in_mlp_1):
        nn.init.normal_(layer.weight, std=1 / (spread * layer.in_features**0.5))
    nn.init.normal_(last.weight, std=1.5 / last.in_features**0.5)


def prompt_positions(shape: Shape, device: str) -> Tensor:
    """Where a prompt stands, [PROMPT, 3]: right before frame 0, as in a session."""
    pos = torch.zeros(PROMPT, 3, device=device)
    pos[:, 0] = -1.0
    pos[:, 2] = torch.arange(PROMPT, device=device) + (shape.tokens_per_frame - PROMPT)
    return pos


class Teaching:
    """Stands in for a session in training: the whole clip at once, each token seeing those before.

    The last token of a clip predicts nothing and is left out.
    """

    def __init__(self, rope: Rope, shape: Shape, frames: int, device: str) -> None:
        pos = torch.cat([prompt_positions(shape, device), shape.positions(0, frames, device)])
        self.rope = rope
        self.cos, self.sin = rope.cos_sin(pos[:-1], torch.float32)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (self.rope.apply(x, self.cos, self.sin).to(v.dtype) for x in (q, k))
        # repeated by hand: not every fast kernel knows of shared keys, and the slow one does
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        return fn(x)


class Playing:
    """Stands in for a session in sampling: many videos at once, a dense cache."""

    def __init__(self, rope: Rope, shape: Shape, rows: int, frames: int, device: str) -> None:
        pos = torch.cat([prompt_positions(shape, device), shape.positions(0, frames, device)])
        self.rope = rope
        self.angles = rope.cos_sin(pos, torch.float32)
        size = (rows, shape.kv_heads, len(pos), shape.head_dim)
        self.cache = [
            (torch.zeros(size, device=device), torch.zeros(size, device=device))
            for _ in range(shape.layers)
        ]
        self.start = self.end = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (
            self.rope.apply(x, *(a[self.start : self.end] for a in self.angles)) for x in (q, k)
        )
        for mine, new in zip(self.cache[layer], (k, v), strict=True):
            mine[:, :, self.start : self.end] = new
        kept = [mine[:, :, : self.end] for mine in self.cache[layer]]
        group = q.shape[1] // k.shape[1]
        if self.start == 0:
            kept = [x.repeat_interleave(group, 1) for x in kept]
            return F.scaled_dot_product_attention(q, *kept, is_causal=True)
        # one token: heads that share keys go as so many queries, and no key is copied
        o = F.scaled_dot_product_attention(q.reshape(len(q), -1, group, q.shape[-1]), *kept)
        return o.reshape(q.shape)

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        return fn(x)

    def run(self, model: Vila, x: Tensor) -> Tensor:
        """The last state [B, W] after tokens x [B, S, W], which go behind those before."""
        self.start, self.end = self.end, self.end + x.shape[1]
        return model.trunk(self, x)[:, -1]


def make_clips(
    cameras: list[str], frames: int, pace: Tensor, tempo: Tensor, generator: Generator
) -> atrium_clips.Clips:
    """Rooms of their own for clips of kinds of camera, at paces and tempos [B]."""
    count = len(cameras)
    walks = [atrium_clips.camera(kind, frames, generator) for kind in cameras]
    actions = torch.stack([atrium.letters(walk) for walk in walks])
    starts = atrium.make_starts(count, generator)
    still = torch.tensor([kind == "still" for kind in cameras])
    return atrium_clips.Clips(
        rooms=atrium.stir(atrium.make_rooms(count, generator), starts, still),
        scene=torch.arange(count)[:, None].expand(count, frames),
        actions=actions,
        pose=atrium.walk(starts, actions, pace),
        time=tempo[:, None] * torch.arange(frames),
    )


def draw_clips(count: int, frames: int, generator: Generator) -> atrium_clips.Clips:
    """Clips to learn from: kinds by SHARES, each at a pace and tempo of its own."""
    weights = torch.tensor(list(SHARES.values()))
    drawn = torch.multinomial(weights, count, True, generator=generator).tolist()

    def between(low: float, high: float) -> Tensor:
        return low * (high / low) ** torch.rand(count, generator=generator)

    cameras = [list(SHARES)[i] for i in drawn]
    return make_clips(cameras, frames, between(*PACES), between(*TEMPOS), generator)


def make_ids(clips: atrium_clips.Clips) -> Tensor:
    """Each clip's prompt as ids [B, PROMPT]."""
    words = WordTokenizer(VOCAB)
    return torch.tensor([words.ids(clips.prompt(i)) for i in range(len(clips.actions))])


Encode = Callable[[atrium.Rooms, Tensor, Tensor], Tensor]


@dataclass
class Pool:
    """Clips as codes in the device's memory."""

    codes: Tensor  # [N, frames, places, D] int16
    actions: Tensor  # [N, frames] uint8
    ids: Tensor  # [N, PROMPT] uint8
    filled: int = 0

    @classmethod
    def empty(cls, count: int, frames: int, places: int, depth: int, device: str) -> Pool:
        return cls(
            torch.zeros(count, frames, places, depth, dtype=torch.int16, device=device),
            torch.zeros(count, frames, dtype=torch.uint8, device=device),
            torch.zeros(count, PROMPT, dtype=torch.uint8, device=device),
        )

    @torch.no_grad()
    def put(self, clips: atrium_clips.Clips, ids: Tensor, encode: Encode, batch: int = 512) -> None:
        rows = slice(self.filled, self.filled + len(ids))
        self.actions[rows] = clips.actions.to(self.actions)
        self.ids[rows] = ids.to(self.ids)
        clips = clips.to(str(self.codes.device))
        pose, when, scene = clips.pose.flatten(0, 1), clips.time.flatten(), clips.scene.flatten()
        parts = [
            encode(clips.rooms.rows(s), p, t)
            for s, p, t in zip(
                scene.split(batch), pose.split(batch), when.split(batch), strict=True
            )
        ]
        self.codes[rows] = torch.cat(parts).view_as(self.codes[rows]).to(self.codes.dtype)
        self.filled += len(ids)

    def take(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randint(self.filled, (count,), device=self.codes.device)
        return self.codes[rows].long(), self.actions[rows].long(), self.ids[rows].long()


def spoil(codes: Tensor) -> Tensor:
    """Codes [B, T, N, D] with some places' taken from another frame or another clip."""
    clips, frames, places = codes.shape[:3]

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=codes.device)

    strength = 0.15 * uniform(clips, 1, 1) ** 2
    strength = strength.expand(clips, frames, places).clone()
    strength[..., 0] = 0.5
    other = codes[:, torch.randperm(frames, device=codes.device)]
    other = torch.where(uniform(clips, frames, places, 1) < 0.5, other, codes.roll(1, 0))
    return torch.where((uniform(clips, frames, places) < strength)[..., None], other, codes)


def depth_logits(head: DepthTransformer, hidden: Tensor, sums: Tensor) -> Tensor:
    """What `head` gives, for n places [n, ...], in a form that compiles into few kernels.

    Attention kernels are made for long rows; here are a hundred thousand rows of D.
    """
    first = head.in_mlp_2(hidden)[:, None]
    x = torch.cat([first, head.in_mlp_1(sums[:, :-1])], 1) + head.pos_emb_d[0]
    depth = x.shape[1]
    later = torch.ones(depth, depth, dtype=torch.bool, device=x.device).triu(1)[..., None]
    for block in head.head_transformer.blocks:
        y = block.ln1(x)
        q, k, v = (
            part(y).unflatten(-1, (block.attn.heads, -1))  # [n, D, H, head size]
            for part in (block.attn.query, block.attn.key, block.attn.value)
        )
        scores = (q[:, :, None].float() * k[:, None]).sum(-1) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(later, -torch.inf).softmax(2)  # [n, D, D, H]
        mixed = (weights[..., None] * v[:, None]).sum(2)
        x = x + block.attn.proj(mixed.to(v.dtype).flatten(2))
        x = x + block.mlp(block.ln2(x))
    return head.classifier_mlp(x)


def depth_loss(head: DepthTransformer, hidden: Tensor, sums: Tensor, codes: Tensor) -> Tensor:
    """Cross-entropy [n, D] of codes [n, D]."""
    logits = depth_logits(head, hidden, sums).float()
    return F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none").view_as(codes)


class Teacher:
    """The loss of a batch of clips."""

    def __init__(self, model: Vila, teaching: Teaching, compiled: bool) -> None:
        self.model, self.teaching = model, teaching
        # a layer, not the trunk, is compiled: one program for all of them, in a part of the time
        self.layer: Callable[..., Tensor] = Layer.forward
        self.loss: Callable[..., Tensor] = depth_loss
        if compiled:
            self.layer = torch.compile(Layer.forward, dynamic=False)
            self.loss = torch.compile(depth_loss, dynamic=False)

    def states(self, codes: Tensor, actions: Tensor, ids: Tensor) -> Tensor:
        """What predicts each place of codes [B, T, N, D]: [B, T * N, W]."""
        model = self.model
        video = model.embed(codes, actions[..., None]).flatten(1, 2)
        x = torch.cat([model.trunk.embed_tokens(ids), video[:, :-1]], 1).float()
        for layer in model.trunk.layers:
            x = self.layer(layer, self.teaching, 0, x)
        return model.trunk.norm(x[:, PROMPT - 1 :])

    def __call__(self, codes: Tensor, actions: Tensor, ids: Tensor) -> Tensor:
        """Cross-entropy [B, T, N, D]."""
        states = self.states(spoil(codes), actions, ids)
        sums = self.model.vae.quantizer.sums(codes).flatten(0, 2)
        losses = self.loss(self.model.head, states.flatten(0, 1), sums, codes.flatten(0, 2))
        return losses.view_as(codes)


@dataclass(frozen=True)
class Tempered:
    """A sampler whose temperature is each row's own."""

    temperature: Tensor  # [B, 1]

    def guide(self, logits: Tensor) -> Tensor:
        return logits.float()

    def pick(self, logits: Tensor, noise: Tensor) -> Tensor:
        return (logits / self.temperature - noise.log()).argmax(-1)


@torch.no_grad()
def play(
    adapter: VilaModel, codes: Tensor, actions: Tensor, ids: Tensor, given: int,
    temperature: Tensor, told: Tensor, seed: int = 0,
) -> Tensor:  # fmt: skip
    """Codes [B, T, N, D] whose first `given` frames are true; rows `told` get first places too."""
    model, config, shape = adapter.transformer, adapter.config, adapter.shape()
    device = str(codes.device)
    rows, frames, places, depth = codes.shape
    session = Playing(adapter.rope(shape), shape, rows, frames, device)
    sampler = Tempered(temperature[:, None])
    generator = Generator(device).manual_seed(seed)
    made = codes.clone()
    given_inputs = model.embed(codes[:, :given], actions[:, :given, None]).flatten(1, 2)
    hidden = session.run(model, torch.cat([model.trunk.embed_tokens(ids), given_inputs], 1))
    for frame in range(given, frames):
        noise = draw_noise(generator, (rows, places, depth, config.codes), codes.device)
        action = model.mm_projector.action_embedding.weight[actions[:, frame]]
        for place in range(places):
            new = model.head.generate(hidden, model.vae.quantizer, sampler, noise[:, place])
            if place == 0:
                new = torch.where(told[:, None], codes[:, frame, 0], new)
            made[:, frame, place] = new
            x = model.mm_projector.layers(model.vae.quantizer.sum(new)) + action
            hidden = session.run(model, x[:, None])
    return made


@torch.no_grad()
def judge(
    adapter: VilaModel, worlds: int, out: Path, given: int, made: int, seed: int = 2**31
) -> dict[str, float]:
    """Scores and sheets on unseen rooms, so many of each kind of camera."""
    model, config = adapter.transformer, adapter.config
    device, size = str(adapter.device), config.size[0]
    generator = Generator().manual_seed(seed)
    cameras = [kind for kind in atrium_clips.CAMERAS for _ in range(worlds)]
    rows, frames = len(cameras), given + made
    paces, tempos = torch.full((rows,), PACE), torch.full((rows,), TEMPO)
    clips = make_clips(cameras, frames, paces, tempos, generator)
    ids = make_ids(clips).to(device)
    clips = clips.to(device)
    truth = atrium_clips.film(clips, size)
    books, vae = model.vae.quantizer, model.vae
    parts = (truth * 2 - 1).flatten(0, 1).split(64)
    codes = torch.cat([books.quantise(vae.encode(part)) for part in parts])
    codes = codes.flatten(1, 2).unflatten(0, (rows, frames))

    def show(codes: Tensor) -> Tensor:
        sums = books.sum(codes.flatten(0, 1).unflatten(1, config.grid))
        pictures = torch.cat([vae.decode(part) for part in sums.split(64)]) * 0.5 + 0.5
        return pictures.clamp(0, 1).unflatten(0, codes.shape[:2])

    # every temperature at once, and the sampler's own with the first places told
    own = config.sampler.temperature
    kinds = {"dense": own, "greedy": 0.01, "warm": 1.0, "told": own}
    temperature = torch.tensor(list(kinds.values()), device=device).repeat_interleave(rows)
    told = torch.tensor([k == "told" for k in kinds], device=device).repeat_interleave(rows)
    many = [x.repeat(len(kinds), *[1] * (x.dim() - 1)) for x in (codes, clips.actions, ids)]
    frames_made = play(adapter, *many, given, temperature, told)
    last = truth[:, given - 1 : given].expand_as(truth)
    videos = {"tokenizer": show(codes), "repeat": last}
    videos |= dict(zip(kinds, (show(part) for part in frames_made.split(rows)), strict=True))
    same = (frames_made[:rows] == codes)[:, given:].float().mean((1, 2))  # [rows, D]
    scores = {}
    for name, video in videos.items():
        each = atrium_clips.psnr(video[:, given:], truth[:, given:]).unflatten(0, (-1, worlds))
        for kind, by_frame in zip(atrium_clips.CAMERAS, each.mean(1), strict=True):
            scores[f"{kind}_{name}"] = by_frame.mean().item()
            if name == "dense":
                scores[f"{kind}_first"], scores[f"{kind}_last"] = by_frame[[0, -1]].tolist()
    for at, kind in enumerate(atrium_clips.CAMERAS):
        here = slice(at * worlds, (at + 1) * worlds)
        for d, share in enumerate(same[here].mean(0).tolist()):
            scores[f"{kind}_same_{d}"] = share
        shown = [videos["tokenizer"][here], videos["dense"][here]]
        lines = [v[i] for i in range(min(3, worlds)) for v in (truth[here], *shown)]
        sheet(lines, out / f"sheet-{kind}.png")
    return scores


def write_model(out: Path, adapter: VilaModel, average: Average) -> None:
    """A folder that loads as a model."""
    model = Vila(adapter.config)
    model.load_state_dict(adapter.transformer.state_dict())
    for name, module in parts_of(model).items():
        module.load_state_dict(average.weights(name))
    save_vila(VilaModel(model.half(), adapter.config, adapter.tokenizer), out)


def parts_of(model: Vila) -> dict[str, nn.Module]:
    """What is learnt here: not the tokenizer, nor the head over words, which is never run."""
    return {"trunk": model.trunk, "head": model.head, "projector": model.mm_projector}


@torch.no_grad()
def load(folder: Path, average: Average, optimizer: Optimizer) -> int:
    """Take up a state, or weights alone; the number of steps that were made."""
    step = load_state(folder, average, optimizer)
    if step is not None:
        return step
    for name, module in parts_of(load_vila(folder, dtype=torch.float32).transformer).items():
        average.modules[name].load_state_dict(module.state_dict())
    for live, mean in zip(average.live, average.mean, strict=True):
        mean.copy_(live)
    return max((row.get("step", 0) for row in rows_of(folder / "log.jsonl")), default=0)


def rows_of(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--wait", type=int, help="number of the process that trains the tokenizer")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--reserve", type=float, default=50.0, help="seconds left for the scores")
    parser.add_argument("--decay", type=float, default=0.35, help="last share of the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--depth-width", type=int, default=128)
    parser.add_argument("--depth-layers", type=int, default=2)
    parser.add_argument("--depth-heads", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--frames", type=int, default=24, help="of a clip")
    parser.add_argument("--batch", type=int, default=20, help="clips a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--forget", type=float, default=0.1, help="share of prompts left out")
    parser.add_argument("--pool", type=int, default=8192, help="clips made at first")
    parser.add_argument("--fresh", type=int, default=64, help="clips made at a time later")
    parser.add_argument("--every", type=int, default=12, help="steps between those")
    parser.add_argument("--worlds", type=int, default=12, help="of each kind of camera")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    device, began = args.device, time.monotonic()
    check_device(device)

    log = Log(args.out / "log.jsonl")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(args.seed)
    described = args.tokenizer / "config.json"
    while args.wait and not described.is_file() and lives(args.wait):
        time.sleep(0.5)
    config = make_config(args, json.loads(described.read_text()))
    model = Vila(config)
    initialise(model, spread=1.0)
    model = model.to(device)
    model.vae.requires_grad_(False)
    adapter = VilaModel(model, config, WordTokenizer(VOCAB), "atrium-tokens")
    average = Average(parts_of(model))
    optimizer = Optimizer(average.modules, fused=device == "cuda")
    optimizer.muon.decay = 0.1  # queries and keys have no norm to hold them
    shape = adapter.shape()
    teaching = Teaching(adapter.rope(shape), shape, args.frames, device)
    teacher = Teacher(model, teaching, not args.no_compile)
    size = config.size[0]
    sizes = parts_of(model) | {"tokenizer": model.vae}
    log(parameters={k: sum(p.numel() for p in m.parameters()) for k, m in sizes.items()})

    def encode(rooms: atrium.Rooms, pose: Tensor, when: Tensor) -> Tensor:
        pictures = atrium.render(rooms, pose, when, size)
        return model.vae.quantizer.quantise(model.vae.encode(pictures * 2 - 1))

    if not args.no_compile:
        encode = torch.compile(encode, dynamic=False)

    def learn(codes: Tensor, actions: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses = teacher(codes, actions, ids)
        optimizer.zero()
        losses.mean().backward()
        return losses.detach()

    first = step = load(args.resume, average, optimizer) if args.resume else 0
    # a resumed run sees other worlds than the one before
    seed = args.seed * 1_000_003 + step
    generator = Generator().manual_seed(seed)

    def fresh(count: int) -> tuple[atrium_clips.Clips, Tensor]:
        clips = draw_clips(count, args.frames, generator)
        return clips, make_ids(clips)

    chunk = min(256, args.pool)
    more = args.pool // args.fresh * args.fresh * 6
    pool = Pool.empty(more, args.frames, shape.tokens_per_frame, config.depth, device)
    pool.put(*fresh(chunk), encode)
    learn(*pool.take(args.batch))
    log(compiled=time.monotonic() - began)
    ready = []
    while args.wait and lives(args.wait):
        if len(ready) < args.pool // chunk:
            ready.append(fresh(chunk))
        else:
            time.sleep(0.2)
    if args.wait and not any(row.get("final") for row in rows_of(args.tokenizer / "log.jsonl")):
        raise SystemExit("the tokenizer's training ended early: see its log")

    clock = Clock(args.minutes, args.decay, 100 if args.resume else 200, args.reserve)
    if not args.wait:
        clock.start = began
    model.vae.load_state_dict(read_weights(args.tokenizer, NAME))
    pool.filled = 0
    pool.put(*fresh(chunk), encode)
    if not args.resume:
        initialise(model, model.vae.quantizer.sum(pool.take(64)[0]).std().item())
        for live, mean in zip(average.live, average.mean, strict=True):
            mean.copy_(live)
    torch.manual_seed(seed)
    while pool.filled < args.pool:
        pool.put(*(ready.pop() if ready else fresh(chunk)), encode)
    log(pool=pool.filled, step=step, seconds=clock.elapsed, torch=torch.__version__)

    def write() -> None:
        write_model(args.out, adapter, average)
        if args.state:
            save_state(args.state, average, optimizer, step)

    empty = torch.tensor(adapter.tokenizer.ids(""), device=device)
    saved, logged, logged_step = clock.elapsed, clock.elapsed, step
    sums = torch.zeros(args.frames, config.depth, device=device)
    norms = torch.zeros((), device=device)
    while clock.share < 1:
        codes, actions, ids = pool.take(args.batch)
        silent = torch.rand(args.batch, 1, device=device) < args.forget
        step_losses = learn(codes, actions, torch.where(silent, empty, ids))
        norm = nn.utils.clip_grad_norm_(average.live, 1.0)
        optimizer.step(args.rate * clock.rate(step - first))
        average.update()
        step += 1
        sums += step_losses.mean((0, 2))
        norms += norm.detach()
        if args.every and step % args.every == 0 and pool.filled + args.fresh <= more:
            pool.put(*fresh(args.fresh), encode)
        if step == first + 1 or clock.elapsed - logged > 10:
            taken, seconds = step - logged_step, clock.elapsed - logged
            table = (sums / taken).cpu()
            log(
                step=step,
                seconds=clock.elapsed,
                loss=table.mean().item(),
                # the first frame has the prompt alone, the last half mostly what was seen before
                first=[round(x, 3) for x in table[0].tolist()],
                late=[round(x, 3) for x in table[args.frames // 2 :].mean(0).tolist()],
                norm=(norms / taken).item(),
                clips=pool.filled,
                tokens_s=round(taken * codes.shape[:3].numel() / max(seconds, 1e-9)),
            )
            if not math.isfinite(table.mean().item()):
                raise SystemExit("the loss is not finite: resume with a lower --rate")
            if device == "cuda" and clock.share > 0.4 and table.mean().item() > LEARNT:
                raise SystemExit(f"the loss is still above {LEARNT} after {clock.share:.0%}")
            sums.zero_()
            norms.zero_()
            logged, logged_step = clock.elapsed, step
        if clock.elapsed - saved > 60:
            write()
            saved = clock.elapsed

    write()
    log(step=step, seconds=clock.elapsed, trained=True)
    average.swap()
    scores = judge(adapter, args.worlds, args.out, args.frames // 3, args.frames // 3)
    log(step=step, seconds=clock.elapsed, **scores)


if __name__ == "__main__":
    main()
