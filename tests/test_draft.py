"""passes=draft: the dense model's own video, code for code, in fewer passes of the trunk."""

import dataclasses

import pytest
import torch
from toys import load

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.observers import Observer
from tachyscope.measure.calibrate import calibrate
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.token_model import Sampler
from tachyscope.models.toys import toy_tokens
from tachyscope.models.vila_u.model import VilaModel


class Passes(Observer):
    """Counts the trunk's passes and the tokens in them."""

    def __init__(self):
        self.tokens = []

    def on_pass(self, ctx):
        self.tokens.append(ctx.tokens)


def model(cfg=3.0):
    # exact: a pass over many tokens sums in another order than passes over one
    found = toy_tokens(dtype=torch.float64)
    sampler = dataclasses.replace(found.config.sampler, cfg=cfg)
    return VilaModel(
        found.transformer, dataclasses.replace(found.config, sampler=sampler), found.tokenizer
    )


def play(model, plan, frames=3, **options):
    """Codes, each frame's counts, passes, and the first layer's cache."""
    passes = Passes()
    with ts.open(model, plan, prompt="a b", observers=[passes], **options) as stream:
        chunks = [(stream.step("w"), stream.session.memory.latents) for _ in range(frames)]
        layer, past = stream.session.memory.layers[0], stream.session.memory.past
        cache = [x[:, :, :past] for x in (layer.k, layer.v, layer.pos, layer.log_count)]
    codes = torch.cat([latents for _, latents in chunks], 1)
    return codes, [chunk.stats for chunk, _ in chunks], passes.tokens, cache


SLOW = pytest.mark.slow


@pytest.mark.parametrize("cfg", [1.0, pytest.param(3.0, marks=SLOW)])
@pytest.mark.parametrize("jacobi", ["true", pytest.param("false", marks=SLOW)])
@pytest.mark.parametrize(
    "source", ["codes", "logits", *(pytest.param(x, marks=SLOW) for x in ("row", "repeat"))]
)
def test_every_code_is_the_dense_models(source, jacobi, cfg):
    here = model(cfg)
    want, counts, _, cache = play(here, "dense", seed=5)
    plan = f"passes=draft:places=5,source={source},jacobi={jacobi}"
    got, drafted, passes, kept = play(here, plan, seed=5)
    assert torch.equal(got, want)
    for mine, dense in zip(kept, cache, strict=True):
        torch.testing.assert_close(mine, dense)  # nothing of a refuted draft is left
    assert [x["pairs_dense"] for x in drafted] == [x["pairs_dense"] for x in counts]
    assert sum(x["drafts"] for x in drafted) > sum(x["drafts_accepted"] for x in drafted)
    assert max(passes[1:]) <= 6  # the place that is known, and five drafts


def test_a_batch_is_its_videos():
    here = model()
    want = [play(here, "dense", seed=seed)[0] for seed in (1, 2)]
    got, *_ = play(here, "passes=draft", seed=[1, 2])
    assert torch.equal(got, torch.cat(want))


def test_right_drafts_make_a_frame_in_few_passes():
    """A model that draws the same wherever it stands accepts every draft of the last frame."""
    here = model(cfg=1.0)
    head = here.transformer.head.classifier_mlp
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.bias[:] = 0
        head.linear.bias[7] = 50
    _, counts, passes, _ = play(here, "passes=draft:places=4")
    assert all(x["drafts"] == x["drafts_accepted"] for x in counts[1:])
    # 16 places, by one that is known and four drafts; the last is known
    assert passes[-8:] == 2 * [5, 5, 5, 1]
    # the first frame has no last one: every other pass refutes its drafts, what it drew is right
    assert passes[1:-8] == [5, 5, 5, 5, 4, 3]


@pytest.mark.parametrize("kept", [1, 2])
def test_given_frames_are_drafts_for_what_comes(kept):
    here, still = model(), torch.zeros(kept, 32, 32, 3, dtype=torch.uint8)
    options = {"first": still.numpy(), "seed": 2}
    want, *_ = play(here, "dense", frames=2, **options)
    got, counts, _, _ = play(here, "passes=draft", frames=2, **options)
    assert torch.equal(got, want)
    assert counts[0]["drafts"] > 0  # the first frame that is made has them already


def test_a_restored_stream_goes_on_with_the_same_drafts():
    here, plan = model(), "passes=draft:jacobi=false"
    with ts.open(here, plan, prompt="a b", seed=4) as stream:
        stream.step("w")
        state = stream.snapshot()
        want = stream.step("q")
    with ts.open(here, plan, prompt="a b", seed=4) as stream:
        stream.restore(state)
        got = stream.step("q")
    assert (got.frames == want.frames).all()
    assert got.stats["drafts_accepted"] == want.stats["drafts_accepted"]


@pytest.mark.parametrize("logits", [(1.0, 0.0, -1.0), (0.0, 3.0, 0.1)])
def test_a_draft_from_other_logits_is_right_as_often_as_both_agree(logits):
    """With the noise shared, draft and draw agree by sum 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    sampler, old = Sampler(cfg=1.0, top_p=1.0), torch.tensor([0.5, 0.5, 0.0])
    new, count = torch.tensor(logits), 40_000
    generator = torch.Generator().manual_seed(0)
    noise = torch.empty(count, 3).exponential_(generator=generator)
    draft, drawn = (sampler.pick(x.expand(count, 3), noise) for x in (old, new))
    p, q = new.softmax(-1), old.softmax(-1)
    agree = sum(1 / float((p / p[i]).maximum(q / q[i]).sum()) for i in range(3))
    assert (draft == drawn).float().mean().item() == pytest.approx(agree, abs=0.01)
    # and what is drawn has the dense model's distribution, whatever the draft was
    shares = torch.bincount(drawn, minlength=3) / count
    torch.testing.assert_close(shares, p, atol=0.01, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_drafts_beside_neurons_make_the_codes_of_neurons_alone(first, tmp_path):
    here, file = model(cfg=1.0), tmp_path / "calibration.safetensors"
    write_tensors(file, calibrate(here, clips=1, shares=[0.5]).tensors())
    options = {"first": torch.zeros(1, 32, 32, 3, dtype=torch.uint8).numpy()} if first else {}
    plan = f"replay=neurons:share=0.5,file={file}"
    want, alone, *_ = play(here, plan, seed=3, **options)
    got, counts, _, cache = play(here, f"{plan} passes=draft:places=5", seed=3, **options)
    assert torch.equal(got, want)
    assert not torch.equal(want, play(here, "dense", seed=3, **options)[0])
    assert counts[-1]["drafts"] > 0 and counts[-1]["rows_replayed"] > alone[-1]["rows_replayed"]


@pytest.mark.parametrize("name, plan, words", [
    ("toy-tokens", "passes=draft replay=neurons:share=0,age=2", "replay"),
    ("toy-chunks", "passes=draft", "token"),
    ("toy-tokens", "passes=draft replay=attentive:share=0.5", "replay"),
])  # fmt: skip
def test_what_cannot_be_drafted_is_refused(name, plan, words):
    with pytest.raises(TachyscopeError, match=words):
        ts.open(load(name), plan, prompt="a b")
