"""Tiny decoders equal their layout stated frame by frame; streamed they are the whole video."""

import importlib
import inspect
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from faults import refused
from toys import open_session

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.core.errors import TachyscopeWarning
from tachyscope.core.rollout import rollout
from tachyscope.memory.predict import need
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.wan import vae as wan_vae
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.loading import load_wan, save_wan
from tachyscope.models.wan.random import random_wan
from tachyscope.models.wan.tiny_decoder import ERROR, TinyDecoder, decoder_note
from tachyscope.models.wan.tiny_layers import MEAN, STD, TinyLayers

SMALL = (8, 6, 4, 5)  # widths; each its own, so that none can stand for another
CONFIG = WanConfig(
    dim=96, ffn_dim=160, layers=2, heads=4, text_dim=32, text_len=24, size=(4, 6), freq_dim=32
)


def published(widths=(256, 128, 64, 64), channels=16, patch=1, seed=0):
    """A file's tensors by name, as the authors' layout numbers them; the encoder's first and last.

    Written out and not taken from our module, whose names and shapes are tested by it.
    """
    a, b, c, d = widths
    shapes = {"encoder.0.weight": (64, 3, 3, 3), "encoder.0.bias": (64,)}
    shapes |= {"encoder.17.weight": (channels, 64, 3, 3), "encoder.17.bias": (channels,)}
    shapes |= {"decoder.1.weight": (a, channels, 3, 3), "decoder.1.bias": (a,)}
    for width, blocks in ((a, (3, 4, 5)), (b, (9, 10, 11)), (c, (15, 16, 17))):
        for i in blocks:
            for part, inside in ((0, 2 * width), (2, width), (4, width)):
                shapes[f"decoder.{i}.conv.{part}.weight"] = (width, inside, 3, 3)
                shapes[f"decoder.{i}.conv.{part}.bias"] = (width,)
    shapes |= {"decoder.7.conv.weight": (a, a, 1, 1), "decoder.8.weight": (b, a, 3, 3)}
    shapes |= {"decoder.13.conv.weight": (2 * b, b, 1, 1), "decoder.14.weight": (c, b, 3, 3)}
    shapes |= {"decoder.19.conv.weight": (2 * c, c, 1, 1), "decoder.20.weight": (d, c, 3, 3)}
    shapes |= {"decoder.22.weight": (3 * patch**2, d, 3, 3), "decoder.22.bias": (3 * patch**2,)}
    rng = torch.Generator().manual_seed(seed)

    def draw(name, shape):
        wide = torch.Size(shape[1:]).numel() if len(shape) > 1 else 4
        x = torch.randn(shape, generator=rng) * (1.2 / wide) ** 0.5
        return x + 0.5 if name == "decoder.22.bias" else x

    return {name: draw(name, shape) for name, shape in shapes.items()}


