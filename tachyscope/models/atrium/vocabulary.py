"""The vocabulary of a world's prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError

LENGTH = 64  # tokens of a prompt with padding, which is 0; word i is i + 1


class Vocabulary:
    """The words of a world's prompts."""

    def __init__(self, world: str, words: Sequence[str]) -> None:
        self.world, self.words = world, words
        self._number = {word: i + 1 for i, word in enumerate(words)}

    def tokenize(self, prompt: str) -> list[int]:
        """A prompt's word numbers, without padding."""
        words = prompt.lower().replace(",", " ").replace(".", " ").split()
        wrong = [word for word in words if word not in self._number]
        if wrong:
            raise TachyscopeError(
                f"{self.world}'s prompts use its {len(self.words)} words, got {wrong[0]!r}: use "
                f"{', '.join(self.words)}"
            )
        if len(words) > LENGTH:
            raise TachyscopeError(
                f"a prompt has at most {LENGTH} words, got {len(words)}: shorten it"
            )
        return [self._number[word] for word in words]


def pad(tokens: Sequence[Sequence[int]]) -> Tensor:
    """Prompts as one tensor [B, LENGTH], padded with 0."""
    return torch.tensor([[*row, *[0] * (LENGTH - len(row))] for row in tokens])
