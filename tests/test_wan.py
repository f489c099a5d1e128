"""The Wan-type model equals diffusers', its sampler its scheduler, its cached run its whole one."""

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from faults import refused
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from toys import WholeSession

from tachyscope.core.plan import NAMES, Plan
from tachyscope.core.rollout import rollout
from tachyscope.core.session import Session
from tachyscope.models.checkpoint import read_tensors, strip_prefixes, write_tensors
from tachyscope.models.toys import toy_chunks
from tachyscope.models.wan import sampler
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.context import RULES
from tachyscope.models.wan.loading import WEIGHTS, load_wan, save_wan
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.parts import Controls
from tachyscope.models.wan.plain_parts import BytesText, Preview
from tachyscope.models.wan.random import random_wan
from tachyscope.models.wan.sampler import clean_from, noised, schedule
from tachyscope.models.wan.transformer import WanCausal

# heads of 128, so that a file's shapes tell its configuration
SMALL = WanConfig(
    dim=256, ffn_dim=320, layers=2, heads=2, text_dim=48, size=(4, 6), stride=(1, 8, 8)
)


class ExactTimes(nn.Module):
    """The time sinusoid in float64."""

    def forward(self, t):
        angle = t.double()[:, None] * 10000 ** (-torch.arange(128, dtype=torch.float64) / 128)
        return torch.cat([angle.cos(), angle.sin()], -1).float()


def oracle(tensors, config, dtype=torch.float32):
    """diffusers' model with these weights, which it is given under the names of the original."""
    from diffusers import WanTransformer3DModel
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    model = WanTransformer3DModel(
        num_attention_heads=config.heads, attention_head_dim=config.head_dim,
        in_channels=config.in_channels, out_channels=config.in_channels, text_dim=config.text_dim,
        ffn_dim=config.ffn_dim, num_layers=config.layers,
    )  # fmt: skip
    model.load_state_dict(convert_wan_transformer_to_diffusers(dict(tensors)), strict=True)
    kept = model._keep_in_fp32_modules
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)
    return model


@pytest.fixture(scope="module")
def small():
    return random_wan(SMALL, seed=1)


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(2, 16, 3, 4, 6, generator=generator)
    context = torch.randn(2, 20, 48, generator=generator)
    return latents, context


@pytest.fixture(scope="module", params=["folder", "generator_ema.pt"])
def stored(request, small, tmp_path_factory):
    path = tmp_path_factory.mktemp("wan") / request.param
    save_wan(small, path)
    return path


# at t = 1000 diffusers' float32 sinusoid is itself off by 1e-4
@pytest.mark.parametrize("exact, tolerance", [(False, 2e-4), (True, 1e-5)])
@pytest.mark.parametrize("times", [(1000.0,), (0.0,), (1000.0, 625.0, 0.0)])
@torch.no_grad()
def test_predictions_equal_diffusers(stored, inputs, times, exact, tolerance):
    latents, context = inputs
    adapter = load_wan(stored, config=None if stored.is_dir() else SMALL)
    file = stored / WEIGHTS if stored.is_dir() else stored
    theirs = oracle(strip_prefixes(read_tensors(file)), SMALL)
    if exact:
        theirs.condition_embedder.timesteps_proj = ExactTimes()
    t = torch.tensor(times).expand(2, -1)
    # one time a video, or one a token
    spread = t[:, 0] if len(times) == 1 else t.repeat_interleave(6, 1)
    expected = theirs(latents, spread, context, return_dict=False)[0]
    ours = adapter.transformer(WholeSession(adapter, 3, context), latents, t.expand(2, 3))
    assert expected.std() > 0.5
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)


@torch.no_grad()
def test_half_precision_errs_no_more_than_diffusers(small, inputs):
    latents, context = inputs
    t = torch.tensor([[1000.0, 625.0, 0.0]]).expand(2, 3)
    exact = small.transformer(WholeSession(small, 3, context), latents, t)
    half = random_wan(SMALL, seed=1, dtype=torch.bfloat16)
    ours = half.transformer(WholeSession(half, 3, context), latents, t)
    assert ours.dtype == latents.dtype
    assert half.transformer.blocks[0].modulation.dtype == torch.float32
    theirs = oracle(small.transformer.state_dict(), SMALL, torch.bfloat16)
    spread = t.repeat_interleave(6, 1)
    theirs = theirs(latents.bfloat16(), spread, context.bfloat16(), return_dict=False)[0].float()
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


