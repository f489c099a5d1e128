"""Each rival's rule by brute force, entry by entry, against the blocks that its policy lists."""

from dataclasses import replace

import pytest
import torch
from streams import CHUNKS, TOKENS, draw, play_pass, session

from tachyscope.errors import TachyscopeError

SHAPE = replace(CHUNKS, grid=(4, 5))  # 20 tokens a latent frame, in chunks of 2


def opened(attention, chunks, shape=SHAPE, **asked):
    """A session after so many given chunks, inside the first pass over the next one."""
    at, rng = session(shape, attention, **asked), torch.Generator().manual_seed(0)
    for _ in range(chunks):
        pos = shape.positions(at.latent_frame, shape.chunk)
        play_pass(at, draw(rng, shape, shape.max_pass_tokens), pos, 2, shape.passes)
        at.commit()
    at.begin(shape.positions(at.latent_frame, shape.chunk), 0, shape.passes, (1.0,) * shape.chunk)
    return at


def attend(at, layer=1, seed=3):
    """A pass's attention, and q, k, v as they were given."""
    rng = torch.Generator().manual_seed(seed)
    tokens = at.shape.max_pass_tokens
    sizes = (at.shape.heads, at.shape.kv_heads, at.shape.kv_heads)
    q, k, v = (torch.randn(1, h, tokens, 12, generator=rng, dtype=torch.float64) for h in sizes)
    at.meter.take()
    return at.attend(layer, q, k, v)


def listed(at, head=0, layer=1):
    """The blocks that each tile lists."""
    own = at.layers[layer].own["attention"]
    lists = zip(own["map"][0, head].tolist(), own["count"][0, head].tolist(), strict=True)
    return [ids[:count] for ids, count in lists]


def radial_pairs(queries, keys, frame, block, decay, sink):
    """The authors' mask of single pairs; queries and keys are (latent frame, place)."""
    mask = {}
    for r, (i, row) in enumerate(queries):
        for c, (j, column) in enumerate(keys):
            far = abs(i - j)
            base = 2 ** frame.bit_length() / 2 ** far.bit_length()
            near = abs(row - column) <= max(base * decay, block)
            kept = base >= block or far % int(block / base) == 0
            mask[r, c] = c < sink or far <= 1 or (near and kept)
    return mask


def radial_blocks(mask, queries, keys, block):
    """The authors' way from pairs to blocks: latent frame by latent frame."""
    found = []
    for top in range(0, len(queries), block):
        rows, kept = range(top, min(top + block, len(queries))), []
        for left in range(0, len(keys), block):
            columns = range(left, min(left + block, len(keys)))
            votes = []
            for i in {queries[r][0] for r in rows}:
                for j in {keys[c][0] for c in columns}:
                    seen = [
                        sum(mask[r, c] for r in rows if queries[r][0] == i)
                        for c in columns
                        if keys[c][0] == j
                    ]
                    some, many = (sum(n > least for n in seen) for least in (0, len(rows) / 3))
                    votes.append(some > 0 and many / some > 0.6)
            if any(votes):
                kept.append(left // block)
        found.append(kept)
    return found


@pytest.mark.parametrize("block, decay", [(2, 0.2), (3, 0.3), (8, 1.0)])
def test_radial_lists_the_blocks_of_the_authors_mask(block, decay):
    at = opened(f"attention=radial:block={block},decay={decay},dense_passes=0", 6)
    attend(at)
    keys = [(j, place) for j in range(12) for place in range(20)]
    queries = [(i, place) for i in (12, 13) for place in range(20)]
    mask = radial_pairs(queries, keys, 20, block, decay, 20)
    want = radial_blocks(mask, queries, keys, block)
    assert listed(at) == listed(at, 3) == want
    # what is counted: the entries of the listed blocks, and the present chunk
    last = len(keys) - len(keys) // block * block or block
    entries = [sum(last if id == (len(keys) - 1) // block else block for id in ids) for ids in want]
    rows = [min(block, 40 - top) for top in range(0, 40, block)]
    read = sum(n * (seen + 40) for n, seen in zip(rows, entries, strict=True))
    assert at.meter.take()["pairs"] == 4 * read < 0.8 * 4 * 40 * 280


def test_radial_goes_by_positions_where_a_cache_drops_frames():
    plan = "cache=window:budget=8f,sink=1 attention=radial:block=2,decay=0.2,dense_passes=0"
    at = opened(plan, 9)
    attend(at)
    # the first latent frame, then 13 to 17
    keys = [(j, place) for j in (0, *range(13, 18)) for place in range(20)]
    assert at.layers[1].pos[0, 0, : at.past : 20, 0].tolist() == [0, *range(13, 18)]
    queries = [(i, place) for i in (18, 19) for place in range(20)]
    mask = radial_pairs(queries, keys, 20, 2, 0.2, 20)
    assert listed(at) == radial_blocks(mask, queries, keys, 2)


def test_radial_halves_its_width_and_then_leaves_frames_out():
    """A Wan frame at 480p: 512, 256, 128 places, then every second frame, every fourth."""
    from tachyscope.attention.radial import Radial

    distance = torch.arange(40.0)
    width = Radial(decay=1)._width(distance, 1560, 128)
    assert width[:9].tolist() == [1560, 1560, 512, 512, 256, 256, 256, 256, 128]
    assert [d for d in range(8, 40) if width[d] > 0] == [*range(8, 16), *range(16, 32, 2), 32, 36]
    assert set(Radial()._width(distance, 1560, 128)[2:].tolist()) == {128.0, -1.0}


@pytest.mark.parametrize("name", ["radial"])
def test_what_no_rival_serves_is_one_line(name):
    with pytest.raises(TachyscopeError, match=f"policy '{name}' is for models that write whole"):
        session(TOKENS, f"attention={name}")
    with pytest.raises(TachyscopeError, match="block=21 is over the 20 tokens of a latent frame"):
        session(SHAPE, f"attention={name}:block=21")
