"""The token model: its trunk, depth transformer, codes and containers, each against an oracle."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from faults import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.plan import Plan
from tachyscope.core.session import Session
from tachyscope.models import checkpoint
from tachyscope.models.checkpoint import read_tensors, write_tensors
from tachyscope.models.token_model import Sampler, draw_noise
from tachyscope.models.toys import toy_tokens
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.depth import DepthConfig, DepthTransformer
from tachyscope.models.vila_u.model import VilaModel, load_vila, save_vila
from tachyscope.models.vila_u.tokenizers import BytesTokenizer, ChatTokenizer
from tachyscope.models.vila_u.transformer import Vila
from tachyscope.models.vila_u.vqgan import Codebooks, PixelConfig, RqVae


class WholeSession:
    """Everything at once under a causal mask, with nothing kept: what a cache must equal."""

    def __init__(self, rope, pos, origin=0):
        self.rope, self.pos, self.origin = rope, pos, torch.tensor(float(origin))

    def attend(self, layer, q, k, v):
        q, k = (self.rope.rotate(x, self.pos[None, None], self.origin) for x in (q, k))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
        return scores.softmax(-1) @ v

    def mlp(self, layer, x, fn):
        return fn(x)


def made(config, seed=0):
    """A random model of this config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Vila(config).eval()
    return VilaModel(model, config, BytesTokenizer(config.vocab))


def session_for(adapter, prompt, seed=0, plan="stock"):
    shape = adapter.shape()
    return Session(
        shape,
        Plan.parse(plan, adapter.kind, adapter.stock),
        adapter.rope(shape),
        lengths=prompt.lengths,
        seed=seed,
        device=adapter.device,
        dtype=adapter.dtype,
    )


def play(adapter, frames=3, seed=0, actions=(1, 4, 2), prompt="a red room"):
    """Codes of a few frames, and the session that made them."""
    encoded = adapter.encode_prompt(prompt)
    session = session_for(adapter, encoded, seed)
    adapter.prefill_prompt(session, encoded)
    made = []
    for i in range(frames):
        made.append(adapter.sample(session, actions[i : i + 1]))
        session.commit()
    return made, session


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy")
    save_vila(toy_tokens(), path)
    return path


@pytest.fixture(scope="module")
def toy(folder):
    return load_vila(folder)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_trunk_equals_the_llama_that_transformers_reads_from_the_same_folder(tmp_path, scale):
    transformers = pytest.importorskip("transformers")
    config = replace(toy_tokens().config, rope_scale=scale, theta=5000.0)
    save_vila(made(config), tmp_path)
    adapter = load_vila(tmp_path)
    oracle = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llm", dtype=torch.float32)
    shape = adapter.shape()
    x = torch.randn(2, 3 * shape.tokens_per_frame, shape.width)
    session = WholeSession(adapter.rope(shape), shape.positions(0, 3))
    with torch.no_grad():
        ours = adapter.transformer.trunk(session, x)
        theirs = oracle.model(inputs_embeds=x).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_weight_that_makes_a_code():
    adapter = made(toy_tokens().config)
    model, shape = adapter.transformer, adapter.shape()
    codes = torch.randint(32, (1, shape.tokens_per_frame, 4))
    session = WholeSession(adapter.rope(shape), shape.positions(0, 1))
    hidden = model.trunk(session, model.embed(codes, torch.randint(7, codes.shape[:2])))
    model.head(hidden, model.vae.quantizer.sums(codes)).logsumexp(-1).sum().backward()
    pixels = model.vae.encode(torch.randn(1, 3, 32, 32))
    model.vae.decode(pixels).sum().backward()
    still = {name for name, p in model.named_parameters() if p.grad is None}
    assert still == {"llm.model.embed_tokens.weight", "llm.lm_head.weight"}


def test_an_mlp_opens_to_its_weights_and_counts_its_work(toy):
    mlp, x = toy.transformer.trunk.layers[0].mlp, torch.randn(5, 64)
    opened = (F.silu(x @ mlp.gate.T) * (x @ mlp.up.T)) @ mlp.down.T
    torch.testing.assert_close(mlp(x), opened)
    assert mlp.macs == sum(w.numel() for w in (mlp.gate, mlp.up, mlp.down))


