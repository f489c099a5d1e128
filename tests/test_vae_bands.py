"""Wan's VAE in bands of rows makes the frames of the whole decode, from less work space."""

import numpy as np
import pytest
import torch
from faults import refused
from test_source_video import with_vae
from torch.utils.flop_counter import FlopCounterMode

import tachyscope as ts
from tachyscope.cli.options import read_weights
from tachyscope.memory.allocations import peak, tensor_bytes
from tachyscope.memory.fit import fit
from tachyscope.memory.lines import lines
from tachyscope.memory.predict import ROOM, sized
from tachyscope.models.registry import in_bands
from tachyscope.models.wan.sizes import VaeSize
from tachyscope.models.wan.vae import WanVae
from tachyscope_lab.bench.stand_ins import random_vae

KINDS = ["2.1", "2.2"]


def small(kind, bands=1):
    """A VAE of random weights in float64, with Wan 2.1's blocks or with 2.2's."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(3)
    settings = {"base_dim": 4, "z_dim": 4, "num_res_blocks": 1}
    settings |= {"latents_mean": [0.1] * 4, "latents_std": [2.0] * 4}
    if kind == "2.2":
        settings |= {
            "decoder_base_dim": 4, "is_residual": True, "in_channels": 12, "out_channels": 12,
            "patch_size": 2, "scale_factor_spatial": 16,
        }  # fmt: skip
    made = WanVae(AutoencoderKLWan(**settings).double().eval())
    made.bands = bands
    return made


def latents(frames, height, width=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 4, frames, height, width, generator=generator, dtype=torch.float64)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("height", "bands"), [(1, 2), (5, 3), (7, 64)])
def test_bands_make_the_frames_of_the_whole_decode_and_leave_its_state(kind, height, bands):
    whole, banded, features, others = small(kind), small(kind, bands), {}, {}
    for part in latents(5, height).split([1, 3, 1], 2):
        pixels = whole._decode(part, features)
        assert pixels.std() > 0.01
        close(banded._decode(part, others), pixels)
    assert others.keys() == features.keys()
    for name, x in features.items():
        close(others[name], x)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [1, 2])
def test_a_state_goes_on_in_bands_and_back(kind, before):
    """The whole decode keeps one frame of a video's first latent, bands a zero before it."""
    video = latents(6, 5)
    whole, banded = small(kind), small(kind, 2)
    expected, features = whole._decode(video, {}), {}
    made = []
    parts = video.split([before, 2, 4 - before], 2)
    for vae, part in zip((whole, banded, whole), parts, strict=True):
        made.append(vae._decode(part, features))
    close(torch.cat(made, 2), expected)
    turned = {}
    parts = video.split([before, 6 - before], 2)
    made = [vae._decode(part, turned) for vae, part in zip((banded, whole), parts, strict=True)]
    close(torch.cat(made, 2), expected)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_computed_twice(kind):
    counted = []
    for bands in (1, 3):
        vae, features = small(kind, bands), {}
        with FlopCounterMode(display=False) as flops:
            vae._decode(latents(2, 5), features)
            vae._decode(latents(1, 5), features)
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] > 0


@pytest.mark.slow
def test_the_promise_follows_the_bands():
    """What is kept stays; what is worked with falls."""
    from diffusers import AutoencoderKLWan

    model = with_vae()
    with torch.device("meta"):
        model.decoder = WanVae(AutoencoderKLWan(base_dim=64, num_res_blocks=1))
    shape, decoder, found = model.shape((128, 48)), model.decoder, {}
    for bands in (1, 4):
        found[bands] = in_bands(model, bands).on_meta().memory_parts(shape, 0)
    assert found[4].decoder_state == found[1].decoder_state
    assert found[4].decoding < 0.4 * found[1].decoding
    # to the byte: what is kept and worked with while a first chunk and a later one are decoded
    x, features, taken = torch.empty(1, 16, shape.chunk, 16, 6, device="meta"), {}, []
    for _ in range(2):
        kept = tensor_bytes(features.values())
        taken.append(kept + peak(lambda: decoder(x, features)))
    assert max(taken) == found[4].decoder_state + found[4].decoding


def test_a_stream_in_bands_goes_on_from_a_snapshot_of_one_without():
    model = with_vae()
    with ts.open(model, "fast", prompt="a", seed=1) as stream:
        stream.step()
        state = stream.snapshot()
        expected = [stream.step().frames for _ in range(2)]
    with ts.open(in_bands(model, 3), "fast", prompt="a", seed=1) as stream:
        stream.restore(state)
        kept = {name: x.clone() for name, x in state.items()}
        made = [stream.step().frames for _ in range(2)]
        # what is updated in place is the stream's own
        assert all(x.equal(state[name]) for name, x in kept.items())
    for one, other in zip(made, expected, strict=True):
        assert one.shape == other.shape
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 1


def test_bands_are_of_wans_vae_alone(tmp_path):
    assert read_weights(("decoder_bands=4", "x.pt")) == ("x.pt", {"decoder_bands": 4})
    assert sized("wan_5b", decoder_bands=4).decoder.bands == 4
    refused(lambda: ts.load("toy-chunks", decoder_bands=2), "is of Wan's VAE", "leave `decoder_b")
    refused(lambda: ts.load("toy-tokens", decoder_bands=2), "is of Wan's VAE", "toy-tokens")
    refused(lambda: sized("wan_1.3b", decoder="random-tiny", decoder_bands=2), "taew2_1 (random")
    for wrong in (0, 65):
        refused(lambda n=wrong: ts.load("toy-chunks", decoder_bands=n), "`decoder_bands` must be")
    refused(lambda: read_weights(("decoder_bands=x",)), "decoder_bands")


@pytest.mark.slow
@pytest.mark.parametrize("channels", [16, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_size_in_bands_is_never_less_than_the_published_ones(channels, dtype):
    with torch.device("meta"):
        published = random_vae(channels, dtype)
    size = VaeSize(channels, dtype)
    for height, bands, frames in ((44, 4, 3), (45, 8, 2), (22, 4, 5)):
        x = torch.empty(1, channels, frames, height, 2, device="meta")
        found = []
        for vae in (published, size):
            features, vae.bands = {}, bands
            vae.levels(x, features)
            found.append(peak(lambda vae=vae, x=x, f=features: vae(x, f)))
        assert 1 <= found[1] / found[0] < 1.2


@pytest.mark.slow
def test_bands_are_chosen_before_anything_of_the_video_is_given_up():
    """Wan 5B with its own VAE in 24 GB."""
    document = fit(sized("wan_5b"), "fast", frames=240, vram_gb=24, ram_gb=64)
    (found,) = document["rows"][0]["recipes"]
    assert found["fits"] and found["peak_bytes"] <= ROOM * 24e9
    assert "decoder_bands=8" in found["weights"] and "decoder=taew2_2.pth" not in found["weights"]
    assert "--weights decoder_bands=8 " in lines(document)[-1]
