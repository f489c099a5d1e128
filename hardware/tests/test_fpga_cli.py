"""`tachyscope-fpga`: its options have help, its files are whole, its faults one line."""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from tachyscope_fpga.cli import VERBS, main
from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.model.workload import WORKLOADS, Trace
from tachyscope_fpga.tools.decoder_bench import SMALL as SMALL_DECODER
from tachyscope_fpga.tools.draw import Drawn, card, draw, to_png
from tachyscope_fpga.verb import counter, parser_of

SMALL = ["--array", "2x4", "--matrix", "4x8", "--positions", "2"]


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_has_at_most_twelve_options_each_with_help(name, capsys):
    parser = parser_of(VERBS[name], f"tachyscope-fpga {name}")
    options = [action for action in parser._actions if action.dest != "help"]
    assert len(options) <= 12
    assert all(action.help for action in options)
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert all((action.option_strings or [action.dest])[0] in shown for action in options)


def test_the_help_lists_the_verbs(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in VERBS)


def test_build_writes_verilog(tmp_path, capsys):
    assert main(["build", str(tmp_path), "--part", "engine", *SMALL]) == 0
    text = (tmp_path / "engine.v").read_text()
    assert "module engine(" in text
    # an empty memory is cleared by a loop: no line for each of its beats
    assert "for (i = 0; i <= 1; i = i + 1) valid[i] = 1'h0;" in text and "valid[1] =" not in text


@pytest.mark.slow
def test_build_writes_the_decoder_with_its_registers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tachyscope_fpga.cli.TRUNK", SMALL_DECODER)  # atrium-tokens' takes a minute
    assert main(["build", str(tmp_path), "--array", "4x4"]) == 0
    assert "module decoder(" in (tmp_path / "decoder.v").read_text()
    assert "| 0x000c | CTRL | wo |" in (tmp_path / "registers.md").read_text()
    assert "#define TACHYSCOPE_CTRL 0x000cu" in (tmp_path / "registers.h").read_text()


def test_a_png_holds_the_pictures_side_by_side():
    png = to_png((card(), card(), card()))
    height, width = int.from_bytes(png[20:24]), int.from_bytes(png[16:20])
    side = card().shape[0]
    assert (height, width) == (12 * side, 12 * (3 * side + 2))
    length = int.from_bytes(png[33:37])
    assert len(zlib.decompress(png[41 : 41 + length])) == height * (width + 1)


@pytest.mark.slow
def test_the_decoder_draws_its_test_frame(tmp_path, capsys):
    done = []
    drawn = draw(watch=done.append)
    assert (drawn.tokens, drawn.mismatches) == (50, 0) and drawn.replayed > 10
    assert done == list(range(1, 51))
    truth, *frames = drawn.pictures
    for frame in frames:
        assert -10 * np.log10(np.mean((frame - truth) ** 2)) > 28  # dB


def test_a_terminal_is_told_how_many_tokens_are_done(monkeypatch, capsys):
    counter(2, "tokens")(1)
    assert not capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say = counter(2, "tokens")
    assert capsys.readouterr().err == "\r0 of 2 tokens"
    say(2)
    assert capsys.readouterr().err == "\r2 of 2 tokens\n"


def test_a_drawn_frame_that_is_not_the_integers_is_a_fault(tmp_path, capsys, monkeypatch):
    for wrong, code in ((0, 0), (1, 2)):
        found = Drawn((card(),) * 3, 50, wrong, 20, 1000)
        monkeypatch.setattr(
            "tachyscope_fpga.tools.draw.draw", lambda seed, watch, found=found: found
        )
        assert main(["draw", str(tmp_path / "frame.png")]) == code
        assert (tmp_path / "frame.png").read_bytes()[1:4] == b"PNG"
    assert "the hardware differs from its model" in capsys.readouterr().err


def test_simulate_compares_with_integers_and_cycle_model(capsys):
    assert main(["simulate", *SMALL, "--tokens", "5", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = found["rows"]
    assert (row["mismatches"], row["cycle_mismatches"], row["tokens"]) == (0, 0, 5)
    assert found["suite"] == "fpga-simulate"
    assert found["command"].startswith("tachyscope-fpga simulate --array 2x4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "out", "--part", "engine", "--array", "0x16"], "GemvArray lanes must be an integer from 1 to 256, got 0"),
        (["build", "out", "--part", "engine", "--deal", "dice"], "RowScheduler deal must be one of static, rows, tiles, got 'dice'"),
        (["build", "out", "--part", "engine", "--matrix", "64x65"], "depth must be a multiple of macs = 16, got 65"),
        (["build", "out", "--part", "engine", "--rows", "33"], "RowScheduler rows must be an integer from 1 to 32, got 33"),
        (["build", "out", "--part", "engine", "--array", "3x16x2", "--matrix", "3x64"], "GemvArray lanes must be a multiple of products_per_dsp = 2, got 3"),
        (["build", "out", "--part", "engine", "--query", "x"], "TasGate query must be one of before_rope, after_rope, got 'x'"),
        (["build", "out", "--array", "16"], "array must be 2 numbers like 16x16, got '16'"),
        (["build", "out", "--part", "engine", "--matrix", "1x-2"], "matrix must be 2 numbers like 16x16, got '1x-2'"),
        (["build", "out", "--part", "x"], "--part must be one of decoder, engine, got 'x'"),
        (["build"], "the following arguments are required: out"),
        (["simulate", "--tokens", "x"], "--tokens must be an integer, got 'x'"),
        (["conjure"], "VERB must be one of simulate, draw, estimate, build, synth, got 'conjure'"),
        (["simulate", "--json", "/dev/null/x"], "/dev/null cannot be written (file exists): choose another place"),
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
    assert main(words) == 2
    assert capsys.readouterr().err == f"tachyscope-fpga: {message}\n"


TRACE = Path(__file__).parent.parent / "traces" / "atrium-tokens.npz"


def test_estimate_takes_the_trace_of_a_real_run(tmp_path):
    found = Trace.load(TRACE)
    out = tmp_path / "rows.json"
    assert main(["estimate", "--trace", str(TRACE), "--json", str(out)]) == 0
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
    assert main(["estimate", "--trace", str(path)]) == 2
    assert "is no replay trace: give a file of hardware/scripts/trace.py" in capsys.readouterr().err
    assert main(["estimate", "--trace", str(TRACE), "--batch", "2"]) == 2
    assert "a trace has its own model, batch and replay" in capsys.readouterr().err
    assert main(["estimate", "--trace", str(TRACE), "--method", "neurons"]) == 2
    assert "a trace is of token replay: it takes method tokens" in capsys.readouterr().err
    with pytest.raises(TachyscopeError, match=r"\[tokens, 32, rows\], got float64 \[3\]"):
        Trace(WORKLOADS["vila-u-7b"], np.zeros(3))


def test_a_trace_is_read_as_it_was_saved(tmp_path):
    flags = np.random.default_rng(0).random((5, 32, 2)) < 0.5
    Trace(WORKLOADS["vila-u-7b"], flags).save(tmp_path / "trace.npz")
    found = Trace.load(tmp_path / "trace.npz")
    assert found.workload == WORKLOADS["vila-u-7b"]
    assert np.array_equal(found.replayed, flags)
