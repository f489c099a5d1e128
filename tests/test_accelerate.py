"""A plan in somebody else's code: equal where dense, removed without a trace, refused in words."""

import sys
from functools import wraps

import pytest
import torch
from hosts import DIM, GRID, HEADS, TOKENS, inputs, make_pipeline

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.integrations import accelerate

DENSE = 1e-5


def error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module")
def pipe():
    return make_pipeline()


@pytest.mark.parametrize("plan", ["dense", "lossless"])
def test_a_dense_plan_makes_the_hosts_own_video(pipe, plan):
    noise, context = inputs()
    theirs = pipe.inference(noise, context)
    with ts.accelerate(pipe, plan):
        assert error(pipe.inference(noise, context), theirs) < DENSE


def test_a_removed_plan_leaves_the_model_as_it_was(pipe):
    noise, context = inputs()
    theirs = pipe.inference(noise, context)
    before = {name: dict(vars(part)) for name, part in pipe.generator.model.named_modules()}
    ts.accelerate(pipe, "fast").remove()
    assert {name: vars(m).keys() for name, m in pipe.generator.model.named_modules()} == {
        name: held.keys() for name, held in before.items()
    }
    assert torch.equal(pipe.inference(noise, context), theirs)


def test_a_handle_that_is_removed_twice_leaves_the_next_one_at_work(pipe):
    first = ts.accelerate(pipe, "dense")
    first.remove()
    with ts.accelerate(pipe, "dense") as second:
        pipe.inference(*inputs())
        first.remove()
        assert pipe.kv_cache1 is not None and second.stats()["density"] == 1
        assert pipe.kv_cache1[0]["tachyscope"] is second.cache


def test_a_package_that_is_too_old_is_named_with_the_one_that_serves(monkeypatch):
    import diffusers
    import transformers

    tiny = transformers.LlamaConfig(
        hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=9
    )
    lm = transformers.LlamaForCausalLM(tiny)
    monkeypatch.setattr(sys.modules["diffusers"], "__version__", "0.40.0")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.9.1")
    with pytest.raises(TachyscopeError, match="diffusers 0.40.0 is .* pip install -U 'diffusers>="):
        ts.accelerate(diffusers.AutoencoderKL(), "dense")
    for use in (
        lambda: ts.accelerate(lm, "dense"),
        lambda: lm.generate(
            torch.ones(1, 3).long(), max_new_tokens=2, custom_generate=ts.drafts(4)
        ),
    ):
        with pytest.raises(
            TachyscopeError, match="transformers 5.9.1 .* transformers 5.17 or newer"
        ):
            use()
    with pytest.raises(TachyscopeError, match="does not know torch.nn"):
        ts.accelerate(torch.nn.Linear(2, 2))
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.100.0.dev0")
    ts.accelerate(lm, "dense").remove()


def test_the_oldest_packages_are_those_that_are_installed_at_least():
    from pathlib import Path

    from tachyscope.integrations.versions import OLDEST

    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for package, oldest in OLDEST.items():
        assert f'"{package}>={".".join(map(str, oldest))}"' in project


def test_a_second_video_and_another_batch_are_new_videos(pipe):
    two = inputs(batch=2, seed=3)
    pipe.kv_cache1 = None
    theirs = pipe.inference(*two)
    with ts.accelerate(pipe, "dense"):
        first = pipe.inference(*inputs())
        assert torch.equal(pipe.inference(*inputs()), first)
        pipe.kv_cache1 = None  # another batch: their own cache would have to be made anew too
        assert error(pipe.inference(*two), theirs) < DENSE


def test_a_new_prompt_and_given_frames_equal_the_hosts(pipe):
    (noise, context), (given, other) = inputs(), inputs(frames=6, seed=5)
    for options in ({"switch": (6, other)}, {"given": given}, {"given": given[:, :3]}):
        pipe.kv_cache1 = None
        theirs = pipe.inference(noise, context, **options)
        with ts.accelerate(pipe, "lossless"):
            assert error(pipe.inference(noise, context, **options), theirs) < DENSE


