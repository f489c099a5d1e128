"""Sessions of one GPU: CUDA graphs in turns, and snapshots that are copied beside them."""

import time

import numpy as np
import pytest
import torch

import tachyscope as ts
from tachyscope.serve import protocol
from tachyscope.serve.engine import make_engine
from tachyscope.serve.limits import Limits
from tachyscope.serve.live import Show
from tachyscope.serve.snapshots import Snapshots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLAN = "cache=dedup:budget=9f"
CHUNKS = 12


def test_sessions_in_turns_make_what_rollouts_make(tmp_path):
    """A snapshot of every chunk: one is copied while another session's graph is recorded."""
    model = ts.load("toy-chunks", device="cuda")
    engine = make_engine(model, "toy-chunks", Snapshots(str(tmp_path)), PLAN, Limits(), 10**9, 1)
    shown = [{}, {}, {}]
    engine.start()

    def play(seed):
        def tell(event):
            if isinstance(event, Show):
                shown[seed][event.header.chunk] = event.frames

        return engine.open(protocol.Open(seed=seed, pace="free"), tell)

    try:
        lives = [engine.call(lambda seed=seed: play(seed)).result() for seed in range(len(shown))]
        while min(map(len, shown)) < CHUNKS:
            assert not any(live.ended for live in lives)
            time.sleep(0.01)
        replayed = [live.lane.stream.runner.replayed for live in lives]
        live = lives[0]
        saved = engine.call(lambda: engine.keeper.is_saved(live)).result()
        state = engine.keeper.load(live, live.saved[-1])
        chunk = live.saved[-1]
    finally:
        engine.stop()
    assert all(replayed) and saved
    for seed, frames in enumerate(shown):
        with ts.open(model, PLAN, seed=seed) as stream:
            for i in range(CHUNKS):
                assert np.array_equal(frames[i], stream.step().frames)
    with ts.open(model, PLAN, seed=0) as stream:
        for _ in range(chunk):
            stream.step()
        wanted = stream.snapshot()
    assert wanted.keys() == state.keys()
    assert all(torch.equal(wanted[name].cpu(), state[name]) for name in wanted)
