"""Torch's settings that are the caller's: results do not hang on them, and they are left alone."""

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


class Float32(TorchFunctionMode):
    """Where no dtype is given, new tensors of floats are float32, whatever torch's default.

    Of this thread alone, where `torch.set_default_dtype` is everybody's. Every call of torch then
    goes through Python, so this is for loading and encoding; what makes chunks gives its dtypes.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name not in FLOATS | NUMBERS | DATA or kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        if name in NUMBERS:
            floats = any(isinstance(x, float) for x in (*args, *kwargs.values()))
        elif name in DATA:
            floats = not isinstance(args[0] if args else None, Tensor | np.ndarray)
            floats = floats and func(*args, **kwargs).is_floating_point()
        else:
            floats = True
        return func(*args, **(kwargs | {"dtype": torch.float32} if floats else kwargs))


@contextmanager
def no_autocast() -> Iterator[None]:
    """Without the caller's autocast, which would round what a model computes."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def own_numerics() -> Iterator[None]:
    """For loading and encoding: no autocast, float32 by default, random numbers as they were."""
    with no_autocast(), Float32(), torch.random.fork_rng(devices=[]):
        yield