def depth_logits(state, heads, hidden, sums):
    """Logits [D, K] of one place, all positions at once, in float64, by the definition."""
    state = {name: x.double() for name, x in state.items()}

    def linear(name, x):
        return x @ state[name + ".weight"].T + state[name + ".bias"]

    def norm(name, x):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * state[name + ".weight"] + state[name + ".bias"]

    places = [linear("in_mlp_2", hidden.double())]
    places += [linear("in_mlp_1", x.double()) for x in sums[:-1]]
    x = torch.stack(places) + state["pos_emb_d"][0]
    layers = 1 + max(int(n.split(".")[2]) for n in state if n.startswith("head_transformer"))
    for i in range(layers):
        block = f"head_transformer.blocks.{i}"
        y = norm(f"{block}.ln1", x)
        q, k, v = (linear(f"{block}.attn.{n}", y) for n in ("query", "key", "value"))
        size = q.shape[-1] // heads
        out = torch.zeros_like(q)
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            for row in range(len(x)):
                weight = (k[: row + 1, part] @ q[row, part] / math.sqrt(size)).softmax(0)
                out[row, part] = weight @ v[: row + 1, part]
        x = x + linear(f"{block}.attn.proj", out)
        y = linear(f"{block}.mlp.0", norm(f"{block}.ln2", x))
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
        x = x + linear(f"{block}.mlp.2", y)
    return linear("classifier_mlp.linear", norm("classifier_mlp.layer_norm", x))


class Seen(Sampler):
    """A sampler that shows the logits it was given."""

    rows: list[torch.Tensor] = []

    def guide(self, logits):
        self.rows.append(logits)
        return super().guide(logits)


@pytest.fixture
def head():
    torch.manual_seed(3)
    made = DepthTransformer(DepthConfig(24, 2, 3), depth=4, codes=11, dim=6, hidden=10)
    return made.double().requires_grad_(False)


def test_codes_made_with_the_cache_equal_the_whole_statement_position_by_position(head):
    books, hidden = Codebooks(4, 11, 6, shared=False).double(), torch.randn(6, 10).double()
    sampler, noise = Seen(top_k=7), torch.empty(3, 4, 11).exponential_()
    sampler.rows.clear()
    with torch.no_grad():
        codes = head.generate(hidden, books, sampler, noise)
        sums = books.sums(codes)
    assert codes.shape == (3, 4)
    for row in range(6):
        whole = depth_logits(head.state_dict(), 3, hidden[row], sums[row % 3])
        stepped = torch.stack([logits[row] for logits in sampler.rows])
        torch.testing.assert_close(stepped, whole)


def test_logits_of_given_codes_equal_the_whole_statement(head):
    hidden, sums = torch.randn(2, 3, 10).double(), torch.randn(2, 3, 4, 6).double()
    logits = head(hidden, sums)
    assert logits.shape == (2, 3, 4, 11)
    for b in range(2):
        for s in range(3):
            whole = depth_logits(head.state_dict(), 3, hidden[b, s], sums[b, s])
            torch.testing.assert_close(logits[b, s], whole)


def test_a_place_costs_four_token_passes_of_the_depth_transformer(head):
    rows = []
    count = head.head_transformer.blocks[0].mlp.register_forward_hook(
        lambda module, inputs, out: rows.append(inputs[0].shape[:-1].numel())
    )
    books, noise = Codebooks(4, 11, 6, shared=True).double(), torch.ones(1, 4, 11)
    with torch.no_grad():
        head.generate(torch.randn(2, 10).double(), books, Sampler(), noise)
    count.remove()
    assert rows == [2, 2, 2, 2]


