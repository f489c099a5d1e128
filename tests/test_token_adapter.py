"""Causal language models of transformers behind the session: the model's own tokens, or less work."""

import numpy as np
import pytest
import torch
from faults import refused

import tachyscope as ts
from tachyscope.measure.calibrate import calibrate
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.token_model import Sampler

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
IDS = [5, 17, 33, 8, 2, 9]
PROMPT = " ".join(map(str, IDS))
PLACES = 16


def make(kind, seed=0, **more):
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    name = kind.removesuffix("Text")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def emu3():
    return make("Emu3Text")


@pytest.fixture(scope="module")
def adapter(emu3):
    return ts.token_adapter(emu3, PLACES, 8)


def greedy(model, ids, count):
    """Tokens that transformers' own generate makes."""
    asked = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    return model.generate(torch.tensor([ids]), attention_mask=mask, **asked)[0, len(ids) :]


def play(adapter, plan, frames=3, prompt=PROMPT, **asked):
    """Tokens of so many frames, and what they counted."""
    with ts.open(adapter, plan, prompt=prompt, **asked) as stream:
        made = [stream.generate() for _ in range(frames)]
    total = {}
    for row in (part.stats for part in made):
        for name, value in row.items():
            total[name] = total.get(name, 0.0) + value
    return torch.cat([part.latents for part in made], 1).flatten(1), total


@pytest.mark.parametrize(
    "plan",
    [
        "dense",
        "dense replay=attentive:share=0",
        "dense cache=window:budget=99f",
        "dense attention=ann:read=1",
        "dense passes=draft:places=4",
    ],
)
def test_off_equals_dense_equals_the_models_own_greedy_tokens(emu3, adapter, plan):
    tokens, total = play(adapter, plan)
    assert tokens[0].tolist() == greedy(emu3, IDS, 3 * PLACES).tolist()
    assert total["rows_replayed"] == 0


def test_replay_leaves_out_real_work(emu3, adapter):
    calls = []
    mlp = adapter.transformer.mlps[1].fn
    handle = mlp.register_forward_hook(lambda *_: calls.append(1))
    tokens, dense = play(adapter, "dense")
    whole = len(calls)
    replayed, less = play(adapter, "dense replay=random:share=0.8")
    handle.remove()
    layers = SIZES["num_hidden_layers"]
    assert whole == 1 + 3 * PLACES  # the prompt's pass, and a pass a token
    assert dense["rows_computed"] == layers * 3 * PLACES
    assert less["rows_computed"] + less["rows_replayed"] == dense["rows_computed"]
    assert 0.3 < less["rows_replayed"] / dense["rows_computed"] < 0.8
    assert len(calls) - whole < whole
    saved = less["rows_replayed"] * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert dense["macs"] - less["macs"] == saved
    assert tokens[0, :PLACES].tolist() == replayed[0, :PLACES].tolist()  # frame 0 is whole


def test_neurons_are_calibrated_and_left_out(adapter, tmp_path):
    path = tmp_path / "calibration.safetensors"
    write_tensors(path, calibrate(adapter, clips=1, shares=[0.5], prompts=[PROMPT]).tensors())
    _, total = play(adapter, f"dense replay=neurons:share=0.5,file={path}")
    # frame 0 is computed whole, then half of every MLP
    assert total["rows_computed"] == 3 * PLACES * (1 + 2 * 0.5)
    other = ts.token_adapter(make("Llama", seed=1), PLACES, 8)
    refused(
        lambda: play(other, f"dense replay=neurons:share=0.5,file={path}"),
        "this calibration is of another model",
    )


