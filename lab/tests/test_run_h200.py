"""lab/scripts/run_h200.py: its commands exist, and runs with one folder share out what is left."""

import importlib
import io
import json
import re
import shlex
import sys
import tarfile
import time
from pathlib import Path

import bench_turns
import pytest
import run_h200
from run_h200 import PARTS, Part
from train_lodge import PHASES

from tachyscope_lab.bench.wan_rows import choose_rows
from tachyscope_lab.cli.app import app as lab

ROOT = Path(__file__).parents[2]
PLACES = {name: name.upper() for name in ("out", "folder", "kept", "old", "authors")}
COMMANDS = [
    pytest.param(shlex.split(words.format(**PLACES)), id=f"{part.name}{kind}{number}")
    for part in (*PARTS, *PHASES)
    for kind, commands in (("", part.commands), ("-small", part.small))
    for number, words in enumerate(commands)
]


def parse_lab(words):
    lab.parse_args(words, exit_on_error=False, print_error=False)
    if "--rows" in words and "wan" in words:
        assert choose_rows("main", words[words.index("--rows") + 1])


@pytest.mark.parametrize("words", COMMANDS)
def test_every_part_is_a_command_that_parses(words):
    if words[0].startswith("scripts/"):
        assert (ROOT / words[0]).is_file()
    elif words[0] == "-m":
        assert words[1] == "tachyscope_lab"
        parse_lab(words[2:])
    else:
        assert (ROOT / words[0]).is_file()
        if "--" in words:  # what follows is a benchmark's
            parse_lab(["bench", *words[words.index("--") + 1 :]])
            words = words[: words.index("--")]
        given = [word for word in words[1:] if word.startswith("--")]
        text = (ROOT / words[0]).read_text()
        missing = [x for x in given if not re.search(rf'add_argument\(\s*"{x}"', text)]
        assert not missing
        for run in (after for before, after in zip(words, words[1:], strict=False)
                    if before == "--run"):  # fmt: skip
            parse_lab(["bench", *shlex.split(run.split("=", 1)[1])])


def test_a_part_s_files_are_its_own():
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for part in (*PARTS[1:], *PHASES):  # all but the tests
        written = [words for words in part.commands if "{out}" in words or "{folder}/" in words]
        assert len(written) == len(part.commands), part.name


def test_three_runs_hold_what_answers_most():
    """A run of 570 s holds the longest part, and all parts but the last few fit three."""
    assert max(part.seconds for part in PARTS) < 500
    assert sum(part.seconds for part in PARTS[:6]) < 3 * 570


def script(folder, name, text):
    (folder / name).write_text(f"import pathlib, sys, time\n{text}\n")
    return str(folder / name)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_h200, "CARRY", tmp_path / "none")

    def call(parts, **more):
        options = {"seconds": 60.0, "tar": None, "small": False, "named": False} | more
        return run_h200.run_parts(parts, tmp_path / "out", *options.values())

    return call


def test_a_fault_ends_its_own_part_and_what_ended_is_not_run_again(run, tmp_path, capsys):
    count = f"open({str(tmp_path / 'seen')!r}, 'a').write('x')"
    parts = [
        Part("wrong", 10, "", (script(tmp_path, "a.py", f"{count}; sys.exit(3)"),)),
        Part("right", 10, "", (script(tmp_path, "b.py", count),)),
    ]
    assert run(parts) == 1
    assert "wrong: FAILED" in (told := capsys.readouterr().out) and "right: ended" in told
    assert run(parts) == 0 and (tmp_path / "seen").read_text() == "xx"
    assert run(parts[:1], named=True) == 1 and (tmp_path / "seen").read_text() == "xxx"


def test_a_part_that_takes_too_long_is_stopped_and_keeps_what_it_wrote(run, tmp_path):
    write = "pathlib.Path(sys.argv[1] + '.json').write_text('{}')"
    long = script(tmp_path, "a.py", f"{write}; time.sleep(60)")
    begun = time.monotonic()
    part = Part("long", 3, "", (f"{long} {{out}}", f"{long} {{out}}_2"))
    assert run([part], tar=tmp_path / "all.tar.gz") == 0 and time.monotonic() - begun < 12
    with tarfile.open(tmp_path / "all.tar.gz") as made:
        assert {"long.json", "long_2.json", "long.end", "long.log"} <= set(made.getnames())
    assert (tmp_path / "out/long.end").read_text() == "stopped\n"


