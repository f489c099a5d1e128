"""UMT5 and Wan's VAE from their published containers equal transformers' and diffusers' own."""

import copy
import dataclasses
import hashlib
import importlib
import json
import re
import shutil
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from faults import refused
from hypothesis import example, given
from hypothesis import strategies as st
from toys import open_session

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.core.errors import TachyscopeWarning
from tachyscope.core.rollout import rollout
from tachyscope.io.video import read_frames
from tachyscope.measure.certify import PROMPTS, Protocol, certify, parts_of
from tachyscope.measure.quality import psnr
from tachyscope.models.checkpoint import read_tensors, write_tensors
from tachyscope.models.registry import load, with_prompt
from tachyscope.models.wan import download, vae_5b
from tachyscope.models.wan import text as wan_text
from tachyscope.models.wan import vae as wan_vae
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.download import HubFiles
from tachyscope.models.wan.loading import WEIGHTS, load_wan, save_wan
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.random import random_wan
from tachyscope.models.wan.text import UMT5, PromptFile, embed_prompt, write_prompt
from tachyscope.models.wan.vae import WanVae

CONFIG = WanConfig(
    dim=96, ffn_dim=160, layers=2, heads=4, text_dim=32, text_len=24, size=(4, 6), freq_dim=32
)
REVISIONS_OF_SELF_FORCING = {
    repo: download.REVISIONS[repo] for repo in ("gdhe17/Self-Forcing", "Wan-AI/Wan2.1-T2V-1.3B")
}
WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "room", "&"]
# the published encoder's tensors and transformers', written out: the reader's own table is tested
UMT5_NAMES = {
    "token_embedding.weight": "shared.weight",
    "blocks.{}.norm1.weight": "encoder.block.{}.layer.0.layer_norm.weight",
    "blocks.{}.attn.q.weight": "encoder.block.{}.layer.0.SelfAttention.q.weight",
    "blocks.{}.attn.k.weight": "encoder.block.{}.layer.0.SelfAttention.k.weight",
    "blocks.{}.attn.v.weight": "encoder.block.{}.layer.0.SelfAttention.v.weight",
    "blocks.{}.attn.o.weight": "encoder.block.{}.layer.0.SelfAttention.o.weight",
    "blocks.{}.pos_embedding.embedding.weight": (
        "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    ),
    "blocks.{}.norm2.weight": "encoder.block.{}.layer.1.layer_norm.weight",
    "blocks.{}.ffn.gate.0.weight": "encoder.block.{}.layer.1.DenseReluDense.wi_0.weight",
    "blocks.{}.ffn.fc1.weight": "encoder.block.{}.layer.1.DenseReluDense.wi_1.weight",
    "blocks.{}.ffn.fc2.weight": "encoder.block.{}.layer.1.DenseReluDense.wo.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
}


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    """diffusers imports what torch is about to retire."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import diffusers.loaders.single_file_utils  # noqa: F401
        import transformers  # noqa: F401
        from diffusers import AutoencoderKLWan  # noqa: F401
        from transformers import UMT5EncoderModel  # noqa: F401


def original_umt5(model):
    """A UMT5's tensors under their published names."""
    held = model.state_dict()
    found = {
        name.format(i): held[theirs.format(i)]
        for name, theirs in UMT5_NAMES.items()
        for i in range(model.config.num_layers)
    }
    assert len(found) == len(held) - 1  # the tied embedding is published once
    return found


@pytest.fixture(scope="module")
def umt5():
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=3,
        relative_attention_num_buckets=8,
    )  # fmt: skip
    model = UMT5EncoderModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def vae():
    from diffusers import AutoencoderKLWan

    torch.manual_seed(1)
    return AutoencoderKLWan(base_dim=8).eval().requires_grad_(False)


def original_vae(model):
    """The VAE's tensors under their published names, by undoing diffusers' own conversion."""
    names = importlib.import_module("diffusers.loaders.single_file_utils")
    candidates = {f"conv{i}.{k}" for i in (1, 2) for k in ("weight", "bias")}
    for side, blocks in (("encoder", "downsamples"), ("decoder", "upsamples")):
        candidates |= {f"{side}.conv1.{k}" for k in ("weight", "bias")}
        parts = [f"middle.{i}" for i in range(3)] + [f"{blocks}.{i}" for i in range(15)] + ["head"]
        inner = [f"residual.{i}" for i in (0, 2, 3, 6)] + ["norm", "to_qkv", "proj", "shortcut"]
        inner += ["resample.1", "time_conv", "0", "2"]
        kinds = ("weight", "bias", "gamma")
        candidates |= {f"{side}.{p}.{i}.{k}" for p in parts for i in inner for k in kinds}
    found = {}
    for name in sorted(candidates):
        (new,) = names.convert_wan_vae_to_diffusers({name: None}) or [""]
        if new in (held := model.state_dict()):
            found[name] = held[new]
    assert len(found) == 194
    return found


