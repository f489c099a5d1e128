"""SkyReels-V2 in blocks, in diffusers' own pipeline: its video, with fewer frames run."""

import pytest
import torch
from diffusers import SkyReelsV2DiffusionForcingPipeline as Pipeline
from diffusers import SkyReelsV2Transformer3DModel as Transformer
from diffusers import UniPCMultistepScheduler

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError

FRAMES, BLOCK = 8, 2


@pytest.fixture
def pipe():
    torch.manual_seed(0)
    model = Transformer(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4,
        out_channels=4, text_dim=12, freq_dim=16, ffn_dim=48, num_layers=2, cross_attn_norm=True,
        inject_sample_info=True,
    ).eval()  # fmt: skip
    for name, weight in model.named_parameters():
        if "norm_q" in name or "norm_k" in name:
            weight.data.fill_(1.4)  # attention that is not flat
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
    )
    made = Pipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=model, scheduler=scheduler
    )
    made.set_progress_bar_config(disable=True)
    return made


def video(pipe, seed=1, ar_step=2, **more):
    rng = torch.Generator().manual_seed(5)
    embeds = torch.randn(2, 1, 7, 12, generator=rng)
    return pipe(
        prompt=None, prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1], guidance_scale=3.0, height=32,
        width=48, num_frames=4 * FRAMES - 3, base_num_frames=97, num_inference_steps=6, output_type="latent",
        ar_step=ar_step, causal_block_size=BLOCK, addnoise_condition=0,
        generator=torch.Generator().manual_seed(seed), **more,
    ).frames  # fmt: skip


def error(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("plan", ["dense", "dense attention=ann:read=1,order=time,block=2"])
def test_a_plan_makes_diffusers_own_video_and_runs_no_finished_block_again(pipe, plan):
    theirs, other = video(pipe), video(pipe, seed=2)
    with ts.accelerate(pipe, plan) as handle:
        assert error(video(pipe), theirs) < 1e-5
        # of 12 passes over 4 blocks 12 are over finished ones, of which 3 leave what is kept
        assert handle.stats()["frames_share"] == 1 - 9 / 48
        assert error(video(pipe, seed=2), other) < 1e-5, "another video"
    assert torch.equal(video(pipe), theirs), "removed"


def test_blocks_at_one_noise_level_are_served_too(pipe):
    theirs = video(pipe, ar_step=0)
    with ts.accelerate(pipe, "dense") as handle:
        assert error(video(pipe, ar_step=0), theirs) < 1e-5
        assert handle.stats()["frames_share"] == 1


@pytest.mark.parametrize("before", [True, False])
def test_an_offloaded_pipeline_is_accelerated_in_its_second_video_too(pipe, before):
    """Offloading exchanges the transformer's `forward` behind each video."""
    theirs = video(pipe)
    if before:
        pipe.enable_model_cpu_offload(device="cpu")
    with ts.accelerate(pipe, "dense") as handle:
        if not before:
            pipe.enable_model_cpu_offload(device="cpu")
        for _ in range(2):
            assert error(video(pipe), theirs) < 1e-5
        assert handle.stats()["frames_share"] == 1 - 9 / 48
    assert torch.equal(video(pipe), theirs), "removed"


def test_a_compiled_transformer_makes_the_same_video(pipe):
    theirs = video(pipe)
    pipe.transformer.compile(backend="eager")
    with ts.accelerate(pipe, "dense"):
        assert error(video(pipe), theirs) < 1e-5
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(
        TachyscopeError, match="wrapped by torch.compile.*: use transformer.compile"
    ):
        ts.accelerate(pipe, "dense")


def test_what_a_plan_cannot_serve_is_refused_in_words(pipe):
    with pytest.raises(TachyscopeError, match="cache=window.* takes cache=keep_all"):
        ts.accelerate(pipe, "cache=window:budget=4f")
    with pytest.raises(TachyscopeError, match="has no preset for this model: it takes a plan"):
        ts.accelerate(pipe, "dense", preset="x")
    with ts.accelerate(pipe, "dense"):
        with pytest.raises(TachyscopeError, match="accelerated already"):
            ts.accelerate(pipe, "dense")
        with pytest.raises(TachyscopeError, match=r"causal_block_size=… of 2 or more"):
            pipe.transformer(
                torch.zeros(1, 4, 3, 4, 6), torch.ones(1, 3), torch.zeros(1, 7, 12),
                enable_diffusion_forcing=True, fps=[0],
            )  # fmt: skip