@pytest.mark.parametrize(
    "config, tensors, parameters",
    [
        (WanConfig(), 825, 1_418_996_800),
        (WanConfig(dim=5120, ffn_dim=13824, layers=40, heads=40), 1095, 14_288_491_584),
    ],
)
def test_a_published_size_has_its_published_tensors(config, tensors, parameters):
    with torch.device("meta"):
        held = WanCausal(config).state_dict()
    assert len(held) == tensors
    assert sum(tensor.numel() for tensor in held.values()) == parameters
    assert held["blocks.0.modulation"].shape == (1, 6, config.dim)
    assert held["head.head.weight"].shape == (64, config.dim)


@torch.no_grad()
def test_the_sampler_is_the_stochastic_flow_scheduler(inputs):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0, stochastic_sampling=True)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    plan = schedule(WanConfig())
    assert [t for t, _ in plan] == pytest.approx(scheduler.timesteps.tolist(), rel=1e-7)
    generator, same = (torch.Generator().manual_seed(3) for _ in range(2))
    x = theirs = clean = inputs[0]
    for i, (_, sigma) in enumerate(plan):
        if i:
            x = noised(clean, torch.randn(x.shape, generator=generator), sigma)
            torch.testing.assert_close(x, theirs, rtol=0, atol=1e-6)
        said = torch.tanh(x) + 0.1
        clean = clean_from(WanConfig(), x, said, sigma)
        theirs = scheduler.step(
            said, scheduler.timesteps[i], theirs, generator=same, return_dict=False
        )[0]
    torch.testing.assert_close(clean, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "steps, shift, warp, times, levels",
    [
        ((1000, 750, 500, 250), 5, True, (1000, 937.5, 833.3333, 625), None),
        ((1000, 800, 600, 400, 200), 5, True, (1000, 952.381, 882.353, 769.231, 555.556), None),
        ((1000, 666, 333), 5, True, (1000, 908.8427, 713.9794), None),
        ((1000, 757, 522), 8, False, (1000, 757, 522), (1, 0.75676, 0.52174)),
    ],
)
def test_published_schedules_come_out(steps, shift, warp, times, levels):
    found = schedule(WanConfig(steps=steps, shift=float(shift), warp=warp))
    assert [t for t, _ in found] == pytest.approx(times, abs=5e-4)
    assert [s for _, s in found] == pytest.approx(levels or [t / 1000 for t in times], abs=5e-6)


def test_a_model_may_say_the_clean_latents_themselves(inputs):
    config = WanConfig(prediction="x0")
    assert clean_from(config, inputs[0], 2 * inputs[0], 0.5).equal(2 * inputs[0])


def session_for(adapter, plan="dense", seed=0, frames=None):
    shape = adapter.shape()
    plan = Plan.parse(plan, adapter.kind, adapter.stock)
    return Session(
        shape, plan, adapter.rope(shape), latent_frames=frames, seed=seed, dtype=adapter.dtype
    )


@torch.no_grad()
def test_chunk_by_chunk_equals_all_at_once():
    """Each pass over a chunk, with clean past in the cache = its part of one masked pass."""
    adapter = toy_chunks()
    prompt = adapter.encode_prompt("a quiet hall")
    session = session_for(adapter, frames=9)
    adapter.prefill_prompt(session, prompt)
    actions = [[1, 1, 2], [0, 3, 3], [4, 5, 6]]
    generator = torch.Generator().manual_seed(4)
    clean = torch.randn(1, 16, 9, 8, 12, generator=generator)
    noise = torch.randn(1, 16, 9, 8, 12, generator=generator)
    for i in range(3):
        now = slice(3 * i, 3 * i + 3)
        flat = torch.tensor(sum(actions[: i + 1], []))
        whole = WholeSession(adapter, 3 * i + 3, prompt.context, chunk=3)
        before = clean[:, :, : 3 * i]
        for step, (t, sigma) in enumerate([*schedule(adapter.config), (0.0, 0.0)]):
            x = noised(clean[:, :, now], noise[:, :, now], sigma)
            session.begin(
                session.shape.positions(session.memory.latent_frame, 3),
                step=step,
                steps=5,
                noise=(sigma,) * 3,
            )
            times = torch.full((1, 3), t)
            part = adapter.transformer(session, x, times, flat[now])
            padded = torch.cat([torch.zeros(1, 3 * i), times], 1)
            full = adapter.transformer(whole, torch.cat([before, x], 2), padded, flat)
            torch.testing.assert_close(part, full[:, :, now], rtol=0, atol=1e-5)
        session.commit()


