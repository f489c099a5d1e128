"""The files of LPIPS's and FVD's published weights, and their loading."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.programs import user_folder
from tachyscope.models.checkpoint import fit, read_tensors

N = TypeVar("N", bound=nn.Module)

COMMAND = "tachyscope-lab metrics-weights"  # writes the files
LPIPS = "lpips-alexnet.safetensors"
I3D = "i3d-kinetics-400.safetensors"


def metrics_folder() -> Path:
    """The folder of the user's cache that holds them."""
    folder = user_folder()
    if folder is None:
        raise TachyscopeError(
            "no cache folder can be written for the weights of LPIPS and FVD: set XDG_CACHE_HOME"
        )
    return folder / "metrics"


def has_weights(file: str, folder: Path | None = None) -> bool:
    """Whether a network's weights are in `folder` or the user's cache."""
    home = user_folder() if folder is None else None
    where = folder if home is None else home / "metrics"
    return where is not None and (where / file).is_file()


def with_weights(
    network: N, file: str, folder: Path | None = None, device: torch.device | str = "cpu"
) -> N:
    """The network with its published weights, from `folder` or the user's cache, on a device."""
    path = (metrics_folder() if folder is None else folder) / file
    if not path.is_file():
        raise TachyscopeError(f"no file {path}: run {COMMAND}, which writes it")
    fit(network, read_tensors(path), str(path))
    return network.to(device).eval().requires_grad_(False)
