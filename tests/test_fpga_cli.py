"""`tachyscope fpga`: its options are documented, its files are whole, its faults one line."""

import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from decoder_bench import SMALL as SMALL_DECODER

from tachyscope.cli import main
from tachyscope.errors import TachyscopeError
from tachyscope.fpga.cli import SHAPE, app
from tachyscope.fpga.workload import WORKLOADS, Trace

MANUAL = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
VERBS = ["build", "simulate", "synth", "estimate"]
SMALL = ["--lanes", "2", "--macs", "4", "--depth", "8", "--outputs", "4", "--positions", "2"]


def test_the_verbs_are_the_documented_ones():
    assert sorted(name for name in app if not name.startswith("-")) == sorted(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_in_the_manual_and_has_help(verb, capsys):
    names = [
        name for name in inspect.signature(app[verb].default_command).parameters if name != "said"
    ]
    section = MANUAL.split(f"## tachyscope fpga {verb}")[1].split("\n## ")[0]
    if "shape" in names:
        names.remove("shape")
        names += [field.name for field in dataclasses.fields(SHAPE)]
        section += MANUAL.split("## tachyscope fpga build")[1].split("\n## ")[0]
    assert main(["fpga", verb, "--help"]) == 0
    shown = capsys.readouterr().out
    for name in names:
        option = "OUT" if (verb, name) == ("build", "out") else f"--{name.replace('_', '-')}"
        assert option in shown and option in section, option


def test_build_writes_verilog(tmp_path, capsys):
    assert main(["fpga", "build", str(tmp_path), "--part", "engine", *SMALL]) == 0
    text = (tmp_path / "engine.v").read_text()
    assert "module engine(" in text
    # an empty memory is cleared by a loop: no line for each of its beats
    assert "for (i = 0; i <= 1; i = i + 1) valid[i] = 1'h0;" in text and "valid[1] =" not in text


@pytest.mark.slow
def test_build_writes_the_decoder_with_its_registers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tachyscope.fpga.cli.TRUNK", SMALL_DECODER)  # atrium-tokens' takes a minute
    assert main(["fpga", "build", str(tmp_path), "--lanes", "4", "--macs", "4"]) == 0
    assert "module decoder(" in (tmp_path / "decoder.v").read_text()
    assert "| 0x000c | CTRL | wo |" in (tmp_path / "registers.md").read_text()
    assert "#define TACHYSCOPE_CTRL 0x000cu" in (tmp_path / "registers.h").read_text()


def test_simulate_compares_with_integers_and_cycle_model(capsys):
    assert main(["fpga", "simulate", *SMALL, "--tokens", "5", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = found["rows"]
    assert (row["mismatches"], row["cycle_mismatches"], row["tokens"]) == (0, 0, 5)
    assert found["suite"] == "fpga-simulate" and found["command"].startswith(
        "tachyscope fpga simulate"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "out", "--part", "engine", "--lanes", "0"], "GemvArray lanes must be an integer from 1 to 256, got 0"),
        (["build", "out", "--part", "engine", "--deal", "dice"], "RowScheduler deal must be one of static, rows, tiles, got 'dice'"),
        (["build", "out", "--part", "engine", "--depth", "65"], "depth must be a multiple of macs = 16, got 65"),
        (["build", "out", "--part", "engine", "--rows", "33"], "RowScheduler rows must be an integer from 1 to 32, got 33"),
        (["build", "out", "--part", "engine", "--products-per-dsp", "2", "--lanes", "3", "--outputs", "3"], "GemvArray lanes must be a multiple of products_per_dsp = 2, got 3"),
        (["build", "out", "--part", "engine", "--query", "x"], "TasGate query must be one of before_rope, after_rope, got 'x'"),
        (["simulate", "--tokens", "0"], "tokens must be 1 or more, got 0"),
        (["simulate", "--stall", "1"], "stall must be from 0 to below 1, got 1.0"),
        (["simulate", "--verilator", "--rows", "2"], "the order of beats is known beforehand for 1 row and 1 core alone, got 2 and 1"),
        (["synth", "--seeds", "1,b"], "seeds must be integers set apart by commas, got '1,b'"),
        (["estimate", "--model", "x"], "model must be one of vila-u-7b, got 'x'"),
        (["estimate", "--board", "x"], "board must be one of u280, got 'x'"),
        (["estimate", "--replay", "1.5"], "replay must be from 0 to 1, got 1.5"),
        (["estimate", "--replay", "0.9"], "replay over a video must be from 0 to 0.875, since its first frame has nothing to replay; got 0.9"),
        (["estimate", "--batch", "8"], "batch 8 needs 11.68 GB and the u280 has 8.59 GB: use batch 2 or less, or a window"),
        (["estimate", "--method", "x"], "method must be one of tokens, neurons, got 'x'"),
        (["estimate", "--context", "0"], "context must be an integer from 1 to 1048576, got 0"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_the_allowed_range(words, message, capsys):
    assert main(["fpga", *words]) == 2
    assert capsys.readouterr().err == f"tachyscope: {message}\n"


TRACE = Path(__file__).parent.parent / "bench" / "traces" / "atrium-tokens.npz"


def test_estimate_takes_the_trace_of_a_real_run(tmp_path):
    found = Trace.load(TRACE)
    out = tmp_path / "rows.json"
    assert main(["fpga", "estimate", "--trace", str(TRACE), "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    off, on = document["rows"]
    assert on["model"] == "atrium-tokens" and on["trace"] == "recorded"
    assert on["replay"] == round(float(found.replayed.mean()), 4)
    assert on["batch"] == found.replayed.shape[2] > 1
    assert on["speedup_dense"] > off["speedup_dense"]
    # its sizes are known: nothing of the model is assumed
    assert not {"prompt", "depth_transformer"} & {one["name"] for one in document["assumptions"]}


def test_a_trace_is_checked(tmp_path, capsys):
    path = tmp_path / "trace.npz"
    path.write_bytes(b"no trace")
    assert main(["fpga", "estimate", "--trace", str(path)]) == 2
    assert "is no replay trace: give a file of scripts/fpga_trace.py" in capsys.readouterr().err
    assert main(["fpga", "estimate", "--trace", str(TRACE), "--batch", "2"]) == 2
    assert "a trace has its own model, batch and replay" in capsys.readouterr().err
    assert main(["fpga", "estimate", "--trace", str(TRACE), "--method", "neurons"]) == 2
    assert "a trace is of token replay: it takes method tokens" in capsys.readouterr().err
    with pytest.raises(TachyscopeError, match=r"\[tokens, 32, rows\], got float64 \[3\]"):
        Trace(WORKLOADS["vila-u-7b"], np.zeros(3))


def test_a_trace_is_read_as_it_was_saved(tmp_path):
    flags = np.random.default_rng(0).random((5, 32, 2)) < 0.5
    Trace(WORKLOADS["vila-u-7b"], flags).save(tmp_path / "trace.npz")
    found = Trace.load(tmp_path / "trace.npz")
    assert found.workload == WORKLOADS["vila-u-7b"]
    assert np.array_equal(found.replayed, flags)