def original_vae_5b(model):
    """The VAE's tensors under the published names of Wan 2.2, by where they lie in its modules."""
    parts = {"quant_conv": "conv1", "post_quant_conv": "conv2"}
    inner = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3",
             "conv2": "residual.6", "conv_shortcut": "shortcut"}  # fmt: skip
    for side, way, each in (("encoder", "down", 2), ("decoder", "up", 3)):
        parts |= {f"{side}.conv_in": f"{side}.conv1", f"{side}.norm_out": f"{side}.head.0",
                  f"{side}.conv_out": f"{side}.head.2"}  # fmt: skip
        for part in ("norm", "to_qkv", "proj"):
            parts[f"{side}.mid_block.attentions.0.{part}"] = f"{side}.middle.1.{part}"
        blocks = {f"{side}.mid_block.resnets.{i}": f"{side}.middle.{2 * i}" for i in range(2)}
        for stage in range(4):
            ours, theirs = (
                f"{side}.{way}_blocks.{stage}",
                f"{side}.{way}samples.{stage}.{way}samples",
            )
            blocks |= {f"{ours}.resnets.{i}": f"{theirs}.{i}" for i in range(each)}
            for part in ("resample.1", "time_conv"):
                parts[f"{ours}.{way}sampler.{part}"] = f"{theirs}.{each}.{part}"
        for ours, theirs in blocks.items():
            parts |= {f"{ours}.{name}": f"{theirs}.{part}" for name, part in inner.items()}
    named = (name.rpartition(".") for name in model.state_dict())
    return {
        f"{parts[part]}.{kind}": model.state_dict()[f"{part}.{kind}"] for part, _, kind in named
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory, umt5, vae):
    """A model's folder as Wan's authors publish one, small and random."""
    import tokenizers
    import transformers

    path = tmp_path_factory.mktemp("published")
    save_wan(WanModel("small", random_wan(CONFIG).transformer), path)
    write_tensors(path / wan_text.PUBLISHED, original_umt5(umt5))
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(str(path / "google/umt5-xxl"))
    write_tensors(path / wan_vae.PUBLISHED, original_vae(vae))
    return path


@torch.no_grad()
def test_a_prompt_is_embedded_as_by_transformers(folder, umt5):
    encoder = UMT5(folder, 24)
    context, length = encoder("  a red \n room &amp; room")
    ids = torch.zeros(1, 24, dtype=torch.long)
    ids[0, :7] = torch.tensor([3, 4, 5, 6, 5, 1, 0])
    mask = (torch.arange(24) < 6)[None].long()
    expected = umt5(ids, mask).last_hidden_state * mask[..., None]
    assert length == 6 and context.shape == (1, 24, 32)
    assert expected[0, :6].std() > 0.5
    torch.testing.assert_close(context, expected, rtol=0, atol=1e-5)
    assert not context[0, 6:].any()
    assert encoder("a " * 50)[1] == 24


def test_a_prompt_that_ftfy_may_change_is_warned_of(folder, monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "ftfy" else find(n))
    for plain in ("a red room & room\n", "", "~!@#$%^*()_+ \t"):
        wan_text.clean(plain)  # any warning is an error in tests
    for odd in ("caf\u00e9", "\u201cred\u201d", "a\x0broom", "a\x1b[1mb"):
        with pytest.warns(TachyscopeWarning, match="letters that it may change: pip install ftfy"):
            wan_text.clean(odd)
    words = ["--prompt", "a caf\u00e9", "--prompt", "9: \u201cred\u201d", "--frames", "21"]
    words = ["generate", "wan_causal", "--weights", str(folder), *words, "--out", str(tmp_path)]
    assert main(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line[:51] for line in lines] == ["tachyscope: note: ftfy is not installed, which Wan'"]


@given(st.text(st.characters(max_codepoint=127, exclude_categories=["Cc"]), max_size=20))
@example("a\tb\nc\x0cd\re")
def test_ftfy_leaves_ascii_as_it_is(prompt):
    ftfy = pytest.importorskip("ftfy")
    prompt = prompt.replace("&", "and")  # entities are resolved with and without it
    assert " ".join(ftfy.fix_text(prompt).split()) == " ".join(prompt.split())


