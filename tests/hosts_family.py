"""Small models and pipelines of Self-Forcing's shape, each with what is its authors' own."""

import torch
from hosts import DIM, HEADS, LAYERS, TOKENS, Model, Pipeline, SelfAttention, turned
from torch import nn
from torch.nn import functional as F


def read(part, q, k, v, mask=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return part.o(y.transpose(1, 2).flatten(2))


class Family(SelfAttention):
    per_frame = TOKENS  # by which it counts latent frames: a number in some authors' code

    def qkv(self, x):
        q, k = self.heads(self.norm_q(self.q(x))), self.heads(self.norm_k(self.k(x)))
        return q, k, self.heads(self.v(x))


class CausVid(Family):
    """It is told where a chunk ends."""

    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0,
        current_end=0,
    ):  # fmt: skip
        q, k, v = self.qkv(x)
        frame, frames = current_start // TOKENS, grid_sizes[0, 0].item()
        current_end = current_end or current_start + x.shape[1]
        q, k = (turned(t, freqs, frame, frames) for t in (q, k))
        kv_cache["k"][:, current_start:current_end] = k
        kv_cache["v"][:, current_start:current_end] = v
        return read(self, q, *(kv_cache[name][:, :current_end] for name in "kv"))


class RewardForcing(Family):
    """It has a sink in its cache's dicts."""

    sink_size = 3

    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0,
        cache_start=None,
    ):  # fmt: skip
        kv_cache["sink"] = self.sink_size
        where = seq_lens, grid_sizes, freqs, block_mask, kv_cache, current_start, cache_start
        return super().forward(x, *where)


class LongLive(Family):
    """Its cache is written after the last layer."""

    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0,
        cache_start=None, sink_recache_after_switch=False,
    ):  # fmt: skip
        q, k, v = self.qkv(x)
        frame, frames = current_start // TOKENS, grid_sizes[0, 0].item()
        q, k = (turned(t, freqs, frame, frames) for t in (q, k))
        end = current_start + x.shape[1]
        now = {"k": k, "v": v}
        past = (torch.cat([kv_cache[n][:, :current_start], now[n]], 1) for n in "kv")
        return read(self, q, *past), (end, end, {"at": current_start, **now})


class LongLiveModel(Model):
    def _apply_cache_updates(self, kv_cache, updates):
        for layer, (end, _, update) in updates:
            if update is not None:
                for name in "kv":
                    kv_cache[layer][name][:, update["at"] : end] = update[name]


class LongLivePipeline(Pipeline):
    """A new prompt: the frames so far are run through again by it, in one pass.

    The authors make a block-causal mask for it, which their cached attention does not take.
    """

    def recache(self, run, past):
        run(past, 0, 0)
        for store in self.crossattn_cache:
            store["is_init"] = False


class InfiniteForcing(Family):
    """Its cache holds keys before RoPE; positions are counted in a window behind a sink."""

    sink, window = 1, 64  # latent frames

    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0,
        cache_start=None,
    ):  # fmt: skip
        q, k, v = self.qkv(x)
        frames, end = grid_sizes[0, 0].item(), current_start + x.shape[1]
        kv_cache["k"][:, current_start:end], kv_cache["v"][:, current_start:end] = k, v
        sink = self.sink * TOKENS
        first = max(sink, end - (self.window - self.sink) * TOKENS)
        k, v = (torch.cat([kv_cache[n][:, :sink], kv_cache[n][:, first:end]], 1) for n in "kv")
        if end <= sink:
            k, v = (kv_cache[n][:, :end] for n in "kv")
        length = k.shape[1] // TOKENS
        return read(self, turned(q, freqs, length - frames, frames), turned(k, freqs, 0, length), v)


class RollingForcing(Family):
    """A pass goes over several chunks; one of clean frames leaves the first of them."""

    view, sink = 64, 3  # latent frames that a pass sees, its own counted

    def __init__(self, width):
        super().__init__(width)
        self.frame_length, self.block_length = TOKENS, 3 * TOKENS

    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0,
        cache_start=None, updating_cache=False,
    ):  # fmt: skip
        per_frame, block = self.frame_length, self.block_length
        q, k, v = self.qkv(x)
        frame, frames = current_start // per_frame, grid_sizes[0, 0].item()
        raw, (q, k) = k, (turned(t, freqs, frame, frames) for t in (q, k))
        start, sink = current_start, self.sink * per_frame
        new = slice(start, start + block)
        kv_cache["k"][:, new] = (raw if not start else k)[:, :block]  # the anchor is not turned
        kv_cache["v"][:, new] = v[:, :block]
        if not start:
            return read(self, q, k, v)
        room = self.view * per_frame - x.shape[1]
        if updating_cache:
            first = max(0, start - room)
            past_k, past_v = (kv_cache[n][:, first:start].clone() for n in "kv")
            if not first:
                past_k[:, :sink] = turned(past_k[:, :sink], freqs, 0, self.sink)
        else:
            first = max(sink, start - (room - sink))
            at = frame - (start - first) // per_frame - self.sink
            anchor = turned(kv_cache["k"][:, :sink], freqs, at, self.sink)
            past_k = torch.cat([anchor, kv_cache["k"][:, first:start]], 1)
            past_v = torch.cat([kv_cache["v"][:, :sink], kv_cache["v"][:, first:start]], 1)
        return read(self, q, torch.cat([past_k, k], 1), torch.cat([past_v, v], 1))


