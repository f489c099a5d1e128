"""Methods that run in inference mode, called by code in any mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError

P = ParamSpec("P")
T = TypeVar("T")


class _NoBackward(torch.autograd.Function):
    """A copy of a tensor computed in inference mode, that refuses to pass gradients on."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *sources: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise TachyscopeError(
            "a VideoCache has no gradients: run the model under torch.no_grad(), and train without"
        )


def in_inference_mode(method: Callable[P, T]) -> Callable[P, T]:
    """Run in inference mode, whatever mode the host is in, and return ordinary tensors to it."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode():
            out = method(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        sources = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        # the host may change the result in place, which an inference tensor refuses
        made: Any = _NoBackward.apply(out, *sources)
        return cast(T, made)

    outside_graphs: Callable[P, T] = torch.compiler.disable(call)
    return outside_graphs
