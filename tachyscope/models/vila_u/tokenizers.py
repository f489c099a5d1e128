"""Tokenizers of VILA-U's prompts."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tachyscope.core.errors import TachyscopeError, first_line

TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
SPECIAL = ("<im_start>", "<im_end>", "<vi_start>", "<vi_end>")  # the last ids of a vocabulary
START = "<vi_start>"
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


class Tokenizer(Protocol):
    """From a prompt to ids that end in <vi_start>; "" is the unconditional prompt."""

    def ids(self, prompt: str) -> list[int]: ...

    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class BytesTokenizer:
    """A prompt's UTF-8 bytes; <bos> and the special tokens are the last ids of the vocabulary."""

    vocab: int

    def __post_init__(self) -> None:
        least = 256 + 1 + len(SPECIAL)
        if self.vocab < least:
            raise TachyscopeError(
                f"the bytes tokenizer needs a vocabulary of {least} ids or more, got {self.vocab}: "
                f"raise vocab_size"
            )

    def ids(self, prompt: str) -> list[int]:
        special = self.vocab - len(SPECIAL)
        return [special - 1, *prompt.encode(), special + SPECIAL.index(START)]

    def save(self, folder: Path) -> None:
        """Save nothing: the configuration has everything."""


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """The checkpoint's tokenizer, with the chat template of VILA-U's training."""

    inner: Any  # a transformers tokenizer

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        if not any((folder / name).is_file() for name in TOKENIZER):
            raise TachyscopeError(
                f"{folder} must have a tokenizer, it has none of {', '.join(TOKENIZER)}: "
                f"copy them from the published checkpoint"
            )
        try:
            transformers = importlib.import_module("transformers")
        except ImportError:
            raise TachyscopeError(
                f"the tokenizer in {folder} needs transformers, which is not installed: "
                f"pip install -e '.[hf]'"
            ) from None
        inner = read_tokenizer(transformers, folder, legacy=False)
        if START not in inner.get_vocab():
            raise TachyscopeError(
                f"the tokenizer in {folder} must know {START}, it does not: "
                f"copy it from a checkpoint that makes video"
            )
        return cls(inner)

    def ids(self, prompt: str) -> list[int]:
        text = prompt.strip()
        # without a prompt there is no space between the two speakers, as in training
        message = f" {text} " if text else ""
        return list(self.inner(f"{SYSTEM} USER:{message}ASSISTANT: {START}").input_ids)

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(str(folder))


def read_tokenizer(transformers: Any, folder: Path, **options: Any) -> Any:
    """Load a folder's tokenizer by transformers."""
    try:
        # nothing is downloaded, and no code of the folder is run
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as fault:  # damaged files raise almost anything
        raise TachyscopeError(
            f"the tokenizer in {folder} must load, got {first_line(fault)}: get its files again, "
            f"or pip install -e '.[hf]'"
        ) from None
