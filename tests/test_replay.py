import re
from types import SimpleNamespace

import pytest
import torch
from faults import refused
from streams import CHUNKS, TOKENS, Square, assert_same, draw, play, play_pass, play_prompt, session

from tachyscope.core.errors import TachyscopeError
from tachyscope.kernels.replay import follow_drift
from tachyscope.kernels.replay.reference import follow_drift_reference, temporal_score_reference
from tachyscope.replay.attentive import Attentive
from tachyscope.replay.every_k import EveryKReplay
from tachyscope.replay.random import RandomReplay

SHAPES = {"chunks": CHUNKS, "tokens": TOKENS}
OPEN = [
    "attentive:share=0", "attentive:threshold=1e9", "random:share=0", "every_k:k=1",
    "attentive:share=0,drift=true",
]  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("replay", OPEN)
def test_a_wide_open_policy_equals_dense_bit_for_bit(replay, kind):
    dense = play(session(SHAPES[kind], "replay=none"), 5)
    assert_same(play(session(SHAPES[kind], f"replay={replay}"), 5), dense)


REPLAYS = [
    "attentive:share=0.5", "attentive:share=0.75,age=3", "attentive:threshold=0.2",
    "attentive:threshold=0.2,age=1", "attentive:threshold=0.2,cfg=free,authors=true",
    "random:share=0.5", "random:share=0.6,age=2", "every_k:k=3",
    "attentive:share=0.5,drift=true", "random:share=0.5,drift=true", "every_k:k=3,drift=true",
]  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("replay", REPLAYS)
def test_rows_replayed_are_rows_the_mlp_never_saw(replay, kind):
    ctx, mlp = session(SHAPES[kind], f"replay={replay}"), Square()
    play(ctx, 8, mlp=mlp)
    row = ctx.meter.take()
    prompt = ctx.memory.prompt * ctx.shape.batch * ctx.shape.layers
    assert row["rows_computed"] == mlp.rows + prompt  # the prompt's rows went to an MLP of its own
    assert row["rows_replayed"] > 0
    tokens = 8 * ctx.shape.max_pass_tokens * ctx.shape.passes * ctx.shape.batch * ctx.shape.layers
    assert row["rows_computed"] + row["rows_replayed"] == tokens + prompt
    assert "simulated_rows_replayed" not in row


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_share_of_a_chunk_is_kept_exactly(share):
    ctx = session(CHUNKS, f"replay=attentive:share={share}")
    play(ctx, 6)
    row = ctx.meter.take()
    assert row["rows_replayed"] == share * row["rows_eligible"]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_share_of_single_tokens_is_kept_nearly(share):
    ctx = session(TOKENS, f"replay=attentive:share={share}")
    play(ctx, 60, drift=1.0)
    row = ctx.meter.take()
    # a rank among six earlier scores: the share comes in sevenths
    assert row["rows_replayed"] / row["rows_eligible"] == pytest.approx(share, abs=1 / 7)


def test_a_replayed_row_is_the_last_frames_output_at_its_place():
    """Chunk models: every latent frame looks at the last one of the chunk before, same pass."""
    ctx = session(CHUNKS, "replay=every_k:k=2")
    rng = torch.Generator().manual_seed(0)
    pos = CHUNKS.positions(0, 2)
    kept = {}
    for chunk in range(2):
        for step in range(3):
            layers = draw(rng, CHUNKS, 12)
            out = play_pass(ctx, layers, pos, step, 3)
            for i, (_, y) in enumerate(out):
                if chunk == 0:
                    kept[step, i] = y[:, 6:]
                else:
                    assert torch.equal(y, kept[step, i].repeat(1, 2, 1))
        ctx.commit()


