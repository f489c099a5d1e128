"""The same plans on a CUDA device: no wait inside a chunk, and what the CPU gives."""

from contextlib import contextmanager

import pytest
import torch
from streams import CHUNKS, TOKENS, Square, draw, play, play_pass, play_prompt, session

import tachyscope as ts
from tachyscope.kernels.attention import attention, attention_reference
from tachyscope.meter import Meter

pytestmark = [
    pytest.mark.gpu,
    # torch says once that the mode which finds waits is a prototype
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = {"chunks": CHUNKS, "tokens": TOKENS}
PLANS = [
    "cache=keep_all",
    "cache=window:budget=8f,positions=reindexed attention=ann:read=0.6,block=2",
    "cache=merge:budget=8f attention=ann:read=0.6,block=2 replay=attentive:share=0.5,age=2",
    "cache=merge:budget=9f,match=key_value,keep=newest attention=window:tokens=9,sink=2",
    "cache=merge:threshold=0.7,heads=each",
    "attention=ann:top_p=0.7,block=2",
    "replay=every_k:k=2",
    "replay=attentive:threshold=0.1,age=2",
]


@contextmanager
def no_waits():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("plan", PLANS)
def test_cuda_gives_what_the_cpu_gives(plan, kind):
    want = play(session(SHAPES[kind], plan), 8)
    got = play(session(SHAPES[kind], plan, device="cuda"), 8)
    for x, y in zip(got, want, strict=True):
        for left, right in zip(x, y, strict=True):
            torch.testing.assert_close(left.cpu(), right, rtol=1e-6, atol=1e-6)


# equal signs make equal scores, and which of them is read first is the device's own
LSH = "attention=ann:read=0.6,block=2,hash=lsh"


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("plan", [*PLANS, LSH])
def test_nothing_inside_a_chunk_waits_for_the_device(plan, kind):
    shape = SHAPES[kind]
    at = session(shape, plan, device="cuda", frames=20)
    rng = torch.Generator().manual_seed(0)
    if shape.causal:
        play_prompt(at, rng)
    mlp = Square()
    for chunk in range(6):
        layers = draw(rng, shape, shape.chunk_tokens)
        layers = [[x.to("cuda") for x in part] for part in layers]
        pos = shape.positions(at.frame, shape.chunk, "cuda")
        torch.cuda.synchronize()
        with no_waits():
            for step in range(shape.passes):
                if shape.causal:
                    for i in range(shape.chunk_tokens):
                        one = [[t.narrow(-2, i, 1) for t in part] for part in layers]
                        play_pass(at, one, pos[i : i + 1], 0, 1, mlp)
                else:
                    play_pass(at, layers, pos, step, shape.passes, mlp)
            at.commit()
        assert at.chunk == chunk + 1


@pytest.mark.parametrize("name", ["toy-chunks", "toy-tokens"])
@pytest.mark.parametrize("plan", ["dense", "fast", "fastcar"])
def test_a_whole_model_makes_a_chunk_without_a_wait(name, plan):
    model = ts.load(name, device="cuda")
    session = ts.open_session(model, plan, prompt="a red room", frames=30)
    with torch.inference_mode():
        for _ in range(4):
            with no_waits():
                latents = model.sample(session, [1] * session.shape.chunk)
                session.commit()
    assert latents.is_cuda


def test_a_gate_on_cuda_is_metered_as_simulated():
    at = session(TOKENS, "replay=attentive:threshold=-99", device="cuda")
    play(at, 4)
    row = at.meter.take()
    assert row["rows_replayed"] == 0
    assert row["simulated_rows_replayed"] == row["rows_eligible"] > 0


def test_a_fixed_share_on_cuda_is_real():
    at, mlp = session(CHUNKS, "replay=attentive:share=0.5", device="cuda"), Square()
    play(at, 4, mlp=mlp)
    row = at.meter.take()
    assert row["rows_computed"] == mlp.rows
    assert row["rows_replayed"] == row["rows_eligible"] / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_with_weights_equals_its_reference(dtype):
    rng = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, 12, 500, 128, generator=rng, device="cuda", dtype=dtype)
    k, v = (
        torch.randn(1, 12, 3001, 128, generator=rng, device="cuda", dtype=dtype) for _ in range(2)
    )
    logw = torch.rand(1, 1, 3001, generator=rng, device="cuda") * 4
    logw[:, :, 2500:] = -torch.inf
    got, want = attention(q, k, v, logw), attention_reference(q, k, v, logw)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_spans_are_measured_without_a_wait():
    meter = Meter("cuda")
    with no_waits(), meter.span("work"):
        torch.ones(1000, 1000, device="cuda") @ torch.ones(1000, 1000, device="cuda")
    assert meter.take()["work_ms"] > 0
