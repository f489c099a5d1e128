"""Short hashes that tell whether two things are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

SAMPLES = 64  # values of a tensor that are looked at


def digest(*parts: str | bytes) -> str:
    """32 hexadecimal digits of all parts, in their order."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes, dtypes and 64 evenly spaced values of each tensor.

    Cheap, so that a model of billions of weights can be asked: other weights give another hash,
    but a few changed values may go unseen.
    """
    names, values = [], []
    for name, x in sorted(tensors.items()):
        names.append(f"{name} {list(x.shape)} {x.dtype}")
        flat = x.detach().reshape(-1)
        values.append(flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].to(torch.float32))
    # one copy from the device, not one a tensor
    data = torch.cat(values).cpu().numpy().tobytes() if values else b""
    return digest("\n".join(names), data)


def first_key(*pictures: np.ndarray) -> str:
    """The hash by which a session knows its first frames."""
    parts = [part for x in pictures for part in (str(x.shape), x.tobytes())]
    return digest(*parts) if parts else ""


def noise_key(noise: Tensor | None) -> str:
    """The hash by which a session knows noise that was handed in."""
    return "" if noise is None else of_tensors({"noise": noise})
