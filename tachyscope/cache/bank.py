"""Keep every entry, in host memory beyond what is resident."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from tachyscope.cache import CachePolicy, OnMerge, Rotate
from tachyscope.errors import TachyscopeError
from tachyscope.meter import Meter
from tachyscope.settings import check_settings, setting
from tachyscope.store import KVStore
from tachyscope.store.bank import BlockBank
from tachyscope.types import PassContext, Shape, Size


@final
@dataclass(frozen=True)
class Bank(CachePolicy):
    """Keep every entry in host memory, and on the device those that are wanted.

    Entries that leave attention's newest frames are sealed in blocks: copied to host memory, as
    they are or as codes, and known to attention's index ever after. Attention chooses among all
    blocks; those that are wanted and not resident are fetched, and the least recently wanted leave.
    When the bank is full the blocks most like a newer one leave it. Needs attention=ann.
    """

    resident: Size = setting(
        Size(21, True),
        "Most entries that a layer holds on the device, the present chunk included: latent frames "
        "(21f) or entries (1344).",
    )
    budget: Size = setting(
        Size(240, True),
        "Most entries that a layer holds in host memory, reserved at the start: latent frames "
        "(240f) or entries; of a video whose length is known no more than it has.",
    )
    host: Literal["native", "int8", "int4"] = setting(
        "native",
        "What a channel is in host memory: as the model computes it (native), or a code of 8 or 4 "
        "bits.",
    )

    paper: ClassVar[str] = ""
    appends: ClassVar[bool] = True
    traceable: ClassVar[bool] = False
    streams: ClassVar[int] = 4  # a hundred launches a layer, too small to fill a GPU

    def __post_init__(self) -> None:
        check_settings(self, "cache", "bank")

    @property
    def merges(self) -> bool:
        return True  # the last block of a chunk may be a part

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        resident, budget = (x.entries(shape) for x in (self.resident, self.budget))
        if budget < resident:
            raise TachyscopeError(
                f"cache policy 'bank': budget={self.budget} is less than resident={self.resident}, "
                f"which the bank holds too: raise budget to {self.resident} or more"
            )
        return resident

    def commit(
        self,
        layer: KVStore,
        ctx: PassContext,
        n: int,
        rotate: Rotate,
        meter: Meter,
        on_merge: OnMerge | None = None,
    ) -> int:
        assert isinstance(layer.bank, BlockBank)
        past, sealed = layer.bank.seal(layer, ctx.past, n)
        layout, shape = layer.bank.layout, ctx.shape
        blocks = -(-sealed // layout.block)
        work = sealed * shape.head_dim * layout.order_bits + blocks * layout.most * layout.code
        meter.add("macs", shape.batch * shape.kv_heads * work)
        return past
