"""Each rival's rule by brute force, entry by entry, against the blocks that its policy lists."""

from dataclasses import replace

import pytest
import torch
from streams import CHUNKS, TOKENS, assert_same, draw, play, play_pass, session

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.meter import summary
from tachyscope.kernels.slots import permute
from tachyscope.measure.inspection.read_mass import read_mass
from tachyscope_lab.rivals.kmeans import kmeans
from tachyscope_lab.rivals.radial import Radial

SHAPE = replace(CHUNKS, grid=(4, 5))  # 20 tokens a latent frame, in chunks of 2


def opened(attention, chunks, shape=SHAPE, **asked):
    """A session after so many given chunks, inside the first pass over the next one."""
    at, rng = session(shape, attention, **asked), torch.Generator().manual_seed(0)
    for _ in range(chunks):
        pos = shape.positions(at.memory.latent_frame, shape.chunk)
        play_pass(at, draw(rng, shape, shape.max_pass_tokens), pos, 2, shape.passes)
        at.commit()
    at.begin(
        shape.positions(at.memory.latent_frame, shape.chunk), 0, shape.passes, (1.0,) * shape.chunk
    )
    return at


def attend(at, layer=1, seed=3):
    """A pass's attention of one layer, and its rotated queries."""
    rng = torch.Generator().manual_seed(seed)
    tokens = at.shape.max_pass_tokens
    sizes = (at.shape.heads, at.shape.kv_heads, at.shape.kv_heads)
    q, k, v = (torch.randn(1, h, tokens, 12, generator=rng, dtype=torch.float64) for h in sizes)
    at.meter.take()
    return at.attend(layer, q, k, v), at.rope.apply(q, *at.present.cos_sin)


def listed(at, head=0, layer=1):
    """The blocks that each tile lists."""
    own = at.memory.layers[layer].own["attention"]
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
    assert at.memory.layers[1].pos[0, 0, : at.memory.past : 20, 0].tolist() == [0, *range(13, 18)]
    queries = [(i, place) for i in (18, 19) for place in range(20)]
    mask = radial_pairs(queries, keys, 20, 2, 0.2, 20)
    assert listed(at) == radial_blocks(mask, queries, keys, 2)


def test_radial_halves_its_width_and_then_leaves_frames_out():
    """A Wan frame at 480p: 512, 256, 128 places, then every second frame, every fourth."""
    distance = torch.arange(40.0)
    width = Radial(decay=1)._width(distance, 1560, 128)
    assert width[:9].tolist() == [1560, 1560, 512, 512, 256, 256, 256, 256, 128]
    assert [d for d in range(8, 40) if width[d] > 0] == [*range(8, 16), *range(16, 32, 2), 32, 36]
    assert set(Radial()._width(distance, 1560, 128)[2:].tolist()) == {128.0, -1.0}


@pytest.mark.parametrize("name", ["radial", "svg", "svg2"])
def test_what_no_rival_serves_is_one_line(name):
    with pytest.raises(TachyscopeError, match=f"policy '{name}' is for models that write whole"):
        session(TOKENS, f"attention={name}")
    if name == "svg2":  # has no block to set
        return
    with pytest.raises(TachyscopeError, match="block=21 is over the 20 tokens of a latent frame"):
        session(SHAPE, f"attention={name}:block=21")


