import math
import re

import pytest
import torch
from faults import refused
from streams import CHUNKS, TOKENS, assert_same, play, session

from tachyscope.cache.matching import vectors
from tachyscope.cache.merge import Merge
from tachyscope.cache.window import Window
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Size
from tachyscope.kernels.match import best_older, features

BOUNDED = [
    "window:budget=6f,sink=1",
    "window:budget=6f,sink=0",
    "window:budget=31,sink=1,positions=reindexed",
    "merge:budget=6f",
    "merge:budget=31,keep=newest,heads=each",
    "merge:budget=6f,match=unrotated,newest=2",
    "merge:budget=7f,match=key_value,sink=0,heads=each",
    "dedup:budget=6f",
]


@pytest.mark.parametrize("shape", [CHUNKS, TOKENS], ids=["chunks", "tokens"])
@pytest.mark.parametrize(
    "cache, tolerance",
    [
        ("window:budget=99f", 0.0),
        ("window:budget=99f,positions=reindexed", 0.0),
        ("merge:budget=99f", 0.0),
        ("dedup:budget=99f", 0.0),
        ("merge:threshold=1.0", 1e-6),
    ],
)
def test_a_wide_open_policy_equals_keeping_all(cache, tolerance, shape):
    want = play(session(shape, "cache=keep_all"), 7)
    assert_same(play(session(shape, f"cache={cache}"), 7), want, tolerance)


def _random_commits(at, commits, seed):
    """Chunks of keys that sometimes repeat, straight to commit; what each layer then holds."""
    rng = torch.Generator().manual_seed(seed)
    shape, tokens = at.shape, at.shape.max_pass_tokens
    pool = torch.randn(3, shape.batch, shape.kv_heads, tokens, shape.head_dim, generator=rng)
    for i in range(commits):
        if shape.token_by_token and i == 0:
            at.begin(at.memory.prompt_positions(), 0, 1, (0.0,))
            n = at.memory.prompt
        else:
            at.begin(
                shape.positions(at.memory.latent_frame, shape.chunk), 0, 1, (0.0,) * shape.chunk
            )
            n = tokens
        scale = 10.0 ** torch.randint(-3, 3, (), generator=rng).item()
        k = pool[i % 3, :, :, torch.arange(n) % tokens]
        k = k + scale * torch.randn(k.shape, generator=rng) * (i % 5 > 0)
        q = torch.randn(shape.batch, shape.heads, n, shape.head_dim, generator=rng)
        for layer in range(shape.layers):
            at.attend(layer, q.double(), k.double(), k.double() * 3)
        at.commit()
        yield at


