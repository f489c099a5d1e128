"""Textures as functions of a place on a surface, each filtered by the width of a pixel there.

All are one pattern of cells: seams between them, a second colour on alternate cells, a dot in each,
an own tint for each, and a grain of sines. Periodic parts are integrated over a pixel exactly;
random ones fade as cells become smaller than a pixel.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

TINY = 1e-4


@dataclass(frozen=True)
class Material:
    """Lengths are metres; shares are of a cell's side, or of the light."""

    u: float = 1.0  # size of a cell
    v: float = 1.0
    shift: float = 0.0  # of a row against the one below
    scatter: float = 0.0  # of rows, at random
    seam_u: float = 0.0  # share of a cell that is seam
    seam_v: float = 0.0
    dark: float = 0.0  # how much darker seams are
    tint: float = 0.0  # how much lighter and darker cells are than each other
    variety: float = 0.0  # how much cells differ between the two colours
    across: float = 0.0  # 1: cells alternate between the colours along u
    upward: float = 0.0  # 1: along v
    dot: float = 0.0  # radius of a dot of the second colour
    grain_u: float = 1.0  # waves a metre
    grain_v: float = 1.0
    grain: float = 0.0  # how strong
    gloss: float = 0.0
    glow: float = 0.0


MATERIALS = {
    "plain": Material(grain=0.025, grain_u=1.3, grain_v=1.1),
    "stripes": Material(u=0.24, across=1.0, grain=0.01),
    "bricks": Material(0.3, 0.1, 0.5, 0, 0.045, 0.13, 0.35, 0.26, grain=0.06, grain_u=9,
                       grain_v=14),
    "tiles": Material(0.2, 0.2, seam_u=0.04, seam_v=0.04, dark=0.22, tint=0.08, variety=0.55,
                      grain=0.02, grain_u=3, grain_v=3, gloss=0.2),
    "boards": Material(0.16, 9.0, seam_u=0.06, dark=0.45, tint=0.1, grain=0.07, grain_u=14,
                       grain_v=0.7),
    "dots": Material(0.3, 0.3, 0.5, dot=0.2, grain=0.01),
    "planks": Material(1.3, 0.15, 0, 1, 0.006, 0.035, 0.5, 0.22, grain=0.09, grain_u=0.9,
                       grain_v=22, gloss=0.12),
    "checks": Material(0.5, 0.5, seam_u=0.012, seam_v=0.012, dark=0.3, tint=0.05, across=1,
                       upward=1, grain=0.03, grain_u=2, grain_v=2, gloss=0.16),
    "slabs": Material(0.8, 0.8, 0.5, 0, 0.012, 0.012, 0.35, 0.12, grain=0.06, grain_u=2.3,
                      grain_v=2, gloss=0.08),
    "wood": Material(5.0, 5.0, grain=0.11, grain_u=1.6, grain_v=18, gloss=0.06),
    "fabric": Material(0.025, 0.025, 0.5, seam_u=0.25, seam_v=0.25, dark=0.16, grain=0.04,
                       grain_u=3, grain_v=3),
    "books": Material(0.052, 0.31, 0, 0.7, 0.1, 0.12, 0.75, 0.5, 1.0, grain=0.02),
    "drawers": Material(0.566, 0.233, seam_u=0.02, seam_v=0.05, dark=0.5, dot=0.05,
                        grain=0.03, grain_u=2, grain_v=9),
    "leaves": Material(0.05, 0.07, 0.5, 0.6, 0.25, 0.2, 0.3, 0.75, grain=0.25, grain_u=9,
                       grain_v=7),
    "stone": Material(5.0, 5.0, grain=0.07, grain_u=3, grain_v=2.4, gloss=0.04),
    "gloss": Material(gloss=0.55),
    "glow": Material(glow=1.0),
}  # fmt: skip
KINDS = tuple(MATERIALS)
ON_WALLS = tuple(KINDS.index(k) for k in ("stripes", "bricks", "bricks", "boards", "dots", "tiles"))
ON_FLOORS = tuple(KINDS.index(k) for k in ("planks", "planks", "checks", "slabs"))
_TABLE = [astuple(material) for material in MATERIALS.values()]


