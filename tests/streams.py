"""Feeds a session with random tokens, as a model would."""

import torch

from tachyscope.core.plan import Plan
from tachyscope.core.session import Session
from tachyscope.core.types import Rope, Shape

CHUNKS = Shape(layers=2, heads=4, kv_heads=2, head_dim=12, width=10, grid=(2, 3), chunk=2, passes=3)
TOKENS = Shape(
    layers=2, heads=4, kv_heads=2, head_dim=12, width=10, grid=(2, 3), token_by_token=True, batch=2,
    paired=True,
)  # fmt: skip
ROPE = Rope(((4, (1, 0, 0)), (4, (0, 1, 0)), (4, (0, 0, 1))))
INDEX = Rope(((12, (6, 3, 1)),), interleaved=False)


class Square:
    """An MLP that notes the rows it saw."""

    macs = 3

    def __init__(self):
        self.rows = 0

    def __call__(self, x):
        self.rows += x.shape[:-1].numel()
        return x * x + 1


def session(shape, plan, dtype=torch.float64, **kwargs):
    kind = "tokens" if shape.token_by_token else "chunks"
    base = "dense text=none " if not shape.text else ""
    rope = kwargs.pop("rope", INDEX if shape.token_by_token else ROPE)
    if shape.token_by_token:
        kwargs.setdefault("lengths", (5, 3)[: shape.batch])
    return Session(shape, Plan.parse(base + plan, kind), rope, dtype=dtype, **kwargs)


def draw(rng, shape, tokens, dtype=torch.float64, drift=1.0, base=None):
    """Random q, k, v [B, H, S, D] and x [B, S, W] of every layer; near `base` if drift is small."""
    made = []
    for i in range(shape.layers):
        sizes = [
            (shape.batch, h, tokens, shape.head_dim) for h in (shape.heads, *[shape.kv_heads] * 2)
        ]
        sizes.append((shape.batch, tokens, shape.width))
        part = [torch.randn(size, generator=rng, dtype=dtype) for size in sizes]
        if base is not None:
            part = [drift * x + b for x, b in zip(part, base[i], strict=True)]
        made.append(part)
    return made


def play_pass(at, layers, pos, step, steps, mlp=None):
    """One pass of a pretended model; each layer's attention and MLP outputs."""
    mlp = mlp or Square()
    layers = [[x.to(at.device) for x in part] for part in layers]
    pos = pos.to(at.device)
    at.begin(pos, step, steps, (0.0,) * at.shape.chunk)
    return [(at.attend(i, q, k, v), at.mlp(i, x, mlp)) for i, (q, k, v, x) in enumerate(layers)]


def play_prompt(at, rng):
    at_prompt = draw(rng, at.shape, at.memory.prompt, at.dtype)
    play_pass(at, at_prompt, at.memory.prompt_positions(), 0, 1)
    at.commit()


def play(at, chunks, seed=0, drift=0.3, mlp=None):
    """Whole chunks, all passes, committed: the outputs of every pass."""
    rng = torch.Generator().manual_seed(seed)
    shape, out = at.shape, []
    if shape.token_by_token:
        play_prompt(at, rng)
    base = draw(rng, shape, shape.max_pass_tokens, at.dtype)
    for _ in range(chunks):
        pos = shape.positions(at.memory.latent_frame, shape.chunk)
        for step in range(shape.passes):
            layers = draw(rng, shape, shape.max_pass_tokens, at.dtype, drift, base)
            if not shape.token_by_token:
                out += play_pass(at, layers, pos, step, shape.passes, mlp)
                continue
            for i in range(shape.max_pass_tokens):
                one = [[t.narrow(-2, i, 1) for t in part] for part in layers]
                out += play_pass(at, one, pos[i : i + 1], 0, 1, mlp)
        at.commit()
    return out


def assert_same(a, b, tolerance=0.0):
    for x, y in zip(a, b, strict=True):
        for left, right in zip(x, y, strict=True):
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
