"""Any causal language model of transformers as a token model.

The model's own code runs, on a copy of its modules that shares every weight: its rotary embedding
turns nothing, its attention and its MLPs are the session's. Whatever else a layer does, it does.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.core.errors import TachyscopeError, first_line
from tachyscope.core.limits import ASKED, check, whole, within
from tachyscope.core.session import Session
from tachyscope.core.types import Mlp, Rope, Shape, SliceableMlp
from tachyscope.memory.allocations import FreeAttention, peak, tensor_bytes
from tachyscope.models.base import MemoryParts
from tachyscope.models.llama import SwiGlu
from tachyscope.models.token_model import Attends, OneCodeModel, Sampler

NAME = "tachyscope"  # of our attention among transformers'
BLOCK = 8  # pixels of a token in a preview
UNSUPPORTED = ("sliding_window", "softcap", "s_aux")  # what attention functions may be told
GREEDY = Sampler(cfg=1.0, top_k=1, top_p=1.0)

_attends: ContextVar[Attends] = ContextVar("attends")  # who serves the present pass

Decode = Callable[[Tensor], np.ndarray]


def token_adapter(
    model: Any,
    tokens_per_frame: int | tuple[int, int],
    prompt_len: int,
    *,
    sampler: Sampler = GREEDY,
    tokenizer: Any = None,
    decode: Decode | None = None,
) -> CausalLm:
    """A transformers `*ForCausalLM` as a model that streams open; the model itself is not changed.

    tokens_per_frame: or (rows, columns). prompt_len: the most ids of a prompt. sampler: how tokens
    are drawn; greedily if none is given. tokenizer: transformers' own for prompts; without one a
    prompt is ids, as "1 5 7". decode: frames uint8 [F, H, W, 3] of tokens [F, rows, columns]; a
    preview without it.
    """
    grid = _grid(tokens_per_frame)
    check("prompt tokens", prompt_len, "`prompt_len`")
    adapter = CausalLm(_Copy(model), grid, prompt_len, sampler, tokenizer, decode)
    adapter.check_parity(model)
    return adapter


class CausalLm(OneCodeModel):
    """A causal language model behind the session: a token of its vocabulary a place."""

    transformer: _Copy
    actions = ""
    fps = 8

    def __init__(
        self,
        transformer: _Copy,
        grid: tuple[int, int],
        prompt_len: int,
        sampler: Sampler,
        tokenizer: Any,
        decode: Decode | None,
    ) -> None:
        self.transformer, self.grid, self.prompt_len = transformer, grid, prompt_len
        self.sampler, self.tokenizer, self._decode = sampler, tokenizer, decode
        weight = transformer.head.weight
        self.codes, self.draw_macs = weight.shape[0], weight.numel()
        self.device, self.dtype = weight.device, weight.dtype
        self.name = str(transformer.decoder.config.model_type)
        self.size = grid[0] * BLOCK, grid[1] * BLOCK

    @property
    def mlps(self) -> Sequence[SliceableMlp]:
        fns = [mlp.fn for mlp in self.transformer.mlps]
        return [mlp for mlp in fns if isinstance(mlp, SwiGlu)] if _gated(fns) else ()

    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        self.check_size(size)
        t, guided = self.transformer, self.sampler.guided
        return Shape(
            layers=len(t.mlps),
            heads=t.heads,
            kv_heads=t.kv_heads,
            head_dim=t.head_dim,
            width=t.width,
            grid=self.grid,
            token_by_token=True,
            batch=2 if guided else 1,
            paired=guided,
            macs=t.macs,
        )

    def rope(self, shape: Shape) -> Rope:
        weights = (float(shape.tokens_per_frame), float(shape.grid[1]), 1.0)
        t = self.transformer
        axes = ((t.head_dim, weights),)
        return Rope(axes, interleaved=False, speeds=t.speeds, amplitude=t.amplitude)

    def pixel_frames(self, latents: int) -> int:
        return latents

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        size = shape.batch, max(prompt, 1), shape.width
        x = torch.empty(size, dtype=self.dtype, device="meta")
        return MemoryParts(
            weights=tensor_bytes(self.transformer.parameters()),
            decoder=0,  # the caller's
            decoder_state=0,
            prompt=0,  # in the cache
            activations=peak(lambda: self.run_trunk(FreeAttention(), x)),
            decoding=0,
        )

    def prompt_ids(self, prompt: str) -> list[int]:
        if self.tokenizer is not None:
            ids = [int(i) for i in self.tokenizer(prompt).input_ids]
        else:
            ids = [whole(part, "a prompt's id") for part in prompt.split()]
        if not 1 <= len(ids) <= self.prompt_len:
            raise TachyscopeError(
                f"a prompt of {self.name} has 1 to {self.prompt_len} tokens, got {len(ids)}: "
                f"{'shorten it, or raise prompt_len' if ids else 'give one'}"
            )
        if odd := [i for i in ids if not 0 <= i < self.codes]:
            raise TachyscopeError(
                f"a prompt's ids are from 0 to {self.codes - 1}, got {odd[0]}: give the model's own"
            )
        return ids

    def embed_prompt(self, ids: Tensor) -> Tensor:
        x: Tensor = self.transformer.embedding(ids)
        return x

    def embed(self, codes: Tensor, actions: int | Tensor | None) -> Tensor:
        x: Tensor = self.transformer.embedding(codes[..., 0])
        return x

    def run_trunk(self, session: Attends, x: Tensor) -> Tensor:
        states: Tensor = self.transformer(session, x)
        return states

    def head(self, states: Tensor) -> Tensor:
        logits: Tensor = self.transformer.head(states)
        return logits

    def encode_frames(self, frames: np.ndarray) -> Tensor:
        raise TachyscopeError(
            f"{self.name} has no encoder for first frames: give their tokens in the prompt"
        )

    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        tokens = latents[0, ..., 0]
        if self._decode is not None:
            return self._decode(tokens)
        levels = [(tokens * by) % 256 for by in (1, 29, 101)]
        small = torch.stack(levels, -1).to(torch.uint8).cpu()
        return small.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2).numpy()

    @torch.no_grad()
    def check_parity(self, model: Any) -> None:
        """Raise unless the copy's logits are the model's: it may do what a session does not."""
        ids = torch.arange(8, device=self.device)[None] * 7 % self.codes
        pos = torch.zeros(8, 3, dtype=torch.float32, device=self.device)
        pos[:, 2] = torch.arange(8, device=self.device)
        stand_in = _Whole(self.rope(self.shape()), pos)
        want = model(input_ids=ids, use_cache=False).logits.float()
        try:
            states = self.run_trunk(stand_in, self.embed_prompt(ids))
            logits = self.transformer.head(states).float()
        except RuntimeError as fault:  # of shapes that do not meet
            raise TachyscopeError(
                f"{self.name} does what a session does not ({first_line(fault)}): use a model with "
                f"rotary positions in halves and plain causal attention in every layer"
            ) from fault
        off = float((logits - want).norm() / want.norm())
        # transformers' rotary table is of float32 in every dtype
        if not off < max(1e-5, math.sqrt(torch.finfo(self.dtype).eps)):
            raise TachyscopeError(
                f"{self.name} does what a session does not: its logits come out {off:.1g} off: use "
                f"a model with rotary positions in halves and plain causal attention in every layer"
            )


class _Copy(nn.Module):
    """A model's modules, its weights shared, whose attention and MLPs are the session's."""

    speeds: tuple[float, ...]

    def __init__(self, model: Any) -> None:
        super().__init__()
        register_attention()
        held = [*model.parameters(), *model.buffers()]
        # what is in the memo is taken as it is
        twin = copy.deepcopy(model, {id(x): x for x in held}).eval()
        get = getattr(twin, "get_decoder", None)
        decoder = get() if callable(get) else None
        layers, rotary, config = _parts(decoder, "layers", "rotary_emb", "config")
        speeds = getattr(rotary, "inv_freq", None)
        has = layers and all(isinstance(getattr(x, "mlp", None), nn.Module) for x in layers)
        if decoder is None or not has or not isinstance(speeds, Tensor):
            raise TachyscopeError(
                f"a token adapter takes a transformers causal LM whose decoder has layers with an "
                f"mlp, and a rotary_emb, got {type(model).__name__}: give such a one"
            )
        self.decoder, self.head = decoder, twin.get_output_embeddings()
        self.embedding = twin.get_input_embeddings()
        self.heads, self.width = config.num_attention_heads, config.hidden_size
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim = 2 * len(speeds)
        wide = getattr(config, "head_dim", None) or self.width // self.heads
        if wide != self.head_dim:
            raise TachyscopeError(
                f"{type(model).__name__} rotates {self.head_dim} of a head's {wide} channels, and "
                f"a session all of them: use another model"
            )
        self.speeds = tuple(speeds.double().tolist())
        self.amplitude = float(getattr(rotary, "attention_scaling", 1.0))
        decoder.rotary_emb = _NoRotation(self.head_dim)
        self.mlps = [_SessionMlp(i, layer.mlp) for i, layer in enumerate(layers)]
        for layer, mlp in zip(layers, self.mlps, strict=True):
            layer.mlp = mlp
        inside = {id(x) for mlp in self.mlps for x in mlp.modules()}
        linears = [x for x in layers.modules() if isinstance(x, nn.Linear) and id(x) not in inside]
        self.macs = sum(x.weight.numel() for x in linears)
        config._attn_implementation = NAME

    def forward(self, session: Attends, x: Tensor) -> Tensor:
        """States [B, S, W], normed, for inputs x [B, S, W]."""
        before = _attends.set(session)
        try:
            states: Tensor = self.decoder(inputs_embeds=x, use_cache=False).last_hidden_state
        finally:
            _attends.reset(before)
        return states


class _NoRotation(nn.Module):
    """In a rotary embedding's place: queries and keys come to the session as they are."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, *places: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:
        size = 1, x.shape[1], self.head_dim
        return x.new_ones(size), x.new_zeros(size)


