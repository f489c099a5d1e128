"""The same plans on a CUDA device: no wait inside a chunk, and what the CPU gives."""

import copy
import math
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
import toys
from streams import CHUNKS, TOKENS, Square, draw, play, play_pass, play_prompt, session

import tachyscope as ts
from tachyscope.attention.ann import Ann
from tachyscope.core.chunk_runner import ChunkRunner, Graph
from tachyscope.core.meter import Meter
from tachyscope.core.plan import Plan
from tachyscope.core.types import Rope
from tachyscope.core.work import Work
from tachyscope.decode import DecodeEngine, DraftEngine
from tachyscope.io.programs import VARIABLES
from tachyscope.kernels import device
from tachyscope.kernels.attention import attention
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.attention.triton import (
    Setting,
    block_sparse_attention,
    flash_attention,
)
from tachyscope.kernels.block_sparse.reference import block_sparse_attention_reference
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.dispatch import has_hopper
from tachyscope.kernels.rotary import apply_rotary
from tachyscope.measure.rates import warm_up
from tachyscope.models.atrium.world import ACTIONS
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.toys import toy_tokens
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.random import random_wan
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope_lab.bench.drafts import bench_drafts
from tachyscope_lab.bench.random_vila import random_calibration, random_vila
from tachyscope_lab.bench.wan import bench_wan
from tachyscope_lab.bench.wan_rows import ALL
from tachyscope_lab.evaluation.recall import RecallObserver

pytestmark = [
    pytest.mark.gpu,
    # torch says once that the mode which finds waits is a prototype
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    # torch's compiler, of its own
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = {"chunks": CHUNKS, "tokens": TOKENS}
PLANS = [
    "cache=keep_all",
    "cache=window:budget=8f,positions=reindexed attention=ann:read=0.6,block=2",
    "cache=merge:budget=8f attention=ann:read=0.6,block=2 replay=attentive:share=0.5,age=2",
    "cache=merge:budget=9f,match=key_value,keep=newest attention=window:tokens=9,sink=2",
    "cache=merge:threshold=0.7,heads=each",
    "attention=ann:k=40,block=2",
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
    ctx = session(shape, plan, device="cuda", latent_frames=20)
    rng = torch.Generator().manual_seed(0)
    if shape.token_by_token:
        play_prompt(ctx, rng)
    mlp = Square()
    for chunk in range(6):
        layers = draw(rng, shape, shape.max_pass_tokens)
        layers = [[x.to("cuda") for x in part] for part in layers]
        pos = shape.positions(ctx.memory.latent_frame, shape.chunk, "cuda")
        torch.cuda.synchronize()
        with no_waits():
            for step in range(shape.passes):
                if shape.token_by_token:
                    for i in range(shape.max_pass_tokens):
                        one = [[t.narrow(-2, i, 1) for t in part] for part in layers]
                        play_pass(ctx, one, pos[i : i + 1], 0, 1, mlp)
                else:
                    play_pass(ctx, layers, pos, step, shape.passes, mlp)
            ctx.commit()
        assert ctx.memory.chunk == chunk + 1


# not `fast` of a token model: with drafts the host reads how many were right
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *(("toy-chunks", plan) for plan in ("dense", "fast", "fastcar")),
        *(("toy-tokens", plan) for plan in ("dense", "fastcar", "cache=merge:budget=4f")),
    ],
)
def test_a_whole_model_makes_a_chunk_without_a_wait(name, plan):
    model = ts.load(name, device="cuda")
    session = toys.open_session(model, plan, prompt="a red room", frames=30)
    with torch.inference_mode():
        for _ in range(4):
            with no_waits():
                latents = model.sample(session, [1] * session.shape.chunk)
                session.commit()
    assert latents.is_cuda


def test_a_gate_on_cuda_is_metered_as_simulated():
    ctx = session(TOKENS, "replay=attentive:threshold=-99", device="cuda")
    play(ctx, 4)
    row = ctx.meter.take()
    assert row["rows_replayed"] == 0
    assert row["simulated_rows_replayed"] == row["rows_eligible"] > 0


