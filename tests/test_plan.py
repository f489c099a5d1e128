import re

import pytest
from streams import CHUNKS, TOKENS

from tachyscope.errors import TachyscopeError
from tachyscope.plan import NAMED, NAMES, POLICIES, Plan
from tachyscope.types import Size

STOCK = "cache=window:budget=21f,sink=0 attention=dense text=dense replay=none"


def test_the_headline_plan_reads_as_the_documents_write_it():
    text = "cache=merge:budget=21f attention=ann:read=0.2 text=pads replay=none"
    plan = Plan.parse(text)
    assert plan.cache.budget == Size(21, frames=True)
    assert plan.attention.read == 0.2
    assert plan.replay is None


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_spelled_out_parses_back(name, kind):
    plan = Plan.parse(name, kind, STOCK)
    assert Plan.parse(str(plan), kind) == plan
    assert str(plan).count("=") >= 4


def test_overrides_replace_one_part_of_the_base():
    plan = Plan.parse("fast cache=window:budget=9f replay=attentive:share=0.6")
    base = Plan.parse("fast")
    assert plan.cache != base.cache and plan.attention == base.attention
    assert plan.replay.share == 0.6


def test_every_policy_names_its_paper_or_none():
    for table in POLICIES.values():
        for policy in table.values():
            assert isinstance(policy.paper, str) and policy.__doc__


@pytest.mark.parametrize(
    "text, message",
    [
        ("quick", "no plan 'quick'; there are: dense, stock, lossless, balanced, fast, fastcar, fast-ar"),
        ("cash=all", "a plan has no 'cash'; it has: cache, attention, text, replay"),
        ("cache=magic", "no cache policy 'magic'; there are: keep_all, window, merge"),
        ("replay=magic", "no replay policy 'magic'; there are: attentive, random, every_k, none"),
        ("cache=none", "no cache policy 'none'; there are: keep_all, window, merge"),
        ("cache=window:snk=3", "cache policy 'window' has no 'snk'; it takes: budget, sink, positions, fold, view, max_distance"),
        ("cache=keep_all:x=1", "cache policy 'keep_all' has no 'x'; it takes: nothing"),
        ("cache=window:sink=1,sink=2", "cache policy 'window' is given 'sink' twice: leave one out"),
        ("cache=window:sink=one", "cache policy 'window': sink must be a whole number, got 'one'"),
        ("attention=ann:read=much", "attention policy 'ann': read must be a number, got 'much'"),
        ("attention=ann:read=nan", "attention policy 'ann': read must be a number, got 'nan'"),
        ("attention=ann:read=1,hash=md5", "attention policy 'ann': hash must be one of int8, lsh, got 'md5'"),
        ("replay=attentive:share=1,authors=1", "replay policy 'attentive': authors must be true or false, got '1'"),
        ("cache=window:budget=big", "a size is entries (1344) or latent frames (21f), got 'big': give one of these"),
        ("replay=none:x=1", "replay=none takes no settings, got 'x=1'"),
        ("fast dense", "a plan is one base name, then part=policy words, got 'dense' behind: parts are cache, attention, text, replay"),
    ],
)  # fmt: skip
def test_a_fault_in_a_plan_is_named(text, message):
    with pytest.raises(TachyscopeError, match=f"^{re.escape(message)}$"):
        Plan.parse(text)


def test_a_model_without_a_stock_plan_says_so():
    with pytest.raises(TachyscopeError, match="names no stock plan"):
        Plan.parse("stock")


def test_text_policies_belong_to_models_with_cross_attention():
    with pytest.raises(TachyscopeError, match="has no cross-attention, got text=pads"):
        Plan.parse("dense text=pads", "tokens").check(TOKENS)
    with pytest.raises(TachyscopeError, match="text=none is not possible"):
        from dataclasses import replace

        Plan.parse("dense text=none").check(replace(CHUNKS, text=64))