@torch.no_grad()
def test_a_sampled_chunk_is_what_the_scheduler_makes_of_the_model():
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0, stochastic_sampling=True)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    adapter = toy_chunks()
    prompt = adapter.encode_prompt("a")
    session = session_for(adapter, seed=5)
    adapter.prefill_prompt(session, prompt)
    whole, actions = WholeSession(adapter, 3, prompt.context), torch.tensor([1, 2, 3])
    same = torch.Generator().manual_seed(5)
    x = torch.randn(1, 16, 3, 8, 12, generator=same)
    for t in scheduler.timesteps:
        said = adapter.transformer(whole, x, t.expand(1, 3), actions)
        x = scheduler.step(said, t, x, generator=same, return_dict=False)[0]
    # rounding grows over four passes of a random model
    torch.testing.assert_close(adapter.sample(session, [1, 2, 3]), x, rtol=0, atol=1e-4)


def test_a_clean_pass_leaves_what_sampling_left():
    adapter = toy_chunks()
    made, given = session_for(adapter), session_for(adapter)
    for session in (made, given):
        adapter.prefill_prompt(session, adapter.encode_prompt("a"))
    latents = adapter.sample(made, [1, 2, 3])
    adapter.prefill_latents(given, latents, [1, 2, 3])
    for a, b in zip(made.memory.layers, given.memory.layers, strict=True):
        for x, y in zip(a.entries().values(), b.entries().values(), strict=True):
            assert x.equal(y)


def whole_clean_pass(model, session, x, controls):
    """The clean pass as any other: up to a prediction that nobody uses."""
    sampler.begin_pass(model, session, x, len(model.levels), [0.0])
    model.transformer(session, x, torch.zeros(len(x), x.shape[2]), *controls)


@pytest.mark.parametrize(
    "plan",
    [
        "dense",
        "fast",
        "cache=window:budget=6f,positions=reindexed",
        *(pytest.param(x, marks=pytest.mark.slow) for x in NAMES if x not in ("dense", "fast")),
    ],
)
def test_a_clean_pass_stops_where_nothing_more_is_remembered(plan, monkeypatch):
    adapter = toy_chunks()
    films = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(sampler, "clean_pass", whole_clean_pass)
        films.append(list(rollout(adapter, plan, frames=24, prompt="a", actions="w*9 d*9")))
    for ours, theirs in zip(*films, strict=True):
        assert np.array_equal(ours.frames, theirs.frames)
        assert ours.stats["macs"] < theirs.stats["macs"]
        assert ours.stats["entries"] == theirs.stats["entries"]
        if plan == "dense":
            assert ours.stats["pairs"] == ours.stats["pairs_dense"]
            assert ours.stats["pairs"] == theirs.stats["pairs"] * 14 / 15


