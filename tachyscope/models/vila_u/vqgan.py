"""VILA-U's RQ-VAE: VQGAN's convolutions, and residual codebooks.

Layout is [F, channels, rows, columns] inside the convolutions, channels last outside them.
Parameter names are the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import Bound
from tachyscope.models.config_schema import SIDE, Config, entry

CONVOLUTIONS = "rqvaesiglip.ddconfig"  # in the vision tower's config.json


@dataclass(frozen=True, slots=True)
class PixelConfig(Config):
    """The configuration of the convolutions between code sums and pixels."""

    subject = "the decoder's"

    # channels at full size
    ch: int = entry(bound=Bound(1, 8_192), at=f"{CONVOLUTIONS}.ch")
    # multiples of `ch`, from full size down; each level halves the size
    ch_mult: tuple[int, ...] = entry(bound=Bound(1, 64), at=f"{CONVOLUTIONS}.ch_mult")
    num_res_blocks: int = entry(bound=Bound(1, 64), at=f"{CONVOLUTIONS}.num_res_blocks")
    # sizes with attention after each block
    attn_resolutions: tuple[int, ...] = entry(
        bound=Bound(1, 65_536), at=f"{CONVOLUTIONS}.attn_resolutions"
    )
    z_channels: int = entry(bound=Bound(1, 8_192), at=f"{CONVOLUTIONS}.z_channels")
    # pixels a side at full size
    resolution: int = entry(bound=Bound(1, 65_536), at=f"{CONVOLUTIONS}.resolution")
    # groups of every group norm
    groups: int = entry(32, Bound(1, 8_192), at="tachyscope.groups")
    # code sums are resized to it before decoding
    latent: tuple[int, int] | None = entry(None, SIDE, at="rqvaesiglip.decoder_latent_shape")
    # whether it has an encoder; published ones need more than pixels
    encoder: bool = entry(False, at="tachyscope.encoder")

    def check_fields(self) -> None:
        narrow = [m * self.ch for m in self.ch_mult if m * self.ch % self.groups]
        self.demand(
            bool(self.ch_mult) and not narrow,
            f"channels must be multiples of groups={self.groups}",
            f"ch={self.ch} times ch_mult={list(self.ch_mult)}",
        )
        if self.encoder and self.latent:
            raise TachyscopeError(
                f"an encoder gives one code a place, got code sums resized to {self.latent}: "
                f"leave out decoder_latent_shape or the encoder"
            )

    @property
    def scale(self) -> int:
        """Pixels of a position of the decoder's input, each way."""
        return 1 << (len(self.ch_mult) - 1)


class Codebooks(nn.Module):
    """D codebooks: a token's vector is the sum of one entry of each."""

    def __init__(self, depth: int, codes: int, dim: int, shared: bool) -> None:
        super().__init__()
        # the last row is padding, which is not used here
        made = [nn.Embedding(codes + 1, dim) for _ in range(1 if shared else depth)]
        self.codebooks = nn.ModuleList(made * depth if shared else made)

    def sums(self, codes: Tensor) -> Tensor:
        """Sums of the first 1, 2, … D entries that codes [..., D] name: [..., D, dim]."""
        entries = [book(codes[..., d]) for d, book in enumerate(self.codebooks)]
        return torch.stack(entries, -2).cumsum(-2)

    def sum(self, codes: Tensor) -> Tensor:
        """The vector [..., dim] that codes [..., D] stand for."""
        return self.sums(codes)[..., -1, :]

    @torch.no_grad()
    def quantise(self, x: Tensor) -> Tensor:
        """Codes [..., D] of vectors x [..., dim]: each the nearest entry to the residual."""
        codes = []
        for book in self.codebooks:
            entries = book.get_parameter("weight")[:-1]
            distance = entries.square().sum(-1) - 2 * x @ entries.T  # less |x|², the same for all
            codes.append(distance.argmin(-1))
            x = x - entries[codes[-1]]
        return torch.stack(codes, -1)


