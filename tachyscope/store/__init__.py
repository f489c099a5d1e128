"""How to store it: policies for the numbers in which keys and values lie in memory."""

from __future__ import annotations

import abc
from typing import ClassVar


class StorePolicy(abc.ABC):
    """Decides in which numbers a layer's keys and values are kept."""

    paper: ClassVar[str]