@torch.no_grad()
def test_the_work_of_a_clean_pass_is_counted_as_it_is():
    adapter, entered = toy_chunks(), []
    x, t = torch.randn(1, 16, 3, 8, 12), torch.zeros(1, 3)
    flops = []
    for call in (
        lambda: adapter.transformer(Nothing(), x, t),
        lambda: adapter.transformer.prefill(Nothing(), lambda *given: entered.append(given), x, t),
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        flops.append(counter.get_total_flops())
    ((layer, q, k, v),) = entered
    assert layer == 2 and q.shape == k.shape == v.shape == (1, 4, 72, 24)
    counts = []
    for whole in (True, False):
        session = session_for(adapter)
        adapter.prefill_prompt(session, adapter.encode_prompt("a"))
        session.meter.take()
        (whole_clean_pass if whole else sampler.clean_pass)(adapter, session, x, Controls())
        row = session.meter.take()
        # attention, the prompt's and the MLPs are the session's, not the transformer's
        counts.append(row["macs"] - 2 * 24 * (row["pairs"] + row["text_pairs"]))
        counts[-1] -= row["rows_computed"] * adapter.transformer.blocks[0].ffn.macs
    assert flops[0] - flops[1] == 2 * (counts[0] - counts[1]) > 0


@torch.no_grad()
def test_three_linears_as_one_give_the_same(small, inputs, tmp_path):
    latents, context = inputs
    t = torch.tensor([[1000.0, 625.0, 0.0]]).expand(2, 3)
    fused = random_wan(SMALL, seed=1)
    fused.transformer.fuse()
    attention = fused.transformer.blocks[0].self_attn
    assert attention.fused[0].data_ptr() == attention.q.weight.data_ptr()  # no second copy
    ours, theirs = (m.transformer(WholeSession(m, 3, context), latents, t) for m in (fused, small))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    x = torch.randn(2, 18, 256)
    for a, b in zip(
        attention.query_key_value(x),
        small.transformer.blocks[0].self_attn.query_key_value(x),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    save_wan(fused, tmp_path / "a.safetensors")
    again = read_tensors(tmp_path / "a.safetensors")
    assert again.keys() == small.transformer.state_dict().keys()
    assert all(again[name].equal(x) for name, x in small.transformer.state_dict().items())
    fused.transformer.to(torch.float64)
    assert attention.fused is None


def test_gradients_reach_weights_that_are_fused(small, inputs):
    model = random_wan(SMALL, seed=1).transformer.fuse()
    x = torch.randn(1, 5, 256)
    sum(part.sum() for part in model.blocks[0].self_attn.query_key_value(x)).backward()
    assert all(getattr(model.blocks[0].self_attn, name).weight.grad is not None for name in "kv")


def film(adapter, chunks, seed=0, prompt="a red ball"):
    session = session_for(adapter, adapter.stock, seed)
    adapter.prefill_prompt(session, adapter.encode_prompt(prompt))
    for _ in range(chunks):
        latents = adapter.sample(session, [1] * adapter.config.chunk)
        session.commit()
        yield adapter.decode_latents(session, latents)


def test_a_session_leaves_the_model_as_it_was():
    adapter = toy_chunks()
    before = {name: tensor.clone() for name, tensor in adapter.transformer.state_dict().items()}
    held = [dict(vars(module)) for module in adapter.transformer.modules()]
    first = np.concatenate(list(film(adapter, 2)))
    assert np.array_equal(first, np.concatenate(list(film(adapter, 2))))
    for name, tensor in adapter.transformer.state_dict().items():
        assert tensor.equal(before[name])
    assert [dict(vars(module)) for module in adapter.transformer.modules()] == held


def test_the_toy_moves_and_depends_on_seed_and_prompt():
    adapter = toy_chunks()
    video = np.concatenate(list(film(adapter, 8)))
    assert video.shape == (24, 64, 96, 3) and video.dtype == np.uint8
    assert adapter.pixel_frames(24) == 24
    for frame, following in zip(video, video[1:], strict=False):
        assert frame.std() > 10 and np.abs(frame.astype(int) - following).mean() > 5
    # colours stay inside the range, from the first chunk to the last
    assert np.mean((video == 0) | (video == 255)) < 0.1
    others = [film(adapter, 1, seed=1), film(adapter, 1, prompt="b"), film(toy_chunks(1), 1)]
    for other in others:
        assert not np.array_equal(next(other), video[:3])


def test_what_the_toy_sees_of_its_past_matters():
    """Else no cache policy could be found out."""
    adapter = toy_chunks()
    session, short = session_for(adapter), session_for(adapter, "cache=window:budget=3f,sink=0")
    drawn = []
    for one in (session, short):
        adapter.prefill_prompt(one, adapter.encode_prompt("a"))
        for _ in range(3):
            latents = adapter.sample(one, [0, 0, 0])
            one.commit()
        drawn.append(latents)
    assert (drawn[0] - drawn[1]).abs().mean() > 0.05


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-4), (torch.bfloat16, 0.5)])
def test_dtypes_make_the_same_video(dtype, atol):
    """Up to rounding, which bfloat16's few digits let grow: here latents have a spread of two."""
    drawn = []
    for adapter in (toy_chunks(), toy_chunks(dtype=dtype)):
        session = session_for(adapter)
        adapter.prefill_prompt(session, adapter.encode_prompt("a"))
        drawn.append(adapter.sample(session, [1, 2, 3]))
    assert drawn[1].dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(drawn[1].float(), drawn[0], rtol=0, atol=atol)