@pytest.mark.parametrize(
    "plan",
    [
        "cache=merge:budget=4f",
        "cache=window:budget=4f attention=window:tokens=9 replay=attentive:threshold=-99",
        "replay=attentive:share=0.5,age=3",
        "replay=random:share=0.5",
        "replay=input:share=0.5",
        "replay=input:budget=0.9",
        "replay=neurons:share=0.5,age=2,file=FILE",
        "attention=window:tokens=9,sink=2 replay=prune:share=0.5,file=FILE",
    ],
)
def test_a_token_models_frames_by_a_graph_are_those_by_single_launches(plan, tmp_path):
    # recording a graph waits
    counts = _same_by_graph(
        DecodeEngine, plan, tmp_path, lambda i: no_waits() if i > 1 else nullcontext()
    )
    if "replay" in plan:
        assert counts["rows_replayed"] > 0 and not counts.get("simulated_rows_replayed")


@pytest.mark.parametrize(
    "plan",
    [
        "attention=window:tokens=9,sink=2 replay=input:share=0.5",
        "replay=attentive:share=0.5,age=3",
        "replay=neurons:share=0.5,age=2,file=FILE",
    ],
)
def test_many_rows_in_float32_by_a_graph_are_those_by_single_launches(plan, tmp_path):
    many = {"prompt": ["a b", "a"] * 10, "seed": [*range(20)]}
    counts = _same_by_graph(DecodeEngine, plan, tmp_path, dtype=torch.float32, **many)
    # stock torch computes what a row replays, and masks
    simulated = counts.get("simulated_rows_replayed", 0)
    assert (simulated > 0 and not counts["rows_replayed"]) == ("neurons" not in plan)


def _same_by_graph(
    kind, plan, folder, around=lambda i: nullcontext(), dtype=torch.bfloat16, **asked
):
    """Frames by recorded launches equal those by single ones; what they count."""
    model, runs = toy_tokens(device="cuda", dtype=dtype), []
    asked = {"prompt": "a b"} | asked
    file = folder / "calibration.safetensors"
    write_tensors(file, random_calibration(model, (0.5,), 16).tensors())
    plan = plan.replace("FILE", str(file))
    for graph in (False, True):
        session = toys.open_session(model, f"dense text=none {plan}", frames=6, **asked)
        engine, frames, replayed = kind(model.decode_parts(), session, graph), [], False
        with torch.inference_mode():
            for i in range(5):
                with around(i):
                    frames.append(model.sample_with_engine(engine, session, [i]))
                    session.commit()
                replayed |= engine.replayed
        runs.append((frames, session.meter.take(), replayed))
    (want, counts, _), (got, same, replayed) = runs
    assert replayed and all(map(torch.equal, got, want)) and same == counts
    return counts


@pytest.mark.parametrize(
    "plan",
    [
        "passes=draft:places=4",
        "attention=window:tokens=9,sink=2 passes=draft:places=30",
        "cache=merge:budget=4f passes=draft:places=6 replay=neurons:share=0.5,file=FILE",
    ],
)
def test_drafted_frames_by_graphs_are_those_by_single_launches(plan, tmp_path):
    assert _same_by_graph(DraftEngine, plan, tmp_path)["drafts"] > 0


def test_a_draft_of_the_decode_engines_own_codes_is_mostly_right():
    """Passes over several tokens round otherwise than those over one."""
    config = replace(toy_tokens().config, actions="")
    model = random_vila(config, torch.device("cuda"), torch.bfloat16)
    plan = Plan.parse("dense text=none passes=draft:places=7", "tokens")
    found = bench_drafts(model, plan, 1, lengths=(8, 4), frame=2, frames=4)
    assert found["equal_codes"] > 0.5 and found["step_ms"] > found["trunk_ms"] > 0


