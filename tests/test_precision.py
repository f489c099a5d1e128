"""precision=fp8 is refused in one line where a card cannot compute so, or where it saves nothing."""

import json

import pytest
import torch
import toys
from faults import refused

import tachyscope as ts
from tachyscope.cli.options import load_model
from tachyscope.core.errors import TachyscopeWarning
from tachyscope.memory.fit import fit
from tachyscope.memory.predict import sized
from tachyscope.memory.promise import promise
from tachyscope.models import registry
from tachyscope.models.registry import changed, check_precision, in_precision
from tachyscope.models.wan.fp8_gain import LEAST, attention_saved, linears_saved
from tachyscope.models.wan.presets import PRESETS

CARDS = {"A100": (False, False), "RTX 4090": (True, False), "H200": (True, True)}


@pytest.fixture
def card(monkeypatch):
    """Let a CUDA device be a card: what it multiplies, and which kernels it runs."""

    def become(name):
        multiplies, hopper = CARDS[name]
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: name)
        monkeypatch.setattr(registry, "has_fp8", lambda place: multiplies)
        monkeypatch.setattr(registry, "has_hopper", lambda place: hopper)
        return torch.device("cuda")

    return become


@pytest.mark.parametrize("precision", ["fp8", "fp8_linears", "fp8_attention"])
def test_a_card_that_does_not_multiply_float8_is_named(card, precision):
    place = card("A100")
    refused(lambda: check_precision(precision, place), precision, "got A100", "leave it out")


def test_attention_in_float8_is_for_hopper_and_linears_for_others_too(card):
    place = card("RTX 4090")
    check_precision("fp8_linears", place)
    for precision in ("fp8", "fp8_attention"):
        refused(
            lambda p=precision: check_precision(p, place), "got RTX 4090", "precision=fp8_linears"
        )
    place = card("H200")
    for precision in registry.PRECISIONS:
        check_precision(precision, place)


def test_a_precision_is_of_a_wan_type_model():
    refused(lambda: check_precision("fp4", torch.device("cpu")), "no precision 'fp4'", "fp8")
    refused(lambda: in_precision(ts.load("toy-tokens"), "fp8"), "toy-tokens", "leave it out")


def test_a_plan_plays_in_float8_on_a_cpu_near_what_it_plays_without():
    films = []
    for precision in (None, "fp8"):
        model = toys.narrow_chunks()
        if precision is not None:
            model = in_precision(model, precision)
        (chunk,) = ts.rollout(model, "stock", frames=3, prompt="a", seed=1)
        films.append(torch.tensor(chunk.frames).float())
    apart = (films[0] - films[1]).abs().mean()
    assert 0 < apart < 0.1 * films[0].std()


def test_a_model_whose_linears_take_no_longer_than_making_codes_is_refused():
    narrow = ts.load("atrium-world").on_meta()  # as a GPU has it
    refused(
        lambda: changed(narrow, "fp8_linears", 1),
        "under 1 % of the time of linears in atrium-world at 128x128", "64 tokens, 256 channels",
        "leave `precision` out",
    )  # fmt: skip
    refused(
        lambda: changed(ts.load("atrium-world").on_meta(), "fp8", 1), "of linears and attention"
    )
    # it waits for launches, and two are added to four
    assert linears_saved(64, 256, 1024) == pytest.approx(-0.5)


def test_a_size_of_few_tokens_keeps_float8_linears_and_is_refused_its_attention():
    model = sized("self-forcing", precision="fp8")
    refused(
        lambda: model.shape((64, 64)),
        "of the time of attention in self-forcing at 64x64", "use precision=fp8_linears",
    )  # fmt: skip
    assert sized("self-forcing", precision="fp8_linears").shape((64, 64)).grid == (4, 4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_published_model_at_its_own_size_may_gain_by_float8(name):
    config = PRESETS[name].config
    tokens = config.chunk * config.size[0] * config.size[1] // (config.patch[1] * config.patch[2])
    assert linears_saved(tokens, config.dim, config.ffn_dim) > 0.4
    assert attention_saved(tokens, passes=len(config.steps) + 1) > 0.4


def test_attention_gains_from_the_number_of_queries_that_read_an_entrys_codes():
    fewest = next(n for n in range(1, 1000) if attention_saved(n, 1) >= LEAST)
    assert 400 < fewest < 500  # operations a byte of an H200, by 1.5 bytes over half the operations
    # five passes over a chunk read the codes that were made once
    assert next(n for n in range(1, 1000) if attention_saved(n, 5) >= LEAST) == -(-fewest // 5)


def test_fit_offers_no_float8_to_a_model_that_is_refused_it():
    found = fit(sized("atrium-world"), "fast", frames=48, vram_gb=0.01, command="")
    assert "precision" not in json.dumps(found["rows"])


def test_what_a_cpu_simulates_is_predicted_at_every_size():
    model = in_precision(toys.narrow_chunks(), "fp8")
    assert promise(model, "stock", frames=3, size=(48, 48)).ram > 0


def test_on_a_cpu_float8_is_said_to_be_simulated():
    with pytest.warns(TachyscopeWarning, match="no time is saved"):
        model = load_model("atrium-world", ("precision=fp8_linears",))
    assert model.operations is not None
