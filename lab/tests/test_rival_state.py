"""Rivals' state: predicted to the byte, snapshotted by a killed process, stored by few bits.

The tests are those of the product's own policies, run on other plans.
"""

import pytest
import test_memory
import test_snapshots
import test_store
from toys import load

PLANS = [
    "cache=worldkv:retrieve=6,budget=30f",
    "cache=memrope:budget=9f,sink=1 store=int2",
    "cache=window:budget=8f attention=radial:block=2",
    "cache=window:budget=8f attention=svg",
    "cache=dedup:budget=8f attention=svg2",
    "cache=deep_forcing:budget=9f,keep=7,sink=2",
]


@pytest.mark.slow
def test_the_cache_is_predicted_to_the_byte(monkeypatch):
    model = load("toy-chunks")
    monkeypatch.setattr(test_memory, "CUSTOM", {model.name: PLANS})
    monkeypatch.setattr(test_memory, "NAMES", ())
    test_memory.test_the_cache_is_predicted_to_the_byte((model, model.on_meta()))


@pytest.mark.slow
def test_a_killed_process_goes_on_exactly(monkeypatch, tmp_path):
    monkeypatch.setattr(
        test_snapshots, "KILLED", "import tachyscope_lab.rivals\n" + test_snapshots.KILLED
    )
    plan = "cache=worldkv:retrieve=6,budget=12f"
    test_snapshots.test_a_killed_process_goes_on_exactly("toy-chunks", plan, tmp_path)


@pytest.mark.parametrize("plan", ["cache=frames:budget=8f", "cache=memrope:budget=8f,sink=1"])
def test_a_store_of_two_bits_answers_about_as_a_native_one(plan):
    test_store.test_a_packed_store_answers_about_as_a_native_one("int2", plan)
