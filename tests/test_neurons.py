"""Replay by neurons: its rule in full, its calibration, and what a file of one may hold."""

import math

import pytest
import torch
from streams import TOKENS, draw, play_pass, session
from toys import load

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.core.errors import TachyscopeError
from tachyscope.io.calibration import Calibration
from tachyscope.io.torch_defaults import own_numerics
from tachyscope.kernels.replay import remembered_error
from tachyscope.kernels.replay.reference import remembered_error_reference
from tachyscope.measure.calibrate import BETAS, _fading, _fit, _rest, calibrate
from tachyscope.models.checkpoint import read_tensors, write_tensors
from tachyscope.models.llama import SwiGlu
from tachyscope.models.toys import toy_tokens

WIDTH, INNER, LAYERS = TOKENS.width, 64, TOKENS.layers


@pytest.fixture(scope="module")
def mlp():
    with own_numerics(1):
        return SwiGlu(WIDTH, INNER).double().requires_grad_(False)


@pytest.fixture(scope="module")
def found(mlp):
    """A calibration of random scores and maps, which differ from layer to layer."""
    rng = torch.Generator().manual_seed(2)

    def draw(*size):
        return 0.1 * torch.randn(size, generator=rng)

    return Calibration(
        score=draw(LAYERS, INNER).abs(), norms=mlp.down.float().norm(dim=0).repeat(LAYERS, 1),
        speeds=torch.zeros(0, 2), maps={0.5: (draw(LAYERS, WIDTH, WIDTH),)},
        bias={0.5: draw(LAYERS, WIDTH)}, beta={0.5: torch.tensor([0.3, 0.7])},
    )  # fmt: skip


def swiglu(x, mlp, neurons):
    """Of some neurons alone, one by one."""
    out = torch.zeros(WIDTH, dtype=torch.float64)
    for n in neurons:
        gate, up = float(mlp.gate[n] @ x), float(mlp.up[n] @ x)
        out += gate / (1 + math.exp(-gate)) * up * mlp.down[:, n]
    return out


def rule(inputs, mlp, found, layer, age):
    """The outputs [frames, B, N, W] of inputs [frames, B, N, W], as the docstring states it."""
    kept = found.kept(0.5)[layer].tolist()
    linear, bias = found.maps[0.5][0][layer].double(), found.bias[0.5][layer].double()
    beta, out = float(found.beta[0.5][layer]), torch.zeros_like(inputs)
    for b in range(inputs.shape[1]):
        for place in range(inputs.shape[2]):
            error = old = None
            for frame, x in enumerate(inputs[:, b, place]):
                about = swiglu(x, mlp, kept) + x @ linear + bias
                whole = frame == 0 or (age and (frame + place) % (age + 1) == 0)
                if whole:
                    y = swiglu(x, mlp, range(INNER))
                    error, old = y - about, x
                else:
                    far = float((x - old) @ (x - old)) / float(old @ old)
                    y = about + math.exp(-beta * far) * error
                out[frame, b, place] = y
    return out


def play(at, inputs, mlp):
    """The session's outputs [layers, frames, B, N, W], token by token."""
    rng = torch.Generator().manual_seed(5)
    prompt = draw(rng, TOKENS, at.memory.prompt)
    play_pass(at, prompt, at.memory.prompt_positions(), 0, 1, mlp)
    at.commit()
    out = torch.zeros_like(inputs)
    for frame in range(inputs.shape[1]):
        pos = TOKENS.positions(frame, 1)
        for place in range(TOKENS.tokens_per_frame):
            layers = draw(rng, TOKENS, 1)
            for layer, part in enumerate(layers):
                part[3] = inputs[layer, frame, :, place : place + 1]
            made = play_pass(at, layers, pos[place : place + 1], 0, 1, mlp)
            for layer, (_, y) in enumerate(made):
                out[layer, frame, :, place] = y[:, 0]
        at.commit()
    return out


