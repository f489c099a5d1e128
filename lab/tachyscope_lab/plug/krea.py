"""A process that runs the session of Krea's `release_server.py` with a small model.

python -m tachyscope_lab.plug.krea krea FOLDER

It needs einops.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tachyscope_lab.plug.host import SIZE, Host, Torch, prompt, report, sdpa, weights

# what the server imports for the web, for files and for pictures
UNUSED = (
    "cv2", "dotenv", "fastapi", "fastapi.middleware", "fastapi.middleware.cors",
    "fastapi.responses", "msgpack", "omegaconf", "torchvision", "torchvision.transforms",
    "torchvision.transforms.functional", "wan.modules.vae",
)  # fmt: skip
LATENT = (60, 104)  # 1,560 tokens a latent frame is a number in its attention
HEADS, WIDTH = 2, 64


class Krea(Host):
    """Its sessions: a chunk by `generate_block_internal`, behind a pass over the last frames."""

    def __init__(self, server: Any, models: Any) -> None:
        self.server, self.models, self.pipeline = server, models, models.pipeline

    def cases(self) -> dict[str, dict[str, Any]]:
        return {"12 frames": {}, "12 frames, 3 of them by a new prompt": {"switch": 3}}

    def video(self, chunks: int = 4, switch: int | None = None) -> Tensor:  # type: ignore[override]
        params = SimpleNamespace(
            prompt="2", width=8 * LATENT[1], height=8 * LATENT[0], seed=1, strength=1.0,
            context_noise=0.0, keep_first_frame=True, kv_cache_num_frames=3, num_blocks=chunks,
            num_denoising_steps=3, input_video=None, start_frame=None, timestep_shift=5.0,
            webcam_mode=False,
        )  # fmt: skip
        with torch.inference_mode(), contextlib.redirect_stdout(io.StringIO()):
            session = self.server.GenerationSession(
                params, SimpleNamespace(use_taehv=False), models=self.models
            )
            for chunk in range(chunks):
                if chunk == switch:
                    session.interpolate_prompt_embeds(self.models, "3", 2)
                session.generate_block_internal(self.models)
        latents: Tensor = session.all_latents
        return latents.clone()


def krea() -> Krea:
    """The server's session over its own pipeline; its VAE is left out."""
    importlib.import_module("diffusers.models.modeling_utils")  # sees which packages there are
    sys.modules.update({name: MagicMock() for name in UNUSED})
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.Stream = torch.cuda.Event = MagicMock()  # type: ignore[misc]
    server: Any = importlib.import_module("release_server")
    server.torch = Torch(bfloat16=torch.float32)
    causal: Any = importlib.import_module("wan.modules.causal_model")
    network: Any = importlib.import_module("wan.modules.model")
    causal.attention = network.flash_attention = sdpa
    network.FLASH_ATTN_2_AVAILABLE = True
    wrapper: Any = importlib.import_module("utils.wan_wrapper")
    pipeline: Any = importlib.import_module("pipeline.causal_inference")
    size = SIZE | {"dim": WIDTH, "ffn_dim": 2 * WIDTH, "num_heads": HEADS}
    model = causal.CausalWanModel
    model.from_pretrained = staticmethod(lambda path, **kwargs: model(**size, **kwargs))
    generator = wrapper.WanDiffusionWrapper(timestep_shift=5.0, is_causal=True)
    weights(generator.model)
    for block in generator.model.blocks:
        block.self_attn.fuse_projections()  # as its loader does
    args = SimpleNamespace(
        denoising_step_list=[1000, 750, 500, 250], warp_denoising_step=True, num_frame_per_block=3,
        independent_first_frame=False,
    )  # fmt: skip

    def encode(text_prompts: list[str]) -> dict[str, Tensor]:
        return {"prompt_embeds": prompt(int(text_prompts[0]))}

    made = pipeline.CausalInferencePipeline(
        args, "cpu", generator=generator, text_encoder=encode, vae=torch.nn.Identity()
    )
    models = SimpleNamespace(
        pipeline=made, transformer=generator, text_encoder=encode, vae_encoder=None,
        vae_decoder=lambda latents, *cache: (latents.repeat_interleave(4, 1), []),
    )  # fmt: skip
    return Krea(server, models)


if __name__ == "__main__":
    report(krea, sys.argv[2])
