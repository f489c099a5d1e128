"""attention=similar: the latent frames most like the newest are read, and weighed alike."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from faults import refused
from streams import CHUNKS, assert_same, draw, play, play_pass, session

from tachyscope.core.ranks import alone

ONE = dataclasses.replace(CHUNKS, chunk=1, batch=2)
PLAN = "cache=bank:resident=6f,budget=20f attention=similar:newest=1"
BY_THREES = "cache=bank:resident=9f,budget=9f attention=similar:newest=1"


def walk(at, numbers):
    """A latent frame for each number, of values that the number says."""
    for number in numbers:
        play(at, 1, seed=number)


def ages(at, row=0):
    bank = at.memory.layers[0].bank
    return sorted(bank.ages[row, bank.resident[row].long()].tolist())


def test_frames_like_the_newest_and_beside_those_are_read():
    at = session(ONE, PLAN)
    # latent frame 0 is the sink; frame n of the bank is latent frame n + 1
    walk(at, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3])
    play_pass(at, draw(torch.Generator().manual_seed(1), at.shape, 6), at_next(at), 0, 3)
    assert ages(at, 0) == ages(at, 1) == [1, 2, 3]
    layer, bank = at.memory.layers[0], at.memory.layers[0].bank
    for place, group in enumerate(bank.resident[0].tolist()):
        slots = slice((1 + place) * 6, (2 + place) * 6)
        assert torch.equal(layer.k[0, :, slots], bank.host["k"][0, :, group].to(layer.k.dtype))


def at_next(at):
    return at.shape.positions(at.memory.latent_frame, 1)


def chosen_by_definition(bank, row):
    """Ages of the three groups nearest to the newest frame, one by one and in float64."""
    held = sorted((age, i) for i, age in enumerate(bank.ages[row].tolist()) if age >= 0)
    keys = [bank.tensors["key"][row, i].double() for _, i in held]
    mean, query = torch.stack(keys).mean(0), bank.tensors["tail"][row, 0].double()
    cosines = [F.cosine_similarity(key - mean, query - mean, dim=0).item() for key in keys]
    best = [max(cosines[max(0, i - 1) : i + 2]) for i in range(len(cosines))]
    order = sorted(range(len(best)), key=lambda i: (-best[i], i))
    return sorted(held[i][0] for i in order[:3])


def test_frames_are_chosen_by_what_they_do_not_have_in_common():
    at = session(ONE, PLAN.replace("20f", "9f"))
    rng = torch.Generator().manual_seed(0)
    common = 3 * torch.randn(ONE.batch, ONE.kv_heads, 6, ONE.head_dim, generator=rng)
    for number in range(16):
        bank, expected = at.memory.layers[0].bank, None
        if number > 4:
            expected = [chosen_by_definition(bank, row) for row in range(ONE.batch)]
        layers = draw(rng, at.shape, 6)
        for part in layers:
            part[2] += common
        for step in range(3):
            play_pass(at, layers, at_next(at), step, 3)
        assert expected is None or [ages(at, row) for row in range(ONE.batch)] == expected
        at.commit()


def test_it_is_chosen_once_a_chunk_in_its_first_pass():
    at = session(ONE, PLAN)
    walk(at, [0, 1, 2, 3, 4, 5, 6, 7, 3])
    rng = torch.Generator().manual_seed(1)
    seen = []
    for step in range(3):
        before = at.memory.layers[0].bank.work["counters"].clone()
        play_pass(at, draw(rng, at.shape, 6), at_next(at), step, 3)
        seen.append(bool((at.memory.layers[0].bank.work["counters"] != before).any()))
    assert seen == [True, False, False]


def test_a_key_is_the_means_of_a_frames_parts_to_what_signs_lose():
    """Cosines of keys are those of the means, within the error of so many signs."""
    shape = dataclasses.replace(CHUNKS, chunk=2, grid=(8, 8), heads=16, kv_heads=16, head_dim=16)
    at = session(shape, "cache=bank:resident=9f attention=similar:newest=1", torch.float32)
    rng = torch.Generator().manual_seed(3)
    values = torch.randn(1, 16, 8 * 64, 16, generator=rng)
    values[:, :, 4 * 64 :] += values[:, :, : 4 * 64]  # frames 4 to 7 are half like 0 to 3
    frames = values.transpose(1, 2).flatten(2).unflatten(1, (8, 4, 2, 4, 2))
    means = frames.mean((3, 5)).flatten(2)[0]
    layer, found = at.memory.layers[0], []
    for first in range(0, 8, 2):
        layer.v[:, :, :128] = values[:, :, first * 64 : first * 64 + 128]
        here = SimpleNamespace(layer=layer, ctx=SimpleNamespace(past=0), mean_heads=alone)
        layer.bank.make_keys(here, 128)
        found.append(layer.bank.now[0])
    keys = torch.cat(found)
    assert keys.shape == (8, 1024)

    def cosines(x):
        return F.cosine_similarity(x[:, None], x[None], dim=-1)

    assert (cosines(keys) - cosines(means)).abs().max() < 0.1


def test_what_is_retrieved_weighs_and_the_rest_does_not():
    at = session(ONE, PLAN + ",past_weight=5")
    walk(at, range(8))
    play_pass(at, draw(torch.Generator().manual_seed(1), at.shape, 6), at_next(at), 0, 3)
    weights = at.memory.layers[0].bank.log_weights(at.memory.past + 6)[0, 0].view(-1, 6)[:, 0]
    torch.testing.assert_close(weights, torch.tensor([0.0, *[math.log(5)] * 3, 0.0, 0.0]))


@pytest.mark.parametrize("seed", range(3))
def test_of_alike_frames_the_newer_leaves_a_full_bank(seed):
    at = session(ONE, PLAN.replace("20f", "8f"))
    walk(at, [90, *range(seed, seed + 4), *[50 + seed] * 12])
    held = sorted(at.memory.layers[0].bank.ages[0].tolist())
    # the first views stay, and the newest three of what stood still since the fifth
    assert held == [0, 1, 2, 3, 4, 12, 13, 14]


def test_a_video_of_a_batch_is_the_video_made_alone():
    """One shows three scenes in turn, the other five, in a bank of eight latent frames."""
    plan, alone = PLAN.replace("20f", "8f"), dataclasses.replace(ONE, batch=1)
    both, one = session(ONE, plan), session(alone, plan)
    scenes = [draw(torch.Generator().manual_seed(i), ONE, 6) for i in range(5)]
    for number in range(20):
        mine, others = scenes[number % 3], scenes[number % 5]
        layers = [
            [torch.cat([x[:1], y[1:]]) for x, y in zip(a, b, strict=True)]
            for a, b in zip(mine, others, strict=True)
        ]
        pos = at_next(both)
        for step in range(3):
            got = play_pass(both, layers, pos, step, 3)
            want = play_pass(one, [[x[1:] for x in part] for part in layers], pos, step, 3)
            assert_same([[x[1:] for x in part] for part in got], want, 1e-6)
        both.commit(), one.commit()
    held = [x.memory.layers[0].bank.ages[-1].tolist() for x in (both, one)]
    assert held[0] == held[1]


def restarted():
    """A session that forgot its past between a chunk's denoising passes and its clean one."""
    shape = dataclasses.replace(CHUNKS, chunk=3, batch=2)
    at = session(shape, BY_THREES)
    walk(at, range(6))
    known = at.state(host=False), [segment(at, 0)]
    layers, pos = draw(torch.Generator().manual_seed(7), shape, 18), at.memory.positions(3)
    for step in range(2):
        play_pass(at, layers, pos, step, 3)
    at.memory.forget()
    out = play_pass(at, layers, pos, 2, 3)
    at.commit()
    return at, known, (layers, pos, out)


