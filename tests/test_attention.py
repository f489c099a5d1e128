import math
import re
from dataclasses import replace

import pytest
import torch
from faults import refused
from streams import CHUNKS, TOKENS, assert_same, play, play_prompt, session

from tachyscope.attention.ann import Ann
from tachyscope.attention.ann_text import AnnText
from tachyscope.attention.dense import DenseText
from tachyscope.attention.pads import Pads
from tachyscope.attention.window import WindowAttention
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.kv_allocation import slots_for
from tachyscope.core.plan import Plan
from tachyscope.core.work import Work
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.block_index import Codes, encode_blocks

OPEN = [
    "attention=window:tokens=999,sink=0",
    "attention=ann:read=1",
    "attention=ann:read=1,hash=lsh,block=5,tile=4",
    "attention=ann:read=1,block=1,tile=1",
    "attention=ann:k=99999,hash=lsh",
    "attention=ann:read=0.5,sink=0,newest=0,dense_layers=1",
    "attention=ann:read=0.5,sink=0,newest=0,dense_passes=1",
]
SHAPES = {"chunks": CHUNKS, "tokens": TOKENS}


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["keep_all", "merge:budget=8f"])
@pytest.mark.parametrize(
    "attention, kind",
    [
        (attention, kind)
        for attention in OPEN
        for kind in SHAPES
        # a token model has one pass, so none that come first
        if not ("dense_passes" in attention and kind == "tokens")
    ],
)
def test_a_wide_open_policy_equals_dense(attention, kind, cache):
    chunks = 5 if kind == "chunks" else 7
    dense = play(session(SHAPES[kind], f"cache={cache}"), chunks)
    got = play(session(SHAPES[kind], f"cache={cache} {attention}"), chunks)
    assert_same(got, dense, 1e-6)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "attention", ["ann:read=0.4,block=2,sink=0", "ann:read=0.4,block=1,tile=1,hash=lsh"]
)
def test_pairs_not_read_are_pairs_not_scored(attention, kind, monkeypatch):
    """What the meter counts is what the kernel was given."""
    import torch.nn.functional as F

    scored = 0
    real = F.scaled_dot_product_attention

    def counting(q, k, v, **kwargs):
        nonlocal scored
        scored += q.shape[:3].numel() * k.shape[2]
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    ctx = session(SHAPES[kind], f"attention={attention}")
    play(ctx, 6)
    row = ctx.meter.take()
    assert row["pairs"] == scored
    assert row["pairs"] < 0.8 * row["pairs_dense"]


