"""Token models of one process: what came before, another count, size or batch, changes nothing."""

import functools

import numpy as np
import pytest
import torch
from faults import refused
from toys import load, toy_cosmos

import tachyscope as ts

FIRST = [np.random.default_rng(i).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8) for i in (0, 1)]
PLANS = ["dense", "fastcar", "dense passes=draft:places=4", "dense cache=merge:budget=4f"]


def vila():
    return load("toy-tokens"), [{"prompt": "a b"}, {"prompt": "a red room"}]


def cosmos():
    return toy_cosmos(), [{"first": first} for first in FIRST]


def lm():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    config = transformers.Emu3TextConfig(
        vocab_size=61, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, **sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Emu3ForCausalLM(config).eval()
    return ts.token_adapter(model, 12, 8), [{"prompt": "5 6 7"}, {"prompt": "9 8 7"}]


FAMILIES = {"vila_u": vila, "cosmos_ar": cosmos, "token_adapter": lm}


def play(model, plan, frames=2, **asked):
    with ts.open(model, plan, **asked) as stream:
        return np.concatenate([stream.step().frames for _ in range(frames)], -4)


@functools.cache
def fresh(family, plan, which):
    """A video of a model that has made no other."""
    model, videos = FAMILIES[family]()
    return play(model, plan, seed=which, **videos[which])


@pytest.mark.parametrize(
    "plan", [x if x == "fastcar" else pytest.param(x, marks=pytest.mark.slow) for x in PLANS]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_videos_of_one_process_are_those_of_fresh_ones(family, plan):
    model, videos = FAMILIES[family]()
    other = next(x for x in PLANS if x != plan)
    play(model, other, 1, seed=5, **videos[1])  # another video, plan and count
    refused(lambda: play(model, plan, size=(48, 80), **videos[0]), "48x80")
    together = {key: [video[key] for video in videos] for key in videos[0]}
    both = play(model, plan, seed=[0, 1], **together)  # a batch
    open_one = ts.open(model, plan, seed=3, **videos[1])
    open_one.step()  # a stream that goes on beside
    for which in (0, 1):
        again = play(model, plan, seed=which, **videos[which])
        assert np.array_equal(again, fresh(family, plan, which))
        if "budget" not in plan:  # a bounded cache pads all rows to the longest prompt
            assert np.array_equal(both[which], again)
    open_one.step()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("frames", [0, -3, 1.5, True])
def test_a_count_that_is_none_is_one_line(family, frames):
    model, videos = FAMILIES[family]()
    refused(lambda: ts.open(model, "dense", frames=frames, **videos[0]), "frames")


def test_a_prompt_that_is_too_long_is_one_line():
    model, _ = vila()
    refused(lambda: ts.open(model, "dense", prompt="a" * 3000), "tokens of a prompt", "shorten")
