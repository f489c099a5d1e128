"""Checkpoint files are read whole, checked whole, and written whole or not at all."""

import errno
import json
import os
import pathlib
import pickle
import re

import pytest
import torch
from faults import refused
from safetensors.torch import save_file
from torch import nn

from tachyscope.models import checkpoint
from tachyscope.models.checkpoint import (
    check_finite,
    fit,
    read_json,
    read_tensors,
    strip_prefixes,
    write_json,
    write_tensors,
)
from tachyscope.models.wan.names import wan_names


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(64, 48, generator=generator),
        "bias": torch.randn(64, generator=generator).bfloat16(),
    }


def same(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


@pytest.mark.parametrize("name", ["a.safetensors", "a.sft", "a.pt", "a.pth", "a.bin"])
def test_what_is_written_is_read_back(tmp_path, tensors, name):
    write_tensors(tmp_path / name, tensors)
    assert same(read_tensors(tmp_path / name), tensors)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("entry", ["generator_ema", "generator", "model", "state_dict"])
def test_a_trainers_entry_is_unwrapped(tmp_path, tensors, entry):
    write_tensors(tmp_path / "a.pt", tensors, under=entry)
    assert list(torch.load(tmp_path / "a.pt", weights_only=True)) == [entry]
    assert same(read_tensors(tmp_path / "a.pt"), tensors)


def test_the_averaged_weights_come_first(tmp_path, tensors):
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    torch.save({"step": 7, "generator": other, "generator_ema": tensors}, tmp_path / "a.pt")
    assert same(read_tensors(tmp_path / "a.pt"), tensors)


def test_a_file_of_before_the_zip_container_is_read(tmp_path, tensors):
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert same(read_tensors(tmp_path / "a.pt"), tensors)


def test_an_index_brings_its_shards_together(tmp_path, tensors):
    places = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / f"part-{i}.safetensors")
        places[name] = f"part-{i}.safetensors"
    path = tmp_path / "a.safetensors.index.json"
    write_json(path, {"metadata": {}, "weight_map": places})
    assert same(read_tensors(path), tensors)
    save_file({"weight": tensors["weight"] + 1, "bias": tensors["bias"]}, tmp_path / places["bias"])
    words = "weight is in part-0.safetensors and part-1.safetensors"
    refused(lambda: read_tensors(path), str(path), "hold each tensor once", words)
    write_json(path, {"weight_map": {"weight": "../a.safetensors"}})
    refused(lambda: read_tensors(path), "files beside it, got '../a.safetensors'")
    write_json(path, {"weight_map": {"weight": "a\nb.safetensors"}})
    refused(lambda: read_tensors(path), "files beside it, got 'a\\nb.safetensors'")
    write_json(path, {"weights": {}})
    refused(lambda: read_tensors(path), "must have a 'weight_map'")


def test_a_missing_file_is_named(tmp_path):
    refused(lambda: read_tensors(tmp_path / "a.pt"), f"no checkpoint file {tmp_path / 'a.pt'}")


def test_other_kinds_of_file_are_refused(tmp_path):
    refused(lambda: read_tensors(tmp_path / "a.onnx"), ".safetensors, .sft, .pt, .pth", "a.onnx")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.6, 0.98])
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "old.pt"])
def test_a_file_cut_short_is_refused(tmp_path, tensors, name, share):
    path = tmp_path / name
    if name == "old.pt":
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    else:
        write_tensors(path, tensors)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    refused(lambda: read_tensors(path), str(path), "damaged or cut short", "get it again")