def test_read_is_a_share_of_past_blocks_and_the_present_is_always_read():
    ctx = session(CHUNKS, "attention=ann:read=0.5,block=3,tile=12,sink=1,newest=1")
    play(ctx, 10)
    past = ctx.memory.past  # 120 entries, 40 blocks
    ctx.meter.take()
    ctx.begin(CHUNKS.positions(ctx.memory.latent_frame, 2), 0, 3, (1.0, 1.0))
    q = torch.randn(1, 4, 12, 12, dtype=torch.float64)
    ctx.attend(0, q, q[:, :2], q[:, :2])
    assert ctx.meter.take()["pairs"] == 4 * 12 * (past // 2 + 12)


def test_while_a_bounded_cache_fills_a_share_of_it_is_most_of_the_past():
    ctx = session(CHUNKS, "cache=window:budget=14f attention=ann:read=0.5,block=2,tile=2")
    read, tokens = [], CHUNKS.max_pass_tokens
    for _ in range(9):
        past = ctx.memory.past
        play(ctx, 1)
        pairs = ctx.meter.take()["pairs"] / (CHUNKS.passes * CHUNKS.layers * CHUNKS.heads * tokens)
        read.append((past, pairs - tokens))
    # half of the 72 entries that fit before the chunk, never more than are there
    assert read[:4] == [(0, 0), (12, 12), (24, 24), (36, 36)]
    assert all(found == 36 for _, found in read[3:])


def test_k_makes_the_cost_independent_of_context():
    ctx = session(CHUNKS, "attention=ann:k=24,block=3,sink=1,newest=1")
    costs = []
    for chunks in (6, 12):
        play(ctx, chunks)
        ctx.meter.take()
        ctx.begin(CHUNKS.positions(ctx.memory.latent_frame, 2), 0, 3, (1.0, 1.0))
        q = torch.randn(1, 4, 12, 12, dtype=torch.float64)
        ctx.attend(0, q, q[:, :2], q[:, :2])
        costs.append(ctx.meter.take()["pairs"])
        ctx.memory.now = 0
    assert costs[0] == costs[1] == 4 * 12 * (24 + 12)


@pytest.mark.parametrize("hash", ["int8", "lsh"])
def test_the_nearest_entries_are_the_ones_read(hash):
    """Sharp queries, whose mass lies on very few entries: a tenth of the past is enough."""
    ctx = session(
        CHUNKS, f"attention=ann:read=0.1,block=1,tile=1,sink=0,newest=0,hash={hash},bits=256"
    )
    play(ctx, 10, drift=1.0)
    ctx.begin(CHUNKS.positions(ctx.memory.latent_frame, 2), 0, 3, (1.0, 1.0))
    here, (cos, sin) = ctx.memory.layers[0], ctx.present.cos_sin
    # unrotated queries that, once rotated, point at entry 33
    q = ctx.rope.apply(8 * here.k[:, :, 33:34].expand(-1, -1, 12, -1), cos, -sin)
    q = q.repeat_interleave(2, 1)
    small = torch.zeros(1, 2, 12, 12, dtype=torch.float64)
    got = ctx.attend(0, q, small, small)
    used = slice(0, ctx.memory.past + 12)
    want = attention_reference(ctx.rope.apply(q, cos, sin), here.k[:, :, used], here.v[:, :, used])
    torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def test_blocks_of_one_entry_are_chosen_by_their_keys_themselves():
    """By `hash=int8` too, whose codes of 8 bits stand for larger blocks alone."""
    ctx = session(CHUNKS, "attention=ann:k=24,block=1,tile=1,sink=0,newest=0,hash=int8")
    rng = torch.Generator().manual_seed(2)
    play(ctx, 10)
    ctx.begin(CHUNKS.positions(ctx.memory.latent_frame, 2), 0, 3, (1.0, 1.0))
    q = torch.randn(1, 4, 12, 12, dtype=torch.float64, generator=rng)
    got = ctx.attend(0, q, q[:, :2], q[:, :2])
    here, turned = ctx.memory.layers[0], ctx.rope.apply(q, *ctx.present.cos_sin)
    keys, values = (
        x[:, :, : ctx.memory.past + 12].repeat_interleave(2, 1) for x in (here.k, here.v)
    )
    best = (turned @ keys[:, :, : ctx.memory.past].mT).topk(24).indices  # [1, 4, 12, 24]
    own = torch.arange(ctx.memory.past, ctx.memory.past + 12).expand(1, 4, 12, 12)
    ids = torch.cat([best, own], -1)
    for head in range(4):
        for i in range(12):
            read = ids[0, head, i]
            want = attention_reference(
                turned[:, head : head + 1, i : i + 1],
                keys[:, head : head + 1, read],
                values[:, head : head + 1, read],
            )
            torch.testing.assert_close(got[:, head : head + 1, i : i + 1], want)


def test_the_choice_is_made_once_a_chunk():
    ctx = session(CHUNKS, "attention=ann:read=0.3,block=2,tile=4,sink=0,newest=0")
    play(ctx, 8)
    maps = []
    rng = torch.Generator().manual_seed(1)
    for step in range(3):
        ctx.begin(CHUNKS.positions(ctx.memory.latent_frame, 2), step, 3, (1.0, 1.0))
        q = torch.randn(1, 4, 12, 12, dtype=torch.float64, generator=rng)
        ctx.attend(0, q, q[:, :2], q[:, :2])
        maps.append(ctx.memory.layers[0].own["attention"]["map"].clone())
    assert torch.equal(maps[0], maps[1]) and torch.equal(maps[0], maps[2])
    ctx.commit()
    # a given chunk has its clean pass alone, and reads everything: the video rests on it
    ctx.begin(CHUNKS.positions(ctx.memory.latent_frame, 2), 2, 3, (0.0, 0.0))
    ctx.meter.take()
    q = torch.randn(1, 4, 12, 12, dtype=torch.float64, generator=rng)
    ctx.attend(0, q, q[:, :2], q[:, :2])
    assert ctx.meter.take()["pairs"] == 4 * 12 * (ctx.memory.past + 12)


def test_guard_rails_keep_first_passes_and_layers_dense():
    ctx = session(
        CHUNKS, "attention=ann:read=0.2,sink=0,newest=0,block=2,dense_passes=0.3,dense_layers=0.3"
    )
    play(ctx, 6)
    counted = {}
    for step in range(3):
        ctx.begin(CHUNKS.positions(ctx.memory.latent_frame, 2), step, 3, (1.0, 1.0))
        for layer in range(2):
            ctx.meter.take()
            q = torch.randn(1, 4, 12, 12, dtype=torch.float64)
            ctx.attend(layer, q, q[:, :2], q[:, :2])
            counted[step, layer] = ctx.meter.take()["pairs"]
    dense = 4 * 12 * (ctx.memory.past + 12)
    assert [key for key, pairs in counted.items() if pairs == dense] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
    ]


