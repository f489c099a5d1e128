"""A process that runs diffusers' own Wan and SkyReels-V2 by a plan, on small random weights.

python -m tachyscope_lab.plug.diffusers

Wan's video is compared with that of `tachyscope generate` of the same weights, frame by frame;
SkyReels' with the one that its own pipeline makes without a plan.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import Tensor

import tachyscope as ts
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.names import wan_name, wan_names
from tachyscope.models.wan.parts import EncodedPrompt
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.random import random_wan

FRAMES, LATENT, WORDS = 12, (8, 12), 7
CONFIG = replace(
    PRESETS["self-forcing"].config, dim=64, ffn_dim=128, layers=2, heads=2, in_channels=4,
    text_dim=24, text_len=WORDS, freq_dim=32, size=LATENT,
)  # fmt: skip
COMMON: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": CONFIG.heads,
    "attention_head_dim": CONFIG.dim // CONFIG.heads, "in_channels": CONFIG.in_channels,
    "out_channels": CONFIG.in_channels, "text_dim": CONFIG.text_dim, "freq_dim": CONFIG.freq_dim,
    "ffn_dim": CONFIG.ffn_dim, "num_layers": CONFIG.layers, "cross_attn_norm": True,
}  # fmt: skip
CONTEXT = torch.randn(1, WORDS, CONFIG.text_dim, generator=torch.Generator().manual_seed(5))
WINDOW = "cache=window:budget=6f,sink=0"


def wan(model: WanModel) -> Any:
    """diffusers' transformer with our model's weights."""
    theirs: Any = WanTransformer3DModel(**COMMON)
    tensors = model.transformer.state_dict()
    theirs.load_state_dict({
        name: tensors[wan_name(name)].reshape(x.shape) for name, x in theirs.state_dict().items()
    })  # fmt: skip
    return theirs.eval()


def ours(model: WanModel, plan: str = "dense") -> Tensor:
    """The latents [1, C, F, h, w] that `tachyscope generate` decodes."""
    model.encode_prompt = lambda prompt: EncodedPrompt(CONTEXT, (WORDS,))  # type: ignore[method-assign]
    with ts.open(model, plan, prompt="any", seed=1, frames=4 * FRAMES - 3) as stream:
        chunks = [stream.generate().latents for _ in range(FRAMES // CONFIG.chunk)]
    return torch.cat(chunks, 2)


def pipeline(transformer: Any) -> Any:
    made: Any = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def theirs(pipe: Any, plan: str = "dense") -> Tensor:
    """The same latents by diffusers' accelerated pipeline."""
    with ts.accelerate(pipe, plan):
        latents: Tensor = pipe(
            prompt_embeds=CONTEXT, num_frames=4 * FRAMES - 3, height=8 * LATENT[0],
            width=8 * LATENT[1], generator=torch.Generator().manual_seed(1), output_type="latent",
        ).frames  # fmt: skip
    return latents


def tuned(model: WanModel) -> tuple[Tensor, Tensor]:
    """A LoRA in diffusers' transformer, and fused into our weights."""
    from peft import LoraConfig

    transformer = wan(model)
    torch.manual_seed(0)
    transformer.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    found = theirs(pipeline(transformer))
    transformer.fuse_lora()
    transformer.unload_lora()
    fused, shapes = random_wan(CONFIG, seed=3), model.transformer.state_dict()
    tensors = wan_names(transformer.state_dict(), "a LoRA")
    fused.transformer.load_state_dict({n: x.reshape(shapes[n].shape) for n, x in tensors.items()})
    return found, ours(fused)


def skyreels() -> tuple[Callable[[], Tensor], Any]:
    """A call that makes SkyReels' video in blocks, and its pipeline."""
    torch.manual_seed(0)
    model: Any = SkyReelsV2Transformer3DModel(**COMMON, inject_sample_info=True)
    model.eval()
    for name, weight in model.named_parameters():
        if "norm_q" in name or "norm_k" in name:
            weight.data.fill_(1.4)  # attention that is not flat
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
    )
    pipe: Any = SkyReelsV2DiffusionForcingPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=model, scheduler=scheduler
    )
    pipe.set_progress_bar_config(disable=True)

    def video() -> Tensor:
        latents: Tensor = pipe(
            prompt=None, prompt_embeds=CONTEXT, negative_prompt_embeds=-CONTEXT,
            guidance_scale=3.0, height=8 * LATENT[0], width=8 * LATENT[1], num_frames=29,
            base_num_frames=97, num_inference_steps=6, output_type="latent", ar_step=2,
            causal_block_size=2, addnoise_condition=0,
            generator=torch.Generator().manual_seed(1),
        ).frames  # fmt: skip
        return latents

    return video, pipe


def checks() -> list[dict[str, Any]]:
    """A row a check; the error is the worst frame's."""
    rows: list[dict[str, Any]] = []

    def add(what: str, plan: str, found: Tensor, wanted: Tensor) -> None:
        sizes = wanted.transpose(1, 2).flatten(2).norm(dim=2)
        error = float(((found - wanted).transpose(1, 2).flatten(2).norm(dim=2) / sizes).max())
        rows.append({"check": what, "plan": plan, "error": error, "equal": error == 0})

    model = random_wan(CONFIG, seed=3)
    transformer, frames = wan(model), f"{FRAMES} latent frames"
    whole, x = ours(model), torch.randn(1, CONFIG.in_channels, 3, *LATENT)
    before = transformer(x, torch.ones(1), CONTEXT, return_dict=False)[0]
    add(frames, "dense", theirs(pipeline(transformer)), whole)
    add(frames, WINDOW, theirs(pipeline(transformer), WINDOW), ours(model, f"{WINDOW} text=dense"))
    add("removed", "dense", transformer(x, torch.ones(1), CONTEXT, return_dict=False)[0], before)
    add("with a LoRA", "dense", *tuned(model))
    offloaded = pipeline(wan(model))
    offloaded.enable_model_cpu_offload(device="cpu")
    add("offloaded", "dense", theirs(offloaded), whole)
    transformer.compile(backend="eager")
    add("compiled (eager backend)", "dense", theirs(pipeline(transformer)), whole)
    video, pipe = skyreels()
    own = video()
    with ts.accelerate(pipe, "dense"):
        add("SkyReels-V2 by blocks", "dense", video(), own)
    add("SkyReels-V2, removed", "dense", video(), own)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        found = checks()
    print(json.dumps(found))
