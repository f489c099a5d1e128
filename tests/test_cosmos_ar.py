"""Cosmos against transformers' Qwen3 with the published rotary table, and its container."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest
import torch
from faults import refused
from torch import nn
from toys import toy_cosmos

import tachyscope as ts
from tachyscope.io.torch_defaults import own_numerics
from tachyscope.measure.calibrate import calibrate
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.cosmos_ar.config import PUBLISHED, CosmosConfig, published
from tachyscope.models.cosmos_ar.model import (
    Cosmos,
    CosmosModel,
    load_cosmos,
    nvidia_name,
    qwen_names,
    save_cosmos,
)
from tachyscope.models.cosmos_ar.tokenizer import Preview

FIRST = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def toy():
    return toy_cosmos()


def table(config, frames):
    """Angles [tokens, head_dim], as the authors' code makes them: time, rows, columns, twice."""
    rows, columns = config.grid
    space = config.head_dim // 6 * 2
    time = config.head_dim - 2 * space

    def speeds(channels, length):
        found = []
        for i in range(channels // 2):
            speed = config.theta ** (-2 * i / channels)
            high, low = 2 * math.pi * 4 / length, 2 * math.pi * 1 / length
            smooth = min(1.0, max(0.0, (speed - low) / (high - low)))
            found.append(speed * ((1 - smooth) / config.yarn + smooth))
        return found

    places = []
    for t in range(frames):
        for y in range(rows):
            for x in range(columns):
                half = [t * s for s in speeds(time, config.trained[0])]
                half += [y * s for s in speeds(space, config.trained[1])]
                half += [x * s for s in speeds(space, config.trained[1])]
                places.append(half + half)
    return torch.tensor(places, dtype=torch.float64)


class Table(nn.Module):
    """In the place of Qwen3's rotary embedding."""

    def __init__(self, angles):
        super().__init__()
        self.angles = angles

    def forward(self, x, position_ids):
        angles = self.angles[position_ids]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@pytest.mark.parametrize("yarn", [1.0, 2.0])
def test_the_trunk_equals_transformers_qwen3_with_the_published_table(toy, yarn):
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(toy.config, yarn=yarn, theta=500.0)
    with own_numerics(1):
        model = CosmosModel(Cosmos(config).double().eval(), config)
    for name, x in model.transformer.named_parameters():
        if "norm" in name:  # ones would hide a norm in the wrong place
            x.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab, hidden_size=config.hidden, num_hidden_layers=config.layers,
            intermediate_size=config.intermediate, num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
            rms_norm_eps=config.eps, attention_bias=False, tie_word_embeddings=False,
        )
    ).double()  # fmt: skip
    theirs.load_state_dict(model.transformer.state_dict())
    theirs.model.rotary_emb = Table(table(config, 3))
    first = model.encode_frames(FIRST)
    with ts.open(model, "dense", first=FIRST) as stream, torch.inference_mode():
        codes = torch.randint(config.vocab, (1, 1, 4, 4, 1), generator=torch.manual_seed(0))
        got = model.score(stream.session, codes, [])[0, :, 0]
        ids = torch.cat([first, codes], 1).flatten()[None]
        want = theirs(input_ids=ids, use_cache=False).logits[0, 31:-1]
        theirs.model.rotary_emb = Table(
            table(config, 3).unflatten(0, (3, 4, 4)).transpose(1, 2).flatten(0, 2)
        )
        other = theirs(input_ids=ids, use_cache=False).logits[0, 31:-1]
    assert first.shape == (1, 2, 4, 4, 1)
    # their norms are in float32
    torch.testing.assert_close(got, want.to(got.dtype), rtol=0, atol=1e-6)
    assert (other - want).abs().max() > 1e-3  # places in another order are seen