@pytest.mark.slow
def test_drawing_a_place_never_looks_at_the_data(toy):
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        hidden, noise = torch.randn(2, 64), torch.ones(1, 4, 32)
        books, sampler = toy.transformer.vae.quantizer, toy.config.sampler
        codes = toy.transformer.head.generate(hidden, books, sampler, noise)
        # a fake tensor has no data, so any look at it would have raised
        x = toy.transformer.embed(codes[:, None], 3)
    assert x.shape == (1, 1, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_drawing_a_place_never_waits_for_the_device(folder):
    adapter = load_vila(folder, "cuda", torch.bfloat16)
    model, device = adapter.transformer, adapter.device
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(2, 64, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        for mode in ("default", "error"):  # the first round loads libraries, which waits
            torch.cuda.set_sync_debug_mode(mode)
            try:
                noise = draw_noise(generator, (1, 4, 32), device)
                codes = model.head.generate(
                    hidden, model.vae.quantizer, adapter.config.sampler, noise
                )
                model.embed(codes[:, None], 3)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def kept(logits, sampler):
    """Brute force in float64: walk from the likeliest down until the mass before reaches top_p."""
    scaled = [x / sampler.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])[: sampler.top_k]
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total, before, chosen = sum(weights.values()), 0.0, {}
    for i in order:
        if before / total >= sampler.top_p:
            break
        chosen[i] = weights[i]
        before += weights[i]
    return [chosen.get(i, 0.0) / sum(chosen.values()) for i in range(len(scaled))]


@given(
    st.lists(st.floats(-8, 8), min_size=1, max_size=40, unique=True),
    st.integers(1, 50),
    st.floats(0.01, 0.99),
    st.floats(0.2, 3.0),
)
@settings(max_examples=60, deadline=None)
def test_what_may_be_drawn_equals_brute_force(logits, top_k, top_p, temperature):
    sampler = Sampler(top_k=top_k, top_p=top_p, temperature=temperature)
    x = torch.tensor(logits, dtype=torch.float64)
    expected = torch.tensor(kept(logits, sampler), dtype=torch.float64)
    torch.testing.assert_close(sampler.probabilities(x), expected)


@pytest.mark.parametrize(("top_p", "count"), [(0.24, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3)])
def test_a_code_is_dropped_once_the_mass_before_it_reaches_top_p(top_p, count):
    # four equal codes: the mass before each is 0, 1/4, 1/2 and 3/4, exactly
    chances = Sampler(top_p=top_p).probabilities(torch.zeros(4))
    assert (chances > 0).sum() == count
    assert chances.max() == 1 / count


def test_top_p_measures_the_mass_of_what_top_k_left():
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    # of all four the best holds 0.5; of the top two it holds 0.625
    assert Sampler(top_k=2, top_p=0.6).probabilities(logits).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert (Sampler(top_k=4, top_p=0.6).probabilities(logits) > 0).sum() == 2


def test_guidance_goes_from_the_row_without_the_prompt_past_the_row_with_it():
    with_prompt, without = torch.randn(2, 5), torch.randn(2, 5)
    guided = Sampler(cfg=3.0).guide(torch.cat([with_prompt, without]))
    torch.testing.assert_close(guided, without + 3.0 * (with_prompt - without))
    assert Sampler(cfg=3.0).guide(torch.randn(4, 5).bfloat16()).dtype == torch.float32
    alone = torch.randn(2, 5)
    assert Sampler(cfg=1.0).guide(alone) is alone


def test_draws_follow_the_probabilities():
    sampler, logits = Sampler(top_k=6, top_p=0.9), torch.randn(9)
    noise = draw_noise(torch.Generator().manual_seed(0), (40000, 9), torch.device("cpu"))
    picked = sampler.pick(logits.expand(40000, -1), noise)
    share = torch.bincount(picked, minlength=9) / 40000
    # four standard errors of a share of one half
    torch.testing.assert_close(share, sampler.probabilities(logits), atol=0.01, rtol=0)


def test_a_draw_takes_the_noise_by_code_and_not_by_rank():
    noise = torch.tensor([3.0, 0.5, 2.0])
    sampler = Sampler(top_p=1.0)
    for logits in ([0.1, 0.0, 0.05], [0.0, 0.05, 0.1]):
        weights = torch.tensor(logits).softmax(0) / noise
        assert sampler.pick(torch.tensor(logits), noise) == weights.argmax() == 1


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"top_p": 0.0}, {"temperature": 0.0}])
def test_sampling_that_cannot_draw_is_refused(wrong):
    with pytest.raises(TachyscopeError, match=f"a sampler.s {next(iter(wrong))} must be .*, got 0"):
        Sampler(**wrong)


@pytest.mark.parametrize("shared", [False, True])
def test_a_vector_is_the_sum_of_one_entry_of_every_codebook(shared):
    books = Codebooks(3, 7, 5, shared)
    codes = torch.randint(7, (2, 4, 3))
    sums = books.sums(codes)
    assert sums.shape == (2, 4, 3, 5)
    for b in range(2):
        for s in range(4):
            total = torch.zeros(5)
            for d in range(3):
                table = books.state_dict()[f"codebooks.{0 if shared else d}.weight"]
                total = total + table[codes[b, s, d]]
                torch.testing.assert_close(sums[b, s, d], total)
    torch.testing.assert_close(books.sum(codes), sums[:, :, -1])


def test_quantising_a_code_sum_gives_its_codes_back():
    books = Codebooks(4, 30, 8, shared=False)
    with torch.no_grad():
        for d, book in enumerate(books.codebooks):
            # each codebook is far finer than the one before, so the nearest entry is the right one
            book.weight.mul_(0.02**d)
    codes = torch.randint(30, (2, 3, 5, 4))
    assert torch.equal(books.double().quantise(books.sum(codes)), codes)


def test_no_vector_is_quantised_to_the_padding_row():
    books = Codebooks(2, 6, 4, shared=False)
    x = books.codebooks[0].weight[-1].detach()[None]
    assert books.quantise(x)[0, 0] < 6