@pytest.mark.parametrize(
    "plan",
    [
        "dense",
        "cache=merge:budget=9f replay=attentive:share=0.5",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("cache=window:budget=9f,sink=3,positions=reindexed",)
        ),
        "cache=merge:budget=9f,match=unrotated attention=window:tokens=40,sink=8",
    ],
)
@torch.inference_mode()
def test_a_constant_shift_of_positions_changes_nothing(plan):
    """Also far beyond the 1,024 latent frames of the published code.

    Only ann is left out: its hash is of rotated keys, so other entries then share a block.
    """
    adapter = toy_chunks(dtype=torch.float64)
    found = []
    for first in (0, 30000):
        session = session_for(adapter, plan)
        adapter.prefill_prompt(session, adapter.encode_prompt("a"))
        session.memory.latent_frame = first
        for _ in range(5):
            latents = adapter.sample(session, [1, 2, 3])
            session.commit()
        assert session.memory.latent_frame == first + 15
        found.append(latents)
    # an angle of 30,000 radians is itself off by 4e-12
    for latents in found[1:]:
        torch.testing.assert_close(latents, found[0], rtol=0, atol=1e-7)


def test_every_pass_is_told_its_place_and_noise(monkeypatch):
    adapter, told = toy_chunks(), []
    begin = Session.begin

    def record(self, pos, step, steps, noise, past=True, **more):
        told.append((pos[0, 0].item(), len(pos), step, steps, noise))
        begin(self, pos, step, steps, noise, past, **more)

    monkeypatch.setattr(Session, "begin", record)
    list(film(adapter, 2))
    levels = [1.0, 0.9375, 0.8333333333333334, 0.625, 0.0]
    expected = [
        (float(first), 72, i, 5, (level,) * 3) for first in (0, 3) for i, level in enumerate(levels)
    ]
    assert [x[:4] for x in told] == [x[:4] for x in expected]
    assert [x[4] for x in told] == [pytest.approx(x[4]) for x in expected]


@torch.no_grad()
def test_an_action_reaches_its_latent_frame_and_none_before():
    adapter = toy_chunks()
    whole = WholeSession(adapter, 4, torch.zeros(1, 64, 24), chunk=1)
    x, t = torch.randn(1, 16, 4, 8, 12), torch.full((1, 4), 500.0)
    stay = adapter.transformer(whole, x, t, torch.tensor([0, 0, 0, 0]))
    turn = adapter.transformer(whole, x, t, torch.tensor([[0, 0, 3, 0]]))
    torch.testing.assert_close(turn[:, :, :2], stay[:, :, :2])
    assert (turn - stay)[:, :, 2:].abs().mean() > 0.05


@torch.no_grad()
def test_a_model_that_gains_actions_starts_as_it_was(small, inputs):
    latents, context = inputs
    more = WanModel("more", WanCausal(dataclasses.replace(SMALL, actions=".w")))
    more.transformer.load_state_dict(
        small.transformer.state_dict()
        | {"action_embedding.weight": more.transformer.state_dict()["action_embedding.weight"]}
    )
    t = torch.full((2, 3), 625.0)
    with_action = more.transformer(
        WholeSession(more, 3, context), latents, t, torch.tensor([0, 1, 1])
    )
    assert with_action.equal(small.transformer(WholeSession(small, 3, context), latents, t))


@pytest.mark.parametrize("mixed", [False, True])
def test_every_parameter_learns(mixed):
    adapter = toy_chunks()
    x, t = torch.randn(2, 16, 2, 8, 12), torch.tensor([[900.0, 300.0], [0.0, 20.0]])
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        session = WholeSession(adapter, 2, torch.randn(2, 5, 24), chunk=1)
        said = adapter.transformer(session, x, t, torch.tensor([[0, 1], [2, 3]]))
    assert said.dtype == torch.float32
    said.square().mean().backward()
    for name, parameter in adapter.transformer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.slow
def test_a_training_step_is_one_graph():
    adapter = toy_chunks()
    x, t, context = torch.randn(1, 16, 3, 8, 12), torch.full((1, 3), 625.0), torch.randn(1, 8, 24)
    actions = torch.tensor([0, 1, 2])

    def step(context, x, t, actions):
        session = WholeSession(adapter, 3, context, chunk=1)
        return adapter.transformer(session, x, t, actions).square().mean()

    whole = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(context, x, t, actions), step(context, x, t, actions))


class Nothing:
    """A session that computes nothing."""

    def attend(self, layer, q, k, v):
        return q + k + v

    def cross(self, layer, q):
        return q

    def mlp(self, layer, x, fn):
        return x


