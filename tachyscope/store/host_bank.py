"""What every bank has: blocks of entries in host memory, saved apart from the device's tensors."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tachyscope.kernels.host_blocks import HostBlocks, block_index

if TYPE_CHECKING:
    from tachyscope.core.types import PassContext
    from tachyscope.store.kv import KVStore
    from tachyscope.store.layer_pass import LayerPass


class HostBank(abc.ABC):
    """Blocks of one layer; `host` has their k and v, [B, Hkv, capacity, block, ...].

    tensors, on the device and part of a snapshot:
      used     blocks in use
      sealed   blocks written since the session began
      written  [B, Hkv, capacity]  the value of `sealed` when a block was written
    work, on the device and not part of a snapshot:
      counters  [4]  COUNTERS since they were last read
    """

    __slots__ = ()

    tensors: dict[str, Tensor]
    work: dict[str, Tensor]
    host: dict[str, Tensor]

    @abc.abstractmethod
    def clear(self) -> None:
        """Drop every block."""

    @abc.abstractmethod
    def seal(self, p: LayerPass, n: int) -> int:
        """Append n finished entries to the past, seal what leaves the newest; the past's slots."""

    @abc.abstractmethod
    def rewind(self, layer: KVStore, past: int) -> None:
        """Drop every block and keep the first `past` slots; raises where these are too many."""

    @abc.abstractmethod
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The least and greatest value of an integer tensor in a valid snapshot, by name."""

    def wait_for_copies(self) -> None:
        """Make the current stream wait for copies that are in flight."""
        return

    def coded_entries(self, past: int) -> int:
        """Entries of the past that only the bank holds, so that the layer's k and v lack them."""
        return 0

    def keys(self, layer: KVStore, ctx: PassContext) -> Tensor:
        """Rotated keys of the past and the present chunk [B, Hkv, end, D]."""
        return layer.k[:, :, : ctx.end]

    @property
    def resident_codes(self) -> tuple[Tensor, ...]:
        """Codes of resident keys and values, where they are codes."""
        return ()

    @property
    def host_blocks(self) -> HostBlocks:
        return HostBlocks(**self.host)

    @property
    def block_bytes(self) -> int:
        """Bytes of one head's block in host memory, keys and values."""
        size: int = sum(x[0, 0, 0].nbytes for x in self.host.values())
        return size

    def segment(self, since: int) -> dict[str, Tensor]:
        """The blocks written after `sealed` was `since`: `ids` [B, Hkv, n], and their host memory
        [B, Hkv, n, ...] by name."""
        used, sealed = (int(self.tensors[name]) for name in ("used", "sealed"))
        ids = self.tensors["written"].topk(min(sealed - since, used), -1).indices.to("cpu")
        at = block_index(ids)
        return {"ids": ids.to(torch.int32)} | {name: x[at] for name, x in self.host.items()}

    def load_segment(self, segment: Mapping[str, Tensor]) -> None:
        """Write a `segment` back to host memory."""
        at = block_index(segment["ids"])
        for name, x in self.host.items():
            x[at] = segment[name]


def take_counters(banks: Sequence[HostBank]) -> tuple[Tensor, ...]:
    """The sums of the layers' COUNTERS, which are set back to 0."""
    counters = [bank.work["counters"] for bank in banks]
    total = torch.stack(counters).sum(0)
    for x in counters:
        x.zero_()
    return total.unbind()
