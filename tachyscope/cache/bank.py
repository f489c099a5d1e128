"""Keep every entry, offloaded to host memory, with an LRU of resident blocks on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from tachyscope.cache import CachePolicy
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import ENTRIES
from tachyscope.core.policy import setting
from tachyscope.core.types import Shape, Size, SizeSetting
from tachyscope.store import LayerPass
from tachyscope.store.bank_layout import BankLayout
from tachyscope.store.frame_bank import FrameLayout


@final
@dataclass(frozen=True)
class Bank(CachePolicy, name="bank"):
    """Keep every entry in host memory, and a bounded part of them on the GPU.

    Entries that leave attention's newest frames are sealed in blocks: copied to host memory,
    quantised if `host` says so, and indexed. Attention chooses among all blocks; chosen ones that
    are not resident are fetched, and replace the least recently wanted (LRU). In a full bank a new
    block replaces the one that is most like an older one, so that the first view of a scene stays;
    given frames are replaced last. With attention=pose or similar whole latent frames are sealed,
    compared and fetched. Needs attention=ann, pose or similar. `store/bank.py` has the method.
    """

    resident: SizeSetting = setting(
        Size(21, True),
        "Most entries that a layer holds on the device, the present chunk included: latent frames "
        "(21f) or entries (1344).",
        bound=ENTRIES,
    )
    budget: SizeSetting = setting(
        Size(240, True),
        "Most entries that a layer holds in host memory, on CUDA reserved at the start: latent "
        "frames (240f) or entries; no more than the video has, if its length is known.",
        bound=ENTRIES,
    )
    host: Literal["native", "int8", "int4"] = setting(
        "native",
        "Format in host memory: as on the device (native), or quantised to 8 or 4 bits.",
    )

    appends: ClassVar[bool] = True
    splits_heads: ClassVar[bool] = True
    traceable: ClassVar[bool] = False
    stores_codes: ClassVar[bool] = False  # a bank quantises by `host`
    bounded_by: ClassVar[str] = "resident"
    streams: ClassVar[int] = 4  # a commit is a hundred small launches a layer

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        super().check_plan(plan, shape)
        fault = plan["attention"].bank_fault
        store = plan["store"]
        if fault is None and store.name != "native":
            if not store.for_banks or plan["attention"].reads_frames:
                fault = f"store={store}: leave it out, and set host"
            elif self.host != "native":
                fault = f"host={self.host} beside store={store}, whose codes it keeps: host=native"
        if fault is None and shape.token_by_token:
            fault = "a model that writes token by token: use another cache"
        if fault is not None:
            raise TachyscopeError(f"cache=bank cannot serve {fault}")

    @property
    def merges(self) -> bool:
        return True  # the last block of a chunk may be padded

    def capacity(self, shape: Shape, prompt: int, frames: int | None) -> int:
        resident, budget = (x.entries(shape) for x in (self.resident, self.budget))
        if budget < resident:
            raise TachyscopeError(
                f"cache policy 'bank': budget={self.budget} is less than resident={self.resident}, "
                f"which the bank holds too: raise budget to {self.resident} or more"
            )
        return resident

    def bank_layout(
        self, plan: Mapping[str, Any], shape: Shape, slots: int, latent_frames: int | None
    ) -> BankLayout | FrameLayout | None:
        """As attention divides it; of a video of known length it holds no more than that."""
        budget = self.budget.entries(shape)
        if latent_frames is not None:
            budget = min(budget, latent_frames * shape.tokens_per_frame)
        layout: BankLayout | FrameLayout = plan["attention"].bank_layout(
            shape, slots, budget, plan["store"].for_banks
        )
        return layout

    def commit(self, p: LayerPass, n: int) -> int:
        assert p.layer.bank is not None
        return p.layer.bank.seal(p, n)
