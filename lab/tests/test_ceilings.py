"""The map of what replay can save: its arithmetic."""

import pytest

from tachyscope_lab.bench.ceilings import TRUNKS, bytes_of, ceiling, over_video

VILA = TRUNKS["VILA-U 7B"]


def test_bytes_are_those_of_the_matrices():
    found = bytes_of(VILA, 1100)
    assert found.projections == 4 * 4096 * 4096 * 2
    assert found.mlp == 3 * 4096 * 11008 * 2
    assert found.entries == 1100 * 2 * 32 * 128 * 2
    assert bytes_of(VILA, 1100, "int4").mlp == 3 * 4096 * 11008 * (0.5 + 4 / 128)
    # eight of 32 heads have keys and values
    grouped = bytes_of(TRUNKS["Emu3 8B, Cosmos 4B"], 10)
    assert grouped.projections == (2 * 4096 + 2 * 1024) * 4096 * 2
    assert grouped.entries == 10 * 2 * 8 * 128 * 2


def test_ceilings_follow_from_bytes():
    dense, rest = 422.7, 422.7 - 270.5  # MB
    assert ceiling(VILA, 1100) == pytest.approx(dense / rest, rel=1e-3)
    part = bytes_of(VILA, 1100, neurons=0.25).mlp
    assert part == 3 * 4096 * 2752 * 2 + 2 * 256 * 4096 * 2
    assert ceiling(VILA, 1100, neurons=1.0) == 1
    assert ceiling(VILA, 1100, window=True) > ceiling(VILA, 1100)
    assert over_video(2.0) == pytest.approx(8 / 4.5)
    # keys and values stay what they are, so that less is to be saved of smaller weights
    assert ceiling(VILA, 4096, "int4") < ceiling(VILA, 4096, "int8") < ceiling(VILA, 4096)
