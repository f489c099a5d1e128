"""Caches of other papers: each rule against one written out entry by entry."""

import dataclasses
import itertools
import math

import pytest
import torch
from faults import refused
from streams import CHUNKS, ROPE, draw, play, play_pass, session

from tachyscope.core.observers import Observer


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
    return getattr(at.memory.layers[0], name)[:, :, : at.memory.past]


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
        if at.memory.past == len(frames) * CHUNKS.tokens_per_frame:
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


class Queries(Observer):
    """Rotated queries of the first layer, by pass of the present chunk."""

    def on_pass(self, ctx):
        if ctx.pass_index == 0:
            self.passes = []

    def on_attend(self, ctx, q, k, v, rotated_q, out):
        if ctx.layer == 0:
            self.passes.append(rotated_q)


@pytest.mark.parametrize("budget, keep", [(10, 7), pytest.param(8, 7, marks=pytest.mark.slow)])
def test_deep_forcing_keeps_the_sink_the_newest_and_what_their_queries_attend_to(budget, keep):
    seen, asked = Written(), Queries()
    plan = f"cache=deep_forcing:budget={budget}f,keep={keep},sink=2,newest=3"
    at = session(CHUNKS, plan, observers=[seen, asked])
    tokens, place = CHUNKS.tokens_per_frame, CHUNKS.positions(0, 1)[:, 1:]
    entries, clean, compressed = [], [], 0  # entries: key, value [H, D], and position

    def turned(entry):
        return ROPE.rotate(entry[0][None, :, None], entry[2].view(1, 1, 1, 3))[0, :, 0]

    for chunk in range(9):
        play(at, 1, seed=chunk)
        if len(entries) + 2 * tokens >= budget * tokens:
            # newest 3: the present chunk of 2, and one frame before it
            queries = torch.cat([asked.passes[0], clean[-1]], 2)[0]  # [H, n, D]
            score = []
            for entry in (middle := entries[2 * tokens : -tokens]):
                keys = turned(entry).repeat_interleave(2, 0)  # two query heads a key head
                score.append(float(torch.einsum("hnd,hd->", queries, keys)))
            best = sorted(range(len(middle)), key=lambda i: -score[i])[: (keep - 5) * tokens]
            kept = [*entries[: 2 * tokens], *(middle[i] for i in sorted(best))]
            start = entries[-1][2][0] - (keep - 3)
            for i, (k, v, pos) in enumerate(kept):
                kept[i] = k, v, torch.tensor([start + i // tokens, *pos[1:]])
            entries, compressed = [*kept, *entries[-tokens:]], compressed + 1
        clean += asked.passes[-1].split(tokens, 2)
        for t, (k, v) in list(enumerate(seen.frames))[-2:]:
            for i in range(tokens):
                pos = torch.tensor([t, *place[i]])
                entries.append((k[0, :, i], v[0, :, i], pos))
        keys = torch.stack([turned(entry) for entry in entries], 1)
        torch.testing.assert_close(held(at, "k")[0], keys)
        values = torch.stack([v for _, v, _ in entries], 1)
        torch.testing.assert_close(held(at, "v")[0], values)
    assert compressed == {10: 3, 8: 6}[budget]


def pruned(frames, keep):
    """A group's entries: all of its first frame, and of the others those least like that."""
    tokens = frames[0][0].shape[2]
    flat = [[k[:, :, i].flatten(1) for i in range(tokens)] for k, _ in frames]  # [B, H * D] each
    mean = torch.stack(flat[0]).mean(0)
    cosine = {
        (f, i): torch.cosine_similarity(flat[f][i], mean, dim=1)
        for f in range(1, len(frames))
        for i in range(tokens)
    }
    rows = []
    for row in range(len(mean)):
        least = sorted(cosine, key=lambda at: float(cosine[at][row]))
        kept = sorted(least[: (len(frames) - 1) * math.ceil(keep * tokens)])
        kept = [*((0, i) for i in range(tokens)), *kept]
        rows.append([torch.stack([frames[f][j][row, :, i] for f, i in kept], 1) for j in range(2)])
    return [torch.stack(x) for x in zip(*rows, strict=True)]


def nearest(now, groups, count, row):
    """Groups by how far their cameras stood from now's and how they were turned, half each."""

    def mean(poses):
        return torch.stack(poses)[:, row].mean(0)

    apart, angle = {}, {}
    for number, (poses, _) in groups.items():
        apart[number] = float((mean(poses)[:, 3] - mean(now)[:, 3]).square().sum())
        trace = float((mean(poses)[:, :3].T @ mean(now)[:, :3]).trace())
        angle[number] = math.acos(max(-1.0, min(1.0, (trace - 1) / 2)))
    worst = [max(x.values()) or 1.0 for x in (apart, angle)]
    far = {n: 0.5 * apart[n] / worst[0] + 0.5 * angle[n] / worst[1] for n in groups}
    return set(sorted(groups, key=lambda n: far[n])[:count])


@pytest.mark.parametrize("chunk, group", [pytest.param(1, 3, marks=pytest.mark.slow), (2, 2)])
def test_worldkv_reads_the_groups_that_were_seen_from_the_most_alike_poses(chunk, group):
    shape = dataclasses.replace(CHUNKS, chunk=chunk, batch=2, poses=True)
    plan = f"cache=worldkv:retrieve={2 * group},keep=0.4,sink=1,newest=2,budget={5 * group}f"
    seen, rng = Written(), torch.Generator().manual_seed(0)
    at = session(shape, plan, observers=[seen])
    layout = at.plan.cache.host_layout(shape)
    poses, groups, checked = [], {}, 0
    for number in itertools.count():
        turn = torch.linalg.qr(torch.randn(2, chunk, 3, 3, generator=rng))[0]
        turn[..., 0] *= torch.linalg.det(turn).unsqueeze(-1)
        now = torch.cat([turn, torch.randn(2, chunk, 3, 1, generator=rng)], -1)
        at.set_poses(now)
        frames = [(rotated(k, i), v) for i, (k, v) in enumerate(seen.frames)]
        sealed = max(0, len(frames) - 3) // group
        for i in range(max(groups, default=-1) + 1, sealed):
            span = slice(1 + i * group, 1 + (i + 1) * group)
            groups[i] = poses[span], pruned(frames[span], 0.4)
        if sealed >= 2:
            last = {i: groups[i] for i in sorted(groups)[-5:]}  # the bank holds five
            bank = at.memory.layers[0].bank
            ages = bank.ages.gather(1, bank.resident.long())
            for row in range(2):
                stand = [int(age) for age in ages[row]]
                assert set(stand) == nearest(now.unbind(1), last, 2, row)
                for name, j in (("k", 0), ("v", 1)):
                    want = [frames[0][j][row], *(groups[i][1][j][row] for i in stand)]
                    want += [frame[j][row] for frame in frames[1 + sealed * group :]]
                    torch.testing.assert_close(held(at, name)[row], torch.cat(want, 1))
                checked += 1
        if sealed > 8:
            break
        play(at, 1, seed=number)
        poses += now.unbind(1)
    assert checked > 12 and layout.kept == (1 + 3 * (group - 1) / 6) * 6


def test_worldkv_wants_poses_whole_groups_and_dense_attention():
    faults = {
        "cache=worldkv:retrieve=3": "whole groups of 2 latent frames",
        "cache=worldkv attention=ann:k=64": "got attention=ann",
        "cache=worldkv store=int8": "cannot serve store=int8",
    }
    for plan, words in faults.items():
        refused(lambda plan=plan: session(dataclasses.replace(CHUNKS, poses=True), plan), words)
    refused(lambda: session(CHUNKS, "cache=worldkv"), "does not know its camera's poses")


def test_the_frame_most_like_another_leaves_the_older_one_first():
    """Against the rule, pair by pair; the sink and the newest stay."""
    at = session(CHUNKS, "cache=frames:budget=8f,sink=1,newest=1")
    rng = torch.Generator().manual_seed(0)
    held = [[] for _ in range(CHUNKS.layers)]  # (frame, values) as the rule keeps them
    for chunk in range(9):
        layers = draw(rng, CHUNKS, 12)
        pos = CHUNKS.positions(at.memory.latent_frame, 2)
        for step in range(CHUNKS.passes):
            play_pass(at, layers, pos, step, CHUNKS.passes)
        at.commit()
        for i, (_, _, v, _) in enumerate(layers):
            held[i] += [(2 * chunk + j, x.flatten()) for j, x in enumerate(v.split(6, 2))]
            while len(held[i]) > 6:
                last = len(held[i]) - 1
                pairs = [(a, b) for a in range(last + 1) for b in range(a + 1, last + 1)]
                leaves = {p: p[0] if p[0] > 0 else p[1] for p in pairs}
                pairs = [p for p in pairs if 0 < leaves[p] < last]
                like = [torch.cosine_similarity(held[i][a][1], held[i][b][1], 0) for a, b in pairs]
                del held[i][leaves[pairs[int(torch.stack(like).argmax())]]]
            times = at.memory.layers[i].pos[0, 0, : at.memory.past : 6, 0].tolist()
            assert times == [frame for frame, _ in held[i]]
            kept = at.memory.layers[i].v[:, :, : at.memory.past].split(6, 2)
            assert all(torch.equal(x.flatten(), y) for x, (_, y) in zip(kept, held[i], strict=True))


def test_a_budget_of_frames_is_whole_frames():
    refused(lambda: session(CHUNKS, "cache=frames:budget=50"), "frames", "50", "21f")
