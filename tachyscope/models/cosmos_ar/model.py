"""Cosmos, and its checkpoints.

The published file is `model.pt`: tensors under NVIDIA's names, in some in an entry "model". A model
continues given frames; it has no prompt, and cannot begin a video.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.session import Session
from tachyscope.core.types import Rope, Shape, SliceableMlp
from tachyscope.memory.allocations import FreeAttention, peak, tensor_bytes
from tachyscope.models.base import MemoryParts, Ready
from tachyscope.models.checkpoint import (
    allocate,
    find_weights,
    fit,
    matched,
    read_json,
    read_tensors,
    strip_prefixes,
    write_json,
    write_tensors,
)
from tachyscope.models.cosmos_ar.config import MODEL_TYPE, CosmosConfig, published
from tachyscope.models.cosmos_ar.tokenizer import Preview, VideoTokenizer
from tachyscope.models.llama import Trunk, trunk_shape
from tachyscope.models.token_model import Attends, OneCodeModel, Prompt

WEIGHTS = ("model.safetensors", "model.pt")
# NVIDIA's names -> transformers' of a Qwen3; a layer's without "layers.N."
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
SHOWN = "pictures."  # key of the decoder's state, by video: the codes before the next frames


class Cosmos(nn.Module):
    """A Qwen3 trunk with its own RoPE, and a linear head."""

    def __init__(self, config: CosmosConfig) -> None:
        super().__init__()
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)


class CosmosModel(OneCodeModel):
    """A Cosmos: one code a token, no prompt."""

    transformer: Cosmos
    actions = ""

    def __init__(
        self,
        transformer: Cosmos,
        config: CosmosConfig,
        tokenizer: VideoTokenizer | None = None,
        name: str = "cosmos-ar",
    ) -> None:
        self.transformer, self.config, self.name = transformer, config, name
        self.tokenizer = Preview(config) if tokenizer is None else tokenizer
        weight = transformer.model.norm.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.fps, self.size = config.fps, config.size
        self.grid, self.codes, self.sampler = config.grid, config.vocab, config.sampler
        self.draw_macs = config.hidden * config.vocab

    @property
    def mlps(self) -> Sequence[SliceableMlp]:
        return self.transformer.model.mlps

    @property
    def decoder_name(self) -> str:
        return self.tokenizer.name

    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        self.check_size(size)
        return trunk_shape(self.config, self.grid, False)

    def rope(self, shape: Shape) -> Rope:
        c = self.config
        return Rope(c.axes, theta=c.theta, interleaved=False, speeds=c.speeds)

    def pixel_frames(self, latents: int) -> int:
        return max(0, 1 + self.config.stride[0] * (latents - 1))

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        tokens, width = shape.tokens_per_frame, self.config.hidden
        x = torch.empty(shape.batch, tokens, width, dtype=self.dtype, device="meta")
        return MemoryParts(
            weights=tensor_bytes(self.transformer.parameters()),
            decoder=0,  # the caller's
            decoder_state=0,
            prompt=0,
            activations=peak(lambda: self.transformer.model(FreeAttention(), x)),
            decoding=0,
        )

    def encode_prompt(self, prompt: str) -> Prompt:
        if prompt.strip():
            raise TachyscopeError(
                f"{self.name} goes on from given frames and takes no prompt, got "
                f"{shown(prompt)}: leave the prompt out"
            )
        return Prompt(torch.zeros(1, 0, dtype=torch.int64, device=self.device), ())

    def join_prompts(self, prompts: Sequence[Prompt]) -> Prompt:
        return prompts[0]

    def prefill_prompt(self, session: Session, prompt: Prompt) -> None:
        return None

    def prompt_ids(self, prompt: str) -> list[int]:
        return []

    def embed_prompt(self, ids: Tensor) -> Tensor:
        return self.transformer.model.embed_tokens(ids)

    def embed(self, codes: Tensor, actions: int | Tensor | None) -> Tensor:
        return self.transformer.model.embed_tokens(codes[..., 0])

    def run_trunk(self, session: Attends, x: Tensor) -> Tensor:
        return self.transformer.model(session, x)

    def head(self, states: Tensor) -> Tensor:
        logits: Tensor = self.transformer.lm_head(states)
        return logits

    def sample(
        self,
        session: Session,
        actions: Sequence[int] | Tensor,
        ready: Ready | None = None,
    ) -> Tensor:
        if session.memory.features.hidden is None:
            raise TachyscopeError(
                f"{self.name} goes on from given frames, got none: give `first`, 1 frame or "
                f"{1 + self.config.stride[0]}"
            )
        return super().sample(session, actions, ready)

    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        super().prefill_latents(session, latents, actions, shown)
        if not shown:
            for video, part in enumerate(latents):
                self._remember(session, part, video)

    def encode_frames(self, frames: np.ndarray) -> Tensor:
        """Latents [1, T, rows, columns, 1] of frames uint8 [F, H, W, 3]."""
        every = self.config.stride[0]
        self.check_frames(frames)
        if not len(frames) or (len(frames) - 1) % every:
            raise TachyscopeError(
                f"{self.name} takes 1, {1 + every}, {1 + 2 * every}, … first frames, got "
                f"{len(frames)}: leave some out"
            )
        return self.tokenizer.encode(frames)[None, ..., None].to(self.device)

    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        """The newest frames; the tokenizer's decoder is causal and needs all codes before."""
        codes = self._remember(session, latents[0], video)
        frames = self.tokenizer.decode(codes)
        return frames[self.pixel_frames(len(codes) - latents.shape[1]) :]

    def _remember(self, session: Session, latents: Tensor, video: int) -> Tensor:
        """The video's codes [T, rows, columns], with latents [t, rows, columns, 1] appended."""
        name, codes, state = f"{SHOWN}{video}", latents[..., 0], session.memory.features.decoder()
        if name in state:
            codes = torch.cat([state[name], codes])
        state[name] = codes
        return codes


