"""The definition of blocks in host memory: block by block, codes in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tachyscope.kernels.codes.reference import encode_int4_block_reference, encode_reference


def stored_reference(x: Tensor, block: int, kind: str) -> Tensor:
    """What blocks of x [B, H, places * block, D] read as: [B, H, places, block, D] float64."""
    return torch.stack([_read_back(part, kind) for part in x.split(block, 2)], 2)


def _read_back(x: Tensor, kind: str) -> Tensor:
    if kind == "native":
        return x.double()
    if kind == "int8":
        code, scale = encode_reference(x, torch.int8)
        return code.double() * scale.double().unsqueeze(-1)
    out = torch.empty_like(x, dtype=torch.float64)
    for row, head in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
        number, (step, zero) = encode_int4_block_reference(x[row, head])
        out[row, head] = number * step + zero
    return out
