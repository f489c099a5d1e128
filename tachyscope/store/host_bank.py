"""What a layer holds in host memory: blocks of entries, saved apart from what is on the device."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tachyscope.kernels.host_blocks import HostBlocks, block_index

if TYPE_CHECKING:
    from tachyscope.core.types import PassContext
    from tachyscope.store.kv import KVStore
    from tachyscope.store.layer_pass import LayerPass


class HostBank(abc.ABC):
    """Blocks of one layer: `host` has k and v of them, [B, Hkv, most, block, ...].

    tensors, on the device, has among others:
      used     blocks that are in use
      sealed   blocks that were ever written
      written  [B, Hkv, most]  how many had been when a block was, it counted
    work, no state, has `counters` [4]: what was counted since they were last read
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
        """Take n entries behind the past into it, and count the work: its slots after."""

    @abc.abstractmethod
    def rewind(self, layer: KVStore, past: int) -> None:
        """Drop every block, where the first `past` slots are kept; raises where those are more."""

    @abc.abstractmethod
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The least and the greatest whole number of a tensor, by name."""

    def join(self, layer: KVStore) -> None:
        """Let what is launched next wait for the copies under way, if there are any."""
        return

    def apart(self, past: int) -> int:
        """Slots of the past whose keys and values are not in the layer's k and v."""
        return 0

    def keys(self, layer: KVStore, ctx: PassContext) -> Tensor:
        """Rotated keys of past and now [B, Hkv, end, D]."""
        return layer.k[:, :, : ctx.end]

    @property
    def places(self) -> tuple[Tensor, ...]:
        """Codes of keys and of values that are resident, where they are codes."""
        return ()

    @property
    def host_blocks(self) -> HostBlocks:
        return HostBlocks(**self.host)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one head in host memory, keys and values."""
        size: int = sum(x[0, 0, 0].nbytes for x in self.host.values())
        return size

    def segment(self, since: int) -> dict[str, Tensor]:
        """The blocks that were written since so many had been sealed: `ids` [B, Hkv, n] and what
        host memory holds of them, [B, Hkv, n, …]."""
        used, sealed = (int(self.tensors[name]) for name in ("used", "sealed"))
        ids = self.tensors["written"].topk(min(sealed - since, used), -1).indices.to("cpu")
        at = block_index(ids)
        return {"ids": ids.to(torch.int32)} | {name: x[at] for name, x in self.host.items()}

    def load_segment(self, segment: Mapping[str, Tensor]) -> None:
        """Take up what `segment` gave."""
        at = block_index(segment["ids"])
        for name, x in self.host.items():
            x[at] = segment[name]
