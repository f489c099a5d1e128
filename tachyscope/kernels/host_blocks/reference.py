"""The definition of blocks in host memory: block by block, codes in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.codes.reference import encode_int4_reference, encode_reference


def stored_reference(
    x: Tensor, ids: Tensor, block: int, kind: str
) -> dict[tuple[int, ...], Tensor]:
    """What each of the blocks `ids` then reads as: [n, D] float64, by (row, head, id)."""
    found = dict[tuple[int, ...], Tensor]()
    for b in range(ids.shape[0]):
        for h in range(ids.shape[1]):
            for i, at in enumerate(ids[b, h].tolist()):
                part = x[b : b + 1, h : h + 1, i * block : (i + 1) * block]
                found[b, h, at] = _read_back(part, kind)[0, 0]
    return found


def _read_back(x: Tensor, kind: str) -> Tensor:
    if kind == "native":
        return x.double()
    if kind == "int8":
        code, scale = encode_reference(x, torch.int8)
        return code.double() * scale.double().unsqueeze(-1)
    number, scale = encode_int4_reference(x)
    return number * scale.repeat_interleave(x.shape[-1] // scale.shape[-1], -1)
