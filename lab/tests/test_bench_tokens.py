"""The benchmark of token models, on a toy."""

import dataclasses

import pytest
import torch

from tachyscope.core.errors import TachyscopeError
from tachyscope.decode import can_compile
from tachyscope.io.results import read_results
from tachyscope.models.token_model import Sampler
from tachyscope.models.toys import toy_tokens
from tachyscope_lab.bench import tokens
from tachyscope_lab.bench.device_clock import slope
from tachyscope_lab.bench.random_vila import vila_7b
from tachyscope_lab.bench.token_lines import cpu_lines, token_lines
from tachyscope_lab.bench.token_rows import PAPER, ROWS
from tachyscope_lab.bench.tokens import bench_tokens, places_a_pass
from tachyscope_lab.bench.tokens_cpu import bench_tokens_cpu
from tachyscope_lab.cli.app import main


def _config():
    return dataclasses.replace(toy_tokens().config, actions="")


@pytest.mark.slow
def test_every_row_is_timed_and_told_when_it_is_done(monkeypatch):
    monkeypatch.setattr(tokens, "PROMPT", 8)  # of a budget of four frames little more is left
    names = ["dense", "all", "input-all", "neurons75", "window16", "merge4f", "draft32"]
    names, told = [*names, "draft32-neurons75"], []
    settled = [{"camera": "still", "plan": "passes=draft:places=32", "places_a_pass": 4.0}]
    found = bench_tokens(
        _config(), names, device="cpu", rounds=2, peer=False, accepted=settled, weights=("bf16", "int8"),
        on_row=lambda document: told.append(len(document["rows"])),
    )  # fmt: skip
    rows = found["rows"]
    assert not [row["failed"] for row in rows if "failed" in row]
    assert told == [*range(1, len(rows) + 1), len(rows)]
    kinds = {(row["weights"], row["rows"]) for row in rows}
    assert kinds == {("bf16", 1), ("bf16", 2), ("int8", 1), ("int8", 2)}
    every = {row["name"]: row for row in rows if row["weights"] == "bf16" and row["rows"] == 1}
    for row in (every["all"], every["input-all"]):
        assert row["skipped_share_later"] == 1 and row["simulated_share_later"] == 0
    assert every["neurons75"]["trunk_bytes"] < every["dense"]["trunk_bytes"]
    video = every["dense"]["step_video_s"]
    assert video == pytest.approx(8 * 16 * every["dense"]["step_ms"] / 1e3)
    draft = every["draft32"]
    assert draft["step_ms_a_token"] == {"still": draft["step_ms"] / 4}
    # the decode engine's own codes are all right, so that one pass settles a frame of the toy
    assert draft["equal_codes"] == 1 and draft["passes_a_frame"] == 1
    assert places_a_pass((), settled[0]["plan"]) == places_a_pass(settled, "") == {}
    lines = token_lines(found)
    assert len(lines) == len(rows) + 2 and "draft32" in "\n".join(lines)


def test_the_papers_rows_are_rows_and_other_names_are_refused():
    assert PAPER.keys() <= ROWS.keys()
    with pytest.raises(TachyscopeError, match="no row 'quick'"):
        bench_tokens(_config(), ["quick"], device="cpu")
    with pytest.raises(TachyscopeError, match="`batch` must be 1, 2 or 1,2"):
        bench_tokens(_config(), ["dense"], device="cpu", batch=[3])
    with pytest.raises(TachyscopeError, match="no weights 'int3'"):
        bench_tokens(_config(), ["dense"], device="cpu", weights=["int3"])
    with pytest.raises(TachyscopeError, match="`places` must be a square number"):
        vila_7b(places=250)
    assert vila_7b(places=729).grid == (27, 27)


def test_watts_are_the_slope_of_a_counter_that_moves_in_steps():
    assert slope([(0.3, 1000.0), (0.4, 1060.0), (0.8, 1300.0)]) == pytest.approx(600)
    assert slope([(0.3, 1000.0)]) is None


def test_a_file_that_is_no_result_of_drafts_is_refused(tmp_path):
    path = tmp_path / "drafts.json"
    for text in ("{", "[]", '{"suite": "other", "rows": []}', '{"suite": "atrium-drafts"}'):
        path.write_text(text)
        with pytest.raises(TachyscopeError, match="is no results file of atrium-drafts"):
            read_results(path, "atrium-drafts")
    path.write_text('{"suite": "atrium-drafts", "rows": []}')
    assert read_results(path, "atrium-drafts")["rows"] == []


@pytest.mark.slow
def test_a_cpus_rows_are_timed_by_turns_and_told_beside_their_limit(capsys):
    if not can_compile(torch.float32):
        pytest.skip("no C++ compiler")
    told = []
    names = ["dense", "all", "replay80", "neurons75", "all-window16"]
    config = dataclasses.replace(_config(), sampler=Sampler(cfg=1.0))
    found = bench_tokens_cpu(
        config, names, weights=("float32", "int8"), rounds=3, tokens=2, on_line=told.append
    )
    assert [row["name"] for row in found["rows"]] == 2 * names and len(told) == 6
    every = {row["name"]: row for row in found["rows"][:5]}
    assert every["all"]["mlp_work"] == 0 and every["dense"]["mlp_work"] == 1
    # one of six draws is above the share of those that can be replayed
    assert every["replay80"]["mlp_work"] == pytest.approx(1 / 6)
    assert 0.2 < every["neurons75"]["mlp_work"] < 1
    assert every["neurons75"]["trunk_bytes"] < every["dense"]["trunk_bytes"]
    assert "limit" in every["all"] and "limit" not in every["all-window16"]
    per_frame = 1e3 / (16 * every["dense"]["step_ms"])
    assert every["dense"]["frames_s"] == pytest.approx(per_frame)
    assert len(cpu_lines(found)) == 2 + 1 + 10


@pytest.mark.parametrize(
    "words, said",
    [
        (["--shape", "2b"], "no shape '2b'; there are: 1b, atrium-tokens"),
        (["--weights", "int4"], "no weights 'int4'; there are: float32, bf16, int8"),
        (["--rows", "all"], "add dense"),
        (["--batch", "2"], "--batch is of a GPU's bench"),
        (["--no-peer"], "--peer is of a GPU's bench"),
    ],
)
def test_a_cpus_bench_refuses_what_it_cannot_time(words, said, capsys):
    assert main(["bench", "tokens", "--device", "cpu", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