@torch.no_grad()
def test_counted_work_is_the_work():
    adapter = toy_chunks()
    counts = []
    for rows in (8, 16):
        with FlopCounterMode(display=False) as counter:
            adapter.transformer(Nothing(), torch.randn(1, 16, 3, rows, 12), torch.zeros(1, 3))
        counts.append(counter.get_total_flops())
    # the difference leaves out what each frame's time costs
    assert counts[1] - counts[0] == 2 * 72 * adapter.shape().macs
    mlp = adapter.transformer.blocks[0].ffn
    assert mlp.macs == mlp.up.weight.numel() + mlp.down.weight.numel()


def test_shape_and_rotation_are_the_published_ones():
    with torch.device("meta"):
        adapter = WanModel("wan", WanCausal(WanConfig()))
    shape = adapter.shape()
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (30, 12, 12, 128)
    assert (shape.grid, shape.tokens_per_frame, shape.chunk, shape.passes) == ((30, 52), 1560, 3, 5)
    assert (shape.width, shape.text, shape.token_by_token) == (1536, 512, False)
    assert [channels for channels, _ in adapter.rope(shape).axes] == [44, 42, 42]
    assert adapter.shape((720, 1280)).tokens_per_frame == 3600


@pytest.mark.parametrize("size", [(64, 100), (60, 96), (0, 96), (-16, 96)])
def test_a_size_that_leaves_half_a_patch_is_refused(size):
    refused(
        lambda: toy_chunks().shape(size),
        f"toy-chunks makes frames of a height that 16 divides and a width that 16 divides, "
        f"got {size[0]}x{size[1]}: round it",
    )


def test_a_prompt_is_zero_after_its_end():
    adapter = toy_chunks()
    prompt = adapter.encode_prompt("é!")
    assert prompt.context.shape == (1, 64, 24)
    assert (prompt.tokens, prompt.lengths) == ((4,), ())
    assert prompt.context[0, :4].abs().amin() > 0 and not prompt.context[0, 4:].any()
    assert adapter.encode_prompt("").tokens == (1,)
    adapter.encode_prompt("x" * 63)
    refused(lambda: adapter.encode_prompt("x" * 64), "at most 63 bytes, got 64: shorten it")


@pytest.mark.parametrize("actions", [[1, 1], [1, 1, 7], [-1, 0, 0], []])
def test_actions_that_do_not_fit_are_refused(actions):
    adapter = toy_chunks()
    refused(
        lambda: adapter.sample(session_for(adapter), actions),
        f"one action a latent frame, here 3 from 0 to 6, got {actions}",
    )


def test_a_model_without_actions_takes_none(small):
    session = session_for(small)
    small.prefill_prompt(session, small.encode_prompt("a"))
    assert small.sample(session, [0, 0, 0]).isfinite().all()
    assert small.sample(session, []).isfinite().all()
    refused(lambda: small.sample(session, [0, 1, 0]), "takes no actions, got [0, 1, 0]")


def test_parts_that_are_missing_are_named(small):
    bare = WanModel("bare", small.transformer)
    refused(
        lambda: bare.encode_prompt(""),
        "bare was loaded without a text encoder",
        "put models_t5_umt5-xxl-enc-bf16.pth and google/umt5-xxl beside its weights, or give a",
    )
    refused(
        lambda: bare.pixel_frames(3),
        "bare was loaded without a decoder",
        "put Wan2.1_VAE.pth beside",
    )


def test_weights_beyond_the_memory_are_told_in_one_line(small, tmp_path):
    # more than any machine has
    huge = dataclasses.replace(SMALL, dim=2**16, heads=2**9, ffn_dim=2**20, layers=64)
    save_wan(small, tmp_path / "x.pt")
    words = "GB, more than the memory of cpu has left: free some, or load it in bfloat16"
    refused(lambda: random_wan(huge, name="huge"), "huge: its weights take", words)
    # a configuration that the file does not bear out takes none
    refused(lambda: load_wan(tmp_path / "x.pt", config=huge), "x.pt must hold the model's")


def test_a_prompts_keys_and_values_are_computed_once(monkeypatch):
    adapter, calls, whole = toy_chunks(), [], WanCausal.keys_values
    monkeypatch.setattr(WanCausal, "keys_values", lambda self, x: calls.append(1) or whole(self, x))
    for block in adapter.transformer.blocks:
        for part in (block.cross_attn.k, block.cross_attn.v):
            part.register_forward_hook(lambda *_: calls.append(0))
    assert len(list(rollout(adapter, "fast", frames=9, prompt="a"))) == 3
    assert (calls.count(1), calls.count(0)) == (1, 2 * len(adapter.transformer.blocks))


