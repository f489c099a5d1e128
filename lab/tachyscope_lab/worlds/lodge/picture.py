"""Pictures of a house from poses at times, and what each of their pixels shows.

Surfaces are numbered: walls 0..15 (four a room), floors 16..19, the ceiling, the trim (doorways,
window frames, skirting), windows, furniture and lamps (20), then what moves (8).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope_lab.worlds.lodge import light, sky
from tachyscope_lab.worlds.lodge.camera import EYE, SLOPE, direction
from tachyscope_lab.worlds.lodge.casting import Rays, Shell, meet_shell, meet_solids, nonzero
from tachyscope_lab.worlds.lodge.furniture import Solids, solids
from tachyscope_lab.worlds.lodge.houses import Houses
from tachyscope_lab.worlds.lodge.light import BAR, Daylight, Points
from tachyscope_lab.worlds.lodge.materials import KINDS, textured
from tachyscope_lab.worlds.lodge.palette import COLOURS, reflectances
from tachyscope_lab.worlds.lodge.plan import (
    DOOR,
    HEIGHT,
    LINTEL,
    MIDDLE,
    REVEAL,
    ROOMS,
    SILL,
    TOP,
    WALLS,
    WINDOW,
    room_of,
)

SIZE = 256
FLOORS = ROOMS * WALLS
CEILING, TRIM, GLASS = FLOORS + ROOMS, FLOORS + ROOMS + 1, FLOORS + ROOMS + 2
ITEMS, MOVING = GLASS + 1, GLASS + 21
SURFACES = MOVING + 8
# four rays of a pixel, no two of them in one row or column: edges of walls are upright
GRID = ((0.375, 0.125), (0.875, 0.375), (0.125, 0.625), (0.625, 0.875))
CONTRAST = 0.45
EXPOSURE, WHITE = 1.25, 2.8  # WHITE: the light that a screen shows as its brightest
ART = 0.62, 0.45  # half the size of a painting
SKIRTING, FRAME = 0.09, 0.09
STRIP = 32  # columns that are drawn together, with the solids that they may show


@dataclass(frozen=True)
class Scene:
    """What F frames have in common for all of their rays."""

    houses: Houses
    solids: Solids  # those that rays may meet
    casters: Solids  # all, that throw shadows
    light: Daylight
    prints: tuple[Tensor, Tensor, Tensor]
    material: Tensor  # [F, 22] of walls, floors, ceiling and trim
    colour: Tensor  # [F, 22, 2]
    bounce: Tensor  # [F, 4, 3]


def make_scene(houses: Houses, time: Tensor) -> Scene:
    device, frames = time.device, len(houses)
    things = solids(houses, time)
    paint = reflectances(device)
    plain, white = KINDS.index("plain"), COLOURS.index("white")
    more = torch.full((frames, 2), plain, device=device)
    material = torch.cat([houses.wall, houses.floor, more], 1)
    pair = torch.full((frames, 2, 2), white, device=device)
    colour = torch.cat([houses.wall_colour, houses.floor_colour, pair], 1)
    walls = paint[houses.wall_colour[..., 0]].unflatten(1, (ROOMS, WALLS)).mean(2)
    mean = 0.65 * walls + 0.35 * paint[houses.floor_colour[..., 0]]
    bounce = 0.55 + 0.75 * mean
    return Scene(
        houses, things, things, light.daylight(houses), light.footprints(things), material,
        colour, bounce,
    )  # fmt: skip


def make_rays(pose: Tensor, right: Tensor, up: Tensor) -> Rays:
    """Rays of poses [F, 3] through places [P] of the picture, in tangents."""
    cos, sin = (part[:, None] for part in direction(pose[:, 2]))
    dx, dy = nonzero(cos + right * sin), nonzero(sin - right * cos)
    return Rays(pose[:, :1], pose[:, 1:2], dx, dy, nonzero(up.expand_as(dx)))


def in_sight(things: Solids, pose: Tensor, left: float, right: float) -> Solids:
    """The solids of one frame that its picture may show between two tangents to the right."""
    cos, sin = direction(pose[0, 2])
    x, y = things.middle[0, :, 0] - pose[0, 0], things.middle[0, :, 1] - pose[0, 1]
    ahead, aside = cos * x + sin * y, sin * x - cos * y
    wide = things.half[0, :, :2].norm(dim=-1) + 1e-3
    kept = (ahead > -wide) & (things.middle[0, :, 2] > -1)
    kept &= aside - left * ahead > -wide * (1 + left * left) ** 0.5
    kept &= aside - right * ahead < wide * (1 + right * right) ** 0.5
    kept[0] = True  # never none
    boxes = int(kept[: things.boxes].sum())
    cylinders = int(kept[things.boxes : things.boxes + things.cylinders].sum())
    return Solids(
        things.middle[:, kept], things.half[:, kept], things.material[:, kept],
        things.colour[:, kept], things.owner[kept], boxes, cylinders,
    )  # fmt: skip


def _pick(table: Tensor, index: Tensor) -> Tensor:
    """Rows [F, P, ...] of tables [F, M, ...] by index [F, P]."""
    frame = torch.arange(len(table), device=table.device)[:, None]
    return table[frame, index]


@dataclass(frozen=True)
class Hit:
    """What rays [F, P] meet."""

    depth: Tensor
    paint: Tensor  # row of the scene's materials
    surface: Tensor
    solid: Tensor  # whether it is one; else it is the building
    number: Tensor  # of the solid
    axis: Tensor  # of the building's surface
    glass: Tensor  # whether the sky is seen
    art: Tensor  # whether it is a painting
    across: Tensor  # places on a painting, whose half sizes are ART
    upward: Tensor
    rug: Tensor


def meet(scene: Scene, rays: Rays, origin: Tensor) -> Hit:
    """What rays from eyes [F, 3] meet first."""
    shell = meet_shell(rays)
    depth, paint, parts = _building(scene, rays, shell)
    near, number = meet_solids(origin, rays, scene.solids)
    solid = near < depth
    owner = scene.solids.owner[number]
    surface = torch.where(owner < 20, ITEMS + owner, MOVING + owner - 20)
    glass, art, across, upward, rug = parts
    shown = torch.where(glass, GLASS, paint)  # a row of the paints is a number of a surface
    return Hit(
        torch.where(solid, near, depth), torch.where(solid, number + CEILING + 2, paint),
        torch.where(solid, surface, shown), solid, number, shell.axis, glass & ~solid,
        art & ~solid, across, upward, rug & ~solid,
    )  # fmt: skip


def _building(scene: Scene, rays: Rays, shell: Shell) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Depth and paint of the building where rays meet it, with its windows and paintings."""
    x, y, z = rays.at(shell.depth)
    # a hair into the room that the surface is seen from
    room = room_of(x - 1e-3 * rays.dx.sign(), y - 1e-3 * rays.dy.sign())
    upright = shell.axis < 2
    across = torch.where(shell.axis == 0, x, y).abs()
    along = torch.where(shell.axis == 0, y, x).abs() - MIDDLE
    outer = across > 1
    wall = WALLS * room + shell.axis + torch.where(outer, 0, 2)
    floor = FLOORS + room
    trim = CEILING + 1
    paint = torch.where(upright, wall, torch.where(rays.dz > 0, CEILING, floor))
    inside = upright & outer & ~shell.jamb
    has = _pick(scene.houses.window.flatten(1), 2 * room + shell.axis.clamp(max=1))

    def in_window(far: Tensor, height: Tensor) -> Tensor:
        return (far.abs() < WINDOW) & (height > SILL) & (height < TOP)

    # a window's glass lies behind the wall: past its sides the frame is seen
    opening = inside & has & in_window(along, z)
    speed = torch.where(shell.axis == 0, rays.dx, rays.dy).abs()
    deeper = shell.depth + REVEAL / speed.clamp(min=1e-3)
    bx, by, bz = rays.at(deeper)
    behind = torch.where(shell.axis == 0, by, bx).abs() - MIDDLE
    middle = (SILL + TOP) / 2
    bars = (behind.abs() < BAR) | ((bz - middle).abs() < BAR)
    bars = (
        bars
        | (behind.abs() > WINDOW - 1.6 * BAR)
        | ((bz - middle).abs() > (TOP - SILL) / 2 - 1.6 * BAR)
    )
    glass = opening & in_window(behind, bz) & ~bars
    sill = upright & outer & has & (z > SILL - 0.05) & (z < SILL) & (along.abs() < WINDOW + 0.1)
    frame = upright & ~outer & (along.abs() < DOOR + FRAME) & (z < LINTEL + FRAME)
    trimmed = (
        shell.jamb | (upright & ((z < SKIRTING) | (z > HEIGHT - 0.06))) | frame | opening | sill
    )
    paint = torch.where(trimmed, trim, paint)
    # a large painting where an outer wall has no window; else a small one on the inner wall
    aside = torch.where(outer, along, (along - 1.28) * 2.4)
    above = torch.where(outer, z - 1.6, (z - 1.55) * 1.4)
    hung = upright & ~shell.jamb & torch.where(outer, ~has, has)
    art = hung & (aside.abs() < ART[0]) & (above.abs() < ART[1])
    rug = (shell.axis == 2) & (rays.dz < 0) & _pick(scene.houses.rug, room)
    rug = rug & ((x.abs() - MIDDLE).abs() < 1.3) & ((y.abs() - MIDDLE).abs() < 0.95)
    # the frame behind the wall keeps the wall's depth: shading alone tells them apart
    return shell.depth, paint, (glass, art, aside, above, rug)


