"""Attention policies over transformers' own caches: its tokens where open, less read where not."""

import copy

import pytest
import torch
import transformers

import tachyscope as ts

TOKENS, PROMPT, NEW = 16, 9, 90
COMMON = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
OPEN = "dense attention=ann:read=1,order=time,block=3"
LESS = "dense attention=ann:read=0.3,order=time,block=2"
KINDS = {"llama": "Llama", "qwen3": "Qwen3", "emu3": "Emu3Text", "chameleon": "Chameleon"}


def make(kind):
    config = getattr(transformers, f"{kind}Config")
    torch.manual_seed(0)
    if kind == "Chameleon":
        small = {"vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_embeddings": 8}}
        vocabulary = {"<image>": 47, "a": 1}
        return transformers.ChameleonForConditionalGeneration(
            config(**COMMON, **small, vocabulary_map=vocabulary)
        ).eval()
    more = {"head_dim": 16} if kind == "Qwen3" else {}
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(
        config(**COMMON, **more)
    ).eval()


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return make(KINDS[request.param])


@pytest.fixture(scope="module")
def llama():
    return make("Llama")


def prompts(batch=1):
    return torch.randint(3, 40, (batch, PROMPT), generator=torch.Generator().manual_seed(1))


def generate(model, ids, new=NEW, **options):
    out = model.generate(ids, max_new_tokens=new, disable_compile=True, **options)
    return out


def logits(model, ids, new=60, **options):
    return torch.stack(
        generate(
            model, ids, new, output_logits=True, return_dict_in_generate=True, **options
        ).logits
    )


def test_dense_is_the_models_own_to_the_bit_and_removed_leaves_it_as_it_was(model):
    ids = prompts(2)
    own = logits(model, ids)
    decoder = model.get_decoder()
    before = dict(vars(decoder)), dict(vars(decoder.config))
    with ts.accelerate(model, "dense") as handle:
        assert torch.equal(logits(model, ids), own)
        assert handle.stats()["density"] == 1
    assert (vars(decoder), vars(decoder.config)) == before
    assert torch.equal(logits(model, ids), own)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_policy_that_is_wide_open_reads_what_the_model_reads(model, cache, padded):
    """A static cache hands over its empty slots too, which no query may choose."""
    ids, options = prompts(2), {"cache_implementation": cache}
    if padded:
        ids[1, :4] = 0
        options["attention_mask"] = (ids > 0).long()
    own = logits(model, ids, **options)
    with ts.accelerate(model, OPEN, tokens_per_frame=TOKENS) as handle:
        torch.testing.assert_close(logits(model, ids, **options), own, rtol=1e-3, atol=1e-4)
        assert handle.reader.past == PROMPT + 3 * TOKENS


@pytest.mark.parametrize("plan", [LESS, "dense attention=window:tokens=24,sink=9"])
def test_less_is_read_alike_from_a_dynamic_and_a_static_cache(model, plan):
    ids, made = prompts(), []
    for cache in ("dynamic", "static"):
        with ts.accelerate(model, plan, tokens_per_frame=TOKENS) as handle:
            made.append(generate(model, ids, cache_implementation=cache))
            assert 0.2 < handle.stats()["density"] < 0.8
    assert torch.equal(*made)


def test_what_is_read_is_what_a_session_reads(llama):
    """The same policy behind `ts.token_adapter`, which keeps the entries itself."""
    ids = prompts()
    with ts.accelerate(llama, LESS, tokens_per_frame=TOKENS):
        ours = generate(llama, ids, 5 * TOKENS)[0, PROMPT:]
    adapter = ts.token_adapter(llama, (1, TOKENS), PROMPT)
    prompt = " ".join(map(str, ids[0].tolist()))
    with ts.open(adapter, LESS, prompt=prompt) as stream:
        theirs = torch.cat([stream.generate().latents.flatten() for _ in range(5)])
    assert torch.equal(ours, theirs)


def test_drafts_and_less_reading_go_together(llama):
    ids = prompts()
    with ts.accelerate(llama, LESS, tokens_per_frame=TOKENS):
        drafts = ts.drafts(TOKENS, places=4)
        assert torch.equal(generate(llama, ids, custom_generate=drafts), generate(llama, ids))


