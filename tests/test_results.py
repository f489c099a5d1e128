"""Documents of results: what they name, and measurements that are interrupted."""

import json
import re

import pytest

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.results import Parts, document, emit
from tachyscope.weights import RECORD, weights_hashes


def test_a_document_names_the_weights_of_shipped_models_alone():
    record = json.loads(RECORD.read_text())
    found = document("x", [{"model": "atrium-world"}, {"model": "toy-chunks"}])["weights"]
    assert list(found) == ["atrium-world"] and len(found["atrium-world"]) == 64
    assert "weights" not in document("x", [{"model": "toy-chunks"}])
    assert set(weights_hashes(record)) == set(record)


def measured(path, resume=False, done=(), **settings):
    """Two parts of a measurement; `done` is told those that are really measured."""
    parts = Parts(str(path), settings, resume, "words")
    parts.begin("x", "toy", "f" * 16)
    for name, value in {"a": 1.5, "b": float("nan")}.items():
        if parts.get(name) is None:
            done.append(name)
            parts.add(name, {"value": value})
        yield parts.get(name)


def test_an_interrupted_measurement_goes_on_with_the_parts_it_has(tmp_path):
    path, done = tmp_path / "x.json", []
    assert next(measured(path, done=done, pace=1.0))["value"] == 1.5  # and then it is killed
    kept = json.loads(path.read_text())
    assert (kept["suite"], kept["unfinished"], kept["command"]) == ("x", True, "words")
    assert kept["rows"] == [{"value": 1.5, "part": "a"}]
    found = list(measured(path, resume=True, done=done, pace=1.0))
    assert done == ["a", "b"], "what was there is not measured again"
    assert [row["value"] for row in found] == [1.5, None]
    assert list(measured(path, resume=True, done=done, pace=1.0)) == found and len(done) == 2
    assert len(list(measured(path, done=done, pace=1.0))) == 2 and len(done) == 4


def test_other_settings_weights_or_machines_are_refused(tmp_path):
    path = tmp_path / "x.json"
    list(measured(path, done=[], pace=1.0))
    for change, line in {
        "settings": "was measured with another pace (0.5, now 1.0): choose another file, or leave",
        "machine": "was measured with another machine (TPU, now",
        "fingerprints": "was measured with other weights of toy (gggggggggggg, now ffffffffffff)",
        "suite": "is no results file of x",
    }.items():
        other = {"settings": {"pace": 0.5}, "machine": {"gpu": "TPU"}, "fingerprints": {"toy": "g" * 16},
                 "suite": "y"}[change]  # fmt: skip
        emit(json.loads(path.read_text()) | {change: other}, str(tmp_path / "other.json"))
        with pytest.raises(TachyscopeError, match=re.escape(f"other.json {line}")):
            list(measured(tmp_path / "other.json", resume=True, done=[], pace=1.0))
    emit(document("x", [{"name": "whole"}]), str(path))
    with pytest.raises(
        TachyscopeError, match="is finished: leave `resume` out to measure it again"
    ):
        list(measured(path, resume=True, done=[], pace=1.0))
    with pytest.raises(TachyscopeError, match="`resume` continues a file of results, got None"):
        Parts(None, {}, resume=True)


def test_results_that_are_nested_too_deep_are_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[" * 200_000)
    with pytest.raises(TachyscopeError, match="x.json is no results file of x"):
        list(measured(path, resume=True, done=[], pace=1.0))