def test_the_published_rotation_has_44_channels_of_time_and_42_of_each_side():
    small, large = PUBLISHED.values()
    assert [n for n, _ in small.axes] == [44, 42, 42]
    plain = [500000.0 ** (-i / 44) for i in range(0, 44, 2)]
    assert small.speeds[:22] == pytest.approx(plain)
    # the slowest turn at half their speed, the fastest as before
    assert large.speeds[21] == pytest.approx(plain[21] / 2)
    assert large.speeds[22] == 1.0


@pytest.mark.parametrize(
    "name, count",
    [
        ("Cosmos-Predict1-4B", 4.01e9),
        pytest.param("Cosmos-Predict1-12B", 11.57e9, marks=pytest.mark.slow),
    ],
)
def test_a_published_model_is_known_by_its_tensors(name, count):
    with torch.device("meta"):
        whole = Cosmos(PUBLISHED[name])
    tensors = {f"model.{nvidia_name(k)}": x for k, x in whole.state_dict().items()}
    assert "model.layers.3.feed_forward.w2.weight" in tensors
    assert "model.tok_embeddings.weight" in tensors
    named = qwen_names(tensors, "model.pt")
    assert named.keys() == whole.state_dict().keys()
    assert published(named, "model.pt") == PUBLISHED[name]
    assert sum(x.numel() for x in named.values()) == pytest.approx(count, rel=2e-3)


def original(model):
    """Tensors as the published container names them."""
    return {f"model.{nvidia_name(k)}": x for k, x in model.transformer.state_dict().items()}


@pytest.mark.parametrize("under", ["model", None])
def test_the_original_container_is_read_as_it_stands(toy, tmp_path, under):
    tensors = original(toy) | {"model.layers.0.attention._extra_state": torch.zeros(0)}
    write_tensors(tmp_path / "model.pt", tensors, under)
    (tmp_path / "config.json").write_text(json.dumps(toy.config.to_json()))
    found = load_cosmos(tmp_path, dtype=torch.float32)
    assert found.config == toy.config
    for name, x in toy.transformer.state_dict().items():
        assert torch.equal(found.transformer.state_dict()[name], x), name


def test_a_model_saved_and_loaded_is_the_same_to_the_bit(toy, tmp_path):
    save_cosmos(toy, tmp_path)
    found = ts.load("cosmos_ar", tmp_path)
    assert found.fingerprint == toy.fingerprint


class Code:
    def __reduce__(self):
        return print, ("code that a file brought was run",)


def _pickled(folder, toy):
    torch.save({"model": original(toy) | {"x": Code()}}, folder / "model.pt")
    (folder / "model.safetensors").unlink()


def _bytes(folder, toy):
    torch.save(original(toy) | {"model.layers.0._extra_state": io.BytesIO()}, folder / "model.pt")
    (folder / "model.safetensors").unlink()


def _config(**change):
    def write(folder, toy):
        (folder / "config.json").write_text(json.dumps(toy.config.to_json() | change))

    return write


def _tensors(change):
    def write(folder, toy):
        tensors = original(toy)
        change(tensors)
        write_tensors(folder / "model.safetensors", tensors)

    return write