def test_umt5_comes_back_from_transformers_form(folder, tmp_path):
    encoder = UMT5(folder, 24)
    encoder.write(tmp_path)
    again = UMT5(tmp_path, 24)
    assert not again.original
    assert again("a room")[0].equal(encoder("a room")[0])


def test_a_faulty_umt5_is_named(folder, tmp_path, monkeypatch):
    refused(lambda: UMT5(tmp_path), "it lacks text_encoder")
    (tmp_path / "google/umt5-xxl").mkdir(parents=True)
    write_tensors(tmp_path / wan_text.PUBLISHED, {"x.weight": torch.ones(1)})
    refused(lambda: UMT5(tmp_path)("a"), "the tokenizer in", "must load")
    refused(lambda: UMT5(tmp_path).model, "UMT5's encoder under Wan's names, got x.weight")
    monkeypatch.setitem(importlib.sys.modules, "transformers", None)
    refused(lambda: UMT5(folder)("a"), "needs transformers", "pip install -e '.[hf]'")


@torch.no_grad()
def test_the_vae_decodes_and_encodes_as_diffusers(folder, vae):
    ours = WanVae.read(folder)
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(1, 16, 3, 4, 6, generator=generator)
    mean, std = (
        torch.tensor(vae.config[f"latents_{k}"])[:, None, None, None] for k in ("mean", "std")
    )
    expected = vae.decode(latents * std + mean).sample
    decoded = ours._decode(latents, {})
    assert decoded.abs().max() > 1  # what diffusers clips, frames are clipped to as well
    torch.testing.assert_close(decoded.clamp(-1, 1), expected, rtol=0, atol=1e-5)
    frames = ours(latents, {})
    assert frames.shape == (9, 32, 48, 3) and frames.dtype == np.uint8 and frames.std() > 1
    levels = (decoded[0].permute(1, 2, 3, 0).clamp(-1, 1) * 127.5 + 127.5).round().byte()
    assert np.array_equal(frames, levels.numpy())
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None] / 127.5 - 1
    encoded = (vae.encode(pixels).latent_dist.mean - mean) / std
    assert ours.encode(frames).shape == latents.shape
    torch.testing.assert_close(ours.encode(frames), encoded, rtol=0, atol=1e-5)
    refused(lambda: ours.encode(frames[:8]), "1 + 4n of them", "got 8: give 5")
    # a picture that was not rounded is encoded as it is
    sharp = ours.levels(latents, {})[:1]
    pixels = sharp.permute(3, 0, 1, 2)[None] / 127.5 - 1
    encoded = (vae.encode(pixels).latent_dist.mean - mean) / std
    torch.testing.assert_close(ours.encode(sharp), encoded, rtol=0, atol=1e-5)
    assert (ours.encode(sharp) - ours.encode(frames[:1])).abs().max() > 1e-4


@torch.no_grad()
def test_nothing_decodes_to_nothing_as_with_diffusers(vae):
    """A norm of zeros is zeros; so are convolutions without biases."""
    bare = copy.deepcopy(vae)
    for name, tensor in bare.state_dict().items():
        if name.endswith("bias"):
            tensor.zero_()
    nothing = torch.zeros(1, 16, 2, 2, 2)
    assert bare.decode(nothing).sample.eq(0).all()
    assert WanVae(bare).model.decode(nothing).sample.eq(0).all()


