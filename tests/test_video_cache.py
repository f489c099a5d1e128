"""What a loop that is not ours may ask of a cache: late facts, other rotations, earlier frames."""

import pytest
import torch
from hosts import DIM, GRID, HEADS, TOKENS

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape
from tachyscope.integrations.video_cache import video_rope


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
    with pytest.raises(TachyscopeError, match="cache=window.*reindexed turns keys again"):
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