class _SessionMlp(nn.Module):
    """In an MLP's place: asks the session for it."""

    def __init__(self, layer: int, mlp: nn.Module) -> None:
        super().__init__()
        self.layer, self.fn = layer, _shared(mlp)

    def forward(self, x: Tensor) -> Tensor:
        return _attends.get().mlp(self.layer, x, self.fn)


class _Plain(nn.Module):
    """An MLP of unknown parts: it can be left out, not sliced."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner = mlp
        linears = [x for x in mlp.modules() if isinstance(x, nn.Linear)]
        self.macs = sum(x.weight.numel() for x in linears)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def _shared(mlp: Any) -> SwiGlu | _Plain:
    """An MLP with its weights as they are: opened where it is LLaMA's."""
    names = "gate_proj", "up_proj", "down_proj"
    parts = _parts(mlp, *names)
    act = getattr(mlp, "act_fn", None)
    known = isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation" or act is F.silu
    plain = all(isinstance(part, nn.Linear) and part.bias is None for part in parts)
    if not (known and plain):
        return _Plain(mlp)
    with torch.device("meta"):
        shared = SwiGlu(mlp.gate_proj.in_features, mlp.gate_proj.out_features)
    for name, part in zip(names, parts, strict=True):
        getattr(shared, name).weight = part.weight
    return shared


