"""Work spread over processes: they end with their parent, and one that fails costs no other."""

import os
import signal
import subprocess
import sys

import pytest


def test_work_is_spread_over_processes_that_end_with_their_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import sys, time
from tachyscope.io.process import run_command
from tachyscope_lab.processes import spread
def prepare(word):
    pass
def double(x):
    if x == 9:
        time.sleep(60)
    return 2 * x
def command():
    for found in spread(double, [9, 1, 2], 2, prepare, "ready", in_order=False):
        print(found, flush=True)
if __name__ == "__main__":
    sys.exit(run_command(command))
""")
    run = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert [run.stdout.readline() for _ in range(2)] == ["2\n", "4\n"]
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert (run.returncode, out, err) == (130, "", "tachyscope: interrupted\n")


def test_a_worker_that_is_killed_is_one_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys
from tachyscope.io.process import run_command
from tachyscope_lab.processes import spread
def prepare():
    pass
def die(x):
    os._exit(9)
if __name__ == "__main__":
    sys.exit(run_command(lambda: list(spread(die, [1, 2], 2, prepare))))
""")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("tachyscope: one of 2 worker processes was ended from outside")


@pytest.mark.slow
def test_a_task_that_fails_or_ends_its_process_costs_no_other(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os
from tachyscope_lab.processes import spread_safely
def prepare():
    pass
def work(x):
    if x == 2:
        os._exit(9)
    if x == 3:
        raise ValueError("three")
    return 10 * x
def tasks():
    for x in range(1, 7):
        print("begin", x, flush=True)
        yield x
if __name__ == "__main__":
    results = dict(spread_safely(work, tasks(), 2, prepare))
    print({x: results[x] for x in sorted(results)})
""")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    assert lines[:2] == ["begin 1", "begin 2"] and len(lines) == 7, ran.stderr
    assert lines[-1].startswith("{1: 10, 2: TachyscopeError('one of 2 worker processes was ended")
    assert lines[-1].endswith("3: ValueError('three'), 4: 40, 5: 50, 6: 60}")