class Written:
    """The convolutions written out in float64 over a state dict."""

    def __init__(self, state, config):
        self.state = {name: x.double() for name, x in state.items()}
        self.config = config

    def conv(self, name, x, **how):
        return F.conv2d(x, self.state[name + ".weight"], self.state[name + ".bias"], **how)

    def norm(self, name, x):
        groups = x.reshape(len(x), self.config.groups, -1)
        mean, var = groups.mean(-1, keepdim=True), groups.var(-1, unbiased=False, keepdim=True)
        x = ((groups - mean) / (var + 1e-6).sqrt()).reshape(x.shape)
        weight, bias = self.state[name + ".weight"], self.state[name + ".bias"]
        return x * weight[:, None, None] + bias[:, None, None]

    def active(self, name, x):
        x = self.norm(name, x)
        return x / (1 + (-x).exp())

    def block(self, name, x):
        y = self.conv(f"{name}.conv1", self.active(f"{name}.norm1", x), padding=1)
        y = self.conv(f"{name}.conv2", self.active(f"{name}.norm2", y), padding=1)
        if f"{name}.nin_shortcut.weight" in self.state:
            x = self.conv(f"{name}.nin_shortcut", x)
        return x + y

    def attn(self, name, x):
        y = self.norm(f"{name}.norm", x)
        q, k, v = (self.conv(f"{name}.{part}", y).flatten(2) for part in "qkv")
        weight = torch.einsum("fci,fcj->fij", q / math.sqrt(q.shape[1]), k).softmax(-1)
        o = torch.einsum("fij,fcj->fci", weight, v).reshape(x.shape)
        return x + self.conv(f"{name}.proj_out", o)

    def mid(self, name, x):
        x = self.attn(f"{name}.attn_1", self.block(f"{name}.block_1", x))
        return self.block(f"{name}.block_2", x)

    def level(self, name, x, blocks):
        attends = x.shape[-1] in self.config.attn_resolutions
        for j in range(blocks):
            x = self.block(f"{name}.block.{j}", x)
            if attends:
                x = self.attn(f"{name}.attn.{j}", x)
        return x

    def decode(self, sums):
        z = sums.double().permute(0, 3, 1, 2)
        if self.config.latent:
            z = F.interpolate(z, self.config.latent, mode="bilinear")
        x = self.conv("decoder.conv_in", self.conv("post_quant_conv", z), padding=1)
        x = self.mid("decoder.mid", x)
        for i in range(len(self.config.ch_mult) - 1, -1, -1):
            x = self.level(f"decoder.up.{i}", x, self.config.num_res_blocks + 1)
            if i > 0:
                x = x.repeat_interleave(2, -1).repeat_interleave(2, -2)
                x = self.conv(f"decoder.up.{i}.upsample.conv", x, padding=1)
        return self.conv("decoder.conv_out", self.active("decoder.norm_out", x), padding=1)

    def encode(self, pixels):
        x = self.conv("encoder.conv_in", pixels.double(), padding=1)
        for i in range(len(self.config.ch_mult)):
            x = self.level(f"encoder.down.{i}", x, self.config.num_res_blocks)
            if i < len(self.config.ch_mult) - 1:
                x = F.pad(x, (0, 1, 0, 1))
                x = self.conv(f"encoder.down.{i}.downsample.conv", x, stride=2)
        x = self.active("encoder.norm_out", self.mid("encoder.mid", x))
        return self.conv("encoder.conv_out", x, padding=1).permute(0, 2, 3, 1)


PIXELS = PixelConfig(
    ch=4, ch_mult=(1, 2, 3), num_res_blocks=2, attn_resolutions=(6,), z_channels=5, resolution=12,
    groups=2, encoder=True,
)  # fmt: skip


def test_the_decoder_equals_its_written_out_definition():
    vae, sums = RqVae(PIXELS, 2, 9, 7).double(), torch.randn(2, 3, 3, 7).double()
    pixels = vae.decode(sums)
    assert pixels.shape == (2, 3, 12, 12)
    torch.testing.assert_close(pixels, Written(vae.state_dict(), PIXELS).decode(sums))


def test_code_sums_are_resized_where_the_config_says_so():
    config = replace(PIXELS, latent=(2, 4), encoder=False, attn_resolutions=())
    vae, sums = RqVae(config, 2, 9, 7).double(), torch.randn(1, 3, 3, 7).double()
    # the resize is made in float32, as published
    torch.testing.assert_close(
        vae.decode(sums), Written(vae.state_dict(), config).decode(sums), rtol=1e-5, atol=1e-5
    )


def test_the_encoder_equals_its_written_out_definition():
    vae, pixels = RqVae(PIXELS, 2, 9, 7).double(), torch.randn(2, 3, 12, 12).double()
    vectors = vae.encode(pixels)
    assert vectors.shape == (2, 3, 3, 7)
    torch.testing.assert_close(vectors, Written(vae.state_dict(), PIXELS).encode(pixels))


def test_frames_become_codes_of_every_place(toy):
    frames = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    codes = toy.encode_frames(frames)
    assert codes.shape == (1, 3, 4, 4, 4)
    assert codes.dtype == torch.int64
    pixels = torch.from_numpy(frames).movedim(-1, 1) / 127.5 - 1
    vae = toy.transformer.vae
    assert torch.equal(codes[0], vae.quantizer.quantise(vae.encode(pixels)))