@pytest.mark.slow
@torch.inference_mode()
def test_compiled_norms_give_the_same_frames(folder):
    vae, compiled = WanVae.read(folder), WanVae.read(folder).compile_norms("aot_eager")
    latents = torch.randn(1, 16, 4, 4, 6, generator=torch.Generator().manual_seed(7))
    features, others = {}, {}
    torch.compiler.reset()
    for part in latents.split(2, 2):
        # three widths, one also in attention, whatever the number of frames and places
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=4):
            got = compiled._decode(part, others)
        torch.testing.assert_close(got, vae._decode(part, features), rtol=0, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_a_streamed_video_is_the_whole_one(folder):
    vae, features = WanVae.read(folder), {}
    latents = torch.randn(1, 16, 9, 4, 6, generator=torch.Generator().manual_seed(3))
    whole = vae._decode(latents, {})
    parts = []
    for i, part in enumerate(latents.split(3, 2)):
        parts.append(vae._decode(part, features))
        assert (
            parts[-1].shape[2]
            == (12 if i else 9)
            == vae.pixel_frames(3 * i + 3) - vae.pixel_frames(3 * i)
        )
    assert torch.cat(parts, 2).equal(whole)
    one_by_one = {}
    single = [vae._decode(part, one_by_one) for part in latents.split(1, 2)]
    assert torch.cat(single, 2).equal(whole)
    assert all(features[name].equal(one_by_one[name]) for name in features)
    assert vae.pixel_frames(0) == 0


@torch.no_grad()
@pytest.mark.parametrize("patch", [None, 2])
def test_a_video_encoded_as_it_comes_is_the_whole_one(vae, patch):
    """Both VAEs: 2.2's takes patches of pixels, and has other blocks."""
    if patch:
        from diffusers import AutoencoderKLWan

        torch.manual_seed(1)
        settings = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 16, "is_residual": True}
        channels = {"in_channels": 12, "out_channels": 12, "patch_size": patch}
        vae = AutoencoderKLWan(**settings, **channels, scale_factor_spatial=16).eval()
    ours, rng = WanVae(copy.deepcopy(vae)), np.random.default_rng(3)
    frames = rng.integers(0, 256, (33, 32, 48, 3), np.uint8)
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None] / 127.5 - 1
    mean, std = (
        torch.tensor(vae.config[f"latents_{k}"])[:, None, None, None] for k in ("mean", "std")
    )
    expected = (vae.encode(pixels).latent_dist.mode() - mean) / std
    whole, state, parts, at = ours.encode(frames), {}, [], 0
    for count in (9, 12, 4, 8):
        parts.append(ours.encode_next(frames[at : at + count], state))
        at += count
    assert torch.cat(parts, 2).equal(whole) and whole.shape[2] == 9
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)
    held = {name: x.shape for name, x in state.items()}
    ours.encode_next(frames[:4], state)
    assert {name: x.shape for name, x in state.items()} == held  # what is kept does not grow


@pytest.mark.slow
def test_the_vae_comes_back_from_diffusers_form(folder, tmp_path):
    vae = WanVae.read(folder)
    vae.write(tmp_path)
    settings = json.loads((tmp_path / "vae/config.json").read_text())
    assert settings["base_dim"] == 8 and len(settings["latents_mean"]) == 16
    latents = torch.randn(1, 16, 2, 4, 6)
    for place in (tmp_path, tmp_path / "vae"):
        assert np.array_equal(WanVae.read(place)(latents, {}), vae(latents, {}))


def test_a_vae_of_fewer_channels_shows_what_a_model_makes(vae, tmp_path):
    """LightVAE's layout: Wan's own, named in a file beside the model's."""
    file = tmp_path / "lightvaew2_1.pth"
    write_tensors(file, original_vae(vae), under="state_dict")
    config = WanConfig(
        dim=48, ffn_dim=64, layers=1, heads=2, text_dim=16, text_len=16, size=(4, 6)
    )  # fmt: skip
    save_wan(random_wan(config), tmp_path / "model")
    model = load_wan(tmp_path / "model", decoder=file)
    assert model.decoder_name == "lightvaew2_1" and model.decoder.model.config.base_dim == 8
    latents = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(2))
    assert np.array_equal(model.decoder(latents, {}), WanVae(vae)(latents, {}))
    assert model.decoder.encode(model.decoder(latents, {})).shape == latents.shape
    refused(
        lambda: load_wan(tmp_path / "model", decoder=file, decoder_check=True),
        "`decoder_check` is of a tiny decoder", "lightvaew2_1.pth is a VAE",
    )  # fmt: skip