def test_token_window_reads_the_first_live_entries_and_the_newest():
    ctx = session(TOKENS, "attention=window:tokens=4,sink=2")
    play(ctx, 3)
    ctx.begin(TOKENS.positions(ctx.memory.latent_frame, 1)[:1], 0, 1, (0.0,))
    q = torch.randn(2, 4, 1, 12, dtype=torch.float64)
    ctx.meter.take()
    got = ctx.attend(0, q, q[:, :2], q[:, :2])
    assert ctx.meter.take()["pairs"] == 2 * 4 * 6
    here, end = ctx.memory.layers[0], ctx.memory.past + 1
    turned = ctx.rope.apply(q, *ctx.present.cos_sin)
    for row, pads in enumerate(ctx.memory.left_padding):
        ids = [pads, pads + 1, *range(end - 4, end)]
        want = attention_reference(
            turned[row : row + 1], here.k[row : row + 1, :, ids], here.v[row : row + 1, :, ids]
        )
        torch.testing.assert_close(got[row : row + 1], want)


def test_every_row_of_a_token_window_has_its_own_reach():
    """Rows of unequal prompts: the longer one leaves entries out where the shorter has none to."""
    ctx = session(TOKENS, "attention=window:tokens=4,sink=2", lengths=(5, 1))
    play_prompt(ctx, torch.Generator().manual_seed(0))
    apart = 0
    for i in range(6):
        ctx.begin(TOKENS.positions(0, 1)[i : i + 1], 0, 1, (0.0,))
        q = torch.randn(2, 4, 1, 12, dtype=torch.float64)
        got = ctx.attend(0, q, q[:, :2], q[:, :2])
        here, end = ctx.memory.layers[0], ctx.memory.past + i + 1
        turned = ctx.rope.apply(q, *ctx.present.cos_sin)
        read = []
        for row, pads in enumerate(ctx.memory.left_padding):
            ids = sorted({*range(pads, min(pads + 2, end)), *range(max(pads, end - 4), end)})
            keys, values = (x[row : row + 1, :, ids] for x in (here.k, here.v))
            want = attention_reference(turned[row : row + 1], keys, values)
            torch.testing.assert_close(got[row : row + 1], want)
            read.append(len(ids) == end - pads)
        apart += len(set(read)) > 1
    assert apart >= 3


@pytest.mark.parametrize("attention", ["window:tokens=4,sink=2", "ann:read=0.5,block=2"])
def test_a_frame_in_one_pass_reads_as_token_by_token(attention):
    def run(whole):
        ctx = session(TOKENS, f"attention={attention}")
        play(ctx, 3)
        rng = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(2, h, 6, 12, generator=rng, dtype=torch.float64) for h in (4, 2, 2))
        pos = TOKENS.positions(ctx.memory.latent_frame, 1)
        if whole:
            ctx.begin(pos, 0, 1, (0.0,))
            return ctx.attend(0, q, k, v)
        parts = []
        for i in range(6):
            ctx.begin(pos[i : i + 1], 0, 1, (0.0,))
            parts.append(ctx.attend(0, *(x[:, :, i : i + 1] for x in (q, k, v))))
        return torch.cat(parts, 2)

    torch.testing.assert_close(run(True), run(False))


