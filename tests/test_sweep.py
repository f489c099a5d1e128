"""Which weight of the past suits a model, found on its own videos without a truth."""

import dataclasses
import json
import math

import numpy as np
import pytest
from faults import refused
from toys import load, toy_cosmos

from tachyscope.cli import main
from tachyscope.core.errors import TachyscopeError
from tachyscope.measure import sweep
from tachyscope.measure.sweep import sweep_past
from tachyscope.models.atrium.autoencoder import Autoencoder, AutoencoderDecoder
from tachyscope.models.toys import toy_chunks
from tachyscope.models.vila_u.model import Vila, VilaModel
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.random import random_wan

SMALL = {
    "dim": 256, "ffn_dim": 64, "layers": 1, "heads": 2, "in_channels": 4, "text_dim": 16,
    "text_len": 8, "freq_dim": 32, "size": (4, 4),
}  # fmt: skip


def test_the_way_back_is_held_against_the_way_out_from_the_same_place():
    model = toy_chunks()
    moves, looks = sweep._walk(model, "w*2 q*6", 16)
    assert "".join(model.actions[move] for move in moves) == "wwqqqqqqeeeeeess"
    place, at = 0j, []
    turned = 1 + 0j
    for move in moves:
        letter = model.actions[move]
        turned *= {"q": 1j**0.1, "e": 1j**-0.1}.get(letter, 1)
        place += {"w": turned, "s": -turned}.get(letter, 0)
        at.append((place, turned))
    assert [look.again for look in looks] == [11, 12, 13, 14]
    for look in looks:
        assert np.allclose(at[look.again], at[look.first[0]])


def test_without_actions_the_last_third_is_held_against_the_first():
    moves, looks = sweep._walk(toy_cosmos(), "", 30)
    assert moves == [] and [look.again for look in looks] == list(range(20, 30))
    assert all(0 <= i < 10 for look in looks for i in look.first)


@pytest.mark.slow
def test_a_sweep_of_a_model_names_a_weight_or_says_that_none_gains(tmp_path, capsys):
    for name, walk in (("toy-chunks", "back"), ("toy-tokens", "back")):
        assert (
            main(["compare", name, "--sweep", "past", "--frames", "8", "--out", str(tmp_path)]) == 0
        )
        found, out = json.loads((tmp_path / "sweep.json").read_text()), capsys.readouterr().out
        assert [row["past_weight"] for row in found["rows"][:4]] == [1, 2, 4, 8]
        assert (found["suite"], found["walk"], found["judge"]) == ("sweep-past", walk, "psnr")
        assert all(len(row["by_seed"]) == 3 for row in found["rows"]) and found["lead"] in out
        by_pose = [row for row in found["rows"] if "attention=pose" in row["plan"]]
        assert len(by_pose) == (name == "toy-chunks")


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_is_swept(name):
    config = dataclasses.replace(PRESETS[name].config, **SMALL)
    model = random_wan(config, name=name)
    if name == "krea":  # it encodes what it has shown again
        model.decoder = AutoencoderDecoder(Autoencoder(config.in_channels))
    found = sweep_past(model, frames=12)
    # a world that is moved by keys walks away and comes back
    assert found["walk"] == ("back" if config.actions else "on") and all(
        math.isfinite(row["apart"]) for row in found["rows"]
    )
    assert "past_weight" in found["lead"]


@pytest.mark.slow
def test_token_models_are_swept_on_a_way_back_on_a_prompt_and_from_a_picture():
    steered = load("toy-tokens")
    config = dataclasses.replace(steered.config, actions="")
    prompted = VilaModel(Vila(config).eval(), config, steered.tokenizer, name="toy-prompted")
    cosmos = toy_cosmos()
    shown = np.zeros((1, *cosmos.size, 3), np.uint8)
    for model, more, walk in (
        (steered, {}, "back"),
        (prompted, {"prompt": "a"}, "on"),
        (cosmos, {"first": shown}, "on"),
    ):
        found = sweep_past(model, frames=8, **more)
        assert found["walk"] == walk and "past_weight" in found["lead"]
        assert [row["past_weight"] for row in found["rows"]] == [1, 2, 4, 8]
    refused(lambda: sweep_past(cosmos, frames=8), "goes on from given frames, got none")


def test_a_sweep_says_which_frames_are_the_way_back(tmp_path, monkeypatch, capsys):
    assert sweep.about(toy_chunks(), "fast", 48) == (
        "15 videos: 5 settings with 3 seeds each, of 24 frames along the actions and 24 the same "
        "way back, of which the last 12 are compared with those of the way out"
    )
    _, looks = sweep._walk(toy_chunks(), "", 48)
    assert len(looks) == 12
    assert "whose last 16 are compared with the first 16" in sweep.about(toy_cosmos(), "dense", 48)

    def begun(*given, **more):  # by then the line must be there
        raise TachyscopeError("begun")

    monkeypatch.setattr(sweep, "sweep_past", begun)
    assert main(["compare", "toy-chunks", "--sweep", "past", "--out", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert "24 the same way back" in out and "begun" in error


def rows_of(*apart, motion=1.0):
    return [
        {"name": f"past_weight={2**i}", "apart": sum(x) / 3, "by_seed": x, "motion": motion}
        for i, x in enumerate(apart)
    ]


def test_the_weight_that_gains_most_in_every_seed_is_taken():
    rows = rows_of([20, 21, 22], [21, 22, 23], [23, 23, 24], [30, 30, 21.5])
    assert sweep._lead(rows, "psnr").startswith("Take past_weight=4: PSNR 21.0 dB to 23.3 dB")
    # of LPIPS less is nearer
    assert sweep._lead(rows, "lpips").startswith("No gain is seen")
    turned = [
        row | {"by_seed": [-x for x in row["by_seed"]], "apart": -row["apart"]} for row in rows
    ]
    assert sweep._lead(turned, "lpips").startswith("Take past_weight=4")


def test_no_weight_is_taken_for_a_video_that_stands_still():
    still = rows_of([20, 21, 22]) + [rows_of([0] * 3, [40, 40, 40], motion=0.7)[1]]
    assert "leave past_weight at 1" in sweep._lead(still, "psnr")


def test_a_sweep_that_cannot_be_made_says_why_in_one_line():
    model = toy_chunks()
    refused(lambda: sweep_past(model, frames=7), "needs 8 frames or more, got 7: raise frames")
    refused(
        lambda: sweep_past(model, frames=16, actions="q*9"),
        "8 for `actions` and 8 for the way back, got more actions: raise `frames`",
    )
    refused(
        lambda: sweep_past(model, "dense cache=window:budget=9f attention=radial", frames=8),
        "has no past_weight to sweep",
    )


def test_the_plan_pose_is_swept_by_its_own_weight():
    plans = sweep._plans(toy_chunks(), "pose")
    assert [one.attention.past_weight for _, _, one in plans] == [1, 2, 4, 8]
    assert {one.attention.name for _, _, one in plans} == {"pose"}
