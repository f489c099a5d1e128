"""Layers compiled once: one program for all of them, and what it gives is what they gave."""

import pytest
import torch
from toys import open_session

import tachyscope as ts
from tachyscope.measure.rates import Clock, rates
from tachyscope.models.toys import toy_chunks
from tachyscope.models.wan.stages import EAGER, compiled

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def counters():
    from torch._dynamo.utils import counters  # a second of importing, for these tests alone

    torch._dynamo.reset()
    compiled.cache_clear()
    counters.clear()
    yield counters
    torch._dynamo.reset()
    compiled.cache_clear()


def latents(model, plan, chunks, size=None):
    session = open_session(model, plan, prompt="a red room", size=size)
    with torch.inference_mode():
        made = []
        for _ in range(chunks):
            made.append(model.sample(session, [0, 1, 2]))
            session.commit()
    return torch.cat(made, 2)


@pytest.mark.parametrize("plan", ["dense", "live cache=dedup:budget=9f attention=ann:read=0.7"])
def test_a_compiled_model_makes_the_same_video(plan):
    model, plain = toy_chunks(), toy_chunks()
    model.transformer.compile_layers("aot_eager")
    torch.testing.assert_close(latents(model, plan, 3), latents(plain, plan, 3))


def test_all_layers_chunks_and_passes_share_one_program(counters):
    model = toy_chunks()
    model.transformer.compile_layers("aot_eager")
    latents(model, "dense", 3)
    assert counters["stats"]["unique_graphs"] == len(EAGER)
    assert not counters["graph_break"]
    # a second model and another plan run what is there, another size its own
    other = toy_chunks(seed=1)
    other.transformer.compile_layers("aot_eager")
    latents(other, "cache=window:budget=6f text=pads", 2)
    assert counters["stats"]["unique_graphs"] == len(EAGER)
    latents(other, "dense", 1, size=(32, 48))
    assert counters["stats"]["unique_graphs"] == 2 * len(EAGER)
    assert not counters["graph_break"]


def played(model, plan, size=None, then=()):
    """What a clock tells of a video of ten chunks."""
    rows = []
    with Clock() as clock:
        for chunk in ts.rollout(model, plan, frames=30, size=size, prompt="a", then=then):
            clock.lap(chunk)
            rows.append(chunk.stats)
    return rows


@pytest.mark.parametrize("plan", ["stock", "fast", "live"])
def test_nothing_is_compiled_once_a_stream_is_warm(plan):
    """A prompt that changes, and sizes that were met before, find their programs."""
    model = toy_chunks()
    model.transformer.compile_layers("aot_eager")
    first = played(model, plan, then=[(15, "a blue room")])
    assert first[0]["programs"] > 0 and rates(first)["recompiled"] == 0
    assert sum(row.get("programs", 0) for row in first) == first[0]["programs"]
    other = played(model, plan, size=(32, 48), then=[(15, "a blue room")])
    assert other[0]["programs"] > 0 and rates(other)["recompiled"] == 0
    for size in (None, (32, 48)):
        again = played(model, plan, size=size, then=[(15, "a blue room")])
        assert not any(row.get("programs", 0) for row in again)


def test_a_compiled_model_still_learns():
    model = toy_chunks()
    model.transformer.compile_layers("aot_eager")
    block = model.transformer.blocks[0]
    x, time = torch.randn(1, 6, 96), torch.randn(1, 1, 6, 96)
    block.prefill(lambda layer, q, k, v: (q.sum() + k.sum() + v.sum()).backward(), 0, x, time)
    assert block.self_attn.k.weight.grad is not None
