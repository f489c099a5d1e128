"""The definitions of moving entries, one at a time."""

from __future__ import annotations

from torch import Tensor


def permute_reference(x: Tensor, order: Tensor, back: bool = False) -> None:
    before = x.clone()
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i, entry in enumerate(order[b, h].tolist()):
                if back:
                    x[b, h, entry] = before[b, h, i]
                else:
                    x[b, h, i] = before[b, h, entry]


def shift_reference(x: Tensor, source: int, target: int, count: int) -> None:
    before = x.clone()
    for i in range(count):
        x[:, :, target + i] = before[:, :, source + i]