def test_a_model_without_an_encoder_says_so():
    config = toy_tokens().config
    plain = made(replace(config, pixels=replace(config.pixels, encoder=False)))
    with pytest.raises(TachyscopeError, match="has no encoder to make codes of pixels"):
        plain.encode_frames(np.zeros((1, 32, 32, 3), np.uint8))


def test_shape_and_rotation_are_the_configs(toy):
    shape, rope = toy.shape(), toy.rope(toy.shape())
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, 16)
    assert (shape.batch, shape.paired, shape.token_by_token) == (2, True, True)
    linears = [p for n, p in toy.transformer.trunk.layers.named_parameters() if "self_attn" in n]
    assert shape.macs == sum(p.numel() for p in linears)
    assert rope.axes == ((16, (16.0, 4.0, 1.0)),)
    assert not rope.interleaved
    assert toy.shape((32, 32)) == shape
    with pytest.raises(TachyscopeError, match="32x32 pixels only, got 64x32"):
        toy.shape((64, 32))


def test_a_prompt_is_bytes_between_its_marks_and_padded_on_the_left(toy):
    prompt = toy.encode_prompt("é!")
    assert prompt.lengths == (5, 2)
    assert prompt.ids.tolist() == [[256, 0xC3, 0xA9, 0x21, 259], [0, 0, 0, 256, 259]]


def test_without_guidance_a_video_is_one_row():
    config = toy_tokens().config
    adapter = made(replace(config, sampler=Sampler(cfg=1.0)))
    assert (adapter.shape().batch, adapter.shape().paired) == (1, False)
    assert adapter.encode_prompt("x").lengths == (3,)
    codes, _ = play(adapter, frames=1)
    assert codes[0].shape == (1, 1, 4, 4, 4)


@pytest.mark.parametrize("sink", [2, 4])
def test_a_video_under_a_token_window_hangs_on_no_other_prompt_of_its_batch(sink):
    """Prompts of 1 and 42 letters: each row has its own window, from its first token on."""
    toy = toy_tokens(dtype=torch.float64)
    config = replace(toy.config, sampler=Sampler(cfg=1.0))
    model = VilaModel(toy.transformer, config, toy.tokenizer)
    prompts, plan = ["a", "b" * 42], f"attention=window:tokens=12,sink={sink}"

    def codes(words, seeds):
        stream = ts.open(model, plan, prompt=words, seed=seeds)
        made = []
        for _ in range(3):
            stream.step()
            made.append(stream.session.memory.latents)
        return torch.cat(made, 1)

    together = codes(prompts, [3, 4])
    for i, prompt in enumerate(prompts):
        assert torch.equal(together[i : i + 1], codes(prompt, 3 + i))


def test_token_by_token_equals_each_row_run_whole_and_alone(toy):
    """Also: the shorter row's left pads change nothing, for alone it has none."""
    states = []
    hook = toy.transformer.trunk.register_forward_hook(
        lambda module, inputs, out: states.append(out)
    )
    codes, session = play(toy)
    hook.remove()
    prompt, shape = toy.encode_prompt("a red room"), toy.shape()
    assert prompt.lengths[0] > prompt.lengths[1]
    stepped = torch.cat(states, 1)
    flat = torch.cat(codes, 1).flatten(1, 3)
    actions = torch.tensor([1, 4, 2]).repeat_interleave(shape.tokens_per_frame)
    for row, length in enumerate(prompt.lengths):
        pos = torch.cat([session.memory.prompt_positions()[-length:], shape.positions(0, 3)])
        with torch.no_grad():
            ids = prompt.ids[row : row + 1, -length:]
            x = torch.cat(
                [toy.transformer.trunk.embed_tokens(ids), toy.transformer.embed(flat, actions)], 1
            )
            whole = toy.transformer.trunk(WholeSession(toy.rope(shape), pos, length), x)
        ours = stepped[row : row + 1, -whole.shape[1] :]
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-5)


def test_a_frame_given_in_one_pass_leaves_what_token_by_token_leaves(toy):
    codes, stepped = play(toy)
    prompt = toy.encode_prompt("a red room")
    given = session_for(toy, prompt)
    toy.prefill_prompt(given, prompt)
    for latents, action in zip(codes, (1, 4, 2), strict=True):
        toy.prefill_latents(given, latents, [action])
        given.commit()
    assert (given.memory.past, given.memory.latent_frame) == (
        stepped.memory.past,
        stepped.memory.latent_frame,
    )
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(
        given.memory.features.hidden, stepped.memory.features.hidden, **close
    )
    for a, b in zip(given.memory.layers, stepped.memory.layers, strict=True):
        for name in ("k", "v", "pos"):
            ours, theirs = (x.entries()[name][:, :, : given.memory.past] for x in (a, b))
            torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.slow
