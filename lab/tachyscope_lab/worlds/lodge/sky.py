"""What is seen through windows: sky, clouds, hills and a meadow."""

from __future__ import annotations

import torch
from torch import Tensor

# of morning, noon, evening and a grey day
ZENITH = ((0.30, 0.52, 0.95), (0.22, 0.46, 1.0), (0.30, 0.32, 0.62), (0.55, 0.60, 0.68))
HORIZON = ((1.25, 1.05, 0.85), (0.85, 1.0, 1.15), (1.6, 0.75, 0.38), (0.82, 0.85, 0.88))
LAND = ((0.30, 0.42, 0.20), (0.30, 0.46, 0.20), (0.24, 0.22, 0.16), (0.26, 0.34, 0.22))


def outside(dx: Tensor, dy: Tensor, dz: Tensor, mood: Tensor) -> Tensor:
    """The light [3, F, P] that comes from directions [F, P]."""
    device = dx.device
    zenith, horizon, land = (torch.tensor(t, device=device)[mood] for t in (ZENITH, HORIZON, LAND))
    turn = torch.atan2(dy, dx)
    up = dz * torch.rsqrt(dx * dx + dy * dy)
    far = 0.10 + 0.035 * (3 * turn).sin() + 0.02 * (7 * turn + 1).sin() + 0.008 * (17 * turn).sin()
    near = 0.015 + 0.025 * (4 * turn + 2).sin() + 0.014 * (9 * turn).sin()
    wave = (
        (6 * turn + 9 * up).sin()
        + 0.6 * (11 * turn - 14 * up + 1).sin()
        + 0.4 * (23 * turn + 31 * up).sin()
    )
    cloud = ((wave - 0.5) * 0.9).clamp(0, 1) * ((up - 0.05) * 4).clamp(0, 1)
    height = (up * 1.6).clamp(0, 1).sqrt()
    edge = 0.006
    on_far = ((far - up) / edge + 0.5).clamp(0, 1)
    on_near = ((near - up) / edge + 0.5).clamp(0, 1)
    parts = []
    for c in range(3):
        low, high, green = horizon[:, c, None], zenith[:, c, None], land[:, c, None]
        sky = low + (high - low) * height
        sky = sky + 0.55 * cloud * (1.15 - sky)
        sky = sky + on_far * (0.55 * low + 0.35 * green - sky)
        parts.append(sky + on_near * (green * (1.0 + 2.5 * (near - up).clamp(0, 0.3)) - sky))
    return torch.stack(parts)
