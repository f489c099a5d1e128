"""How a command ends: its exit code, one line, and no file left, whatever ends it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.process import NO_MEMORY, run_command

# a command that begins a file, says so, and waits
WAITS = """
import sys, time
from tachyscope.io.files import replacing
from tachyscope.io.process import run_command
def command():
    with replacing(sys.argv[1]) as part:
        part.write_text("begun")
        print("begun", flush=True)
        for _ in range(600):  # a signal just before one sleep is noticed before the next
            time.sleep(0.1)
sys.exit(run_command(command))
"""


def start(code, *words, **streams):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | streams
    return subprocess.Popen([sys.executable, "-c", code, *words], **pipes)


# tests that run in the background inherit ignored signals
HEARS = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


@pytest.mark.parametrize(
    "name, said", [("SIGTERM", "stopped by SIGTERM"), ("SIGHUP", "stopped by SIGHUP"), ("SIGINT", "interrupted")],
)  # fmt: skip
def test_a_signal_removes_what_was_begun(name, said, tmp_path):
    run = start(HEARS + WAITS, str(tmp_path / "a"))
    try:
        assert run.stdout.readline() == "begun\n" and len(os.listdir(tmp_path)) == 1
        number = getattr(signal, name)
        run.send_signal(number)
        _, err = run.communicate(timeout=30)
    finally:
        run.kill()
    assert (run.returncode, err) == (128 + number, f"tachyscope: {said}\n")
    assert os.listdir(tmp_path) == []


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + WAITS
    run = start(code, str(tmp_path / "a"))
    try:
        run.stdout.readline()
        run.send_signal(signal.SIGHUP)
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=30)
    finally:
        run.kill()
    assert err == "tachyscope: stopped by SIGTERM\n"


def test_handlers_are_given_back_and_other_threads_set_none():
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in signals]
    seen = []
    assert run_command(lambda: seen.append(signal.getsignal(signal.SIGTERM))) == 0
    assert seen[0] is not before[1]
    assert [signal.getsignal(number) for number in signals] == before
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_command, lambda: None).result() == 0


@pytest.mark.parametrize(
    "wait", [0.1, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 0.3))]
)
def test_ctrl_c_while_packages_are_imported_is_one_line(wait):
    # the signal waits until the guard is set: before that no one could tell of it
    code = (
        "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "from tachyscope import __main__ as command\n"
        "command.guard_start(); signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\n"
        "print('here', flush=True)\n"
        "sys.argv = ['tachyscope', 'list', 'models']; sys.exit(command.main())"
    )
    run = start(code)
    try:
        run.stdout.readline()
        time.sleep(wait)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert (run.returncode, out, err) == (130, "", "tachyscope: interrupted\n")


def test_torchs_threads_wait_asleep_unless_the_user_says_otherwise():
    code = (
        "import sys; from tachyscope import __main__ as command\n"
        "sys.argv = ['tachyscope', '--version']\n"
        "assert 'torch' not in sys.modules\n"
        "try: command.main()\n"
        "except SystemExit: pass\n"
        "import os; print(os.environ['GOMP_SPINCOUNT'])"
    )
    for given, wanted in ((None, "2000"), ("7", "7")):
        env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        env |= {"GOMP_SPINCOUNT": given} if given else {}
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert ran.stdout.split()[-1] == wanted, ran.stderr


def test_an_import_that_turns_the_interrupt_into_something_else_is_interrupted(capsys):
    def command():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ImportError("cannot import name 'x'") from None

    assert run_command(command) == 130
    assert capsys.readouterr().err == "tachyscope: interrupted\n"


def test_a_closed_pipe_is_quiet():
    code = (
        "import sys; from tachyscope.io.process import run_command\n"
        "sys.exit(run_command(lambda: [print(i) for i in range(10**5)]))"
    )
    with start(code) as run:
        assert run.stdout.readline() == "0\n"
        run.stdout.close()
        assert (run.stderr.read(), run.wait(30)) == ("", 141)


def test_a_full_disk_behind_stdout_is_one_line():
    code = (
        "import sys; from tachyscope.io.process import run_command\n"
        "sys.exit(run_command(lambda: print('x' * {})))"
    )
    for count in (10, 10**6):  # left to the end of the command, or met in its midst
        with open("/dev/full", "w") as full:
            run = start(code.format(count), stdout=full)
            _, err = run.communicate(timeout=30)
        line = "tachyscope: standard output cannot be used (no space left on device): choose another place\n"
        assert (run.returncode, err) == (2, line)


def test_stdout_that_is_shut_is_no_fault():
    code = (
        "import os, sys; from tachyscope.io.process import run_command\n"
        "sys.stdout = None; sys.exit(run_command(lambda: print('x')))"
    )
    run = start(code)
    assert run.communicate(timeout=30) == ("", "") and run.returncode == 0


def test_letters_that_stdout_lacks_are_escaped():
    code = (
        "import sys; from tachyscope.io.process import run_command\n"
        r"sys.exit(run_command(lambda: print('caf\udce9 …')))"
    )
    run = start(code, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert run.communicate(timeout=30) == ("caf\\udce9 \\u2026\n", "")


def raising(fault):
    def command():
        raise fault

    return command


@pytest.mark.parametrize(
    "fault, code, line",
    [
        (TachyscopeError("frames must be 1 or more,\n got 0"), 2, "frames must be 1 or more, got 0"),
        (MemoryError(), 2, NO_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2, NO_MEMORY),
        (PermissionError(13, "Permission denied", "/x"), 2, "/x cannot be used (permission denied): choose another place"),
        (OSError(36, "File name too long", "y" * 5000), 2, f"{'y' * 133}…{'y' * 66} cannot be used (file name too long): choose another place\n"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero: this is a fault of tachyscope's own: run the command again with --traceback and report what it shows"),
        (RecursionError(), 1, "RecursionError: RecursionError: this is"),
        (TachyscopeError("no plan '\x1b[31mred\x07'"), 2, r"no plan '\x1b[31mred\x07'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_whatever_ends_a_command_is_one_line(fault, code, line, capsys):
    assert run_command(raising(fault)) == code
    said = capsys.readouterr()
    assert (
        said.out == "" and said.err.startswith(f"tachyscope: {line}") and said.err.count("\n") == 1
    )
    assert run_command(raising(fault), show_traceback=True) == code
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):") and f"tachyscope: {line}" in said


def test_long_input_is_cut_in_its_middle():
    message = str(TachyscopeError(f"no plan {'x' * 10**5!r}; there are: dense, fast"))
    assert message.startswith("no plan 'xxx") and message.endswith("xxx'; there are: dense, fast")
    assert len(message) < 260
    message = str(TachyscopeError(f"got {'x ' * 10**5}: give one"))
    assert message.endswith(": give one") and len(message) <= 1001