class Code:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_not_run(tmp_path, tensors, zipped):
    path, ran = tmp_path / "a.pt", tmp_path / "ran"
    torch.save({**tensors, "x": Code(ran)}, path, _use_new_zipfile_serialization=zipped)
    refused(lambda: read_tensors(path), "may hold only tensors", "not run", "as .safetensors")
    assert not ran.exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_that_torch_did_not_write_is_not_run(tmp_path, protocol, recwarn):
    path, ran = tmp_path / "a.pt", tmp_path / "ran"
    path.write_bytes(pickle.dumps({"generator": Code(ran)}, protocol))
    refused(lambda: read_tensors(path), "may hold only tensors", "not run", "as .safetensors")
    assert not ran.exists() and not recwarn.list  # a warning would be a second line


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("text", ["hello", "<!doctype html><title>404</title>"])
def test_a_page_in_a_checkpoints_place_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    words = refused(lambda: read_tensors(tmp_path / name), "damaged or cut short (", "): get it")
    assert any(letter.isalpha() for letter in words.split("(")[1].split(")")[0])


def test_a_fault_of_torch_is_told_in_a_sentence(tmp_path, tensors):
    path = tmp_path / "a.pt"
    write_tensors(path, tensors)
    path.write_bytes(path.read_bytes()[:600])
    assert len(refused(lambda: read_tensors(path), "damaged")) < 250 + len(str(path))


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_file_beyond_the_memory_is_not_called_damaged(tmp_path, tensors, name, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    write_tensors(tmp_path / name, tensors)
    monkeypatch.setattr(torch, "load", full)
    monkeypatch.setattr(checkpoint, "load_file", full)
    refused(lambda: read_tensors(tmp_path / name), f"{name} is more than the memory that is left")


@pytest.mark.parametrize("value", [[1, 2], 3, {"model": 3}, {"weight": 3}])
def test_a_pickle_without_tensors_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "a.pt")
    refused(lambda: read_tensors(tmp_path / "a.pt"), "must hold a dict of tensors", "got")


def test_prefixes_of_trainers_and_wrappers_are_stripped(tensors):
    t = tensors["weight"]
    names = {
        "model._fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.q.weight": "blocks.0.q.weight",
        "_fsdp_wrapped_module.model.head.bias": "head.bias",
        "model.diffusion_model.a": "a",
        "net.b": "b",
        "model.c": "c",
        "d.model.e": "d.model.e",
        "model.net.f": "net.f",
        "_orig_mod.model.g": "g",
        "model._orig_mod.blocks.0._checkpoint_wrapped_module.h": "blocks.0.h",
        "_checkpoint_wrapped_module._orig_mod._fsdp_wrapped_module.model.i": "i",
        "_fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod.j": "j",
        "my_orig_mod.k": "my_orig_mod.k",
    }
    assert list(strip_prefixes(dict.fromkeys(names, t))) == list(names.values())


def test_a_name_given_twice_is_refused(tensors):
    t = tensors["weight"]
    refused(lambda: strip_prefixes({"model.a": t, "a": t}), "'a' twice")
    refused(lambda: strip_prefixes({"_orig_mod.a": t, "a": t}), "'a' twice")
    both = {"blocks.0.attn1.to_q.weight": t, "blocks.0.self_attn.q.weight": t}
    refused(
        lambda: wan_names(both, "x.pt"),
        "x.pt must name each tensor once, got 'blocks.0.attn1.to_q.weight' and "
        "'blocks.0.self_attn.q.weight', which are Wan's and diffusers' names of one: remove one",
    )


def linear():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def test_fitting_tensors_are_copied_and_cast():
    given, module = linear().double().state_dict(), linear()
    fit(module, given, "x.pt")
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, given[name].float(), rtol=0, atol=0)
        assert tensor.data_ptr() != given[name].data_ptr()


def test_missing_and_unexpected_tensors_are_named_and_counted():
    whole = linear().state_dict()
    refused(
        lambda: fit(linear(), {}, "x.pt"),
        "x.pt must hold the model's 4 tensors, it lacks 0.weight, 0.bias, 1.weight and 1 more:",
    )
    refused(
        lambda: fit(linear(), whole | {"2.weight": torch.ones(1)}, "x.pt"),
        "x.pt may hold only the model's 4 tensors, it also has 2.weight:",
    )


