"""precision=fp8 is refused in one line where a card cannot compute so, and plays elsewhere."""

import pytest
import torch
import toys
from faults import refused

import tachyscope as ts
from tachyscope.models import registry
from tachyscope.models.registry import check_precision, in_precision

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
