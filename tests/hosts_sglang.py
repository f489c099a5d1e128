"""SGLang's causal Wan by the signatures of sglang 0.5.23: its model, attention, caches and hooks.

Recorded, since the wheel imports CUDA builds of torchvision and sgl-kernel; `installed` gives the
package's own classes where it is there.
"""

import contextlib
import functools
import importlib
import os
import socket
import sys
import types
from dataclasses import dataclass

import torch
from hosts import DIM, GRID, HEADS, LAYERS, TOKENS, turns
from torch import nn
from torch.nn import functional as F

from tachyscope.integrations.sglang import ATTENTION, MODEL, STAGE

PLUGINS = "sglang.multimodal_gen.runtime.platforms.plugins"
CHANNELS, BLOCK = 4, 3


@dataclass(slots=True)
class Store:
    """One layer's keys and values of a request: no attribute can be added."""

    k: torch.Tensor
    v: torch.Tensor
    global_end_index: torch.Tensor
    local_end_index: torch.Tensor
    cache_size: int = 0

    def __post_init__(self):
        self.cache_size = self.cache_size or self.k.shape[1]

    def reset_indices(self):
        self.global_end_index.zero_()

    def visible(self, key, value, start):
        """All that a window of `cache_size` tokens sees, the new ones at its end."""
        new = start + key.shape[1]
        self.k, self.v = (
            torch.cat([x[:, :start], y], 1) for x, y in ((self.k, key), (self.v, value))
        )
        self.global_end_index.fill_(new)
        first = max(0, new - self.cache_size)
        return self.k[:, first:], self.v[:, first:]


def turn(x, freqs_cis):
    cos, sin = (part[None, :, None] for part in freqs_cis)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


class CausalWanSelfAttention(nn.Module):
    def forward(
        self, q, k, v, freqs_cis, block_mask, kv_cache=None, current_start=0, cache_start=None
    ):
        k, v = kv_cache.visible(turn(k, freqs_cis), v, current_start)
        y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (turn(q, freqs_cis), k, v)))
        return y.transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width, attention):
        super().__init__()
        self.qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn1 = attention()

    def forward(self, x, freqs_cis, kv_cache, current_start):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        y = self.attn1(q, k, v, freqs_cis, None, kv_cache, current_start, 0)
        return x + self.to_out(y.flatten(2))


