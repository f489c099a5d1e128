"""An observer is told of every call, and what it watches is a plain session's."""

import pytest
import torch
from streams import CHUNKS, TOKENS, assert_same, play, session

from tachyscope.core.observers import Observer, Timing


class Log(Observer):
    """Notes each call by name and layer."""

    def __init__(self):
        self.calls, self.merges, self.opened = [], [], 0

    def on_open(self, session):
        self.opened += 1

    def on_pass(self, ctx):
        self.calls.append(("pass", ctx.pass_index))

    def on_write(self, ctx, q, k, v):
        self.calls.append(("write", ctx.layer))

    def on_attend(self, ctx, q, k, v, rotated_q, out):
        assert rotated_q.shape == q.shape == out.shape
        self.calls.append(("attend", ctx.layer))

    def on_mlp(self, ctx, x, y):
        assert x.shape == y.shape
        self.calls.append(("mlp", ctx.layer))

    def on_merge(self, ctx, source, root):
        self.merges.append((ctx.chunk, ctx.layer, source.clone(), root.clone()))

    def on_commit(self, ctx, n):
        self.calls.append(("commit", n))

    def on_committed(self):
        self.calls.append(("committed", 0))


def test_calls_come_in_the_order_of_a_chunk():
    log = Log()
    play(session(CHUNKS, "cache=keep_all", observers=[log]), 1)
    layer = [[("write", i), ("attend", i), ("mlp", i)] for i in range(2)]
    one = [[("pass", step), *layer[0], *layer[1]] for step in range(3)]
    assert log.calls == [*one[0], *one[1], *one[2], ("commit", 12), ("committed", 0)]


@pytest.mark.parametrize("shape", [CHUNKS, TOKENS], ids=["chunks", "tokens"])
def test_what_is_watched_is_what_a_plain_session_gives(shape):
    plan = "cache=merge:budget=8f attention=ann:read=0.6,block=2 replay=attentive:share=0.5"
    plain, watched = session(shape, plan), session(shape, plan, observers=[Log(), Timing()])
    assert_same(play(watched, 6), play(plain, 6))
    mine, theirs = plain.meter.take(), watched.meter.take()
    assert mine.items() <= theirs.items()
    spans = {f"{name}_ms" for name in ("attend", "mlp", "commit", "index", "read_0")}
    assert spans <= theirs.keys() and not spans & mine.keys()


def test_an_observer_comes_and_goes():
    log, at = Log(), session(CHUNKS, "cache=keep_all")
    at.watch(log)
    play(at, 1)
    told = len(log.calls)
    at.unwatch(log)
    play(at, 1)
    assert log.opened == 1 and len(log.calls) == told > 0
    at.watch(log)
    at.reset()
    assert log.opened == 3


@pytest.mark.parametrize("cache", ["merge:budget=6f", "dedup:budget=6f", "merge:threshold=0.7"])
def test_every_entry_that_joins_another_is_told(cache):
    """All that came, less those that joined another, are held."""
    log = Log()
    at = session(CHUNKS, f"cache={cache},sink=0", observers=[log])
    play(at, 8)
    joined = {(chunk, layer) for chunk, layer, *_ in log.merges}
    assert {layer for _, layer in joined} == {0, 1}
    kept = at.memory.past
    told = sum(
        (source != root).sum().item() / source.shape[1]
        for _, layer, source, root in log.merges
        if layer == 0
    )
    if "threshold" in cache:
        live = (at.memory.layers[0].log_count[:, :, :kept] > -torch.inf).sum().item() / 2
        assert at.memory.total_entries - told == live
    else:
        assert at.memory.total_entries - told == kept
    for _, _, source, root in log.merges:
        assert (root <= source).all()
