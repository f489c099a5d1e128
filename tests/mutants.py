"""Puts the faults of mutants.toml into a copy of the package, one at a time; what the tests say.

`python tests/mutants.py` tries all of them, `python tests/mutants.py 3 17` those two.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
AT_ONCE = 2
SECONDS = 300  # of one fault: whatever takes longer waits for ever
FAILED = 1  # what pytest ends with where a test failed


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in a file of the package; one of the tests must see it."""

    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()} -> {self.new.strip()}"


def read() -> list[Mutant]:
    with open(Path(__file__).with_name("mutants.toml"), "rb") as file:
        return [Mutant(**each) for each in tomllib.load(file)["mutant"]]


def mutated(mutant: Mutant) -> str:
    source = (ROOT / "tachyscope" / mutant.file).read_text()
    assert source.count(mutant.old) == 1, f"stands {source.count(mutant.old)} times: {mutant}"
    return source.replace(mutant.old, mutant.new)


def lay_out(mutant: Mutant, folder: Path) -> None:
    """The repository in links, but for the folders that lead to the mutated file, and that file."""
    _link(ROOT, folder, ("tachyscope", ".git", ".venv"))
    here, package = ROOT / "tachyscope", folder / "tachyscope"
    for part in Path(mutant.file).parts:
        package.mkdir()
        _link(here, package, (part, "__pycache__"))
        here, package = here / part, package / part
    package.write_text(mutated(mutant))


def _link(here: Path, there: Path, but: Sequence[str]) -> None:
    for each in here.iterdir():
        if each.name not in but:
            (there / each.name).symlink_to(each)


def verdicts(mutants: Sequence[Mutant]) -> Iterator[tuple[int, int, float, str]]:
    """Each one's place, what pytest ended with, seconds and last words, as they come."""
    os.environ["TRITON_INTERPRET"] = "1"
    import pytest  # noqa: F401, loaded once, for every child
    import torch

    torch.set_num_threads(1)
    waiting, running = list(enumerate(mutants)), {}
    with tempfile.TemporaryDirectory() as base:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                place, mutant = waiting.pop(0)
                folder = Path(base, str(place))
                folder.mkdir()
                lay_out(mutant, folder)
                child = os.fork()
                if not child:
                    _run(folder, shlex.split(mutant.tests))
                running[child] = place, folder, time.perf_counter()
            child, status = os.wait()
            place, folder, begun = running.pop(child)
            code = os.waitstatus_to_exitcode(status)
            yield place, code, time.perf_counter() - begun, _last(folder / "said.txt")


def _run(folder: Path, tests: Sequence[str]) -> None:
    """In a child: the tests, on the package that lies there."""
    import signal

    signal.alarm(SECONDS)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    said = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1), os.dup2(said, 2)
    code = 99
    try:
        import pytest

        quiet = ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
        code = int(pytest.main([*quiet, "-m", "not slow and not gpu", *tests]))
        import tachyscope

        if not str(tachyscope.__file__).startswith(str(folder)):
            code = 98
    finally:
        sys.stdout.flush()
        os._exit(code)


def _last(said: Path) -> str:
    lines = said.read_text(errors="replace").strip().splitlines() if said.exists() else []
    return " | ".join(lines[-2:])


def main() -> int:
    mutants = read()
    wanted = [int(word) for word in sys.argv[1:]] or range(len(mutants))
    chosen, begun, left = [mutants[i] for i in wanted], time.perf_counter(), 0
    for place, code, seconds, last in verdicts(chosen):
        left += code != FAILED
        word = "killed" if code == FAILED else f"LEFT ({code})"
        print(f"{wanted[place]:3} {word:9} {seconds:5.1f} s  {chosen[place]}  [{last[-150:]}]")
    print(f"{len(chosen)} faults in {time.perf_counter() - begun:.0f} s, {left} left")
    return left


if __name__ == "__main__":
    sys.exit(main())