# eight policies, two kinds of model, up to 720 commits each: over ten thousand
@pytest.mark.parametrize("commits", [30, pytest.param(720, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [CHUNKS, TOKENS], ids=["chunks", "tokens"])
@pytest.mark.parametrize("cache", BOUNDED)
def test_a_budget_is_never_exceeded_and_nothing_becomes_nan(cache, shape, commits):
    at = session(shape, f"cache={cache}")
    slots = at.memory.layers[0].k.shape[2]
    assert slots == at.plan.cache.budget.entries(shape)
    for _ in _random_commits(at, commits, seed=1):
        assert at.memory.past + shape.max_pass_tokens <= slots
        for layer in at.memory.layers:
            assert layer.k.shape[2] == slots
            used = {name: x[:, :, : at.memory.past] for name, x in layer.entries().items()}
            assert all(x.isfinite().all() for name, x in used.items() if name != "log_count")
            assert not used["log_count"].isnan().any()
    # every entry ever seen is still counted by a merged cache; a window forgets
    live = at.memory.layers[0].log_count[:, :, : at.memory.past].double().exp().sum(-1)
    if "merge" in cache:
        seen = torch.tensor(
            [float(at.memory.total_entries - pads) for pads in at.memory.left_padding or (0,)]
        )
        torch.testing.assert_close(live, seen.double()[:, None].expand_as(live), rtol=1e-4, atol=0)
    else:
        assert (live <= at.memory.past).all()


def test_merging_conserves_the_weighted_sum_of_values():
    at = session(CHUNKS, "cache=merge:budget=6f")
    total = torch.zeros(1, 2, 12, dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    for _ in range(30):
        at.begin(CHUNKS.positions(at.memory.latent_frame, 2), 0, 1, (0.0, 0.0))
        k, v = (torch.randn(1, 2, 12, 12, generator=rng, dtype=torch.float64) for _ in range(2))
        at.attend(0, torch.zeros(1, 4, 12, 12, dtype=torch.float64), k, v)
        at.attend(1, torch.zeros(1, 4, 12, 12, dtype=torch.float64), k, v)
        total += v.sum(2)
        at.commit()
        here = at.memory.layers[0]
        mass = (
            here.v[:, :, : at.memory.past]
            * here.log_count[:, :, : at.memory.past, None].double().exp()
        )
        torch.testing.assert_close(mass.sum(2), total, rtol=1e-5, atol=1e-5)


def test_entries_that_dedup_keeps_stay_as_they_were():
    at, all_of_it = (session(CHUNKS, f"cache={cache}") for cache in ("dedup:budget=6f", "keep_all"))
    for one in (at, all_of_it):
        play(one, 9)
    assert at.memory.past < all_of_it.memory.past
    for held, whole in zip(at.memory.layers, all_of_it.memory.layers, strict=True):
        assert (held.log_count == 0).all()
        for head in range(CHUNKS.kv_heads):
            kept, every = (
                torch.cat(
                    [x[0, head, :n] for x in (layer.k, layer.v, layer.pos.expand(1, 2, -1, 3))], -1
                )
                for layer, n in ((held, at.memory.past), (whole, all_of_it.memory.past))
            )
            # each is one that was seen, key, value and place, and none is there twice
            same = (kept[:, None] == every[None]).all(-1)
            assert (same.sum(1) == 1).all() and (same.sum(0) <= 1).all()
    row = at.meter.take()
    assert at.memory.plain and row["pairs"] < row["pairs_dense"]


def test_merge_protects_sink_and_newest():
    at = session(CHUNKS, "cache=merge:budget=8f,sink=1,newest=2")
    for i, _ in enumerate(_random_commits(at, 12, seed=3)):
        here = at.memory.layers[1]
        first, last = here.pos[0, 0, 0, 0], here.pos[0, 0, at.memory.past - 12 : at.memory.past, 0]
        assert first == 0
        assert here.log_count[0, 0, :6].eq(0).all()
        assert here.log_count[0, 0, at.memory.past - 12 : at.memory.past].eq(0).all()
        assert last.tolist() == [2.0 * i] * 6 + [2.0 * i + 1] * 6


def test_merge_folds_the_most_alike_first():
    """One entry repeats an old one, the others are new: exactly it is folded."""
    at = session(CHUNKS, "cache=merge:budget=31,sink=0,newest=0")
    rng = torch.Generator().manual_seed(5)
    keys = []
    for chunk in range(2):
        k = torch.randn(1, 2, 12, 12, generator=rng, dtype=torch.float64)
        if chunk == 1:
            k[:, :, 4] = keys[0][:, :, 7]
        keys.append(k)
        at.begin(torch.zeros(12, 3), 0, 1, (0.0, 0.0))
        for layer in range(2):
            at.attend(layer, torch.zeros(1, 4, 12, 12, dtype=torch.float64), k, k)
        at.commit()
        if chunk == 1:
            assert at.memory.past == 19  # 24 entries, five too many
            weights = at.memory.layers[0].log_count[0, 0, :19].exp()
            assert weights[7] >= 2 - 1e-6
            assert weights.sum().item() == pytest.approx(24)


def test_a_running_partner_is_as_good_as_a_full_search():
    """Over many commits the entries kept stand for their groups nearly as well."""
    at = session(CHUNKS, "cache=merge:budget=10f,newest=1,sink=0")
    losses = []
    for fresh in (False, True):
        at.reset()
        for _ in _random_commits(at, 60, seed=2):
            if fresh:  # search anew for every entry: what the running partner stands in for
                old = slice(0, max(0, at.memory.past - 6))
                here = at.memory.layers[0]
                cosine, partner = best_older(vectors(at.plan.cache._matching, here, old), 0)
                here.own["cache"]["alike"][:, :, old] = cosine
                here.own["cache"]["partner"][:, :, old] = partner
        here = at.memory.layers[0]
        losses.append(here.own["cache"]["alike"][0, 0, 1 : at.memory.past - 6].mean().item())
    # the likeness left over: a worse matcher leaves more alike pairs behind
    assert losses[0] <= losses[1] + 0.1


@pytest.mark.parametrize("shape", [CHUNKS, TOKENS], ids=["chunks", "tokens"])
@pytest.mark.parametrize("heads", ["shared", "each"])
def test_threshold_merging_of_repeats_keeps_one_frame(shape, heads):
    """Every chunk the same keys at the same place: the cache stops growing after the first."""
    at = session(shape, f"cache=merge:threshold=0.99,heads={heads}")
    rng = torch.Generator().manual_seed(0)
    n = shape.max_pass_tokens
    k = torch.randn(shape.batch, shape.kv_heads, n, 12, generator=rng, dtype=torch.float64)
    q = k.repeat_interleave(2, 1) * 9  # each query's top-1 is its own key
    if shape.token_by_token:
        at.begin(at.memory.prompt_positions(), 0, 1, (0.0,))
        for layer in range(2):
            at.attend(
                layer, q[:, :, :1].expand(-1, -1, 5, -1), *[k[:, :, :1].expand(-1, -1, 5, -1)] * 2
            )
        at.commit()
    prompt = at.memory.prompt
    for _ in range(4):
        at.begin(torch.zeros(n, 3), 0, 1, (0.0,) * shape.chunk)
        for layer in range(2):
            at.attend(layer, q, k, k)
        at.commit()
        assert at.memory.past == prompt + n
    torch.testing.assert_close(
        at.memory.layers[0].log_count[:, :, prompt : at.memory.past].exp(),
        torch.full_like(at.memory.layers[0].log_count[:, :, prompt : at.memory.past], 4.0),
    )


def test_threshold_merging_of_different_keys_keeps_all():
    at = session(CHUNKS, "cache=merge:threshold=1.0")
    play(at, 5)
    assert at.memory.past == 5 * 12


def test_a_threshold_cache_stays_right_when_heads_keep_different_numbers():
    at = session(CHUNKS, "cache=merge:threshold=0.6,heads=each")
    play(at, 12, drift=0.4)
    here = at.memory.layers[0]
    counts = (here.log_count[:, :, : at.memory.past] > -math.inf).sum(-1)
    assert counts.max() == at.memory.past and at.memory.past < 12 * 12
    live = here.log_count[:, :, : at.memory.past].double().exp().sum(-1)
    torch.testing.assert_close(live, torch.full_like(live, 144.0))


def test_window_keeps_sink_and_newest():
    at = session(CHUNKS, "cache=window:budget=6f,sink=1")
    play(at, 9)
    assert at.memory.layers[0].pos[0, 0, : at.memory.past : 6, 0].tolist() == [
        0.0,
        15.0,
        16.0,
        17.0,
    ]


def test_a_reindexed_window_equals_positions_counted_inside_it():
    """The sink stands right before the window, so a constant shift of all positions is left."""
    at = session(CHUNKS, "cache=window:budget=6f,sink=1,positions=reindexed")
    play(at, 9)
    here = at.memory.layers[0]
    frames = here.pos[0, 0, : at.memory.past : 6, 0]
    assert (frames - frames[0]).tolist() == [0.0, 1.0, 2.0, 3.0]
    rotated = at.rope.rotate(
        here.unrotated[:, :, : at.memory.past], here.pos[:, :, : at.memory.past]
    )
    torch.testing.assert_close(here.k[:, :, : at.memory.past], rotated)


@pytest.mark.parametrize(
    "cache, message",
    [
        (
            "window:budget=2f",
            "cache policy 'window': budget=2f holds 12 entries, but 18 are protected (prompt 0, "
            "sink 1f, newest 0f, present chunk 2f): raise budget to 3f or more, or lower sink or "
            "newest",
        ),
        (
            "merge:budget=3f",
            "cache policy 'merge': budget=3f holds 18 entries, but 24 are protected (prompt 0, "
            "sink 1f, newest 1f, present chunk 2f): raise budget to 4f or more, or lower sink or "
            "newest",
        ),
        (
            "merge:budget=4f",
            "cache policy 'merge': budget=4f leaves no entry to merge into beside the protected "
            "ones: raise it by at least one entry",
        ),
    ],
)
def test_a_budget_below_what_is_protected_is_refused(cache, message):
    with pytest.raises(TachyscopeError, match=f"^{re.escape(message)}$"):
        session(CHUNKS, f"cache={cache}")


def test_the_view_that_a_refusal_names_is_not_refused():
    """In a token model the prompt takes entries of the view too."""
    plan = "cache=window:budget=9f,positions=reindexed,view=%s"
    message = refused(lambda: session(TOKENS, plan % "1f"), "less than")
    session(TOKENS, plan % re.search(r"raise it to (\d+f)", message).group(1))


def test_faulty_settings_are_refused():
    with pytest.raises(TachyscopeError, match="takes a budget or a threshold"):
        Merge(budget=Size(9), threshold=0.9)
    with pytest.raises(TachyscopeError, match="threshold must be from -1 to 1"):
        Merge(threshold=1.5)
    with pytest.raises(TachyscopeError, match="newest must be 0"):
        Merge(threshold=0.9, newest=1)
    with pytest.raises(TachyscopeError, match="sink must be from 0 to 1,000,000, got"):
        Window(sink=-1)


def test_a_partner_that_is_folded_away_leaves_its_heir():
    """Entry 21 is most like 17, and 17 is folded into 2: from then on 21's partner is 2."""
    at = session(CHUNKS, "cache=merge:budget=35,sink=0,newest=0")
    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 24, 12, generator=rng, dtype=torch.float64)
    near, far = (torch.randn(1, 2, 12, generator=rng, dtype=torch.float64) for _ in range(2))
    keys[:, :, 17] = keys[:, :, 2] + 0.01 * near
    keys[:, :, 21] = keys[:, :, 17] + 0.2 * near + 0.2 * far
    for part in keys.split(12, 2):
        at.begin(torch.zeros(12, 3), 0, 1, (0.0, 0.0))
        for layer in range(2):
            at.attend(layer, torch.zeros(1, 4, 12, 12, dtype=torch.float64), part, part)
        if at.memory.past:
            found = features(
                vectors(at.plan.cache._matching, at.memory.layers[0], slice(0, 24)), False
            )
            assert (found[0, 0, 21] @ found[0, 0, :21].T).argmax() == 17
        at.commit()
    here = at.memory.layers[0]
    assert at.memory.past == 23 and here.log_count[0, 0, 2].exp().item() == pytest.approx(2)
    torch.testing.assert_close(here.k[:, :, 20], keys[:, :, 21])
    assert here.own["cache"]["partner"][0, 0, 20] == 2
