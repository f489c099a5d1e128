"""A town seen from above, of which a small window shows a part; exact for every place and time.

The map is 12 by 4 blocks of 8 pixels. It closes on itself from side to side; above and below it
ends. Streets between the blocks have a colour for each column and a grey for each row, the same in
every town. What stands on a block (one of six patterns in two colours) is drawn from the seed.
Eight things lie over it: at rest, swinging, or walking around the map.

A step moves the window by a patch of the model; `pace` is the part of a step that a frame takes,
and the part by which things go on: 24 steps lead around the map, as many as a turn in Atrium has.
The window is small so that one CPU core can train a model of it in an hour.

A model is told where the window stands: `PLACES` are letters for every place, pixel by pixel.

Random choices come from a CPU generator, so a seed is the same town on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Generator, Tensor

from tachyscope.models.atrium import world as atrium

ACTIONS = ".wsad"  # stay, up, down, left, right
letters = partial(atrium.letters, actions=ACTIONS)
BLOCK, COLUMNS, ROWS = 8, 12, 4
WIDTH, HEIGHT = BLOCK * COLUMNS, BLOCK * ROWS
VIEW = 16  # pixels of the window's side
STEP = 4
AROUND = WIDTH // STEP  # steps
LOWEST = HEIGHT - VIEW
STREET = 1
PLACES = "".join(chr(0x100 + i) for i in range(WIDTH * (LOWEST + 1)))
THINGS, SWING, PERIOD, LAP = 8, 4.0, 16, 64  # the last two in whole steps
PATTERNS = 6
PALETTE = (
    (0.85, 0.20, 0.25),
    (0.95, 0.60, 0.15),
    (0.90, 0.85, 0.35),
    (0.25, 0.60, 0.30),
    (0.20, 0.70, 0.75),
    (0.25, 0.35, 0.80),
    (0.55, 0.30, 0.65),
    (0.95, 0.93, 0.88),
)


@dataclass(frozen=True)
class Towns:
    """Maps in one batch, everything [B, ...]."""

    pattern: Tensor  # [B, 48] of blocks, row by row
    paper: Tensor  # [B, 48] colour
    ink: Tensor  # [B, 48] another
    tint: Tensor  # [B, 8] colour of things
    round: Tensor  # [B, 8] whether a thing is a disc; else it is square
    radius: Tensor  # [B, 8]
    home: Tensor  # [B, 8, 2]
    swing: Tensor  # [B, 8, 2] how far it goes from there
    walk: Tensor  # [B, 8] pixels to the right in a step
    beat: Tensor  # [B, 8] phase of its swing, in periods

    def rows(self, index: Tensor) -> Towns:
        return Towns(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def to(self, device: torch.device | str) -> Towns:
        return Towns(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def make_towns(count: int, generator: Generator) -> Towns:
    """Random towns, on the generator's device."""
    device, blocks = generator.device, COLUMNS * ROWS

    def choose(options: int, *shape: int) -> Tensor:
        return torch.randint(options, (count, *shape), generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator, device=device)

    paper = choose(len(PALETTE), blocks)
    way = choose(4, THINGS)  # at rest, swinging across, up and down, walking
    across, along = (way == 1) * SWING, (way == 2) * SWING
    margin = SWING + STEP
    high = margin + (HEIGHT - 2 * margin) * uniform(THINGS)
    return Towns(
        pattern=choose(PATTERNS, blocks),
        paper=paper,
        ink=(paper + 1 + choose(len(PALETTE) - 1, blocks)) % len(PALETTE),
        tint=choose(len(PALETTE), THINGS),
        round=choose(2, THINGS) == 1,
        radius=1.5 + uniform(THINGS),
        home=torch.stack([WIDTH * uniform(THINGS), high], -1),
        swing=torch.stack([across, along], -1),
        walk=(way == 3) * (2.0 * choose(2, THINGS) - 1) * (WIDTH / LAP),
        beat=uniform(THINGS),
    )


def told(place: Tensor) -> Tensor:
    """Numbers of the letters in PLACES for places [..., 2] of the window."""
    x, y = place.round().long().unbind(-1)
    return y * WIDTH + x % WIDTH


