"""VILA-U, and its checkpoints.

A checkpoint is a folder with `config.json` and the folders `llm`, `vision_tower` and
`mm_projector`, each with a `config.json` and its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.session import Session
from tachyscope.core.types import Rope, Shape, SliceableMlp, dtype_name
from tachyscope.decode import DecodeParts, can_compile, compile_step
from tachyscope.memory.allocations import FreeAttention, peak, tensor_bytes
from tachyscope.models.atrium.words import WordTokenizer
from tachyscope.models.base import MemoryParts
from tachyscope.models.checkpoint import (
    allocate,
    find_weights,
    fit,
    matched,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from tachyscope.models.llama import trunk_shape
from tachyscope.models.token_model import Attends, TokenModel
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.decode import decode_parts
from tachyscope.models.vila_u.tokenizers import BytesTokenizer, ChatTokenizer, Tokenizer
from tachyscope.models.vila_u.transformer import Vila

PARTS = ("llm", "vision_tower", "mm_projector")
CALIBRATION = "calibration.safetensors"
COMPILED_WIDTH = 128  # width of a trunk from which a compiled step saves time
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class VilaModel(TokenModel):
    """A VILA-U: a LLaMA trunk, a depth transformer and an RQ-VAE."""

    transformer: Vila

    def __init__(
        self, transformer: Vila, config: VilaConfig, tokenizer: Tokenizer, name: str = "vila-u"
    ) -> None:
        self.transformer = transformer
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        weight = transformer.trunk.norm.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.fps, self.size = config.fps, config.size
        self.actions = config.actions
        self.grid, self.depth, self.codes = config.grid, config.depth, config.codes
        self.sampler, self.draw_macs = config.sampler, transformer.head.macs

    @property
    def mlps(self) -> Sequence[SliceableMlp]:
        return self.transformer.trunk.mlps

    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        c = self.config
        self.check_size(size)
        return trunk_shape(c, c.grid, c.sampler.guided)

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        c, vae = self.config, self.transformer.vae
        x = torch.empty(shape.batch, max(prompt, 1), c.hidden, dtype=self.dtype, device="meta")
        codes = torch.empty(1, *c.grid, c.depth, dtype=torch.int64, device="meta")
        return MemoryParts(
            weights=tensor_bytes(self.transformer.parameters()),
            decoder=0,  # among the weights
            decoder_state=0,
            prompt=0,  # in the cache
            activations=peak(lambda: self.transformer.trunk(FreeAttention(), x)),
            decoding=peak(lambda: vae.decode(vae.quantizer.sum(codes))),
        )

    def rope(self, shape: Shape) -> Rope:
        weights = (float(shape.tokens_per_frame), float(shape.grid[1]), 1.0)
        c = self.config
        return Rope(
            ((shape.head_dim, weights),), theta=c.theta, interleaved=False, scale=c.rope_scale
        )

    def prompt_ids(self, prompt: str) -> list[int]:
        return self.tokenizer.ids(prompt)

    def embed_prompt(self, ids: Tensor) -> Tensor:
        return self.transformer.trunk.embed_tokens(ids)

    def embed(self, codes: Tensor, actions: int | Tensor | None) -> Tensor:
        return self.transformer.embed(codes, actions)

    def run_trunk(self, session: Attends, x: Tensor) -> Tensor:
        return self.transformer.trunk(session, x)

    def draw(self, states: Tensor, noise: Tensor, logits: Tensor | None = None) -> Tensor:
        books = self.transformer.vae.quantizer
        return self.transformer.head.generate(states, books, self.sampler, noise, logits)

    def logits(self, states: Tensor, codes: Tensor) -> Tensor:
        sums = self.transformer.vae.quantizer.sums(codes)
        sums = sums.repeat(len(states) // len(sums), 1, 1, 1)
        return self.sampler.guide(self.transformer.head(states, sums))

    def compiling_pays(self, chunks: int) -> bool:
        # the program is built once on a machine, in seconds, and saves seconds a frame
        wide = self.config.hidden >= COMPILED_WIDTH
        return wide and self.device.type == "cpu" and can_compile(self.dtype)

    def compile(self) -> Self:
        """Run a token's step as one native program, on a CPU."""
        if self.device.type != "cpu":
            return super().compile()
        compile_step(self.dtype)
        self.compiled = True
        return self

    def decode_parts(self) -> DecodeParts:
        return decode_parts(self.transformer, self.config.sampler)

    @torch.no_grad()
    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        pixels = self.transformer.vae.decode(
            self.transformer.vae.quantizer.sum(latents.flatten(0, 1))
        )
        levels = pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
        return levels.movedim(1, -1).cpu().numpy()

    @torch.no_grad()
    def encode_frames(self, frames: np.ndarray) -> Tensor:
        """Latents [1, F, rows, columns, D] of frames uint8 [F, H, W, 3]."""
        self.check_frames(frames)
        levels = torch.from_numpy(np.ascontiguousarray(frames)).to(self.device, self.dtype)
        vectors = self.transformer.vae.encode(levels.movedim(-1, 1) / 127.5 - 1)
        return self.transformer.vae.quantizer.quantise(vectors)[None]


