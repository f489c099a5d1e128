"""A world model of one's own: a causal transformer of two layers, driven by actions.

tachyscope generate own_world.py:MyWorld --plan fast --actions "w*8 a*8" --frames 16
"""

import numpy as np
import torch
from torch import Tensor, nn

import tachyscope as ts


class Block(nn.Module):
    """Attention and MLP; the session remembers, rotates, and says what is read and computed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = Mlp(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, session: ts.Session, layer: int) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        read = session.attend(layer, *(part.transpose(1, 2) for part in (q, k, v)))
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + session.mlp(layer, self.norm2(x), self.mlp)


class Mlp(nn.Sequential):
    """`macs` counts the multiply-adds of one token."""

    @property
    def macs(self) -> int:
        return sum(part.weight.numel() for part in self if isinstance(part, nn.Linear))


class Net(nn.Module):
    """From noisy latents [B, 3, F, 8, 8], their noise and an action a frame to clean ones."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, width), nn.Linear(width, 3)
        self.action, self.noise = nn.Embedding(4, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))

    def forward(self, session: ts.Session, x: Tensor, noise: Tensor, action: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(2).mT) + self.action(action) + self.noise(noise)
        for layer, block in enumerate(self.blocks):
            tokens = block(tokens, session, layer)
        return self.head(tokens).mT.reshape(x.shape)


class MyWorld(ts.VideoModel):
    """Frames of 32x32, one at a time, by two denoising passes and a clean one."""

    name, actions, fps, size = "my-world", ".wad", 8, (32, 32)
    steps = (1.0, 0.5)

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)  # weights of your own would be loaded here
            self.transformer = Net().to(device, dtype).eval()

    def shape(self, size: tuple[int, int] | None = None) -> ts.Shape:
        return ts.Shape(
            layers=2, heads=4, kv_heads=4, head_dim=16, width=64, grid=(8, 8), chunk=1, passes=3
        )

    def rope(self, shape: ts.Shape) -> ts.Rope:
        return ts.Rope(((4, (1, 0, 0)), (6, (0, 1, 0)), (6, (0, 0, 1))))

    def run(
        self, session: ts.Session, x: Tensor, index: int, noise: float, action: Tensor
    ) -> Tensor:
        session.begin(session.positions(1), index, len(self.steps) + 1, (noise,))
        return self.transformer(session, x, x.new_full((1, 1), noise), action)

    def sample(self, session, actions, ready=None):  # type: ignore[no-untyped-def]
        action = torch.as_tensor(actions or [0], device=self.device)
        x, rows = None, session.shape.batch
        for index, noise in enumerate(self.steps):
            drawn = [
                torch.randn(1, 3, 1, 8, 8, generator=g, device=self.device, dtype=self.dtype)
                for g in session.generators
            ]
            fresh = torch.cat(drawn)[:rows]
            x = fresh if x is None else (1 - noise) * x + noise * fresh
            x = self.run(session, x, index, noise, action)
        if ready is not None:
            ready(x)
        self.prefill_latents(session, x, action)
        session.memory.latents, session.memory.made = x, session.memory.made + 1
        return x

    def prefill_latents(self, session, latents, actions, shown=False):  # type: ignore[no-untyped-def]
        action = torch.as_tensor(actions if len(actions) else [0], device=self.device)
        self.run(session, latents, len(self.steps), 0.0, action)  # keys and values of clean latents

    def encode_frames(self, frames: np.ndarray) -> Tensor:
        x = (
            torch.from_numpy(frames).to(self.device, self.dtype).permute(3, 0, 1, 2)[None] / 127.5
            - 1
        )
        return nn.functional.avg_pool3d(x, (1, 4, 4))

    def decode_latents(self, session: ts.Session, latents: Tensor, video: int = 0) -> np.ndarray:
        x = latents[0].repeat_interleave(4, 2).repeat_interleave(4, 3).permute(1, 2, 3, 0)
        return ((x.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()
