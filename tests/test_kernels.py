"""Every operation of kernels/ by every backend against its definition, then what each promises.

Where there is no GPU, Triton is interpreted; the interpreter multiplies no bfloat16.
"""

import functools
import importlib
import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tachyscope.core.types import Rope
from tachyscope.kernels import block_index, dispatch, hashing
from tachyscope.kernels.admit import Residency
from tachyscope.kernels.admit import torch as admit_torch
from tachyscope.kernels.admit.reference import admit_reference
from tachyscope.kernels.attention import attention
from tachyscope.kernels.attention import torch as attention_torch
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.attention.torch import attention_by_channels, high_and_low
from tachyscope.kernels.attention_fp8 import torch as attention_fp8_torch
from tachyscope.kernels.attention_fp8.reference import attention_fp8_reference
from tachyscope.kernels.block_index import torch as block_index_torch
from tachyscope.kernels.block_index.reference import (
    block_mass_reference,
    buckets_reference,
    encode_blocks_reference,
)
from tachyscope.kernels.block_index.torch import Codes
from tachyscope.kernels.block_sparse import pairs_of
from tachyscope.kernels.block_sparse import torch as block_sparse_torch
from tachyscope.kernels.block_sparse.reference import block_sparse_attention_reference
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.codes import Past
from tachyscope.kernels.codes import torch as codes_torch
from tachyscope.kernels.codes.reference import decode_packed_reference, encode_reference
from tachyscope.kernels.gemv import Norm, Weight
from tachyscope.kernels.gemv.reference import gemv_reference
from tachyscope.kernels.hashing import buckets, int8_scores, lsh_scores, quantise, signs
from tachyscope.kernels.host_blocks import HostBlocks
from tachyscope.kernels.host_blocks import torch as host_blocks_torch
from tachyscope.kernels.host_blocks.reference import stored_reference
from tachyscope.kernels.linear_fp8 import fp8_weight, linear_fp8
from tachyscope.kernels.linear_fp8.reference import linear_fp8_reference
from tachyscope.kernels.match.reference import best_older_reference
from tachyscope.kernels.match.torch import alike_features, best_older
from tachyscope.kernels.merge import torch as merge_torch
from tachyscope.kernels.merge.reference import fold_reference, merge_entries_reference
from tachyscope.kernels.merge.torch import Entries, roots
from tachyscope.kernels.norm_quantise import torch as norm_torch
from tachyscope.kernels.norm_quantise.reference import quantise_reference
from tachyscope.kernels.prompt_hits import torch as hits_torch
from tachyscope.kernels.prompt_hits.reference import count_nearest_reference
from tachyscope.kernels.replay import (
    follow_drift,
    replay_gated,
    replay_masked,
    replay_rows,
    temporal_score,
)
from tachyscope.kernels.replay.reference import follow_drift_reference, temporal_score_reference
from tachyscope.kernels.rotary.reference import apply_rotary_reference
from tachyscope.kernels.slots import torch as slots_torch
from tachyscope.kernels.slots.reference import permute_reference, shift_reference
from tachyscope.store.bank_layout import host_tensors

pytest.importorskip("triton")
import decode_cases

from tachyscope.kernels.admit import triton as admit_triton
from tachyscope.kernels.attention import triton as flash
from tachyscope.kernels.block_index import triton as block_index_triton
from tachyscope.kernels.codes import triton as codes_triton
from tachyscope.kernels.gemv import triton as gemv_triton
from tachyscope.kernels.host_blocks import triton as host_blocks_triton
from tachyscope.kernels.match import triton as match_triton
from tachyscope.kernels.merge import triton as merge_triton
from tachyscope.kernels.norm_quantise import triton as norm_triton
from tachyscope.kernels.prompt_hits import triton as hits_triton
from tachyscope.kernels.rotary import triton as rotary_triton
from tachyscope.kernels.slots import triton as slots_triton

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {"rtol": 2e-5, "atol": 2e-5}


def _moved(*tensors):
    """As a kernel gets them there; weights stay in float32."""
    return tuple(x.to(DEVICE, DTYPE) if x.dim() == 4 else x.to(DEVICE) for x in tensors)


# B, H, Hkv, S, N, D
SHAPES = [(1, 1, 1, 1, 1, 8), (2, 6, 3, 7, 63, 20), (1, 4, 1, 33, 50, 24)]
IDS = ["b{}h{}kv{}s{}n{}d{}".format(*s) for s in SHAPES]


def _inputs(rng, b, h, kv, s, n, d, groups=1):
    q = torch.randn(b, h, s, d, generator=rng)
    k, v = (torch.randn(b, kv, n, d, generator=rng) for _ in range(2))
    log_count = torch.randn(b, groups, n, generator=rng)
    return q, k, v, log_count


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_attention_equals_its_reference(rng, shape, weighted, causal):
    for groups in {1, shape[2]}:
        q, k, v, log_count = _inputs(rng, *shape, groups)
        args = (q, k, v, log_count if weighted else None, causal)
        torch.testing.assert_close(attention(*args), attention_reference(*args))


