"""VILA-U 7B with random weights, and a random calibration of it: neither changes a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.calibration import Calibration
from tachyscope.models.token_model import Sampler
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.depth import DepthConfig
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.models.vila_u.tokenizers import BytesTokenizer
from tachyscope.models.vila_u.transformer import Vila
from tachyscope.models.vila_u.vqgan import PixelConfig

RANK = 256  # of the map that stands in for neurons that are left out


def vila_7b(layers: int = 32, places: int = 256, cfg: float = 3.0) -> VilaConfig:
    """VILA-U-7B-256, with a small decoder: pixels are not timed."""
    side = math.isqrt(max(places, 0))
    if side * side != places or not 4 <= places <= 4096:
        raise TachyscopeError(
            f"`places` must be a square number from 4 to 4096, got {places}: try 256, 729 or 1024"
        )
    return VilaConfig(
        hidden=4096, intermediate=11008, layers=layers, heads=32, kv_heads=32, head_dim=128,
        vocab=32004, eps=1e-5, grid=(side, side), depth=4, codes=16384, code_dim=1024,
        head=DepthConfig(width=2560, layers=6, heads=40),
        pixels=PixelConfig(
            ch=32, ch_mult=(1, 1, 2, 2, 4), num_res_blocks=1, attn_resolutions=(),
            z_channels=256, resolution=256,
        ),
        sampler=Sampler(cfg=cfg), tokenizer="bytes",
    )  # fmt: skip


def random_vila(config: VilaConfig, device: torch.device, dtype: torch.dtype) -> VilaModel:
    """A model of random weights, drawn on the device."""
    with torch.device("meta"):
        model = Vila(config)
    model = model.to(dtype).to_empty(device=device)
    rng = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, x in module.named_parameters(recurse=False):
            norm = isinstance(module, nn.RMSNorm | nn.LayerNorm | nn.GroupNorm)
            if norm and name == "weight":
                nn.init.ones_(x)
            else:
                nn.init.normal_(x, std=0.02, generator=rng)
    return VilaModel(model.eval(), config, BytesTokenizer(config.vocab), name="vila-u-random")


def random_calibration(model: VilaModel, shares: Sequence[float], rank: int = RANK) -> Calibration:
    """A calibration of the model's own weights in which order and maps are random."""
    mlps = model.mlps
    count, (width, inner) = len(mlps), mlps[0].down.shape
    rng = torch.Generator(model.device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(count, *size, generator=rng, device=model.device)
        return drawn.mul_(width**-0.5)

    sizes = [(width, rank), (rank, width)] if rank < width else [(width, width)]
    return Calibration(
        score=draw(inner).abs(),
        norms=torch.stack([mlp.down.detach().float().norm(dim=0).cpu() for mlp in mlps]),
        speeds=torch.zeros(0, 2),
        maps={share: tuple(draw(*size) for size in sizes) for share in shares},
        bias={share: draw(width) for share in shares},
        beta={share: torch.ones(count) for share in shares},
        gain=torch.ones(count),
        off={share: torch.ones(count, 3) for share in shares},
    )
