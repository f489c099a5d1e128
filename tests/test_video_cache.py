"""What a loop that is not ours may ask of a cache: late facts, other rotations, earlier frames."""

import pytest
import torch
from hosts import DIM, GRID, HEADS, TOKENS

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape
from tachyscope.integrations.rope import video_rope


def cache_of(plan, **more):
    return ts.VideoCache(plan, layers=1, chunk=3, **more)


def draw(count):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(3, 1, HEADS, 3 * TOKENS, DIM, generator=rng) for _ in range(count)]


def play(cache, qkv, chunk, noises=(0.0,)):
    outs = []
    for noise in noises:
        cache.begin(frame=3 * chunk, frames=3, grid=GRID, noise=noise)
        outs.append(cache.attend(0, *(noise + 1) * qkv))
    return outs


def assert_equal(wanted, got):
    assert all(torch.equal(x, y) for x, y in zip(wanted, got, strict=True))


def test_passes_over_a_chunk_are_learned_from_the_first_that_is_made():
    """What is left out in a chunk's first passes alone depends on how many there are."""
    chunks, noises = draw(5), (1.0, 0.6, 0.3, 0.0)
    plan = "cache=window:budget=12f attention=ann:read=0.5,dense_passes=0.5,block=2"
    known, learned = cache_of(plan, passes=4), cache_of(plan)
    for cache in (known, learned):
        play(cache, chunks[0], 0)  # given
    for i in range(1, 4):
        assert_equal(*(play(cache, chunks[i], i, noises) for cache in (known, learned)))
    learned.commit()
    again = cache_of(plan)
    again.restore(learned.state())
    assert_equal(*(play(cache, chunks[4], 4, noises) for cache in (known, again)))


@pytest.mark.parametrize(
    "plan",
    [
        "dense",
        "cache=window:budget=30f",
        "cache=merge:budget=30f",
        "attention=ann:read=0.5,block=2",
    ],
)
def test_an_earlier_frame_rewinds(plan):
    chunks, noises = draw(4), (1.0, 0.0)
    cache, fresh = (cache_of(plan, passes=2) for _ in range(2))
    for i in range(4):
        play(cache, chunks[i], i, noises)
    play(fresh, chunks[0], 0, noises)
    for i in (1, 2):
        assert_equal(*(play(x, chunks[3 - i], i, noises) for x in (fresh, cache)))


def test_a_frame_before_what_a_budget_dropped_is_refused():
    cache, chunks = cache_of("cache=window:budget=9f", passes=1), draw(6)
    for i in range(5):
        play(cache, chunks[i], i)
    with pytest.raises(TachyscopeError, match="no longer has all .* begin at 12, or at 0"):
        cache.begin(frame=6, frames=3, grid=GRID)
    play(cache, chunks[5], 5)  # it goes on


@pytest.mark.parametrize(
    "plan", ["dense", "cache=window:budget=9f", "cache=merge:budget=9f", "cache=dedup:budget=9f"]
)
def test_keys_may_come_rotated_where_none_is_rotated_again(plan):
    rope, shape = video_rope(DIM), Shape(1, HEADS, HEADS, DIM, DIM, GRID)
    ours, theirs = cache_of(plan), cache_of(plan, rotated=True)
    for i, (q, k, v) in enumerate(draw(5)):
        angles = rope.cos_sin(shape.positions(3 * i, 3), q.dtype)
        turned = torch.stack([rope.apply(q, *angles), rope.apply(k, *angles), v])
        (want,), (got,) = play(ours, torch.stack([q, k, v]), i), play(theirs, turned, i)
        torch.testing.assert_close(want, got, rtol=1e-5, atol=1e-5)


def test_keys_that_come_rotated_are_refused_by_name_where_they_are_rotated_again():
    with pytest.raises(TachyscopeError, match="cache=window.*reindexed rotates keys again"):
        cache_of("cache=window:budget=9f,positions=reindexed", rotated=True)
    with pytest.raises(TachyscopeError, match="leave `rope` out"):
        cache_of("dense", rotated=True, rope=video_rope(DIM))


def test_a_rope_may_be_any_function():
    axes = video_rope(DIM)

    def turn(pos):
        weights, speeds = axes.frequencies(pos.device)
        angle = (pos.double() @ weights * speeds)[..., 1::2]
        return angle.cos(), angle.sin()

    plan = "cache=window:budget=9f,positions=reindexed"
    named, free = cache_of(plan, rope=axes), cache_of(plan, rope=turn)
    for i, chunk in enumerate(draw(5)):
        assert_equal(play(named, chunk, i), play(free, chunk, i))


