"""Replay by the change of inputs: its rule, its budget, and the certificate of what it replays."""

import fit_losses
import pytest
import torch
from streams import TOKENS, draw, play_pass, session
from toys import load

import tachyscope as ts
from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError, TachyscopeWarning
from tachyscope.io.calibration import MARGIN, Calibration
from tachyscope.io.torch_defaults import own_numerics
from tachyscope.kernels.token_gate import MAX_TOKEN_COST
from tachyscope.measure.calibrate import calibrate
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.llama import SwiGlu
from tachyscope_lab.evaluation.certificate import Certificate
from tachyscope_lab.evaluation.certificates import ErrorObserver

FRAMES, PLACES, WIDTH = 6, TOKENS.tokens_per_frame, TOKENS.width


@pytest.fixture(scope="module")
def mlp():
    with own_numerics(1):
        return SwiGlu(WIDTH, 48).double().requires_grad_(False)


@pytest.fixture(scope="module")
def inputs():
    """Inputs [frames, B, N, W] that walk away from the first frame's, some faster than others."""
    rng = torch.Generator().manual_seed(3)
    size = (FRAMES, TOKENS.batch, PLACES, WIDTH)
    steps = torch.randn(size, generator=rng, dtype=torch.float64)
    steps[1:] *= 0.01 + 0.2 * torch.rand(1, 1, PLACES, 1, generator=rng, dtype=torch.float64)
    return steps.cumsum(0)


def play(at, inputs, mlp):
    """The session's outputs [frames, B, N, W] of its first layer, token by token."""
    rng = torch.Generator().manual_seed(5)
    play_pass(at, draw(rng, TOKENS, at.memory.prompt), at.memory.prompt_positions(), 0, 1, mlp)
    at.commit()
    out = torch.zeros_like(inputs)
    for frame in range(FRAMES):
        pos = TOKENS.positions(frame, 1)
        for place in range(PLACES):
            layers = draw(rng, TOKENS, 1)
            for part in layers:
                part[3] = inputs[frame, :, place : place + 1]
            out[frame, :, place] = play_pass(at, layers, pos[place : place + 1], 0, 1, mlp)[0][1][
                :, 0
            ]
        at.commit()
    return out


def rule(inputs, mlp, replays):
    """Outputs, where `replays(change)` says whether a token is replayed: both rows of a pair."""
    base, kept, out = inputs[0].clone(), mlp(inputs[0]), torch.zeros_like(inputs)
    out[0] = kept
    for frame in range(1, FRAMES):
        for place in range(PLACES):
            x, old = inputs[frame, :, place], base[:, place]
            change = (x - old).norm(dim=-1) / old.norm(dim=-1)
            if not replays(float(change.mean())):
                base[:, place], kept[:, place] = x, mlp(x)
            out[frame, :, place] = kept[:, place]
    return out


def test_a_token_is_replayed_while_its_input_stays_near_the_one_that_was_computed(mlp, inputs):
    at = session(TOKENS, "replay=input:threshold=0.3")
    out = play(at, inputs, mlp)
    row = at.meter.take()
    assert 0 < row["rows_replayed"] < row["rows_eligible"]
    want = rule(inputs, mlp, lambda change: change <= 0.3)
    torch.testing.assert_close(out, want)


def test_a_budget_is_a_credit_that_replayed_tokens_take_from(mlp, inputs):
    budget = 0.02

    left = 0.0

    def replays(change):
        nonlocal left
        left = min(left + budget, budget * PLACES)
        if change**2 > min(left, MAX_TOKEN_COST * budget):
            return False
        left -= change**2
        return True

    at = session(TOKENS, f"replay=input:budget={budget}")
    out = play(at, inputs, mlp)
    row = at.meter.take()
    assert 0 < row["rows_replayed"] < row["rows_eligible"]
    torch.testing.assert_close(out, rule(inputs, mlp, replays))


def test_a_share_is_held_over_a_frame(mlp, inputs):
    at = session(TOKENS, "replay=input:share=0.5")
    play(at, inputs, mlp)
    row = at.meter.take()
    assert row["rows_replayed"] / row["rows_eligible"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    "plan, message",
    [
        ("replay=input", "takes a threshold, a share, a budget or a loss, one of them"),
        ("replay=input:share=0.5,loss=1", "takes a threshold, a share, a budget or a loss"),
        ("replay=input:loss=-1", "loss must be from 0 to 100"),
        ("replay=input:loss=1", "needs a calibration of the model"),
    ],
)
def test_faults_are_one_line(plan, message):
    with pytest.raises(TachyscopeError, match=message) as fault:
        ts.open(load("toy-tokens"), plan)
    assert "\n" not in str(fault.value)


def test_replay_by_attention_tells_what_it_loses_where_a_camera_moves():
    model = load("toy-tokens")
    for plan in (
        "fastcar",
        "replay=attentive:share=0.5",
        ts.plan("dense", replay="attentive:share=0.5"),
    ):
        with pytest.warns(TachyscopeWarning, match="loses 8 to 16 dB where a camera moves") as told:
            ts.open(model, plan, prompt="a")
        assert len(told) == 1 and "\n" not in str(told[0].message)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("plan", ["lossless", "replay=attentive:share=0", "replay=input:loss=0.3"])