def _normals(
    scene: Scene, hit: Hit, rays: Rays, x: Tensor, y: Tensor, z: Tensor
) -> tuple[Tensor, ...]:
    """Unit normals, the axis (3: none, it is round), and texture coordinates."""
    middle, half = (_pick(t, hit.number) for t in (scene.solids.middle, scene.solids.half))
    local = torch.stack([x, y, z], -1) - middle
    q = local / half
    boxes, rounds = scene.solids.boxes, scene.solids.boxes + scene.solids.cylinders
    box = hit.solid & (hit.number < boxes)
    cylinder = hit.solid & (hit.number >= boxes) & (hit.number < rounds)
    ball = hit.solid & (hit.number >= rounds)
    cap = cylinder & (q[..., 2].abs() > 0.9999)
    axis = torch.where(box, q.abs().argmax(-1), torch.where(hit.solid, 3, hit.axis))
    axis = torch.where(cap, 2, axis)
    way = torch.stack([rays.dx, rays.dy, rays.dz], -1)
    flat = F.one_hot(axis.clamp(max=2), 3) * -way.sign()
    curved = torch.where(ball[..., None], q / half, torch.stack([q[..., 0], q[..., 1], 0 * x], -1))
    curved = curved / curved.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    normal = torch.where((axis == 3)[..., None], curved, flat)
    # from the lower corner of a solid, so that shelves and drawers begin at its foot
    at = torch.where(hit.solid[..., None], local + half, torch.stack([x, y, z], -1))
    angle = torch.atan2(q[..., 1], q[..., 0]) * half[..., 0]
    u = torch.where(axis == 3, angle, torch.where(axis == 0, at[..., 1], at[..., 0]))
    v = torch.where(axis == 2, at[..., 1], at[..., 2])
    return (*normal.unbind(-1), axis, u, v)


