"""Eight clients of misuse, and the honest session beside them."""

import pytest

from tachyscope_lab.bench.misuse import lines, misuse


@pytest.mark.slow
def test_an_honest_session_plays_on_beside_eight_clients_of_misuse():
    found = misuse(minutes=1.0, seed=0)
    (row,) = found["rows"]
    assert row["attacks"] > 40 and len(row["of_each"]) > 8
    assert row["chunks"] > 10 and row["chunks_lost"] == row["keys_lost"] == 0
    # a server of its own on two cores: 1.4 was measured; other work on the machine may add some
    assert row["worst_over_mean"] < 3 and row["health_s_worst"] < 5
    assert row["rss_mb_second_half"] < 1.1 * row["rss_mb_first_half"] + 50
    assert row["log_bytes"] < 1_000_000
    assert any("worst / mean" in line for line in lines(found))
