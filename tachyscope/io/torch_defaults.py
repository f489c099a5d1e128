"""Settings of torch that are the caller's: results do not depend on them; they are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FLOATS = {"zeros", "ones", "empty", "rand", "randn", "eye", "linspace", "logspace"}
NUMBERS = {"full", "arange"}  # floats if a number that they are given is
DATA = {"tensor", "as_tensor", "scalar_tensor"}  # floats if what they are given holds some
DRAWN = {"rand", "randn"}
FILLED = {"uniform_", "normal_", "random_", "bernoulli_", "exponential_"}


class OwnDefaults(TorchFunctionMode):
    """What a call does not say is our own: float32, the CPU, a generator of this block.

    Of this thread alone; torch's defaults are everybody's. Every call of torch goes through Python
    here, so this is for loading and encoding: what makes chunks says all three.
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
    """Without the caller's autocast, which would round what a model computes."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def own_numerics(seed: int = 0) -> Iterator[None]:
    """For loading and encoding: no autocast, and defaults of our own."""
    with no_autocast(), OwnDefaults(seed):
        yield
