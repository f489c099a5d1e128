"""A past that is weighed: in the choice and in the reading, by every policy that can."""

import dataclasses
import math

import pytest
import torch
from faults import refused
from streams import CHUNKS, TOKENS, assert_same, draw, play, session

from tachyscope.kernels.attention.reference import attention_reference

# how to read all of the past, weighed by 4 but for a first latent frame and a newest one
READ_ALL = [
    "attention=ann:read=1,block=2,past_weight=4",
    "attention=ann:read=1,block=1,tile=1,past_weight=4",
    "attention=ann:read=1,block=2,past_weight=4,order=time",
    "cache=merge:budget=40f attention=ann:read=1,block=2,past_weight=4,order=time",
    "attention=ann:k=9999,block=5,hash=lsh,past_weight=4",
    "attention=ann:read=0.3,dense_layers=1,past_weight=4",
    "attention=window:tokens=9999,sink=6,past_weight=4,newest=1",
    "cache=bank:resident=40f attention=ann:read=1,past_weight=4",
    "cache=bank:resident=40f attention=ann:k=240,block=2,past_weight=4",
    "cache=bank:resident=40f attention=ann:k=240,block=2,past_weight=4,order=time",
    *[
        f"cache={cache}:budget=40f attention=dense:past_weight=4,newest=1"
        for cache in ("window", "merge", "dedup")
    ],
]
DENSE = "attention=dense:past_weight=4,newest=1"


def one_pass(at, given=False):
    """What attention answers to a pass of random queries behind what was played."""
    shape, layers = at.shape, draw(torch.Generator().manual_seed(3), at.shape, 12, at.dtype)
    step, noise = (2, 0.0) if given else (0, 1.0)
    at.begin(shape.positions(at.memory.latent_frame, shape.chunk), step, 3, (noise,) * shape.chunk)
    return [at.attend(i, *part[:3]) for i, part in enumerate(layers)]


@pytest.mark.parametrize("newest", [0, 1, 3])
def test_the_score_of_a_weighed_entry_gets_the_weights_logarithm(newest):
    at = session(CHUNKS, f"attention=dense:past_weight=4,newest={newest}")
    play(at, 4)
    for i, (layer, out) in enumerate(zip(at.memory.layers, one_pass(at), strict=True)):
        time = layer.pos[0, 0, : 10 * 6, 0]
        weight = torch.where((time >= 1) & (time < 8 - newest), math.log(4.0), 0.0)
        q = layer_queries(at, i)
        k, v = (x[:, :, : 10 * 6] for x in (layer.k, layer.v))
        want = attention_reference(q, k, v, weight.view(1, 1, -1))
        torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)


def layer_queries(at, layer):
    """The rotated queries of `one_pass`."""
    from tachyscope.kernels.rotary import apply_rotary

    q = draw(torch.Generator().manual_seed(3), at.shape, 12, at.dtype)[layer][0]
    return apply_rotary(None, q, *at.present.cos_sin, at.rope)


@pytest.mark.parametrize("plan", READ_ALL)
def test_every_policy_that_reads_all_reads_the_same(plan):
    assert_same(play(session(CHUNKS, plan), 5), play(session(CHUNKS, DENSE), 5), 1e-9)


@pytest.mark.parametrize("plan", [DENSE, *READ_ALL[:3]])
def test_a_token_model_weighs_its_past_too(plan):
    assert_same(play(session(TOKENS, plan), 5), play(session(TOKENS, DENSE), 5), 1e-9)
    plain = play(session(TOKENS, "attention=dense"), 5)
    assert not torch.allclose(plain[-1][0], play(session(TOKENS, plan), 5)[-1][0])


@pytest.mark.parametrize("plan", [DENSE, *READ_ALL])
def test_given_frames_are_read_with_weight_1(plan):
    at = session(CHUNKS, plan)
    play(at, 5)
    outs = one_pass(at, given=True)
    # the same entries, read without weights
    for i, (layer, out) in enumerate(zip(at.memory.layers, outs, strict=True)):
        end = 12 * 6
        want = attention_reference(layer_queries(at, i), layer.k[:, :, :end], layer.v[:, :, :end])
        torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("plan", ["", "cache=bank:resident=40f "])
def test_blocks_are_chosen_by_their_weighed_mass(plan):
    one, four = (
        session(CHUNKS, f"{plan}attention=ann:k=24,block=2,tile=3{more}")
        for more in ("", ",past_weight=4")
    )
    for at in (one, four):
        play(at, 5)
    plain, weighed = (
        (at.memory.layers[0].bank.tensors if plan else at.memory.layers[0].own["attention"])[
            "weight"
        ]
        for at in (one, four)
    )
    blocks = 10 * 6 // 2
    added = (weighed - plain)[0, 0, :blocks]
    assert added[:3].eq(0).all() and added[-3:].eq(0).all()
    torch.testing.assert_close(added[3:-3], torch.full((blocks - 6,), math.log(4.0)))


def test_what_is_fetched_is_weighed_as_what_stayed():
    """Blocks that left the device and came back, of which some are parts."""
    shape = dataclasses.replace(CHUNKS, grid=(1, 5))
    plan = "cache=bank:resident=11f,budget=40f attention=ann:k=30,block=2,tile=3,past_weight=4"
    at = session(shape, plan)
    play(at, 14)
    at.count_bank()
    assert at.meter.take()["blocks_fetched"] > 0
    for layer in at.memory.layers:
        bank = layer.bank
        held = bank.tensors["log_count"][:, :, bank._resident_span].unflatten(
            2, (-1, bank.layout.block)
        )
        length = bank.tensors["length"].gather(2, bank.tensors["block"].long())
        live = torch.arange(bank.layout.block) < length.unsqueeze(-1)
        assert torch.equal(held[live], torch.full_like(held[live], math.log(4.0)))
        assert held[~live].eq(-math.inf).all()


def test_a_weight_out_of_bounds_is_refused():
    refused(lambda: session(CHUNKS, "attention=dense:past_weight=0"), "past_weight")
    refused(lambda: session(CHUNKS, "attention=ann:k=24,past_weight=1e9"), "past_weight")


@pytest.mark.parametrize("cache", ["", "cache=bank:resident=40f "])
def test_in_order_of_time_a_block_is_so_many_entries_in_a_row(cache):
    at = session(CHUNKS, f"{cache}attention=ann:k=24,block=2,tile=3,order=time")
    plain = session(CHUNKS, "attention=dense")
    play(at, 5)
    play(plain, 5)
    for layer, other in zip(at.memory.layers, plain.memory.layers, strict=True):
        keys = layer.k[:, :, : at.memory.past]
        own = layer.bank.tensors if cache else layer.own["attention"]
        means = own["code"][:, :, : at.memory.past // 2] * own["scale"][:, :, : at.memory.past // 2]
        want = keys.unflatten(2, (-1, 2)).mean(3).float()
        torch.testing.assert_close(means, want, rtol=0.02, atol=0.02)
        if layer is at.memory.layers[0]:  # whose queries do not yet differ
            assert torch.equal(keys, other.k[:, :, : at.memory.past])
