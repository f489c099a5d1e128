"""The library as a script uses it: what `import tachyscope as ts` offers, and its faults in a line."""

import re

import numpy as np
import pytest

import tachyscope as ts
from tachyscope.core.plan import NAMES, Plan
from tachyscope.core.policy import LAB, QUESTIONS, policies


@pytest.fixture(scope="module")
def chunks():
    return ts.load("toy-chunks")


@pytest.fixture(scope="module")
def tokens():
    return ts.load("toy-tokens")


def test_every_policy_of_the_product_can_be_imported_from_the_package():
    known = {policy for q in QUESTIONS for policy in policies(q).values()}
    own = {p for p in known if p.name not in LAB.get(p.question, ())}
    offered = {getattr(ts, name) for name in ts.__all__ if isinstance(getattr(ts, name), type)}
    assert own == {x for x in offered if getattr(x, "question", "")}


def test_a_plan_of_objects_equals_its_text(chunks):
    assert ts.Plan() == Plan.parse("dense")
    made = ts.Plan(cache=ts.Window("9f"), attention=ts.Ann(read=0.5), text=ts.Pads())
    assert made == Plan.parse("cache=window:budget=9f attention=ann:read=0.5 text=pads")
    assert made == ts.Plan(cache="window:budget=9f", attention="ann:read=0.5", text="pads")
    assert str(made) == str(Plan.parse(str(made)))


@pytest.mark.parametrize("kind", ["chunks", "tokens"])
def test_a_named_plan_takes_objects_in_place_of_its_own(kind):
    text = ts.plan("fast", cache=ts.Window("9f"), replay=None)
    assert Plan.parse(text, kind) == Plan.parse("fast cache=window:budget=9f replay=none", kind)
    assert ts.plan("fast", cache="bank:resident=12f") == "fast cache=bank:resident=12f"
    # an object replaces the base's policy whole, what it leaves out too
    stock = "cache=window:budget=9f,sink=3,positions=reindexed,fold=0.9"
    assert Plan.parse(ts.plan("stock", cache=ts.Window("12f")), kind, stock).cache == ts.Window(
        "12f"
    )
    assert Plan.parse(ts.plan("fast-ar", attention=ts.Ann(k=64)), kind).attention == ts.Ann(k=64)


def test_every_policy_can_be_put_into_a_named_plan():
    for question in QUESTIONS:
        for policy in policies(question).values():
            needs = {"ann": {"read": 0.5}, "attentive": {"share": 0.5}, "input": {"share": 0.5}}
            made = policy(
                **(needs.get(policy.name, {}) if question in ("attention", "replay") else {})
            )
            assert Plan.parse(ts.plan("dense", **{question: made}))[question] == made


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ts.Plan("fast"), "'fast' is a named plan"),
        (lambda: ts.Plan(cache=None), "cache must be a cache policy or its text, got None"),
        (lambda: ts.Plan(cache=3), "cache must be a cache policy or its text, got a int"),
        (lambda: ts.Plan(cache=ts.Dense()), "must be a cache policy or its text, got attention=dense"),
        (lambda: ts.Plan(cache="magic"), "no cache policy 'magic'; there are: bank"),
        (lambda: ts.plan(cache=7), "cache must be a cache policy or its text, got a int"),
        (lambda: ts.plan(3), "a plan's base is text, got a int"),
        (lambda: ts.plan(replay=ts.Neurons(file="a b")), "cannot be written in a plan's text"),
    ],
)  # fmt: skip
def test_a_plan_is_checked_when_it_is_made(make, words):
    with pytest.raises(ts.TachyscopeError, match=re.escape(words)):
        make()


def test_a_policy_without_a_name_is_used_as_an_object(chunks):
    class Half(ts.KeepAll.__bases__[0]):
        """Keep every second chunk."""

        appends = grows = True

        def capacity(self, shape, prompt, frames):
            return prompt + (frames or 8 * shape.chunk) * shape.tokens_per_frame

        def commit(self, p, n):
            return p.ctx.past + (n if p.ctx.chunk % 2 == 0 else 0)

    plan = ts.Plan(cache=Half())
    assert str(plan).startswith("cache=Half attention=dense")
    with ts.open(chunks, plan) as stream:
        assert stream.step().frames.dtype == np.uint8
    with pytest.raises(ts.TachyscopeError, match="no cache policy 'Half'"):
        ts.plan("fast", cache=Half())


@pytest.mark.parametrize("name", [n for n in NAMES if n != "stock"])
def test_a_text_policy_is_left_out_where_there_is_no_prompt(tokens, name):
    # what a name stands for in models of chunks, beside what a token model can do
    plan = Plan.parse(name).for_shape(tokens.shape())
    assert plan.text is None and Plan.parse(name).text is not None
    with pytest.raises(ts.TachyscopeError, match="has no cross-attention, got text=pads"):
        ts.open(tokens, "dense text=pads")


class Count(ts.Observer):
    """Counts passes."""

    def __init__(self):
        self.passes = 0

    def on_pass(self, ctx):
        self.passes += 1