class RollingPipeline(Pipeline):
    """Each pass finishes one chunk, and those behind it are a step less far each."""

    def __init__(self, model, frames=30):
        super().__init__(model, frames)
        self.denoising_step_list, self.kv_cache_clean = [1000, 750, 500], None
        del self.kv_cache1

    def _initialize_kv_cache(self, batch_size, dtype, device):
        size = batch_size, self.frames * TOKENS, HEADS, DIM
        self.kv_cache_clean = [
            {name: torch.zeros(size, dtype=dtype) for name in "kv"}
            | {f"{name}_end_index": torch.zeros(1).long() for name in ("global", "local")}
            for _ in range(LAYERS)
        ]

    @torch.no_grad()
    def inference(self, noise, context):
        steps, block = self.denoising_step_list, self.num_frame_per_block
        if self.kv_cache_clean is None:
            self._initialize_kv_cache(len(noise), noise.dtype, noise.device)
        cross = [{"is_init": False} for _ in range(LAYERS)]
        made, (chunks, window) = noise.clone(), (noise.shape[1] // block, len(steps))

        def run(x, t, frame, **more):
            where = self.kv_cache_clean, cross, frame * TOKENS
            return self.generator(x.transpose(1, 2), context, t, *where, **more).transpose(1, 2)

        for number in range(chunks + window - 1):
            first, last = max(0, number - window + 1), min(chunks - 1, number)
            now = slice(first * block, (last + 1) * block)
            level = [steps[number - chunk] for chunk in range(first, last + 1)]
            t = torch.tensor(level).float().repeat_interleave(block)[None].expand(len(noise), -1)
            made[:, now] = run(made[:, now], t, now.start)
            clean = slice(now.start, now.start + block)
            run(made[:, clean], 0 * t[:, :block], now.start, updating_cache=True)
        return made


class Krea(Family):
    """Fused projections, and a pass behind a block-causal mask that fills an empty cache."""

    fused_projections = False

    def fuse_projections(self):
        parts = [self.q, self.k, self.v]
        self.to_qkv = nn.Linear(parts[0].in_features, 3 * parts[0].out_features)
        for name in ("weight", "bias"):
            getattr(self.to_qkv, name).data = torch.cat([getattr(p, name).data for p in parts])
        self.fused_projections = True

    def forward(
        self, x, seq_lens, grid_sizes, freqs, block_mask, kv_cache=None, current_start=0,
        cache_start=None,
    ):  # fmt: skip
        q, k, v = self.to_qkv(x).chunk(3, -1) if self.fused_projections else self.parts(x)
        q, k, v = self.heads(self.norm_q(q)), self.heads(self.norm_k(k)), self.heads(v)
        frames, start = grid_sizes[0, 0].item(), current_start
        if block_mask is not None:
            start = 0
            kv_cache["global_end_index"] = kv_cache["local_end_index"] = 0
        q, k = (turned(t, freqs, start // self.per_frame, frames) for t in (q, k))
        first = start + kv_cache["local_end_index"] - kv_cache["global_end_index"]
        first, end = int(first), int(first) + x.shape[1]
        if kv_cache["global_end_index"] > start:  # another pass over the chunk
            end = int(kv_cache["local_end_index"])
            first = end - x.shape[1]
        kv_cache["k"][:, first:end], kv_cache["v"][:, first:end] = k, v
        kv_cache["global_end_index"], kv_cache["local_end_index"] = start + x.shape[1], end
        return read(self, q, *(kv_cache[name][:, :end] for name in "kv"), block_mask)

    def parts(self, x):
        return self.q(x), self.k(x), self.v(x)


class KreaPipeline(Pipeline):
    """A server's: before each chunk the last frames are run through again, in an empty cache."""

    kept = 6  # latent frames

    @torch.no_grad()
    def inference(self, noise, context):
        model, block = self.generator.model, self.num_frame_per_block
        out = noise[:, :0]
        for x in noise.split(block, 1):
            self._initialize_kv_cache(len(noise), noise.dtype, noise.device)
            cross = [{"is_init": False} for _ in range(LAYERS)]
            past = out[:, -self.kept :]
            start = past.shape[1]

            def run(x, t, frame, cross=cross):
                where = self.kv_cache1, cross, frame * TOKENS
                time = torch.full((len(x), x.shape[1]), float(t))
                return self.generator(x.transpose(1, 2), context, time, *where).transpose(1, 2)

            if start:
                chunk = torch.arange(start * TOKENS) // (block * TOKENS)
                model.block_mask = chunk[:, None] >= chunk
                run(past, 0, start)
                model.block_mask = None
            for t in self.denoising_step_list:
                x = run(x, t, start)
            out = torch.cat([out, x], 1)
        return out


FAMILY = {
    "self-forcing": (SelfAttention, Model, Pipeline),
    "causvid": (CausVid, Model, Pipeline),
    "reward-forcing": (RewardForcing, Model, Pipeline),
    "longlive": (LongLive, LongLiveModel, LongLivePipeline),
    "infinite-forcing": (InfiniteForcing, Model, Pipeline),
    "rolling-forcing": (RollingForcing, Model, RollingPipeline),
    "krea": (Krea, Model, KreaPipeline),
}


def make(name, seed=0):
    attention, model, pipeline = FAMILY[name]
    torch.manual_seed(seed)
    return pipeline(model(attention).eval())
