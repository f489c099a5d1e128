"""diffusers' own Wan transformer and pipeline by a plan: the video that the same weights make here."""

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from diffusers import WanTransformer3DModel as Transformer

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.opening import open as open_stream
from tachyscope.models.checkpoint import allocate
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.names import wan_names
from tachyscope.models.wan.parts import EncodedPrompt
from tachyscope.models.wan.plain_parts import BytesText, Preview
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.transformer import WanCausal

SMALL = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4,
    "out_channels": 4, "text_dim": 12, "freq_dim": 16, "ffn_dim": 48, "num_layers": 2,
    "cross_attn_norm": True,
}  # fmt: skip
HIGH, WIDE, FRAMES = 4, 6, 12
EXACT = 1e-5


def make_transformer():
    torch.manual_seed(0)
    model = Transformer(**SMALL).eval()
    for name, weight in model.named_parameters():
        if "norm_q" in name or "norm_k" in name:
            weight.data.fill_(1.4)  # attention that is not flat
        elif name.endswith("scale_shift_table"):
            weight.data.normal_()
    return model


@pytest.fixture
def transformer():
    return make_transformer()


@pytest.fixture(scope="module")
def context():
    return torch.randn(1, 7, 12, generator=torch.Generator().manual_seed(5))


def our_model(transformer):
    """The same weights in our own model, as a diffusers folder would be read."""
    config = PRESETS["self-forcing"].config
    from dataclasses import replace

    c = SMALL
    small = replace(
        config, dim=32, ffn_dim=c["ffn_dim"], layers=2, heads=2, in_channels=4, text_dim=12,
        text_len=7, freq_dim=16, size=(HIGH, WIDE),
    )  # fmt: skip
    with torch.device("meta"):
        wan = WanCausal(small)
    wan = allocate(wan, "cpu", "wan")
    tensors = wan_names(transformer.state_dict(), "a test")
    shapes = {name: x.shape for name, x in wan.state_dict().items()}
    wan.load_state_dict({n: x.reshape(shapes[n]) for n, x in tensors.items()})
    return WanModel("wan", wan.eval(), BytesText.seeded(small, 0), Preview.seeded(small, 0))


