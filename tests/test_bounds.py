"""Every size that a user or a file can give is checked before memory is taken or a loop begins."""

import dataclasses
import json
import math
import time

import pytest
import torch
from faults import refused
from safetensors.torch import save_file

from tachyscope.core import limits as bounds
from tachyscope.core.limits import Bound, check, number, whole, within
from tachyscope.core.plan import Plan
from tachyscope.core.policy import QUESTIONS, policies, settings
from tachyscope.core.request import chunks_for
from tachyscope.core.session import Session
from tachyscope.core.types import Size
from tachyscope.measure.bench import bench_lengths
from tachyscope.memory.fit import fit
from tachyscope.memory.predict import sized
from tachyscope.models.checkpoint import read_json, read_tensors
from tachyscope.models.config_schema import entries, paths
from tachyscope.models.registry import MODELS, load
from tachyscope.models.toys import toy_chunks, toy_tokens
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.model import load_vila, save_vila
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.loading import load_wan, save_wan
from tachyscope.models.wan.text import PromptFile
from tachyscope_lab.evaluation.atrium import evaluate_atrium

HUGE = [10**9, 10**18, 10**30]


def test_a_number_is_within_its_bound_or_told():
    assert check("frames", 1) == 1 and check("frames", 10**6) == 10**6
    for value in (0, -1, 10**6 + 1, 10**30):
        refused(
            lambda value=value: check("frames", value), "`frames` must be from 1 to 1,000,000, got"
        )
    for value in (1.5, math.nan, "3", True, None):
        refused(lambda value=value: check("frames", value), "must be a whole number from 1 to")
    for value in (0, -1.0, math.nan, math.inf, 1e7):
        refused(
            lambda value=value: check("memory_gb", value), "`memory_gb` must be over 0 and at most"
        )
    assert check("memory_gb", 24) == 24
    refused(lambda: check("frames", 10**5000), "got a number of more than 30 digits")


def test_digits_alone_are_a_whole_number():
    assert (whole("12", "--n"), whole("-3", "--n")) == (12, -3)
    for text in ("", "1.5", "0x10", "1e3", "1_000", " 1", "²", "٣", "nan", "9" * 10**5):
        assert (
            len(refused(lambda text=text: whole(text, "--n"), "--n must be a whole number")) < 200
        )
    assert number("1e3", "--n") == 1000
    for text in ("nan", "inf", "-inf", "", "x"):
        refused(lambda text=text: number(text, "--n"), "--n must be a number, got")


def numbers():
    """Every number that a policy is set to: its question, name, key and setting."""
    for part in QUESTIONS:
        for name, policy in policies(part).items():
            for key, one in settings(policy).items():
                if one.kind in (int, float, Size):
                    yield part, name, key, one


def test_every_number_of_every_policy_has_a_bound():
    assert all(one.bound is not None for _, _, _, one in numbers())


@pytest.mark.parametrize("value", ["-1", "99999999999999999999", "nan", "inf", "1e30"])
def test_no_policy_takes_an_absurd_number(value):
    tried = 0
    for part, name, key, _ in numbers():
        if (name, key, value) in (("attentive", "threshold", "-1"), ("merge", "threshold", "-1")):
            continue
        tried += 1
        text = f"{part}={name}:{key}={value}"
        refused(lambda text=text: Plan.parse(text))
    assert tried > 20


def test_a_budget_beyond_all_is_one_line():
    refused(
        lambda: Plan.parse("cache=merge:budget=99999999999999999999f"),
        "cache policy 'merge': budget must be from 1 to 1,000,000, got 99999999999999999999f",
    )
    refused(lambda: Size.parse("9" * 5000), "a size is entries (1344) or latent frames (21f)")


class Showing:
    """A model of which only matters how many frames its latents show."""

    def __init__(self, stride):
        self.stride = stride

    def pixel_frames(self, latents):
        return max(0, 1 + self.stride * (latents - 1))


@pytest.mark.parametrize("stride", [1, 4])
def test_chunks_are_counted_without_counting(stride):
    model = Showing(stride)
    for chunk in (1, 3):
        for start in (0, 1, 5):
            for frames in range(1, 40):
                latents, wanted = start, model.pixel_frames(start) + frames
                while model.pixel_frames(latents) < wanted:
                    latents += chunk
                assert chunks_for(model, chunk, start, frames) == (latents - start) // chunk
    begun = time.perf_counter()
    assert chunks_for(model, 3, 0, 10**15) > 10**14 // stride // 3
    assert time.perf_counter() - begun < 1


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    save_wan(toy_chunks(), folder)
    return folder


