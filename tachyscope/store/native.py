"""Keys and values as the model computes them: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from tachyscope.store import StorePolicy


@final
@dataclass(frozen=True)
class Native(StorePolicy):
    """Keep keys and values in the model's own dtype: the baseline."""

    paper: ClassVar[str] = ""
