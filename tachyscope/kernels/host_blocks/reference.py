"""The definition of blocks in host memory: block by block, codes in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.codes.reference import encode_int4_block_reference, encode_reference


def stored_reference(x: Tensor, block: int, kind: str) -> Tensor:
    """What blocks of x [B, H, slots * block, D] read as: [B, H, slots, block, D] float64."""
    return torch.stack([_read_back(part, kind) for part in x.split(block, 2)], 2)


def _read_back(x: Tensor, kind: str) -> Tensor:
    if kind == "native":
        return x.double()
    if kind == "int8":
        code, scale = encode_reference(x, torch.int8)
        return code.double() * scale.double().unsqueeze(-1)
    out = torch.empty_like(x, dtype=torch.float64)
    for row, entries in zip(out.flatten(0, 1), x.flatten(0, 1), strict=True):
        number, (step, zero) = encode_int4_block_reference(entries)
        row.copy_(number * step + zero)
    return out