@pytest.fixture(scope="module")
def vila(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vila")
    save_vila(toy_tokens(), folder)
    return folder


def changed(path, keys, value):
    """The text of a config file with one value changed."""
    whole = json.loads(path.read_text())
    inner = whole
    for key in keys[:-1]:
        inner = inner[key]
    assert keys[-1] in inner, keys
    old = inner[keys[-1]]
    inner[keys[-1]] = [value] * max(1, len(old)) if isinstance(old, list) else value
    return json.dumps(whole)


@pytest.mark.parametrize(
    "keys", [one.path for one in entries(WanConfig) if one.kind in (int, float)], ids=".".join
)
def test_a_wan_configs_sizes_are_bounded(keys, wan, monkeypatch):
    monkeypatch.setattr(torch.nn, "Linear", lambda *a, **k: pytest.fail("a layer was made"))
    file = wan / "config.json"
    good = file.read_text()
    begun = time.perf_counter()
    try:
        for value in [*HUGE, -1, math.inf, math.nan]:
            file.write_text(changed(file, keys, value))
            refused(lambda: load_wan(wan), f"config.json: {'.'.join(keys)} must be")
            file.write_text(good)
    finally:
        file.write_text(good)
    assert time.perf_counter() - begun < 20


def test_a_wan_configs_texts_are_bounded():
    refused(lambda: WanConfig(stock="x" * 10**5), "stock must be text of at most 1,000 letters")
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    refused(lambda: WanConfig(actions=letters), "actions must be text of at most 256 letters")


def test_a_stock_plan_that_cannot_be_read_is_told_at_loading(wan):
    file = wan / "config.json"
    good = file.read_text()
    try:
        file.write_text(changed(file, ["tachyscope", "stock"], "nope"))
        refused(
            lambda: load("wan_causal", wan),
            "names a stock plan that cannot be read: ",
            "config.json",
        )
    finally:
        file.write_text(good)


VILA_KEYS = [
    *[("llm", (key,)) for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
      "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta")],
    *[("vision_tower", ("rqvaesiglip", key)) for key in ("embed_dim", "n_embed", "code_shape")],
    *[("vision_tower", ("rqvaesiglip", "ddconfig", key)) for key in ("ch", "ch_mult", "num_res_blocks",
      "attn_resolutions", "z_channels", "resolution")],
    ("vision_tower", ("tachyscope", "groups")),
    ("vision_tower", ("rqtransformer", "embed_dim")),
    ("vision_tower", ("rqtransformer", "head", "n_layer")),
    ("vision_tower", ("rqtransformer", "head", "block", "n_head")),
    *[("", ("tachyscope", key)) for key in ("fps", "clip")],
    *[("", ("tachyscope", "sampler", key)) for key in ("cfg", "temperature", "top_k", "top_p")],
]  # fmt: skip


@pytest.mark.parametrize("part, keys", VILA_KEYS, ids=lambda value: ".".join(value))
def test_a_vila_configs_sizes_are_bounded(part, keys, vila, monkeypatch):
    monkeypatch.setattr(torch.nn, "Linear", lambda *a, **k: pytest.fail("a layer was made"))
    assert (part, *keys) in paths(VilaConfig) or keys[-1] == "code_shape"
    file = vila / part / "config.json"
    good = file.read_text()
    try:
        # trained models have bases of 4e9 and more
        huge = [value for value in HUGE if keys[-1] != "rope_theta" or value > 1e12]
        for value in [*huge, 0 if keys[-1] != "cfg" else -1]:
            file.write_text(changed(file, keys, value))
            refused(lambda: load_vila(vila), "config.json: ", keys[-1], "must be")
            file.write_text(good)
    finally:
        file.write_text(good)


@pytest.mark.parametrize("name", [n for n, entry in MODELS.items() if not entry.weights])
def test_every_model_that_is_shipped_is_within_the_bounds(name):
    assert load(name).name