def test_what_loses_nothing_there_is_not_warned_of(plan):
    parse_plan(load("toy-tokens"), plan)
    parse_plan(load("toy-chunks"), "fastcar")


def test_a_budget_is_of_token_models():
    with pytest.raises(TachyscopeError, match="with token models alone"):
        ts.open(load("toy-chunks"), "replay=input:budget=1")


# --- calibrated


@pytest.fixture(scope="module")
def own():
    return calibrate(load("toy-tokens"), clips=1, shares=[0.5])


def test_a_loss_becomes_the_budget_between_two_that_were_measured(own, tmp_path):
    tensors = own.tensors() | {"losses": torch.tensor([[0.01, 0.1], [0.03, 0.5]])}
    found = Calibration.of(tensors, "it")
    assert found.budget(0.0) == 0.0 and found.budget(0.05) == pytest.approx(0.005)
    assert found.budget(0.3) == pytest.approx(0.02)
    with pytest.raises(TachyscopeError, match=r"knows losses up to 0.5 dB, got loss=0.6"):
        found.budget(0.6)
    file = tmp_path / "one.safetensors"
    write_tensors(file, tensors)
    with ts.open(load("toy-tokens"), f"replay=input:loss=0.3,file={file}", prompt="a") as stream:
        assert stream.session.memory.replay.policy.budget == pytest.approx(0.02)


@pytest.mark.parametrize("plan", ["attentive:share=0.6", "input:share=0.6"])
def test_a_certificate_lies_above_every_error_of_its_own_clip(own, plan):
    model = load("toy-tokens")
    watch, truth = Certificate(own), ErrorObserver(model.mlps)
    with ts.open(model, f"replay={plan}", prompt="a b", observers=[watch, truth]) as stream:
        for _ in range(4):
            stream.step()
            replayed = watch.bounds > 0
            assert (truth.errors <= watch.bounds + 1e-5).all()
    assert replayed.any() and (truth.errors[~replayed] < 1e-5).all()
    # by hand, of one token
    layer, row, place = (int(x[0]) for x in replayed.nonzero(as_tuple=True))
    base, x = watch._bases[layer, row, place], truth.inputs[layer, row, place]
    want = MARGIN * own.gain[layer] * (x - base).norm()
    torch.testing.assert_close(watch.bounds[layer, row, place], want)


@pytest.mark.slow
def test_a_certificate_of_neurons_is_bounded_at_any_distance(own, tmp_path):
    file = tmp_path / "one.safetensors"
    write_tensors(file, own.tensors())
    model = load("toy-tokens")
    for name in ("neurons", "prune"):
        watch, truth = Certificate(own), ErrorObserver(model.mlps)
        plan = f"replay={name}:share=0.5,file={file}"
        with ts.open(model, plan, prompt="a b", observers=[watch, truth]) as stream:
            for _ in range(3):
                stream.step()
        assert (truth.errors <= watch.bounds + 1e-5).all() and watch.bounds.max() > 0
        column = 1 if name == "neurons" else 2
        assert (watch.bounds.amax((1, 2)) <= MARGIN * own.off[0.5][:, column] + 1e-5).all()


def test_a_certificate_needs_replay_of_a_token_model(own):
    for name, plan in [("toy-tokens", "dense"), ("toy-chunks", "replay=random:share=0.5")]:
        with pytest.raises(TachyscopeError, match="a certificate is of a token model's replay"):
            ts.open(load(name), plan, observers=[Certificate(own)])
    with pytest.raises(TachyscopeError, match="drift moves what is replayed"):
        ts.open(
            load("toy-tokens"), "replay=random:share=0.5,drift=true", observers=[Certificate(own)]
        )


def test_a_table_of_losses_never_falls():
    found = fit_losses.losses([0.001, 0.02, 0.01, 0.03, 0.05])
    assert [budget for budget, _ in found] == list(fit_losses.BUDGETS)
    assert [lost / fit_losses.DB_PER_NAT for _, lost in found] == pytest.approx(
        [0.001, 0.02, 0.02, 0.03, 0.05]
    )


def test_a_budget_is_the_less_the_more_a_layer_costs(own, tmp_path):
    file, model = tmp_path / "one.safetensors", load("toy-tokens")
    layers = len(own.score)
    costs = torch.arange(1.0, layers + 1)
    write_tensors(file, own.tensors() | {"cost": costs})
    with ts.open(model, f"replay=input:budget=0.6,file={file}", prompt="a") as stream:
        budgets = [stream.session.memory.replay.policy_of(i).budget for i in range(layers)]
        assert budgets == pytest.approx((0.6 / costs).tolist())
    # the other kinds have no use for it
    with ts.open(model, f"replay=input:share=0.5,file={file}", prompt="a") as stream:
        assert stream.session.memory.replay.policy_of(1).share == 0.5
    with pytest.raises(TachyscopeError, match="has layers that cost nothing"):
        Calibration.of(own.tensors() | {"cost": 0 * costs}, "it")