@pytest.mark.parametrize("age", [0, 2])
def test_the_rule_token_by_token_in_float64(mlp, found, age):
    rng = torch.Generator().manual_seed(3)
    size = (LAYERS, 4, TOKENS.batch, TOKENS.tokens_per_frame, WIDTH)
    inputs = torch.randn(size, generator=rng, dtype=torch.float64)
    inputs[:, 1:] = inputs[:, :1] + 0.4 * inputs[:, 1:]
    at = session(TOKENS, f"replay=neurons:share=0.5,age={age}", calibration=found)
    out = play(at, inputs, mlp)
    for layer in range(LAYERS):
        want = rule(inputs[layer], mlp, found, layer, age)
        torch.testing.assert_close(out[layer], want, rtol=1e-9, atol=1e-9)


def test_pruning_is_the_rule_without_a_memory(mlp, found):
    rng = torch.Generator().manual_seed(3)
    size = (LAYERS, 2, TOKENS.batch, TOKENS.tokens_per_frame, WIDTH)
    inputs = torch.randn(size, generator=rng, dtype=torch.float64)
    out = play(session(TOKENS, "replay=prune:share=0.5", calibration=found), inputs, mlp)
    x, kept = inputs[1, 1, 0, 2], found.kept(0.5)[1].tolist()
    want = swiglu(x, mlp, kept) + x @ found.maps[0.5][0][1].double() + found.bias[0.5][1]
    torch.testing.assert_close(out[1, 1, 0, 2], want, rtol=1e-9, atol=1e-9)


def test_a_share_falls_on_the_neurons_of_least_score(found):
    for scores, index in zip(found.score, found.kept(0.5), strict=True):
        out = torch.ones(INNER, dtype=torch.bool)
        out[index] = False
        assert len(index) == INNER / 2 and scores[index].min() >= scores[out].max()


def test_work_left_out_is_counted(mlp, found):
    inputs = torch.ones(LAYERS, 3, TOKENS.batch, TOKENS.tokens_per_frame, WIDTH).double()
    at = session(TOKENS, "replay=neurons:share=0.5", calibration=found)
    play(at, inputs, mlp)
    row = at.meter.take()
    rows = TOKENS.batch * TOKENS.tokens_per_frame
    whole = 3 * WIDTH * INNER
    sizes = [3 * WIDTH * len(index) + WIDTH**2 for index in found.kept(0.5)]
    prompt = TOKENS.batch * at.memory.prompt * LAYERS * whole
    # the first frame is computed whole, and once by the slice; then there are two by the slice
    assert row["mlp_macs"] == prompt + rows * (LAYERS * whole + 3 * sum(sizes))
    assert row["rows_eligible"] == 2 * LAYERS * rows


def test_a_remembered_error_fades_as_it_is_defined():
    rng = torch.Generator().manual_seed(0)
    error, base, x = (torch.randn(2, 3, 5, generator=rng) for _ in range(3))
    want = remembered_error_reference(error, base, x, 0.4)
    torch.testing.assert_close(remembered_error(error, base, x, 0.4), want)
    torch.testing.assert_close(remembered_error(error, x, x, 0.4), error)


# --- calibration


@pytest.fixture(scope="module")
def model():
    return load("toy-tokens")


@pytest.fixture(scope="module")
def own(model):
    return calibrate(model, clips=1, shares=[0.5, 0.75])


