"""Atrium's prompts: as ids for a token model, and embedded by a small text encoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.atrium import prompts
from tachyscope.models.checkpoint import check_finite, fit, read_tensors, write_tensors
from tachyscope.models.vila_u.tokenizers import SPECIAL, START

VOCAB = 1 + len(prompts.WORDS) + len(SPECIAL)


@dataclass(frozen=True, slots=True)
class WordTokenizer:
    """Every prompt takes LENGTH + 1 ids: words, padding, <vi_start>.

    Padding is a token like others, so that all prompts have one length and need no mask.
    """

    vocab: int

    def __post_init__(self) -> None:
        if self.vocab < VOCAB:
            raise TachyscopeError(
                f"the words tokenizer needs a vocabulary of {VOCAB} ids or more, got {self.vocab}: "
                f"raise vocab_size"
            )

    def ids(self, prompt: str) -> list[int]:
        words = prompts.tokenize(prompt)
        padding = [0] * (prompts.LENGTH - len(words))
        return [*words, *padding, self.vocab - len(SPECIAL) + SPECIAL.index(START)]

    def save(self, folder: Path) -> None:
        """Save nothing: the configuration has everything."""


class Layer(nn.Module):
    """A pre-norm transformer block over a prompt's words."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # [B, H, L, D]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class WordEncoder(nn.Module):
    """Word numbers [B, L], 0 for padding, to an embedding [B, L, width] that is 0 at padding.

    Words attend to each other, so that a colour's embedding depends on what has it.
    """

    def __init__(
        self, words: int, length: int, width: int = 128, layers: int = 2, heads: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words + 1, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.5)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        real = tokens != 0
        # an empty prompt attends to padding, which its output masks
        seen = real | ~real.any(1, keepdim=True)
        x = self.embedding(tokens) + self.place
        for layer in self.layers:
            x = layer(x, seen)
        return self.norm(x) * real[..., None]


class WordTextEncoder:
    """A prompt in Atrium's words, embedded by a trained encoder."""

    kind = "words"
    file = "text_encoder.safetensors"

    def __init__(self, model: WordEncoder) -> None:
        self.model = model.eval()

    @classmethod
    def read(cls, folder: Path, config: Any) -> Self:
        """The encoder in a model's folder; `config` has text_len and text_dim."""
        # on the meta device until the file is checked
        with torch.device("meta"):
            model = WordEncoder(len(prompts.WORDS), config.text_len, config.text_dim)
        fit(model, read_tensors(folder / cls.file), str(folder / cls.file), assign=True)
        check_finite(model, str(folder / cls.file))
        return cls(model.float())

    def write(self, folder: Path) -> None:
        write_tensors(folder / self.file, self.model.state_dict())

    @torch.no_grad()
    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        """The embedding [1, text_len, text_dim], zero after the prompt, and the prompt's length."""
        tokens = prompts.tokenize(prompt)
        return self.model(prompts.pad([tokens])), len(tokens)