def test_a_frames_own_noise_picks_its_codes_again_from_its_scores(toy):
    codes, _ = play(toy, seed=5)
    prompt = toy.encode_prompt("a red room")
    session = session_for(toy, prompt, seed=5)
    toy.prefill_prompt(session, prompt)
    for latents, action in zip(codes, (1, 4, 2), strict=True):
        logits = toy.score(session, latents, [action])
        noise = draw_noise(session.generators[0], logits.transpose(2, 3).mT.shape, toy.device)
        session.commit()
        assert torch.equal(toy.config.sampler.pick(logits, noise), latents.flatten(1, 3))


@pytest.mark.slow
def test_the_same_seed_and_actions_make_the_same_video(toy):
    first, again = play(toy)[0], play(toy)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], play(toy, seed=1)[0][0])
    assert not torch.equal(first[0], play(toy, actions=(3, 4, 2))[0][0])


def test_a_pair_of_rows_is_decoded_once(toy):
    codes, session = play(toy, frames=1)
    seen = []
    hook = toy.transformer.vae.decoder.register_forward_hook(
        lambda module, inputs, out: seen.append(inputs[0].shape[0])
    )
    frames = toy.decode_latents(session, codes[0])
    hook.remove()
    assert seen == [1]
    assert frames.shape == (1, 32, 32, 3)
    assert frames.dtype == np.uint8
    assert toy.pixel_frames(5) == 5


def test_pixels_run_from_minus_one_to_one(toy):
    codes, session = play(toy, frames=1)
    pixels = toy.transformer.vae.decode(toy.transformer.vae.quantizer.sum(codes[0][0]))
    levels = ((pixels.detach() + 1) * 127.5).clamp(0, 255).round().movedim(1, -1).numpy()
    np.testing.assert_array_equal(toy.decode_latents(session, codes[0]), levels)


def test_the_model_is_bit_identical_after_a_session(toy):
    before = {name: x.clone() for name, x in toy.transformer.state_dict().items()}
    keys = [set(vars(module)) for module in toy.transformer.modules()]
    codes, session = play(toy)
    toy.decode_latents(session, codes[0])
    assert all(torch.equal(x, before[name]) for name, x in toy.transformer.state_dict().items())
    assert [set(vars(module)) for module in toy.transformer.modules()] == keys


@pytest.mark.parametrize("actions", [[], [7], [1, 1]])
def test_a_frame_needs_one_action_that_exists(toy, actions):
    prompt = toy.encode_prompt("x")
    session = session_for(toy, prompt)
    toy.prefill_prompt(session, prompt)
    with pytest.raises(TachyscopeError, match="takes one action a frame, from 0 to 6, got"):
        toy.sample(session, actions)


def test_an_action_may_be_a_number_of_the_device(toy):
    prompt = toy.encode_prompt("x")
    found = []
    for action in ([3], torch.tensor([3])):
        session = session_for(toy, prompt)
        toy.prefill_prompt(session, prompt)
        found.append((toy.sample(session, action), session.memory.layers[0].k.clone()))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_without_actions_refuses_them():
    adapter = made(replace(toy_tokens().config, actions=""))
    assert adapter.transformer.mm_projector.action_embedding is None
    assert play(adapter, frames=1, actions=())[0][0].shape == (1, 1, 4, 4, 4)
    with pytest.raises(TachyscopeError, match="takes no actions, got"):
        play(adapter, frames=1, actions=(2,))


def test_a_model_saved_and_loaded_is_the_same_to_the_bit(toy):
    made = toy_tokens()
    assert toy.config == made.config
    theirs = toy.transformer.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in made.transformer.state_dict().items())
    assert toy.dtype == torch.float32


def test_weights_beyond_the_memory_are_refused_before_they_take_it(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "memory_of", lambda device: 1000)
    refused(lambda: load_vila(folder), "its weights take 0.0 GB, more than the memory of cpu has")


def test_the_config_files_have_the_published_names(folder):
    root, llm, tower, projector = (
        json.loads((folder / part / "config.json").read_text())
        for part in ("", "llm", "vision_tower", "mm_projector")
    )
    assert root["model_type"] == "vila_u_llama"
    assert (root["llm_cfg"], root["vision_tower_cfg"]) == (llm, tower)
    assert root["mm_projector_cfg"] == projector
    assert tower["rqvaesiglip"]["code_shape"] == [4, 4, 4]
    assert tower["rqtransformer"]["head"] == {"n_layer": 2, "block": {"n_head": 4}}
    assert "model.layers.2.mlp.gate_proj.weight" in read_tensors(folder / "llm/model.safetensors")
    names = read_tensors(folder / "vision_tower/model.safetensors")
    assert {
        "rqvaesiglip.quantizer.codebooks.3.weight",
        "rqvaesiglip.decoder.up.1.upsample.conv.weight",
        "rqvaesiglip.decoder.mid.attn_1.proj_out.bias",
        "rqtransformer.head_transformer.blocks.1.attn.query.bias",
        "rqtransformer.classifier_mlp.layer_norm.weight",
    } <= names.keys()
    assert names["rqvaesiglip.quantizer.codebooks.0.weight"].shape == (33, 16)
    assert read_tensors(folder / "mm_projector/model.safetensors").keys() == {
        "layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias",
        "action_embedding.weight",
    }  # fmt: skip