def test_two_videos_a_copied_cache_and_other_rows_do_not_meet(llama):
    ids, other = prompts(), prompts().flip(1)
    with torch.no_grad(), ts.accelerate(llama, LESS, tokens_per_frame=4):

        def run(ids, caches):
            outs = [[] for _ in caches]
            for token in ids.split(1, 1):
                for out, cache in zip(outs, caches, strict=True):
                    out.append(llama(token, past_key_values=cache).logits)
            return [torch.cat(out, 1) for out in outs]

        def started(ids):
            cache = transformers.DynamicCache(config=llama.config)
            llama(ids, past_key_values=cache)
            return cache

        more = torch.arange(3, 43)[None]
        (wanted,) = run(more, [started(ids)])
        mixed = run(more, [started(ids), started(other)])
        assert torch.equal(mixed[0], wanted)
        first = started(ids)
        run(more[:, :20], [first])
        (copied,) = run(more[:, 20:], [copy.deepcopy(first)])
        (again,) = run(more[:, 20:], [first])
        assert torch.equal(copied, again) and torch.equal(copied, wanted[:, 20:])
        pair = started(torch.cat([ids, other]))
        run(more.repeat(2, 1), [pair])
        pair.reorder_cache(torch.tensor([1, 1]))
        reader = pair.tachyscope_plan
        run(more[:, :1].repeat(2, 1), [pair])
        assert reader.prompt == PROMPT + 41, "what is there is read as a prompt"


def test_beams_are_those_of_the_model(llama):
    ids = prompts()
    own = generate(llama, ids, 30, num_beams=2)
    with ts.accelerate(llama, LESS, tokens_per_frame=4):
        assert torch.equal(generate(llama, ids, 30, num_beams=2), own)


LLAMA4 = {
    "head_dim": 16, "attention_chunk_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1,
    "intermediate_size_mlp": 96,
}  # fmt: skip


def other(kind, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON | more)
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    "make, plan, options, words",
    [
        (lambda: other("Mistral", sliding_window=24), OPEN, {}, "attention with sliding_window"),
        (lambda: other("Llama4Text", **LLAMA4), OPEN, {}, "layers of a sliding window"),
        (
            lambda: other("Qwen3Next", num_hidden_layers=4, num_experts=2, num_experts_per_tok=1),
            OPEN,
            {},
            "layers without a cache of keys and values",
        ),
        (lambda: other("Gemma2", head_dim=16), OPEN, {}, "Gemma2.* has .*plain causal attention"),
        (lambda: make("Llama"), "fast", {}, "passes=draft.* drafts are generate.custom_generate"),
        (lambda: make("Llama"), "dense cache=window:budget=9f", {}, "use ts.token_adapter"),
        (lambda: make("Llama"), "dense store=int8", {}, "store=int8.* use ts.token_adapter"),
        (lambda: make("Llama"), "dense replay=every_k", {}, "replay=.* use ts.token_adapter"),
        (lambda: make("Llama"), "dense attention=ann:read=0.5", {}, "add order=time"),
        (lambda: make("Llama"), OPEN, {"tokens_per_frame": 0}, "must be a whole number"),
        (lambda: make("Llama"), OPEN, {"chunk": 3}, "it takes check, tokens_per_frame"),
        (lambda: make("Llama"), OPEN, {"tokens_per_frame": None}, "needs to know a video frame's"),
    ],
)
def test_what_is_not_served_is_one_line(make, plan, options, words):
    options = {"tokens_per_frame": 4} | options
    if options["tokens_per_frame"] is None:
        del options["tokens_per_frame"]
    with pytest.raises(ts.TachyscopeError, match=words):
        ts.accelerate(make(), plan, **options)


def test_masks_with_gaps_and_gradients_are_refused(llama):
    ids = prompts()
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    with ts.accelerate(llama, LESS, tokens_per_frame=4):
        with pytest.raises(ts.TachyscopeError, match="accelerated already: remove"):
            ts.accelerate(llama, "dense")
        with pytest.raises(ts.TachyscopeError, match="padding on the left alone"):
            llama(ids, attention_mask=mask)
        out = llama(ids)
        with pytest.raises(ts.TachyscopeError, match="no gradients: call the model under"):
            llama(ids[:, :1], past_key_values=out.past_key_values)