def test_only_ignored_names_may_be_too_many():
    whole = linear().state_dict() | {"ema.a": torch.ones(1), "ema.b": torch.ones(1)}
    fit(linear(), whole, "x.pt", ignore=("ema.",))
    refused(lambda: fit(linear(), whole, "x.pt", ignore=("em.",)), "ema.a, ema.b")


def test_a_name_of_several_lines_is_told_in_one():
    whole = linear().state_dict() | {"a\nb": torch.ones(1)}
    refused(lambda: fit(linear(), whole, "x.pt"), "it also has 'a\\nb': give")


def test_weights_of_one_byte_are_looked_at_too():
    codes = nn.Module()
    codes.weight = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    check_finite(codes, "x.pt")
    codes.weight.data[1] = torch.nan
    refused(lambda: check_finite(codes, "x.pt"), "NaN or infinity in weight")


def test_a_wrong_shape_or_kind_is_named_and_nothing_is_copied():
    module = linear()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    given = linear().state_dict()
    refused(
        lambda: fit(module, given | {"1.weight": torch.ones(3, 2)}, "x.pt"),
        "x.pt does not fit the model: 1.weight is float32 [3, 2] and must be float32 [2, 3]:",
    )
    refused(
        lambda: fit(module, given | {"0.bias": torch.ones(3, dtype=torch.int8)}, "x.pt"),
        "0.bias is int8 [3] and must be float32 [3]",
    )
    assert same(module.state_dict(), before)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, tensors, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_tensors(path, tensors)
    old = path.read_bytes()

    def half(plain, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", half)
    refused(lambda: write_tensors(path, {}), f"{path} cannot be written (no space left")
    assert os.listdir(tmp_path) == [path.name] and path.read_bytes() == old


def test_a_write_that_is_stopped_leaves_nothing(tmp_path, tensors, monkeypatch):
    def stop(value, target):
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.torch, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "a.pt", tensors)
    assert os.listdir(tmp_path) == []


def test_a_write_where_no_folder_can_be_is_refused(tmp_path, tensors):
    (tmp_path / "file").write_bytes(b"")
    for name in ("a.safetensors", "a.pt"):
        refused(lambda name=name: write_tensors(tmp_path / "file" / name, tensors), "not a folder")
    refused(lambda: write_json(tmp_path / "file" / "a.json", {}), "file is a file, not a folder")


def test_tensors_that_share_memory_are_refused(tmp_path, tensors):
    shared = tensors | {"again": tensors["weight"]}
    refused(lambda: write_tensors(tmp_path / "a.safetensors", shared), "share no memory")
    assert os.listdir(tmp_path) == []


def test_tensors_go_only_into_known_files(tmp_path, tensors):
    refused(lambda: write_tensors(tmp_path / "a.txt", tensors), ".safetensors", "a.txt")
    refused(lambda: write_tensors(tmp_path / "a.sft", tensors, under="model"), "in an entry", ".pt")
    assert os.listdir(tmp_path) == []


def test_json_comes_back_as_it_was(tmp_path):
    value = {"a": [1, 2.5, None], "b": {"c": "ä"}}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert json.loads((tmp_path / "a.json").read_text()) == value


@pytest.mark.parametrize(
    "text, words",
    [("{", "must be JSON, got"), ("[1]", "must hold a JSON object, got list"), ("\x80", "JSON")],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    refused(lambda: read_json(path), str(path), words, "mend it or get it again")


@pytest.mark.parametrize("read, name", [(read_json, "a.json"), (read_tensors, "a.pt")])
def test_a_file_that_may_not_be_read_is_not_called_damaged(read, name, tmp_path, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / name).write_text("{}")
    monkeypatch.setattr(pathlib.Path, "open", denied)
    monkeypatch.setattr(pathlib.Path, "read_text", denied)
    refused(lambda: read(tmp_path / name), f"{name} cannot be read (permission denied): make")


def test_a_missing_json_file_is_named(tmp_path):
    message = refused(lambda: read_json(tmp_path / "config.json"))
    assert re.fullmatch(r"no file .*/config\.json: give a folder that has config\.json", message)