class _Whole:
    """Stands in for a session: one pass over all tokens."""

    def __init__(self, rope: Rope, pos: Tensor) -> None:
        self.rope, self.pos = rope, pos

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (self.rope.rotate(x, self.pos) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        return fn(x)


def register_attention() -> None:
    """Make the session's attention known to transformers, by our name."""
    try:
        transformers = importlib.import_module("transformers")
        masks = importlib.import_module("transformers.masking_utils").AttentionMaskInterface
    except ImportError:
        raise TachyscopeError(
            "a token adapter needs transformers, which is not installed: pip install -e '.[hf]'"
        ) from None
    transformers.AttentionInterface.register(NAME, _attend)
    masks.register(NAME, _no_mask)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call for attention."""
    if odd := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise TachyscopeError(
            f"{type(module).__name__} asks for attention with {odd[0]}, which no session has: "
            f"use a model of plain causal attention"
        )
    by = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
    if abs(by - 1) > 1e-6:
        query = query * by
    out = _attends.get().attend(module.layer_idx, query, key, value)
    return out.transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The session knows who sees whom."""


def _parts(module: Any, *names: str) -> list[Any]:
    return [getattr(module, name, None) for name in names]


def _gated(mlps: Sequence[object]) -> bool:
    return all(isinstance(mlp, SwiGlu) for mlp in mlps)


def _grid(tokens: Any) -> tuple[int, int]:
    """Rows and columns: as they are, or the divisors that are nearest to a square."""
    pair = isinstance(tokens, tuple)
    sides = [*tokens] if pair else [tokens]
    if len(sides) != 1 + pair or not all(within(ASKED["tokens of a pass"], n) for n in sides):
        raise TachyscopeError(
            f"`tokens_per_frame` must be a whole number {ASKED['tokens of a pass']}, or rows and "
            f"columns, got {str(tokens)[:80]}: give a frame's tokens"
        )
    if pair:
        return sides[0], sides[1]
    rows = next(n for n in range(math.isqrt(sides[0]), 0, -1) if sides[0] % n == 0)
    return rows, sides[0] // rows
