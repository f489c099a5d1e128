"""`ts.inspect`: the pairs of any model's attention that carry nothing, counted."""

import math
import threading

import pytest
import torch
from hosts import inputs, make_pipeline
from torch import nn
from torch.nn import functional as F

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.measure.inspection import any_model


class Reader(nn.Module):
    """One layer that reads what it is given."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Module()
        self.attn.forward = lambda *args, **kwargs: F.scaled_dot_product_attention(*args, **kwargs)

    def forward(self, *args, **kwargs):
        return self.attn(*args, **kwargs)


def scored(scores, now=10, heads=2):
    """q [1, H, now, 4] and keys whose scores are these, for every query."""
    q = torch.zeros(1, heads, now, 4)
    q[..., 0] = 2.0  # times 1 / sqrt(4)
    k = torch.zeros(1, heads, len(scores), 4)
    k[..., 0] = torch.tensor(scores)
    return q, k, torch.randn_like(k)


def test_half_the_pairs_carry_nothing_and_where_they_lie_says_which_plan():
    """100 keys: 50 of equal mass, 50 of none; one more would carry 2 %."""
    model, sharp, flat = Reader(), [0.0], [-30.0]
    old = sharp * 10 + flat * 50 + sharp * 40  # the first chunk, an idle past, the newest
    mixed = sharp * 10 + (sharp + flat) * 40 + flat * 10
    with ts.inspect(model) as seen:
        model(*scored(old))
    total = seen.total
    assert (total.calls, total.pairs, total.past) == (1, 2 * 10 * 100, 2 * 10 * 90)
    assert total.share("idle") == total.share("idle_past") == total.share("oldest") == 0.5
    assert "50% of your pairs carry 1% of the mass: a window could leave out 50%" in str(seen)
    with ts.inspect(model) as seen:
        model(*scored(mixed))
    assert seen.total.share("idle") == 0.5 and seen.total.share("idle_past") == 0.4
    assert seen.total.oldest == 0 and "try 'fast'" in seen.advice and "attn" in seen.layers
    with ts.inspect(model) as seen:
        model(*scored(sharp * 100))
    assert "few pairs of the past are idle" in seen.advice
    with ts.inspect(model) as seen:
        model(*(x[0, 0] for x in scored(sharp * 10)))
    assert "no call reads keys from before" in seen.advice


def reference(q, k, mask, scale):
    """Pairs that are seen, and idle ones, row by row."""
    weights = ((q @ k.mT).double() * scale + mask).softmax(-1)
    idle = 0
    for row, allowed in zip(
        weights.flatten(0, -2), mask.expand(weights.shape).flatten(0, -2), strict=True
    ):
        carried = row[allowed > -math.inf].sort().values.cumsum(0)
        idle += int((carried <= any_model.IDLE).sum())
    return float((mask.expand(weights.shape) > -math.inf).sum()), float(idle)


CALLS = {
    "plain": {},
    "scaled": {"scale": 1.5},
    "masked": {"attn_mask": torch.rand(7, 12, generator=torch.Generator().manual_seed(4)) < 0.7},
    "biased": {"attn_mask": torch.randn(1, 4, 7, 12, generator=torch.Generator().manual_seed(5))},
    "by row": {"attn_mask": torch.randn(2, 1, 1, 12, generator=torch.Generator().manual_seed(6))},
    "causal": {"is_causal": True},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("most", [1, 1 << 22])
def test_every_form_of_call_is_weighed_as_it_reads(kind, most, monkeypatch):
    monkeypatch.setattr(any_model, "MOST", most)  # a head at a time, or all
    rng, options = torch.Generator().manual_seed(1), CALLS[kind]
    heads = 2 if kind == "grouped" else 4
    q = 4 * torch.randn(2, 4, 7, 8, generator=rng)
    k, v = torch.randn(2, 2, heads, 12, 8, generator=rng)
    mask = torch.zeros(7, 12)
    if kind == "causal":
        mask = torch.full((7, 12), -math.inf).triu(1)
    elif kind == "masked":
        mask = mask.masked_fill(~options["attn_mask"], -math.inf)
    elif kind in ("biased", "by row"):
        mask = options["attn_mask"]
    model = Reader()
    with ts.inspect(model, queries=7) as seen:
        y = model(q, k, v, **options)
    assert torch.equal(y, F.scaled_dot_product_attention(q, k, v, **options))
    wanted = reference(q, k.repeat_interleave(4 // heads, 1), mask, options.get("scale", 8**-0.5))
    assert (seen.total.pairs, seen.total.idle) == wanted


def test_a_models_video_is_its_own_and_its_layers_have_names():
    pipe = make_pipeline()
    plain = pipe.inference(*inputs())
    before = [len(m._forward_pre_hooks) for m in pipe.generator.modules()]
    with ts.inspect(pipe, queries=2) as seen:
        assert torch.equal(pipe.inference(*inputs()), plain)
    assert [len(m._forward_pre_hooks) for m in pipe.generator.modules()] == before
    assert "model.blocks.0.self_attn" in seen.layers and seen.total.past > 0
    for name, layer in seen.layers.items():
        assert layer.calls == 12 and 0 <= layer.share("idle") <= 1, name


def test_what_is_not_seen_is_said():
    model = Reader()
    with ts.inspect(model) as seen:
        F.scaled_dot_product_attention(*scored([0.0] * 10))  # of another model
        other = threading.Thread(target=lambda: model(*scored([0.0] * 10)))
        other.start()
        other.join()
    assert "flash_attn, xformers and flex_attention are not seen" in str(seen)
    with pytest.raises(TachyscopeError, match="or a pipeline with a transformer .* got a int"):
        ts.inspect(3)
    with pytest.raises(TachyscopeError, match="`queries` must be 1 or more, got 0"):
        ts.inspect(model, queries=0)


def test_a_fault_inside_leaves_nothing_behind():
    model = Reader()
    with pytest.raises(RuntimeError), ts.inspect(model):
        model(*(torch.zeros(1, 1, 2, n) for n in (3, 4, 4)))
    assert not model._forward_pre_hooks and not model.attn._forward_hooks
