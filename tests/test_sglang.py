"""SGLang's diffusion server by a plan: its own video where dense, and nothing where not asked for."""

import importlib
import inspect
import logging
import os
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import hosts_sglang as own
import pytest
import torch
from hosts_sglang import Installed, Recorded, stores, video

from tachyscope.core.errors import TachyscopeError
from tachyscope.integrations.sglang import ATTENTION, MODEL, STAGE, VARIABLE, register

DENSE = 1e-5
WINDOW = "cache=window:budget=9f,sink=0 text=none"


def error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture
def host(monkeypatch):
    return Recorded(monkeypatch)


@pytest.fixture
def plan(host, monkeypatch):
    """Puts a plan to work, as a process of the server does."""

    def start(name):
        monkeypatch.setenv(VARIABLE, name)
        register()
        host.apply()

    return start


def made(host, frames=12, room=30, **more):
    kept = stores(host, room)
    return torch.cat(list(video(host, kept, frames, **more)), 2), kept


def test_an_installed_plugin_does_nothing_unless_it_is_given_a_plan(host, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = type(host.model).forward
    register()
    assert type(host.model).forward is before
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["sglang.multimodal_gen.plugins"]
    assert pkgutil.resolve_name(entries["tachyscope"]) is register


def test_dense_makes_the_servers_own_video_and_allocates_no_cache_beside(host, plan):
    theirs, _ = made(host)
    plan("dense")
    ours, kept = made(host)
    assert error(ours, theirs) < DENSE
    assert all(not store.k.numel() and store.cache_size == 30 * own.TOKENS for store in kept)


def test_the_servers_window_is_ours(host, plan):
    theirs, _ = made(host, 24, room=9)
    plan(WINDOW)
    assert error(made(host, 24, room=9)[0], theirs) < DENSE


def test_two_requests_do_not_meet_and_a_cache_serves_one_after_the_other(host, plan, caplog):
    plan("cache=window:budget=6f,sink=0 text=none")
    alone, kept = made(host)
    (other, _) = made(host, seed=2)
    pairs = zip(*(video(host, stores(host, 30), seed=seed) for seed in (1, 2)), strict=True)
    first, second = (torch.cat(chunks, 2) for chunks in zip(*pairs, strict=True))
    assert torch.equal(first, alone) and torch.equal(second, other)
    for store in kept:
        store.reset_indices()
    with caplog.at_level(logging.INFO, "tachyscope"):
        assert torch.equal(torch.cat(list(video(host, kept)), 2), alone)
    assert "read 70 % of all pairs" in caplog.text


def test_models_with_attention_of_their_own_run_as_ever(host, plan):
    class Other(own.CausalWanSelfAttention):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    host.model = own.CausalWanTransformer3DModel(Other).eval()
    host.stage.transformer = host.model
    theirs, _ = made(host)
    plan("live")
    assert torch.equal(made(host)[0], theirs)


def test_attention_that_differs_is_refused_at_the_first_pass(host, plan, monkeypatch):
    inner = own.turn
    monkeypatch.setattr(own, "turn", lambda x, freqs: 2 * inner(x, freqs))
    plan("dense")
    with pytest.raises(TachyscopeError, match=f"differs from the server's .*: unset {VARIABLE}"):
        made(host)


def test_positions_that_are_not_the_videos_own_are_refused(host, plan):
    plan("dense")
    with pytest.raises(TachyscopeError, match="frame 0 takes its positions from frame 8"):
        made(host, offset=8)


@pytest.mark.parametrize("wrong", ["nope", "dense replay=every_k:k=2"])
def test_a_wrong_plan_ends_the_process_in_one_line(plan, wrong):
    """An exception of a plugin is logged by SGLang, and the server would go on without it."""
    with pytest.raises(SystemExit, match=f"{VARIABLE}: .*(no plan 'nope'|leave replay out)"):
        plan(wrong)


# The rest needs the package, whose wheel imports CUDA builds of torchvision and of sgl-kernel.
CHECKS = "dense", WINDOW


@pytest.mark.slow
@pytest.mark.parametrize("plan", CHECKS)
def test_the_installed_package_makes_its_own_video(plan):
    """In a process of its own: what SGLang imports changes the interpreter."""
    ran = subprocess.run(
        [sys.executable, __file__, plan], capture_output=True, text=True,
        env=os.environ | {VARIABLE: plan},
    )  # fmt: skip
    if ran.returncode == 77:
        pytest.skip(ran.stderr.splitlines()[-1])
    assert ran.returncode == 0, ran.stderr


def check_installed(plan, monkeypatch):
    host = Installed(monkeypatch)
    for path, recorded in ((MODEL, own.KINDS[MODEL]), (ATTENTION, own.KINDS[ATTENTION])):
        module, _, name = path.rpartition(".")
        real = getattr(sys.modules[module], name)
        assert list(inspect.signature(real.forward).parameters) == list(
            inspect.signature(recorded.forward).parameters
        )
    assert hasattr(host.stage, "_allocate_causal_kv_cache") and STAGE.endswith(
        type(host.stage).__name__
    )
    room = 9 if "window" in plan else 30
    theirs, _ = made(host, 24, room)
    register()
    host.apply()
    ours, kept = made(host, 24, room)
    assert error(ours, theirs) < DENSE and not kept[0].k.numel()


if __name__ == "__main__":
    try:
        importlib.import_module("sglang.multimodal_gen.runtime.distributed")
    except Exception as fault:
        print(f"SGLang cannot be imported: {fault}", file=sys.stderr)
        sys.exit(77)
    check_installed(sys.argv[1], pytest.MonkeyPatch())