def test_a_folder_comes_back_whole(tmp_path):
    adapter = toy_chunks()
    save_wan(adapter, tmp_path / "toy")
    assert sorted(os.listdir(tmp_path / "toy")) == [
        "config.json", "decoder.safetensors", WEIGHTS, "text_encoder.safetensors"
    ]  # fmt: skip
    again = load_wan(tmp_path / "toy")
    assert again.config == dataclasses.replace(
        adapter.config, text_encoder="bytes", decoder="preview"
    )
    assert (again.name, again.fps, again.actions, again.stock) == (
        "toy", adapter.fps, adapter.actions, adapter.stock
    )  # fmt: skip
    for a, b in zip(film(adapter, 2), film(again, 2), strict=True):
        assert np.array_equal(a, b)


def test_a_single_file_tells_its_shape(small, tmp_path):
    save_wan(small, tmp_path / "a.pt")
    save_wan(small, tmp_path / "a.safetensors")
    assert read_tensors(tmp_path / "a.safetensors").keys() == small.transformer.state_dict().keys()
    for name in ("a.pt", "a.safetensors"):
        adapter = load_wan(tmp_path / name)
        inferred = dataclasses.replace(SMALL, size=(60, 104), stride=(4, 8, 8))
        assert adapter.config == inferred and adapter.text is None
        given = load_wan(tmp_path / name, config=SMALL, dtype=torch.bfloat16)
        assert given.config == SMALL and given.dtype == torch.bfloat16


def test_a_sharded_folder_is_read(small, tmp_path):
    save_wan(small, tmp_path)
    tensors = small.transformer.state_dict()
    (tmp_path / WEIGHTS).unlink()
    halves = list(tensors)[::2], list(tensors)[1::2]
    places = {}
    for i, names in enumerate(halves):
        write_tensors(tmp_path / f"part-{i}.safetensors", {name: tensors[name] for name in names})
        places |= dict.fromkeys(names, f"part-{i}.safetensors")
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))
    again = load_wan(tmp_path).transformer.state_dict()
    assert all(again[name].equal(tensor) for name, tensor in tensors.items())


def test_a_file_whose_shapes_do_not_tell_enough_is_refused(small, tmp_path):
    toy = toy_chunks()
    save_wan(toy, tmp_path / "toy.pt")
    refused(lambda: load_wan(tmp_path / "toy.pt"), "has 96 channels", "give its configuration")
    assert load_wan(tmp_path / "toy.pt", config=toy.config).config == toy.config
    write_tensors(tmp_path / "b.pt", {"transformer.x": torch.ones(1)})
    refused(lambda: load_wan(tmp_path / "b.pt"), "under its original names, got transformer.x")


def test_a_checkpoint_of_another_size_is_refused(small, tmp_path):
    save_wan(small, tmp_path / "a.pt")
    for change, words in [
        ({"ffn_dim": 300}, "blocks.0.ffn.0.weight is float32 [320, 256] and must be float32 [300"),
        ({"layers": 1}, "it also has blocks.1.modulation, "),
        ({"layers": 3}, "it lacks blocks.2.modulation, "),
        ({"actions": ".w"}, "it lacks action_embedding.weight"),
    ]:
        config = dataclasses.replace(SMALL, **change)
        refused(lambda config=config: load_wan(tmp_path / "a.pt", config=config), words)


def test_a_part_that_is_wrong_or_missing_is_named(tmp_path):
    save_wan(toy_chunks(), tmp_path)
    write_tensors(tmp_path / Preview.file, {"preview.weight": torch.ones(3, 4)})
    refused(lambda: load_wan(tmp_path), Preview.file, "preview.weight is float32 [3, 4]")
    write_tensors(tmp_path / BytesText.file, {"table": torch.ones(3, 4)})
    refused(lambda: load_wan(tmp_path), BytesText.file, "it lacks embedding.weight")
    config = json.loads((tmp_path / "config.json").read_text())
    config["tachyscope"]["text_encoder"] = "magic"
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(lambda: load_wan(tmp_path), "names a part 'magic'; there are bytes")
    (tmp_path / "config.json").unlink()
    refused(lambda: load_wan(tmp_path), "no file", "config.json")
    refused(lambda: load_wan(tmp_path / "none"), "no model at", "give a folder with config.json")


