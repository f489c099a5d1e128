"""Blocks between a cache and host memory, by stock torch: the host waits for a cache on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tachyscope.kernels.codes import torch as codes


class HostBlocks(NamedTuple):
    """Keys and values in host memory [B, H, most, block, W], and scales of codes.

    W is a head's channels, or half of them where two share a byte (int4). A scale of int8 is an
    entry's, [.., block, 1]; of int4 a block has a step and a zero for each channel, [.., 2, D].
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def block(self) -> int:
        return self.k.shape[3]


def store_blocks(k: Tensor, v: Tensor, slots: Tensor, host: HostBlocks, ids: Tensor) -> None:
    """Copy the blocks in slots [B, H, n] of k, v to the host's blocks `ids` [B, H, n].

    k, v [B, H, slots * block, D] are a part of a cache, slots and ids int32.
    """
    ids = ids.to(host.k.device)
    for x, code, scale in ((k, host.k, host.k_scale), (v, host.v, host.v_scale)):
        blocks = x.unflatten(2, (-1, host.block))[block_index(slots)].to(code.device)
        if scale is None:
            code[block_index(ids)] = blocks
        else:
            code[block_index(ids)], scale[block_index(ids)] = encode(blocks, code.dtype)


def load_blocks(host: HostBlocks, ids: Tensor, k: Tensor, v: Tensor) -> None:
    """Write the host's blocks `ids` [B, H, slots] to k, v [B, H, slots * block, D].

    Where an id is negative the slot keeps its block.
    """
    if ids.is_meta:  # without data there is nothing to choose by, as in `launch`
        return
    ids = ids.to(host.k.device)
    row, head, slot = torch.where(ids >= 0)
    chosen = ids[row, head, slot].long()
    for x, code, scale in ((k, host.k, host.k_scale), (v, host.v, host.v_scale)):
        blocks = code[row, head, chosen]
        if scale is not None:
            blocks = decode(blocks, scale[row, head, chosen], x.dtype)
        there = row.to(x.device), head.to(x.device), slot.to(x.device)
        x.unflatten(2, (-1, host.block))[there] = blocks.to(x.device)


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks x [..., block, D]: int8, or two of 4 bits a byte (uint8)."""
    if dtype == torch.uint8:
        return codes.encode_int4_block(x)
    code, scale = codes.encode(x, dtype)
    return code, scale.unsqueeze(-1)


def decode(code: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks [..., block, D] of codes and scales."""
    if code.dtype == torch.uint8:
        return codes.decode_int4_block(code, scale, dtype)
    return codes.decode(code, scale.squeeze(-1), dtype)


def block_index(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What indexes blocks `ids` [B, H, n] of a tensor [B, H, blocks, ...]."""
    batch = torch.arange(ids.shape[0], device=ids.device)[:, None, None]
    head = torch.arange(ids.shape[1], device=ids.device)[None, :, None]
    return batch, head, ids.long()
