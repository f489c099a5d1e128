"""cache=bank store=fp8: what is resident are float8 codes, which attention reads as they are."""

import dataclasses

import pytest
import torch
from faults import refused
from streams import CHUNKS, assert_same, draw, play, play_pass, session

from tachyscope.core.kv_allocation import empty_layer, slots_for
from tachyscope.core.plan import Plan
from tachyscope.kernels.attention_fp8 import attention_fp8, dequantise
from tachyscope.kernels.attention_fp8 import torch as stock
from tachyscope.kernels.attention_fp8.reference import attention_fp8_reference
from tachyscope.kernels.attention_fp8.torch import FP8
from tachyscope.store.coded_bank import CodedBank

ANN = "attention=ann:k=24,block=2,tile=3"
NATIVE = f"cache=bank:resident=10f,budget=60f {ANN}"
SMALL = f"{NATIVE} store=fp8"
WHOLE = "cache=bank:resident=10f,budget=60f attention=ann:read=1,block=2,tile=3 store=fp8"
WEIGHED = (
    "cache=bank:resident=12f,budget=20f store=fp8 "
    "attention=ann:k=30,block=5,tile=3,past_weight=4,order=time"
)
PLANS = pytest.mark.parametrize("plan", [SMALL, WHOLE, WEIGHED])


def counted(at):
    at.count_bank()
    return at.meter.take()


def off(a, b):
    return [float((x[0] - y[0]).norm() / x[0].norm()) for x, y in zip(a, b, strict=True)]


@PLANS
def test_it_reads_what_a_native_bank_reads_within_the_rounding(plan):
    """The index is of native keys: so the first choices are the same, and as much is read."""
    native, coded = session(CHUNKS, plan.replace("store=fp8", "")), session(CHUNKS, plan)
    apart = off(play(native, 14), play(coded, 14))
    # the first chunk has no past, and 12 entries of the second are no codes yet
    assert max(apart[:6]) == 0 and 0.01 < max(apart[12:]) < 0.06
    mine, theirs = counted(coded), counted(native)
    for name in ("blocks_wanted", "blocks_fetched", "blocks_denied", "pairs_dense"):
        assert mine[name] == theirs[name], name
    # a block that the newest entries fill in part counts whole where it is listed
    assert theirs["pairs"] - mine["pairs"] in (0, 864)


@PLANS
def test_an_answer_is_the_definition_over_the_codes_and_what_is_none(plan, monkeypatch):
    """Entry by entry in float64, whatever is listed, in every pass of a full bank."""
    at, seen = session(dataclasses.replace(CHUNKS, layers=1), plan), []
    from tachyscope.attention import ann

    real = ann.listed_attention_fp8

    def held_to_it(q, k, v, past, centre, kept=()):
        read = real(q, k, v, past, centre, kept)
        now = stock.quantise_entries(k, v, past.entries.block, None, centre)
        want = attention_fp8_reference(*stock.quantise_queries(q), now, k.shape[2], None, past)
        assert (read.out - want).norm() < 2e-3 * want.norm()
        seen.append(read.pairs)
        return read

    monkeypatch.setattr(ann, "listed_attention_fp8", held_to_it)
    play(at, 8)
    assert len(seen) == 18  # of the last six chunks


@PLANS
def test_resident_slots_hold_the_bytes_of_host_memory(plan):
    at = session(CHUNKS, plan)
    play(at, 14)
    for layer in at.memory.layers:
        bank, own, layout = layer.bank, layer.bank.tensors, layer.bank.layout
        assert isinstance(bank, CodedBank)
        assert layer.k.shape[2] == layer.slots - layout.resident_slots * layout.block
        size = (layout.resident_slots, layout.block)
        k, v = (own[f"places_{x}"].unflatten(2, size) for x in "kv")
        for b, h, slot in torch.cartesian_prod(*map(torch.arange, k.shape[:3])).tolist():
            block = int(own["block"][b, h, slot])
            assert bank.slot_of[b, h, block] == slot
            assert torch.equal(k[b, h, slot], bank.host["k"][b, h, block])
            assert torch.equal(v[b, h, slot], bank.host["v"][b, h, block])
            assert torch.equal(own["places_scale"][b, h, slot], own["block_scale"][b, h, block])
            length = int(own["length"][b, h, block])
            held = own["log_count"][b, h, layout.first + slot * layout.block :][: layout.block]
            assert (held[:length] == layout.log_weight).all()
            assert (held[length:] == -torch.inf).all()


