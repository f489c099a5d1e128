"""Drafts in transformers' own `generate`: its tokens, in fewer passes."""

from pathlib import Path

import pytest
import torch
import transformers

import tachyscope as ts

VOCABULARY = 48
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.3, "top_k": 20},
    "greedy, guided": {"guidance_scale": 3.0},
    "sampled, guided": {"do_sample": True, "temperature": 0.2, "guidance_scale": 1.5},
    "until an end": {"do_sample": True, "temperature": 0.2, "eos_token_id": 5},
    "penalised": {"repetition_penalty": 1.2},
}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))


def qwen():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, head_dim=16))


def sliding():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**COMMON, sliding_window=24))


def emu():
    config = transformers.Emu3TextConfig(**COMMON)
    return transformers.Emu3ForCausalLM(config)


def chameleon():
    """As Lumina-mGPT is."""
    coder = {"base_channels": 32, "channel_multiplier": [1], "num_embeddings": 8}
    config = transformers.ChameleonConfig(
        **COMMON, vq_config=coder, vocabulary_map={"<image>": 47, "a": 2}
    )
    return transformers.ChameleonForConditionalGeneration(config)


def janus():
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    coder = {"base_channels": 32, "channel_multiplier": [1], "num_embeddings": 8}
    config = transformers.JanusConfig(
        text_config={"model_type": "llama", **COMMON},
        vision_config={**small, "image_size": 32, "projection_dim": 64}, vq_config=coder,
    )  # fmt: skip
    return transformers.JanusForConditionalGeneration(config)


MODELS = {
    "llama": llama,
    "qwen3": qwen,
    "a sliding window": sliding,
    "emu3": emu,
    "chameleon": chameleon,
    "janus": janus,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def generate(model, ids, tokens=48, **options):
    torch.manual_seed(3)
    out = model.generate(ids, max_new_tokens=tokens, **options)
    return out, torch.rand(1)


@pytest.mark.parametrize("way", WAYS)
def test_drafted_tokens_are_those_of_generate(model, way):
    ids = torch.randint(6, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    plain, after = generate(model, ids, **WAYS[way])
    drafts = ts.drafts(tokens_per_frame=16, places=8)
    drafted, left = generate(model, ids, custom_generate=drafts, **WAYS[way])
    assert torch.equal(drafted, plain)
    assert torch.equal(left, after), "what comes next is drawn by the same noise"
    assert drafts.tokens == drafted.shape[1] - 12 and drafts.passes <= drafts.tokens


def test_frames_that_repeat_take_a_pass_for_many_tokens(model):
    """A rule that repeats the last frame: every draft is right."""
    ids = torch.randint(6, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(1))

    def repeats(sequence, scores):
        scores[:] = -1.0
        return scores.scatter(1, sequence[:, -16][:, None], 1.0)

    drafts = ts.drafts(tokens_per_frame=16, places=8)
    rule = transformers.LogitsProcessorList([repeats])
    # Janus' own drops the processors that it is given
    out = transformers.GenerationMixin.generate(
        model, ids, max_new_tokens=64, custom_generate=drafts, logits_processor=rule
    )
    assert torch.equal(out, ids.repeat(1, 5))
    assert drafts.passes == 1 + 7  # the prompt, then nine tokens a pass


def test_padded_prompts_are_drafted_row_by_row(model):
    ids = torch.randint(6, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5], ids[1, :5] = 0, 0
    plain, _ = generate(model, ids, attention_mask=mask)
    drafted, _ = generate(
        model, ids, attention_mask=mask, custom_generate=ts.drafts(tokens_per_frame=16)
    )
    assert torch.equal(drafted, plain)


def test_scores_and_cache_are_returned_as_generate_returns_them():
    torch.manual_seed(0)
    model = llama().eval()
    ids = torch.randint(6, VOCABULARY, (1, 12))
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain, _ = generate(model, ids, **wanted)
    drafted, _ = generate(model, ids, custom_generate=ts.drafts(tokens_per_frame=16), **wanted)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert drafted.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    for name in ("scores", "logits"):
        for ours, theirs in zip(drafted[name], plain[name], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_cache_from_before_goes_on():
    torch.manual_seed(0)
    model = llama().eval()
    ids = torch.randint(6, VOCABULARY, (1, 12))
    first, _ = generate(model, ids, tokens=30, return_dict_in_generate=True)
    plain, _ = generate(model, ids, tokens=60)
    drafted, _ = generate(
        model, first.sequences, tokens=30, past_key_values=first.past_key_values,
        custom_generate=ts.drafts(tokens_per_frame=16),
    )  # fmt: skip
    assert torch.equal(drafted, plain)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_beams": 2}, "drafts do not go with beam search"),
        ({"use_cache": False}, "drafts do not go with use_cache=False"),
        ({"cache_implementation": "static"}, "drafts do not go with a static cache"),
        (
            {"output_attentions": True, "return_dict_in_generate": True},
            "drafts do not go with output_attentions or output_hidden_states",
        ),
    ],
)
def test_what_drafts_cannot_serve_is_one_line(options, words):
    model = llama().eval()
    with pytest.raises(ts.TachyscopeError, match=words):
        generate(
            model, torch.ones(1, 4, dtype=torch.int64), 4, custom_generate=ts.drafts(4), **options
        )


FOLDER = str(Path(__file__).parents[1] / "examples/drafts")


def test_a_folder_in_a_hubs_layout_drafts_when_its_code_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    model = llama().eval()
    ids = torch.randint(6, VOCABULARY, (1, 12))
    seen, drafts = [], ts.drafts
    monkeypatch.setattr(ts, "drafts", lambda *args: seen.append(drafts(*args)) or seen[-1])
    plain, _ = generate(model, ids, do_sample=True)
    drafted, _ = generate(
        model, ids, do_sample=True, custom_generate=FOLDER, trust_remote_code=True,
        tokens_per_frame=16, places=8,
    )  # fmt: skip
    assert torch.equal(drafted, plain)
    assert seen[0].tokens == 48 and seen[0].places == 8
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        generate(model, ids, custom_generate=FOLDER, trust_remote_code=False)


def test_a_frame_has_tokens():
    for wrong, words in ((0, "0"), (10**9, "1000000000"), ("16", "'16'"), (16.5, "16.5")):
        with pytest.raises(ts.TachyscopeError, match=f"whole number from 1 to .*, got {words}:"):
            ts.drafts(wrong)
    with pytest.raises(ts.TachyscopeError, match="places"):
        ts.drafts(16, places=-1)