def _prompt(rng, lengths, total=20):
    """Keys and values whose rows are one repeated padding token from their length on."""
    k, v = (
        torch.randn(len(lengths), 3, total, 8, generator=rng, dtype=torch.float64) for _ in "kv"
    )
    for row, n in enumerate(lengths):
        for x in (k, v):
            if n < total:
                x[row, :, n:] = x[row, :, n : n + 1].clone()
    return k, v, torch.randn(len(lengths), 3, 7, 8, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("lengths", [(1,), (0,), (7,), (19,), (20,), (3, 11, 20)])
def test_pads_equals_dense_for_any_prompt_length(rng, lengths):
    k, v, q = _prompt(rng, lengths)
    work = Work()
    dense, pads = DenseText(), Pads()
    text = pads.prepare(k, v, lengths)
    assert text.k.shape[2] == min(20, max(lengths) + 1)
    torch.testing.assert_close(
        pads.attend(q, text, work),
        dense.attend(q, dense.prepare(k, v, lengths), work),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("hash", ["int8", "lsh"])
def test_ann_text_reads_exactly_the_tokens_that_queries_hit(rng, hash):
    k, v, q = _prompt(rng, (12,))
    policy = AnnText(keep=20, hash=hash, bits=3)
    work = Work()
    text = policy.prepare(k, v, (12,))
    hits = policy._hits(q, text.k, text.log_count.expand(-1, 3, -1))
    log_count = text.log_count.expand(-1, 3, -1).masked_fill(
        (hits == 0) & (hits.sum(-1, keepdim=True) > 0), -math.inf
    )
    assert (log_count > -math.inf).sum() < log_count.numel()
    got = policy.attend(q, text, work)
    torch.testing.assert_close(got, attention_reference(q, text.k, text.v, log_count))
    read = work.take().text_pairs / (3 * 7)
    assert read == (log_count > -math.inf).sum(-1).max()


def test_ann_text_keeps_at_most_keep(rng):
    k, v, q = _prompt(rng, (19,))
    work = Work()
    policy = AnnText(keep=2, bits=1, hash="lsh")
    policy.attend(q, policy.prepare(k, v, (19,)), work)
    assert work.take().text_pairs == 3 * 7 * 2


def test_ann_text_with_one_bucket_equals_dense(rng):
    """Queries and keys that all lie on one side of the plane: nothing is dropped."""
    from tachyscope.kernels.hashing import planes

    normal = planes(1, 8, torch.device("cpu"))[:, 0].double()
    k, v, q = _prompt(rng, (12,))
    k, q = (x + 20 * normal / normal.norm() for x in (k, q))
    work = Work()
    policy = AnnText(keep=99, hash="lsh", bits=1)
    got = policy.attend(q, policy.prepare(k, v, (12,)), work)
    want = DenseText().attend(q, DenseText().prepare(k, v, (12,)), work)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "plan, message",
    [
        ("cache=window:budget=12f attention=ann:read=0.1", "raise read to 0.2"),
        ("attention=ann:k=5", "k=5 is below the 12 entries"),
    ],
)
def test_reading_less_than_sink_and_newest_is_refused(plan, message):
    with pytest.raises(TachyscopeError, match=message):
        session(CHUNKS, plan)


@pytest.mark.parametrize("frames", [17, 21, 40])
def test_the_share_that_a_refusal_names_is_not_refused(frames):
    shape = replace(CHUNKS, grid=(30, 52), chunk=3, layers=1, kv_heads=1, heads=1)
    plan = f"cache=window:budget={frames}f attention=ann:read=%s,block=1,tile=1"
    message = refused(lambda: slots_for(Plan.parse(plan % 0.01), shape, (), None), "raise read to")
    advised = re.search(r"raise read to ([\d.]+),", message).group(1)
    assert slots_for(Plan.parse(plan % advised), shape, (), None) == frames * 1560


def test_faulty_settings_are_refused():
    for kwargs, words in [
        ({}, "takes read or k"),
        ({"read": 0.5, "k": 3}, "takes read or k"),
        ({"read": 1.5}, "read must be over 0 and at most 1, got 1.5"),
        ({"read": 0.5, "dense_passes": 2.0}, "dense_passes must be from 0 to 1, got 2.0"),
        ({"read": 0.5, "block": 0}, "block must be from 1 to 4,096, got 0"),
    ]:
        with pytest.raises(TachyscopeError, match=words):
            Ann(**kwargs)
    with pytest.raises(TachyscopeError, match="tokens must be from 1 to"):
        WindowAttention(tokens=0)
    with pytest.raises(TachyscopeError, match="keep must be from 1 to"):
        AnnText(keep=0)


def test_blocks_and_tiles_are_parts_of_a_latent_frame():
    plan = Plan.parse("attention=ann:read=0.5")
    for grid, block, tile in (
        ((8, 8), 4, 8),
        ((30, 52), 128, 128),
        ((90, 160), 128, 128),
        ((2, 3), 1, 1),
    ):
        shape = replace(CHUNKS, grid=grid)
        own = plan.attention.tensors(shape, 40 * shape.tokens_per_frame, torch.device("meta"))
        assert own["log_count"].shape[2] // own["code"].shape[2] == block
        assert own["map"].shape[2] == -(-shape.max_pass_tokens // tile)


@pytest.mark.parametrize("cache", ["merge:budget=8f", "window:budget=8f"])
def test_weights_are_told_in_the_order_of_keys(cache, rng):
    ctx = session(CHUNKS, f"cache={cache} attention=ann:read=0.6,block=2,dense_layers=0.4")
    play(ctx, 6)
    ctx.begin(CHUNKS.positions(ctx.memory.latent_frame, CHUNKS.chunk), 0, 3, (1.0,) * CHUNKS.chunk)
    q = torch.randn(1, CHUNKS.heads, 5, CHUNKS.head_dim, generator=rng, dtype=ctx.dtype)
    for i, layer in enumerate(ctx.memory.layers):
        moment, policy = ctx.present.layers[i], ctx.plan.attention
        back = replace(layer, k=layer.k.clone(), v=layer.v.clone())
        policy.restore_order(moment._replace(layer=back), ctx.memory.past)
        assert torch.equal(back.k, layer.k) == (i == 0)  # the first layer reads everything
        seen = slice(0, moment.ctx.end)
        got = attention_reference(
            q, layer.k[:, :, seen], layer.v[:, :, seen], policy.log_weights(moment)
        )
        want = attention_reference(
            q, back.k[:, :, seen], back.v[:, :, seen], back.log_count[:, :, seen]
        )
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [CHUNKS, TOKENS], ids=["chunks", "tokens"])
def test_a_cache_that_appends_keeps_its_blocks(shape):
    """Behind what is indexed only new entries are ordered, and blocks describe what they hold."""
    ctx = session(shape, "attention=ann:read=0.5,block=2")
    play(ctx, 5)
    policy, before = (
        ctx.plan.attention,
        [layer.k[:, :, : ctx.memory.past].clone() for layer in ctx.memory.layers],
    )
    known = policy._between(shape, ctx.memory.prompt, ctx.memory.past).stop
    play(ctx, 3)
    for old, layer in zip(before, ctx.memory.layers, strict=True):
        assert torch.equal(layer.k[:, :, :known], old[:, :, :known])
        assert not torch.equal(layer.k[:, :, known : old.shape[2]], old[:, :, known:])
        blocks = policy._cut(shape, ctx.memory.prompt, ctx.memory.past)
        noted = [layer.own["attention"][name].clone() for name in ("code", "scale", "weight")]
        for name in ("code", "scale", "weight"):
            layer.own["attention"][name].zero_()
        weights = layer.own["attention"]["log_count"][:, :, : blocks.all * blocks.size]
        codes = Codes(*(layer.own["attention"][name] for name in ("code", "scale", "weight")))
        encode_blocks(layer.past(ctx.memory.past), weights, blocks.size, codes)
        for name, want in zip(("code", "scale", "weight"), noted, strict=True):
            assert torch.equal(
                layer.own["attention"][name][:, :, : blocks.all], want[:, :, : blocks.all]
            )


@pytest.mark.parametrize("plan", ["", "cache=merge:budget=8f "])
def test_what_is_gathered_once_a_chunk_is_what_every_pass_would_gather(plan, monkeypatch):
    plan += "attention=ann:read=0.6,block=2,tile=3"
    once = play(session(CHUNKS, plan), 8)
    monkeypatch.setattr(
        "tachyscope.kernels.block_sparse.torch.AT_ONCE", 1
    )  # a tile at a time, none kept
    assert_same(once, play(session(CHUNKS, plan), 8), 1e-12)


@pytest.mark.parametrize("shape", [CHUNKS, TOKENS], ids=["chunks", "tokens"])
@pytest.mark.parametrize("cache", ["keep_all", "merge:budget=8f"])
def test_single_entries_are_chosen_by_their_own_mass(shape, cache):
    """Blocks of one entry: a tile reads the entries of largest attention mass, exactly."""
    ctx = session(shape, f"cache={cache} attention=ann:k=40,block=1,tile=99", dtype=torch.float32)
    play(ctx, 8)
    rng = torch.Generator().manual_seed(1)
    tokens = 1 if shape.token_by_token else shape.max_pass_tokens
    ctx.begin(
        shape.positions(ctx.memory.latent_frame, shape.chunk)[:tokens], 0, 3, (1.0,) * shape.chunk
    )
    q = torch.randn(shape.batch, shape.heads, tokens, shape.head_dim, generator=rng)
    policy = ctx.plan.attention
    for i, layer in enumerate(ctx.memory.layers):
        moment = ctx.present.layers[i]
        keys = layer.k[:, :, : ctx.memory.past].repeat_interleave(shape.heads // shape.kv_heads, 1)
        weights = policy.log_weights(moment)[:, :, : ctx.memory.past]
        weights = weights.repeat_interleave(shape.heads // weights.shape[1], 1).clamp(min=-1e30)
        share = (q @ keys.mT / math.sqrt(shape.head_dim) + weights.unsqueeze(2)).softmax(-1)
        mass = policy._mass(moment, q, ctx.memory.past)
        torch.testing.assert_close(mass[:, :, 0], share.sum(2))