def one(tokens=3 * TOKENS, heads=HEADS, dim=DIM, dtype=torch.float32, batch=1):
    return torch.randn(batch, heads, tokens, dim, dtype=dtype)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda cache, x: cache.attend(1, x, x, x), "layer 1 of a cache of 1 layers"),
        (lambda cache, x: cache.attend(-1, x, x, x), "layer -1 of a cache of 1 layers"),
        (lambda cache, x: cache.attend(0, x[0], x[0], x[0]), "give .batch, heads, tokens, chann"),
        (lambda cache, x: cache.attend(0, x, x[:, :, :6], x[:, :, :6]), r"shapes .1, 2, 18, 16.,"),
        (lambda cache, x: cache.attend(0, x, x, x.repeat(2, 1, 1, 1)), "keys and values alike"),
        (lambda cache, x: cache.begin(3, 3, (3, 2)), "a grid of 3 x 2 tokens in a video of 2 x 3"),
        (lambda cache, x: cache.begin(-1, 3, GRID), "frame from 0, .* got frame=-1, frames=3"),
        (lambda cache, x: cache.begin(3, 1.5, GRID), "takes whole numbers, .* frames=1.5, grid"),
        (lambda cache, x: cache.begin(3, 3, (6,)), r"both sides of grid from 1, .* grid=\(6,\)"),
    ],
)
def test_wrong_input_is_one_line_and_the_video_goes_on(call, words):
    cache, untouched, chunks = cache_of("dense"), cache_of("dense"), draw(2)
    for x in (cache, untouched):
        play(x, chunks[0], 0)
    with pytest.raises(TachyscopeError, match=words):
        call(cache, one())
    assert_equal(play(untouched, chunks[1], 1), play(cache, chunks[1], 1))


def test_a_video_keeps_to_one_dtype():
    cache = cache_of("dense")
    play(cache, draw(1)[0], 0)
    half = one(dtype=torch.bfloat16)
    cache.begin(3, 3, GRID)
    with pytest.raises(TachyscopeError, match="bfloat16 on cpu, where this video began in torch.f"):
        cache.attend(0, half, half, half)


def test_a_grid_may_be_any_pair():
    cache, pairs = cache_of("dense"), (list(GRID), GRID, torch.Size(GRID))
    for chunk, grid in enumerate(pairs):
        cache.begin(3 * chunk, 3, grid)
        cache.attend(0, one(), one(), one())
    cache.commit()
    assert cache.session.memory.past == 9 * TOKENS


def test_no_chunk_is_left_out():
    """A pass that attends to nothing leaves no entries, and no later chunk may stand behind it."""
    cache = cache_of("dense")
    play(cache, draw(1)[0], 0)
    cache.begin(3, 3, GRID)
    with pytest.raises(TachyscopeError, match="latent frame 6, where 3 can come"):
        cache.begin(6, 3, GRID)
    layers = ts.VideoCache("dense", layers=2, chunk=3)
    layers.begin(0, 3, GRID)
    layers.attend(0, one(), one(), one())
    with pytest.raises(
        TachyscopeError, match="layer 1 did not attend in the last pass over latent"
    ):
        layers.begin(3, 3, GRID)


def test_a_committed_chunk_may_be_computed_again():
    chunks = draw(3)
    cache, fresh = cache_of("dense"), cache_of("dense")
    for i in (0, 1):
        play(cache, chunks[i], i)
    cache.commit()
    play(fresh, chunks[0], 0)
    assert_equal(play(fresh, chunks[2], 1), play(cache, chunks[2], 1))


def test_a_saved_state_survives_a_pass_at_another_frame():
    chunks = draw(2)
    first, second = cache_of("dense"), cache_of("dense")
    play(first, chunks[0], 0)
    first.commit()
    second.restore(first.state())
    with pytest.raises(TachyscopeError, match="latent frame 6 after a state of 3: begin there"):
        play(second, chunks[1], 2)
    assert_equal(play(first, chunks[1], 1), play(second, chunks[1], 1))


@pytest.mark.parametrize(
    "layer, tokens, lengths, words",
    [
        (0, 9, [5], "of at most 8 tokens"),
        (0, 8, [9], r"lengths \[9\] .* give one from 0 to 8 for each of the batch"),
        (0, 8, [5, 5], "for each of the batch"),
        (1, 8, [5], "layer 1 gets a prompt after 0 of 1 layers"),
    ],
)
def test_a_wrong_prompt_is_one_line(layer, tokens, lengths, words):
    cache = cache_of("dense", prompt_tokens=8)
    cache.begin(0, 3, GRID)
    with pytest.raises(TachyscopeError, match=words):
        cache.set_prompt(layer, one(tokens), one(tokens), lengths)


def test_a_wrong_rope_is_one_line():
    x = one(dim=15)
    for rope, words in (
        (None, "turn pairs of channels, got heads of 15"),
        (lambda pos: (pos, pos), r"must return cos and sin of shape \(6, 7\), got \(6, 3\)"),
        (lambda pos: pos @ pos, "`rope` of positions .6, 3.: "),
    ):
        cache = cache_of("dense", rope=rope)
        cache.begin(0, 3, GRID)
        with pytest.raises(TachyscopeError, match=words):
            cache.attend(0, x, x, x)


@pytest.mark.parametrize("name", ["layers", "chunk", "passes", "latent_frames", "prompt_tokens"])
def test_sizes_are_whole_numbers(name):
    with pytest.raises(TachyscopeError, match=f"`{name}` must be [01] or more, got -1"):
        ts.VideoCache("dense", **{"layers": 1, "chunk": 3} | {name: -1})


@pytest.mark.parametrize("named", [False, True])
def test_gradients_are_refused_where_they_are_asked_for(named):
    cache, weight = cache_of("dense"), torch.ones(DIM, requires_grad=True)
    cache.begin(0, 3, GRID)
    q = weight * one()
    y = cache.attend(0, q=q, k=one(), v=one()) if named else cache.attend(0, q, one(), one())
    y.add_(1)  # an ordinary tensor of the host's
    with pytest.raises(TachyscopeError, match="a VideoCache has no gradients: run the model under"):
        y.sum().backward()