def test_token_models_replay_the_same_place_one_frame_back():
    ctx = session(TOKENS, "replay=every_k:k=2")
    out = play(ctx, 2)
    first, second = out[: len(out) // 2], out[len(out) // 2 :]
    for (_, before), (_, after) in zip(first, second, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_score_is_the_attention_logit_with_the_place_one_frame_back(kind):
    shape = SHAPES[kind]
    ctx = session(shape, "replay=attentive:threshold=99")
    play(ctx, 3)
    here, n = ctx.memory.layers[0], shape.tokens_per_frame
    before = here.k[
        :, :, ctx.memory.past - n : ctx.memory.past
    ].clone()  # rotated, from the last frame's last pass
    step = shape.passes - 1
    rng = torch.Generator().manual_seed(9)
    q, k, v, _ = draw(rng, shape, shape.max_pass_tokens)[0]
    if shape.token_by_token:
        q, k, v, before = (x[:, :, :1] for x in (q, k, v, before))
    pos = shape.positions(ctx.memory.latent_frame, shape.chunk)[: q.shape[2]]
    ctx.begin(pos, step, shape.passes, (0.0,) * shape.chunk)
    ctx.attend(0, q, k, v)
    turned = ctx.rope.apply(q, *ctx.present.cos_sin)
    want = temporal_score_reference(turned, before.repeat(1, 1, q.shape[2] // before.shape[2], 1))
    torch.testing.assert_close(ctx.memory.replay.scores[0], want)


def test_authors_mixes_an_unrotated_query_with_a_rotated_key():
    ctx = session(TOKENS, "replay=attentive:threshold=99,authors=true")
    play(ctx, 2)
    before = ctx.memory.layers[0].k[:, :, ctx.memory.past - 6 : ctx.memory.past - 5].clone()
    ctx.begin(TOKENS.positions(ctx.memory.latent_frame, 1)[:1], 0, 1, (0.0,))
    q = torch.randn(2, 4, 1, 12, dtype=torch.float64)
    ctx.attend(0, q, q[:, :2], q[:, :2])
    torch.testing.assert_close(ctx.memory.replay.scores[0], temporal_score_reference(q, before))


def test_the_lowest_scores_are_computed():
    ctx = session(CHUNKS, "replay=attentive:share=0.5")
    score = torch.tensor([[5.0, 1, 4, 2, 9, 0, 7, 8, 3, 6, 11, 10]])
    ctx.begin(CHUNKS.positions(0, 2), 0, 3, (1.0, 1.0))
    choice = ctx.plan.replay.choose(ctx.present.layers[0], score, score.int())
    assert sorted(choice.rows[0].tolist()) == [0, 1, 2, 3, 5, 8]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "replay",
    ["attentive:share=0.75,age=3", "attentive:threshold=-1e9,age=3", "random:share=0.7,age=3"],
)
def test_no_value_serves_longer_than_its_age(replay, kind):
    shape = SHAPES[kind]
    ctx = session(shape, f"replay={replay}")
    rng = torch.Generator().manual_seed(0)
    oldest = 0
    if shape.token_by_token:
        play_prompt(ctx, rng)
    base = draw(rng, shape, shape.max_pass_tokens)
    for _ in range(12):
        pos = shape.positions(ctx.memory.latent_frame, shape.chunk)
        layers = draw(rng, shape, shape.max_pass_tokens, drift=0.2, base=base)
        for step in range(shape.passes):
            if shape.token_by_token:
                for i in range(shape.max_pass_tokens):
                    one = [[t.narrow(-2, i, 1) for t in part] for part in layers]
                    play_pass(ctx, one, pos[i : i + 1], 0, 1)
            else:
                play_pass(ctx, layers, pos, step, shape.passes)
        ctx.commit()
        oldest = max(
            oldest, *(int(layer.own["replay"]["age"].max()) for layer in ctx.memory.layers)
        )
    assert oldest == 3


@pytest.mark.parametrize("cfg", ["tied", "free"])
def test_a_tied_pair_decides_together(cfg):
    ctx = session(TOKENS, f"replay=attentive:threshold=0.2,cfg={cfg}")
    play(ctx, 20, drift=1.0)
    together = all(
        torch.equal(layer.own["replay"]["age"][0, 0], layer.own["replay"]["age"][0, 1])
        for layer in ctx.memory.layers
    )
    assert together == (cfg == "tied")


def test_asking_for_replay_does_not_change_the_noise():
    a, b = (
        session(CHUNKS, "replay=random:share=0.5", seed=4),
        session(CHUNKS, "replay=none", seed=4),
    )
    play(a, 4), play(b, 4)
    assert torch.equal(
        torch.rand(3, generator=a.generators[0]), torch.rand(3, generator=b.generators[0])
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Attentive(), "replay policy 'attentive' takes a share or a threshold, one of them: try attentive:share=0.5"),
        (lambda: Attentive(share=1.5), "replay policy 'attentive': share must be from 0 to 1, got 1.5"),
        (lambda: Attentive(share=0.9, age=2), "replay policy 'attentive': share=0.9 cannot keep age=2, which needs every token computed once in 3 frames: lower share to 0.666 or raise age"),
        (lambda: Attentive(threshold=0.0, age=-1), "replay policy 'attentive': age must be from 0 to 1,000,000, got -1"),
        (lambda: RandomReplay(share=-1), "replay policy 'random': share must be from 0 to 1, got -1"),
        (lambda: EveryKReplay(k=0), "replay policy 'every_k': k must be from 1 to 100,000,000, got 0"),
    ],
)  # fmt: skip
def test_faulty_settings_are_refused(make, message):
    with pytest.raises(TachyscopeError, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.parametrize("age", [1, 2, 5, 6])
def test_the_share_that_a_refusal_names_is_not_refused(age):
    message = refused(lambda: Attentive(share=0.99, age=age), "lower share to")
    Attentive(share=float(re.search(r"lower share to ([\d.]+)", message).group(1)), age=age)


@pytest.mark.parametrize("kind", SHAPES)
def test_given_frames_are_computed_whole(kind):
    """A chunk that is only remembered: one clean pass, or a frame's tokens all at once."""
    shape = SHAPES[kind]
    ctx, mlp = session(shape, "replay=attentive:threshold=-1e9"), Square()
    play(ctx, 3)
    rng = torch.Generator().manual_seed(1)
    step = shape.passes - 1
    pos = shape.positions(ctx.memory.latent_frame, shape.chunk)
    play_pass(ctx, draw(rng, shape, shape.max_pass_tokens), pos, step, shape.passes, mlp)
    assert mlp.rows == shape.batch * shape.max_pass_tokens * shape.layers


def test_a_share_of_single_tokens_is_kept_after_given_frames():
    """Frames that were handed in left no scores: they must not count as low ones."""
    ctx = session(TOKENS, "replay=attentive:share=0.5")
    rng = torch.Generator().manual_seed(0)
    play_prompt(ctx, rng)
    for _ in range(4):
        play_pass(ctx, draw(rng, TOKENS, 6), TOKENS.positions(ctx.memory.latent_frame, 1), 0, 1)
        ctx.commit()
    ctx.meter.take()
    for _ in range(40):
        layers, pos = draw(rng, TOKENS, 6), TOKENS.positions(ctx.memory.latent_frame, 1)
        for i in range(6):
            one = [[t.narrow(-2, i, 1) for t in part] for part in layers]
            play_pass(ctx, one, pos[i : i + 1], 0, 1)
        ctx.commit()
    row = ctx.meter.take()
    assert row["rows_replayed"] / row["rows_eligible"] == pytest.approx(0.5, abs=1 / 7)


class Growing:
    """An MLP whose every output grows by one vector a chunk."""

    macs = 1

    def __init__(self, ctx, way):
        self.at, self.way = ctx, way

    def __call__(self, x):
        return x * 0 + self.at.memory.chunk * self.way


@pytest.mark.parametrize("kind", SHAPES)
def test_what_all_outputs_share_reaches_replayed_rows_by_drift(kind):
    """Outputs that grow by one vector a frame: drift makes replay right, without it it is wrong."""
    shape, chunks = SHAPES[kind], 40
    way = torch.linspace(-1, 1, shape.width, dtype=torch.float64)
    errors = {}
    for drift in ("true", "false"):
        ctx = session(shape, f"replay=random:share=0.5,drift={drift}")
        mlp = Growing(ctx, way)
        out = [y for _, y in play(ctx, chunks, mlp=mlp)]
        assert ctx.meter.take()["rows_replayed"] > 0
        each = len(out) // chunks
        late = range(chunks // 2, chunks)
        errors[drift] = max(
            (y - i * way).abs().max().item() for i in late for y in out[i * each : (i + 1) * each]
        )
    # without it a value is late by as many frames as it is old; with it by a part of one
    assert errors["true"] < 0.5
    assert errors["false"] >= 1.0


def test_drift_is_the_running_mean_of_changes():
    rng = torch.Generator().manual_seed(3)
    drift, y, old = (torch.randn(2, s, 5, generator=rng, dtype=torch.float64) for s in (1, 7, 7))
    for share in (0.0, 0.5, 1.0):
        computed = torch.rand(2, 7, generator=rng) < share
        y = torch.where(computed[..., None], y, old)
        want = follow_drift_reference(drift, y, old, computed, 16.0)
        for got, right in zip(follow_drift(drift, y, old, computed, 16.0), want, strict=True):
            torch.testing.assert_close(got, right)


def test_a_tied_pair_decides_by_its_mean():
    """One row is far over the threshold, the other far below: by their maximum both replayed."""
    score = torch.tensor([[0.0, 0.5], [1.0, 0.9]])
    choice = Attentive(threshold=0.6).choose(
        SimpleNamespace(ctx=SimpleNamespace(shape=TOKENS)),
        score,
        torch.zeros(2, 2, dtype=torch.int32),
    )
    assert choice.gate.tolist() == [[True, False], [True, False]]