@pytest.mark.parametrize("groups", [1, 3])
def test_weights_as_channels_equal_the_reference(rng, groups):
    q, k, v, log_count = _inputs(rng, 2, 6, 3, 70, 63, 20, groups)
    log_count[:, :, 5:20] = -math.inf
    want = attention_reference(q, k, v, log_count)
    torch.testing.assert_close(attention_by_channels(q, k, v, log_count), want)
    assert attention_by_channels(q, k, v, torch.full_like(log_count, -math.inf)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_keep_a_weight(dtype):
    weight = torch.linspace(0, math.log(100), 64)
    kept = high_and_low(weight, dtype).float().sum(-1)
    assert (kept - weight).abs().max() < 1e-4  # one alone would be off by up to 0.016
    q, k = (torch.zeros(1, 1, n, 128, dtype=dtype) for n in (1, 2))
    v = torch.tensor([0.0, 1.0], dtype=dtype).view(1, 1, 2, 1).expand(-1, -1, -1, 128)
    for w in weight:
        log_count = torch.stack([w, torch.tensor(math.log(10))]).view(1, 1, 2)
        got, want = attention_by_channels(q, k, v, log_count), 10 / (10 + w.exp())
        torch.testing.assert_close(got.float(), want.expand_as(got), rtol=1e-2, atol=0)


def test_empty_slots_filled_with_large_numbers_change_nothing(rng):
    q, k, v, log_count = _inputs(rng, 2, 4, 2, 5, 40, 16)
    log_count[:, :, 20:] = -math.inf
    clean = attention(q, k[:, :, :20], v[:, :, :20], log_count[:, :, :20])
    for fill in (1e4, -1e4):
        k[:, :, 20:], v[:, :, 20:] = fill, fill
        torch.testing.assert_close(attention(q, k, v, log_count), clean)


def test_a_row_of_empty_slots_stays_finite(rng):
    q, k, v, log_count = _inputs(rng, 1, 2, 2, 3, 6, 8)
    assert attention(q, k, v, torch.full_like(log_count, -math.inf)).isfinite().all()


@pytest.mark.parametrize("at_once", [2**26, 2 * 3 * 41 * 5])
@pytest.mark.parametrize("first", [0, 1, 30])
def test_best_older_equals_its_reference(rng, first, at_once, monkeypatch):
    monkeypatch.setattr("tachyscope.kernels.match.torch.TILE", 16)
    monkeypatch.setattr("tachyscope.kernels.match.torch.AT_ONCE", at_once)
    features = alike_features(torch.randn(2, 3, 41, 7, generator=rng), shared=False)
    cosine, partner = best_older(features, first)
    want_cosine, want_partner = best_older_reference(features, first)
    torch.testing.assert_close(cosine, want_cosine)
    assert torch.equal(partner, want_partner)


def test_shared_features_give_the_mean_of_the_heads_cosines(rng):
    x = torch.randn(1, 3, 5, 8, generator=rng)
    one = alike_features(x, shared=True)
    each = alike_features(x, shared=False)
    torch.testing.assert_close((one @ one.mT).squeeze(1), (each @ each.mT).mean(1))


def _groups(rng, b, g, n):
    """Random chains to older entries, and where they end."""
    parent = (torch.rand(b, g, n, generator=rng) * (torch.arange(n) + 1)).long()
    alone = torch.rand(b, g, n, generator=rng) < 0.4
    return roots(torch.where(alone, torch.arange(n), parent))


def fold(v, log_count, source, root):
    held = Entries(v.clone(), v.clone(), log_count.clone(), log_count.clone())
    merge_torch.fold(held, source, root)
    return held.v, held.log_count


@pytest.mark.parametrize("groups", [1, 3])
def test_fold_equals_its_reference(rng, groups):
    v, log_count = torch.randn(2, 3, 17, 5, generator=rng), torch.rand(2, groups, 17, generator=rng)
    root, source = _groups(rng, 2, groups, 17), torch.arange(17).expand(2, groups, 17)
    got_v, got_w = fold(v, log_count, source, root)
    want_v, want_w = fold_reference(v, log_count, source, root)
    torch.testing.assert_close(got_w, want_w)
    torch.testing.assert_close(got_v, want_v)


def test_roots_follow_the_longest_chain():
    n = 100
    parent = (torch.arange(n) - 1).clamp(min=0)[None, None]
    assert roots(parent).sum() == 0


@given(seed=st.integers(0, 999), n=st.integers(2, 24))
@settings(max_examples=60, deadline=None)
def test_merging_identical_keys_is_exact_for_any_grouping(seed, n):
    rng = torch.Generator().manual_seed(seed)
    root = _groups(rng, 1, 1, n)
    q, k, v = (torch.randn(1, 2, n, 6, generator=rng, dtype=torch.float64) for _ in range(3))
    log_count = torch.rand(1, 1, n, generator=rng, dtype=torch.float64)
    k = k.gather(2, root[..., None].expand_as(k))  # a group shares its root's key
    merged_v, merged_w = fold(v, log_count, torch.arange(n)[None, None], root)
    torch.testing.assert_close(
        attention(q, k, merged_v, merged_w), attention(q, k, v, log_count), rtol=1e-6, atol=1e-6
    )


@given(seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_folding_one_by_one_in_any_order_gives_the_same_sums(seed):
    rng = torch.Generator().manual_seed(seed)
    v = torch.randn(1, 1, 6, 4, generator=rng, dtype=torch.float64)
    log_count = torch.rand(1, 1, 6, generator=rng, dtype=torch.float64)
    first = torch.zeros(1, 1, 1, dtype=torch.int64)
    whole_v, whole_w = fold(v, log_count, torch.arange(6)[None, None], first.expand(-1, -1, 6))
    got_v, got_w = v, log_count
    for i in (torch.randperm(5, generator=rng) + 1).tolist():
        got_v, got_w = fold(got_v, got_w, torch.tensor([[[i]]]), first)
    torch.testing.assert_close(got_v[:, :, 0], whole_v[:, :, 0])
    torch.testing.assert_close(got_w[:, :, 0], whole_w[:, :, 0])


def test_an_entry_that_is_alone_keeps_its_bits(rng):
    v, log_count = torch.randn(1, 2, 9, 3, generator=rng), torch.rand(1, 1, 9, generator=rng)
    alone = torch.arange(9)[None, None]
    got, weights = fold(v, log_count, alone, alone)
    assert torch.equal(got, v)
    torch.testing.assert_close(weights, log_count)


@pytest.mark.parametrize("r", [0, 1, 5, 9])
def test_replay_rows_computes_only_the_rows_it_must(rng, r):
    x, old = (torch.randn(2, 9, 4, generator=rng) for _ in range(2))
    rows = torch.rand(2, 9, generator=rng).topk(r).indices
    seen = []
    got = replay_rows(x, old, rows, lambda part: seen.append(part.shape) or part * 2)
    assert seen == [(2, r, 4)]
    gate = torch.zeros(2, 9, dtype=torch.bool).scatter(1, rows, True)
    torch.testing.assert_close(got, replay_masked(x, old, gate, lambda part: part * 2))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_replay_gated_computes_only_the_gated_rows(rng, share):
    x, old = (torch.randn(2, 9, 4, generator=rng) for _ in range(2))
    gate = torch.rand(2, 9, generator=rng) < share
    seen = []
    got = replay_gated(x, old, gate, lambda part: seen.append(len(part)) or part * 2)
    assert sum(seen) == gate.sum()
    torch.testing.assert_close(got, replay_masked(x, old, gate, lambda part: part * 2))


def test_int8_scores_are_within_their_rounding(rng):
    q, k = torch.randn(3, 20, 64, generator=rng), torch.randn(3, 30, 64, generator=rng)
    exact = q @ k.mT / 8
    got = int8_scores(q, *quantise(k))
    # half a step of each vector's scale against the other's absolute sum
    step_q, step_k = (x.abs().amax(-1) / 254 for x in (q, k))
    bound = (
        step_q[..., None] * k.abs().sum(-1)[:, None] + step_k[:, None] * q.abs().sum(-1)[..., None]
    ) / 8
    assert ((got - exact).abs() <= bound * 1.02).all()


def test_lsh_scores_estimate_the_dot_product(rng):
    q, k = torch.randn(1, 50, 32, generator=rng), torch.randn(1, 50, 32, generator=rng)
    got = lsh_scores(q, signs(k, 4096), k.norm(dim=-1))
    exact = q @ k.mT / math.sqrt(32)
    assert torch.corrcoef(torch.stack([got.flatten(), exact.flatten()]))[0, 1] > 0.99


def test_a_bucket_is_the_pattern_of_signs(rng):
    x = torch.randn(5, 16, generator=rng)
    for row, number in zip(signs(x, 6), buckets(x, 6), strict=True):
        assert int("".join("1" if s > 0 else "0" for s in row), 2) == number


def test_coarse_buckets_are_the_first_bits_of_fine_ones(rng):
    x = torch.randn(50, 16, generator=rng)
    assert torch.equal(buckets(x, 8) >> 2, buckets(x, 6))


# every operation by every backend against its definition


def _case_attention(rng, backend):
    q, k, v, log_count = _inputs(rng, 2, 4, 2, 37, 101, 64, 2)
    log_count[:, :, 5:9] = log_count[:, 1:, 64:96] = -math.inf
    k[log_count.isinf()] = v[log_count.isinf()] = 1e4
    args = _moved(q, k, v, log_count)
    want = attention_reference(*args)
    if backend == "torch":
        return attention_torch.attention(*args), want
    if backend == "hopper":
        from tachyscope.kernels.attention import hopper

        return hopper.flash_attention(*args), want
    setting = None if ON_GPU else flash.Setting(32, 32, 4, 2, False, 2)
    return flash.flash_attention(*args, setting=setting), want


def _case_attention_fp8(rng, backend):
    q, k, v, log_count = _inputs(rng, 2, 4, 2, 37, 301, 64, 2)
    log_count[:, :, 5:9] = log_count[:, 1:, 64:96] = -math.inf
    q, k, v, log_count = _moved(q, k, v, log_count)
    codes = attention_fp8_torch.quantise_queries(q)
    centre = attention_fp8_torch.centre_of(k, log_count)
    entries = attention_fp8_torch.quantise_entries(k, v, 128, log_count, centre)
    want = attention_fp8_reference(*codes, entries, 301, log_count)
    if backend == "torch":
        return attention_fp8_torch.attention_fp8(q, k, v, log_count), want
    from tachyscope.kernels.attention_fp8 import hopper

    return hopper.attention_fp8(q, k, v, log_count), want


def _listed(rng, n=700, width=64):
    """Queries, present entries, listed blocks that are codes already, and what their keys lack."""
    q, k, v, log_count = _moved(*_inputs(rng, 2, 4, 2, 200, n, width, 2))
    log_count[:, :, 5:9] = log_count[:, 1:, 128:256] = -math.inf
    centre = attention_fp8_torch.centre_of(k, log_count)
    entries = attention_fp8_torch.quantise_entries(k, v, 128, log_count, centre)
    weights = torch.nn.functional.pad(log_count, (0, -n % 128), value=-math.inf)
    ids = torch.rand(2, 4, 2, 6, generator=rng).argsort(-1)[..., :3].int().contiguous()
    ids, counts = _moved(ids, torch.full((2, 4, 2), 3, dtype=torch.int32))
    past = attention_fp8_torch.Listed(entries, weights, ids.int(), counts.int(), 128)
    return q, k[:, :, :333], v[:, :, :333], past, centre


def _case_attention_listed(rng, backend):
    q, k, v, past, centre = _listed(rng)
    now = attention_fp8_torch.quantise_entries(k, v, 128, None, centre)
    want = attention_fp8_reference(
        *attention_fp8_torch.quantise_queries(q), now, k.shape[2], None, past
    )
    if backend == "hopper":
        from tachyscope.kernels.attention_fp8 import hopper

        return hopper.listed_attention_fp8(q, k, v, past, centre).out, want
    return attention_fp8_torch.listed_attention_fp8(q, k, v, past, centre).out, want


def _case_attention_decoded(rng, backend):
    """Codes back as vectors, where no kernel reads them."""
    from tachyscope.kernels.attention_fp8 import triton

    *_, past, centre = _listed(rng)
    k, v = attention_fp8_torch.dequantise(past.entries, torch.float64)
    got = triton.decode_entries(past.entries, centre, DTYPE)
    return torch.stack(got), torch.stack([k + centre.double().unsqueeze(2), v])


def _case_norm_quantise(rng, backend):
    (x,) = _moved(torch.randn(2, 6, 40, 24, generator=rng))
    # how the interpreter rounds is mended in tests/test_norm_quantise.py
    code, scale = (norm_triton if backend == "triton" else norm_torch).quantise(x)
    # numbers of 16 bits lie midway between two codes: either is at most a sixteenth off
    return code.double() * scale.double(), x if ON_GPU else quantise_reference(x)[0]


def _case_linear_fp8(rng, backend):
    x, weight = _moved(*(torch.randn(1, 1, n, 32, generator=rng) for n in (48, 16)))
    held = fp8_weight(weight[0, 0])
    code = norm_torch.quantise(x[0])
    bias = weight[0, 0, :, 0].contiguous()
    return linear_fp8(*code, held, bias, DTYPE), linear_fp8_reference(*code, held, bias)


def _case_block_sparse(rng, backend):
    tile, block, tiles, blocks = 128, 32, 2, 5
    q, k, v, _ = _moved(*_inputs(rng, 2, 4, 2, 150, 21, 64))
    slots = blocks * block - 3
    past_k, past_v = _moved(*(torch.randn(2, 2, slots + 9, 64, generator=rng) for _ in range(2)))
    log_count = torch.randn(2, 2, blocks * block, generator=rng)
    log_count[:, :, slots:] = log_count[:, :, block : 2 * block] = -math.inf
    ids = torch.rand(2, 4, tiles + 1, blocks, generator=rng).argsort(-1).int()
    counts = torch.randint(0, blocks + 1, ids.shape[:3], generator=rng, dtype=torch.int32)
    ids[torch.arange(blocks) >= counts.unsqueeze(-1)] = -1
    past = BlockTable(
        past_k[:, :, :slots], past_v[:, :, :slots], *(x.to(DEVICE) for x in (log_count, ids, counts)),
        tile, block,
    )  # fmt: skip
    want = block_sparse_attention_reference(q, k, v, past)
    if backend == "torch":
        read = block_sparse_torch.block_sparse_attention(q, k, v, past)
        assert read.pairs == pairs_of(q, k, past)
        return read.out, want
    if backend == "hopper":
        from tachyscope.kernels.attention import hopper

        return hopper.block_sparse_attention(q, k, v, past).out, want
    setting = None if ON_GPU else flash.Setting(32, 32, 4, 2, True, 1)
    read = flash.block_sparse_attention(q, k, v, past, setting=setting)
    return read.out, want


def _case_rotary(rng, backend, rope=None):
    rope = rope or Rope(((24, (1.0, 0, 0)), (20, (0, 1.0, 0)), (20, (0, 0, 1.0))))
    # as they come: queries beside keys in one linear's output, and slots inside a cache
    qkv = torch.randn(2, 37, 2 * 3 * 64, generator=rng).to(DEVICE, DTYPE)
    x = qkv.chunk(2, -1)[1].unflatten(-1, (3, 64)).transpose(1, 2)
    origin = torch.arange(2, dtype=torch.float64, device=DEVICE).view(-1, 1, 1, 1)
    pos = torch.rand(37, 3, generator=rng).to(DEVICE) * 50
    cos, sin = rope.cos_sin(pos, x.dtype, origin)
    caches = [torch.full((2, 3, 60, 64), 7.0, device=DEVICE, dtype=x.dtype) for _ in range(2)]
    got, want = (cache[:, :, 9:46] for cache in caches)
    apply_rotary_reference(want, x, cos, sin, rope)
    if backend == "torch":
        got.copy_(rope.apply(x, cos, sin))
    else:
        rotary_triton.apply_rotary(got, x, cos, sin, rope)
    return caches


def _case_rotary_halves(rng, backend):
    return _case_rotary(rng, backend, Rope(((64, (24.0, 6.0, 1.0)),), interleaved=False))


def _case_permute(rng, backend, back=False):
    (held,) = _moved(torch.randn(2, 3, 110, 64, generator=rng))
    got, want = held.clone(), held.clone()
    order = torch.rand(2, 3, 120, generator=rng)[:, :, :95].argsort(-1).int().to(DEVICE)
    slots = {"torch": slots_torch, "triton": slots_triton}[backend]
    slots.permute(got[:, :, 7:102], order, back)
    permute_reference(want[:, :, 7:102], order, back)
    return got, want


def _case_permute_back(rng, backend):
    return _case_permute(rng, backend, back=True)


def _case_shift(rng, backend):
    (held,) = _moved(torch.randn(2, 3, 110, 64, generator=rng))
    got, want = held.clone(), held.clone()
    {"torch": slots_torch, "triton": slots_triton}[backend].shift(got, 31, 10, 70)
    shift_reference(want, 31, 10, 70)
    return got, want


def _case_codes(rng, backend):
    """int8 codes, decoded: a number between two codes may become either."""
    (x,) = _moved(torch.randn(2, 3, 37, 64, generator=rng))
    code = torch.zeros(2, 3, 50, 64, dtype=torch.int8, device=DEVICE)[:, :, 9:46]
    scale = torch.full((2, 3, 50), math.nan, device=DEVICE)[:, :, 9:46]
    out = torch.full((2, 3, 40, 64), math.nan, dtype=x.dtype, device=DEVICE)[:, :, :37]
    if backend == "torch":
        found, scale[:] = codes_torch.encode(x, torch.int8)
        code.copy_(found)
        out.copy_(codes_torch.decode(code, scale, x.dtype))
    else:
        codes_triton.encode(x, code, scale)
        codes_triton.decode_into(code, scale, out)
    want, step = encode_reference(x.cpu(), torch.int8)
    assert ((code.cpu().int() - want.int()).abs() <= 1).all()
    torch.testing.assert_close(out.double(), code.double() * scale.double()[..., None], **TOLERANCE)
    return scale, step


def _case_packed(rng, backend, kind):
    """Codes of 4 and 2 bits, of slots that begin within a group."""
    (x,) = _moved(torch.randn(2, 3, 40, 64, generator=rng))
    bits, group = {
        "int4": (4, 1), "int4_channels": (4, 8), "int2_channels": (2, 8), "int2": (2, 1)
    }[kind]  # fmt: skip
    code, scale = codes_torch.encode_packed(x, bits, group)
    first = 5 % group
    code, scale = code[:, :, 5:37], scale[:, :, 5 // group : -(-37 // group)]
    out = torch.full((2, 3, 40, 64), math.nan, dtype=x.dtype, device=DEVICE)[:, :, 4:36]
    module = {"torch": codes_torch, "triton": codes_triton}[backend]
    module.decode_packed(code, scale, out, bits, group, first)
    return out, decode_packed_reference(code.cpu(), scale.cpu(), bits, group, first)


def _case_buckets(rng, backend):
    (x,) = _moved(torch.randn(2, 3, 101, 64, generator=rng))
    got = {"torch": hashing, "triton": block_index_triton}[backend].buckets(x[:, :, 5:], 8)
    want = buckets_reference(x[:, :, 5:], 8)
    same = (got.cpu() == want).double().mean()
    return same.round(decimals=2), torch.ones_like(same)  # a key on a plane may fall on either side


def _case_encode_blocks(rng, backend, block=32):
    (k,) = _moved(torch.randn(2, 3, 90, 64, generator=rng))
    n = -(-90 // block)
    log_count = torch.randn(2, 3, n * block, generator=rng)
    log_count[:, :, 90:] = log_count[:, :, ::7] = log_count[:, :, block : 2 * block] = -math.inf
    log_count = log_count.to(DEVICE)
    code = torch.zeros(2, 3, n + 2, 64, dtype=torch.int8, device=DEVICE)
    scale, weight = (
        torch.full(size, math.nan, device=DEVICE) for size in ((2, 3, n + 2, 1), (2, 3, n + 2))
    )
    codes = Codes(code, scale, weight)
    {"torch": block_index_torch, "triton": block_index_triton}[backend].encode_blocks(
        Past(k, k), log_count, block, codes
    )
    assert weight[:, :, n:].isnan().all()
    means, weights = encode_blocks_reference(k, log_count, block)
    error = (code * scale)[:, :, :n].double().cpu() - means
    assert (error.abs() <= 0.51 * scale[:, :, :n].double().cpu()).all()
    return weight[:, :, :n].double().cpu(), weights


def _case_block_mass(rng, backend):
    (q,) = _moved(torch.randn(2, 150, 6, 64, generator=rng).transpose(1, 2))
    code, scale = hashing.quantise(torch.randn(2, 3, 90, 64, generator=rng))
    weight = torch.randn(2, 3, 90, generator=rng)
    weight[:, :, 7] = -1e30  # a block of empty slots
    codes = Codes(*(x.to(DEVICE) for x in (code, scale, weight)))
    operation = {"torch": block_index_torch, "triton": block_index_triton}[backend].block_mass
    return operation(q, codes, 70, 64), block_mass_reference(q, codes, 70, 64)


def _case_mean_mass(rng, backend):
    """A tile scores blocks by 16 means of 4 queries; programs share the blocks in three parts."""
    (q,) = _moved(torch.randn(2, 150, 6, 64, generator=rng).transpose(1, 2))
    code, scale = hashing.quantise(torch.randn(2, 3, 90, 64, generator=rng))
    weight = torch.randn(2, 3, 90, generator=rng)
    weight[:, :, 7] = -1e30
    codes = Codes(*(x.to(DEVICE) for x in (code, scale, weight)))
    means = torch.stack([part.mean(2) for part in q.split(4, 2)], 2)
    if backend == "torch":
        found = block_index.mean_mass(q.cpu(), Codes(code, scale, weight), 70, 64)
    else:
        found = block_index_triton.mean_mass(q, codes, 70, 64, parts=3)
    want = block_mass_reference(means, codes, 70, 16)
    want[..., 7] = -1.0  # it has no entry
    return found, want


def _case_match(rng, backend):
    base = torch.randn(2, 2, 20, 64, generator=rng)
    pick = torch.randint(20, (141,), generator=rng)
    (k,) = _moved(base[:, :, pick] + 0.3 * torch.randn(2, 2, 141, 64, generator=rng))
    features = alike_features(k, shared=False)
    want, partner = best_older_reference(features.double().cpu(), 1)
    if backend == "torch":
        cosine, index = best_older(features, 1)
    else:
        setting = None if ON_GPU else match_triton.Setting(64, 32, 4, span=100, use_tma=False)
        cosine, index = match_triton.match(k, 1, setting)
    assert (index.cpu() == partner).double().mean() > 0.99
    return cosine, want


def _case_merge(rng, backend, newest=True, mean=True):
    b, h, n, excess, behind = 2, 2, 41, 25, 5
    k, v, raw = _moved(*(torch.randn(b, h, n + behind, 64, generator=rng) for _ in range(3)))
    log_count = torch.rand(b, h, n + behind, generator=rng)
    pos = torch.randint(9, (b, h, n + behind, 3), generator=rng).float()
    held = Entries(k, v, log_count.to(DEVICE), pos.to(DEVICE), raw)
    alike = torch.rand(b, h, n, generator=rng)
    alike[:, :, 0] = -math.inf
    partner = (torch.rand(b, h, n, generator=rng) * torch.arange(n)).long()
    alike, partner = alike.to(DEVICE), partner.to(DEVICE)
    want, heir = merge_entries_reference(held, alike, partner, excess, newest, mean)
    operation = {"torch": merge_torch, "triton": merge_triton}[backend].merge_entries
    operation(held, alike, partner, excess, newest, mean)
    assert torch.equal(partner[:, :, : n - excess], heir)
    got = [x[:, :, : n + behind - excess] for x in held.tensors()]
    return [
        torch.cat([x if x.dim() == 4 else x.unsqueeze(-1) for x in part], -1)
        for part in (got, want)
    ]


def _case_merge_drops(rng, backend):
    return _case_merge(rng, backend, mean=False)


def _case_prompt_hits(rng, backend):
    q, k = _moved(*(torch.randn(2, 3, n, 64, generator=rng) for n in (131, 77)))
    log_count = torch.randn(2, 3, 77, generator=rng)
    log_count[1, :, 40:] = -math.inf
    log_count = log_count.to(DEVICE)
    operation = {"torch": hits_torch, "triton": hits_triton}[backend].count_nearest
    got = operation(q, k, log_count).cpu()
    want = count_nearest_reference(*(x.cpu() for x in (q, k, log_count)))
    assert got[log_count.cpu().isinf()].eq(0).all() and torch.equal(got.sum(-1), want.sum(-1))
    # halves may round to another code, and two scores then change places
    off = (got - want).abs().sum() / want.sum()
    return off.round(decimals=1), torch.zeros_like(off)


def _case_temporal_score(rng, backend):
    q, k = _moved(*(torch.randn(2, h, 7, 12, generator=rng) for h in (6, 2)))
    return temporal_score(q, k), temporal_score_reference(q, k)


def _case_drift(rng, backend):
    drift, y, old = (torch.randn(2, s, 5, generator=rng) for s in (1, 7, 7))
    computed = torch.rand(2, 7, generator=rng) < 0.5
    y = torch.where(computed.unsqueeze(-1), y, old)
    args = (drift, y, old, computed, 16.0)
    got, want = follow_drift(*args), follow_drift_reference(*args)
    return torch.cat(got, 1), torch.cat(want, 1)


def _case_host_blocks(rng, backend, host):
    """Blocks of 4 entries copied to host memory and back to other places."""
    at = "cpu" if backend == "torch" else DEVICE  # what a kernel reads lies where it runs
    k, v = torch.randn(2, 3, 2, 24, 64, generator=rng).to(DEVICE, DTYPE)
    if host == "bytes":  # codes on the device, moved as they are
        k, v, host = (40 * k).abs().to(torch.uint8), (40 * v).abs().to(torch.uint8), "native"
    held = host_tensors((3, 2, 9, 4), 64, host, k.dtype, torch.device(at))
    stood = torch.randperm(6, generator=rng)[:5].expand(3, 2, 5).int().to(DEVICE)
    ids = torch.randperm(9, generator=rng)[:5].expand(3, 2, 5).int().contiguous().to(DEVICE)
    operation = {"torch": host_blocks_torch, "triton": host_blocks_triton}[backend]
    blocks, out = HostBlocks(**held), [torch.empty_like(k[:, :, :20]) for _ in range(2)]
    operation.store_blocks(k, v, stood, blocks, ids)
    operation.load_blocks(blocks, ids, *out)
    want = [stored_reference(x.cpu(), 4, host)[:, :, stood[0, 0].long().cpu()] for x in (k, v)]
    return torch.stack(out).unflatten(3, (5, 4)), torch.stack(want)


def _case_admit(rng, backend):
    """Blocks of heads by twos where nothing is resident yet; more of it in test_admit.py."""
    chosen = torch.rand(2, 4, 3, 37, generator=rng).topk(5, -1, sorted=False)
    none = (torch.full((2, 2, n), -1, dtype=torch.int32) for n in (38, 11, 11, 11))
    held = Residency(torch.tensor([5.0]), torch.full((2, 2, 37), -1.0), *none)
    want, first = admit_reference(*chosen, held, 3)
    held, chosen = (tuple(x.to(DEVICE) for x in part) for part in (held, chosen))
    operation = {"torch": admit_torch, "triton": admit_triton}[backend]
    got = operation.admit(*chosen, Residency(*held), 3)
    return torch.cat([got, *held[1:]], 2), torch.cat([first, *want[1:]], 2)


CASES = {
    "admit": (_case_admit, ("torch", "triton")),
    "host_blocks_native": (
        functools.partial(_case_host_blocks, host="native"),
        ("torch", "triton"),
    ),
    "host_blocks_int8": (functools.partial(_case_host_blocks, host="int8"), ("torch", "triton")),
    "host_blocks_int4": (functools.partial(_case_host_blocks, host="int4"), ("torch", "triton")),
    "host_blocks_bytes": (functools.partial(_case_host_blocks, host="bytes"), ("torch", "triton")),
    "attention": (_case_attention, ("torch", "triton", "hopper")),
    "attention_fp8": (_case_attention_fp8, ("torch", "hopper")),
    "attention_fp8_listed": (_case_attention_listed, ("torch", "hopper")),
    "attention_fp8_decoded": (_case_attention_decoded, ("triton",)),
    "norm_quantise": (_case_norm_quantise, ("torch", "triton") if ON_GPU else ("torch",)),
    "linear_fp8": (_case_linear_fp8, ("torch",)),
    "block_sparse": (_case_block_sparse, ("torch", "triton", "hopper")),
    "rotary": (_case_rotary, ("torch", "triton")),
    "rotary_halves": (_case_rotary_halves, ("torch", "triton")),
    "slots_permute": (_case_permute, ("torch", "triton")),
    "slots_permute_back": (_case_permute_back, ("torch", "triton")),
    "slots_shift": (_case_shift, ("torch", "triton")),
    "codes": (_case_codes, ("torch", "triton")),
    **{
        f"codes_{kind}": (functools.partial(_case_packed, kind=kind), ("torch", "triton"))
        for kind in ("int4", "int4_channels", "int2", "int2_channels")
    },
    "block_index_buckets": (_case_buckets, ("torch", "triton")),
    "block_index_encode": (_case_encode_blocks, ("torch", "triton")),
    "block_index_encode_30": (
        functools.partial(_case_encode_blocks, block=30),
        ("torch", "triton"),
    ),
    "block_index_encode_4": (functools.partial(_case_encode_blocks, block=4), ("torch", "triton")),
    "block_index_mass": (_case_block_mass, ("torch", "triton")),
    "block_index_mean_mass": (_case_mean_mass, ("torch", "triton")),
    "match": (_case_match, ("torch", "triton")),
    "merge": (_case_merge, ("torch", "triton")),
    "merge_drops": (_case_merge_drops, ("torch", "triton")),
    "prompt_hits": (_case_prompt_hits, ("torch", "triton")),
    "replay_score": (_case_temporal_score, ("torch",)),
    "replay_drift": (_case_drift, ("torch",)),
} | decode_cases.CASES


def _marks(name, backend):
    if backend == "hopper":
        return pytest.mark.gpu
    # interpreted, most of a decode step's take seconds; a GPU runs them all
    quick = ON_GPU or backend == "torch" or name not in decode_cases.CASES
    return () if quick or name in decode_cases.QUICK else pytest.mark.slow


@pytest.mark.parametrize(
    "operation, backend",
    [
        pytest.param(name, backend, marks=_marks(name, backend))
        for name, (_, backends) in CASES.items()
        for backend in backends
    ],
)
def test_an_operation_equals_its_reference(rng, operation, backend):
    """At odd shapes; memory handed out is NaN (conftest), and so is what stands behind a cache."""
    if backend == "hopper" and not (ON_GPU and torch.cuda.get_device_capability() == (9, 0)):
        pytest.skip("needs a Hopper GPU")
    got, want = CASES[operation][0](rng, backend)
    # a code of 4 bits stands low in a mantissa
    loose = {} if ON_GPU or "int4" not in operation else {"rtol": 1e-4, "atol": 1e-4}
    if "listed" in operation:  # a share between two codes may go either way
        loose = {"rtol": 5e-3, "atol": 5e-4}
    if ON_GPU and operation == "norm_quantise":
        loose = {"rtol": 1.001 / 16, "atol": 1e-4}
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), **TOLERANCE | loose)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_code_is_drawn_of_logits_that_are_no_numbers():
    """No launch may search on for ever."""
    for value in (math.nan, -math.inf, math.inf):
        code = decode_cases.draw_code(torch.full((1, 7), value))
        assert 0 <= code < 7


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("row", ["far from zero", "an outlier first", "equal"])
def test_a_product_norms_rows_without_cancellation(rng, tokens, row):
    """A variance that is the difference of two large numbers would be wrong, or below zero."""
    x = 1000 + torch.randn(tokens, 40, generator=rng)
    if row == "an outlier first":
        x[:, 0] = -1e6
    elif row == "equal":
        x[:] = 1000.0
    x = x.to(DTYPE)
    weight = Weight(torch.randn(19, 40, generator=rng))
    norm = Norm(torch.ones(40), torch.zeros(40), 1e-5)
    want = gemv_reference(x, (weight,), norm)
    out, *given = decode_cases.moved((torch.empty(tokens, 19), x, (weight,), norm))
    got = gemv_triton.gemv(out, *given, setting=decode_cases.SMALL).cpu()
    error = 6e-2 if ON_GPU else 2e-3
    torch.testing.assert_close(got.double(), want.double(), rtol=error, atol=error)


def test_every_operation_is_in_the_table():
    folders = {
        path.parent.name for path in Path(attention_torch.__file__).parents[1].glob("*/*.py")
    }
    named = {
        next(f for f in sorted(folders, key=len)[::-1] if name.startswith(f)) for name in CASES
    }
    assert named == folders - {"__pycache__"}


@pytest.mark.parametrize("name", dispatch.TABLE)
def test_a_row_of_the_table_has_a_definition_and_takes_what_its_operation_takes(name):
    operation, (folder, function) = dispatch.TABLE[name], name.split(".")
    home = importlib.import_module(f"tachyscope.kernels.{folder}")
    reference = importlib.import_module(f"tachyscope.kernels.{folder}.reference")
    assert callable(getattr(reference, operation.definition))
    taken = list(inspect.signature(getattr(home, function)).parameters)
    for row in operation.rows:
        if "hopper" in row.module:
            pytest.importorskip("triton.experimental.gluon")
        own = inspect.signature(dispatch.backend(name, row)).parameters
        assert list(own)[: len(taken)] == taken
        assert {operation.runs_on or taken[0], *dispatch.arguments(row.takes)} <= set(taken)


@pytest.mark.parametrize("has_fp8", [True, False])
def test_a_gpu_without_float8_is_not_asked_to_make_codes(monkeypatch, has_fp8):
    monkeypatch.setattr(dispatch, "has_fp8", lambda device: has_fp8)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16, device="meta")
    for name in ("norm_quantise.quantise", "norm_quantise.gelu_quantise"):
        assert (dispatch.find_row(name, {"x": x}) is not None) == has_fp8
    assert (dispatch.find_row("attention_fp8.quantise_queries", {"q": x}) is not None) == has_fp8
    gated = {"x": x, "y": x, "gate": x}
    assert dispatch.find_row("norm_quantise.add_gated", gated) is not None


def test_every_backend_has_a_row():
    files = Path(attention_torch.__file__).parents[1].glob("*/*.py")
    found = {f"{path.parent.name}.{path.stem}" for path in files}
    rows = {
        dispatch.backend(name, row).__module__.removeprefix("tachyscope.kernels.")
        for name, operation in dispatch.TABLE.items()
        for row in operation.rows
    }
    assert rows == {x for x in found if x.endswith((".triton", ".hopper", ".several"))}


@pytest.mark.slow
def test_without_triton_stock_torch_serves():
    """In a process of its own: which backends there are is found out at import."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import tachyscope as ts\n"
        "from tachyscope.kernels import device\n"
        "assert not device.HAS_TRITON\n"
        "plan = 'cache=merge:budget=6f attention=ann:read=0.8'\n"
        "assert sum(1 for _ in ts.rollout(ts.load('toy-chunks'), plan, frames=40)) > 2\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
