"""A policy is one file: name, settings, bounds and help, registered by being imported."""

import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import test_contract

from tachyscope.cache import CachePolicy
from tachyscope.cache.window import Window
from tachyscope.cli.list import list_policies
from tachyscope.core import policy as registry
from tachyscope.core.errors import TachyscopeError, TachyscopeWarning
from tachyscope.core.plan import Plan
from tachyscope.core.policy import QUESTIONS, find_policy, policies, settings
from tachyscope.core.types import Size

PAGE = Path(__file__).parent.parent / "docs" / "contributing.md"


@pytest.fixture
def clean(own_policies):
    """Modules of policies that a test imported are gone after it, as the policies are."""
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.fixture
def stride(tmp_path, monkeypatch, clean):
    """The policy of docs/contributing.md, as a file of somebody else's."""
    (code,) = re.findall(r'```python\n("""Keep every k-th chunk.*?)```', PAGE.read_text(), re.S)
    (tmp_path / "my_stride.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_file_with_a_policy_makes_it_a_word_of_plans(stride):
    module = importlib.import_module("my_stride")
    plan = Plan.parse("cache=stride:every=3")
    assert plan.cache == module.Stride(3) and plan.cache is not module.Stride(3)
    assert str(plan.cache) == "stride:every=3" and Plan.parse(str(plan)) == plan
    with pytest.raises(TachyscopeError, match="'stride': every must be from 1 to 1,000, got 0$"):
        Plan.parse("cache=stride:every=0")
    with pytest.raises(TachyscopeError, match="'stride': every must be a whole number from 1"):
        module.Stride("three")
    (listed,) = (p for p in list_policies() if p["name"] == "stride")
    assert listed["about"].startswith("Keep the chunks") and listed["paper"] == "control"
    assert listed["parameters"] == [
        {
            "name": "every",
            "type": "int",
            "default": 2,
            "about": "Keep every k-th chunk; 1 keeps all.",
        }
    ]


@pytest.mark.parametrize("family", ["chunks", "tokens"])
def test_it_is_held_to_the_contract(stride, monkeypatch, family):
    importlib.import_module("my_stride")
    monkeypatch.setitem(
        test_contract.LISTED, ("cache", "stride"), ("stride:every=1", "stride:every=2")
    )
    test_contract.test_off_equals_dense("cache", "stride", family, "cpu")
    test_contract.test_a_bound_is_kept_and_its_state_is_whole("cache", "stride", family, "cpu")


class Distribution:
    """One that is installed and names policies by entry points."""

    def __init__(self, *entries):
        self.entries = [
            importlib.metadata.EntryPoint(name, value, registry.GROUP) for name, value in entries
        ]

    def __call__(self, group):
        return [entry for entry in self.entries if entry.group == group]


def test_another_distribution_s_policy_is_loaded_when_it_is_named(stride, monkeypatch):
    entries = Distribution(("cache.stride", "my_stride"), ("cache.gone", "my_gone:Gone"))
    monkeypatch.setattr(registry, "entry_points", entries)
    assert "my_stride" not in sys.modules
    assert find_policy("cache", "window") is Window and "my_stride" not in sys.modules
    assert Plan.parse("cache=stride").cache.every == 2
    with pytest.raises(TachyscopeError, match="'gone' of my_gone:Gone cannot be loaded: No module"):
        Plan.parse("cache=gone")
    with pytest.warns(TachyscopeWarning, match="'gone' of my_gone:Gone cannot be loaded"):
        assert {"stride", "window"} < set(policies("cache"))


def test_an_entry_point_that_registers_nothing_is_named(stride, monkeypatch):
    monkeypatch.setattr(registry, "entry_points", Distribution(("cache.step", "my_stride")))
    with pytest.raises(TachyscopeError, match="my_stride is to have the cache policy 'step'"):
        Plan.parse("cache=step")


def test_a_rival_without_the_laboratory_is_named_with_what_to_install(clean, monkeypatch):
    monkeypatch.setitem(registry.LAB, "cache", ("cousin",))
    with pytest.raises(TachyscopeError, match="'cousin' comes with tachyscope-lab.*pip install -e"):
        Plan.parse("cache=cousin")


def test_names_are_distinct_and_words(clean):
    with pytest.raises(TachyscopeError, match="there is a cache policy 'window' already"):
        type("Other", (CachePolicy,), {}, name="window")
    for name in ("none", "Big", "a b", "a=b", "x" * 50):
        with pytest.raises(TachyscopeError, match="a policy's name has small letters"):
            type("Other", (CachePolicy,), {}, name=name)
    with pytest.raises(TachyscopeError, match="answers no question of a plan"):
        type("Other", (registry.Policy,), {}, name="other")


@pytest.mark.parametrize(
    "given, kept",
    [("9f", Size(9, True)), ("1344", Size(1344)), (1344, Size(1344)), (Size(9, True), Size(9, True))],
)  # fmt: skip
def test_a_size_may_be_given_as_text_or_as_entries(given, kept):
    assert Window(given) == Window(kept) and str(Window(given)) == str(Window(kept))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"budget": "big"}, "a size is entries (1344) or latent frames (21f), got 'big'"),
        ({"budget": 9.5}, "a size is entries (1344) or latent frames ('21f'), got 9.5"),
        ({"budget": None}, "a size is entries (1344) or latent frames ('21f'), got None"),
        ({"budget": 0}, "cache policy 'window': budget must be from 1 to 100,000,000, got 0"),
        ({"sink": "3"}, "sink must be a whole number from 0 to 1,000,000, got '3'"),
        ({"sink": None}, "sink must be a whole number from 0 to 1,000,000, got None"),
        ({"sink": True}, "sink must be a whole number from 0 to 1,000,000, got True"),
        ({"positions": "up"}, "positions must be one of absolute, reindexed, got 'up'"),
        ({"fold": float("nan")}, "fold must be from 0 to 1, got nan"),
    ],
)  # fmt: skip
def test_a_setting_is_checked_when_the_policy_is_made(given, words):
    with pytest.raises(TachyscopeError, match=re.escape(words)):
        Window(**given)


def test_numbers_become_the_setting_s_own_type():
    ann = find_policy("attention", "ann")
    assert str(ann(read=1)) == str(Plan.parse("attention=ann:read=1").attention)
    drift = find_policy("replay", "random")
    with pytest.raises(TachyscopeError, match="drift must be true or false, got 1$"):
        drift(drift=1)
    kept = find_policy("replay", "neurons")(file=Path("a/b.safetensors"))
    assert kept.file == "a/b.safetensors"


def test_every_setting_has_its_help_and_every_number_its_bound():
    for question in QUESTIONS:
        for name, policy in policies(question).items():
            assert (policy.question, policy.name) == (question, name)
            for key, one in settings(policy).items():
                assert one.about, (name, key)
                assert one.bound or one.kind not in (int, float, Size), (name, key)
