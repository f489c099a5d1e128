"""The GPU's kernels for matching and folding against their definitions.

Where there is no GPU they are interpreted; the interpreter multiplies no bfloat16.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from streams import CHUNKS, ROPE

from tachyscope.core.observers import Observer
from tachyscope.core.plan import Plan
from tachyscope.core.session import Session
from tachyscope.kernels import device
from tachyscope.kernels.match.reference import best_older_reference
from tachyscope.kernels.match.torch import alike_features
from tachyscope.kernels.merge import Entries
from tachyscope.kernels.merge.reference import fold_reference
from tachyscope.kernels.merge.torch import roots
from tachyscope.memory.predict import need, sized

pytest.importorskip("triton")
from tachyscope.kernels.match.triton import Setting, match, measure
from tachyscope.kernels.merge import triton as folding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
SMALL = Setting(rows=64, columns=32, warps=4, span=100)


def _keys(rng, b, h, n, d):
    """Keys that recur with some noise, in the middle of a longer cache."""
    base = torch.randn(b, h, 20, d, generator=rng)
    pick = torch.randint(20, (n + 24,), generator=rng)
    k = base[:, :, pick] + 0.3 * torch.randn(b, h, n + 24, d, generator=rng)
    return k.to(DEVICE, DTYPE)[:, :, 8 : n + 8]


# each shape, each first row and both ways of loading once in the quick tests; all pairs in the slow ones
MATCHES = list(itertools.product([(2, 2, 140, 64), (1, 1, 140, 128)], [0, 1, 131], [False, True]))
QUICK = [((2, 2, 140, 64), 131, True), *(((1, 1, 140, 128), *x) for x in [(0, False), (1, True)])]


@pytest.mark.parametrize(
    "shape, first, use_tma",
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in MATCHES],
)
def test_match_equals_its_reference(rng, shape, first, use_tma):
    k = _keys(rng, *shape)
    setting = SMALL._replace(use_tma=use_tma)
    cosine, partner = match(k, first, setting)
    features = alike_features(k, shared=False).double().cpu()
    want, want_partner = best_older_reference(features, first)
    cosine, partner = cosine.cpu().double(), partner.cpu()
    # as good as the best to what a column's number leaves of the bits, and measured exactly
    torch.testing.assert_close(cosine, want, rtol=2**-16, atol=1e-6)
    assert (partner == want_partner).double().mean() > 0.99
    theirs = features.gather(2, partner[..., None].expand(-1, -1, -1, shape[3]))
    exact = (features[:, :, first:] * theirs).sum(-1)
    exact[:, :, : 1 - min(first, 1)] = -math.inf
    torch.testing.assert_close(cosine, exact, rtol=1e-6, atol=1e-6)


def test_of_equals_the_oldest_is_found(rng):
    one = torch.randn(1, 1, 1, 64, generator=rng).to(DEVICE, DTYPE)
    cosine, partner = match(one.expand(-1, -1, 140, -1).contiguous(), 0, SMALL)
    assert partner.max() == 0
    torch.testing.assert_close(cosine[:, :, 1:], torch.ones_like(cosine[:, :, 1:]))


def test_keys_of_zeros_have_an_older_partner():
    k = torch.zeros(1, 1, 140, 64, device=DEVICE, dtype=DTYPE)
    cosine, partner = match(k, 0, SMALL)
    assert (partner[0, 0, 1:].cpu() < torch.arange(1, 140)).all()
    assert cosine[0, 0, 0] == -math.inf and (cosine[0, 0, 1:] == 0).all()


def test_keys_that_lie_place_by_place_are_read_by_pointers(rng):
    k = _keys(rng, 1, 3, 80, 64)
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    for got, want in zip(match(turned, 9, SMALL), match(k, 9, SMALL), strict=True):
        assert torch.equal(got, want)


def test_measure_gives_the_cosine_to_partners(rng):
    k = _keys(rng, 2, 2, 70, 64)
    partner = (torch.rand(2, 2, 70, generator=rng) * torch.arange(70)).long()
    alike = torch.full((2, 2, 90), math.nan, device=DEVICE)[:, :, 7:77]
    measure([k], partner.to(DEVICE), alike)
    x = alike_features(k, shared=False).cpu()
    want = (x * x.gather(2, partner[..., None].expand_as(x))).sum(-1)
    want[:, :, 0] = -math.inf
    torch.testing.assert_close(alike.cpu(), want, rtol=1e-6, atol=1e-6)


def _chosen(rng, b, h, n, excess, ties=False, hubs=0):
    alike = torch.rand(b, h, n, generator=rng) * 2 - 1
    if ties:
        alike = (alike * 4).round() / 4
    alike[:, :, 0] = -math.inf
    partner = (torch.rand(b, h, n, generator=rng) * torch.arange(n)).long()
    if hubs:  # almost all are like the first few, which stay
        partner = torch.where(torch.rand(b, h, n, generator=rng) < 0.95, partner % hubs, partner)
        alike[:, :, :hubs] = -math.inf
    return alike, partner, folding.choose(alike.to(DEVICE), partner.to(DEVICE), excess)


@pytest.mark.parametrize(
    "n, excess, ties",
    [
        (90, 25, True),
        (90, 1, False),
        (40, 39, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (300, 70, False),
                (300, 70, True),
                (300, 1, False),
                (300, 1, True),
                (40, 39, False),
            )
        ),
    ],
)
def test_the_most_alike_are_chosen_and_partners_followed(rng, n, excess, ties):
    alike, partner, folds = _chosen(rng, 2, 2, n, excess, ties)
    # of equals the oldest first: a stable sort
    source = alike.argsort(dim=2, descending=True, stable=True)[:, :, :excess]
    slots = torch.arange(n).expand_as(partner)
    root = roots(slots.scatter(2, source, partner.gather(2, source)))
    for row, (r, s, p) in enumerate(
        zip(root.flatten(0, 1), source.flatten(0, 1), partner.flatten(0, 1), strict=True)
    ):
        want = sorted((r[i].item(), i) for i in s.tolist())
        got = zip(folds.root[row].tolist(), folds.source[row].tolist(), strict=True)
        assert list(got) == want
        stay = sorted(set(range(n)) - set(s.tolist()))
        assert folds.order[row].tolist() == stay
        assert folds.heir[row].tolist() == [stay.index(r[p[i]]) for i in stay]


def _layer(rng, b, h, n, d, dtype):
    k, v, raw = (torch.randn(b, h, n, d, generator=rng).to(DEVICE, dtype) for _ in range(3))
    log_count = torch.rand(b, h, n, generator=rng).to(DEVICE)
    pos = torch.randint(9, (b, h, n, 3), generator=rng).to(DEVICE, torch.float32)
    return Entries(k, v, log_count, pos, raw)


@pytest.mark.parametrize(
    "hubs, dtype, tolerance",
    [
        (0, torch.float16, 1e-3),
        (1, torch.float32, 1e-6),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (0, torch.float32, 1e-6),
                (1, torch.float16, 1e-3),
                (3, torch.float32, 1e-6),
                (3, torch.float16, 1e-3),
            )
        ),
    ],
)
def test_folded_groups_equal_their_reference(rng, dtype, tolerance, hubs, monkeypatch):
    # groups larger than a piece, and than all pieces that are looked at together
    monkeypatch.setattr(folding, "PIECE", 16)
    b, h, n, excess = (1, 2, 400, 370) if hubs else (2, 2, 60, 50)
    *_, folds = _chosen(rng, b, h, n, excess, hubs=hubs)
    held = _layer(rng, b, h, n, 16, dtype)
    k, v, log_count, pos = held[:4]
    keys, places = k.clone(), pos.clone()
    source, root = (x.view(b, h, excess).long().cpu() for x in (folds.source, folds.root))
    largest = max(torch.unique(x, return_counts=True)[1].max() for x in root.flatten(0, 1))
    assert largest > (17 * 16 if hubs == 1 else 8)
    want_v, want_w = fold_reference(v.cpu(), log_count.cpu(), source, root)
    folding.fold_groups(held, folds, newest=True, mean=True)
    stay = folds.order.view(b, h, -1).long()
    at = stay[..., None].expand(-1, -1, -1, 16)
    got = log_count.gather(2, stay).cpu()
    torch.testing.assert_close(got, want_w.gather(2, stay.cpu()), rtol=1e-6, atol=1e-6)
    got, want = v.gather(2, at).cpu(), want_v.gather(2, at.cpu())
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for i, j in [(i, j) for i in range(b) for j in range(h)]:
        for slot in stay[i, j].tolist():
            group = [slot, *source[i, j][root[i, j] == slot].tolist()]
            newest = max(group, key=lambda s: (places[i, j, s, 0].item(), s))
            assert torch.equal(k[i, j, slot], keys[i, j, newest])
            assert torch.equal(pos[i, j, slot], places[i, j, newest])


@pytest.mark.parametrize("entries", [16, 1024])
def test_sliding_closes_the_gaps_in_place(rng, entries):
    b, h, n, excess, behind = 2, 2, 100, 30, 15
    *_, folds = _chosen(rng, b, h, n, excess)
    held = _layer(rng, b, h, n + behind, 32, DTYPE)
    scales = torch.rand(2, b, h, n + behind, generator=rng).to(DEVICE)
    held = held._replace(k_scale=scales[0], v_scale=scales[1])  # as if k and v were codes
    before = [x.clone() for x in held.tensors()]
    folding.slide(held, folds, folding.Setting(16, entries, 4))
    tail = torch.arange(n, n + behind, device=DEVICE).expand(b, h, -1)
    order = torch.cat([folds.order.view(b, h, -1), tail], 2)
    for x, old in zip(held.tensors(), before, strict=True):
        index = order if x.dim() == 3 else order[..., None].expand(-1, -1, -1, x.shape[3])
        assert torch.equal(x[:, :, : n + behind - excess], old.gather(2, index))


SHAPE = dataclasses.replace(CHUNKS, head_dim=64 if DEVICE == "cuda" else 16)


@pytest.mark.parametrize(
    "cache, layers",
    [
        ("dedup:budget=8f", 1),
        *(
            pytest.param(each, 2, marks=pytest.mark.slow)
            for each in (
                "merge:budget=8f",
                "merge:budget=8f,newest=2,keep=partner",
                "merge:budget=45,sink=0,newest=0,match=unrotated",
                "merge:budget=8f,match=key_value",  # matched by torch, merged by kernels
                "dedup:budget=8f",
            )
        ),
    ],
)
@pytest.mark.slow
def test_a_cache_merged_by_kernels_equals_one_merged_by_torch(cache, layers, monkeypatch):
    shape = dataclasses.replace(SHAPE, layers=layers)
    plan = Plan.parse(f"dense text=none cache={cache}", "chunks")
    rope = dataclasses.replace(ROPE, axes=((shape.head_dim, (1, 0, 0)),))
    # a GPU multiplies float32 with fewer bits
    dtype, tolerance = (DTYPE, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)

    class Merges(Observer):
        """Which slots joined which, a row of the batch and a head, whatever the order."""

        host = False

        def __init__(self):
            self.found = []

        def on_merge(self, ctx, source, root):
            pairs = torch.stack([source, root], -1).flatten(0, 1).tolist()
            self.found.append((ctx.layer, [sorted(row) for row in pairs]))

    def run(by_kernels):
        # on a CPU Triton is interpreted
        monkeypatch.setattr(device, "DEVICES", (DEVICE,) if by_kernels else ())
        monkeypatch.setattr(device, "DTYPE", dtype)
        monkeypatch.setattr(device, "HEAD_DIMS", (shape.head_dim,))
        at = Session(shape, plan, rope, device=DEVICE, dtype=dtype, observers=[Merges()])
        rng = torch.Generator().manual_seed(0)
        size = (shape.batch, shape.kv_heads, shape.max_pass_tokens, shape.head_dim)
        again = torch.randn(size, generator=rng)
        for _ in range(6):
            at.begin(
                shape.positions(at.memory.latent_frame, shape.chunk, DEVICE),
                0,
                1,
                (0.0,) * shape.chunk,
            )
            for i in range(shape.layers):
                k = again + 0.4 * torch.randn(size, generator=rng)
                v = torch.randn(size, generator=rng)
                at.write_kv(i, *(x.to(DEVICE) for x in (k.repeat_interleave(2, 1), k, v)))
            at.commit()
        return at

    got, want = run(True), run(False)
    assert got.memory.past == want.memory.past < 6 * shape.max_pass_tokens
    assert got.meter.take() == want.meter.take()
    assert got.observers[0].found == want.observers[0].found != []
    for mine, theirs in zip(got.memory.layers, want.memory.layers, strict=True):
        end = got.memory.past - got.plan.cache.newest * shape.tokens_per_frame
        for name, x in mine.tensors().items():
            used = end if name.startswith("slot_") else got.memory.past
            y = theirs.tensors()[name]
            torch.testing.assert_close(
                x[:, :, :used], y[:, :, :used], rtol=tolerance, atol=tolerance
            )


@pytest.mark.slow
def test_a_commit_by_kernels_makes_nothing_as_large_as_the_keys():
    """At Wan-1.3B's size: 25 MB where one layer's keys take 100."""
    pytest.importorskip("diffusers")  # whose VAE is sized along
    model = sized("wan_1.3b")
    found = need(model, "dense cache=merge:budget=21f", frames=480)
    layers = model.shape(None).layers
    assert 0 < found.committing < 25e6 < found.cache["k"] / layers / 3
