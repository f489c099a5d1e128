"""LPIPS, I3D and FVD are those of their papers, on weights that are random here."""

import numpy as np
import pytest
import torch
from faults import refused
from torch import nn

from tachyscope.cli import main
from tachyscope.io.video import VideoWriter
from tachyscope.measure import quality, videos
from tachyscope.measure.metrics import i3d, lpips
from tachyscope.measure.metrics.fvd import ClipFeatures, frechet_distance
from tachyscope.measure.metrics.lpips import Lpips
from tachyscope.measure.metrics.weights import I3D, LPIPS, has_weights, with_weights
from tachyscope.models.checkpoint import write_tensors


def randomly(network, seed=0):
    """The network with weights that keep the size of what passes."""
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(False)
        parameter.normal_(generator=rng)
        if name.endswith("weight"):
            parameter.mul_((2 / parameter[0].numel()) ** 0.5)
            if name.startswith("heads"):
                parameter.abs_()
    return network.eval()


@pytest.fixture(scope="module")
def alexnet():
    return randomly(Lpips())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A user's cache folder; the value is where the weights belong."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tachyscope" / "metrics"


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)


def write(path, frames):
    with VideoWriter(path, 8) as file:
        file.write(frames)
    return str(path)


def test_lpips_is_that_of_torchmetrics(alexnet, monkeypatch):
    """Whose own network is put together from the same weights, and whose heads are taken."""
    theirs = pytest.importorskip("torchmetrics.functional.image.lpips")
    features = []
    for layer, (*_, pooled) in zip(alexnet.convolutions, lpips.LAYERS, strict=True):
        features += [nn.MaxPool2d(3, 2)] if pooled else []
        features += [layer, nn.ReLU()]
    network = nn.Sequential(*features, nn.MaxPool2d(3, 2))
    monkeypatch.setattr(theirs, "_get_tv_model_features", lambda *given, **more: network)
    reference = theirs._LPIPS(net="alex")
    ours = randomly(Lpips())
    for head, fitted in zip(ours.heads, reference.lins, strict=True):
        head.weight.data = fitted.model[1].weight.data
    a, b = noise(2, 9, 72, 96)  # one batch and one more
    pictures = [torch.from_numpy(x).permute(0, 3, 1, 2) / 255 for x in (a, b)]
    with torch.no_grad():
        expected = reference(*pictures, normalize=True).flatten()
    np.testing.assert_allclose(ours(a, b), expected.numpy(), rtol=1e-4)
    assert (ours(a, a) == 0).all()


def test_lpips_takes_frames_of_one_shape_that_alexnet_can_see(alexnet):
    a, b = noise(2, 3, 72, 96)
    message = "LPIPS needs frames of 64 x 64 pixels, got 32 x 96"
    refused(lambda: alexnet(a[:, :32], b[:, :32]), message)
    refused(lambda: alexnet(a, b[:2]), "LPIPS compares frames of one shape")