def svg_lists(queries, keys, block, most):
    """Blocks of both of SVG's masks by tile: pairs enter by distance until enough blocks have."""
    spatial, temporal = [], []
    sink = -(-20 // block)
    for top in range(0, len(queries), block):
        rows = queries[top : top + block]
        for found, by_frame in ((spatial, True), (temporal, False)):
            # of a block's pairs the nearest: in the order of frames, or of places
            nearest = {}
            for c, (j, place) in enumerate(keys):
                for i, row in rows:
                    far = (i - j) * 20 + row - place if by_frame else abs(row - place)
                    nearest[c // block] = min(nearest.get(c // block, far), far)
            rest = sorted(set(nearest) - set(range(sink)), key=lambda id: (nearest[id], -id))
            found.append(sorted([*range(sink), *rest[: most - sink]]))
    return spatial, temporal


def attention_over(at, q, entries, layer=1):
    """Attention of rotated queries [H, S, D] over entries: booleans [H, S, past + now]."""
    here, end = at.memory.layers[layer], at.memory.past + at.shape.max_pass_tokens
    k, v = (x[:, :, :end].clone() for x in (here.k, here.v))
    if (order := here.own["attention"].get("order")) is not None:
        for x in (k, v):  # as the cache has them, in no policy's order
            permute(x[:, :, : at.memory.past], order[:, :, : at.memory.past].long(), back=True)
    k, v = (x[0].repeat_interleave(2, 0) for x in (k, v))
    scores = (q @ k.mT / 12**0.5).masked_fill(~entries, -torch.inf)
    return scores.softmax(-1) @ v


def entries_of(lists, block, past, tokens=40):
    """Which of past and now each query of a head reads, where tiles list blocks of the cache."""
    mask = torch.zeros(tokens, past + tokens, dtype=torch.bool)
    mask[:, past:] = True
    for row in range(tokens):
        for c in range(past):
            mask[row, c] = c // block in lists[row // block]
    return mask


@pytest.mark.parametrize("block, chunks", [pytest.param(4, 5, marks=pytest.mark.slow), (3, 3)])
def test_svg_takes_for_each_head_the_mask_of_less_error(block, chunks):
    at = opened(f"attention=svg:read=0.4,block={block},dense_passes=0", chunks)
    (out, q), own, frames = attend(at), at.memory.layers[1].own["attention"], 2 * chunks
    keys = [(j, place) for j in range(frames) for place in range(20)]
    queries = [(i, place) for i in (frames, frames + 1) for place in range(20)]
    most = round(0.4 * -(-len(keys) // block))
    lists = svg_lists(queries, keys, block, most)
    masks = [entries_of(found, block, at.memory.past) for found in lists]
    whole, spatial, temporal = (
        attention_over(at, q[0], mask.expand(4, -1, -1)) for mask in (masks[0] | True, *masks)
    )
    rows = (own["sample"][0, 0] * 40).long()
    errors = [(x - whole)[:, rows].square().mean((1, 2)) for x in (spatial, temporal)]
    taken = (errors[1] < errors[0]).tolist()
    assert set(taken) == {True, False}
    for head, by_place in enumerate(taken):
        assert [sorted(ids) for ids in listed(at, head)] == lists[by_place]
        torch.testing.assert_close(out[0, head], (spatial, temporal)[by_place][head])
    # a part block is scored as a whole one, its empty slots at no weight
    assert at.meter.take()["pairs"] == 4 * 40 * (most * block + 40)


def svg2_clusters(share, top_p, min_ratio):
    """The likeliest clusters until `top_p` is passed, at least so many."""
    order = sorted(range(len(share)), key=lambda j: -share[j])
    kept, total = [], 0.0
    for rank, j in enumerate(order):
        if total <= top_p or rank < int(min_ratio * len(share)):
            kept.append(j)
        total += share[j]
    return set(kept)


def test_svg2_reads_the_clusters_that_hold_most_of_the_attention():
    at = opened("attention=svg2:top_p=0.6,dense_passes=0", 5)
    (out, q), own = attend(at), at.memory.layers[1].own["attention"]
    clusters, queries = 50, 10  # of 4 keys or queries in the mean
    k = at.memory.layers[1].k[0, :, : at.memory.past]  # in the order of clusters
    label = own["k_label"][0, :, : at.memory.past]
    q_order = own["q_order"][0].long()
    entries = torch.zeros(4, 40, 240, dtype=torch.bool)
    entries[:, :, 200:] = True
    pairs = 0
    for head in range(4):
        held, order = label[head // 2], own["order"][0, head // 2, :200].long()
        assert held.tolist() == sorted(held.tolist()) and sorted(order.tolist()) == [*range(200)]
        size = torch.bincount(held, minlength=clusters)
        k_centroid, q_centroid = own["k_centroid"][0, head // 2], own["q_centroid"][0, head]
        assert torch.equal(own["k_size"][0, head // 2].long()[:clusters], size)
        for j in size.nonzero().flatten():
            mean = k[head // 2][held == j].mean(0)
            torch.testing.assert_close(k_centroid[j].double(), mean, rtol=1e-5, atol=1e-5)
        # a query's cluster is the one whose centroid was nearest before that last moved
        found = listed(at, head)
        of_query = _labels_by_means(q[0, head][q_order[head]], q_centroid[:queries].double())
        read = {}
        for i in set(of_query):
            score = (q_centroid[i] @ k_centroid[:clusters].T / 12**0.5).exp() * size
            chosen = svg2_clusters((score / score.sum()).tolist(), 0.6, 0.1)
            read[i] = {slot // 4 for slot in range(200) if int(held[slot]) in chosen}
        want = [
            sorted(set().union(*(read[i] for i in of_query[top : top + 4])))
            for top in range(0, 40, 4)
        ]
        assert found == want
        for row in range(40):
            slots = [c for c in range(200) if c // 4 in want[row // 4]]
            entries[head, q_order[head][row], order[slots]] = True
            pairs += len(slots) + 40
    assert at.meter.take()["pairs"] == pairs < 0.8 * 4 * 40 * 240
    torch.testing.assert_close(out[0], attention_over(at, q[0], entries))


def _labels_by_means(rows, centroids):
    """Clusters of rows that stand in the order of their clusters: runs whose means are centroids."""
    labels, start = [], 0
    for j, centroid in enumerate(centroids):
        stops = [
            stop
            for stop in range(start + 1, len(rows) + 1)
            if torch.allclose(rows[start:stop].mean(0), centroid, atol=1e-5)
        ]
        if stops:
            labels += [j] * (stops[0] - start)
            start = stops[0]
    assert start == len(rows)
    return labels


def test_svg2_goes_on_from_its_last_centroids(monkeypatch):
    ran = []

    def counting(x, weight, centroids, spare, iterations):
        ran.append((x.shape[2], centroids.shape[2], iterations))
        return kmeans(x, weight, centroids, spare, iterations)

    monkeypatch.setattr("tachyscope_lab.rivals.svg2.kmeans", counting)
    at = session(SHAPE, "attention=svg2:dense_passes=0.3,dense_layers=0.5")
    play(at, 3)
    # one layer of two: queries of three passes, then keys
    first, later = (40, 10, 50), (40, 10, 2)
    want = [first, *[later] * 2, first, *[later] * 3, (80, 20, 2), *[later] * 3, (120, 30, 2)]
    assert ran == want


@pytest.mark.slow
def test_centroids_kept_from_chunk_to_chunk_cluster_as_well_as_new_ones():
    """Distances of entries to their centroids, in a window that has moved over 20 chunks."""
    at = session(SHAPE, "cache=window:budget=12f attention=svg2", torch.float32)
    play(at, 20, drift=0.5)
    here, own = at.memory.layers[1], at.memory.layers[1].own["attention"]
    k, count = here.k[:, :, : at.memory.past], at.memory.past // 4

    def spread(label, centroids):
        picked = centroids.gather(2, label.long().unsqueeze(-1).expand(-1, -1, -1, 12))
        return (k - picked).square().sum(-1).mean().item()

    kept = spread(own["k_label"][:, :, : at.memory.past], own["k_centroid"])
    new = k[
        :, :, torch.randperm(at.memory.past, generator=torch.Generator().manual_seed(1))[:count]
    ]
    new = new.contiguous()
    weight = torch.ones(k.shape[:3])
    label, _ = kmeans(k, weight, new, torch.arange(count), 50)
    assert kept < 1.1 * spread(label, new)
    assert (own["k_size"][:, :, :count] > 0).float().mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("dense_passes", [0, 0.3])
@pytest.mark.parametrize("name", ["radial:block=2", "svg:block=2", "svg2:top_p=0.3"])
def test_recall_sees_what_was_read_and_changes_nothing(name, dense_passes):
    at = opened(f"attention={name},dense_passes={dense_passes}", 4)
    (_, q), here = attend(at), at.memory.layers[1]
    before = {key: x.clone() for key, x in here.own["attention"].items()}
    mass = read_mass(at.plan.attention, at.present.layers[1], q)
    assert all(torch.equal(x, here.own["attention"][key]) for key, x in before.items())
    torch.testing.assert_close(mass.sum(-1), torch.ones_like(mass[..., 0]))
    assert (mass == 0).any() == (dense_passes == 0)


@pytest.mark.parametrize("name", ["radial:block=3", "svg2:top_p=0.3"])
def test_where_the_host_may_not_read_lists_are_masked_and_counted_so(name, monkeypatch):
    real = opened(f"attention={name},dense_passes=0", 4)
    (want, _), row = attend(real), summary([real.meter.take()])
    monkeypatch.setattr("tachyscope_lab.rivals.block_lists.host_may_read", lambda q: False)
    masked = opened(f"attention={name},dense_passes=0", 4)
    (got, _), found = attend(masked), summary([masked.meter.take()])
    torch.testing.assert_close(got, want)
    assert "simulated_density" not in row and row["density"] < found["density"]
    skipped = found["pairs"] - found["simulated_pairs_skipped"]
    # a part block, of 1 entry of 3, is scored whole where lists are masked
    assert 0 <= skipped - row["pairs"] <= (4 * 40 * 2 if "radial" in name else 0)
    assert found["simulated_density"] / found["density"] == pytest.approx(skipped / found["pairs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["radial:block=2", "svg:block=2", "svg2:top_p=0.5"])
def test_a_cache_that_grows_reads_as_one_of_that_size(name):
    small, large = (session(CHUNKS, f"attention={name}", latent_frames=n) for n in (4, 30))
    slots = small.memory.layers[0].slots
    outs = [play(at, 6) for at in (small, large)]
    assert small.memory.layers[0].slots > slots
    assert_same(*outs)