def segment(at, since):
    parts = [layer.bank.segment(since) for layer in at.memory.layers]
    return {f"layers.{i}.{k}": x for i, part in enumerate(parts) for k, x in part.items()}


def test_after_a_restart_the_clean_pass_weighs_nothing():
    at, _, (layers, pos, out) = restarted()
    new = session(at.shape, BY_THREES)
    new.memory.latent_frame = 18
    assert_same(out, play_pass(new, layers, pos, 2, 3))


def test_what_a_bank_holds_after_a_restart_is_saved_and_restored_by_segments():
    at, (_, segments), _ = restarted()
    walk(at, range(10, 13))
    since = int(at.memory.layers[0].bank.tensors["sealed"])
    walk(at, range(20, 24))
    other = session(at.shape, BY_THREES)
    first = 16  # latent frames sealed before the restart
    other.restore(at.state(host=False), [*segments, segment(at, first), segment(at, since)])
    assert_same(play(at, 2, seed=30), play(other, 2, seed=30))
    for mine, theirs in zip(at.memory.layers, other.memory.layers, strict=True):
        assert all(torch.equal(x, theirs.bank.host[name]) for name, x in mine.bank.host.items())


def test_what_it_cannot_serve_is_refused_in_one_line():
    refused(lambda: session(ONE, "attention=similar"), "reads a bank")
    refused(lambda: session(ONE, PLAN.replace("=1", "=0")), "no frame to compare with")
    refused(lambda: session(ONE, PLAN.replace("6f", "3f")), "raise resident to 4f")
    rolling = dataclasses.replace(ONE, rolling_frames=2)
    refused(lambda: session(rolling, PLAN), "chunks overlap")