def ours(transformer, context, plan="dense", frames=FRAMES, seed=1):
    """What `tachyscope generate` makes of these weights: latents [1, C, F, h, w]."""
    model = our_model(transformer)
    model.encode_prompt = lambda prompt: EncodedPrompt(context, (context.shape[1],))
    with open_stream(model, plan, prompt="any", seed=seed, frames=4 * frames - 3) as stream:
        return torch.cat([stream.generate().latents for _ in range(frames // 3)], 2)


def theirs(handle, context, frames=FRAMES, seed=1, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    batch = len(context)

    def noise():
        return torch.randn(batch, 4, 3, HIGH, WIDE, generator=generator)

    return torch.cat(list(handle.latents(context, noise, frames)), 2)


def error(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    "plan",
    [
        "dense",
        "cache=window:budget=6f,sink=0 text=none",
        "cache=window:budget=6f,sink=0 text=none replay=every_k:k=2",
    ],
)
def test_diffusers_transformer_makes_the_video_that_generate_makes(transformer, context, plan):
    with ts.accelerate(transformer, plan) as handle:
        made = theirs(handle, context)
    wanted = ours(transformer, context, plan.replace("text=none", "text=dense"))
    assert made.shape == wanted.shape
    for frame in range(FRAMES):
        assert error(made[:, :, frame], wanted[:, :, frame]) < EXACT


def test_a_removed_plan_leaves_the_transformer_as_it_was(transformer, context):
    x, t = torch.randn(1, 4, 3, HIGH, WIDE), torch.ones(1)
    before = transformer(x, t, context, return_dict=False)[0]
    ts.accelerate(transformer, "fast").remove()
    assert torch.equal(transformer(x, t, context, return_dict=False)[0], before)
    with ts.accelerate(transformer, "live") as handle:
        first = theirs(handle, context)
        assert torch.equal(theirs(handle, context), first), "frame 0 begins a new video"
    assert torch.equal(transformer(x, t, context, return_dict=False)[0], before)


def test_a_cache_context_has_a_past_of_its_own(transformer, context):
    other = -context
    with ts.accelerate(transformer, "dense") as handle:
        alone = {"cond": theirs(handle, context), "uncond": theirs(handle, other)}
        makers = {}
        for name, embeds in (("cond", context), ("uncond", other)):
            generator = torch.Generator().manual_seed(1)
            makers[name] = handle.latents(
                embeds,
                lambda g=generator: torch.randn(1, 4, 3, HIGH, WIDE, generator=g),
                FRAMES,
            )
        made = {name: [] for name in makers}
        for _ in range(FRAMES // 3):
            for name, chunks in makers.items():
                with transformer.cache_context(name):
                    made[name].append(next(chunks))
    for name, chunks in made.items():
        assert torch.equal(torch.cat(chunks, 2), alone[name])


def test_a_lora_acts_as_if_it_were_fused_into_the_weights(transformer, context):
    from peft import LoraConfig

    plain = theirs_of(transformer, context)
    transformer.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    with ts.accelerate(transformer, "dense") as handle:
        tuned = theirs(handle, context)
    transformer.disable_adapters()
    assert error(theirs_of(transformer, context), plain) < EXACT
    transformer.enable_adapters()
    transformer.fuse_lora()
    assert error(theirs_of(transformer, context), tuned) < EXACT
    assert error(tuned, plain) > 1e-3


def theirs_of(transformer, context):
    with ts.accelerate(transformer, "dense") as handle:
        return theirs(handle, context)


@pytest.mark.slow
def test_compiled_blocks_make_the_same_video(transformer, context):
    wanted = theirs_of(transformer, context)
    for block in transformer.blocks:
        block.compile(backend="eager")
    assert error(theirs_of(transformer, context), wanted) < EXACT


@pytest.mark.slow
def test_a_compiled_transformer_makes_the_same_video(transformer, context):
    wanted = theirs_of(transformer, context)
    transformer.compile(backend="eager")
    assert error(theirs_of(transformer, context), wanted) < EXACT
    with ts.accelerate(transformer, "dense") as handle:
        transformer.compile(backend="eager")
        assert error(theirs(handle, context), wanted) < EXACT


def test_a_pipeline_whose_transformer_is_wrapped_by_compile_makes_the_same_video(pipe, context):
    pipe.set_progress_bar_config(disable=True)
    with ts.accelerate(pipe, "dense") as handle:
        wanted = few(pipe, context)
        assert handle.called is pipe.transformer
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with ts.accelerate(pipe, "dense") as handle:
        assert error(few(pipe, context), wanted) < EXACT
        assert handle.called is pipe.transformer, "the compiled one is called"


def test_videos_of_a_batch_may_have_a_generator_each(pipe, context):
    pipe.set_progress_bar_config(disable=True)
    size = {"height": 8 * HIGH, "width": 8 * WIDE, "num_frames": 9, "output_type": "latent"}
    with ts.accelerate(pipe, "dense"):
        seeds = [torch.Generator().manual_seed(i) for i in (1, 2)]
        pair = pipe(prompt_embeds=context.repeat(2, 1, 1), generator=seeds, **size).frames
        alone = pipe(
            prompt_embeds=context, generator=torch.Generator().manual_seed(2), **size
        ).frames
    assert error(pair[1:], alone) < EXACT


@pytest.fixture
def pipe(transformer):
    torch.manual_seed(2)
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ).eval()  # fmt: skip
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae, transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def test_an_accelerated_pipeline_makes_the_video_chunk_by_chunk(pipe, transformer, context):
    pipe.set_progress_bar_config(disable=True)
    kind, seen = type(pipe), []
    size = {"height": 8 * HIGH, "width": 8 * WIDE}
    with ts.accelerate(pipe, "dense"):
        given = {"prompt_embeds": context, "num_frames": 45, **size}

        def generator():
            return torch.Generator().manual_seed(1)

        latents = pipe(
            **given, generator=generator(), output_type="latent",
            callback_on_step_end=lambda pipe, step, t, kwargs: seen.append(step),
        ).frames  # fmt: skip
        video = pipe(**given, generator=generator()).frames
    assert error(latents, ours(transformer, context)) < EXACT
    assert video.shape == (1, 45, 8 * HIGH, 8 * WIDE, 3) and seen == [0, 1, 2, 3]
    assert type(pipe) is kind


def few(pipe, context):
    return pipe(
        prompt_embeds=context, num_frames=21, height=8 * HIGH, width=8 * WIDE,
        generator=torch.Generator().manual_seed(1), output_type="latent",
    ).frames  # fmt: skip


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", ["model", "group"])
def test_an_offloaded_pipeline_makes_the_same_videos_one_after_the_other(
    pipe, context, how, before
):
    """Offloading takes its own hooks off and puts them on again behind each video."""
    pipe.set_progress_bar_config(disable=True)
    with ts.accelerate(pipe, "dense") as handle:
        wanted = few(pipe, context)
        assert handle.stats()["density"] == 1, "what was counted outlasts the video"

    def offload():
        if how == "model":
            pipe.enable_model_cpu_offload(device="cpu")
        else:
            pipe.transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")

    if before:
        offload()
    with ts.accelerate(pipe, "dense"):
        if not before:
            offload()
        assert all(torch.equal(few(pipe, context), wanted) for _ in range(2))


CACHES = [
    diffusers.FirstBlockCacheConfig(threshold=0.2),
    diffusers.TaylorSeerCacheConfig(),
    diffusers.MagCacheConfig(mag_ratios=torch.ones(4), num_inference_steps=4),
    diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 1
    ),
    diffusers.FasterCacheConfig(current_timestep_callback=lambda: 1),
]


@pytest.mark.parametrize("cache", CACHES, ids=lambda config: type(config).__name__)
def test_diffusers_own_caches_are_refused_before_and_after(transformer, cache):
    with ts.accelerate(transformer, "dense"):
        with pytest.raises(TachyscopeError, match="another cache skips layers .*: remove\\(\\)"):
            transformer.enable_cache(cache)
        assert not transformer.is_cache_enabled
    transformer.enable_cache(cache)
    with pytest.raises(TachyscopeError, match=r"disable_cache\(\) first"):
        ts.accelerate(transformer, "dense")
    transformer.disable_cache()
    ts.accelerate(transformer, "dense").remove()


SIZES = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 16}
OTHERS = {
    "AnyFlowFARTransformer3DModel": (SIZES, "4 times coarser than the chunk"),
    "HeliosTransformer3DModel": (SIZES | {"rope_dim": (4, 4, 4)}, "runs its history through"),
    "SanaVideoTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1,
         "num_cross_attention_heads": 2, "cross_attention_head_dim": 12,
         "cross_attention_dim": 24, "caption_channels": 8},
        "linear attention: its state does not grow",
    ),
    "WanVACETransformer3DModel": (SIZES | {"vace_layers": [0]}, "denoises a whole clip or picture"),
    "CogVideoXTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1},
        "denoises a whole clip or picture",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_video_transformers_are_refused_with_the_reason(name):
    sizes, reason = OTHERS[name]
    model = getattr(diffusers, name)(**sizes)
    with pytest.raises(TachyscopeError, match=f"{name} .*{reason}.*: give diffusers' Wan"):
        ts.accelerate(model, "fast")


def test_what_cannot_be_accelerated_is_refused_in_words(transformer, context, pipe):
    with ts.accelerate(transformer, "dense"):
        with pytest.raises(TachyscopeError, match="accelerated already: remove"):
            ts.accelerate(transformer, "fast")
        with pytest.raises(TachyscopeError, match="needs the first latent frame of the pass"):
            transformer(torch.zeros(1, 4, 3, HIGH, WIDE), torch.ones(1), context)
    with ts.accelerate(pipe, "dense"):
        for options, words in (
            ({"guidance_scale": 5.0, "negative_prompt": ""}, "takes no guidance_scale, negative_p"),
            ({"num_frames": 0}, "`num_frames` must be 1 or more, got 0"),
            ({"height": 40, "width": 48}, "`height` must be a multiple of 16 and .* got 40 x 48"),
        ):
            with pytest.raises(TachyscopeError, match=words):
                pipe(prompt_embeds=context, **options)
    image = WanImageToVideoPipeline(
        None, None, None, FlowMatchEulerDiscreteScheduler(), transformer=transformer
    )
    with pytest.raises(
        TachyscopeError, match="WanImageToVideoPipeline has a loop over whole clips"
    ):
        ts.accelerate(image, "dense")
    with pytest.raises(TachyscopeError, match="one of self-forcing, .* got preset 'longlive'"):
        ts.accelerate(transformer, "dense", preset="longlive")
    with pytest.raises(TachyscopeError, match="takes check, latent_frames, preset"):
        ts.accelerate(transformer, "dense", chunk=3)
    pipe.transformer_2 = transformer
    with pytest.raises(TachyscopeError, match="two transformers"):
        ts.accelerate(pipe, "dense")
