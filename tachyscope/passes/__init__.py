"""Which passes to run: policies that let an earlier pass's prediction serve for a later one."""

from __future__ import annotations

import abc
from typing import ClassVar


class PassPolicy(abc.ABC):
    """Decides which denoising passes over a chunk run; the clean pass always does."""

    paper: ClassVar[str]
