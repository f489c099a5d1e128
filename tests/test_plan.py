import json
import random
import re
import typing
from dataclasses import replace
from pathlib import Path

import pytest
from streams import CHUNKS, TOKENS

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import NAMED, NAMES, Plan, check_text, replaced
from tachyscope.core.policy import OPTIONAL, QUESTIONS, policies, settings
from tachyscope.core.types import Size

POLICIES = {question: policies(question) for question in QUESTIONS}
GOLDEN = Path(__file__).parent / "golden_plans.json"
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


@pytest.mark.parametrize("kind", NAMED)
def test_every_plan_is_spelled_as_ever(kind):
    """What a plan's text stood for is in results and snapshots: it must not change."""
    told = json.loads(GOLDEN.read_text())[kind]
    assert len(told) > 90
    for text, spelled in told:
        assert str(Plan.parse(text, kind, STOCK)) == spelled, text


def draw(rng, setting):
    """A setting's text: of its type, `none` where it may be."""
    kind = setting.type
    if typing.get_origin(kind) is typing.Literal:
        return rng.choice(typing.get_args(kind))
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if options and rng.random() < 0.4:
        return "none"
    kind = options[0] if options else kind
    if typing.get_origin(kind) is typing.Literal:
        return rng.choice(typing.get_args(kind))
    values = {
        bool: ("true", "false"), Size: ("21f", "9f", "1344"), int: ("0", "1", "3"),
        float: ("0.25", "0.5", "1"), str: ("a.safetensors", "out/b.safetensors"),
    }  # fmt: skip
    return rng.choice(values[kind])


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", NAMED)
def test_any_plan_spelled_out_parses_back(kind, count):
    # str leaves out what is none, which must not bring back a base's value
    rng, seen, none = random.Random(7), 0, 0
    for _ in range(count):
        words = [rng.choice(["", *(name for name in NAMES if name != "stock")])]
        for part, known in POLICIES.items():
            if rng.random() < 0.3:
                continue
            name = rng.choice([*known, *(["none"] if part in OPTIONAL else [])])
            given = settings(known[name]) if name in known else {}
            some = [key for key in given if rng.random() < 0.4]
            texts = [f"{key}={draw(rng, given[key])}" for key in some]
            words.append(f"{part}={name}" + (":" + ",".join(texts) if texts else ""))
        text = " ".join(words)
        try:
            plan = Plan.parse(text, kind)
        except TachyscopeError:
            continue  # a setting's own rule
        assert Plan.parse(str(plan), kind) == plan, text
        seen += 1
        none += "=none" in text.replace("text=none", "").replace("replay=none", "")
    assert seen > 0.26 * count and none > 0.03 * count


def test_a_plan_is_a_mapping_from_every_registered_kind_to_a_policy():
    plan = Plan.parse("fast")
    assert list(plan) == list(POLICIES)
    assert all(plan[kind] is getattr(plan, kind) for kind in plan)
    assert Plan(**plan) == plan and "magic" not in plan


def test_a_kind_that_came_later_is_written_only_where_it_does_something():
    old = "cache=keep_all attention=dense text=pads replay=none"
    assert str(Plan.parse(old)) == str(Plan.parse(old + " store=native passes=all")) == old


def test_a_change_within_a_policy_keeps_its_other_settings():
    plan, base = Plan.parse("live cache=dedup:budget=24f"), Plan.parse("live")
    assert plan == replace(base, cache=replace(base.cache, budget=Size(24, True)))
    assert base.cache.newest == 3
    assert Plan.parse("live cache=dedup:newest=1").cache.newest == 1
    assert Plan.parse("live cache=dedup") == base
    # without a base's name nothing is there to keep
    assert Plan.parse("cache=dedup:budget=24f").cache.newest == 1
    # the authors' own plan is a base like any other
    stock = "cache=window:budget=9f,sink=3,positions=reindexed"
    longer = Plan.parse("stock cache=window:budget=12f", stock=stock).cache
    assert (longer.budget, longer.sink, longer.positions) == (Size(12, True), 3, "reindexed")
    assert replaced("live cache=dedup:budget=24f") == replaced("live") == []


