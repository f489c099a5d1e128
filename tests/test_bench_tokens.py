"""The benchmark of token models, on a toy."""

import dataclasses

import pytest

from tachyscope.bench.tokens import PAPER, ROWS, bench_tokens, token_lines
from tachyscope.errors import TachyscopeError
from tachyscope.models.vila_u.model import toy_tokens


def _config():
    return dataclasses.replace(toy_tokens().config, actions="")


@pytest.mark.slow
def test_every_row_is_timed_and_told_when_it_is_done():
    names, told = ["dense", "all", "neurons75", "window16"], []
    found = bench_tokens(
        _config(), names, device="cpu", rounds=2, peer=False, weights=("bf16", "int8"),
        told=lambda document: told.append(len(document["rows"])),
    )  # fmt: skip
    rows = found["rows"]
    assert not [row["failed"] for row in rows if "failed" in row]
    assert told == [*range(1, len(rows) + 1), len(rows)]
    kinds = {(row["weights"], row["rows"]) for row in rows}
    assert kinds == {("bf16", 1), ("bf16", 2), ("int8", 1), ("int8", 2)}
    every = {row["name"]: row for row in rows if row["weights"] == "bf16" and row["rows"] == 1}
    assert every["all"]["skipped_share_later"] == 1 and every["all"]["simulated_share_later"] == 0
    assert every["neurons75"]["trunk_bytes"] < every["dense"]["trunk_bytes"]
    video = every["dense"]["step_video_s"]
    assert video == pytest.approx(8 * 16 * every["dense"]["step_ms"] / 1e3)
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
