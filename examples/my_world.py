"""A world model of one's own: a small causal transformer with actions, its weights random.

python examples/my_world.py
tachyscope compare examples/my_world.py:MyWorld --actions "l*40" --frames 40
"""

import torch
from torch import nn

import tachyscope as ts

SIDE, WIDTH, HEADS, LAYERS = 8, 64, 2, 2  # a latent frame's side in tokens; the transformer's sizes
NOISE = (1.0, 0.5, 0.0)  # of each pass over a chunk; the last one leaves what is remembered


class Mlp(nn.Sequential):
    macs = 8 * WIDTH**2  # multiply-adds of a token: what a replayed one saves

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.action = nn.Embedding(3, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(Mlp() for _ in range(LAYERS))

    def forward(self, session, x, action):  # x [batch, channels, latent frames, rows, columns]
        h = self.enter(x.flatten(2).mT) + self.action(action)
        for i, (qkv, mlp) in enumerate(zip(self.qkv, self.mlp, strict=True)):
            q, k, v = qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            h = h + session.attend(i, q, k, v).transpose(1, 2).flatten(2)
            h = h + session.mlp(i, h, mlp)
        return self.leave(h).mT.reshape(x.shape)


class MyWorld(ts.VideoModel):
    name, actions, fps, size = "my-world", ".lr", 8, (8 * SIDE, 8 * SIDE)

    def __init__(self, device="cpu", dtype=torch.float32):
        torch.manual_seed(0)  # weights of your own would be loaded here
        self.transformer = Transformer().to(device, dtype).eval()

    def shape(self, size=None):
        head = WIDTH // HEADS
        return ts.Shape(LAYERS, HEADS, HEADS, head, WIDTH, (SIDE, SIDE), passes=len(NOISE))

    def rope(self, shape):  # how many channels of a head turn with time, row and column
        return ts.Rope(((12, (1, 0, 0)), (10, (0, 1, 0)), (10, (0, 0, 1))))

    def sample(self, session, actions, ready=None):
        kind = {"device": self.device, "dtype": self.dtype}
        action, clean = torch.as_tensor(actions, device=self.device), 0
        for step, level in enumerate(NOISE):
            noise = [torch.randn(3, 1, SIDE, SIDE, generator=g, **kind) for g in session.generators]
            x = (1 - level) * clean + level * torch.stack(noise)
            session.begin(session.positions(1), step, len(NOISE), [level])
            out = self.transformer(session, x, action).tanh()
            clean = out if level else x
        return clean

    def decode_latents(self, session, latents, video=0):
        pixels = latents[0, :, 0].permute(1, 2, 0).float().add(1).mul(127.5).byte().cpu().numpy()
        return pixels.repeat(8, 0).repeat(8, 1)[None]  # uint8 [F, H, W, 3]


if __name__ == "__main__":
    for plan in ("dense", "fast", "live"):
        with ts.open(MyWorld(), plan, seed=0) as stream:
            stats = [stream.step("l").stats for _ in range(40)][-1]
        pairs = stats["pairs"] / stats["pairs_dense"]
        print(f"{plan}: {pairs:.0%} of the pairs, {stats['cache_mb']:.2f} MB")
