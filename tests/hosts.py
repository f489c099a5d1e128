"""A small model and pipeline of Self-Forcing's shape, by its signatures, with its own KV cache."""

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, HEADS, DIM, TEXT, GRID = 2, 2, 16, 12, (2, 3)
TOKENS = GRID[0] * GRID[1]


def turns(length=64, theta=10000.0):
    """What a step along each axis turns a pair of channels by, [length, D / 2] complex."""
    side = 2 * (DIM // 6)
    widths = (DIM - 2 * side, side, side)
    speeds = [theta ** -(torch.arange(0, n, 2, dtype=torch.float64) / n) for n in widths]
    angles = torch.arange(length)[:, None] * torch.cat(speeds)
    return torch.polar(torch.ones_like(angles), angles)


def turned(x, freqs, start, frames):
    """x [B, S, H, D] turned by where its tokens stand from latent frame `start` on."""
    time = DIM // 2 - 2 * (DIM // 6)
    t, y, x_axis = freqs.split([time, DIM // 6, DIM // 6], 1)
    size = frames, *GRID
    grid = [
        t[start : start + frames].view(frames, 1, 1, -1).expand(*size, -1),
        y[: GRID[0]].view(1, GRID[0], 1, -1).expand(*size, -1),
        x_axis[: GRID[1]].view(1, 1, GRID[1], -1).expand(*size, -1),
    ]
    factor = torch.cat(grid, -1).flatten(0, 2)[:, None]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * factor).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM
        for name in "qkvo":
            setattr(self, name, nn.Linear(width, width))
        self.norm_q, self.norm_k = nn.RMSNorm(width), nn.RMSNorm(width)

    def heads(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_dim)


class SelfAttention(Attention):
    local_attn_size = -1

    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0,
        cache_start=None,
    ):  # fmt: skip
        q, k = self.heads(self.norm_q(self.q(x))), self.heads(self.norm_k(self.k(x)))
        v = self.heads(self.v(x))
        frames, rows, columns = grid_sizes[0].tolist()
        q, k = (turned(t, freqs, current_start // (rows * columns), frames) for t in (q, k))
        end = current_start + x.shape[1]
        kv_cache["k"][:, current_start:end], kv_cache["v"][:, current_start:end] = k, v
        kv_cache["global_end_index"].fill_(end)
        kv_cache["local_end_index"].fill_(end)
        first = 0 if self.local_attn_size < 0 else max(0, end - self.local_attn_size * TOKENS)
        k, v = (kv_cache[name][:, first:end].transpose(1, 2) for name in "kv")
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class CrossAttention(Attention):
    def forward(self, x, context, context_lens, crossattn_cache=None):
        if not crossattn_cache["is_init"]:
            crossattn_cache["is_init"] = True
            crossattn_cache["k"] = self.heads(self.norm_k(self.k(context)))
            crossattn_cache["v"] = self.heads(self.v(context))
        q, k, v = self.heads(self.norm_q(self.q(x))), crossattn_cache["k"], crossattn_cache["v"]
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, attention):
        super().__init__()
        self.self_attn, self.cross_attn = attention(width), CrossAttention(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, e, context, kv_cache, crossattn_cache, current_start, **rest):
        where = {"kv_cache": kv_cache, "current_start": current_start}
        y = self.self_attn(x + e, **rest, **where)
        y, update = y if isinstance(y, tuple) else (y, None)
        x = x + y
        x = x + self.cross_attn(x, context, None, crossattn_cache=crossattn_cache)
        x = x + self.ffn(x)
        return x if update is None else (x, update)


class Model(nn.Module):
    patch_size, text_len, num_frame_per_block, block_mask = (1, 2, 2), TEXT, 3, None

    def __init__(self, attention=SelfAttention):
        super().__init__()
        width = HEADS * DIM
        self.patch = nn.Conv3d(4, width, self.patch_size, self.patch_size)
        self.text_embedding = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, attention) for _ in range(LAYERS))
        self.head = nn.Linear(width, 16)
        self.freqs = turns()

    def forward(self, *args, **kwargs):
        return self._forward_inference(*args, **kwargs)

    def _forward_inference(
        self, x, t, context, seq_len, kv_cache=None, crossattn_cache=None, current_start=0, **more
    ):
        h = self.patch(torch.stack(list(x)))
        sizes = torch.tensor([h.shape[2:]] * len(h))
        h, context = h.flatten(2).transpose(1, 2), self.text_embedding(context)
        e = (t.float() / 1000).to(h)  # a time a video, or a latent frame
        e = e.view(-1, 1, 1) if e.dim() == 1 else e.repeat_interleave(TOKENS, 1).unsqueeze(2)
        updates = []
        for i, block in enumerate(self.blocks):
            h = block(
                h, e, context, kv_cache[i], crossattn_cache[i], current_start, seq_lens=None,
                grid_sizes=sizes, freqs=self.freqs, block_mask=self.block_mask, **more,
            )  # fmt: skip
            h, update = h if isinstance(h, tuple) else (h, None)
            if update is not None:
                updates.append((i, update))
        if updates:
            self._apply_cache_updates(kv_cache, updates)
        y = self.head(h).unflatten(1, sizes[0].tolist()).unflatten(-1, (4, 2, 2))
        return y.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, context, t, kv_cache, crossattn_cache, current_start, **more):
        return self.model(
            x, t, context, 0, kv_cache=kv_cache, crossattn_cache=crossattn_cache,
            current_start=current_start, **more,
        )  # fmt: skip