@pytest.mark.parametrize(
    "kind, more",
    [
        ("Llama", {}),
        ("Qwen3", {"head_dim": 16}),
        pytest.param("Mistral", {"sliding_window": None}, marks=pytest.mark.slow),
        pytest.param("Qwen2", {}, marks=pytest.mark.slow),
        pytest.param(
            "Llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
            marks=pytest.mark.slow,
        ),
        pytest.param("Granite", {"attention_multiplier": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_other_families_are_served_as_they_are(kind, more):
    model = make(kind, **more)
    if kind == "Granite":  # scales logits behind its head
        model.config.logits_scaling = 1.0
    one = ts.token_adapter(model, (2, 8), 8)
    assert play(one, "dense", 2)[0][0].tolist() == greedy(model, IDS, 2 * PLACES).tolist()


@pytest.mark.parametrize(
    "kind, more, words",
    [
        ("GPT2", {}, "rotary_emb, got GPT2LMHead"),
        ("Mistral", {"sliding_window": 8}, "sliding_window"),
        pytest.param("Gemma2", {"head_dim": 12}, "sliding_window", marks=pytest.mark.slow),
        pytest.param("Cohere", {}, "logits come out", marks=pytest.mark.slow),
        ("Phi", {"partial_rotary_factor": 0.5}, "6 of a head's 12 channels"),
    ],
)
def test_a_model_that_a_session_cannot_serve_is_refused(kind, more, words):
    if kind == "GPT2":
        with torch.random.fork_rng():
            config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
            model = transformers.GPT2LMHeadModel(config).eval()
    else:
        model = make(kind, **more)
    refused(lambda: ts.token_adapter(model, PLACES, 8), words)


def test_a_model_in_float64_is_served_for_all_its_rotary_table_of_float32():
    model = make("Llama").double()
    one = ts.token_adapter(model, (2, 8), 8)
    assert one.dtype == torch.float64
    assert play(one, "dense", 1)[0][0].tolist() == greedy(model, IDS, PLACES).tolist()


@pytest.mark.parametrize(
    "kind, more",
    [
        ("GptOss", {"head_dim": 12, "num_local_experts": 2, "num_experts_per_tok": 1}),
        (
            "DeepseekV3",
            {
                "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4,
                "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3,
            },
        ),
    ],
)  # fmt: skip
def test_shapes_that_do_not_meet_are_one_line(kind, more):
    refused(lambda: ts.token_adapter(make(kind, **more), PLACES, 8), "in every layer")


def test_the_model_is_left_as_it_was(emu3):
    before = {name: (id(x), x.clone()) for name, x in emu3.named_parameters()}
    kept, grads = greedy(emu3, IDS, 8), [x.requires_grad for x in emu3.parameters()]
    adapter = ts.token_adapter(emu3, PLACES, 8)
    play(adapter, "dense replay=random:share=0.8", 2)
    assert emu3.config._attn_implementation != "tachyscope"
    assert [x.requires_grad for x in emu3.parameters()] == grads
    for name, x in emu3.named_parameters():
        assert id(x) == before[name][0] and torch.equal(x, before[name][1])
    assert torch.equal(greedy(emu3, IDS, 8), kept)
    # no second copy of a weight is held
    shared = {x.data_ptr() for x in emu3.parameters()}
    assert {x.data_ptr() for x in adapter.transformer.parameters()} <= shared


def test_tokens_are_drawn_where_a_sampler_says_so(emu3):
    adapter = ts.token_adapter(emu3, PLACES, 8, sampler=Sampler(cfg=1.0, top_k=50, top_p=0.9))
    one, same, other = (play(adapter, "dense", 1, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    drafted = play(adapter, "dense passes=draft:places=4", 1)[0]
    assert torch.equal(one, drafted)


def test_frames_are_the_callers_or_a_preview(emu3, adapter):
    with ts.open(adapter, "dense", prompt=PROMPT) as stream:
        frames = stream.step().frames
    assert frames.shape == (1, 32, 32, 3)

    def decode(tokens):
        assert tokens.shape == (1, 2, 8)
        return np.full((1, 4, 6, 3), 9, np.uint8)

    own = ts.token_adapter(emu3, (2, 8), 8, decode=decode)
    with ts.open(own, "dense", prompt=PROMPT) as stream:
        assert stream.step().frames.shape == (1, 4, 6, 3)


def test_a_tokenizer_of_transformers_reads_prompts(emu3):
    class Words:
        def __call__(self, text):
            return type("Out", (), {"input_ids": [1, *(len(word) for word in text.split())]})

    adapter = ts.token_adapter(emu3, PLACES, 8, tokenizer=Words())
    assert play(adapter, "dense", 1, "a red room")[0].tolist() == [
        greedy(emu3, [1, 1, 3, 4], PLACES).tolist()
    ]


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"prompt": "1 " * 9}, "has 1 to 8 tokens, got 9: shorten it"),
        ({"prompt": ""}, "got 0: give one"),
        ({"prompt": "1 97"}, "ids are from 0 to 96, got 97"),
        ({"prompt": "a room"}, "must be a whole number, got 'a'"),
        ({"prompt": PROMPT, "frames": 0}, "frames"),
        ({"prompt": PROMPT, "frames": -1}, "frames"),
        ({"prompt": PROMPT, "size": (64, 64)}, "32x32 pixels only"),
        ({"prompt": PROMPT, "first": np.zeros((1, 32, 32, 3), np.uint8)}, "no encoder"),
    ],
)
def test_bad_input_is_one_line(adapter, asked, words):
    refused(lambda: ts.open(adapter, "dense", **asked), words)


@pytest.mark.parametrize("wrong", [0, -4, 2.5, "16", True, (4,), (4, 0), (2, 2, 2), None])
def test_a_frame_of_no_tokens_is_one_line(emu3, wrong):
    refused(lambda: ts.token_adapter(emu3, wrong, 8), "tokens_per_frame")


@pytest.mark.parametrize("wrong", [-1, 1.5, 10**6])
def test_a_prompt_length_out_of_bounds_is_one_line(emu3, wrong):
    refused(lambda: ts.token_adapter(emu3, PLACES, wrong), "prompt_len")