def test_a_stream_of_a_token_model_uses_the_engine():
    model = toy_tokens(device="cuda", dtype=torch.bfloat16)
    with ts.open(model, "fastcar", frames=4) as stream:
        stats = [stream.step("w").stats for _ in range(4)]
    assert [row["cuda_graph"] for row in stats] == [0, 1, 1, 1]


def test_a_fixed_share_on_cuda_is_real():
    ctx, mlp = session(CHUNKS, "replay=attentive:share=0.5", device="cuda"), Square()
    play(ctx, 4, mlp=mlp)
    row = ctx.meter.take()
    assert row["rows_computed"] == mlp.rows
    assert row["rows_replayed"] == row["rows_eligible"] / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_with_weights_equals_its_reference(dtype):
    rng = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, 12, 500, 128, generator=rng, device="cuda", dtype=dtype)
    k, v = (
        torch.randn(1, 12, 3001, 128, generator=rng, device="cuda", dtype=dtype) for _ in range(2)
    )
    log_count = torch.rand(1, 1, 3001, generator=rng, device="cuda") * 4
    log_count[:, :, 2500:] = -torch.inf
    got, want = attention(q, k, v, log_count), attention_reference(q, k, v, log_count)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def _close(got, want):
    """As near as weights and answers in bfloat16 can be, and nearer in the mean."""
    assert got.dtype == want.dtype == torch.bfloat16 and got.isfinite().all()
    error = (got.double() - want.double()).abs()
    assert error.max() < 0.03 and error.mean() < 0.002