def test_a_map_is_the_least_squares_fit_of_what_is_left_out(mlp):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 20, WIDTH, generator=rng).half()
    fit, rows = _fit(mlp, x), x.flatten(0, 2).double()
    ones = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    h = mlp.activations(rows)
    want = torch.linalg.lstsq(ones, h).solution
    torch.testing.assert_close(fit.map, want, rtol=0, atol=2e-3)
    left = ((h - ones @ fit.map) ** 2).sum(0) * (mlp.down**2).sum(0)
    torch.testing.assert_close(fit.score.double() * (mlp(rows) ** 2).sum(), left)
    kept = torch.arange(INNER // 2)
    rest = _rest(mlp, x, fit, kept)
    about = mlp.slice(kept)(rows) + rows @ rest.maps[0].double() + rest.bias
    want = mlp(rows) - (h - ones @ fit.map)[:, INNER // 2 :] @ mlp.down[:, INNER // 2 :].T
    torch.testing.assert_close(about, want)


def test_an_error_that_never_changes_is_remembered_and_noise_is_not():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 20, WIDTH, generator=rng)
    constant = torch.randn(2, 1, 20, WIDTH, generator=rng).expand(-1, 9, -1, -1)
    assert _fading(constant, x) == BETAS[0]
    assert _fading(torch.randn(2, 9, 20, WIDTH, generator=rng), x) > 2


def test_a_calibration_survives_its_file(own, tmp_path, model):
    write_tensors(tmp_path / "one.safetensors", own.tensors())
    plan = f"replay=neurons:share=0.75,file={tmp_path / 'one.safetensors'}"
    with ts.open(model, plan, prompt="a b") as stream:
        stream.step()
        assert stream.step().stats["rows_replayed"] > 0
    again = Calibration.of(own.tensors(), "it")
    assert all(torch.equal(a, b) for a, b in zip(again.kept(0.75), own.kept(0.75), strict=True))


FAULTS = {
    "lacks 'score'": lambda t: t.pop("score"),
    "has NaN or infinity in 'bias.0'": lambda t: t["bias.0"].fill_(math.nan),
    "has 'map.0.0' as": lambda t: t.update({"map.0.0": t["map.0.0"].float()}),
    "has 'more', which no calibration has": lambda t: t.update(more=torch.zeros(1)),
    "is not of version 2": lambda t: t["version"].fill_(1),
    "shares that are not numbers between 0 and 1": lambda t: t["shares"].fill_(1.5),
    "has losses that fall": lambda t: t.update(losses=torch.tensor([[1.0, 2.0], [2.0, 1.0]])),
    "has 'score' of sizes": lambda t: t.update(score=torch.zeros(3)),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_damaged_file_is_refused_in_one_line(own, message):
    tensors = {name: x.clone() for name, x in own.tensors().items()}
    FAULTS[message](tensors)
    with pytest.raises(TachyscopeError) as fault:
        Calibration.of(tensors, "a file")
    assert message in str(fault.value) and "\n" not in str(fault.value)


def test_a_calibration_of_another_model_is_refused(own, tmp_path):
    write_tensors(tmp_path / "one.safetensors", own.tensors())
    other = toy_tokens(seed=1)
    with pytest.raises(TachyscopeError, match="of another model"):
        ts.open(other, f"replay=prune:share=0.5,file={tmp_path / 'one.safetensors'}")


def test_faults_of_plans_and_models_are_one_line(model, own, tmp_path):
    with pytest.raises(TachyscopeError, match="needs a calibration of the model"):
        ts.open(model, "replay=neurons:share=0.5")
    write_tensors(tmp_path / "one.safetensors", own.tensors())
    with pytest.raises(TachyscopeError, match="of shares 0.5, 0.75, got 0.6"):
        ts.open(model, f"replay=neurons:share=0.6,file={tmp_path / 'one.safetensors'}")
    with pytest.raises(TachyscopeError, match="token by token"):
        ts.open(load("toy-chunks"), "replay=neurons:share=0.5")
    with pytest.raises(TachyscopeError, match="no token model"):
        calibrate(load("toy-chunks"))
    with pytest.raises(TachyscopeError, match="shares are up to"):
        calibrate(model, shares=[1.0])


@pytest.mark.slow
def test_the_shipped_calibration_is_of_the_shipped_weights_in_every_dtype():
    for dtype in ("float32", "bfloat16"):
        shipped = ts.load("atrium-tokens", dtype=dtype)
        found = Calibration.of(read_tensors(shipped.calibration), "it")
        parts = found.slices(0.75, dict(enumerate(shipped.mlps)))
        assert [len(part.mlp.gate) for part in parts.values()] == [256] * 6
        assert len(found.speeds) >= 4


@pytest.mark.slow
def test_inspect_writes_a_file_that_a_plan_can_name(tmp_path, capsys):
    out = tmp_path / "toy.safetensors"
    words = ["inspect", "toy-tokens", "--fit-neurons", str(out)]
    assert main(words) == 0
    assert "80 of 160" in capsys.readouterr().out
    with ts.open(ts.load("toy-tokens"), f"replay=prune:file={out},share=0.5") as stream:
        assert stream.step().stats["rows_replayed"] > 0
    assert main([*words[:-1], "toy.txt"]) == 2
    assert "--fit-neurons is a .safetensors file" in capsys.readouterr().err
