"""Caches of other papers: each rule against one written out entry by entry."""

import pytest
import torch
from streams import CHUNKS, ROPE, play, session

from tachyscope.observers import Observer


class Written(Observer):
    """The frames that were committed of the first layer: unrotated keys, and values."""

    def __init__(self):
        self.frames, self.now = [], ()

    def on_write(self, ctx, q, k, v):
        if ctx.layer == 0:
            self.now = (k.clone(), v.clone())

    def on_commit(self, ctx, n):
        k, v = (x[:, :, :n].split(ctx.shape.tokens_per_frame, 2) for x in self.now)
        self.frames += zip(k, v, strict=True)


def held(at, name):
    return getattr(at.layers[0], name)[:, :, : at.past]


def rotated(k, time):
    """A frame's keys [B, H, N, D] as they are at a time."""
    pos = CHUNKS.positions(time, 1).expand(len(k), 1, -1, 3)
    return ROPE.rotate(k, pos)


@pytest.mark.parametrize("average", ["all", "place"])
def test_memrope_holds_the_sink_two_running_means_and_the_newest(average):
    rates, seen = {"long": 0.05, "short": 0.4}, Written()
    plan = f"cache=memrope:budget=9f,sink=2,average={average},long=0.05,short=0.4"
    at = session(CHUNKS, plan, observers=[seen])
    memory, gone = {}, 2
    for chunk in range(7):
        play(at, 1, seed=chunk)
        frames = seen.frames
        if at.past == len(frames) * CHUNKS.tokens_per_frame:
            continue
        # 9f: sink 2, memory 2, window 3, now 2
        left, gone = range(gone, len(frames) - 3), len(frames) - 3
        mean = [torch.stack([frames[i][j] for i in left]).mean(0) for j in range(2)]
        if average == "all":
            mean = [x.mean(2, keepdim=True).expand_as(x) for x in mean]
        for name, rate in rates.items():
            old = memory.get(name, mean)
            memory[name] = [(1 - rate) * x + rate * y for x, y in zip(old, mean, strict=True)]
        want = [*frames[:2], memory["long"], memory["short"], *frames[gone:]]
        start = len(frames) - len(want)
        keys = [rotated(k, start + i) for i, (k, _) in enumerate(want)]
        torch.testing.assert_close(held(at, "k"), torch.cat(keys, 2))
        torch.testing.assert_close(held(at, "v"), torch.cat([v for _, v in want], 2))
    assert gone == 11
