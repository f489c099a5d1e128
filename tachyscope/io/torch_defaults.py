"""Keeps results independent of the caller's torch defaults, without changing them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FLOATS = {"zeros", "ones", "empty", "rand", "randn", "eye", "linspace", "logspace"}
NUMBERS = {"full", "arange"}  # floats if one of their arguments is a float
DATA = {"tensor", "as_tensor", "scalar_tensor"}  # floats if their data has some
DRAWN = {"rand", "randn"}
FILLED = {"uniform_", "normal_", "random_", "bernoulli_", "exponential_"}


class OwnDefaults(TorchFunctionMode):
    """Within this block, calls default to float32, the CPU, and a generator of the block.

    It acts on this thread alone, while torch's own defaults are global. It slows every call of
    torch, so it serves loading and encoding; code that makes chunks passes all three explicitly.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        given = args[0] if args else kwargs.get("tensor", kwargs.get("data"))
        makes = name in FLOATS | NUMBERS | DATA and not isinstance(given, Tensor)
        if makes and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        if makes and kwargs.get("dtype") is None and _is_float(name, func, args, kwargs):
            kwargs["dtype"] = torch.float32
        draws = name in DRAWN | FILLED or "generator" in kwargs
        place = torch.device(kwargs["device"]) if makes else getattr(given, "device", None)
        if draws and kwargs.get("generator") is None and place == torch.device("cpu"):
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


def _is_float(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in NUMBERS:
        return any(isinstance(x, float) for x in (*args, *kwargs.values()))
    if name in DATA:
        array = any(isinstance(x, np.ndarray) for x in (*args, *kwargs.values()))
        return not array and func(*args, **kwargs).is_floating_point()
    return True


@contextmanager
def no_autocast() -> Iterator[None]:
    """Disable the caller's autocast, which would change a model's precision."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def own_numerics(seed: int = 0) -> Iterator[None]:
    """For loading and encoding: no autocast, and our own torch defaults."""
    with no_autocast(), OwnDefaults(seed):
        yield
