"""Faults put into a copy of the core one at a time: the quick tests must see every one of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import mutated, read

SCRIPT = Path(__file__).with_name("mutants.py")


def test_the_line_of_every_fault_stands_once():
    faults = read()
    assert len(faults) >= 40
    for fault in faults:
        assert mutated(fault)


@pytest.mark.slow
def test_every_fault_is_seen():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{len(read())} faults" in done.stdout
