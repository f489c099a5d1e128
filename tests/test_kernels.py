import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tachyscope.kernels.attention import attention
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.attention.torch import attention_by_channels, high_and_low
from tachyscope.kernels.hashing import buckets, int8_scores, lsh_scores, quantise, signs
from tachyscope.kernels.match.reference import best_older_reference
from tachyscope.kernels.match.torch import alike_features, best_older
from tachyscope.kernels.merge.reference import fold_reference
from tachyscope.kernels.merge.torch import fold, roots
from tachyscope.kernels.replay import (
    replay_gated,
    replay_masked,
    replay_rows,
    temporal_score,
)
from tachyscope.kernels.replay.reference import temporal_score_reference

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


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_temporal_score_equals_its_reference(rng, heads):
    q = torch.randn(2, heads[0], 7, 12, generator=rng)
    k = torch.randn(2, heads[1], 7, 12, generator=rng)
    torch.testing.assert_close(temporal_score(q, k), temporal_score_reference(q, k))


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
