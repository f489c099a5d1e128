"""Short hashes of weights, prompts, frames and noise."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

SAMPLES = 64  # values of a tensor that are hashed


def digest(*parts: str | bytes) -> str:
    """A hash of all parts in order, as 32 hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes, dtypes and 64 evenly spaced values of each tensor.

    Cheap for billions of weights: other weights give another hash, but a few changed values may go
    unnoticed.
    """
    names, values = [], []
    for name, x in sorted(tensors.items()):
        names.append(f"{name} {list(x.shape)} {x.dtype}")
        flat = x.detach().reshape(-1)
        values.append(flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].to(torch.float32))
    # one copy from the device for all tensors
    data = torch.cat(values).cpu().numpy().tobytes() if values else b""
    return digest("\n".join(names), data)


def first_key(*pictures: np.ndarray) -> str:
    """The hash of given first frames; empty without any."""
    parts = [part for x in pictures for part in (str(x.shape), x.tobytes())]
    return digest(*parts) if parts else ""


def noise_key(noise: Tensor | None) -> str:
    """The hash of given noise; empty without any."""
    return "" if noise is None else tensor_hash({"noise": noise})