def test_one_observer_may_be_handed_in_alone_and_a_function_is_none(chunks):
    count = Count()
    with ts.open(chunks, observers=count) as stream:
        stream.step()
    assert count.passes > 0
    with pytest.raises(ts.TachyscopeError, match="an observer must be an Observer, got a function"):
        ts.open(chunks, observers=lambda ctx: None)


def test_chunks_models_and_streams_are_shown_in_a_line(chunks):
    with ts.open(chunks, prompt="a") as stream:
        chunk = stream.step()
        told = [repr(chunk), repr(chunks), repr(stream), repr(stream.session.plan)]
    assert told[0].startswith("<Chunk 0: frames uint8 [")
    assert told[1].startswith("<WanModel toy-chunks: chunks, ")
    assert told[2].startswith("<Stream of toy-chunks: 1 chunks, ") and "cache=keep_all" in told[2]
    assert all("\n" not in line and len(line) < 500 for line in told)


def test_a_stream_is_taken_chunk_by_chunk(chunks):
    with (
        ts.open(chunks, prompt="a", seed=1) as stream,
        ts.open(chunks, prompt="a", seed=1) as other,
    ):
        taken = list(stream.take(3))
        stepped = [other.step() for _ in range(3)]
        assert [chunk.index for chunk in taken] == [0, 1, 2]
        for one, two in zip(taken, stepped, strict=True):
            assert np.array_equal(one.frames, two.frames)
        next(stream.take(2))  # what is not asked for is not made
        assert stream.step().index == 4
        for wrong in (0, -1, "3", 1.5):
            with pytest.raises(ts.TachyscopeError, match="the number of chunks must be"):
                stream.take(wrong)


def test_taken_chunks_follow_the_actions_of_all_their_frames():
    model = ts.load("atrium-world")
    with ts.open(model, seed=0) as stream, ts.open(model, seed=0) as other:
        taken = [chunk.frames for chunk in stream.take(3, "q*2 w")]
        stepped = [other.step(action).frames for action in "qqw"]
    assert np.array_equal(np.concatenate(taken), np.concatenate(stepped))


def test_a_list_of_actions_as_long_as_the_batch_is_refused_with_words():
    model = ts.load("atrium-world")
    with ts.open(model, seed=[0, 1]) as stream:
        with pytest.raises(ts.TachyscopeError, match="take the same actions, .* for 2 videos"):
            stream.step(["w", "q"])
        assert stream.step("w").frames.shape[0] == 2


@pytest.mark.parametrize("name", ["chunks", "tokens"])
def test_a_snapshot_after_a_change_of_prompt_restores_where_the_same_was_told(name, request):
    model = request.getfixturevalue(name)
    one = ts.open(model, prompt="a red room")
    one.step()
    one.set_prompt("a blue room, and more")
    one.step()
    state, after = one.snapshot(), one.step()
    # the change is still to come here
    two = ts.open(model, prompt="a red room")
    two.set_prompt("a blue room, and more")
    two.restore(state)
    assert np.array_equal(two.step().frames, after.frames)
    other = ts.open(model, prompt="a red room")
    other.set_prompt("a green room")
    with pytest.raises(ts.TachyscopeError, match="prompt"):
        other.restore(state)
    # a state from before the change is still one of this stream's first prompt
    first = ts.open(model, prompt="a red room")
    state, after = first.snapshot(), first.step()
    other.restore(state)
    assert np.array_equal(other.step().frames, after.frames)


def test_a_writer_outside_of_its_block_says_so(tmp_path):
    video = ts.VideoWriter(tmp_path / "a.mp4", 8)
    with pytest.raises(ts.TachyscopeError, match="writes within a with block"):
        video.write(np.zeros((1, 16, 16, 3), np.uint8))


def test_what_is_no_array_or_number_is_refused_in_words(tmp_path):
    with ts.VideoWriter(tmp_path / "a.mp4", 8) as video:
        with pytest.raises(ts.TachyscopeError, match=r"frames are uint8 .*, got 1: give an array"):
            video.write(1)
        video.write(np.zeros((1, 16, 16, 3), np.uint8))
    with pytest.raises(ts.TachyscopeError, match="`layers` must be 1 or more, got '3'"):
        ts.VideoCache("fast", layers="3", chunk=3)


def test_a_visit_takes_letters_or_indices():
    from tachyscope.models.atrium.visit import Visit

    letters, indices = Visit(3, "q*2 w"), Visit(3, [5, 5, 1])
    assert len(Visit(3)) == 1 and len(letters) == 4
    q, w = ts.load("atrium-world").actions.index("q"), ts.load("atrium-world").actions.index("w")
    assert np.array_equal(letters.frames(0, 4), Visit(3, [q, q, w]).frames(0, 4))
    for wrong in ("z", "q*x", [99], ["q"]):
        with pytest.raises(ts.TachyscopeError, match="the actions of a visit are letters of"):
            Visit(3, wrong)
    assert len(indices) == 4
