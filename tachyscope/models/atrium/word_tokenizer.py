"""Atrium's prompts as ids: its words, padded to one length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tachyscope.errors import TachyscopeError
from tachyscope.models.vila_u.tokenizers import SPECIAL, START
from tachyscope.worlds import atrium

VOCAB = 1 + len(atrium.WORDS) + len(SPECIAL)


@dataclass(frozen=True, slots=True)
class WordTokenizer:
    """Every prompt takes LENGTH + 1 ids: words, padding, <vi_start>.

    Padding is a word like others, so rows of unlike prompts have one length and need no mask.
    """

    vocab: int

    def __post_init__(self) -> None:
        if self.vocab < VOCAB:
            raise TachyscopeError(
                f"the words tokenizer needs a vocabulary of {VOCAB} ids or more, got {self.vocab}: "
                f"raise vocab_size"
            )

    def ids(self, prompt: str) -> list[int]:
        words = atrium.tokenize(prompt)
        padding = [0] * (atrium.LENGTH - len(words))
        return [*words, *padding, self.vocab - len(SPECIAL) + SPECIAL.index(START)]

    def save(self, folder: Path) -> None:
        """Nothing: the config says all."""
