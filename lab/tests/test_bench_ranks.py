"""What several GPUs would make of one stream: the bytes are those that ranks send."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from faults import refused

from tachyscope.core.ranks import Ranks
from tachyscope.models.toys import toy_chunks
from tachyscope_lab.bench.ranks import lines, predict_ranks, sent


@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_sends_what_is_counted(count):
    shape = replace(toy_chunks().shape(), layers=1, passes=1)
    mesh = SimpleNamespace(
        get_local_rank=lambda: 0, size=lambda: count, get_group=lambda: None, device_type="cpu"
    )
    ranks, bytes_sent = Ranks(mesh), []

    def exchange(x):
        bytes_sent.append(x.nbytes * (count - 1) // count)  # its own part stays
        return x.contiguous()

    ranks._exchange = exchange
    tokens = shape.tokens_per_frame
    own = torch.zeros(1, shape.heads, shape.chunk * tokens // count, shape.head_dim)
    q, _, _ = ranks.to_heads(tokens, own, own, own)
    assert q.shape == (1, shape.heads // count, shape.chunk * tokens, shape.head_dim)
    there = bytes_sent[:]
    assert sum(there) == sent(shape, count, 4)[0]  # the last layer of the clean pass reads nothing
    assert ranks.to_tokens(tokens, q).shape == own.shape
    assert 3 * bytes_sent[1] == bytes_sent[0]
    twice, exchanges = sent(replace(shape, passes=2), count, 4)
    assert (twice, exchanges) == (2 * sum(there) + bytes_sent[1], 3)


def test_more_gpus_are_predicted_and_one_is_measured():
    measured = {"rows": [{"name": "fast", "chunk_ms": 276.0, "parts_ms": {"read": 121.0}}]}
    found = predict_ranks(measured)
    one, two, four = found["rows"]
    assert one["chunk_ms"] == 276.0 and not one["predicted"] and one["sent_mb"] == 0
    assert two["predicted"] and four["predicted"]
    # 4 numbers of 1,536 channels for 2,340 tokens, half of them another's, 30 layers, 5 passes
    assert two["sent_mb"] == pytest.approx(4 * 1536 * 2340 / 2 * 2 * 150 / 1e6, rel=0.01)
    assert 1.4 < two["ratio"] < 2 and two["ratio"] < four["ratio"] < 4
    told = lines(found)
    assert "measured" in told[-3] and told[-1].endswith("predicted")
    refused(lambda: predict_ranks({"rows": [{"name": "fast"}]}), "bench wan")