def test_lpips_is_untouched_by_autocast(alexnet):
    a, b = noise(2, 2, 64, 64)
    expected = alexnet(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert (alexnet(a, b) == expected).all()


def same(x, window, stride, value):
    """An array [C, F, H, W] padded as TensorFlow's SAME does it, and its windows."""
    for axis, (w, s) in enumerate(zip(window, stride, strict=True), 1):
        n = x.shape[axis]
        total = max((-(-n // s) - 1) * s + w - n, 0)
        pads = [(0, 0)] * 4
        pads[axis] = (total // 2, total - total // 2)
        x = np.pad(x, pads, constant_values=value)
    windows = np.lib.stride_tricks.sliding_window_view(x, window, (1, 2, 3))
    return windows[:, :: stride[0], :: stride[1], :: stride[2]]


def conv_reference(x, unit):
    weight, bias = (t.detach().double().numpy() for t in (unit.weight, unit.bias))
    windows = same(x, weight.shape[2:], unit.stride, 0.0)
    out = np.tensordot(weight, windows, ([1, 2, 3, 4], [0, 4, 5, 6]))
    return np.maximum(out + bias[:, None, None, None], 0)


def pool_reference(x, window, stride):
    return same(x, window, stride, -np.inf).max((4, 5, 6))


def block_reference(x, block):
    ways = [
        conv_reference(x, block.one),
        conv_reference(conv_reference(x, block.two[0]), block.two[1]),
        conv_reference(conv_reference(x, block.three[0]), block.three[1]),
        conv_reference(pool_reference(x, (3, 3, 3), (1, 1, 1)), block.pooled),
    ]
    return np.concatenate(ways)


@pytest.mark.parametrize("size", [(5, 9, 12), (4, 10, 11)])
def test_a_convolution_of_i3d_pads_as_tensorflow_does(size):
    unit = randomly(i3d.Unit(3, 8, 7, 2))
    x = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    expected = conv_reference(x[0].double().numpy(), unit)
    np.testing.assert_allclose(unit(x)[0].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("size", [(5, 9, 12), (4, 10, 11)])
def test_a_block_of_i3d_is_four_ways_side_by_side(size):
    block = randomly(i3d.Inception(6, (4, 3, 5, 2, 3, 4)))
    x = torch.randn(1, 6, *size, generator=torch.Generator().manual_seed(1))
    expected = block_reference(x[0].double().numpy(), block)
    np.testing.assert_allclose(block(x)[0].numpy(), expected, atol=1e-5)
    for window, stride in i3d.POOLS.values():
        ours = i3d.max_pool(x, window, stride)[0].numpy()
        np.testing.assert_array_equal(ours, pool_reference(x[0].numpy(), window, stride))


@pytest.mark.slow
def test_i3d_is_its_paper_s_network():
    """In float64 numpy, layer by layer, on a clip of nine frames."""
    network = randomly(i3d.I3D())
    clip = torch.rand(1, 3, 9, 224, 224, generator=torch.Generator().manual_seed(1)) * 2 - 1
    x = conv_reference(clip[0].double().numpy(), network.first)
    x = pool_reference(x, (1, 3, 3), (1, 2, 2))
    for unit in network.second:
        x = conv_reference(x, unit)
    for name, block in network.blocks.items():
        x = pool_reference(x, *i3d.POOLS[name]) if name in i3d.POOLS else x
        x = block_reference(x, block)
    assert x.shape == (1024, 2, 7, 7)
    weight, bias = (t.double().numpy() for t in (network.scores.weight, network.scores.bias))
    expected = weight[:, :, 0, 0, 0] @ x.mean((1, 2, 3)) + bias
    np.testing.assert_allclose(network(clip)[0].numpy(), expected, rtol=1e-4, atol=1e-4)


def frechet_reference(a, b):
    """By covariances, and a root of one of them."""
    means = a.mean(0), b.mean(0)
    covariances = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, vectors = np.linalg.eigh(covariances[0])
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    inner = np.linalg.eigvalsh(root @ covariances[1] @ root)
    return (
        np.square(means[0] - means[1]).sum()
        + np.trace(covariances[0] + covariances[1])
        - 2 * np.sqrt(np.maximum(inner, 0)).sum()
    )


@pytest.mark.parametrize("rows", [(30, 30), (5, 40), (2, 3)])
def test_the_frechet_distance_is_its_definition(rows):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(i, 1 + i, (n, 12)) @ rng.normal(0, 1, (12, 12)) for i, n in enumerate(rows))
    expected = frechet_reference(a, b)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9 * np.square(a).sum())
    # a shift alone costs its square
    assert frechet_distance(a, a + 3.0) == pytest.approx(12 * 9.0, rel=1e-9)
    refused(lambda: frechet_distance(a[:1], b), "2 rows or more", "give more clips")


class Colours(nn.Module):
    """Stands in for I3D: the mean colour of a clip's first and last frame."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(1, 1)

    def forward(self, clips):
        assert clips.shape[1:] == (3, 16, 224, 224)
        return torch.cat([clips[:, :, 0].mean((2, 3)), clips[:, :, -1].mean((2, 3))], 1)


def test_clips_are_every_sixteen_frames_whatever_parts_they_come_in():
    frames = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None, None, None], (40, 8, 12, 3))
    clips = ClipFeatures(Colours())
    for part in np.split(frames, [3, 20, 21]):
        clips.add(part)
    assert clips.features.shape == (2, 6)  # eight frames are left over
    shown = (clips.features + 1) * 127.5
    np.testing.assert_allclose(shown[:, 0], [0, 16], atol=1e-4)
    np.testing.assert_allclose(shown[:, 5], [15, 31], atol=1e-4)


def test_any_two_videos_are_compared(tmp_path, capsys, monkeypatch, cache):
    monkeypatch.setattr(quality, "has_ssim", lambda: False)
    monkeypatch.setattr(videos, "has_ssim", lambda: False)
    monkeypatch.setattr(videos, "STRETCH", 16)
    shade = np.linspace(0, 200, 20).astype(np.uint8)
    frames = np.broadcast_to(shade[:, None, None, None], (20, 32, 48, 3)).copy()
    frames[:, 8:16] = 255
    a = write(tmp_path / "a.mp4", frames)
    b = write(tmp_path / "b.mp4", np.concatenate([frames[:16], 255 - frames[16:]]))
    c = write(tmp_path / "c.mp4", frames[:7])
    found = videos.compare_videos(a, b)
    whole, first, last = found["rows"]
    assert (whole["frames"], first["frames"], last["frames"]) == (20, 16, 4)
    assert first["psnr_reference"] > 40 > 10 > last["psnr_reference"]
    assert whole["psnr_worst"] == last["psnr_worst"]
    assert main(["compare", a, b]) == 0
    told = capsys.readouterr().out
    assert "17 to 20" in told and "for SSIM" in told
    assert "for LPIPS and FVD: tachyscope-lab metrics-weights" in told
    assert len(videos.compare_videos(c, c)["rows"]) == 1
    refused(lambda: videos.compare_videos(c, a), "ends after 7", "cut them alike")
    assert main(["compare", a, str(tmp_path / "none.mp4")]) == 2
    assert "cannot be read as a video" in capsys.readouterr().err


@pytest.mark.slow
def test_videos_are_compared_by_lpips_and_fvd_where_the_weights_are(
    alexnet, tmp_path, capsys, cache, monkeypatch
):
    for name in (LPIPS, I3D):
        assert not has_weights(name)
    refused(Lpips.load, f"no file {cache / LPIPS}: run tachyscope-lab metrics-weights")
    write_tensors(cache / LPIPS, alexnet.state_dict())
    monkeypatch.setattr("tachyscope.measure.metrics.fvd.Network", Colours)
    write_tensors(cache / I3D, Colours().state_dict())
    a, b = (write(tmp_path / f"{x}.mp4", noise(33, 64, 64, seed=x)) for x in (1, 2))
    whole = videos.compare_videos(a, b)["rows"][0]
    assert whole["lpips"] > 0.01 and whole["fvd"] > 0 and whole["fvd_clips"] == 2
    assert videos.compare_videos(a, a)["rows"][0]["lpips"] == 0
    assert main(["compare", a, b]) == 0
    told = capsys.readouterr().out
    assert "LPIPS" in told and "over 2 clips of 16 frames" in told
    assert "metrics-weights" not in told
    # a folder that is given goes before the cache
    folder = tmp_path / "other"
    write_tensors(folder / LPIPS, alexnet.state_dict())
    row = videos.compare_videos(a, b, weights=folder)["rows"][0]
    assert row["lpips"] == whole["lpips"] and "fvd" not in row


def test_weights_that_do_not_fit_are_refused(alexnet, cache):
    tensors = alexnet.state_dict()
    tensors.pop("heads.2.weight")
    write_tensors(cache / LPIPS, tensors)
    refused(lambda: with_weights(Lpips(), LPIPS), "heads.2.weight", "it lacks")