def test_a_large_archive_comes_in_pieces_that_join(tmp_path, monkeypatch):
    monkeypatch.setattr(run_h200, "PIECE", 700)
    (tmp_path / "out/carried").mkdir(parents=True)
    (tmp_path / "out/carried/state").write_bytes(bytes(9000))
    (tmp_path / "out/a.json").write_text(" ".join(str(n * n) for n in range(600)))
    for content in ("", "short"):  # the second is smaller: no old piece is left
        if content:
            (tmp_path / "out/a.json").write_text(content)
        run_h200.pack(tmp_path / "out", tmp_path / "far/all.tar.gz")
        pieces = sorted((tmp_path / "far").iterdir())
        assert len(pieces) == 1 if content else len(pieces) > 1
        joined = b"".join(piece.read_bytes() for piece in pieces)
        with tarfile.open(fileobj=io.BytesIO(joined)) as made:
            assert made.getnames() == ["a.json"]


def test_a_part_begins_only_where_its_seconds_are_left(run, tmp_path, capsys):
    fine = script(tmp_path, "a.py", "")
    assert run([Part("large", 100, "", (fine,)), Part("small", 5, "", (fine,))]) == 0
    assert "large: may take 100 s, 60 are left" in capsys.readouterr().out
    assert {path.stem for path in (tmp_path / "out").glob("*.end")} == {"small"}
    assert run([Part("of the old tree", 5, "", (fine,), needs="old")]) == 0
    assert ".carry/old.tar.xz is not there" in capsys.readouterr().out


def test_packages_of_the_machine_stay_where_the_project_names_no_version(tmp_path, monkeypatch):
    files = {f"{name}/__init__.py": b"" for name in ("numpy", "rich", "not_there")}
    (tmp_path / "carry").mkdir()
    run_h200.write_archive(tmp_path / "carry/packages.tar.xz", iter(files.items()))
    monkeypatch.setattr(run_h200, "find_spec", lambda name: name in ("numpy", "rich") or None)
    places = run_h200.unpack(tmp_path / "carry", tmp_path / "here")
    kept = {path.name for path in places["packages"].iterdir()}
    assert kept == {"rich", "not_there", "av"}  # rich is in pyproject.toml, and numpy is not ours
    monkeypatch.syspath_prepend(places["packages"])
    monkeypatch.delitem(sys.modules, "av", raising=False)
    av = importlib.import_module("av")
    with pytest.raises(ModuleNotFoundError, match="not on this machine"):
        av.VideoFrame()
    monkeypatch.delitem(sys.modules, "av")


def test_runs_by_turns_are_compared_chunk_by_chunk():
    def row(*ms):
        return {"plan": "fast", "points": [{"chunk_ms_all": list(ms)}]}

    rows = {"one": [row(10.0, 20.0, 30.0)], "two": [row(5.0, 10.0, 10.0), {"failed": "x"}]}
    first, second, third = bench_turns.compared(rows)
    assert "over_first" not in first and second["over_first"] == {"chunk": 2.0}
    assert (third["run"], third["failed"]) == ("two", "x") and "over_first" not in third


@pytest.mark.slow
def test_two_runs_share_the_device_in_turn(tmp_path, capfd):
    words = (
        "wan --model toy-chunks --device cpu --dtype float32 --size 16x16 --lengths 6 --rounds 2"
    )
    argv = ["--out", str(tmp_path / "turns.json"),
            "--run", f"one={words} --rows 'stock;cache=window:budget=40f'",
            "--run", f"two={words} --rows fast"]  # fmt: skip
    assert bench_turns.main(argv) == 0
    rows = json.loads((tmp_path / "turns.json").read_text())["rows"]
    assert [row["run"] for row in rows] == ["one", "two", "one"]
    assert rows[1]["over_first"]["chunk"] > 0


def test_a_wrong_word_is_one_line(tmp_path, capsys):
    for argv in (["run", "--out", str(tmp_path), "--only", "tests,nothing"], ["run"]):
        with pytest.raises(SystemExit):
            run_h200.main(argv)
    assert "no part 'nothing'; there are: tests, " in capsys.readouterr().err