def test_codes_are_of_the_entries_that_were_sealed():
    """In order of time, with room for all, every block is in the slot that it was sealed in."""
    plan = "cache=bank:resident=40f store=fp8 attention=ann:k=24,block=2,tile=3,order=time"
    at, keys, values = session(CHUNKS, plan), [], []
    rng = torch.Generator().manual_seed(0)
    for _ in range(6):
        pos = at.shape.positions(at.memory.latent_frame, 2)
        for step in range(3):
            play_pass(at, draw(rng, at.shape, 12, at.dtype), pos, step, 3)
        now = at.memory.layers[0].now(at.present.ctx)
        keys.append(now[0].clone())
        values.append(now[1].clone())
        at.commit()
    bank, k, v = at.memory.layers[0].bank, torch.cat(keys, 2), torch.cat(values, 2)
    first, n = bank.layout.first, bank.layout.resident_blocks(at.memory.past) * 2
    found = dequantise(bank._entries(), torch.float64)
    centre = bank.tensors["centre"].unsqueeze(2)
    assert (centre.squeeze(2) - k[:, :, first : first + 12].mean(2)).abs().max() < 1e-6
    for got, want in ((found[0] + centre, k), (found[1], v)):
        error = (got[:, :, :n] - want[:, :, first : first + n]).norm() / want.norm()
        assert 0.005 < error < 0.04
    ctx = at.present.ctx._replace(past=at.memory.past, start=0, tokens=0)
    keys = at.memory.layers[0].keys(ctx)
    assert torch.equal(keys[:, :, :first], k[:, :, :first])
    assert torch.equal(keys[:, :, first + n :], k[:, :, first + n :])
    assert (keys - k).norm() / k.norm() < 0.04


def test_a_first_pass_reads_the_scales_of_what_stands_there():
    """A block that is prefetched must not lend its scale to the block that it replaces."""
    at = session(CHUNKS, SMALL)
    play(at, 12)
    bank = at.memory.layers[0].bank
    before = bank.tensors["places_scale"].clone()
    tiles = bank.work["count"].shape[2]
    rows = bank.layout.index_rows
    mass = torch.rand(1, 4, tiles, rows, generator=torch.Generator().manual_seed(3))
    mass[..., bank.layout.sink + int(bank.tensors["used"]) : -bank.layout.newest_blocks] = -1.0
    bank.choose(mass, bank.layout.room, 12, True, 3)
    bank.fetch(at.memory.layers[0])
    now, later = (bank.work[name] >= 0 for name in ("now", "later"))
    assert now.any() and later.any()
    scale = bank.tensors["places_scale"]
    assert torch.equal(scale[~now], before[~now]) and not torch.equal(scale[now], before[now])
    bank.prefetch(at.memory.layers[0])
    want = bank.tensors["block_scale"].gather(
        2, bank.tensors["block"].long().unsqueeze(-1).expand(-1, -1, -1, 2)
    )
    assert torch.equal(scale, want)


@pytest.mark.parametrize("keep", [0, 1])
def test_a_rewound_bank_of_codes_goes_on_as_a_new_one(keep):
    at, new = (
        session(CHUNKS, f"{SMALL},sink=1".replace("store=fp8,sink=1", "store=fp8")) for _ in "ab"
    )
    play(at, 6)
    at.memory.rewind(at.memory.latent_frame - keep, keep)
    if not keep:
        assert_same(play(at, 6, seed=1), play(new, 6, seed=1))
    own = at.memory.layers[0].bank.tensors
    assert int(own["used"]) == (0 if keep else int(new.memory.layers[0].bank.tensors["used"]))
    assert keep or torch.equal(own["centre"], new.memory.layers[0].bank.tensors["centre"])


def test_42_latent_frames_of_codes_take_about_the_bytes_of_21():
    """At the size of Wan 1.3B, 480x832, bfloat16: of 42 the sink, the newest and the chunk under
    way, five in all, are no codes, so that it is a tenth more."""
    shape = dataclasses.replace(
        CHUNKS, heads=12, kv_heads=12, head_dim=128, grid=(30, 52), chunk=3, passes=5
    )

    def taken(changes):
        plan = Plan.parse(f"fast {changes}", "chunks")
        slots = slots_for(plan, shape, (), 240)
        layer = empty_layer(plan, shape, slots, torch.bfloat16, torch.device("meta"), 240)
        codes = [x.nbytes for x in layer.bank.resident_codes]
        host = sum(x.nbytes for x in layer.host_tensors().values())
        return layer.k.nbytes + layer.v.nbytes + sum(codes), host

    native, host = taken("cache=bank:resident=21f,host=native")
    coded, half = taken("cache=bank:resident=42f,host=native store=fp8")
    assert 1.05 < coded / native < 1.15
    assert half == host / 2
    assert taken("cache=bank:resident=38f,host=native store=fp8")[0] < 1.03 * native


@pytest.mark.parametrize(
    "plan, told",
    [
        (f"cache=bank:host=int8 store=fp8 {ANN}", "host=native"),
        (f"cache=bank store=int8 {ANN}", "leave it out, and set host"),
        ("cache=bank store=fp8", "attention=dense"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused_in_one_line(plan, told):
    refused(lambda: session(CHUNKS, plan), "bank", told)


def test_without_a_past_of_codes_the_present_is_read_as_ever():
    at = session(CHUNKS, SMALL)
    out = play(at, 1)
    assert_same(out, play(session(CHUNKS, NATIVE), 1))
    q, k, v = (torch.randn(1, 2, 8, 12, generator=torch.Generator().manual_seed(0)) for _ in "qkv")
    assert attention_fp8(q, k, v).dtype == q.dtype and FP8.itemsize == 1