def test_another_policy_starts_from_its_defaults_and_what_it_undoes_is_told():
    text = "fast cache=window replay=every_k"
    assert Plan.parse(text).cache == Plan.parse("cache=window").cache
    assert replaced(text) == ["cache=window replaces cache=bank and its resident=21f, host=int8"]


@pytest.mark.parametrize(
    "text, cached, told",
    [
        ("fast attention=ann:k=400", "k=400", "attention=ann:k=400 replaces read=0.4 of attention=ann"),
        ("fast-ar attention=ann:k=90", "hash=lsh", "attention=ann:k=90 replaces read=0.28 of attention=ann"),
        ("live cache=merge:threshold=0.9", "threshold=0.9,sink=0,newest=0", "cache=merge replaces cache=dedup and its budget=21f, newest=3"),
        ("fast-ar cache=merge:budget=9f", "budget=9f,sink=1,newest=1", "cache=merge:budget=9f replaces threshold=0.9 of cache=merge"),
        ("fastcar replay=attentive:threshold=-2", "threshold=-2.0", "replay=attentive:threshold=-2 replaces share=0.8 of replay=attentive"),
    ],
)  # fmt: skip
def test_one_of_several_ways_replaces_the_other(text, cached, told):
    assert cached in str(Plan.parse(text))
    assert replaced(text) == [told]


def test_dense_has_no_settings_that_a_plan_without_a_base_would_keep():
    assert not any(":" in NAMED[kind]["dense"] for kind in NAMED)


def test_a_plan_is_checked_before_its_model_as_far_as_it_can_be():
    check_text("stock cache=window:fold=0.9")  # another setting of the stock plan may allow it
    with pytest.raises(TachyscopeError, match="sink must be a whole number"):
        check_text("stock cache=window:sink=one")
    check_text("fast attention=ann:hash=lsh", "chunks")
    with pytest.raises(TachyscopeError, match="takes read or k"):
        check_text("fast attention=ann:hash=lsh", "tokens")


def test_every_parameter_says_what_it_does():
    for table in POLICIES.values():
        for name, policy in table.items():
            for key, found in settings(policy).items():
                assert found.about.endswith(".") and len(found.about) < 200, (name, key)


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
        ("quick", "no plan 'quick'; there are: dense, stock, lossless, balanced, fast, live, pose, similar, fastcar, fast-ar"),
        ("cash=all", "a plan has no 'cash'; it has: cache, store, attention, text, passes, replay"),
        ("cache=magic", f"no cache policy 'magic'; there are: {', '.join(POLICIES['cache'])}"),
        ("replay=magic", "no replay policy 'magic'; there are: attentive, every_k, input, "
         "neurons, prune, random, none"),
        ("cache=none", f"no cache policy 'none'; there are: {', '.join(POLICIES['cache'])}"),
        ("cache=window:snk=3", "cache policy 'window' has no 'snk'; it takes: budget, sink, positions, fold, view"),
        ("cache=keep_all:x=1", "cache policy 'keep_all' has no 'x'; it takes: nothing"),
        ("cache=window:sink=1,sink=2", "cache policy 'window' is given 'sink' twice: leave one out"),
        ("cache=window:sink=one", "cache policy 'window': sink must be a whole number, got 'one'"),
        ("attention=ann:read=much", "attention policy 'ann': read must be a number, got 'much'"),
        ("attention=ann:read=nan", "attention policy 'ann': read must be a number, got 'nan'"),
        ("attention=ann:read=1,hash=md5", "attention policy 'ann': hash must be one of int8, lsh, got 'md5'"),
        ("replay=attentive:share=1,authors=1", "replay policy 'attentive': authors must be true or false, got '1'"),
        ("cache=window:budget=big", "a size is entries (1344) or latent frames (21f), got 'big': give one of these"),
        ("replay=none:x=1", "replay=none takes no settings, got 'x=1'"),
        ("cache=window cache=window:sink=2", "cache is given twice, 'cache=window' and 'cache=window:sink=2': leave one out"),
        ("q" * 1000, f"no plan '{'q' * 40}…{'q' * 19}'; there are: dense, stock, lossless, balanced, fast, live, pose, similar, fastcar, fast-ar"),
        ("fast dense", "a plan is one base name, then part=policy words, got 'dense' behind: parts are cache, store, attention, text, passes, replay"),
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
        Plan.parse("dense text=none").check(replace(CHUNKS, text=64))