def test_wans_own_config_is_read():
    theirs = {
        "_class_name": "WanModel", "_diffusers_version": "0.30.0", "dim": 1536, "eps": 1e-06,
        "ffn_dim": 8960, "freq_dim": 256, "in_dim": 16, "model_type": "t2v", "num_heads": 12,
        "num_layers": 30, "out_dim": 16, "text_len": 512,
    }  # fmt: skip
    assert WanConfig.from_json(theirs) == WanConfig()


def test_a_config_comes_back_from_json():
    config = dataclasses.replace(SMALL, actions=".w", steps=(1000, 500), prediction="x0", fps=12)
    assert WanConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_attention_heads": 2}, "config.json has an unknown 'num_attention_heads'; it takes"),
        ({"model_type": "i2v"}, "config.json: model_type must be 't2v', got 'i2v'"),
        ({"out_dim": 8}, "out_dim must equal in_dim (16), got 8"),
        ({"dim": "many"}, "dim must be a whole number from 1 to 65,536, got 'many'"),
        ({"dim": 100, "num_heads": 3}, "dim / heads must be even and at least 6, got 100 / 3"),
        ({"eps": True}, "eps must be a number from 1e-30 to 0.1, got true"),
        ({"num_layers": 0}, "config.json: num_layers must be from 1 to 256, got 0"),
        ({"patch_size": [2, 2, 2]}, "patch must take latent frames one by one, got (2, 2, 2)"),
        (
            {"patch_size": [1, 2]},
            "patch_size must be 3 whole numbers, each from 1 to 64, got [1, 2]",
        ),
        (
            {"tachyscope": {"speed": 1}},
            "has an unknown 'tachyscope.speed'; it takes chunk, actions",
        ),
        ({"tachyscope": 3}, "config.json: tachyscope must be an object, got 3"),
        ({"tachyscope": {"steps": [500, 1000]}}, "steps must fall, from 1000 at most to 0"),
        ({"tachyscope": {"steps": []}}, "steps must fall"),
        (
            {"tachyscope": {"prediction": "noise"}},
            "prediction must be one of flow, x0, got 'noise'",
        ),
        ({"tachyscope": {"actions": "ww"}}, "actions must differ, got 'ww'"),
        ({"tachyscope": {"warp": 1}}, "tachyscope.warp must be true or false, got 1"),
        ({"tachyscope": {"alone": True}}, "an unknown 'tachyscope.alone'; it takes chunk, actions"),
        (
            {"tachyscope": {"context": {"rule": "rolling"}, "first_steps": [1000, 500]}},
            "context rolling leaves no room for first_steps and actions, got first_steps=(1000, ",
        ),
        (
            {"tachyscope": {"context": {"rule": "rolling"}, "actions": ".w"}},
            "context rolling leaves no room for first_steps and actions, got first_steps=()",
        ),
        (
            {"tachyscope": {"context": {"rule": "restart", "frames": 3}}},
            "context restart frames must be over its chunk of 3 and at most 1,000,000, got 3",
        ),
        (
            {"tachyscope": {"context": {"rule": "reencode"}}},
            "context must be {'rule': NAME} with one of absolute, restart, alone, rolling, recache",
        ),
        (
            {"tachyscope": {"context": {"rule": "alone", "reencode": 1}}},
            "tachyscope.context.reencode must be true or false, got 1",
        ),
        ({"tachyscope": {"context": "alone"}}, "context must be {'rule': NAME} with one of"),
        (
            {"tachyscope": {"context": {"rule": "recache"}, "stock": "cache=keep_all"}},
            "context recache needs a stock plan with cache=window:budget=12f,sink=3 first, and no "
            "actions, got stock='cache=keep_all'",
        ),
    ],
)
def test_a_fault_in_a_config_is_named(change, words):
    refused(lambda: WanConfig.from_json(SMALL.to_json() | change), words)


def test_flags_of_the_first_release_that_are_off_say_nothing():
    old = SMALL.to_json()
    del old["tachyscope"]["context"]
    old["tachyscope"] |= {"rolling": False, "alone": False, "restart": 0, "together": False}
    assert WanConfig.from_json(old) == SMALL


@pytest.mark.parametrize("rule", RULES.values())
def test_a_context_rule_comes_back_from_json(rule):
    stock = "cache=window:budget=12f,sink=3 attention=dense text=dense replay=none"
    config = dataclasses.replace(SMALL, context=rule(), stock=stock)
    assert WanConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