@pytest.mark.parametrize(
    "change, words",
    [
        (_pickled, "code was not run"),
        (_bytes, "code was not run"),
        (_config(hidden=32), "does not fit the model"),
        (_config(layers=3), "it lacks model.layers.2"),
        (_config(layers=0), "layers must be"),
        (_config(heads="four"), "heads must be a whole number from 1 to 1,024, got 'four'"),
        (_config(grid=[4]), "grid must be 2 whole numbers, each from 1 to 1,024, got [4]"),
        (_config(kv_heads=3), "multiple of kv_heads"),
        (_config(surprise=1), "has an unknown 'surprise'; it takes hidden"),
        (_config(sampler={"cfg": 3.0}), "sampler must have a cfg of 1, got 3.0"),
        (_config(model_type="other"), "must hold a published model"),
        (_tensors(lambda x: x.pop("model.norm.weight")), "lacks model.norm.weight"),
        (_tensors(lambda x: x.update({"model.odd": torch.zeros(1)})), "it also has"),
        (
            _tensors(lambda x: x.update({"layers.0.cross_attention.wq.weight": torch.zeros(1)})),
            "is a Video2World model",
        ),
        (_tensors(lambda x: x["model.norm.weight"].fill_(math.nan)), "NaN or infinity"),
        (lambda folder, toy: (folder / "model.safetensors").unlink(), "must hold one of"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(tmp_path, change, words):
    toy = toy_cosmos()
    save_cosmos(toy, tmp_path)
    change(tmp_path, toy)
    refused(lambda: load_cosmos(tmp_path, dtype=torch.float32), words)


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"prompt": "a room", "first": FIRST}, "takes no prompt"),
        ({"first": FIRST[:2]}, "takes 1, 3, 5, … first frames, got 2"),
        ({"first": np.zeros((1, 8, 16, 3), np.uint8)}, "8x16"),
        ({"first": FIRST, "size": (32, 32)}, "16x16 pixels only"),
        ({"first": FIRST, "frames": 0}, "frames"),
        ({}, "goes on from given frames, got none"),
    ],
)
def test_what_the_model_cannot_make_is_one_line(toy, asked, words):
    refused(lambda: ts.open(toy, "dense", **asked).step(), words)


def test_pictures_and_codes_of_a_preview_agree(toy):
    codes = torch.arange(64).reshape(4, 4, 4)
    frames = toy.tokenizer.decode(codes)
    assert frames.shape == (7, 16, 16, 3)
    assert torch.equal(toy.tokenizer.encode(frames), codes)


def test_a_tokenizer_of_the_callers_sees_all_codes_of_the_video(toy):
    class Brought:
        name, seen = "brought", []

        def encode(self, frames):
            return torch.full((1 + len(frames) // 2, 4, 4), 5)

        def decode(self, codes):
            self.seen.append(len(codes))
            shade = codes.reshape(len(codes), -1)[:, 0].to(torch.uint8)
            frames = torch.cat([shade[:1], shade[1:].repeat_interleave(2)])
            return frames[:, None, None, None].expand(-1, 16, 16, 3).numpy()

    model = CosmosModel(toy.transformer, toy.config, Brought())
    with ts.open(model, "dense", first=FIRST) as stream:
        chunks = [stream.step() for _ in range(2)]
    assert Brought.seen == [3, 4]
    assert [c.frames.shape for c in chunks] == [(2, 16, 16, 3)] * 2
    assert all((c.frames == c.frames[0, 0, 0, 0]).all() for c in chunks)


def test_a_config_says_what_it_read(toy):
    again = CosmosConfig.parse(json.loads(json.dumps(toy.config.to_json())), "config.json")
    assert again == toy.config


@pytest.mark.slow
def test_neurons_are_calibrated_on_videos_that_go_on_from_given_frames(toy, tmp_path):
    file = tmp_path / "calibration.safetensors"
    refused(lambda: calibrate(toy, clips=1, shares=[0.5]), "goes on from given frames")
    write_tensors(file, calibrate(toy, clips=1, shares=[0.5], first=[FIRST]).tensors())
    runs = []
    for plan in ("dense", f"dense replay=neurons:share=0.5,file={file}"):
        with ts.open(toy, plan, first=FIRST, seed=0) as stream:
            runs.append([stream.step().stats for _ in range(2)])
    rows = toy.config.layers * toy.shape().tokens_per_frame * toy.shape().batch
    for dense, less in zip(*runs, strict=True):
        assert dense["rows_computed"] == rows
        # given frames were computed whole: all that is made is a slice, and a map beside it
        assert less["rows_computed"] == rows / 2
        assert less["mlp_macs"] < dense["mlp_macs"]


def test_a_tokenizer_of_single_frames_takes_any_number_of_them(toy):
    model = toy_cosmos()
    model.config = dataclasses.replace(toy.config, stride=(1, 4, 4))
    model.tokenizer = Preview(model.config)
    assert model.encode_frames(FIRST).shape == (1, 3, 4, 4, 1)