def test_published_spellings_are_read_as_they_stand(folder, tmp_path):
    """Sizes by default, rotation as older and newer releases write it, no key of ours."""
    files = toy_tokens().config.files()
    for file in files.values():
        file.pop("tachyscope", None)
    llm = files["llm"]
    for key in ("head_dim", "num_key_value_heads", "rope_theta"):
        del llm[key]
    files["vision_tower"]["rqvaesiglip"]["ddconfig"] |= {"ch": 32, "double_z": False}
    for spelled in (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}},
    ):
        config = VilaConfig.parse(files | {"llm": llm | spelled})
        assert (config.rope_scale, config.theta) == (2.0, 10000.0)
        assert (config.kv_heads, config.head_dim) == (4, 16)
        assert (config.tokenizer, config.actions, config.sampler) == ("hf", "", Sampler())
        assert (config.pixels.groups, config.pixels.encoder) == (32, False)


def copied(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


def same_model(folder, toy):
    ours, theirs = load_vila(folder).transformer.state_dict(), toy.transformer.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_weights_in_shards_or_pickled_are_the_same_model(folder, toy, tmp_path):
    copy = copied(folder, tmp_path)
    tensors = read_tensors(copy / "llm/model.safetensors")
    (copy / "llm/model.safetensors").unlink()
    where = {}
    for i, part in enumerate((dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2]))):
        name = f"model-0000{i + 1}-of-00002.safetensors"
        write_tensors(copy / "llm" / name, part)
        where |= dict.fromkeys(part, name)
    index = copy / "llm/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    tower = copy / "vision_tower"
    write_tensors(tower / "pytorch_model.bin", read_tensors(tower / "model.safetensors"))
    (tower / "model.safetensors").unlink()
    assert same_model(copy, toy)


def test_a_model_folder_inside_the_folder_is_found(folder, toy, tmp_path):
    shutil.copytree(folder, tmp_path / "release/model")
    assert same_model(tmp_path / "release", toy)


def test_what_only_understanding_needs_is_passed_over(folder, toy, tmp_path):
    copy = copied(folder, tmp_path)
    for file, names in {
        "llm": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
        "vision_tower": [
            "rqvaesiglip.siglip_model.logit_scale",
            "rqvaesiglip.logit_bias",
            "rqvaesiglip.quantizer.codebooks.0.cluster_size_ema",
            "rqvaesiglip.quantizer.codebooks.3.embed_ema",
        ],
    }.items():
        path = copy / file / "model.safetensors"
        more = {name: torch.zeros(3) for name in names}
        write_tensors(path, read_tensors(path) | more)
    assert same_model(copy, toy)


@pytest.mark.slow
def test_one_stored_table_serves_a_shared_codebook(tmp_path):
    adapter = made(replace(toy_tokens().config, shared_codebook=True))
    save_vila(adapter, tmp_path)
    path = tmp_path / "vision_tower/model.safetensors"
    tensors = read_tensors(path)
    for d in range(1, 4):
        del tensors[f"rqvaesiglip.quantizer.codebooks.{d}.weight"]
    write_tensors(path, tensors)
    books = load_vila(tmp_path).transformer.vae.quantizer.codebooks
    assert all(book is books[0] for book in books)
    assert torch.equal(books[0].weight, adapter.transformer.vae.quantizer.codebooks[0].weight)


def test_tied_word_embeddings_need_no_head_in_the_file(folder, tmp_path):
    copy = copied(folder, tmp_path)
    path, config = copy / "llm/model.safetensors", copy / "llm/config.json"
    tensors = read_tensors(path)
    del tensors["lm_head.weight"]
    write_tensors(path, tensors)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    llm = load_vila(copy).transformer.llm
    assert torch.equal(llm.lm_head.weight, llm.model.embed_tokens.weight)


@pytest.mark.slow
def test_a_model_is_loaded_in_the_dtype_that_is_asked_for_or_written(folder, tmp_path):
    half = load_vila(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.transformer.parameters()} == {torch.bfloat16}
    codes, session = play(half, frames=2)
    assert half.decode_latents(session, codes[1]).shape == (1, 32, 32, 3)
    save_vila(half, tmp_path)
    assert load_vila(tmp_path).dtype == torch.bfloat16