@pytest.mark.parametrize("use_tma", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("keys", [64, 128])
def test_every_way_to_build_the_kernel_gives_the_same(keys, parts, use_tma):
    rng = torch.Generator("cuda").manual_seed(1)
    like = {"generator": rng, "device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(2, 300, 6, 128, **like).transpose(1, 2)
    k, v = (torch.randn(2, 3, 2100, 128, **like)[:, :, :2003] for _ in range(2))
    log_count = torch.rand(2, 3, 2101, generator=rng, device="cuda")[:, :, :2003] * 4
    log_count[:, :, 40:50] = log_count[:, :, 128:300] = -math.inf
    setting = Setting(128, keys, 8, 2, use_tma, parts)
    for w in (log_count, log_count[:, :1], None):
        _close(flash_attention(q, k, v, w, setting=setting), attention_reference(q, k, v, w))


def _listed(tile, block, head_dim, more):
    """Queries, present entries, and blocks of a cache that ends so many slots behind the last."""
    rng = torch.Generator("cuda").manual_seed(2)
    like = {"generator": rng, "device": "cuda", "dtype": torch.bfloat16}
    now, slots = (333 if more > 0 else 40), 20 * block + more
    q = torch.randn(2, 300, 4, head_dim, **like).transpose(1, 2)
    cache = torch.randn(2, 2, 3, slots + now, head_dim, **like)
    cached = cache[:, :, 1:, :slots]
    k, v = cache[:, :, 1:, slots:]
    log_count = torch.rand(2, 2, 20 * block, generator=rng, device="cuda")
    log_count[:, :, -7:] = log_count[:, :, block : 2 * block] = -math.inf
    tiles = -(-300 // tile) + 1
    order = torch.rand(2, 4, tiles, 20, generator=rng, device="cuda").argsort(-1)
    order[order == 19] = order[..., :1].expand_as(order)[order == 19]
    order[..., 0] = 19  # the last block, a part, is read first
    counts = torch.randint(0, 9, (2, 4, tiles), generator=rng, device="cuda", dtype=torch.int32)
    counts[0, 0, 0] = 0
    return q, k, v, BlockTable(*cached, log_count, order.int()[..., :8], counts, tile, block)


IN_CACHE = pytest.mark.parametrize("more", [-5, 37])


@IN_CACHE
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile, block", [(128, 128), (128, 64), (64, 32)])
def test_listed_blocks_equal_their_reference(tile, block, head_dim, more):
    q, k, v, past = _listed(tile, block, head_dim, more)
    read = block_sparse_attention(q, k, v, past)
    _close(read.out, block_sparse_attention_reference(q, k, v, past))


@pytest.fixture
def hopper():
    """The kernels of a Hopper GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from tachyscope.kernels.attention import hopper

    assert has_hopper(torch.device("cuda", 0))
    return hopper


@pytest.mark.parametrize(
    "b, h, kv, s, n, head_dim",
    [
        (1, 6, 3, 300, 2003, 128),  # shares of tiles
        (2, 12, 12, 780, 1500, 128),  # whole tiles, and shares of others
        (1, 2, 2, 64, 100, 128),  # less than one block
        (2, 4, 2, 300, 1000, 64),
    ],
)
def test_the_hopper_kernel_equals_its_reference(hopper, b, h, kv, s, n, head_dim):
    rng = torch.Generator("cuda").manual_seed(1)
    like = {"generator": rng, "device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(b, s, h, head_dim, **like).transpose(1, 2)
    k, v = (torch.randn(b, kv, n + 97, head_dim, **like)[:, :, :n] for _ in range(2))
    log_count = torch.rand(b, kv, n + 98, generator=rng, device="cuda")[:, :, :n] * 4
    log_count[:, :, 40:50] = log_count[:, :, 128:300] = -math.inf
    for w in (log_count, log_count[:, :1], None):
        _close(hopper.flash_attention(q, k, v, w), attention_reference(q, k, v, w))
    empty = torch.full_like(log_count, -math.inf)
    assert torch.equal(hopper.flash_attention(q, k, v, empty), torch.zeros_like(q))


@IN_CACHE
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile, block", [(128, 128), (128, 64), (128, 32), (256, 128)])
def test_the_hopper_kernel_reads_listed_blocks(hopper, tile, block, head_dim, more):
    q, k, v, past = _listed(tile, block, head_dim, more)
    _close(hopper.flash(q, k, v, None, past), block_sparse_attention_reference(q, k, v, past))


# tiles of 128, the last of them a part
LARGE = replace(CHUNKS, heads=4, kv_heads=4, head_dim=128, grid=(20, 21), chunk=3)
TURNS = Rope(((44, (1, 0, 0)), (42, (0, 1, 0)), (42, (0, 0, 1))))
LARGE_PLANS = [
    "cache=merge:budget=15f attention=ann:read=0.5,block=64,tile=128",
    "cache=keep_all attention=ann:read=0.6,block=128,tile=128",
    "cache=merge:budget=15f attention=ann:read=0.5,block=32,tile=64,hash=lsh",
    "cache=merge:budget=15f",
    "cache=window:budget=15f",
]


def _large(plan):
    return session(LARGE, plan, torch.bfloat16, rope=TURNS, device="cuda", latent_frames=30)


@pytest.mark.parametrize("plan", LARGE_PLANS[:3])
def test_ann_reads_on_cuda_what_its_map_says(plan):
    ctx = _large(plan)
    play(ctx, 5)
    layer, policy = ctx.memory.layers[1], ctx.plan.attention
    own, size = layer.own["attention"], policy.block
    blocks = policy._cut(LARGE, 0, ctx.memory.past)
    between = policy._between(LARGE, 0, ctx.memory.past)
    order = own["order"][:, :, : between.stop - between.start].long()
    weights = own["log_count"][:, :, : blocks.all * size]
    held = layer.log_count.expand(-1, 4, -1)
    assert torch.equal(weights[:, :, between], held[:, :, between].gather(2, order))
    assert torch.equal(weights[:, :, : between.start], held[:, :, : between.start])
    assert (weights[:, :, ctx.memory.past :] == -math.inf).all()
    moment = ctx.present.layers[1]
    moment = moment._replace(ctx=moment.ctx._replace(past=ctx.memory.past))
    back = replace(layer, k=layer.k.clone(), v=layer.v.clone())
    policy.restore_order(moment._replace(layer=back), ctx.memory.past)
    assert not torch.equal(back.k, layer.k)
    for x, ordered in ((back.k, layer.k), (back.v, layer.v)):
        assert torch.equal(policy.to_index_order(moment, x), ordered)

    rng = torch.Generator("cuda").manual_seed(3)
    like = {"generator": rng, "device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, 4, LARGE.max_pass_tokens, 128, **like) for _ in range(3))
    ctx.begin(LARGE.positions(ctx.memory.latent_frame, 3, "cuda"), 0, 3, (1.0,) * 3)
    ctx.meter.take()
    got = ctx.attend(1, q, k, v)
    now = slice(ctx.memory.past, ctx.memory.past + LARGE.max_pass_tokens)
    chosen, counts = (
        own["map"][..., : policy._blocks_read(blocks, policy._full(blocks, ctx.present.ctx))],
        own["count"],
    )
    past = BlockTable(layer.k, layer.v, own["log_count"], chosen, counts, policy.tile, size)
    turned = ctx.rope.apply(q, *ctx.present.cos_sin)
    _close(
        got, block_sparse_attention_reference(turned, layer.k[:, :, now], layer.v[:, :, now], past)
    )
    queries = [
        min(policy.tile, LARGE.max_pass_tokens - i * policy.tile) for i in range(counts.shape[2])
    ]
    read = (counts.double() * torch.tensor(queries, device="cuda")).sum() * size
    row = ctx.meter.take()
    assert row["pairs"] == read + 4 * LARGE.max_pass_tokens**2
    assert row["pairs"] < 0.9 * 4 * LARGE.max_pass_tokens * (
        ctx.memory.past + LARGE.max_pass_tokens
    )
    assert "simulated_pairs_skipped" not in row


def test_the_kernels_choose_as_stock_torch_does(monkeypatch):
    ctx = _large(LARGE_PLANS[0])
    play(ctx, 5)
    layer, policy = ctx.memory.layers[1], ctx.plan.attention
    assert isinstance(policy, Ann)
    ours = {name: x.clone() for name, x in layer.own["attention"].items()}
    moment = ctx.present.layers[1]
    moment = moment._replace(ctx=moment.ctx._replace(past=ctx.memory.past, before=()))
    stock = replace(
        layer, k=layer.k.clone(), v=layer.v.clone(),
        own={"attention": {name: x.clone() for name, x in ours.items()}},
    )  # fmt: skip
    elsewhere = moment._replace(layer=stock, work=Work())
    policy.restore_order(elsewhere, ctx.memory.past)
    with monkeypatch.context() as here:
        here.setattr(device, "HAS_TRITON", False)
        policy.build_index(elsewhere, ctx.memory.past)
    # a key on a plane may fall on either side, and ties of a rounding either way
    assert (stock.own["attention"]["order"] == ours["order"]).float().mean() > 0.98
    assert (stock.own["attention"]["code"] == ours["code"]).float().mean() > 0.98
    for name in ("order", "code", "scale", "weight"):
        stock.own["attention"][name].copy_(ours[name])
    q = torch.randn(1, 4, LARGE.max_pass_tokens, 128, device="cuda", dtype=torch.bfloat16)
    blocks = policy._cut(LARGE, 0, ctx.memory.past)
    got = policy._mass(moment, q, blocks.all)
    with monkeypatch.context() as here:
        here.setattr(device, "HAS_TRITON", False)
        want = policy._mass(elsewhere, q, blocks.all)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-4)
    assert (got - want).abs().mean() < 1e-4 * want.mean()


@pytest.mark.parametrize("plan", LARGE_PLANS)
def test_the_kernels_wait_for_nothing(plan):
    ctx = _large(plan)
    rng = torch.Generator().manual_seed(0)
    for _ in range(7):
        layers = draw(rng, LARGE, LARGE.max_pass_tokens, torch.bfloat16)
        layers = [[x.to("cuda") for x in part] for part in layers]
        pos = LARGE.positions(ctx.memory.latent_frame, LARGE.chunk, "cuda")
        torch.cuda.synchronize()
        with no_waits():
            for step in range(LARGE.passes):
                out = play_pass(ctx, layers, pos, step, LARGE.passes)
            ctx.commit()
        assert all(x.isfinite().all() for x, _ in out)


def test_attention_without_weights_equals_its_reference():
    rng = torch.Generator("cuda").manual_seed(0)
    like = {"generator": rng, "device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, h, n, 128, **like) for h, n in ((12, 500), (12, 3000), (12, 3000)))
    _close(attention(q, k, v), attention_reference(q, k, v))
    with no_waits():
        attention(q, k, v)


def test_attention_without_our_kernels_equals_its_reference(monkeypatch):
    monkeypatch.setattr(device, "HAS_TRITON", False)
    rng = torch.Generator("cuda").manual_seed(0)
    like = {"generator": rng, "device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, h, n, 128, **like) for h, n in ((12, 500), (4, 3000), (4, 3000)))
    log_count = torch.rand(1, 4, 3000, generator=rng, device="cuda") * 4
    log_count[:, :, 100:300] = -math.inf
    _close(attention(q, k, v, log_count), attention_reference(q, k, v, log_count))
    with no_waits():
        attention(q, k, v, log_count)


def test_spans_are_measured_without_a_wait():
    meter = Meter("cuda")
    with no_waits(), meter.span("work"):
        torch.ones(1000, 1000, device="cuda") @ torch.ones(1000, 1000, device="cuda")
    assert meter.take()["work_ms"] > 0


def test_spans_are_recorded_with_the_launches_around_them():
    meter, graph, x = Meter("cuda"), torch.cuda.CUDAGraph(), torch.ones(1000, 1000, device="cuda")
    with torch.inference_mode(), torch.cuda.graph(graph), meter.span("work"):
        x @ x
    graph.replay()
    assert 0 < meter.take()["work_ms"] < 100


@pytest.mark.parametrize("attention", ["dense", "ann:read=0.5,block=32,tile=64"])
def test_recall_by_kernels_in_bfloat16_is_what_torch_gives(attention, monkeypatch):
    shape = replace(CHUNKS, head_dim=64, grid=(8, 8))
    plan = Plan.parse(f"dense text=none cache=merge:budget=6f attention={attention}", "chunks")
    rope = Rope(((64, (1, 0, 0)),))

    def recalls(by_kernels):
        if not by_kernels:
            monkeypatch.setattr(device, "DEVICES", ())
        recall = RecallObserver(range(1, 8))
        at = ts.Session(shape, plan, rope, device="cuda", dtype=torch.bfloat16, observers=[recall])
        play(at, 8)
        for layer, slots in zip(at.memory.layers, recall.slots, strict=True):
            weight = layer.log_count[:, :, : at.memory.past].double().exp()
            count = torch.zeros_like(weight).scatter_add_(2, slots, torch.ones_like(slots).double())
            torch.testing.assert_close(count, weight, rtol=1e-2, atol=1e-2)
        return torch.cat([x.flatten() for xs in recall.recalls.values() for x in xs])

    ours, theirs = recalls(True), recalls(False)
    assert 0.2 < ours.mean() < 1.0 + 1e-2
    torch.testing.assert_close(ours.mean(), theirs.mean(), rtol=0, atol=2e-2)


def test_the_warm_up_ends_where_a_graph_is_replayed():
    model = ts.load("toy-chunks", device="cuda")
    rows = [chunk.stats for chunk in ts.rollout(model, "cache=window:budget=6f", frames=36)]
    replayed = [row["cuda_graph"] for row in rows]
    assert replayed == sorted(replayed) and replayed[-1] == 1
    assert warm_up(rows) == replayed.index(1)
    kept = [os.environ[name] for name in VARIABLES]
    assert all(kept), "compiled programs have a folder that stays"


# full-size models: compiled layers, decoding beside, the benchmark itself


@pytest.mark.parametrize("plan", ["dense", "live cache=dedup:budget=9f attention=ann:read=0.7"])
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # float32 is meant here
def test_compiled_layers_give_what_they_gave(plan):
    def latents(model):
        session = toys.open_session(model, plan, prompt="a red room")
        made = []
        with torch.inference_mode():
            for _ in range(3):
                made.append(model.sample(session, [0, 1, 2]))
                session.commit()
        return torch.cat(made, 2)

    plain, compiled = (ts.load("toy-chunks", device="cuda") for _ in range(2))
    torch.testing.assert_close(latents(compiled.compile()), latents(plain), rtol=1e-3, atol=1e-3)


def test_a_compiled_chunk_makes_the_host_wait_for_nothing():
    model = ts.load("toy-chunks", device="cuda", dtype="bfloat16").compile()
    session = toys.open_session(model, "dense", prompt="a red room", frames=12)
    with torch.inference_mode():
        model.sample(session, [0] * 3)  # compiles
        session.commit()
        with no_waits():
            model.sample(session, [0] * 3)
            session.commit()


@pytest.mark.parametrize("plan", ["dense", "fast"])
def test_decoding_beside_the_next_chunk_changes_nothing(plan):
    model = ts.load("toy-chunks", device="cuda")
    asked = {"frames": 24, "prompt": "a red room"}
    held = toys.open_session(model, plan, **asked)
    alone = [chunk.frames for chunk in ts.rollout(model, frames=24, stream=ts.Stream(model, held))]
    beside = [chunk.frames for chunk in ts.rollout(model, plan, **asked)]
    for one, other in zip(alone, beside, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("batch", [{}, {"prompt": ["a red room", "a blue room"], "seed": [1, 2]}])
def test_a_key_a_step_replays_the_cuda_graph(batch):
    model, keys = ts.load("toy-chunks", device="cuda"), "wsa.wwsa"
    streams = [ts.open(model, "cache=window:budget=9f", **batch) for _ in range(2)]
    streams[1].runner.record = None
    got, want = ([stream.step(key) for key in keys] for stream in streams)
    assert [chunk.stats["cuda_graph"] for chunk in got] == [0, 0, 0, 0, 0, 1, 1, 1]
    for one, other in zip(got, want, strict=True):
        assert (one.frames == other.frames).all()


def test_a_camera_walks_on_in_a_cuda_graph():
    config = WanConfig(
        dim=32, ffn_dim=48, layers=2, heads=2, text_dim=8, text_len=6, size=(8, 8), chunk=1,
        stride=(1, 8, 8), actions=ACTIONS, camera=True, steps=(1000, 500), stock="dense",
    )  # fmt: skip
    model = random_wan(config, device="cuda")
    streams = [ts.open(model, "cache=window:budget=4f", pace=0.5) for _ in range(2)]
    streams[1].runner.record = None
    keys = "qqwwaaeesdqw"
    got, want = ([stream.step(key) for key in keys] for stream in streams)
    assert got[-1].stats["cuda_graph"] == 1
    for one, other in zip(got, want, strict=True):
        assert (one.frames == other.frames).all()
    ours, theirs = (stream.session.memory.features.camera for stream in streams)
    assert torch.equal(ours, theirs)
    alone = ts.open(random_wan(config), "cache=window:budget=4f", pace=0.5)
    for key in keys:
        alone.step(key)
    torch.testing.assert_close(ours.cpu(), alone.session.memory.features.camera)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_are_turned_into_a_cache(dtype, interleaved):
    rope = Rope(((44, (1.0, 0, 0)), (42, (0, 1.0, 0)), (42, (0, 0, 1.0))), interleaved=interleaved)
    rng = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, 4680, 12, 128, generator=rng, device="cuda").to(dtype).transpose(1, 2)
    pos = torch.rand(4680, 3, generator=rng, device="cuda") * 400
    cos, sin = rope.cos_sin(pos, dtype)
    cache = torch.zeros(1, 12, 9000, 128, device="cuda", dtype=dtype)
    with no_waits():
        apply_rotary(cache[:, :, 1234 : 1234 + 4680], x, cos, sin, rope)
    want = torch.zeros_like(cache)
    want[:, :, 1234 : 1234 + 4680] = rope.apply(x, cos, sin)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(cache, want, rtol=tolerance, atol=tolerance)


def test_the_benchmark_predicts_its_own_peak():
    """A model large enough that the GPU's libraries take little beside it."""
    config = WanConfig(layers=6, stock="cache=window:budget=21f,sink=0")
    model = random_wan(config, device="cuda", dtype=torch.bfloat16)
    plans = {name: ALL[name] for name in ("dense", "window21", "headline")}
    for row in bench_wan(model, plans, lengths=[24, 48], rounds=2)["rows"]:
        assert "failed" not in row, row["failed"]
        assert row["fit_gb"] == pytest.approx(row["peak_gb"], rel=0.1)


@pytest.mark.parametrize(
    "plan",
    [
        "cache=window:budget=9f,sink=2,positions=reindexed",
        "cache=merge:budget=9f text=pads",
        "cache=dedup:budget=9f attention=ann:read=0.5,block=32,tile=64",
        "cache=window:budget=9f replay=attentive:share=0.5",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_launches_make_the_chunks_that_would_have_been_asked_for(plan, dtype):
    """The third chunk with a full cache is recorded, and the device then goes on by itself."""
    model = toys.wide_chunks(device="cuda", dtype=dtype)

    def video(record):
        session = toys.open_session(model, plan, prompt="a b", seed=3)
        make, rows = ChunkRunner(model, session, record), []
        with torch.inference_mode():
            for i in range(11):
                latents = make([i % 4, 1, (i // 2) % 4])
                rows.append((latents.clone(), session.meter.take()))
        assert (make._recorded is not None) == (record is not None)
        return session, rows

    (ours, got), (theirs, want) = video(Graph), video(None)
    for (x, row), (y, plain) in zip(got, want, strict=True):
        assert torch.equal(x, y)
        assert row == plain
    one, two = ours.state(), theirs.state()
    assert all(torch.equal(one[name], two[name]) for name in two)


REPEATED = """
import sys
import numpy as np
import tachyscope as ts
from tachyscope.models.atrium.visit import Visit

model = ts.load("atrium-world", device="cuda")
visit = Visit(1_000_000_003, [4] * 36)
given = np.ascontiguousarray(visit.frames(0, 25))
for plan in sys.argv[1:]:
    videos = [
        np.concatenate([
            chunk.frames
            for chunk in ts.rollout(
                model, plan, prompt=visit.prompt, frames=8, first=given,
                first_actions=". q*24", actions="q*8", seed=1,
            )
        ])
        for _ in range(3)
    ]
    assert all(np.array_equal(videos[0], video) for video in videos[1:]), plan
"""


@pytest.mark.parametrize("plan", ["fast", "balanced", "dense", "lossless", "stock fastcar fast-ar"])
def test_the_first_rollout_of_a_process_equals_later_ones(plan):
    """Same seed, same video: nothing is set up, moved or chosen by what ran before."""
    done = subprocess.run(
        [sys.executable, "-c", REPEATED, *plan.split()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize("fused", [False, True])
@torch.inference_mode()
def test_a_tiny_decoder_gives_the_cpus_frames_and_never_waits(fused):
    config = WanConfig()
    cpu = TinyDecoder.read("random-tiny", config)
    layers = copy.deepcopy(cpu.layers).place("cuda", torch.float32)
    ours = TinyDecoder(layers, "taew2_1")
    if fused:
        ours.compile()
    latents = torch.randn(1, 16, 9, 4, 6, generator=torch.Generator().manual_seed(0))
    held, theirs = {}, {}
    for i, part in enumerate(latents.split(3, 2)):
        want, part = cpu(part, held), part.cuda()
        if i < 1:
            got = ours(part, theirs)
        else:
            # warm: nothing is asked of the host until the frames are copied
            with no_waits():
                shown = ours._stream(ours.decode, part, theirs, rounded=True)
            assert shown.is_contiguous() and shown.dtype == torch.uint8
            got = shown.cpu().numpy()
        # convolutions may use TF32
        assert got.shape == want.shape and abs(got.astype(int) - want).max() <= 3
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in theirs.values())