def _widths(pose: Tensor, rays: Rays, depth: Tensor, axis: Tensor, normal: tuple[Tensor, ...],
            pixel: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The width of a pixel on the surface along its two texture coordinates, in metres."""
    cos, sin = (part[:, None] for part in direction(pose[:, 2]))
    rx, ry = sin.expand_as(depth), (-cos).expand_as(depth)
    on_x, on_z = axis == 0, axis == 2
    dn = torch.where(on_x, rays.dx, torch.where(on_z, rays.dz, rays.dy))
    rn = torch.where(on_x, rx, torch.where(on_z, 0.0, ry)) / dn
    un = torch.where(on_z, 1.0, 0.0) / dn
    du, ru = torch.where(on_x, rays.dy, rays.dx), torch.where(on_x, ry, rx)
    dv = torch.where(on_z, rays.dy, rays.dz)
    rv, uv = torch.where(on_z, ry, 0.0), torch.where(on_z, 0.0, 1.0)
    scale = 0.8 * pixel * depth
    wide_u = scale * ((ru - rn * du).abs() + (un * du).abs())
    wide_v = scale * ((rv - rn * dv).abs() + (uv - un * dv).abs())
    slant = (normal[0] * rays.dx + normal[1] * rays.dy + normal[2] * rays.dz).abs()
    wide = scale / slant.clamp(min=0.2)
    return torch.where(axis == 3, wide, wide_u), torch.where(axis == 3, wide, wide_v)


def shade(scene: Scene, rays: Rays, pose: Tensor, hit: Hit, pixel: float, sparse: bool) -> Tensor:
    """The light [3, F, P] that comes along rays; sparse: shadows only where they may fall."""
    houses, lit = scene.houses, scene.light
    x, y, z = rays.at(hit.depth)
    nx, ny, nz, axis, u, v = _normals(scene, hit, rays, x, y, z)
    room = room_of(x + 1e-3 * nx, y + 1e-3 * ny)
    wide_u, wide_v = _widths(pose, rays, hit.depth, axis, (nx, ny, nz), pixel)
    kind = _pick(torch.cat([scene.material, scene.solids.material], 1), hit.paint)
    kind = torch.where(hit.rug, KINDS.index("fabric"), kind)
    mixed, bright, gloss, glow = textured(kind, u, v, wide_u, wide_v)
    paint = reflectances(x.device)
    pair = paint[_pick(torch.cat([scene.colour, scene.solids.colour], 1), hit.paint)]
    edge = torch.maximum((x.abs() - MIDDLE).abs() - 0.35, (y.abs() - MIDDLE).abs())
    border = ((edge > 0.74) & (edge < 0.84)) | (edge < 0.25)
    pair = torch.where(hit.rug[..., None, None], _pick(paint[houses.rug_colour], room), pair)
    mixed = torch.where(hit.rug, border.to(mixed), mixed)
    albedo = pair[..., 0, :] + mixed[..., None] * (pair[..., 1, :] - pair[..., 0, :])
    albedo = torch.where(
        hit.art[..., None], _painting(scene, room, hit), albedo * bright[..., None]
    )
    mx, my = light.mirrored(nx, ny, room)
    at = Points(x.abs(), y.abs(), z, mx, my, nz, room)
    window = _pick(houses.window, room).to(x.dtype)
    coming = light.diffuse(at, lit, window, _pick(scene.bounce, room))
    floor = (axis == 2) & ~hit.solid & (nz > 0)
    if sparse:
        there = floor[0].nonzero()[:, 0]
        coming[:, 0, there] *= light.under_things(x[:, there], y[:, there], scene.prints)[0]
    else:
        coming = coming * torch.where(floor, light.under_things(x, y, scene.prints), 1.0)
    # the sun, through the windows of the room
    sun = lit.to_sun[:, None].expand(*x.shape, 3)
    sx, sy = light.mirrored(sun[..., 0], sun[..., 1], room)
    straight = (nx * sun[..., 0] + ny * sun[..., 1] + nz * sun[..., 2]).clamp(min=0)
    shining = light.through_windows(at, (sx, sy, sun[..., 2]), window, 0.012) * straight
    shining = shining * (lit.sun[:, :1] > 0)
    start = x + 0.01 * nx, y + 0.01 * ny, z + 0.01 * nz
    if sparse:
        at_sun = (shining[0] > 0).nonzero()[:, 0]
        dark = light.in_shadow(tuple(p[:, at_sun] for p in start), lit.to_sun, scene.casters)
        shining[0, at_sun] *= (~dark[0]).to(shining)
    else:
        shining = shining * ~light.in_shadow(start, lit.to_sun, scene.casters)
    coming = coming + lit.sun.T[:, :, None] * shining
    # windows mirrored in what is polished
    length = torch.rsqrt(rays.dx**2 + rays.dy**2 + rays.dz**2)
    wx, wy, wz = rays.dx * length, rays.dy * length, rays.dz * length
    slant = wx * nx + wy * ny + wz * nz
    rx, ry = light.mirrored(wx - 2 * slant * nx, wy - 2 * slant * ny, room)
    back = light.through_windows(at, (rx, ry, wz - 2 * slant * nz), window, 0.08)
    mirror = gloss * back * (0.12 + 0.88 * (1 + slant).clamp(0, 1) ** 4)
    out = albedo.permute(2, 0, 1) * coming + lit.sky.T[:, :, None] * mirror
    warm = out.new_tensor([3.2, 2.5, 1.6])[:, None, None]
    out = torch.where(glow > 0, albedo.permute(2, 0, 1) * warm * (0.55 + 0.45 * slant.abs()), out)
    far = sky.outside(rays.dx, rays.dy, rays.dz, houses.mood)
    return torch.where(hit.glass, 1.25 * far, out)


def _painting(scene: Scene, room: Tensor, hit: Hit) -> Tensor:
    """The colours of paintings on outer walls without a window: [F, P, 3]."""
    a, b = hit.across, hit.upward
    which = 2 * room + hit.axis.clamp(max=1)
    three = _pick(reflectances(a.device)[scene.houses.art].flatten(1, 2), which)
    disc = (a + 0.16) ** 2 + (b - 0.1) ** 2 < 0.032
    land = b < -0.12 + 0.07 * (6 * a + which).sin()
    hills = b < 0.0 + 0.09 * (4 * a + 2 * which).cos()
    colour = torch.where(disc[..., None], three[..., 1, :], three[..., 0, :])
    colour = torch.where(hills[..., None], 0.6 * three[..., 2, :], colour)
    colour = torch.where(land[..., None], three[..., 2, :], colour)
    border = torch.maximum(a.abs() - ART[0], b.abs() - ART[1])
    colour = torch.where((border > -0.1)[..., None], colour.new_tensor([0.8, 0.78, 0.72]), colour)
    return torch.where((border > -0.035)[..., None], colour.new_tensor([0.05, 0.04, 0.035]), colour)


def exposed(light: Tensor) -> Tensor:
    """Light as a screen shows it, in 0..1: bright parts are compressed, not cut."""
    x = (EXPOSURE * light).clamp(min=0)
    x = x * (1 + x / WHITE**2) / (1 + x)
    shown = x.clamp(1e-6, 1) ** (1 / 2.2)
    return torch.lerp(shown, shown * shown * (3 - 2 * shown), CONTRAST)


def _places(
    size: int, grid: tuple[tuple[float, float], ...], columns: slice, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tangents right and up of the rays of a picture's columns: [size · columns · samples]."""
    at = torch.arange(size, device=device, dtype=torch.float32)
    sub = torch.tensor(grid, device=device)
    right = ((at[columns, None] + sub[:, 0]) / size * 2 - 1) * SLOPE
    up = (1 - (at[:, None] + sub[:, 1]) / size * 2) * SLOPE
    shape = (size, len(right), len(grid))
    return right[None].expand(shape).flatten(), up[:, None].expand(shape).flatten()


def draw_part(
    scene: Scene, pose: Tensor, size: int, columns: slice, antialias: bool, sparse: bool
) -> tuple[Tensor, Tensor]:
    """Colours [F, 3, size, columns] and surfaces [F, size, columns] of a part of the picture."""
    grid = GRID if antialias else ((0.5, 0.5),)
    rays = make_rays(pose, *_places(size, grid, columns, pose.device))
    origin = F.pad(pose[:, :2], (0, 1), value=EYE)
    hit = meet(scene, rays, origin)
    pixel = 2 * SLOPE / size * (0.75 if antialias else 1.0)
    colour = exposed(shade(scene, rays, pose, hit, pixel, sparse))
    wide = columns.stop - columns.start
    shape = (len(pose), size, wide, len(grid))
    return colour.view(3, *shape).mean(-1).transpose(0, 1), hit.surface.view(shape)[..., 0]


def draw(
    houses: Houses, pose: Tensor, time: Tensor, size: int = SIZE, antialias: bool = True
) -> tuple[Tensor, Tensor]:
    """Pictures [F, 3, size, size] in 0..1 of F poses [F, 3] at times [F], one row of houses each.

    And the surface [F, size, size] that each pixel's first ray meets. A CPU draws frame by frame,
    in strips, each with the solids in its sight: the same picture for less work.
    """
    if pose.device.type != "cpu":
        return draw_part(
            make_scene(houses, time.to(pose.dtype)), pose, size, slice(0, size), antialias, False
        )
    frames = []
    for i in range(len(pose)):
        here, rows = pose[i : i + 1], slice(i, i + 1)
        scene = make_scene(houses.rows(rows), time[rows].to(pose.dtype))
        strips = []
        for first in range(0, size, STRIP):
            columns = slice(first, min(first + STRIP, size))
            ends = [(edge / size * 2 - 1) * SLOPE for edge in (columns.start, columns.stop)]
            part = replace(scene, solids=in_sight(scene.casters, here, *ends))
            strips.append(draw_part(part, here, size, columns, antialias, True))
        frames.append([torch.cat(parts, -1) for parts in zip(*strips, strict=True)])
    colours, surfaces = zip(*frames, strict=True)
    return torch.cat(colours), torch.cat(surfaces)


def render(houses: Houses, pose: Tensor, time: Tensor, size: int = SIZE) -> Tensor:
    """Pictures [F, 3, size, size] in 0..1 from poses [F, 3] at times [F], a row of houses each."""
    return draw(houses, pose, time, size)[0]


def see(houses: Houses, pose: Tensor, time: Tensor, size: int = SIZE) -> Tensor:
    """Which surface each pixel's middle shows: [F, size, size]."""
    return draw(houses, pose, time, size, antialias=False)[1]