def drop(name):
    def change(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def tensors_of(part, change):
    def apply(folder):
        path = folder / part / "model.safetensors"
        tensors = read_tensors(path)
        change(tensors)
        write_tensors(path, tensors)

    return apply


def config_of(part, **changes):
    def apply(folder):
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("vision_tower"), r"no file .*vision_tower/config.json"),
        (drop("config.json"), r"no file .*config.json"),
        (drop("mm_projector/model.safetensors"), r"mm_projector must hold one of model.safetensor"),
        (tensors_of("llm", lambda t: t.pop(GATE)), rf"lacks {GATE}"),
        (tensors_of("llm", lambda t: t.update({GATE: torch.zeros(3)})), rf"{GATE} is .*\[3\]"),
        (tensors_of("vision_tower", lambda t: t.update(odd=torch.zeros(1))), "it also has odd"),
        (config_of("", model_type="llava"), "model_type must be 'vila_u_llama' or 'vila_u', got"),
        (config_of("", model_dtype="float8"), "model_dtype must be one of torch.float32, torch.float64, torch.float16, torch.bfloat16, got 'float8'"),
        (config_of("", tachyscope={"colour": 1}), "unknown 'tachyscope.colour'; it takes sampler, fps, actions, clip"),
        (config_of("llm", hidden_size=None), "llm/config.json: hidden_size must be a whole number from 1 to 65,536, got null"),
        (config_of("llm", num_hidden_layers=0), "num_hidden_layers must be from 1 to 256, got 0"),
        (config_of("llm", hidden_size=48), "input_embed_dim_2 must be 48, got 64"),
        (config_of("llm", attention_bias=True), "attention_bias must be false, got true"),
        (
            config_of("llm", rope_scaling={"type": "yarn", "factor": 2.0}),
            "rope_scaling.type must be 'linear' or 'default', got 'yarn'",
        ),
        (config_of("llm", tachyscope={"tokenizer": "runes"}), "hf, bytes, words, got 'runes'"),
        (config_of("llm", tachyscope={}), "must have a tokenizer, it has none of tokenizer.json"),
        (config_of("mm_projector", mm_projector_type="linear"), "'mlp2x_gelu', got 'linear'"),
        (config_of("", tachyscope={"actions": "ww"}), "letters that differ, got 'ww'"),
        (config_of("llm", num_key_value_heads=3), r"a multiple of kv_heads, got \(4, 3\)"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_one_line(folder, tmp_path, change, words):
    copy = copied(folder, tmp_path)
    change(copy)
    with pytest.raises(TachyscopeError, match=words) as caught:
        load_vila(copy)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(TachyscopeError, match=r"no file .*absent/config.json"):
        load_vila(tmp_path / "absent")


def test_a_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(TachyscopeError, match="261 ids or more, got 260"):
        BytesTokenizer(260)


@pytest.fixture
def chat_folder(folder, tmp_path):
    """The toy, with a tokenizer of whole words that transformers can read."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    copy = copied(folder, tmp_path)
    words = ["<unk>", "<s>", "USER", "ASSISTANT", ":", "red", "room", "<vi_start>"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", unk_token="<unk>",
        additional_special_tokens=["<vi_start>"],
    )  # fmt: skip
    fast.save_pretrained(copy / "llm")
    config_of("llm", tachyscope={"tokenizer": "hf"})(copy)
    return copy


def test_a_prompt_is_put_in_the_chat_that_the_model_was_trained_with():
    asked = []

    class Inner:
        input_ids = [1, 7]

        def __call__(self, text):
            asked.append(text)
            return self

    for prompt in (" red room ", " "):
        assert ChatTokenizer(Inner()).ids(prompt) == [1, 7]
    assert asked == [
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. "
        f"USER:{said}ASSISTANT: <vi_start>"
        for said in (" red room ", "")
    ]


def test_the_checkpoints_own_tokenizer_is_used(chat_folder):
    adapter = load_vila(chat_folder)
    prompt = adapter.encode_prompt("red room")
    ids = adapter.tokenizer.ids("red room")
    assert (ids[0], ids[-1]) == (1, 7)
    assert prompt.ids[0].tolist() == ids
    assert prompt.lengths == (len(ids), len(ids) - 2)


def test_a_tokenizer_is_saved_with_its_model(chat_folder, tmp_path):
    adapter = load_vila(chat_folder)
    save_vila(adapter, tmp_path / "again")
    again = load_vila(tmp_path / "again")
    assert torch.equal(again.encode_prompt("red room").ids, adapter.encode_prompt("red room").ids)


def test_a_tokenizer_without_transformers_says_what_to_install(chat_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TachyscopeError, match=r"pip install -e '\.\[hf\]'"):
        load_vila(chat_folder)


def test_a_tokenizer_that_cannot_start_a_video_is_refused(chat_folder):
    path = chat_folder / "llm/tokenizer.json"
    path.write_text(path.read_text().replace("<vi_start>", "<image>"))
    path = chat_folder / "llm/tokenizer_config.json"
    path.write_text(path.read_text().replace("<vi_start>", "<image>"))
    with pytest.raises(TachyscopeError, match="must know <vi_start>, it does not"):
        load_vila(chat_folder)
