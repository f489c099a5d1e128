"""Measures the peak memory of a call by running it on meta tensors, which have no data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tachyscope.core.types import Mlp


class FreeAttention:
    """A session stub whose attention allocates only its output: attention is measured apart."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        return torch.empty_like(q)

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        return fn(x)


class AllocationTracker(TorchDispatchMode):
    """Tracks the bytes of live meta tensors, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Any = WeakIdKeyDictionary()
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._track((args, kwargs), counted=False)  # inputs existed before
        out = func(*args, **(kwargs or {}))
        self._track(out, counted=True)
        return out

    def _track(self, tree: Any, counted: bool) -> None:
        for x in tree_leaves(tree):
            if isinstance(x, Tensor) and x.is_meta:
                storage = x.untyped_storage()
                if storage not in self.known:
                    self.known[storage] = True
                    if counted:
                        self._add(storage.nbytes())
                        weakref.finalize(storage, self._add, -storage.nbytes())

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class FlashAttentionStub(TorchFunctionMode):
    """Replaces scaled_dot_product_attention by its output alone: flash kernels store no scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))


def peak(call: Callable[[], object]) -> int:
    """The most bytes that a call on meta tensors allocates at once.

    If the call reads data, which meta tensors do not have, the peak until then is returned.
    """
    with torch.no_grad(), AllocationTracker() as tracker, FlashAttentionStub():
        try:
            call()
        except (NotImplementedError, RuntimeError) as fault:
            if "meta" not in str(fault).lower():
                raise
    most: int = tracker.most
    return most


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
