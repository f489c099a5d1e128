"""What README says of quality is what was measured on the weights that are shipped."""

import json
import re
from pathlib import Path

import pytest

from tachyscope.results import document
from tachyscope.weights import RECORD, weights_hashes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "atrium-world-readme-2026-11-15-h200.json"


@pytest.fixture(scope="module")
def measured():
    return json.loads(RESULTS.read_text())


def test_the_readme_table_is_of_the_shipped_weights(measured):
    assert measured["weights"] == weights_hashes(["atrium-world"])
    assert all(row["worlds"] >= 16 for row in measured["rows"])


def test_every_number_of_the_readme_table_was_measured(measured):
    text = (ROOT / "README.md").read_text()
    head = "| plan | revisit, dB | worst room | frames 49-96, dB | identity | worst room |"
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    rows = measured["rows"]
    assert len(lines) == len(rows) == 7
    for line, row in zip(lines, rows, strict=True):

        def spread(key, row=row):
            return f"{row[key]:.1f} ({row[f'{key}_low']:.1f} to {row[f'{key}_high']:.1f})"

        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1:] == [
            spread("revisit_db"), f"{row['revisit_db_worst']:.1f}", spread("psnr_truth_96"),
            f"{row['identity']:.0%}", f"{row['identity_worst']:.0%}", f"{row['cache_mb']:.0f}",
            f"{row['work_dense']:.0%}",
        ]  # fmt: skip
        name = row["asked"].split(":")[-1] if ":" in row["asked"] else row["asked"]
        assert re.sub("budget=(..)f", r"\1", name) in cells[0]


def test_a_document_names_the_weights_of_shipped_models_alone():
    record = json.loads(RECORD.read_text())
    found = document("x", [{"model": "atrium-world"}, {"model": "toy-chunks"}])["weights"]
    assert list(found) == ["atrium-world"] and len(found["atrium-world"]) == 64
    assert "weights" not in document("x", [{"model": "toy-chunks"}])
    assert set(weights_hashes(record)) == set(record)