@torch.no_grad()
def test_a_vae_that_folds_pixels_into_channels():
    """As that of Wan 2.2."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(4)
    model = AutoencoderKLWan(
        base_dim=8, decoder_base_dim=8, z_dim=4, is_residual=True, in_channels=12, out_channels=12,
        patch_size=2, scale_factor_spatial=16, latents_mean=[0.1] * 4, latents_std=[2.0] * 4,
    ).eval()  # fmt: skip
    latents = torch.randn(1, 4, 3, 2, 3)
    whole = model.decode(latents * 2 + 0.1).sample
    ours = WanVae(model)
    features = {}
    streamed = torch.cat([ours._decode(part, features) for part in latents.split(1, 2)], 2)
    torch.testing.assert_close(streamed.clamp(-1, 1), whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_vae_of_wan_2_2_is_read_from_its_original_file(tmp_path):
    from diffusers import AutoencoderKLWan

    torch.manual_seed(1)
    model = AutoencoderKLWan(
        base_dim=8, decoder_base_dim=16, z_dim=48, is_residual=True, in_channels=12,
        out_channels=12, patch_size=2, scale_factor_spatial=16,
        latents_mean=list(vae_5b.MEAN), latents_std=list(vae_5b.STD),
    ).eval()  # fmt: skip
    write_tensors(tmp_path / wan_vae.PUBLISHED_5B, original_vae_5b(model))
    assert WanVae.found(tmp_path)
    found = WanVae.read(tmp_path)
    assert found.stride == (4, 16, 16)
    for name, x in model.state_dict().items():
        assert found.model.state_dict()[name].equal(x), name
    frames = torch.randint(0, 256, (5, 32, 64, 3))
    assert found.encode(frames).equal(WanVae(model).encode(frames))
    sums = (round(sum(x), 4) for x in (vae_5b.MEAN, vae_5b.STD))
    assert (len(vae_5b.MEAN), *sums) == (48, -0.5589, 32.536)


def test_a_faulty_vae_is_named(folder, tmp_path, monkeypatch):
    write_tensors(tmp_path / "x.pth", {"x.weight": torch.ones(1)})
    refused(lambda: WanVae.read(tmp_path / "x.pth"), "hold Wan's VAE", "got x.weight")
    refused(lambda: WanVae.read(tmp_path / "none.pth"), "no checkpoint file")
    tensors = read_tensors(folder / wan_vae.PUBLISHED)
    tensors.pop("decoder.head.2.bias")
    write_tensors(tmp_path / wan_vae.PUBLISHED, tensors)
    refused(lambda: WanVae.read(tmp_path), "it lacks decoder.conv_out.bias")
    monkeypatch.setitem(importlib.sys.modules, "diffusers", None)
    refused(lambda: WanVae.read(folder), "needs diffusers", "pip install -e '.[hf]'")


def test_a_vae_that_cannot_be_read_stops_no_one_who_shows_nothing(folder, monkeypatch):
    assert load_wan(folder).decoder is not None
    monkeypatch.setitem(importlib.sys.modules, "diffusers", None)
    model = load_wan(folder)
    assert model.decoder is None
    refused(lambda: model.pixel_frames(3), "without a decoder", "pip install -e '.[hf]'")


def test_parts_that_are_no_numbers_are_refused(folder, tmp_path):
    for name, key in (
        (wan_vae.PUBLISHED, "decoder.conv1.weight"),
        (wan_text.PUBLISHED, "blocks.1.attn.v.weight"),
    ):
        tensors = {k: x.clone() for k, x in read_tensors(folder / name).items()}
        tensors[key].view(-1)[0] = torch.nan
        write_tensors(tmp_path / name, tensors)
    shutil.copytree(folder / "google", tmp_path / "google")
    words = "finite numbers, it has NaN or infinity in decoder.conv_in.weight"
    refused(lambda: WanVae.read(tmp_path), str(tmp_path / wan_vae.PUBLISHED), words)
    refused(lambda: UMT5(tmp_path, 24)("a"), str(tmp_path / wan_text.PUBLISHED), "must give finite")
    write_tensors(tmp_path / "p.safetensors", {"context": torch.full((4, 32), torch.inf)})
    refused(lambda: PromptFile.read(tmp_path / "p.safetensors", CONFIG), "p.safetensors must give")


@pytest.mark.slow
def test_a_published_folder_makes_a_video(folder):
    model = load_wan(folder)
    assert isinstance(model.text, UMT5) and isinstance(model.decoder, WanVae)
    chunks = list(rollout(model, frames=21, prompt="a red room"))
    assert [len(chunk.frames) for chunk in chunks] == [9, 12]
    other = next(rollout(model, frames=9, prompt="a room"))
    assert not np.array_equal(other.frames, chunks[0].frames)
    # the same parts serve a file that lies beside them
    save_wan(model, folder / "trained.pt")
    beside = load_wan(folder / "trained.pt", config=CONFIG)
    again = next(rollout(beside, frames=9, prompt="a red room", seed=0))
    assert np.array_equal(again.frames, chunks[0].frames)


def test_a_checkpoint_is_loaded_with_its_vae_in_bands(folder):
    latents = torch.randn(1, 16, 2, 4, 6, generator=torch.Generator().manual_seed(5))
    plain, banded = (ts.load("wan_causal", folder, decoder_bands=bands) for bands in (1, 3))
    assert (plain.decoder.bands, banded.decoder.bands) == (1, 3)
    frames, others = (model.decoder(latents, {}).astype(int) for model in (plain, banded))
    assert frames.std() > 1 and np.abs(frames - others).max() <= 1


@pytest.mark.slow
def test_parts_are_saved_with_their_model(folder, tmp_path):
    model = load_wan(folder)
    save_wan(model, tmp_path)
    again = load_wan(tmp_path)
    assert (again.config.text_encoder, again.config.decoder) == ("umt5", "wan_vae")
    for a, b in zip(*(rollout(m, frames=9, prompt="red") for m in (model, again)), strict=True):
        assert np.array_equal(a.frames, b.frames)


@pytest.mark.slow
def test_a_saved_state_streams_on(folder):
    model = load_wan(folder)
    session = open_session(model, prompt="a", frames=33)
    list(rollout(model, frames=9, stream=ts.Stream(model, session)))
    state = session.state()
    assert any(name.startswith("features.vae.") for name in state)
    on = list(rollout(model, frames=12, stream=ts.Stream(model, session)))
    again = open_session(model, prompt="a", frames=33)
    again.restore(state)
    for a, b in zip(on, rollout(model, frames=12, stream=ts.Stream(model, again)), strict=True):
        assert np.array_equal(a.frames, b.frames)


def test_a_video_goes_on_from_first_frames(folder):
    model = load_wan(folder)
    first = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    session = open_session(model, prompt="a", first=first)
    assert session.memory.latent_frame == 2
    (chunk,) = rollout(model, frames=12, stream=ts.Stream(model, session))
    assert len(chunk.frames) == 12
    # shown as part of the whole video, whose first frames are the given ones
    whole = torch.cat([model.encode_frames(first), session.memory.latents], 2)
    with torch.no_grad():
        assert np.array_equal(model.decoder(whole, {})[5:], chunk.frames)


def test_a_prompt_file_stands_for_its_prompt(folder, tmp_path, monkeypatch):
    file = tmp_path / "prompt.safetensors"
    embed_prompt(folder, "a red room", file, length=24)
    assert read_tensors(file)["context"].shape == (4, 32)
    context, length = UMT5(folder, 24)("a red room")
    monkeypatch.setitem(importlib.sys.modules, "transformers", None)
    for path in (file, tmp_path):
        given = PromptFile.read(path, CONFIG)
        assert given("")[0].equal(context) and given("")[1] == length
    write_tensors(tmp_path / "whole.safetensors", {"context": context})
    whole = PromptFile.read(tmp_path / "whole.safetensors", CONFIG)
    assert whole("")[0].equal(context) and whole("")[1] == length
    refused(lambda: given("a"), "embedded before, got also 'a'")
    for bad in (
        {"x": torch.ones(4, 32)},
        {"context": torch.ones(4, 16)},
        {"context": torch.ones(25, 32)},
        {"context": torch.ones(2, 4, 32)},
        {"context": torch.ones(32)},
        {"context": torch.ones(4, 32).bool()},
        {"context": torch.ones(4, 32).long()},
        {"context": torch.ones(4, 32, dtype=torch.complex64)},
        {"context": torch.ones(4, 32).to(torch.float8_e4m3fn)},
    ):
        torch.save(bad, tmp_path / "bad.pt")
        refused(lambda: PromptFile.read(tmp_path / "bad.pt", CONFIG), "must hold 'context' [L, 32]")
    torch.save({"context": torch.ones(4, 32).to_sparse()}, tmp_path / "bad.pt")
    refused(lambda: PromptFile.read(tmp_path / "bad.pt", CONFIG), "got other values in context")


def test_a_prompt_file_leaves_the_rest_of_a_model_as_it_is(tmp_path):
    model = ts.load("toy-chunks", precision="fp8_attention")
    model.revisions = {"some/repository": "commit"}
    write_prompt(tmp_path / "prompt.safetensors", torch.ones(1, 4, 24), 4)
    reading = with_prompt(model, tmp_path / "prompt.safetensors")
    assert reading.encode_prompt("").tokens == (4,) and model.encode_prompt("").tokens == (1,)
    assert reading.shape() == model.shape() and reading.shape().fp8_attention
    assert reading.revisions == model.revisions


@pytest.mark.slow
def test_the_command_line_takes_a_prompt_file(folder, tmp_path, capsys):
    file = tmp_path / "prompt.safetensors"
    embed_prompt(folder, "a red room", file, length=24)
    asked = ["generate", "wan_causal", "--weights", str(folder)]
    for name, words in (("a", ["--prompt", "a red room"]), ("b", ["--prompt", f"@{file}"])):
        assert main([*asked, *words, "--frames", "9", "--out", str(tmp_path / name)]) == 0
    videos = [(tmp_path / name / "video.mp4").read_bytes() for name in "ab"]
    assert videos[0] == videos[1]
    capsys.readouterr()
    # another from a frame on, as it is in words
    night = tmp_path / "night.safetensors"
    embed_prompt(folder, "a room & room", night, length=24)
    files = ["--prompt", f"9: @{night}", "--prompt", f"@{file}"]
    told = ["--prompt", "a red room", "--prompt", "9: a room & room"]
    for name, words in (("e", files), ("f", told)):
        assert main([*asked, *words, "--frames", "21", "--out", str(tmp_path / name)]) == 0
    videos = [(tmp_path / name / "video.mp4").read_bytes() for name in "ef"]
    assert videos[0] == videos[1]
    assert f"from frame 9 on '{night}'" in " ".join(capsys.readouterr().out.split())
    for verb, words, fault in (
        ("generate", files[:2], "begins with a number and a colon comes later, got"),
        ("generate", [*files, *files[2:4]], "begins with one prompt, got"),
        ("compare", files, "a prompt changes in generate alone, got"),
        ("generate", [*files[2:], "--prompt", "9: @none.pt"], "no checkpoint file none.pt"),
        (
            "generate",
            [*files[2:], *told[2:4]],
            "prompts are all words or all files, got",
        ),
    ):
        assert main([verb, *asked[1:], *words, "--out", str(tmp_path / "g")]) == 2
        assert fault in capsys.readouterr().err
    words = ["generate", "toy-tokens", "--prompt", f"@{file}", "--out", str(tmp_path / "d")]
    assert main(words) == 2
    assert "takes no embedded prompt" in capsys.readouterr().err


class Hub(BaseHTTPRequestHandler):
    """Hugging Face, as far as downloading asks: `files` by repository, and paths asked for."""

    files: dict = {}
    asked: list = []

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, whole):
        path = unquote(self.path.partition("?")[0])
        self.asked.append(path)
        # a commit is found by its hash, and a branch's newest is zeros
        found = re.search(r"/(?:revision|resolve|tree)/([0-9a-f]{40})(?:/|$)", path)
        commit = found[1] if found else "0" * 40
        if path.startswith("/api/models/"):
            repo = "/".join(path.split("/")[3:5])
            files = [{"rfilename": name} for name in self.files.get(repo, {})]
            body = json.dumps({"id": repo, "sha": commit, "siblings": files}).encode()
            if "/tree/" in path:
                body = json.dumps(
                    [
                        {"type": "file", "path": name, "oid": "1" * 40, "size": len(data)}
                        for name, data in self.files.get(repo, {}).items()
                    ]
                ).encode()
        else:
            repo, _, name = path[1:].partition("/resolve/")
            body = self.files.get(repo, {}).get(name.partition("/")[2])
        self.send_response(404 if body is None else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", '"' + hashlib.sha1(body or b"").hexdigest() + '"')
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if whole and body:
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch, tmp_path, folder):
    """A stub of Hugging Face that holds Self-Forcing and Wan's parts, both small."""
    from huggingface_hub import constants

    config = dataclasses.replace(CONFIG, dim=128, heads=1)  # heads as a preset's file has them
    save_wan(random_wan(config, seed=5), tmp_path / "x.pt")
    parts = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    preset = PRESETS["self-forcing"]
    monkeypatch.setattr(
        Hub,
        "files",
        {
            preset.hub.repo: {preset.hub.file: (tmp_path / "x.pt").read_bytes()},
            preset.hub.wan: {name: path.read_bytes() for name, path in parts.items()},
        },
    )
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setitem(PRESETS, "self-forcing", dataclasses.replace(preset, config=config))
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield Hub
        server.shutdown()
        thread.join()