def load_cosmos(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: VideoTokenizer | None = None,
) -> CosmosModel:
    """Load the model in a published file or its folder, or in a folder of `save_cosmos`."""
    path, config = Path(path), None
    if path.is_dir():
        name, config_file = path.resolve().name, path / "config.json"
        path = find_weights(path, WEIGHTS)
        values = read_json(config_file) if config_file.is_file() else {}
        if values.get("model_type") == MODEL_TYPE:
            config = CosmosConfig.parse(values, str(config_file))
    else:
        name = path.stem
    where, tensors = str(path), qwen_names(read_tensors(path), str(path))
    config = published(tensors, where) if config is None else config
    with torch.device("meta"):
        model = Cosmos(config)
    matched(model, tensors, where)  # before memory is taken
    model = allocate(model.to(dtype), device, where)
    fit(model, tensors, where)
    return CosmosModel(model.eval(), config, tokenizer, name)


def save_cosmos(model: CosmosModel, folder: Path | str) -> None:
    """Save the model under NVIDIA's names, with a config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {nvidia_name(k): x for k, x in model.transformer.state_dict().items()}
    write_tensors(folder / WEIGHTS[0], tensors)
    write_json(folder / "config.json", model.config.to_json())


def qwen_names(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """A file's tensors by the module's names, without those of training."""
    renamed = {}
    for name, tensor in strip_prefixes(tensors).items():
        if name.endswith("_extra_state"):
            continue
        if ".cross_attention." in name:
            raise TachyscopeError(
                f"{where} is a Video2World model, which reads a prompt by cross-attention "
                f"({name}): give Cosmos-Predict1-4B or -12B"
            )
        renamed[_renamed(name, NAMES, LAYER_NAMES, "model.")] = tensor
    return renamed


def nvidia_name(name: str) -> str:
    """NVIDIA's name of one of the module's tensors."""
    back, layers = ({v: k for k, v in names.items()} for names in (NAMES, LAYER_NAMES))
    return _renamed(name, back, layers, "").replace("model.layers.", "layers.")


def _renamed(name: str, names: Mapping[str, str], layers: Mapping[str, str], prefix: str) -> str:
    part, _, end = name.rpartition(".")
    if inside := re.fullmatch(r"((?:model\.)?layers\.\d+\.)(.+)", part):
        return f"{prefix}{inside[1]}{layers.get(inside[2], inside[2])}.{end}"
    return f"{names.get(part, part)}.{end}"
