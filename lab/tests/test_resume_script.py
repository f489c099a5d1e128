"""lab/scripts/check_resume.py, on a toy: what it is for on a GPU, at Self-Forcing's shape."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_resume.py"


@pytest.mark.slow
def test_a_killed_video_is_gone_on_with_and_a_difference_is_told(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("check_resume", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    words = ["--out", str(tmp_path), "--model", "toy-chunks", "--device", "cpu", "--dtype", "float32",
             "--frames", "36", "--every", "3", "--kill", "7"]  # fmt: skip
    assert script.main(words) == 0
    rows = json.loads((tmp_path / "resume.json").read_text())["rows"]
    assert [row["plan"] for row in rows] == list(script.PLANS)
    for row in rows:
        assert row["equal"] and (row["killed_after"], row["resumed_at"]) == (7, 6)
    killed = script.kill_one
    monkeypatch.setattr(script, "kill_one", lambda *given: ["other", *killed(*given)[1:]])
    assert script.main([*words, "--plan", script.PLANS[1]]) == 1