def test_published_weights_are_downloaded_where_that_is_asked_for(hub, folder, tmp_path):
    model = load("self-forcing", "download")
    assert model.fingerprint == load("self-forcing", tmp_path / "x.pt").fingerprint
    assert isinstance(model.text, UMT5) and isinstance(model.decoder, WanVae)
    fetched = {path.rpartition("/")[2] for path in hub.asked}
    assert {wan_text.PUBLISHED, wan_vae.PUBLISHED, "tokenizer.json"} <= fetched
    assert WEIGHTS not in fetched  # Wan's own transformer is not needed
    hub.files.clear()
    refused(
        lambda: load("causvid", "download"),
        "causvid could not be downloaded: ",
        "run hf download tianweiy/CausVid autoregressive_checkpoint/model.pt --local-dir causvid "
        "&& hf download Wan-AI/Wan2.1-T2V-1.3B --include 'models_t5_umt5-xxl-enc-bf16.pth' "
        "--include 'Wan2.1_VAE.pth' --include 'google/umt5-xxl/*' --revision "
        "37ec512624d61f7aa208f7ea8140a131f93afc9a --local-dir causvid",
    )
    refused(
        lambda: load("abot-world", "download"),
        "hf download acvlab/ABot-World-0-5B-LF diffusion_pytorch_model.safetensors --revision "
        "d26a3003701e70d38cd17e2af2faf63bd4ff7632 --local-dir abot-world && ",
        "--include 'Wan2.2_VAE.pth' --include 'google/umt5-xxl/*' --revision d26a30",
    )


