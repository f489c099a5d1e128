"""Store keys and values as the model computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.store import StorePolicy


@final
@dataclass(frozen=True)
class Native(StorePolicy):
    """Keys and values in the model's own dtype: the baseline."""

    paper: ClassVar[str] = ""
    codes: ClassVar[None] = None
