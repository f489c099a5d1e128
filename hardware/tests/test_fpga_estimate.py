"""The estimate: held to the bytes, and honest about what it does not know."""

import numpy as np
import pytest

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.model import hbm
from tachyscope_fpga.model.board import U280, cases
from tachyscope_fpga.model.estimate import (
    Settings,
    assumptions,
    check_memory,
    dense,
    estimate,
    token_cost,
)
from tachyscope_fpga.model.workload import WORKLOADS

LLAMA = WORKLOADS["vila-u-7b"]


def speedups(settings, context):
    """Against dense: by the cycles, and by the bytes alone."""
    ours, whole = (token_cost(LLAMA, U280, s, context) for s in (settings, dense(settings)))
    return whole.trunk_seconds / ours.trunk_seconds, whole.trunk_bytes / ours.trunk_bytes


def test_the_model_is_llama_7b():
    assert LLAMA.weights == 32 * (4 * 4096**2 + 3 * 4096 * 11008) == 6_476_005_376
    assert LLAMA.steps == 2047
    assert LLAMA.kv(256, 0) == 257 * 8192


@pytest.mark.parametrize(("context", "roofline"), [(256, 2.124), (2048, 1.975)])
def test_ports_scheduling_reaches_the_bytes_speedup_at_every_context(context, roofline):
    on, bytes_alone = speedups(Settings(replay=0.8), context)
    off, _ = speedups(Settings(replay=0.8, drs=False), context)
    assert bytes_alone == pytest.approx(roofline, abs=0.002)
    assert on >= 0.95 * bytes_alone
    assert off < on <= bytes_alone * 1.002


@pytest.mark.slow
@pytest.mark.parametrize("context", [61, 512, 1024, 1536, 2107])
def test_ports_scheduling_reaches_the_bytes_speedup_from_first_to_last_token(context):
    on, bytes_alone = speedups(Settings(replay=0.8), context)
    assert 0.95 * bytes_alone <= on <= bytes_alone * 1.002


@pytest.mark.slow
def test_over_a_video_at_80_percent_the_trunk_is_twice_as_fast():
    row = estimate(LLAMA, U280, Settings(replay=0.8))
    assert row["roofline_dense"] == pytest.approx(2.05, abs=0.02)
    assert row["of_roofline"] >= 0.95
    assert row["speedup_whole"] < row["speedup_dense"]  # the depth transformer replays nothing
    assert row["tokens_per_s_low"] < row["tokens_per_s"] < row["tokens_per_s_high"]
    assert row["joules_per_video_high"] < row["joules_per_video"] < row["joules_per_video_low"]


def test_replay_without_a_free_row_saves_no_bytes_but_compute():
    """Two rows of which one replays: the weights are read all the same."""
    flags = np.zeros((1, 32, 2), bool)
    flags[:, :, 0] = True
    half = token_cost(LLAMA, U280, Settings(batch=2), 256, flags)
    none = token_cost(LLAMA, U280, Settings(batch=2), 256, np.zeros_like(flags))
    assert half.bytes == none.bytes and half.macs < none.macs


def test_neuron_replay_reads_less_for_every_row_and_token_replay_only_where_all_agree():
    """Equal shares: tokens read fewer bytes with one row, neurons with more."""

    def mlp(method, batch):
        return token_cost(
            LLAMA, U280, Settings(replay=0.75, method=method, batch=batch, window=16), 256
        ).bytes["mlp"]

    assert mlp("tokens", 1) < mlp("neurons", 1)
    assert mlp("neurons", 1) == mlp("neurons", 4) < mlp("tokens", 4)


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(TachyscopeError, match=r"batch 8 needs 11.68 GB and the u280 has 8.59 GB"):
        check_memory(LLAMA, U280, Settings(batch=8))
    assert sum(check_memory(LLAMA, U280, Settings(batch=8, window=16)).values()) < U280.memory


def test_memory_at_command_level():
    """Long reads come near the bus's rate; refreshes, and rows opened late take from it."""
    usual = hbm.Timing()
    assert hbm.efficiency(hbm.LOW) < hbm.efficiency(usual) < hbm.efficiency(hbm.HIGH) < 1
    assert 0.9 < hbm.efficiency(usual) < 0.95
    ideal = 2**20 / usual.peak
    assert ideal <= hbm.read_clocks(2**20, usual) < 1.01 * ideal
    slow = hbm.Timing(to_read=60, closed=60, ahead=2)
    assert hbm.read_clocks(2**20, slow) > 1.2 * ideal


def test_every_assumption_has_a_range_and_a_reason():
    listed = assumptions(U280, LLAMA)
    assert {"clock_mhz", "memory_efficiency", "pj_per_byte", "pj_per_mac", "static_w"} <= {
        a.name for a in listed
    }
    assert all(a.why for a in listed)
    assert set(cases(U280)) == {"usual", "low", "high"}