class Pipeline:
    """`inference` goes chunk by chunk: a pass a step, then a clean pass that leaves the KV."""

    def __init__(self, model, frames=30):
        self.generator, self.frames = Wrapper(model), frames
        self.denoising_step_list, self.num_frame_per_block = [1000, 500], 3
        self.num_transformer_blocks, self.kv_cache1 = LAYERS, None

    def _initialize_kv_cache(self, batch_size, dtype, device):
        new = lambda: torch.zeros(batch_size, self.frames * TOKENS, HEADS, DIM, dtype=dtype)  # noqa: E731
        ends = ("global_end_index", "local_end_index")
        self.kv_cache1 = [
            {"k": new(), "v": new()} | {name: torch.zeros(1, dtype=torch.long) for name in ends}
            for _ in range(LAYERS)
        ]

    def recache(self, run, past):
        """Nothing: keys and values of an old prompt stay."""

    @torch.no_grad()
    def inference(self, noise, context, given=None, switch=None):
        """noise [B, F, C, H, W]; context [B, L, W]; `switch`: (frame, context) of a new prompt."""
        batch = noise.shape[0]
        if self.kv_cache1 is None:
            self._initialize_kv_cache(batch, noise.dtype, noise.device)
        self.crossattn_cache = [{"is_init": False} for _ in range(LAYERS)]

        def run(x, t, frame):
            where = self.kv_cache1, self.crossattn_cache, frame * TOKENS
            time = torch.full((batch,), float(t))
            return self.generator(x.transpose(1, 2), context, time, *where).transpose(1, 2)

        out, start = [], 0
        for part in () if given is None else given.split(self.num_frame_per_block, 1):
            run(part, 0, start)
            out, start = [*out, part], start + part.shape[1]
        for x in noise.split(self.num_frame_per_block, 1):
            if switch is not None and start == switch[0]:
                context = switch[1]
                for store in self.crossattn_cache:
                    store["is_init"] = False
                self.recache(run, torch.cat(out, 1))
            for t in self.denoising_step_list:
                x = run(x, t, start)
            run(x, 0, start)
            out, start = [*out, x], start + x.shape[1]
        return torch.cat(out, 1)


def make_pipeline(seed=0):
    torch.manual_seed(seed)
    return Pipeline(Model().eval())


def inputs(frames=12, batch=1, seed=1):
    """Noise and an embedded prompt of five tokens and padding."""
    rng = torch.Generator().manual_seed(seed)
    context = torch.zeros(batch, TEXT, 8)
    context[:, :5] = torch.randn(batch, 5, 8, generator=rng)
    return torch.randn(batch, frames, 4, 4, 6, generator=rng), context
