"""Tiny models with random weights, for tests."""

from __future__ import annotations

import torch

from tachyscope.io.torch_defaults import own_numerics
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.depth import DepthConfig
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.models.vila_u.tokenizers import BytesTokenizer
from tachyscope.models.vila_u.transformer import Vila
from tachyscope.models.vila_u.vqgan import PixelConfig
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.random import random_wan


def toy_chunks(
    seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> WanModel:
    """A tiny random Wan-type model: 64x96 pixels, chunks of 3 latent frames."""
    config = WanConfig(
        dim=96, ffn_dim=160, layers=3, heads=4, text_dim=24, text_len=64, actions=".wsadqe",
        size=(8, 12), stride=(1, 8, 8),
    )  # fmt: skip
    # on the CPU, so that every device has the same model
    made = random_wan(config, seed, dtype=dtype)
    return WanModel("toy-chunks", made.transformer.to(device), made.text, made.decoder)


def toy_tokens(
    seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> VilaModel:
    """A tiny random VILA-U: 32x32 pixels, 4x4 positions a frame, with every part of a large one."""
    config = VilaConfig(
        hidden=64,
        intermediate=160,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=261,
        eps=1e-5,
        grid=(4, 4),
        depth=4,
        codes=32,
        code_dim=16,
        head=DepthConfig(width=48, layers=2, heads=4),
        pixels=PixelConfig(
            ch=8,
            ch_mult=(1, 1, 2, 2),
            num_res_blocks=1,
            attn_resolutions=(8,),
            z_channels=16,
            resolution=32,
            groups=4,
            encoder=True,
        ),
        actions=".wsadqe",
        tokenizer="bytes",
    )
    # on the CPU, so that every device has the same model
    with own_numerics(seed):
        model = Vila(config).eval().to(device, dtype)
    return VilaModel(model, config, BytesTokenizer(config.vocab), name="toy-tokens")
