"""The GPU's count of nearest prompt tokens against its definition; interpreted without a GPU."""

import math

import pytest
import torch

from tachyscope.attention.ann_text import AnnText
from tachyscope.attention.pads import collapse
from tachyscope.core.work import Work
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.hashing import int8_scores, quantise

pytest.importorskip("triton")
from tachyscope.kernels.prompt_hits.triton import count_nearest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter multiplies no bfloat16
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def _draw(rng, *size):
    return torch.randn(*size, generator=rng).to(DEVICE, DTYPE)


@pytest.mark.parametrize(("tokens", "n"), [(300, 77), (128, 32), (1, 1), (70, 5)])
def test_counts_equal_those_of_the_scores(rng, tokens, n):
    # as in a model: queries lie between heads of others
    q = _draw(rng, 2, tokens, 3, 64).transpose(1, 2)
    k = _draw(rng, 2, 3, n + 9, 64)[:, :, 4 : n + 4]
    log_count = torch.randn(2, 1, n, generator=rng).to(DEVICE)
    if n > 5:
        log_count[1, 0, n // 2 :] = -math.inf
    log_count = log_count.expand(2, 3, n)
    counts = count_nearest(q, k, log_count)
    assert counts.sum(-1).eq(tokens).all() and counts[log_count == -math.inf].eq(0).all()
    scores = int8_scores(q, *quantise(k)) + log_count.unsqueeze(2)
    expected = torch.nn.functional.one_hot(scores.argmax(-1), n).sum(2)
    # halves may round to another code, and two scores then change places
    assert (counts - expected).abs().sum() <= 0.01 * expected.sum()


def test_slots_that_are_all_empty_are_hit_by_none(rng):
    q, k = _draw(rng, 1, 2, 40, 64), _draw(rng, 1, 2, 7, 64)
    assert count_nearest(q, k, torch.full((1, 2, 7), -math.inf, device=DEVICE)).eq(0).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="where the policy calls the kernel")
@pytest.mark.parametrize("keep", [500, 40])
def test_the_policy_reads_what_its_counts_say(rng, keep):
    # longer than a key, so that scores outweigh the padding
    q = 8 * _draw(rng, 1, 300, 12, 128).transpose(1, 2)
    k, v = _draw(rng, 1, 12, 512, 128), _draw(rng, 1, 12, 512, 128)
    text = collapse(k, v, (90,))
    log_count = text.log_count.expand(1, 12, -1)
    counts = count_nearest(q, text.k, log_count)
    assert counts.gt(0).sum(-1).max() > 40
    best = counts.topk(min(keep, 91), -1, sorted=False).indices
    read = torch.full_like(log_count, -math.inf).scatter(2, best, log_count.gather(2, best))
    read = read.masked_fill(counts == 0, -math.inf)
    got = AnnText(keep=keep).attend(q, text, Work())
    torch.testing.assert_close(
        got, attention_reference(q, text.k, text.v, read), rtol=2e-2, atol=2e-2
    )