def make_starts(count: int, generator: Generator) -> Tensor:
    """Random places [B, 2] of the window's upper left corner, in pixels; whole steps above."""
    device = generator.device
    x = torch.randint(WIDTH, (count,), generator=generator, device=device)
    y = torch.randint(LOWEST // STEP + 1, (count,), generator=generator, device=device)
    return torch.stack([x, STEP * y], -1).float()


def walk(start: Tensor, actions: Tensor, pace: float | Tensor = 1.0) -> Tensor:
    """Places [B, T, 2] from start [B, 2]; each action comes before the frame of its number.

    The map's upper and lower ends stop the window.
    """
    size = STEP * torch.as_tensor(pace, device=actions.device).reshape(-1, 1)
    right = size * ((actions == 4).float() - (actions == 3).float())
    down = size * ((actions == 2).float() - (actions == 1).float())
    y, heights = start[:, 1], []
    for move in down.unbind(1):
        y = (y + move).clamp(0, LOWEST)
        heights.append(y)
    x = (start[:, :1] + right.cumsum(1)) % WIDTH
    return torch.stack([x, torch.stack(heights, 1)], -1)


def render(towns: Towns, place: Tensor, time: Tensor) -> Tensor:
    """Pictures [F, 3, 16, 16] in 0..1 of F places [F, 2] at times [F], one row of towns each.

    The window's corner is rounded to whole pixels; things have soft edges.
    """
    at = torch.arange(VIEW, device=place.device)
    corner = place.round().long()
    x, y = (corner[:, :1] + at) % WIDTH, corner[:, 1:] + at  # [F, 16]
    column, row, u, v = x // BLOCK, y // BLOCK, x % BLOCK, y % BLOCK
    block = (row[:, :, None] * COLUMNS + column[:, None]).flatten(1)  # [F, P]

    def on_block(table: Tensor) -> Tensor:
        return table.gather(1, block).view(-1, VIEW, VIEW)

    p, q = (u - STREET)[:, None], (v - STREET)[:, :, None]  # 0 to 6 in a block
    middle = (BLOCK - STREET - 1) / 2
    dx, dy = (p - middle).abs(), (q - middle).abs()
    drawn = torch.stack(
        [
            torch.zeros_like(dx + dy, dtype=torch.bool),
            ((p + 0 * q) // 2 % 2 == 1),
            ((q + 0 * p) // 2 % 2 == 1),
            (p // 4 + q // 4) % 2 == 1,
            dx * dx + dy * dy < 6,
            (dx + dy - 2.5).abs() < 0.6,
        ],
        1,
    )
    pattern, paper, ink = (on_block(t) for t in (towns.pattern, towns.paper, towns.ink))
    inked = drawn.gather(1, pattern[:, None])[:, 0]
    palette = torch.tensor(PALETTE, device=place.device)
    hue = torch.arange(COLUMNS, device=place.device)[:, None] / COLUMNS
    hue = 0.5 + 0.45 * torch.cos(2 * math.pi * (hue - hue.new_tensor([0, 1, 2]) / 3))
    grey = (0.1 + 0.24 * row.float())[:, None, :, None]  # [F, 1, 16, 1]
    colour = palette[torch.where(inked, ink, paper)].permute(0, 3, 1, 2)
    colour = torch.where((u < STREET)[:, None, None], hue[column].mT[:, :, None], colour)
    colour = torch.where((v < STREET)[:, None, :, None], grey, colour)
    swing = torch.sin(2 * math.pi * (time[:, None] / PERIOD + towns.beat))  # [F, 8]
    centre = towns.home + towns.swing * swing[..., None]
    cx = centre[..., 0] + towns.walk * time[:, None]
    for i in range(THINGS):
        across = (x - cx[:, i : i + 1] + WIDTH / 2) % WIDTH - WIDTH / 2
        dx, dy = across.abs()[:, None], (y - centre[:, i, 1:]).abs()[:, :, None]
        far = torch.where(
            towns.round[:, i, None, None], (dx * dx + dy * dy).sqrt(), torch.maximum(dx, dy)
        )
        cover = (towns.radius[:, i, None, None] - far + 0.5).clamp(0, 1)[:, None]
        colour = torch.lerp(colour, palette[towns.tint[:, i]][:, :, None, None], cover)
    return colour


def film(towns: Towns, place: Tensor, time: Tensor) -> Tensor:
    """Every frame of walks: [B, T, 3, 16, 16] of places [B, T, 2] at times [T] or [B, T]."""
    count, frames = place.shape[:2]
    scene = torch.arange(count, device=place.device).repeat_interleave(frames)
    made: Tensor = render(
        towns.rows(scene), place.flatten(0, 1), time.expand(count, frames).flatten()
    )
    return made.reshape(count, frames, *made.shape[1:])