def test_the_hosts_window_equals_ours(pipe):
    noise, context = inputs(frames=18)
    parts = [block.self_attn for block in pipe.generator.model.blocks]
    for part in parts:
        part.local_attn_size = 9
    theirs = pipe.inference(noise, context)
    for part in parts:
        del part.local_attn_size
    with ts.accelerate(pipe, "cache=window:budget=9f,sink=0 text=pads"):
        assert error(pipe.inference(noise, context), theirs) < DENSE


def test_two_videos_by_one_model_do_not_meet(pipe):
    model, (noise, context) = pipe.generator.model, inputs()
    chunks = noise.split(3, 1)

    def step(x, frame, stores):
        where = dict(kv_cache=stores, current_start=frame * TOKENS)
        cross = [{"is_init": False} for _ in model.blocks]
        with torch.no_grad():
            x = x.transpose(1, 2)
            return model(x, torch.zeros(1), context, 0, crossattn_cache=cross, **where)

    with ts.accelerate(model, "dense"):
        alone, a, b = ([{} for _ in model.blocks] for _ in range(3))
        step(chunks[0], 0, alone)
        wanted = step(chunks[1], 3, alone)
        step(chunks[0], 0, a)
        step(chunks[2], 0, b)
        assert torch.equal(step(chunks[1], 3, a), wanted)


def test_the_models_own_cache_is_not_allocated_beside_ours(pipe):
    with ts.accelerate(pipe, "live"):
        pipe.inference(*inputs())
        assert all(store["k"].numel() == 0 for store in pipe.kv_cache1)
        assert pipe.kv_cache1[0]["tachyscope"].session.memory.past == 12 * TOKENS - 3 * TOKENS


def test_reading_less_is_counted(pipe):
    with ts.accelerate(pipe, "cache=window:budget=6f,sink=0 text=pads") as handle:
        pipe.inference(*inputs(frames=24))
        assert 0.3 < handle.stats()["density"] < 0.7


def test_a_replay_acts_on_the_hosts_feed_forward_layers(pipe):
    noise, context = inputs()
    theirs = pipe.inference(noise, context)
    with ts.accelerate(pipe, "dense replay=every_k:k=1"):
        assert error(pipe.inference(noise, context), theirs) < DENSE
    with ts.accelerate(pipe, "dense replay=every_k:k=2") as handle:
        replayed = pipe.inference(noise, context)
        assert handle.stats()["rows_replayed"] > 0
    assert 1e-3 < error(replayed, theirs) < 1
    assert torch.equal(pipe.inference(noise, context), theirs)


def test_a_replay_that_can_serve_nothing_is_refused_by_name():
    from hosts_family import make

    for name in ("krea", "rolling-forcing"):
        with pytest.raises(
            TachyscopeError, match="replay=every_k:k=2,drift=false finds nothing of the last"
        ):
            ts.accelerate(make(name), "dense replay=every_k:k=2")
    with pytest.raises(TachyscopeError, match="give VideoCache\\(passes=…\\), or"):
        ts.VideoCache("dense replay=every_k:k=2", layers=1, chunk=3)
    cache = ts.VideoCache("dense replay=every_k:k=2", layers=1, chunk=3, passes=1)
    q = torch.randn(1, HEADS, 3 * TOKENS, DIM)
    cache.begin(frame=0, frames=3, grid=GRID)
    with pytest.raises(TachyscopeError, match="call attend before mlp"):
        cache.mlp(0, q, None)
    cache.attend(0, q, q, q)
    with pytest.raises(TachyscopeError, match=r"keeps rows \[batch, tokens, 32\]"):
        cache.mlp(0, q, None)
    with pytest.raises(TachyscopeError, match="had no feed-forward layer in the last pass"):
        cache.begin(frame=3, frames=3, grid=GRID)