class RqVae(nn.Module):
    """The codebooks, the decoder and, in checkpoints that have one, the encoder."""

    def __init__(
        self, config: PixelConfig, depth: int, codes: int, dim: int, shared: bool = False
    ) -> None:
        super().__init__()
        self.latent = config.latent
        self.quantizer = Codebooks(depth, codes, dim, shared)
        self.post_quant_conv = nn.Conv2d(dim, config.z_channels, 1)
        self.decoder = Decoder(config)
        self.encoder = Encoder(config, dim) if config.encoder else None

    def decode(self, sums: Tensor) -> Tensor:
        """Pixels [F, 3, H, W], about -1 to 1, of code sums [F, rows, columns, dim]."""
        z = sums.movedim(-1, 1)
        if self.latent is not None:
            z = F.interpolate(z.float(), self.latent, mode="bilinear").to(z.dtype)
        return self.decoder(self.post_quant_conv(z))

    def encode(self, pixels: Tensor) -> Tensor:
        """Vectors [F, rows, columns, dim], not yet quantised, of pixels [F, 3, H, W]."""
        if self.encoder is None:
            raise TachyscopeError(
                "this checkpoint has no encoder to make codes of pixels: start without a first "
                "frame, or give a checkpoint that has one"
            )
        return self.encoder(pixels).movedim(1, -1)


class Decoder(nn.Module):
    """From z_channels at the smallest size up to three colours at the largest."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        width = config.ch * config.ch_mult[-1]
        self.conv_in = nn.Conv2d(config.z_channels, width, 3, padding=1)
        self.mid = Middle(width, config.groups)
        levels = []
        for level in reversed(range(len(config.ch_mult))):
            out = config.ch * config.ch_mult[level]
            up = Level(config, level, width, out, config.num_res_blocks + 1)
            if level > 0:
                up.upsample = Resize(out, 2)
            levels.append(up)
            width = out
        # levels are numbered from full size down and run from the smallest up
        self.up = nn.ModuleList(reversed(levels))
        self.norm_out = _norm(width, config.groups)
        self.conv_out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Encoder(nn.Module):
    """From three colours at full size down to `dim` channels at the smallest."""

    def __init__(self, config: PixelConfig, dim: int) -> None:
        super().__init__()
        width = config.ch
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList()
        for level, multiple in enumerate(config.ch_mult):
            out = config.ch * multiple
            down = Level(config, level, width, out, config.num_res_blocks)
            if level < len(config.ch_mult) - 1:
                down.downsample = Resize(out, 0.5)
            self.down.append(down)
            width = out
        self.mid = Middle(width, config.groups)
        self.norm_out = _norm(width, config.groups)
        self.conv_out = nn.Conv2d(width, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Level(nn.Module):
    """The blocks at one size, with optional attention, then a resize."""

    def __init__(self, config: PixelConfig, level: int, width: int, out: int, blocks: int) -> None:
        super().__init__()
        attends = config.resolution >> level in config.attn_resolutions
        widths = [width] + [out] * blocks
        self.block = nn.ModuleList(
            Residual(widths[i], widths[i + 1], config.groups) for i in range(blocks)
        )
        self.attn = nn.ModuleList(
            Attention(out, config.groups) for _ in range(blocks if attends else 0)
        )
        self.upsample: Resize | None = None
        self.downsample: Resize | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        for resize in (self.upsample, self.downsample):
            if resize is not None:
                x = resize(x)
        return x


class Middle(nn.Module):
    """Two blocks around attention, at the smallest size."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.block_1 = Residual(width, width, groups)
        self.attn_1 = Attention(width, groups)
        self.block_2 = Residual(width, width, groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Residual(nn.Module):
    """Two normed convolutions and a skip connection, 1×1 if the width changes."""

    def __init__(self, width: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1 = _norm(width, groups)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm2 = _norm(out, groups)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(width, out, 1) if width != out else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return y + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class Attention(nn.Module):
    """Single-head attention over all positions of a frame."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm = _norm(width, groups)
        self.q = nn.Conv2d(width, width, 1)
        self.k = nn.Conv2d(width, width, 1)
        self.v = nn.Conv2d(width, width, 1)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (conv(y).flatten(2).mT[:, None] for conv in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(q, k, v)[:, 0]  # [F, places, width]
        return x + self.proj_out(o.mT.reshape(x.shape))


class Resize(nn.Module):
    """Nearest-neighbour upsampling and a convolution, or a strided convolution."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.grows = scale > 1
        # padded on the right and bottom only, so that the strided one is centred
        self.conv = (
            nn.Conv2d(width, width, 3, 1, 1) if self.grows else nn.Conv2d(width, width, 3, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.grows:
            return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.conv(F.pad(x, (0, 1, 0, 1)))


def _norm(width: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, width, eps=1e-6)
