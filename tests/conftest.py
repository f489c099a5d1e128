"""What every test gets: NaN where nothing was written, one thread, a seeded generator."""

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    # read when a kernel is decorated, so set before any kernel module is imported
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # as a shell starts what runs in the background; children of tests would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
with torch.device("meta"):
    # torch lists its constructors once, at first use: they must not be the poisoned ones
    torch.empty(0)


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Memory handed out uninitialised is NaN, so that an output nobody wrote shows."""

    def poisoned(make):
        def call(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture
def no_plots(monkeypatch):
    """A report without its plots, which take most of its time: tests/test_report.py has them."""
    monkeypatch.setattr("tachyscope.report._plots", lambda *_: [])


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)