def _covered(x: Tensor, width: Tensor, share: Tensor) -> Tensor:
    """How much of [x - width / 2, x + width / 2] lies in the first share of a step."""

    def below(at: Tensor) -> Tensor:
        whole = at.floor()
        return whole * share + torch.minimum(at - whole, share)

    return (below(x + width / 2) - below(x - width / 2)) / width


def _alternating(x: Tensor, width: Tensor) -> Tensor:
    """The mean of +1 on even and -1 on odd cells over a pixel."""
    return 2 * _covered(x / 2, width / 2, x.new_tensor(0.5)) - 1


def _hash(i: Tensor, j: Tensor) -> Tensor:
    """A number in 0..1 for a cell, by whole numbers alone: the same on every device."""
    # products of 32 bits in 64: no number overflows
    h = (i.long() & 0xFFFF) * 0x9E37 + (j.long() & 0xFFFF) * 0x85EB + 0x27D4
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    h = ((h ^ (h >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    return ((h ^ (h >> 15)) & 0xFFFF).float() / 0xFFFF


def _grain(u: Tensor, v: Tensor, width: Tensor) -> Tensor:
    """A sum of warped sines of mean 0, each fading as a pixel comes near its wave's length."""
    total = torch.zeros_like(u)
    warp = 0.9 * (0.7 * v + 1.3 * (0.41 * u).sin()).sin()
    for size, turn, strength in ((1.0, 0.3, 0.5), (2.3, 1.1, 0.35), (4.9, -0.6, 0.3)):
        a, b = size * math.cos(turn), size * math.sin(turn)
        wave = (2 * math.pi * (a * u + b * v) + 2.3 * warp + 5 * size).sin()
        wave = wave * (2 * math.pi * (a * v - b * u) * 0.83 + 1.7 * warp).cos()
        total = total + strength * wave * torch.exp(-4.0 * (size * width) ** 2)
    return total


def textured(
    kind: Tensor, u: Tensor, v: Tensor, wide_u: Tensor, wide_v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The share of the second colour, the brightness, the gloss and the glow of places [...].

    kind is the material's number, wide_u and wide_v the width of a pixel there in metres.
    """
    table = torch.tensor(_TABLE, device=u.device, dtype=u.dtype)
    (size_u, size_v, shift, scatter, seam_u, seam_v, dark, tint, variety, across, upward, dot,
     grain_u, grain_v, grain, gloss, glow) = table.T.contiguous()[:, kind].unbind(0)  # fmt: skip
    noise = _grain(u * grain_u, v * grain_v, torch.maximum(wide_u * grain_u, wide_v * grain_v))
    y, wy = v / size_v, (wide_v / size_v).clamp(min=TINY)
    row = y.floor()
    x = u / size_u + shift * (row % 2) + scatter * _hash(row, row * 0 + 7)
    wx = (wide_u / size_u).clamp(min=TINY)
    column = x.floor()
    cell = _hash(column, row)
    fade = (1.6 - 1.2 * torch.maximum(wx, wy)).clamp(0, 1)
    in_seam_u, in_seam_v = _covered(x, wx, seam_u), _covered(y, wy, seam_v)
    seams = in_seam_u + in_seam_v - in_seam_u * in_seam_v
    along = 1 + across * (_alternating(x, wx) - 1)
    rising = 1 + upward * (_alternating(y, wy) - 1)
    mixed = (0.5 - 0.5 * along * rising) * (across + upward > 0)
    # a dot's edge is as soft as a pixel is wide; far away only its area counts
    far = torch.hypot((x - column - 0.5) * size_u, (y - row - 0.5) * size_v)
    radius, wide = dot * size_u, torch.maximum(wide_u, wide_v).clamp(min=TINY)
    spot = ((radius - far) / wide + 0.5).clamp(0, 1)
    area = math.pi * radius * radius / (size_u * size_v)
    mixed = mixed + (dot > 0) * torch.lerp(area, spot, fade)
    mixed = mixed + variety * torch.lerp(torch.full_like(cell, 0.5), cell, fade)
    other = (cell * 7.31) % 1.0
    bright = (1 - dark * seams) * (1 + tint * fade * (other - 0.5)) * (1 + grain * noise)
    return mixed.clamp(0, 1), bright, gloss, glow
