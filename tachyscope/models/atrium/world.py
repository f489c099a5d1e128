"""Atrium: a square room seen in first person, with an exact picture of every pose.

The room is 1 by 1 by HEIGHT. Each wall has a pattern, two colours and a phase; before each wall
may float a lit ball or box, at rest, sliding along the wall or bobbing. A prompt names some of it.

A turn is 15 degrees, so a full turn is 24 steps: with some walking it fits into the 32 latent
frames of most training clips, and its end shows what is further back than any short window. At 7.5
degrees the picture would move more smoothly, but only clips of over 48 frames could teach memory.

`pace` is the part of a step that a frame takes, from 1/30 (half a degree) to 1 (15 degrees);
`tempo` the part of a step by which moving things advance in a frame.

Random numbers come from a CPU generator, so that a seed is the same world on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from tachyscope.core.errors import TachyscopeError

ACTIONS = ".wsadqe"  # stay, forward, back, left, right, turn left, turn right
TURN = 24  # steps of a full turn
STRIDE = 0.05
NEAR = 0.25  # least distance of the walker to a wall
HEIGHT = 0.7
EYE = 0.35
SLOPE = 0.9  # tangent of half the field of view
PERIOD = 16  # frames of a moving object's path
SIZE = 128

KINDS = ("plain", "stripes", "bands", "checks", "dots")
THINGS = ("", "ball", "box")
SIDES = ("front", "left", "back", "right")  # as a prompt names walls, by the first frame
PALETTE = {
    "red": (0.88, 0.14, 0.14),
    "orange": (0.98, 0.55, 0.10),
    "yellow": (0.96, 0.90, 0.22),
    "green": (0.16, 0.68, 0.24),
    "blue": (0.16, 0.32, 0.92),
    "purple": (0.60, 0.20, 0.78),
    "white": (0.94, 0.94, 0.94),
    "black": (0.10, 0.10, 0.12),
}
COLOURS = tuple(PALETTE)
FLOOR, CEILING, OBJECTS = 4, 5, 6  # surfaces: walls 0..3, floor, ceiling, objects 6..9

WAVES = 3.0  # periods of a pattern along a wall
INSET = 0.09  # from a wall to the middle of its object
FLOAT = 0.24  # height of an object's middle
SWING = 0.12  # how far a moving object goes from its middle


@dataclass(frozen=True)
class Rooms:
    """Scenes in one batch, everything [B, ...]; walls are numbered anticlockwise from x = 1."""

    kind: Tensor  # [B, 6] pattern of walls 0..3, floor, ceiling
    colour: Tensor  # [B, 6, 2]
    phase: Tensor  # [B, 6] in periods of the pattern
    thing: Tensor  # [B, 4] object before each wall; 0 is none
    tint: Tensor  # [B, 4] its colour
    radius: Tensor  # [B, 4]
    place: Tensor  # [B, 4] along its wall
    slide: Tensor  # [B, 4] amplitude along the wall
    bob: Tensor  # [B, 4] amplitude up and down
    beat: Tensor  # [B, 4] phase of that motion, in periods
    said: Tensor  # [B, 4] whether the prompt describes this wall
    told: Tensor  # [B, 4] whether the prompt describes this object

    def __len__(self) -> int:
        return len(self.kind)

    def to(self, device: torch.device | str) -> Rooms:
        return Rooms(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def rows(self, index: Tensor | slice) -> Rooms:
        return Rooms(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def repeat(self, count: int) -> Rooms:
        """A batch of the first room, `count` times."""
        return self.rows(torch.zeros(count, dtype=torch.long))


def make_rooms(count: int, generator: Generator, motion: float = 1.0) -> Rooms:
    """Random rooms; `motion` scales the things' own motion, 0 stops it."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    def choose(options: int, *shape: int) -> Tensor:
        return torch.randint(options, (count, *shape), generator=generator)

    kind = choose(len(KINDS), 6)
    kind[:, FLOOR] = 3 * (kind[:, FLOOR] % 2)  # plain or checks
    kind[:, CEILING] = 0
    first = choose(len(COLOURS), 6)
    second = (first + 1 + choose(len(COLOURS) - 1, 6)) % len(COLOURS)
    phase = uniform(6)
    phase[:, FLOOR:] = 0
    thing = choose(2, 4) * (1 + choose(2, 4))  # half of the walls have none
    way = choose(4, 4)  # still, still, sliding, bobbing
    slide = (way == 2) * SWING * motion
    bob = (way == 3) * SWING * motion
    place = 0.5 + (2 * uniform(4) - 1) * (0.24 - (way == 2) * SWING)
    said = uniform(4).argsort(-1).argsort(-1) < 2 + choose(2, 1)
    return Rooms(
        kind=kind,
        colour=torch.stack([first, second], -1),
        phase=phase,
        thing=thing,
        tint=choose(len(COLOURS), 4),
        radius=0.055 + 0.025 * uniform(4),
        place=place,
        slide=slide,
        bob=bob,
        beat=uniform(4),
        said=said,
        told=(choose(2, 4) == 1) & (thing > 0),
    )