def load_vila(
    folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> VilaModel:
    """Load the model in a published folder, by default in its config's dtype."""
    folder = Path(folder)
    # in some releases the model is in a subfolder
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    files = {part: read_json(folder / part / "config.json") for part in ("", *PARTS)}
    config = VilaConfig.parse(files)
    with torch.device("meta"):
        model = Vila(config)
    found = {part: find_weights(folder / part, WEIGHTS) for part in PARTS}
    parts = {part: (read_tensors(path), str(path)) for part, path in found.items()}
    if files["llm"].get("tie_word_embeddings"):
        llm = parts["llm"][0]
        llm.setdefault("lm_head.weight", llm.get("model.embed_tokens.weight", Tensor()))
    if config.shared_codebook:
        _repeat_codebook(parts["vision_tower"][0], config.depth)
    # checked before memory is allocated: configurations may have any sizes
    for part, (tensors, where) in parts.items():
        matched(getattr(model, part), tensors, where, _unused(config))
    model = allocate(model.to(dtype or _dtype(files[""])), device, str(folder))
    for part, (tensors, where) in parts.items():
        fit(getattr(model, part), tensors, where, _unused(config))
    if config.tokenizer == "bytes":
        tokenizer: Tokenizer = BytesTokenizer(config.vocab)
    elif config.tokenizer == "words":
        tokenizer = WordTokenizer(config.vocab)
    else:
        tokenizer = ChatTokenizer.load(folder / "llm")
    adapter = VilaModel(model.eval(), config, tokenizer, name=folder.resolve().name)
    if (folder / CALIBRATION).is_file():
        adapter.calibration = folder / CALIBRATION
    return adapter


def save_vila(model: VilaModel, folder: Path | str) -> None:
    """Save the model in the published form."""
    folder = Path(folder)
    files = model.config.files()
    files[""]["model_dtype"] = str(model.dtype)
    for part in PARTS:
        (folder / part).mkdir(parents=True, exist_ok=True)
        tensors = getattr(model.transformer, part).state_dict()
        # a safetensors file cannot hold tied tensors
        write_tensors(folder / part / WEIGHTS[0], {k: v.clone() for k, v in tensors.items()})
        write_json(folder / part / "config.json", files[part])
    model.tokenizer.save(folder / "llm")
    write_json(folder / "config.json", files[""])


def _repeat_codebook(tensors: dict[str, Tensor], depth: int) -> None:
    """Fill in the codebooks that a writer left out because they are tied to the first."""
    name = "rqvaesiglip.quantizer.codebooks.{}.weight"
    for d in range(1, depth if name.format(0) in tensors else 0):
        tensors.setdefault(name.format(d), tensors[name.format(0)])


def _unused(config: VilaConfig) -> tuple[str, ...]:
    """Prefixes of tensors in published files that video does not need."""
    books = [f"rqvaesiglip.quantizer.codebooks.{d}." for d in range(config.depth)]
    return (
        "rqvaesiglip.siglip_model.",
        "rqvaesiglip.logit_",
        "rqvaesiglip.encoder.",
        *(book + kind for book in books for kind in ("cluster_size_ema", "embed_ema")),
        *(f"model.layers.{i}.self_attn.rotary_emb." for i in range(config.layers)),
    )


def _dtype(root: Mapping[str, Any]) -> torch.dtype:
    name = str(root.get("model_dtype", "torch.bfloat16"))
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for dtype in kinds:
        if dtype_name(name) == dtype_name(dtype):
            return dtype
    raise TachyscopeError(
        f"config.json: model_dtype must be one of {', '.join(map(str, kinds))}, got {name!r}: "
        f"mend it"
    )
