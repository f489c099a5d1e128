"""Repositories of Self-Forcing's shape, by classes with their signatures: their own video, dense."""

import pytest
import torch
from hosts import LAYERS, TOKENS, inputs
from hosts_family import FAMILY, make

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.integrations.self_forcing import check_parity

DENSE = 1e-5


def error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def forget(pipe):
    for name in ("kv_cache1", "kv_cache_clean"):
        if hasattr(pipe, name):
            setattr(pipe, name, None)


@pytest.fixture(params=FAMILY)
def pipe(request):
    return make(request.param)


def test_a_dense_plan_makes_the_hosts_own_video_and_removed_leaves_it(pipe):
    noise, context = inputs()
    theirs = pipe.inference(noise, context)
    with ts.accelerate(pipe, "dense"):
        ours = pipe.inference(noise, context)
        assert error(ours, theirs) < DENSE
        assert torch.equal(pipe.inference(noise, context), ours), "a second video"
        stores = getattr(pipe, "kv_cache1", None) or pipe.kv_cache_clean
        assert all(store["k"].numel() == 0 for store in stores), "no cache beside ours"
        assert stores[0]["tachyscope"].session is not None
    assert torch.equal(pipe.inference(noise, context), theirs)


def test_a_batch_makes_the_hosts_own_video(pipe):
    noise, context = inputs(batch=2, seed=3)
    theirs = pipe.inference(noise, context)
    with ts.accelerate(pipe, "lossless"):
        assert error(pipe.inference(noise, context), theirs) < DENSE


@pytest.mark.parametrize("plan", ["fast", "live", "cache=window:budget=18f,sink=0 text=pads"])
def test_every_plan_runs(pipe, plan):
    with ts.accelerate(pipe, plan) as handle:
        assert pipe.inference(*inputs(frames=24)).isfinite().all()
        assert 0 < handle.stats()["density"] <= 1


# Krea's and Rolling-Forcing's loops take neither
LOOPS = [name for name in FAMILY if name not in ("krea", "rolling-forcing")]


@pytest.mark.parametrize("name", LOOPS)
def test_a_new_prompt_and_given_frames_equal_the_hosts(name):
    pipe = make(name)
    (noise, context), (given, other) = inputs(), inputs(frames=6, seed=5)
    for options in ({"switch": (6, other)}, {"given": given}):
        forget(pipe)
        theirs = pipe.inference(noise, context, **options)
        with ts.accelerate(pipe, "lossless", chunk=12 if name == "longlive" else None):
            assert error(pipe.inference(noise, context, **options), theirs) < DENSE


@pytest.mark.parametrize("name", FAMILY)
def test_two_videos_by_one_model_do_not_meet(name):
    pipe, context = make(name), inputs()[1]
    model, chunks = pipe.generator.model, inputs()[0].split(3, 1)

    def step(x, frame, stores):
        cross = [{"is_init": False} for _ in range(LAYERS)]
        with torch.no_grad():
            return model(
                x.transpose(1, 2), torch.zeros(1), context, 0, kv_cache=stores,
                crossattn_cache=cross, current_start=frame * TOKENS,
            )  # fmt: skip

    with ts.accelerate(model, "dense"):
        alone, a, b = ([{} for _ in range(LAYERS)] for _ in range(3))
        step(chunks[0], 0, alone)
        wanted = step(chunks[1], 3, alone)
        step(chunks[0], 0, a)
        step(chunks[2], 0, b)
        assert torch.equal(step(chunks[1], 3, a), wanted)


def test_infinite_forcings_window_is_ours():
    pipe, (noise, context) = make("infinite-forcing"), inputs(frames=18)
    for block in pipe.generator.model.blocks:
        block.self_attn.window = 6
    theirs = pipe.inference(noise, context)
    for block in pipe.generator.model.blocks:
        block.self_attn.window = 64  # the check at the door is of what is whole
    with ts.accelerate(pipe, "cache=window:budget=6f,sink=1,positions=reindexed text=pads"):
        assert error(pipe.inference(noise, context), theirs) < DENSE


def test_rolling_forcings_view_is_ours():
    pipe, (noise, context) = make("rolling-forcing"), inputs(frames=24)
    for block in pipe.generator.model.blocks:
        block.self_attn.view = 15
    theirs = pipe.inference(noise, context)
    window = "cache=window:budget=24f,sink=3,positions=reindexed,view=15f text=pads"
    with ts.accelerate(pipe, window):
        assert error(pipe.inference(noise, context), theirs) < DENSE


def test_fused_projections_are_served():
    pipe, (noise, context) = make("krea"), inputs()
    for block in pipe.generator.model.blocks:
        block.self_attn.fuse_projections()
    theirs = pipe.inference(noise, context)
    with ts.accelerate(pipe, "dense"):
        assert error(pipe.inference(noise, context), theirs) < DENSE


def test_a_model_that_counts_frames_as_of_480p_passes_the_check():
    model = make("krea").generator.model
    model.blocks[0].self_attn.per_frame = 1560
    from hosts import turns

    model.freqs = turns(8)
    check_parity(model, 3)
    model.blocks[0].self_attn.per_frame = 1000
    with pytest.raises(TachyscopeError, match="not of Self-Forcing's shape"):
        check_parity(model, 3)


def test_cross_attention_that_differs_is_refused():
    """A model with an image beside its prompt has the same names, and keys that no plan reads."""
    model = make("self-forcing").generator.model
    part = model.blocks[0].cross_attn
    inner = part.forward

    def with_image(x, context, context_lens, crossattn_cache=None):
        text = inner(x, context[:, 257:], context_lens, crossattn_cache=crossattn_cache)
        return text + inner(x, context[:, :257], context_lens, crossattn_cache={"is_init": False})

    part.forward = with_image
    with pytest.raises(
        TachyscopeError, match="the plan's cross-attention differs .* not of Self-F"
    ):
        ts.accelerate(model, "dense")
    part.forward = lambda x, context, context_lens: inner(x, context, context_lens)
    with pytest.raises(TachyscopeError, match="the plan's cross-attention differs .* by inf"):
        ts.accelerate(model, "dense")


@pytest.mark.slow
def test_a_compiled_model_is_served_and_left_as_it_was():
    pipe, (noise, context) = make("self-forcing"), inputs()
    theirs = pipe.inference(noise, context)
    model = pipe.generator.model
    pipe.generator.model = torch.compile(model, backend="eager")
    with ts.accelerate(pipe, "dense"):
        pipe.kv_cache1 = None
        assert error(pipe.inference(noise, context), theirs) < DENSE
        with pytest.raises(TachyscopeError, match="accelerated already"):
            ts.accelerate(model, "dense")
    pipe.generator.model = model
    assert torch.equal(pipe.inference(noise, context), theirs)


def test_a_window_computed_anew_that_a_plan_no_longer_has_is_refused():
    pipe, (noise, context) = make("longlive"), inputs(frames=18)
    pipe.recache = lambda run, past: run(past[:, 3:], 0, 3)
    window = "cache=window:budget=10f,sink=0 text=pads"
    with (
        ts.accelerate(pipe, window, chunk=9),
        pytest.raises(TachyscopeError, match="no longer has all"),
    ):
        pipe.inference(noise, context, switch=(12, -context))


def test_a_pass_over_more_frames_than_a_chunk_is_refused():
    pipe, (noise, context) = make("longlive"), inputs()
    with (
        ts.accelerate(pipe, "dense"),
        pytest.raises(TachyscopeError, match="where a chunk has 3: give"),
    ):
        pipe.num_frame_per_block = 12
        pipe.inference(noise, context)