def test_downloads_are_of_pinned_commits_and_say_of_which(hub, monkeypatch):
    pins = {
        repo: f"{i}" * 40 for i, repo in enumerate(("gdhe17/Self-Forcing", HubFiles("", "").wan), 1)
    }
    monkeypatch.setattr(download, "REVISIONS", pins)
    model = load("self-forcing", "download")
    asked = [path for path in hub.asked if "/resolve/" in path]
    assert asked
    for path in asked:
        repo, revision = path[1:].split("/resolve/")
        assert revision.startswith(pins[repo] + "/"), path
    assert model.revisions == pins
    hub.asked.clear()
    monkeypatch.setattr(download, "REVISIONS", {})
    assert load("self-forcing", "download").revisions == dict.fromkeys(pins, "0" * 40)


@pytest.mark.slow
def test_a_published_model_is_certified_from_its_download_and_from_a_folder(hub, tmp_path):
    """Transformer, text encoder and VAE in their published containers, small and random."""
    protocol = Protocol(PROMPTS[:2], frames=9, long_frames=21)
    found = certify(load("self-forcing", "download"), tmp_path / "a", protocol=protocol, tell=str)
    rows = {row["part"]: row for row in found["rows"]}
    assert list(rows) == [part.name for part in parts_of(protocol)]
    assert found["settings"]["revisions"] == REVISIONS_OF_SELF_FORCING
    assert rows["1-dense-again-9"]["psnr_dense"] == 100.0
    assert rows["1-live-21"]["frames"] == 21
    page = (tmp_path / "a" / "certificate.html").read_text()
    assert f"gdhe17/Self-Forcing at {REVISIONS_OF_SELF_FORCING['gdhe17/Self-Forcing']}" in page
    # the same files in a folder, as `hf download --local-dir` leaves them, make the same videos
    for files in hub.files.values():
        for name, data in files.items():
            path = tmp_path / "local" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    local = load("self-forcing", tmp_path / "local" / PRESETS["self-forcing"].hub.file)
    again = certify(local, tmp_path / "b", protocol=protocol, tell=str)
    assert again["settings"]["revisions"] == {}
    assert again["fingerprints"] == found["fingerprints"]
    for name in rows:
        one, two = (read_frames(tmp_path / x / f"{name}.mp4") for x in "ab")
        # the same frames: a loaded machine's encoder threads may write another file of them
        assert len(one) == len(two) and min(psnr(one, two)) > 45


