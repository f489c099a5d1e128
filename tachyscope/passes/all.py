"""Run every pass: the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from tachyscope.passes import PassPolicy


@final
@dataclass(frozen=True)
class AllPasses(PassPolicy, name="all"):
    """Run every pass of the sampler: the baseline."""
