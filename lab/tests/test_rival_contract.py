"""Rivals are held to the contract of every policy: tests/test_contract.py."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import test_contract as contract

from tachyscope.core.policy import LAB, find_policy

# policy: (wide open, acting), and the families of models that it serves
EVERY = ("chunks", "rolling", "tokens", "cosmos")
RIVALS = {
    ("cache", "frames"): (("frames:budget=99f", "frames:budget=9f"), EVERY),
    ("cache", "memrope"): (("memrope:budget=99f", "memrope:budget=9f,sink=1"), EVERY),
    ("cache", "worldkv"): (
        ("worldkv:retrieve=99,keep=1", "worldkv:retrieve=6,sink=3,budget=15f"),
        ("poses",),
    ),
    # compressed at every chunk
    ("cache", "deep_forcing"): (
        ("deep_forcing:budget=99f", "deep_forcing:budget=9f,keep=7,sink=2,newest=4"),
        ("chunks",),
    ),
    ("attention", "radial"): (
        ("radial:block=1,decay=99", "radial:block=2"),
        ("chunks", "rolling"),
    ),
    ("attention", "svg"): (("svg:read=1", "svg:read=0.5,block=2"), ("chunks", "rolling")),
    ("attention", "svg2"): (("svg2:min_ratio=1", "svg2:top_p=0.5"), ("chunks", "rolling")),
}
CASES = [
    pytest.param(*key, family, marks=() if family in contract.QUICK else pytest.mark.slow)
    for key, (_, families) in RIVALS.items()
    for family in families
]
every = pytest.mark.parametrize("kind, name, family", CASES, ids=str)
on_every_device = pytest.mark.parametrize("device", contract.DEVICES)
SETTINGS = {key: plans for key, (plans, _) in RIVALS.items()}


@pytest.fixture(autouse=True)
def _listed(monkeypatch):
    monkeypatch.setattr(contract, "LISTED", contract.LISTED | SETTINGS)


@on_every_device
@every
def test_off_equals_dense(kind, name, family, device):
    contract.test_off_equals_dense(kind, name, family, device)


@on_every_device
@every
def test_a_bound_is_kept_and_its_state_is_whole(kind, name, family, device):
    contract.test_a_bound_is_kept_and_its_state_is_whole(kind, name, family, device)


@pytest.mark.parametrize(
    "kind, name, family", [x.values for x in CASES if x.values[2] in ("chunks", "poses")]
)
def test_a_replayed_chunk_equals_one_made_anew(kind, name, family):
    contract.test_a_replayed_chunk_equals_one_made_anew(kind, name, family)


def test_every_rival_is_an_entry_point_and_listed_here():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["tachyscope.policies"]
    assert {f"{kind}.{name}" for kind, name in RIVALS} == entries.keys()
    assert entries.keys() == {f"{kind}.{name}" for kind, names in LAB.items() for name in names}
    for entry, module in entries.items():
        assert find_policy(*entry.split(".")).__module__ == import_module(module).__name__
