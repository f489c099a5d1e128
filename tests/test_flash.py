"""The GPU's attention kernels against their definitions, interpreted: tests/test_gpu.py runs them.

The interpreter multiplies no bfloat16, so they are held to their references in float32.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from streams import CHUNKS, assert_same, play, session

from tachyscope.core.types import Rope
from tachyscope.kernels import device
from tachyscope.kernels.attention import attention
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.block_sparse.reference import block_sparse_attention_reference
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.codes import Past
from tachyscope.kernels.device import has_large_smem
from tachyscope.kernels.hashing import order_of, quantise

pytest.importorskip("triton")
from tachyscope.kernels.attention import triton as flash
from tachyscope.kernels.attention.triton import (
    Setting,
    _parts,
    flash_attention,
    setting_of,
)
from tachyscope.kernels.block_index import triton as block_index
from tachyscope.kernels.block_index.torch import Codes
from tachyscope.kernels.slots import triton as slots

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted where no GPU is")

# by pointers and by descriptors, whole and in parts that are joined
SMALL = [Setting(16, 16, 4, 2, use_tma, parts) for use_tma in (0, 1) for parts in (1, 3)]


def _settings(*quick):
    """All settings; those whose places are not given in the slow tests alone."""
    marked = [
        pytest.param(s, marks=() if i in quick else pytest.mark.slow) for i, s in enumerate(SMALL)
    ]
    return pytest.mark.parametrize("setting", marked, ids=lambda s: f"tma{s.use_tma}x{s.parts}")


EACH, ONE = _settings(1, 2), _settings(2)


def _inputs(rng, b, h, kv, s, n, d, groups=1):
    """As a session hands them over: heads beside each other in memory, a part of longer caches."""
    q = torch.randn(b, s, h, d, generator=rng).transpose(1, 2)
    k, v = (torch.randn(b, kv, n + 11, d, generator=rng)[:, :, :n] for _ in range(2))
    log_count = torch.randn(b, groups, n + 10, generator=rng)[:, :, :n]
    return q, k, v, log_count


@EACH
@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "b, h, kv, s, n",
    [pytest.param(1, 1, 1, 16, 16, marks=pytest.mark.slow), (1, 4, 2, 20, 35), (2, 2, 2, 5, 3)],
)
def test_flash_attention_equals_its_reference(rng, b, h, kv, s, n, weighted, setting):
    for groups in {1, kv}:
        q, k, v, log_count = _inputs(rng, b, h, kv, s, n, 16, groups)
        args = (q, k, v, log_count if weighted else None)
        got = flash_attention(*args, setting=setting)
        assert got.stride() == q.stride()  # what comes after is then a view
        torch.testing.assert_close(got, attention_reference(*args))


@ONE
def test_empty_slots_are_not_read(rng, setting):
    q, k, v, log_count = _inputs(rng, 1, 4, 2, 20, 90, 16, groups=2)
    log_count[:, :, 5:9] = log_count[:, :, 16:48] = log_count[
        :, :, 83:
    ] = -math.inf  # whole tiles among them
    log_count[:, 1, 48:64] = -math.inf
    want = attention_reference(q, k, v, log_count)
    for fill in (1e4, -1e4):
        for x in (k, v):
            x[log_count.isinf()] = fill
        torch.testing.assert_close(flash_attention(q, k, v, log_count, setting=setting), want)
    log_count[:] = -math.inf
    assert torch.equal(flash_attention(q, k, v, log_count, setting=setting), torch.zeros_like(q))


@EACH
def test_weights_may_begin_anywhere(rng, setting):
    q, k, v, log_count = _inputs(rng, 1, 2, 2, 16, 60, 16, groups=2)
    args = (q, k[:, :, 3:], v[:, :, 3:], log_count[:, :, 3:])
    torch.testing.assert_close(flash_attention(*args, setting=setting), attention_reference(*args))


def _read_blocks(q, k, v, past, setting):
    return flash.block_sparse_attention(q, k, v, past, setting=setting).out


def _listed(rng, b, h, kv, blocks, block, tiles, most, d, tile, slots=None):
    """The past of a cache of so many slots, which may be fewer than its blocks name, or more."""
    slots = slots or blocks * block
    wide = torch.randn(2, b + 1, kv + 1, slots + 5, d, generator=rng)
    wide[0, :, :, slots:] = wide[1, :, :, :5] = math.nan  # no part of it
    k, v = wide[0, 1:, 1:, :slots], wide[1, 1:, :-1, 5:]
    log_count = torch.randn(b, kv, blocks * block, generator=rng)
    log_count[:, :, min(slots, blocks * block) - 3 :] = -math.inf  # the last block is a part
    log_count[:, :, :block] = -math.inf  # and one is empty
    ids = torch.rand(b, h, tiles, blocks, generator=rng).argsort(-1)[..., :most].int()
    counts = torch.randint(0, most + 1, (b, h, tiles), generator=rng, dtype=torch.int32)
    counts[0, 0, 0] = 0
    ids[torch.arange(most) >= counts.unsqueeze(-1)] = -1  # behind a list's end stands anything
    return BlockTable(k, v, log_count, ids, counts, tile, block)


@EACH
@pytest.mark.parametrize(
    "b, h, kv, s, now, tile, block",
    [
        (2, 2, 1, 40, 21, 32, 16),  # two tiles of the kernel read one list; the last is a part
        (1, 2, 2, 20, 5, 16, 32),  # a block is two steps, now less than one
    ],
)
def test_block_sparse_attention_equals_its_reference(rng, b, h, kv, s, now, tile, block, setting):
    q, k, v, _ = _inputs(rng, b, h, kv, s, now, 16)
    past = _listed(rng, b, h, kv, 7, block, -(-s // tile) + 1, 5, 16, tile)
    got = _read_blocks(q, k, v, past, setting)
    torch.testing.assert_close(got, block_sparse_attention_reference(q, k, v, past))
    # a map is a part of a longer one, whose lists end where they will
    wide = torch.cat([past.ids, past.ids], -1)[..., : past.ids.shape[3]]
    assert torch.equal(_read_blocks(q, k, v, past._replace(ids=wide), setting), got)


@ONE
@pytest.mark.parametrize("slots", [7 * 16 - 2, pytest.param(7 * 16 + 21, marks=pytest.mark.slow)])
def test_listed_blocks_may_lie_in_a_cache(rng, slots, setting):
    q, k, v, _ = _inputs(rng, 2, 2, 2, 20, 21, 16)
    past = _listed(rng, 2, 2, 2, 7, 16, 2, 6, 16, 16, slots)
    ids = torch.rand(2, 2, 2, 7, generator=rng).argsort(-1).int()  # the last block among them
    past = past._replace(ids=ids, counts=torch.full_like(past.counts, 7))
    assert not (past.k.is_contiguous() or past.v.is_contiguous())
    want = block_sparse_attention_reference(q, k, v, past)
    torch.testing.assert_close(_read_blocks(q, k, v, past, setting), want)
    wide = torch.full((2, 2, 7 * 16 + 3), math.nan)  # its rows begin anywhere
    wide[:, :, 3:] = past.log_count
    past = past._replace(log_count=wide[:, :, 3:])
    torch.testing.assert_close(_read_blocks(q, k, v, past, setting), want)


# bytes that a program can share, by GPU
SHARED = {"H200": 232448, "B200": 232448, "A100": 166912, "RTX 4090": 101376, "RTX 5090": 101376}


@pytest.mark.parametrize("name", SHARED)
def test_settings_fit_the_gpu_they_are_chosen_for(name, monkeypatch):
    found = SimpleNamespace(shared_memory_per_block_optin=SHARED[name])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    has_large_smem.cache_clear()
    for tile, block in itertools.product(device.TILES, device.BLOCKS):
        setting = setting_of(torch.device("cuda"), tile, block)
        assert tile % setting.queries == 0 and setting.warps % 4 == 0
        assert block % setting.keys == 0
        assert setting.use_tma == (name in ("H200", "B200"))
        # keys and values of every stage under way; what pointers load, one stage less
        stages = setting.stages if setting.use_tma else setting.stages - 1
        held = 4 * max(device.HEAD_DIMS) * setting.keys * stages
        assert held + 2 * max(device.HEAD_DIMS) * setting.queries <= SHARED[name]
    has_large_smem.cache_clear()


def test_entries_are_cut_where_that_fills_the_device():
    setting = setting_of(torch.device("meta"))
    assert _parts(132, 32768, 128, setting, 132) == 1
    # 3.4 rounds of programs take 4; of halves, 7
    assert _parts(444, 32768, 128, setting, 132) == 2
    assert _parts(444, 512, 128, setting, 132) == 1  # joining would cost more
    assert _parts(1, 100, 128, setting, 132) == 1


def test_order_of_sorts_every_head_and_keeps_ties(rng):
    for rows, heads, most in ((2, 3, 4), (2, 80, 256)):  # narrow keys, and wide
        number = torch.randint(0, most, (rows, heads, 50), generator=rng)
        assert torch.equal(order_of(number, most), number.argsort(dim=-1, stable=True))
    assert order_of(number[:, :, :0], most).shape == (2, 80, 0)


@pytest.mark.parametrize("source, target, count", [(30, 10, 70), (60, 10, 40), (40, 0, 1)])
def test_entries_are_shifted_though_they_overlap(rng, source, target, count):
    x = torch.randn(2, 3, 110, 16, generator=rng)[:, :, :100]
    want = x.clone()
    want[:, :, target : target + count] = x[:, :, source : source + count].clone()
    slots.shift(x, source, target, count)
    assert torch.equal(x, want)


def test_blocks_are_encoded_where_they_stand(rng):
    _, k, _, log_count = _inputs(rng, 2, 3, 3, 1, 90, 16, 3)
    log_count = F.pad(
        log_count, (0, 6), value=-math.inf
    )  # the last block is a part: six slots are missing
    log_count[:, :, ::7] = log_count[:, :, 16:32] = -math.inf
    k[:, :, 16:32] = math.nan  # a block of none
    code = torch.zeros(2, 3, 9, 16, dtype=torch.int8)
    scale, weight = torch.full((2, 3, 9, 1), math.nan), torch.full((2, 3, 9), math.nan)
    block_index.encode_blocks(Past(k, k), log_count, 16, Codes(code, scale, weight))
    weights = log_count.unflatten(2, (6, 16))
    live = (weights > -math.inf).unsqueeze(-1)
    keys = F.pad(k, (0, 0, 0, 6)).unflatten(2, (6, 16)).masked_fill(~live, 0.0)
    want_code, want_scale = quantise(keys.sum(3) / live.sum(3).clamp(min=1))
    assert torch.equal(code[:, :, :6], want_code)
    torch.testing.assert_close(scale[:, :, :6], want_scale)
    torch.testing.assert_close(weight[:, :, :6], weights.logsumexp(-1).clamp(min=-1e30))
    assert not code[:, :, 6:].any() and weight[:, :, 6:].isnan().all()


# two tiles a pass, the last of them a part; several blocks a frame
LARGE = replace(CHUNKS, head_dim=64, grid=(6, 8), layers=1)
TURNS = Rope(((20, (1, 0, 0)), (22, (0, 1, 0)), (22, (0, 0, 1))))


@pytest.fixture
def kernels_on_the_cpu(monkeypatch):
    monkeypatch.setattr(device, "DEVICES", ("cpu",))
    monkeypatch.setattr(device, "DTYPE", torch.float32)


def _play(plan, chunks=4):
    at = session(LARGE, plan, torch.float32, rope=TURNS)
    return at, play(at, chunks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache, attention",
    [
        ("merge:budget=7f", "ann:read=0.7,block=32,tile=64,sink=0,hash=lsh"),
        ("keep_all", "ann:read=0.7,block=32,tile=64,sink=0"),
        ("merge:budget=7f", "ann:k=130,block=32,tile=64,newest=0,dense_passes=0.3"),
    ],
)
def test_ann_reads_the_same_through_the_kernels(cache, attention, request):
    plan = f"cache={cache} attention={attention}"
    stock, want = _play(plan)
    request.getfixturevalue("kernels_on_the_cpu")
    at, got = _play(plan)
    assert_same(got, want, 1e-4)
    ours, theirs = at.meter.take(), stock.meter.take()
    assert ours["pairs"] == theirs["pairs"]
    assert ours["macs"] == theirs["macs"]
    assert theirs["pairs"] <= ours["pairs"] < 0.95 * ours["pairs_dense"]
    assert not any(name.startswith("simulated") for name in ours)


@pytest.mark.slow
def test_what_the_kernels_left_is_gone_on_with_by_stock_torch(monkeypatch):
    plan = "cache=merge:budget=7f attention=ann:read=0.7,block=32,tile=64,sink=0"
    with monkeypatch.context() as here:
        here.setattr(device, "DEVICES", ("cpu",))
        here.setattr(device, "DTYPE", torch.float32)
        served, _ = _play(plan)
    at, _ = _play(plan, 1)
    at.restore(served.state())
    stock, _ = _play(plan)
    assert_same(play(at, 2), play(stock, 2), 1e-4)


@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_attention_takes_the_kernel_where_it_suits(rng, monkeypatch):
    calls = []
    real = flash.flash_attention
    monkeypatch.setattr(flash, "flash_attention", lambda *args: calls.append(1) or real(*args))
    q, k, v, log_count = _inputs(rng, 1, 2, 2, 64, 70, 64)
    torch.testing.assert_close(
        attention(q, k, v, log_count), attention_reference(q, k, v, log_count)
    )
    assert len(calls) == 1
    for other in (
        (q, k, v, None, False),
        (q, k, v, log_count, True),
        (q[:, :, :63], k, v, log_count, False),
        (q.double(), k.double(), v.double(), log_count, False),
        (q[..., :12], k[..., :12], v[..., :12], log_count, False),
        (q.clone().requires_grad_(), k, v, log_count, False),
    ):
        torch.testing.assert_close(attention(*other), attention_reference(*other))
    assert len(calls) == 1
    monkeypatch.setattr(device, "HAS_TRITON", False)  # where there is no Triton
    torch.testing.assert_close(
        attention(q, k, v, log_count), attention_reference(q, k, v, log_count)
    )


def test_what_the_kernels_hold_is_declared_without_data():
    shape = replace(LARGE, heads=12, kv_heads=12, head_dim=128, grid=(30, 52), chunk=3)
    at = session(shape, "attention=ann:read=0.2", torch.bfloat16, latent_frames=21)
    meta = at.plan.attention.tensors(shape, at.memory.layers[0].k.shape[2], torch.device("meta"))
    own = at.memory.layers[0].own["attention"]
    assert set(meta) == set(own)
    held = sum(x.numel() * x.element_size() for x in meta.values())
    assert (
        held < 0.04 * 2 * 2 * at.memory.layers[0].k.numel()
    )  # beside keys and values, next to nothing
    for name in own:
        assert meta[name].shape == own[name].shape and meta[name].dtype == own[name].dtype