def test_a_prompt_is_embedded_once(folder):
    text = UMT5(folder, 24)
    first = text("a red room")
    assert text(" a  red room ")[0] is first[0]
    for number in range(wan_text.KEPT):
        text(f"a room & {number}")
    assert text("a red room")[0] is not first[0]
    assert torch.equal(text("a red room")[0], first[0])


def test_weights_that_are_not_given_are_named(monkeypatch):
    """Nothing is downloaded that was not asked for."""
    monkeypatch.setattr(HubFiles, "fetch", lambda *_: pytest.fail("downloaded"))
    refused(
        lambda: load("self-forcing"),
        "give its path as `weights`, or 'random' to time it; 'download' fetches it, as does: hf "
        "download gdhe17/Self-Forcing checkpoints/self_forcing_dmd.pt --revision "
        "2f8b779212da279d212c22a509b66ad6552f350e --local-dir self-forcing &&",
    )
    refused(lambda: load("wan_causal"), "model 'wan_causal' needs a checkpoint: give its path as")
    refused(
        lambda: load("infinite-forcing", "download"),
        "which published files are infinite-forcing's is not known here",
    )
    refused(lambda: load("wan_causal", "download"), "no model at download")


def test_downloading_without_huggingface_hub_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(lambda: load("krea", "download"), "pip install -e '.[hf]'")


def test_parts_are_found_above_a_checkpoint_that_lies_a_folder_deep(folder, tmp_path):
    """As `hf download --local-dir` leaves them."""
    shutil.copytree(folder / "google", tmp_path / "google")
    for name in (wan_text.PUBLISHED, wan_vae.PUBLISHED):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "checkpoints").mkdir()
    save_wan(random_wan(CONFIG), tmp_path / "checkpoints" / "x.pt")
    model = load_wan(tmp_path / "checkpoints" / "x.pt", config=CONFIG)
    assert isinstance(model.text, UMT5) and isinstance(model.decoder, WanVae)
