"""Blocks between a cache and host memory, by stock torch: for a cache that lies there too."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.kernels.codes import torch as codes


class HostBlocks(NamedTuple):
    """Blocks in host memory: code [B, H, most, block, W], scale [B, H, most, block, G] or none.

    W is a head's channels, or half of them where two share a byte (int4).
    """

    code: Tensor
    scale: Tensor | None = None

    @property
    def block(self) -> int:
        return self.code.shape[3]


def store_blocks(x: Tensor, host: HostBlocks, ids: Tensor) -> None:
    more = ids.shape[2] * host.block - x.shape[2]
    blocks = F.pad(x, (0, 0, 0, more)).unflatten(2, (-1, host.block))
    to = _rows(ids)
    if host.scale is None:
        host.code[to] = blocks
        return
    host.code[to], host.scale[to] = encode(blocks, host.code.dtype)


def load_blocks(host: HostBlocks, ids: Tensor, out: Tensor) -> None:
    row, head, place = torch.where(ids >= 0)
    found = ids[row, head, place].long()
    blocks = host.code[row, head, found]
    if host.scale is not None:
        blocks = decode(blocks, host.scale[row, head, found], out.dtype)
    out.unflatten(2, (-1, host.block))[row, head, place] = blocks


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x [..., D] and scales [..., G]: int8, or two of 4 bits a byte (uint8)."""
    if dtype == torch.uint8:
        return codes.encode_int4(x)
    code, scale = codes.encode(x, dtype)
    return code, scale.unsqueeze(-1)


def decode(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] of codes and scales [..., G]."""
    if code.dtype == torch.uint8:
        return codes.decode_int4(code, scale, dtype)
    return codes.decode(code, scale.squeeze(-1), dtype)


def _rows(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = torch.arange(ids.shape[0], device=ids.device)[:, None, None]
    head = torch.arange(ids.shape[1], device=ids.device)[None, :, None]
    return batch, head, ids.long()