class CausalWanTransformer3DModel(nn.Module):
    patch_size, num_frame_per_block = (1, 2, 2), BLOCK

    def __init__(self, attention=CausalWanSelfAttention):
        super().__init__()
        width = HEADS * DIM
        self.patch = nn.Conv3d(CHANNELS, width, self.patch_size, self.patch_size)
        self.blocks = nn.ModuleList(Block(width, attention) for _ in range(LAYERS))
        self.head, self.turns = nn.Linear(width, 4 * CHANNELS), turns()

    def forward(
        self, hidden_states, encoder_hidden_states, timestep, encoder_hidden_states_image=None,
        kv_cache=None, crossattn_cache=None, current_start=0, cache_start=0, start_frame=0,
    ):  # fmt: skip
        h = self.patch(hidden_states)
        frames = h.shape[2]
        time, rows, columns = self.turns.split([DIM // 2 - 2 * (DIM // 6), DIM // 6, DIM // 6], 1)
        grid = frames, *GRID
        parts = (
            time[start_frame : start_frame + frames].view(frames, 1, 1, -1).expand(*grid, -1),
            rows[: GRID[0]].view(1, GRID[0], 1, -1).expand(*grid, -1),
            columns[: GRID[1]].view(1, 1, GRID[1], -1).expand(*grid, -1),
        )
        angle = torch.cat(parts, -1).flatten(0, 2)
        h = h.flatten(2).mT + timestep.view(-1, 1, 1) / 1000
        for block, store in zip(self.blocks, kv_cache, strict=True):
            h = block(h, (angle.real.float(), angle.imag.float()), store, current_start)
        y = self.head(h).unflatten(1, grid).unflatten(-1, (CHANNELS, 2, 2))
        return y.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)


class CausalDMDDenoisingStage:
    def __init__(self, transformer):
        self.transformer = transformer

    def _allocate_causal_kv_cache(
        self, *, batch_size, kv_cache_size, num_attention_heads, attention_head_dim, dtype, device
    ):
        size = batch_size, kv_cache_size, num_attention_heads, attention_head_dim
        new = functools.partial(torch.zeros, size, dtype=dtype, device=device)
        end = functools.partial(torch.zeros, 1, dtype=torch.long)
        return [Store(new(), new(), end(), end(), kv_cache_size) for _ in self.transformer.blocks]


for path, kind in (
    (MODEL, CausalWanTransformer3DModel),
    (ATTENTION, CausalWanSelfAttention),
    (STAGE, CausalDMDDenoisingStage),
):
    kind.__module__ = path.rpartition(".")[0]
KINDS = {MODEL: CausalWanTransformer3DModel, ATTENTION: CausalWanSelfAttention}
KINDS[STAGE] = CausalDMDDenoisingStage


def put_hooks(monkeypatch):
    """A module of the name that `register` imports; hooks act at once, and are undone."""

    def register(target, hook, kind):
        path, _, name = target.rpartition(".")
        inner = getattr(KINDS[path], name)

        @functools.wraps(inner)
        def around(*args, **kwargs):
            return hook(inner, *args, **kwargs)

        monkeypatch.setattr(KINDS[path], name, around)

    module = types.ModuleType(PLUGINS)
    module.HookRegistry = types.SimpleNamespace(register=register)
    module.HookType = types.SimpleNamespace(AROUND="around")
    monkeypatch.setitem(sys.modules, PLUGINS, module)


class Recorded:
    """A small model and its stage."""

    head_dim = DIM

    def __init__(self, monkeypatch):
        put_hooks(monkeypatch)
        torch.manual_seed(0)
        self.model = CausalWanTransformer3DModel().eval()
        self.stage = CausalDMDDenoisingStage(self.model)
        self.running = contextlib.nullcontext

    def cross(self):
        return [None] * LAYERS

    def apply(self):
        pass


class Installed:
    """The package's own, on a CPU: a tensor op of sgl-kernel's is all that is replaced."""

    head_dim = 24

    def __init__(self, monkeypatch):
        root = "sglang.multimodal_gen"
        load = importlib.import_module
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in (where | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}).items():
            os.environ.setdefault(name, value)
        parallel = load(f"{root}.runtime.distributed")
        parallel.maybe_init_distributed_environment_and_model_parallel(tp_size=1, sp_size=1)
        configs = load(f"{root}.configs.models.dits.longlive2")
        arch = configs.LongLive2ArchConfig(
            num_attention_heads=HEADS, attention_head_dim=self.head_dim, in_channels=CHANNELS,
            out_channels=CHANNELS, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=LAYERS,
            num_frames_per_block=BLOCK,
        )  # fmt: skip
        layer = load(f"{root}.runtime.layers.attention.layer")
        sdpa = load(f"{root}.runtime.layers.attention.backends.sdpa").SDPABackend
        op = load(f"{root}.runtime.layers.custom_op").CustomOp
        for owner, name, value in (
            (layer, "get_attn_backend", lambda *_, **__: sdpa),
            (layer, "get_compute_dtype", lambda *_, **__: torch.float32),
            (layer, "_resolve_sp_attention_mode", lambda *_, **__: ("ulysses", False)),
            (layer, "_maybe_install_backend_autotune", lambda *_, **__: None),
            (op, "dispatch_forward", lambda op: op.forward_native),
        ):
            monkeypatch.setattr(owner, name, value)
        torch.manual_seed(0)
        kind = load(f"{root}.runtime.models.dits.longlive2").LongLive2Transformer3DModel
        config = configs.LongLive2VideoConfig(arch_config=arch)
        self.model = kind(config, hf_config={}).float().eval()
        for name, weight in self.model.named_parameters():
            weight.data = 0.2 * torch.randn_like(weight)
            if "norm" in name:
                weight.data += 1
        stage = load(STAGE.rpartition(".")[0]).CausalDMDDenoisingStage
        self.stage = stage.__new__(stage)
        self.stage.transformer, self.stage.num_transformer_blocks = self.model, LAYERS
        forward = load(f"{root}.runtime.managers.forward_context").set_forward_context
        self.running = lambda: forward(0, None, forward_batch=None)
        kept = load(f"{root}.runtime.layers.kvcache.causal_attention_cache")
        self.cross_kind, self.plugins = kept.CrossAttentionKVCache, load(PLUGINS)

    def cross(self):
        size = 1, 5, HEADS, self.head_dim
        return [self.cross_kind(torch.zeros(size), torch.zeros(size)) for _ in range(LAYERS)]

    def apply(self):
        self.plugins.HookRegistry.apply_hooks()


def stores(host, frames):
    """A request's caches, of so many latent frames."""
    return host.stage._allocate_causal_kv_cache(
        batch_size=1, kv_cache_size=frames * TOKENS, num_attention_heads=HEADS,
        attention_head_dim=host.head_dim, dtype=torch.float32, device="cpu",
    )  # fmt: skip


@torch.no_grad()
def video(host, kept, frames=12, seed=1, offset=0):
    """Chunk by chunk, as the server's stage does it; yields after each."""
    rng, cross = torch.Generator().manual_seed(seed), host.cross()
    context = torch.randn(1, 5, 16, generator=rng)
    for frame in range(0, frames, BLOCK):
        x = torch.randn(1, CHANNELS, BLOCK, 2 * GRID[0], 2 * GRID[1], generator=rng)
        for t in (1000, 500, 0):
            with host.running():
                y = host.model(
                    x, context, torch.tensor([[t]]), kv_cache=kept, crossattn_cache=cross,
                    current_start=frame * TOKENS, start_frame=frame + offset,
                )  # fmt: skip
            x = x - 0.5 * y if t else x
        yield x