@pytest.mark.slow
def test_no_memory_is_taken_for_a_configuration_that_its_file_does_not_bear_out(wan, monkeypatch):
    """Within its bounds a configuration may still ask for terabytes."""
    monkeypatch.setattr(
        "tachyscope.models.wan.loading.allocate", lambda *a: pytest.fail("memory was taken")
    )
    file = wan / "config.json"
    good = file.read_text()
    try:
        file.write_text(changed(file, ["ffn_dim"], 1_000_000))
        refused(lambda: load_wan(wan), "does not fit the model")
        file.write_text(changed(file, ["num_layers"], 256))
        refused(lambda: load_wan(wan), "must hold the model's")
    finally:
        file.write_text(good)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 50_000, "1" * 5000, '{"a": 1' + "0" * 5000]
)
def test_json_that_is_nested_or_long_beyond_reading_is_one_line(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert len(refused(lambda: read_json(tmp_path / "config.json"), "must ")) < 500


def test_json_beyond_its_bound_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tachyscope.models.checkpoint.JSON_BYTES", 2**20)
    (tmp_path / "config.json").write_text("{" + " " * 2**20 + "}")
    refused(lambda: read_json(tmp_path / "config.json"), "at most 1 MiB, got 1 MiB")


@pytest.mark.parametrize(
    "name", ["a.safetensors.index.json", "", ".", "..", "/etc/passwd", "x/y.pt", 3, None]
)
def test_an_index_names_checkpoint_files_beside_it(name, tmp_path):
    index = tmp_path / "a.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    refused(
        lambda: read_tensors(index), "must list .safetensors, .sft, .pt, .pth, .bin files beside"
    )


def test_only_plain_tensors_are_read(tmp_path):
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
    }
    for name, tensor in odd.items():
        torch.save({"context": tensor}, tmp_path / f"{name}.pt")
        refused(
            lambda name=name: read_tensors(tmp_path / f"{name}.pt"), "must hold a dict of tensors"
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.uint8])
def test_a_prompt_file_holds_floats(dtype, tmp_path):
    config = toy_chunks().config
    file = tmp_path / "p.safetensors"
    save_file({"context": torch.ones(4, config.text_dim).to(dtype)}, file)
    refused(lambda: PromptFile.read(file, config), "'context' [L, 24]", "as plain floats")
    save_file({"context": torch.ones(4, config.text_dim)}, file)
    assert PromptFile.read(file, config).length == 4


def test_a_prompt_is_bounded_in_every_model():
    refused(
        lambda: toy_tokens().encode_prompt("x " * 2_000),
        "tokens of a prompt must be from 0 to 2,048",
    )
    for model in (toy_tokens(), toy_chunks()):
        refused(
            lambda model=model: model.encode_prompt("x" * 200_000),
            "a prompt's length must be from 0",
        )
        refused(
            lambda model=model: model.encode_prompt("caf\udce9"),
            "a prompt must be valid UTF-8, got",
        )


def test_a_pass_and_a_side_are_bounded():
    model = toy_chunks()
    refused(
        lambda: model.shape((16_384, 16_384)), "tokens of a pass at 16384x16384 must be from 1 to"
    )
    refused(lambda: model.shape((16, 99_984)), "the width of a video must be from 1 to 16,384")


def test_a_cache_beyond_the_machines_memory_is_not_begun(monkeypatch):
    zeros = torch.zeros

    def taken(*size, **kind):
        return zeros(*size, **kind) if size == ((),) else pytest.fail("memory was taken")

    monkeypatch.setattr(torch, "zeros", taken)
    model = toy_chunks()
    shape = model.shape()
    make = dict(device="cpu", dtype=torch.float32, seed=0)
    words = "the memory of cpu does not hold the cache of cache=keep_all"
    refused(
        lambda: Session(shape, Plan.parse("dense"), model.rope(shape), latent_frames=10**9, **make),
        words,
    )


@pytest.mark.slow
def test_lengths_and_worlds_are_bounded():
    model = toy_chunks()
    for lengths in ([0], [10**9], [10] * 1000, []):
        refused(
            lambda lengths=lengths: bench_lengths(model, ["fast"], lengths=lengths), "must be from"
        )
    for only in ("views", "world", "tokens"):
        for worlds in (0, -1, 10**9):
            refused(
                lambda only=only, worlds=worlds: evaluate_atrium(only=only, worlds=worlds),
                "`worlds` must be from 1 to 10,000",
            )


@pytest.mark.slow
def test_fit_is_as_quick_for_a_million_frames():
    model = sized("wan_1.3b")
    begun = time.process_time()
    (row,) = fit(model, "fast", frames=10**6)["rows"]
    assert row["frames"] == 10**6 and time.process_time() - begun < 20
    refused(lambda: fit(model, "fast", frames=10**9), "`frames` must be from 1 to 1,000,000")
    for gb in (math.nan, math.inf, 0.0, -1.0):
        refused(lambda gb=gb: fit(model, "fast", frames=9, vram_gb=gb), "`vram` must be")


def test_a_bound_holds_both_edges():
    assert within(Bound(1, 3), 1) and within(Bound(1, 3), 3) and not within(Bound(1, 3), 4)
    assert within(Bound(0.0, 1.0), 1) and not within(Bound(0.0, 1.0), math.nan)
    assert dataclasses.is_dataclass(WanConfig) and bounds.JSON_BYTES > 2**20
