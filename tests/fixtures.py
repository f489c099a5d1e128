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
def rng():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def own_policies(monkeypatch):
    """Policies that a test registers are gone after it."""
    from tachyscope.core import policy

    for question in policy.QUESTIONS:
        policy.policies(question)  # what is there, is there
        monkeypatch.setitem(policy._REGISTERED, question, dict(policy._REGISTERED[question]))


@pytest.fixture
def serve_by_triton(monkeypatch):
    """Let operations be served by their Triton kernels on a CPU too, where those are interpreted."""
    from tachyscope.kernels import device, dispatch

    def serve(*names):
        monkeypatch.setattr(device, "DEVICES", ("cpu", *device.DEVICES))
        for name in names:
            rows = tuple(row._replace(takes=lambda: True) for row in dispatch.TABLE[name].rows)
            monkeypatch.setitem(dispatch.TABLE, name, dispatch.TABLE[name]._replace(rows=rows))

    return serve
