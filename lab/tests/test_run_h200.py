"""lab/scripts/run_h200: its commands exist, and a part that ended is not run again."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tachyscope.cli.app import app
from tachyscope_lab.bench.wan_rows import choose_rows
from tachyscope_lab.cli.app import app as lab

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "lab/scripts/run_h200"
STUB = """#!/bin/sh
echo "$*" >> "$SEEN"
case "$*" in *bench_fp8*) exit 1 ;; esac
"""


def run(*words, **environment):
    return subprocess.run(
        [SCRIPT, *map(str, words)], capture_output=True, text=True, env=os.environ | environment
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    shown = run("--out", tmp_path_factory.mktemp("out"), "--dry").stdout.splitlines()
    return {name: shlex.split(words) for name, _, words in (line.partition(": ") for line in shown)}


def test_every_part_is_a_command_that_parses(parts):
    assert {"tests", "chunks_fp8", "pixels_bfloat16", "long", "served_8"} <= parts.keys()
    for name, words in parts.items():
        if words[0] == "scripts/gpu":
            assert (ROOT / words[0]).is_file()
        elif words[1] == "-m":
            known = {"tachyscope": app, "tachyscope_lab": lab}[words[2]]
            known.parse_args(words[3:], exit_on_error=False, print_error=False)
        else:
            text = (ROOT / words[1]).read_text()
            given = [word for word in words[2:] if word.startswith("--")]
            assert given and all(f'add_argument("{word}"' in text for word in given), name
        if "wan" in words:
            assert choose_rows("main", words[words.index("--rows") + 1])


def test_what_a_part_writes_is_its_own(parts):
    written = [words[words.index(flag) + 1] for words in parts.values()
               for flag in ("--json", "--out") if flag in words]  # fmt: skip
    assert len(written) == len(set(written)) == len(parts) - 1  # all but the tests


def test_a_part_that_ended_is_not_run_again_and_one_that_failed_is(tmp_path):
    (tmp_path / "python3").write_text(STUB)
    (tmp_path / "python3").chmod(0o755)
    place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen")}
    words = ["--out", tmp_path / "out", "--only", "generate kernels_fp8"]
    for _ in range(2):
        assert run(*words, **place).returncode == 1
    seen = (tmp_path / "seen").read_text()
    assert (seen.count("generate self-forcing"), seen.count("bench_fp8")) == (1, 2)
    assert {x.name for x in (tmp_path / "out").glob("*.done")} == {"generate.done"}


def test_a_wrong_word_is_one_line(tmp_path):
    for words in (["--out", tmp_path, "--fast"], []):
        wrong = run(*words)
        assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1