def letters(text: str, actions: str = ACTIONS) -> Tensor:
    """Action numbers of a string of letters."""
    wrong = sorted(set(text) - set(actions))
    if wrong:
        raise TachyscopeError(
            f"actions are letters of {actions!r}, got {''.join(wrong)!r}: use these"
        )
    return torch.tensor([actions.index(letter) for letter in text])


def step(pose: Tensor, action: Tensor, pace: float | Tensor = 1.0) -> Tensor:
    """The pose [..., 3] after an action [...]; along a wall the walker slides.

    pace: the part of a step that a frame takes, [...] or one for all.
    """
    x, y, heading = pose.unbind(-1)
    heading = (heading + pace * ((action == 5).to(pose) - (action == 6).to(pose))) % TURN
    ahead = (action == 1).to(pose) - (action == 2).to(pose)
    aside = (action == 3).to(pose) - (action == 4).to(pose)
    cos, sin = _direction(heading)
    x = (x + pace * STRIDE * (ahead * cos - aside * sin)).clamp(NEAR, 1 - NEAR)
    y = (y + pace * STRIDE * (ahead * sin + aside * cos)).clamp(NEAR, 1 - NEAR)
    return torch.stack([x, y, heading], -1)


def tempo_of(pace: float) -> float:
    """The default tempo of a pace: the nearest power of two."""
    return 2.0 ** round(math.log2(pace))


def walk(start: Tensor, actions: Tensor, pace: float | Tensor = 1.0) -> Tensor:
    """The poses [B, T, 3] after each action [B, T], from start [B, 3]."""
    poses = []
    for action in actions.unbind(1):
        start = step(start, action, pace)
        poses.append(start)
    return torch.stack(poses, 1)


def make_starts(count: int, generator: Generator) -> Tensor:
    """Random poses [B, 3], at multiples of the turn's step."""
    place = NEAR + (1 - 2 * NEAR) * torch.rand(count, 2, generator=generator)
    heading = torch.randint(TURN, (count, 1), generator=generator)
    return torch.cat([place, heading.to(place)], 1)