def brute_force(tensors, latents, raw=False, patch=1):
    """The layout in float64, a frame at a time and layer after layer over the whole video.

    Before the first frame are zeros. Levels [F, H, W, 3], 0 to 255.
    """
    w = {name: x.double() for name, x in tensors.items()}
    frames = [x.double()[None] for x in latents[0].unbind(1)]  # [1, C, h, w] each
    if raw:
        mean, std = (torch.tensor(x, dtype=torch.float64).view(1, -1, 1, 1) for x in (MEAN, STD))
        frames = [x * std + mean for x in frames]
    frames = [3 * torch.tanh(x / 3) for x in frames]

    def conv(x, name):
        weight = w[f"{name}.weight"]
        return F.conv2d(x, weight, w.get(f"{name}.bias"), padding=weight.shape[-1] // 2)

    frames = [conv(x, "decoder.1").relu() for x in frames]
    for first, times in ((3, 1), (9, 2), (15, 2)):
        for i in range(first, first + 3):
            out, before = [], torch.zeros_like(frames[0])
            for x in frames:
                y = conv(torch.cat([x, before], 1), f"decoder.{i}.conv.0").relu()
                y = conv(y, f"decoder.{i}.conv.2").relu()
                out.append((conv(y, f"decoder.{i}.conv.4") + x).relu())
                before = x
            frames = out
        frames = [x.repeat_interleave(2, 2).repeat_interleave(2, 3) for x in frames]
        grown = [conv(x, f"decoder.{first + 4}.conv").chunk(times, 1) for x in frames]
        frames = [conv(x, f"decoder.{first + 5}") for parts in grown for x in parts]
    frames = [conv(x.relu(), "decoder.22") for x in frames]
    shown = torch.cat([F.pixel_shuffle(x, patch) for x in frames]).clamp(0, 1)
    return 255 * shown[3:].permute(0, 2, 3, 1)


def drawn(frames, high=3, wide=4, channels=16, seed=1):
    rng = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(1, channels, frames, high, wide, generator=rng)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A decoder of few channels in both published containers."""
    folder, tensors = tmp_path_factory.mktemp("tiny"), published(SMALL)
    torch.save(tensors, folder / "taew2_1.pth")
    write_tensors(folder / "taew2_1.safetensors", tensors)
    torch.save(tensors, folder / "lighttaew2_1.pth")
    return folder, tensors


@pytest.mark.parametrize("name", ["taew2_1.pth", "taew2_1.safetensors", "lighttaew2_1.pth"])
@torch.no_grad()
def test_a_decoder_equals_its_layout(name, small):
    folder, tensors = small
    latents, raw = drawn(5).double(), name.startswith("light")
    expected = brute_force(tensors, latents, raw)
    assert expected.shape == (17, 24, 32, 3) and expected.std() > 10
    exact = TinyDecoder.read(folder / name, CONFIG, dtype=torch.float64)
    torch.testing.assert_close(exact.levels(latents, {}), expected, rtol=0, atol=1e-9)
    decoder = TinyDecoder.read(folder / name, CONFIG)
    levels = decoder.levels(latents.float(), {}).double()
    torch.testing.assert_close(levels, expected, rtol=0, atol=1e-2)
    frames = exact(latents, {})
    assert frames.flags.c_contiguous  # as it comes from the convolutions, whose channels lie last
    assert frames.dtype == np.uint8 and np.array_equal(frames, expected.round().byte().numpy())
    assert exact.pixel_frames(5) == 17 and exact.pixel_frames(0) == 0
    # the two conventions are far apart
    other = brute_force(tensors, latents, not raw)
    assert (other - expected).abs().mean() > 5


@pytest.mark.slow
@torch.no_grad()
def test_the_published_size_loads_and_equals_its_layout(tmp_path):
    tensors = {name: x.half() for name, x in published().items()}  # as it is published
    count = sum(x.numel() for name, x in tensors.items() if name.startswith("decoder."))
    assert count == 9_844_611
    latents = drawn(2, 2, 2).double()
    expected = brute_force(tensors, latents)
    assert expected.std() > 10
    torch.save(tensors, tmp_path / "taew2_1.pth")
    write_tensors(tmp_path / "taew2_1.safetensors", tensors)
    for kind in ("pth", "safetensors"):
        decoder = TinyDecoder.read(tmp_path / f"taew2_1.{kind}", WanConfig(), dtype=torch.float64)
        assert sum(x.numel() for x in decoder.layers.parameters()) == count
        torch.testing.assert_close(decoder.levels(latents, {}), expected, rtol=0, atol=1e-8)


def test_the_published_shapes_are_ours():
    with torch.device("meta"):
        held = TinyLayers().state_dict()
    theirs = {n: x.shape for n, x in published().items() if n.startswith("decoder.")}
    assert {name: x.shape for name, x in held.items()} == theirs
    assert sum(shape.numel() for shape in theirs.values()) == 9_844_611


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.inference_mode()
def test_a_streamed_video_is_the_whole_one_exactly(dtype, small):
    folder, _ = small
    decoder = TinyDecoder.read(folder / "taew2_1.pth", CONFIG, dtype=dtype)
    latents = drawn(12)
    whole, ends = decoder.levels(latents, features := {}), []
    assert whole.shape[0] == 45 and not whole.equal(torch.zeros_like(whole))
    for sizes in ([1] * 12, [2] * 6, [3] * 4, [5, 7], [1, 4, 4, 3]):
        held, parts = {}, []
        for i, part in enumerate(latents.split(sizes, 2)):
            if i == 1:
                # what is not shown is seen, and a saved state keeps no strides
                held = {name: x.contiguous().clone() for name, x in held.items()}
                decoder.skip(part, held)
                parts.append(None)
            else:
                parts.append(decoder.levels(part, held))
        assert parts[0].equal(whole[: decoder.pixel_frames(sizes[0])])
        rest = torch.cat(parts[2:] or [whole[:0]])
        assert rest.equal(whole[decoder.pixel_frames(sum(sizes[:2])) :])
        ends.append(held)
    for held in ends:
        assert held.keys() == features.keys() and all(held[k].equal(features[k]) for k in held)


@pytest.mark.slow
@torch.inference_mode()
def test_a_compiled_decoder_gives_the_same_frames(small):
    folder, _ = small
    eager = TinyDecoder.read(folder / "taew2_1.pth", CONFIG)
    fused = TinyDecoder.read(folder / "taew2_1.pth", CONFIG).compile("aot_eager")
    torch.compiler.reset()
    held, others = {}, {}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=1):
        # one program serves a video's first chunk and the later ones
        for part in drawn(9).split(3, 2):
            a, b = eager(part, held), fused(part, others)
            assert a.shape == b.shape and np.abs(a.astype(int) - b).max() <= 1


def test_the_vaes_mean_and_deviation_are_the_published_ones():
    from diffusers import AutoencoderKLWan

    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    assert list(MEAN) == defaults["latents_mean"].default
    assert list(STD) == defaults["latents_std"].default


def test_an_unknown_name_is_warned_of(small, tmp_path):
    folder, tensors = small
    path = tmp_path / "decoder.pth"
    torch.save(tensors, path)
    with pytest.warns(TachyscopeWarning, match="does not tell which latents it wants") as found:
        decoder = TinyDecoder.read(path, CONFIG)
    assert "name it lighttaew2_1" in str(found[0].message) and not decoder.layers.raw
    for name in ("taew2_1", "TAEW2_1_fp16", "lighttaew2_1", "LightTAEw2_1"):
        torch.save(tensors, tmp_path / f"{name}.pth")
        decoder = TinyDecoder.read(tmp_path / f"{name}.pth", CONFIG)
        assert decoder.layers.raw == name.lower().startswith("light") and decoder.name == name


@torch.no_grad()
def test_of_time_steps_too_many_the_last_are_meant(small, tmp_path):
    _, tensors = small
    more = dict(tensors)
    for i in (7, 13, 19):
        weight = tensors[f"decoder.{i}.conv.weight"]
        more[f"decoder.{i}.conv.weight"] = torch.cat([torch.randn(weight.shape), weight])
    torch.save(more, tmp_path / "taew2_1.pth")
    decoder = TinyDecoder.read(tmp_path / "taew2_1.pth", CONFIG, dtype=torch.float64)
    expected = brute_force(tensors, drawn(2).double())
    torch.testing.assert_close(decoder.levels(drawn(2).double(), {}), expected, rtol=0, atol=1e-9)


@torch.no_grad()
def test_pixels_may_be_folded_into_channels(tmp_path):
    """As in taew2_2."""
    tensors = published(SMALL, channels=12, patch=2)
    torch.save(tensors, tmp_path / "taew2_2.pth")
    config = WanConfig(in_channels=12, stride=(4, 16, 16))
    decoder = TinyDecoder.read(tmp_path / "taew2_2.pth", config, dtype=torch.float64)
    latents = drawn(2, channels=12).double()
    expected = brute_force(tensors, latents, patch=2)
    assert expected.shape == (5, 48, 64, 3)
    torch.testing.assert_close(decoder.levels(latents, {}), expected, rtol=0, atol=1e-9)


def test_a_file_that_is_no_tiny_decoder_is_named(small, tmp_path):
    folder, tensors = small
    path = tmp_path / "taew2_1.pth"

    def read(changed, config=CONFIG, file=path):
        torch.save(changed, file)
        return lambda: TinyDecoder.read(file, config)

    refused(read({"x.weight": torch.ones(1)}), str(path), "TAEHV's first layout", "got x.weight")
    refused(read({}), "got nothing")
    refused(read(tensors | {"decoder.1.weight": torch.ones(())}), "TAEHV's first layout")
    for shape in ((0, 8, 3, 3), (10**10, 0, 3, 3), ()):
        refused(read(tensors | {"decoder.8.weight": torch.ones(shape)}), "of at most 4096 channels")
    refused(read(tensors | {"decoder.22.weight": torch.ones(2, 5, 3, 3)}), "TAEHV's first layout")
    less = {name: x for name, x in tensors.items() if name != "decoder.10.conv.2.bias"}
    refused(read(less), str(path), "it lacks decoder.10.conv.2.bias")
    refused(read(tensors | {"decoder.23.weight": torch.ones(2)}), "it also has decoder.23.weight")
    wrong = tensors | {"decoder.4.conv.0.weight": torch.ones(8, 8, 3, 3)}
    refused(
        read(wrong), "decoder.4.conv.0.weight is float32 [8, 8, 3, 3] and must be float32 [8, 16"
    )
    wrong = tensors | {"decoder.13.conv.weight": torch.ones(13, 6, 1, 1)}
    refused(read(wrong), "decoder.13.conv.weight is float32 [13, 6, 1, 1] and must be")
    odd = tensors | {"decoder.8.weight": torch.full((6, 8, 3, 3), torch.nan)}
    refused(read(odd), "NaN or infinity in decoder.8.weight")
    words = (
        "of 16 channels to 4 frames of 8x8 pixels a place, the model's have 12 and become 4 of 8x8"
    )
    refused(read(tensors, WanConfig(in_channels=12)), words)
    refused(read(tensors, WanConfig(stride=(1, 8, 8))), "and become 1 of 8x8: give a decoder of")
    light = tmp_path / "lighttaew2_1.pth"
    thin = published(SMALL, channels=12)
    refused(read(thin, WanConfig(in_channels=12), light), "known for 16 channels, got 12")
    refused(lambda: TinyDecoder.read(tmp_path / "none.pth", CONFIG), "no checkpoint file")
    path.write_bytes(path.read_bytes()[:1000])
    refused(lambda: TinyDecoder.read(path, CONFIG), "damaged or cut short")

    class Code:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"decoder.1.weight": Code()}, path)
    refused(lambda: TinyDecoder.read(path, CONFIG), "pickled objects whose code was not run")
    refused(lambda: TinyDecoder.read(folder / "taew2_1.pth", CONFIG).encode(np.zeros((1, 8, 8, 3))),
            "taew2_1 is a tiny decoder, which only shows", "put Wan2.1_VAE.pth beside")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a VAE, both small and random, as they are saved."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers imports what torch is about to retire
        from diffusers import AutoencoderKLWan
    path = tmp_path_factory.mktemp("model")
    made = random_wan(CONFIG)
    torch.manual_seed(1)
    made.decoder = wan_vae.WanVae(AutoencoderKLWan(base_dim=8))
    save_wan(made, path)
    return path


def test_a_model_shows_its_latents_by_a_tiny_decoder(folder, small, monkeypatch):
    file = small[0] / "taew2_1.safetensors"
    monkeypatch.setitem(importlib.sys.modules, "diffusers", None)  # the VAE is not even read
    model = ts.load("wan_causal", folder, decoder=file)
    assert isinstance(model.decoder, TinyDecoder) and model.decoder_name == "taew2_1"
    session = open_session(model, prompt="a", frames=33)
    shown, made = [], []
    for chunk in rollout(model, frames=33, stream=ts.Stream(model, session)):
        shown.append(chunk.frames)
        made.append(session.memory.latents)
    assert [len(frames) for frames in shown] == [9, 12, 12]
    with torch.no_grad():
        whole = model.decoder(torch.cat(made, 2), {})
    assert np.array_equal(np.concatenate(shown), whole)
    assert sum(name.startswith("tiny.") for name in session.memory.features.decoder()) == 9
    # and from a state, which holds its memory
    state = session.state()
    on = [c.frames for c in rollout(model, frames=12, stream=ts.Stream(model, session))]
    again = open_session(model, prompt="a", frames=33)
    again.restore(state)
    back = [c.frames for c in rollout(model, frames=12, stream=ts.Stream(model, again))]
    assert np.array_equal(np.concatenate(on), np.concatenate(back))


@pytest.mark.slow
def test_a_change_of_prompt_leaves_no_seam(folder, small):
    model = ts.load("wan_causal", folder, decoder=small[0] / "taew2_1.pth")
    session, made, shown = open_session(model, prompt="a", frames=33), [], []
    for chunk in rollout(model, frames=33, stream=ts.Stream(model, session), then=[(9, "b")]):
        made.append(session.memory.latents[:, :, -3:])
        shown.append(chunk.frames)
    with torch.no_grad():
        assert np.array_equal(np.concatenate(shown), model.decoder(torch.cat(made, 2), {}))
    # what is remembered by hand is shown as a video that begins with it
    ts.Stream(model, session).refill(made[0], "a")
    (chunk,) = rollout(model, frames=12, stream=ts.Stream(model, session))
    with torch.no_grad():
        whole = model.decoder(torch.cat([made[0], session.memory.latents], 2), {})
    assert np.array_equal(chunk.frames, whole[9:])


@pytest.mark.slow
def test_given_frames_are_encoded_by_the_vae(folder, small):
    first = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    plain, tiny = load_wan(folder), load_wan(folder, decoder=small[0] / "taew2_1.pth")
    session = open_session(tiny, prompt="a", first=first)
    assert plain.encode_frames(first).equal(session.memory.latents)
    (chunk,) = rollout(tiny, frames=12, stream=ts.Stream(tiny, session))
    whole = torch.cat([plain.encode_frames(first), session.memory.latents], 2)
    with torch.no_grad():
        assert np.array_equal(tiny.decoder(whole, {})[5:], chunk.frames)


@pytest.mark.slow
def test_both_decoders_of_a_video_are_compared(folder, small):
    file = small[0] / "taew2_1.pth"
    tiny = ts.load("wan_causal", folder, decoder=file)
    both = ts.load("wan_causal", folder, decoder=file, decoder_check=True)
    plain = ts.load("wan_causal", folder)
    first = np.random.default_rng(0).integers(0, 256, (1, 32, 48, 3), dtype=np.uint8)
    films = []
    for model in (tiny, both, plain):
        session = open_session(model, prompt="a", first=first)
        chunks = rollout(model, frames=24, stream=ts.Stream(model, session), then=[(12, "b")])
        films.append(np.concatenate([chunk.frames for chunk in chunks]))
        note = decoder_note(session.memory.features.decoder())
        assert (ERROR in session.memory.features.decoder()) == (model is both) == (note is not None)
    checked = both.decoder.reference
    assert isinstance(checked, wan_vae.WanVae) and np.array_equal(films[0], films[1])
    session = open_session(both, prompt="a", first=first)
    list(rollout(both, frames=24, stream=ts.Stream(both, session), then=[(12, "b")]))
    error = np.square(films[0].astype(float) - films[2]).mean()
    expected = f"those of Wan's VAE: {10 * np.log10(255**2 / error):.1f} dB, over all frames"
    assert expected in decoder_note(session.memory.features.decoder())
    assert "equal those of" in decoder_note({ERROR: torch.tensor([0.0, 9.0])})


@pytest.mark.slow
def test_the_command_line_tells_how_far_the_decoders_lie_apart(folder, small, tmp_path, capsys):
    file = small[0] / "taew2_1.pth"
    words = ["generate", "wan_causal", "--weights", str(folder), "--frames", "9", "--prompt", "a"]
    words += ["--weights", f"decoder={file}", "--weights", "decoder_check=1"]
    words += ["--out", str(tmp_path)]
    assert main(words) == 0
    capsys.readouterr()
    row = json.loads((tmp_path / "generate.json").read_text())["rows"][0]
    assert row["decoder"] == "taew2_1"
    assert [n for n in row["notes"] if "to those of Wan's VAE: " in n]
    words = ["compare", *words[1:], "--plans", "dense"]
    assert main(words) == 0
    assert "to those of Wan's VAE: " in " ".join(capsys.readouterr().out.split())


def test_faults_of_the_decoders_options(folder, small, tmp_path):
    file = small[0] / "taew2_1.pth"
    refused(
        lambda: ts.load("wan_causal", folder, decoder_check=True), "got none: give `decoder` too"
    )
    for name in ("toy-chunks", "toy-tokens", "atrium-world"):
        refused(lambda name=name: ts.load(name, decoder=file), "takes no tiny decoder, got")
    save_wan(load_wan(folder), tmp_path / "alone.pt")
    refused(
        lambda: load_wan(tmp_path / "alone.pt", config=CONFIG, decoder=file, decoder_check=True),
        "which only shows: to encode given frames, or to check its own, put Wan2.1_VAE.pth",
    )


@pytest.mark.slow
def test_a_tiny_decoder_is_saved_with_its_model(folder, small, tmp_path):
    for name in ("taew2_1", "lighttaew2_1"):
        model = ts.load("wan_causal", folder, decoder=small[0] / f"{name}.pth")
        save_wan(model, tmp_path / name)
        again = load_wan(tmp_path / name)
        assert again.config.decoder == "tiny_decoder" and again.decoder_name == name
        for a, b in zip(*(rollout(m, frames=9) for m in (model, again)), strict=True):
            assert np.array_equal(a.frames, b.frames)


@pytest.mark.slow
def test_its_memory_is_predicted(folder, small):
    model = ts.load("wan_causal", folder, decoder=small[0] / "taew2_1.pth")
    model.decoder.compile()  # nothing is compiled for shapes alone
    found = need(model.on_meta(), "dense", frames=21)
    kept = 4 * 24 * 3 * (SMALL[0] + 4 * SMALL[1] + 16 * SMALL[2])
    assert found.decoder == 4 * sum(x.numel() for x in model.decoder.layers.parameters())
    assert found.decoder_state == kept
    assert found.decoding > 12 * 32 * 48 * 3  # the frames alone


@pytest.mark.slow
def test_random_weights_of_the_published_shape_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    one = TinyDecoder.read("random-tiny", WanConfig())
    torch.set_default_dtype(torch.float64)
    try:
        two = TinyDecoder.read("random-tiny", WanConfig())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.get_rng_state().equal(before)
    assert one.name == "taew2_1 (random weights)"
    assert sum(x.numel() for x in one.layers.parameters()) == 9_844_611
    pairs = zip(one.layers.parameters(), two.layers.parameters(), strict=True)
    assert all(a.equal(b) for a, b in pairs)
    refused(lambda: TinyDecoder.read("random-tiny", WanConfig(stride=(1, 8, 8))), "random-tiny dec")
