"""Sessions of one GPU: CUDA graphs in turns, and snapshots that are copied beside them."""

import time

import numpy as np
import pytest
import torch
import toys

import tachyscope as ts
from tachyscope.serve import protocol
from tachyscope.serve.engine import make_engine
from tachyscope.serve.limits import Limits
from tachyscope.serve.live_session import ChunkFrames
from tachyscope.serve.snapshots import Snapshots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLAN = "cache=dedup:budget=9f"
CHUNKS = 12


@pytest.mark.parametrize(
    "plan",
    [
        "cache=window:budget=9f",
        "cache=dedup:budget=9f attention=ann:read=0.5,block=32,tile=64 text=pads",
        "cache=merge:budget=9f replay=attentive:share=0.5",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frames_leave_between_two_graphs(plan, dtype):
    """Cut in two, a chunk's launches make what they make in one graph, and what single ones do."""
    model, keys = toys.wide_chunks(device="cuda", dtype=dtype), "wsa.wwsaaw"
    cut, whole, single = (ts.open(model, plan, seed=3) for _ in range(3))
    single.runner.record = None
    shown = []
    got = [cut.step(key, shown.append if i != 7 else None) for i, key in enumerate(keys)]
    assert len(cut.runner._recorded.graphs) == 2
    assert [chunk.stats["cuda_graph"] for chunk in got][-3:] == [1, 1, 1]
    assert len(shown) == len(keys) - 1  # one was not asked for
    for other in (whole, single):
        for one, two in zip(got, [other.step(key) for key in keys], strict=True):
            assert np.array_equal(one.frames, two.frames)
            for name in set(one.stats) | set(two.stats):
                if not name.endswith("_ms") and name != "cuda_graph":
                    assert one.stats[name] == two.stats[name], name
        ours, theirs = cut.snapshot(), other.snapshot()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(whole.runner._recorded.graphs) == 1


def test_sessions_in_turns_make_what_rollouts_make(tmp_path):
    """A snapshot of every chunk: one is copied while another session's graph is recorded."""
    model = ts.load("toy-chunks", device="cuda")
    engine = make_engine(model, "toy-chunks", Snapshots(str(tmp_path)), PLAN, Limits(), 10**9, 1)
    shown = [{}, {}, {}]
    engine.start()

    def play(seed):
        def tell(event):
            if isinstance(event, ChunkFrames):
                shown[seed][event.header.chunk] = event.frames

        return engine.open(protocol.Open(seed=seed, pace="free"), tell)

    try:
        lives = [engine.call(lambda seed=seed: play(seed)).result() for seed in range(len(shown))]
        while min(map(len, shown)) < CHUNKS:
            assert not any(live.ended for live in lives)
            time.sleep(0.01)
        replayed = [live.lane.stream.runner.replayed for live in lives]
        live = lives[0]
        saved = engine.call(lambda: engine.writer.ensure_saved(live)).result()
        state = engine.writer.load(live, live.saved[-1])
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