def seen_from(pose: Tensor, front: Tensor) -> Tensor:
    """Poses [..., 3] in the room turned by quarters [...], so that wall `front` becomes wall 0."""
    angle = -front.to(pose) * (math.pi / 2)
    cos, sin = angle.cos(), angle.sin()
    x, y, heading = pose[..., 0] - 0.5, pose[..., 1] - 0.5, pose[..., 2]
    turned_heading = (heading - front.to(pose) * (TURN // 4)) % TURN
    return torch.stack([0.5 + cos * x - sin * y, 0.5 + sin * x + cos * y, turned_heading], -1)


def rays(pose: Tensor, grid: int) -> Tensor:
    """The rays through the centres of a grid, from poses [..., 3]: [..., grid², 8].

    The walker's position (x, y), the unit direction, and the hit point on the empty room's walls.
    """
    at = ((torch.arange(grid, device=pose.device, dtype=pose.dtype) + 0.5) / grid * 2 - 1) * SLOPE
    up, right = torch.meshgrid(-at, at, indexing="ij")
    up, right = up.flatten(), right.flatten()
    cos, sin = (part[..., None] for part in _direction(pose[..., 2]))
    way = torch.stack([cos + right * sin, sin - right * cos, up.expand_as(cos * up)], -1)
    way = F.normalize(way, dim=-1)
    place = pose[..., None, :2].expand(*way.shape[:-1], 2)
    eye = F.pad(place, (0, 1), value=EYE)
    ahead = (way > 0).to(pose.dtype)
    walls = torch.cat([ahead[..., :2], HEIGHT * ahead[..., 2:]], -1)
    depth = ((walls - eye) / _nonzero(way)).amin(-1, keepdim=True)
    return torch.cat([place, way, eye + depth * way], -1)


def facing(pose: Tensor) -> Tensor:
    """The walls that poses [..., 3] look at: [...]."""
    return ((pose[..., 2] + TURN // 8) // (TURN // 4) % 4).long()


def stir(rooms: Rooms, pose: Tensor, which: Tensor) -> Rooms:
    """The rooms, those of `which` [B] with a moving thing at the wall that the pose faces."""
    ahead = (facing(pose)[:, None] == torch.arange(4, device=pose.device)) & which[:, None]
    rests = ahead & ((rooms.thing == 0) | (rooms.slide + rooms.bob == 0))
    slides = rooms.tint % 2 == 0
    reach = 0.24 - SWING  # a sliding thing stays before its wall
    changes = {
        "thing": torch.where(ahead & (rooms.thing == 0), 1 + rooms.tint // 2 % 2, rooms.thing),
        "slide": torch.where(rests, SWING * slides, rooms.slide),
        "bob": torch.where(rests, SWING * ~slides, rooms.bob),
        "place": torch.where(
            rests & slides, rooms.place.clamp(0.5 - reach, 0.5 + reach), rooms.place
        ),
    }
    return replace(rooms, **changes)


def _direction(heading: Tensor) -> tuple[Tensor, Tensor]:
    angle = (heading % TURN) * (2 * math.pi / TURN)
    return angle.cos(), angle.sin()


def _centres(rooms: Rooms, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of objects x, y, z, each [F, 4], for rooms and times of F frames."""
    swing = torch.sin(2 * math.pi * (time[:, None] / PERIOD + rooms.beat))
    along = rooms.place + rooms.slide * swing
    near, far = torch.full_like(along, INSET), torch.full_like(along, 1 - INSET)
    x = torch.stack([far[:, 0], along[:, 1], near[:, 2], along[:, 3]], 1)
    y = torch.stack([along[:, 0], far[:, 1], along[:, 2], near[:, 3]], 1)
    return x, y, FLOAT + rooms.bob * swing


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1e-9, 1e-9, x)


def cast(
    rooms: Rooms, pose: Tensor, time: Tensor, size: int, samples: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast rays for F frames of F rooms: colour before light, light, surface.

    Colour is [3, F, P, samples²], light and surface are [F, P, samples²], with P = size² pixels row
    by row.
    """
    device, dtype = pose.device, pose.dtype
    at = torch.arange(size, device=device, dtype=dtype)
    sub = (torch.arange(samples, device=device, dtype=dtype) + 0.5) / samples
    across = ((at[:, None] + sub) / size * 2 - 1) * SLOPE  # [size, samples]
    shape = (size, size, samples, samples)
    right = across[None, :, None, :].expand(shape).reshape(1, size * size, samples**2)
    up = -across[:, None, :, None].expand(shape).reshape(1, size * size, samples**2)

    def wide(value: Tensor) -> Tensor:
        return value[:, None, None]

    ox, oy = wide(pose[:, 0]), wide(pose[:, 1])
    cos, sin = map(wide, _direction(pose[:, 2]))
    dx, dy, dz = _nonzero(cos + right * sin), _nonzero(sin - right * cos), _nonzero(up)
    tx = ((dx > 0).to(dtype) - ox) / dx
    ty = ((dy > 0).to(dtype) - oy) / dy
    tz = ((dz > 0).to(dtype) * HEIGHT - EYE) / dz
    depth = torch.minimum(torch.minimum(tx, ty), tz)
    on_z, on_x = tz <= depth, tx <= depth
    wall = torch.where(on_x, torch.where(dx > 0, 0, 2), torch.where(dy > 0, 1, 3))
    surface = torch.where(on_z, torch.where(dz > 0, CEILING, FLOOR), wall)
    px, py, pz = ox + depth * dx, oy + depth * dy, EYE + depth * dz

    flat = surface.flatten(1)

    def on_surface(table: Tensor) -> Tensor:
        return table.gather(1, flat).view(surface.shape)

    kind, phase = on_surface(rooms.kind), on_surface(rooms.phase.to(dtype))
    u = WAVES * torch.where(on_x & ~on_z, py, px)
    v = WAVES * torch.where(on_z, py, pz)
    u, v = torch.where(kind == 2, u, u + phase), torch.where(kind == 2, v + phase, v)
    u, v = u - u.floor(), v - v.floor()
    tall, flat_bands = u < 0.5, v < 0.5
    dots = (u - 0.5) ** 2 + (v - 0.5) ** 2 < 0.09
    second = (kind == 1) & tall | (kind == 2) & flat_bands
    second = second | (kind == 3) & (tall ^ flat_bands) | (kind == 4) & dots

    palette = torch.tensor(list(PALETTE.values()), device=device, dtype=dtype)
    paint = palette[rooms.colour]  # [F, 6, 2, 3]
    colour = [
        torch.where(second, on_surface(paint[:, :, 1, c]), on_surface(paint[:, :, 0, c]))
        for c in range(3)
    ]
    # a lamp in the middle of the ceiling; different brightness of the sides shows the corners
    far = (px - 0.5) ** 2 + (py - 0.5) ** 2 + (pz - HEIGHT) ** 2
    side = torch.where(on_z, 0.86, torch.where(on_x, 1.0, 0.8))
    light = side * 1.15 / (1 + 0.8 * far)

    tint = palette[rooms.tint]  # [F, 4, 3]
    centres = _centres(rooms, time.to(dtype))
    square = dx * dx + dy * dy + dz * dz
    for i in range(4):
        cx, cy, cz = (wide(c[:, i]) for c in centres)
        s, thing = wide(rooms.radius[:, i].to(dtype)), wide(rooms.thing[:, i])
        gx, gy, gz = ox - cx, oy - cy, EYE - cz
        b = gx * dx + gy * dy + gz * dz
        disc = b * b - square * (gx * gx + gy * gy + gz * gz - s * s)
        ball = (-b - disc.clamp(min=0).sqrt()) / square
        lit = (0.4 * (gx + dx * ball) + 0.3 * (gy + dy * ball) + 0.86 * (gz + dz * ball)) / s
        # a box of half edge 0.8 s: entered at the last of three slabs, left at the first
        e = 0.8 * s
        ends = [(g, (e / d).abs()) for g, d in ((-gx / dx, dx), (-gy / dy, dy), (-gz / dz, dz))]
        enter = [g - w for g, w in ends]
        leave = [g + w for g, w in ends]
        box = torch.maximum(torch.maximum(enter[0], enter[1]), enter[2])
        out = torch.minimum(torch.minimum(leave[0], leave[1]), leave[2])
        shade = torch.where(
            enter[2] >= box,
            torch.where(dz > 0, 0.45, 1.05),
            torch.where(enter[0] >= box, 0.85, 0.65),
        )
        is_ball = thing == 1
        t = torch.where(is_ball, ball, box)
        hit = torch.where(is_ball, disc > 0, (out > box) & (thing == 2)) & (t > 0) & (t < depth)
        depth = torch.where(hit, t, depth)
        surface = torch.where(hit, OBJECTS + i, surface)
        glow = torch.where(is_ball, 0.45 + 0.65 * lit.clamp(min=0), shade)
        light = torch.where(hit, glow, light)
        colour = [torch.where(hit, wide(tint[:, i, c]), colour[c]) for c in range(3)]
    return torch.stack(colour), light, surface


def render(rooms: Rooms, pose: Tensor, time: Tensor, size: int = SIZE, samples: int = 2) -> Tensor:
    """Pictures [F, 3, size, size] in 0..1 of F poses [F, 3] at times [F], one row of rooms each.

    A pixel is the mean of samples² rays on a regular grid inside it.
    """
    colour, light, _ = cast(rooms, pose, time, size, samples)
    picture = (colour * light).clamp(0, 1).mean(-1)  # [3, F, P]
    return picture.transpose(0, 1).unflatten(-1, (size, size))


def see(rooms: Rooms, pose: Tensor, time: Tensor, size: int = SIZE) -> Tensor:
    """The surface at each pixel's centre: [F, size, size]; 0..3 walls, 6..9 objects."""
    return cast(rooms, pose, time, size, 1)[2].view(len(pose), size, size)