def test_what_is_not_known_is_refused_with_what_is(pipe):
    with pytest.raises(TachyscopeError, match="accelerate does not know .*Linear: give .*begin"):
        ts.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(TachyscopeError, match="passes=teacache.* acts outside attention"):
        ts.accelerate(pipe, "dense passes=teacache:threshold=0.1")
    with pytest.raises(TachyscopeError, match="has no budget for this model: it takes check, chu"):
        ts.accelerate(pipe, "dense", budget=3)
    with ts.accelerate(pipe, "dense"), pytest.raises(TachyscopeError, match="remove\\(\\) that"):
        ts.accelerate(pipe, "fast")


def test_an_adapter_is_imported_only_beside_its_models_package(monkeypatch):
    absent = accelerate.Adapter("an absent model", "absent.adapter:Absent", "absent")
    monkeypatch.setattr(accelerate, "ADAPTERS", (*accelerate.ADAPTERS, absent))
    with pytest.raises(
        TachyscopeError, match="its pipeline; .*; an absent model; or call the cache"
    ):
        ts.accelerate(torch.nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "absent", sys)
    with pytest.raises(ModuleNotFoundError, match="absent"):
        ts.accelerate(torch.nn.Linear(2, 2))


def test_attention_that_differs_is_refused_at_the_door(pipe, monkeypatch):
    part = pipe.generator.model.blocks[0].self_attn
    monkeypatch.setattr(part, "norm_q", torch.nn.Identity())
    inner = type(part).forward

    @wraps(inner)
    def other(self, x, *args, **kwargs):
        return inner(self, 2 * x, *args, **kwargs)

    monkeypatch.setattr(type(part), "forward", other)
    with pytest.raises(TachyscopeError, match="differs from the model's own by .* 0.01 is allowed"):
        ts.accelerate(pipe, "dense")


def test_a_cache_says_which_frames_can_come():
    cache = ts.VideoCache("dense", layers=1, chunk=3)
    q = torch.randn(1, HEADS, 3 * TOKENS, DIM)
    with pytest.raises(TachyscopeError, match="call begin"):
        cache.attend(0, q, q, q)
    with pytest.raises(TachyscopeError, match="starts at latent frame 0, got a first pass at 3"):
        cache.begin(frame=3, frames=3, grid=GRID)
    cache.begin(frame=0, frames=3, grid=GRID)
    cache.attend(0, q, q, q)
    with pytest.raises(TachyscopeError, match="latent frame 4, where 0 or 3 can come"):
        cache.begin(frame=4, frames=3, grid=GRID)
    with pytest.raises(TachyscopeError, match="at most 3: give VideoCache\\(chunk=5\\)"):
        cache.begin(frame=3, frames=5, grid=GRID)
    cache.begin(frame=3, frames=2, grid=GRID)
    with pytest.raises(TachyscopeError, match="18 queries, where a pass over 2 .* has 12"):
        cache.attend(0, q, q, q)


def test_a_cache_goes_on_from_its_state_to_the_bit():
    rng = torch.Generator().manual_seed(0)
    chunks = [torch.randn(3, 1, HEADS, 3 * TOKENS, DIM, generator=rng) for _ in range(5)]

    def run(cache, i):
        cache.begin(frame=3 * i, frames=3, grid=GRID)
        return cache.attend(0, *chunks[i])

    plan = "cache=window:budget=9f"
    whole, first, second = (ts.VideoCache(plan, layers=1, chunk=3) for _ in range(3))
    wanted = [run(whole, i) for i in range(5)]
    for i in range(3):
        run(first, i)
    first.commit()
    second.restore(first.state())
    assert all(torch.equal(run(second, i), wanted[i]) for i in (3, 4))


def test_a_cache_serves_a_host_in_any_mode():
    cache = ts.VideoCache("fast", layers=1, chunk=3)
    q = torch.randn(1, HEADS, 3 * TOKENS, DIM)
    for i, mode in enumerate((torch.inference_mode, torch.no_grad, torch.enable_grad)):
        with mode():
            cache.begin(frame=3 * i, frames=3, grid=GRID)
            cache.attend(0, q, q, q).add_(1)
    assert cache.stats()["pairs"] > 0
