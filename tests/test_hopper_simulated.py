"""The Hopper kernels' own source, run by a simulator of what the GPU does: see hopper_simulator.py."""

import math

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from hopper_simulator import Simulated

from tachyscope.kernels.attention import hopper
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.attention_fp8 import hopper as fp8
from tachyscope.kernels.attention_fp8 import torch as stock
from tachyscope.kernels.attention_fp8.reference import attention_fp8_reference
from tachyscope.kernels.attention_fp8.torch import Listed
from tachyscope.kernels.block_sparse.reference import block_sparse_attention_reference
from tachyscope.kernels.block_table import BlockTable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted where no GPU is")
CASES = {
    # batch, heads, key heads, queries, entries, channels, weighted, block of a past or 0
    "shares of tiles": (1, 3, 1, 300, 1100, 64, False, 0),
    "whole tiles": (2, 2, 2, 130, 300, 128, False, 0),
    "less than a block": (1, 2, 2, 64, 100, 128, False, 0),
    "an entry more than a block": (1, 1, 1, 200, 129, 64, True, 0),
    "weighted": (1, 2, 1, 260, 700, 128, True, 0),
    "blocks of 128": (1, 2, 1, 300, 200, 128, False, 128),
    "blocks of 64": (1, 3, 3, 130, 200, 64, False, 64),
    "blocks of 32": (1, 2, 1, 300, 70, 64, False, 32),
}


@pytest.fixture(params=[2, 5])
def processors(request, monkeypatch):
    """Few multiprocessors, so that tiles are cut into shares, and a share may be of two tiles."""
    for module in (hopper, fp8):
        monkeypatch.setattr(module, "multiprocessors", lambda device: request.param)
        monkeypatch.setattr(module, "_built", {})
        monkeypatch.setattr(module, "_flash", Simulated(module._flash, request.param))


def _draw(rng, b, heads, n, d):
    return torch.randn(b, n, heads, d, generator=rng).transpose(1, 2)


def _weights(rng, b, heads, n):
    log_count = 4 * torch.rand(b, heads, n + 2, generator=rng)[:, :, :n]
    log_count[:, :, 40:50] = log_count[:, :, 128:300] = -math.inf
    return log_count


def _past(rng, b, heads, kv_heads, queries, d, block):
    k, v = (_draw(rng, b, kv_heads, 9 * block, d) for _ in range(2))
    log_count = torch.rand(b, kv_heads, 9 * block, generator=rng)
    log_count[:, :, -5:] = -math.inf
    tiles = -(-queries // 128)
    ids = torch.rand(b, heads, tiles, 9, generator=rng).argsort(-1)[..., :4].int().contiguous()
    counts = torch.full((b, heads, tiles), 4, dtype=torch.int32)
    counts[0, 0, 0], counts[-1, -1, -1] = 0, 3
    return k, v, log_count, ids, counts


def _off(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize(
    "variant", [fp8.Variant(), fp8.Variant(fresh=False, stages=2), fp8.Variant(turns=True)]
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_float8_kernel_is_its_definition(rng, processors, case, variant):
    b, heads, kv_heads, queries, n, d, weighted, block = case
    q, k, v = _draw(rng, b, heads, queries, d), *(_draw(rng, b, kv_heads, n, d) for _ in "kv")
    log_count = _weights(rng, b, kv_heads, n) if weighted else None
    code, scale = stock.quantise_queries(q)
    held = stock.quantise_entries(k, v, block or 128, log_count)
    past = None
    if block:
        *vectors, weights, ids, counts = _past(rng, b, heads, kv_heads, queries, d, block)
        vectors[1][:, :, :block] = 0  # a block of no values: their scales are far apart
        entries = stock.quantise_entries(*vectors, block, weights)
        past = Listed(entries, weights, ids, counts, 128)
    got = fp8.flash(code, scale, held, n, log_count, past, torch.float32, variant)
    want = attention_fp8_reference(code, scale, held, n, log_count, past)
    # scores of float32 may fall to the other side of half a float8 step
    assert _off(got, want) < 2e-3


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_bfloat16_kernel_is_its_definition(rng, processors, case):
    b, heads, kv_heads, queries, n, d, weighted, block = case
    q, k, v = _draw(rng, b, heads, queries, d), *(_draw(rng, b, kv_heads, n, d) for _ in "kv")
    q, k, v = (x.bfloat16() for x in (q, k, v))
    log_count = _weights(rng, b, kv_heads, n) if weighted else None
    if block:
        *vectors, weights, ids, counts = _past(rng, b, heads, kv_heads, queries, d, block)
        vectors = [x.bfloat16() for x in vectors]
        past = BlockTable(*vectors, weights, ids, counts, 128, block)
        got = hopper.flash(q, k, v, None, past)
        want = block_sparse_attention_reference(q, k, v, past)
    else:
        got, want = hopper.flash(q, k, v, log_count, None), attention_reference(q, k, v, log_count)
    assert _off(got, want) < 5e-3


def test_nothing_but_empty_slots_gives_zero(rng, processors):
    q, k, v = (_draw(rng, 1, 2, 200, 64) for _ in range(3))
    empty = torch.full((1, 2, 200), -math.inf)
    held = stock.quantise_entries(k, v, 128, empty)
    got = fp8.flash(*stock.quantise_queries(q), held, 200, empty, None, torch.float32)
    assert torch.equal(got, torch.zeros_like(got))


NEEDED = [
    "mbarrier.wait(k_ready.index(slot), phase)",
    "_wait(k_ready, step + 1, more, STAGES)",
    "_wait(v_ready, step - 1, True, STAGES)",
    "mbarrier.wait(q_ready, lap & 1)",
    "mbarrier.wait(q_free, (lap & 1) ^ 1)",
    "mbarrier.wait(k_free.index(slot), old)",
    "mbarrier.wait(v_free.index(slot), old)",
    "mbarrier.arrive(k_free.index(slot), count=1)",
    "mbarrier.arrive(v_free.index(before), count=1)",
    "mbarrier.arrive(q_free, count=1)",
]


@pytest.mark.slow
@pytest.mark.parametrize("statement", NEEDED)
def test_the_simulator_finds_a_missing_statement(rng, monkeypatch, statement):
    """Without any one of its waits and releases the kernel waits for ever, or is wrong."""
    q, k, v = (_draw(rng, 1, 1, n, 64) for n in (800, 1100, 1100))
    code, scale = stock.quantise_queries(q)
    held = stock.quantise_entries(k, v, 128)
    want = attention_fp8_reference(code, scale, held, 1100)
    kernel = fp8._flash
    # seven tiles: three of them are cut into four shares
    monkeypatch.setattr(fp8, "multiprocessors", lambda device: 4)

    def right(seed):
        monkeypatch.setattr(fp8, "_built", {})
        monkeypatch.setattr(fp8, "_flash", Simulated(kernel, seed, statement))
        try:
            got = fp8.flash(code, scale, held, 1100, None, None, torch.float32)
        except (RuntimeError, AssertionError):
            return False
        return _off(got, want) < 2e-3

    assert not all(right(seed) for seed in range(4))
