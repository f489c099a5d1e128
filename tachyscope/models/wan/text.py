"""Wan's prompts: embedded by UMT5, or read from files of embedded prompts."""

from __future__ import annotations

import functools
import html
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, first_line, warn
from tachyscope.core.limits import Bound
from tachyscope.core.types import kind_of
from tachyscope.models.checkpoint import (
    matched,
    read_json,
    read_tensors,
    some,
    write_json,
    write_tensors,
)
from tachyscope.models.config_schema import HEADS, INNER, LAYERS, WIDTH, WORDS, check_numbers
from tachyscope.models.vila_u.tokenizers import read_tokenizer
from tachyscope.models.wan.config import WanConfig

PUBLISHED = "models_t5_umt5-xxl-enc-bf16.pth"
KEPT = 8  # embedded prompts that are cached, 8 MB each; embedding takes seconds on a CPU
# numbers in a config.json of transformers
BOUNDS = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "d_kv": Bound(1, 8_192),
    "d_ff": INNER,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "relative_attention_num_buckets": Bound(1, 4_096),
    "relative_attention_max_distance": Bound(1, 1_000_000),
}
# original name of a part -> transformers'; those of a block follow its number
NAMES = {
    "token_embedding": "shared",
    "norm": "encoder.final_layer_norm",
    "norm1": "layer.0.layer_norm",
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
TIED = "encoder.embed_tokens.weight"


class UMT5:
    """Embeds prompts by UMT5, from Wan's file or a folder of transformers' form.

    It runs on the CPU. For each new prompt the model is loaded and released again, its weights
    mapped from the file.
    """

    kind = "umt5"

    def __init__(self, folder: Path | str, length: int = 512) -> None:
        self.folder, self.length = Path(folder), length
        self._kept: dict[str, tuple[Tensor, int]] = {}
        self.original = (self.folder / PUBLISHED).is_file()
        self.encoder = self.folder / (PUBLISHED if self.original else "text_encoder")
        self.words = self.folder / ("google/umt5-xxl" if self.original else "tokenizer")
        for path in (self.encoder, self.words):
            if not path.exists():
                raise TachyscopeError(
                    f"{self.folder} must have {PUBLISHED} and google/umt5-xxl, or text_encoder and "
                    f"tokenizer, it lacks {path.name}: copy them from the published checkpoint"
                )

    @staticmethod
    def found(folder: Path) -> bool:
        return (folder / PUBLISHED).is_file() or (folder / "text_encoder").is_dir()

    @property
    def host_bytes(self) -> int:
        """Bytes of its weights, in the machine's RAM."""
        files = [self.encoder] if self.original else self.encoder.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)

    @classmethod
    def read(cls, folder: Path, config: WanConfig) -> Self:
        return cls(folder, config.text_len)

    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        text = clean(prompt)
        if text not in self._kept:
            if len(self._kept) == KEPT:
                del self._kept[next(iter(self._kept))]  # the oldest
            self._kept[text] = self._embed(text)
        return self._kept[text]

    @torch.no_grad()
    def _embed(self, text: str) -> tuple[Tensor, int]:
        ids = self.tokenizer(text, truncation=True, max_length=self.length).input_ids
        # padding is masked, so leaving it out changes nothing
        states = self.model(torch.tensor([ids])).last_hidden_state
        # checking five billion weights would take longer than embedding
        _demand_finite(states, str(self.encoder))
        return padded(states, self.length), len(ids)

    @functools.cached_property
    def tokenizer(self) -> Any:
        transformers = needed("transformers", f"UMT5's tokenizer in {self.words}")
        return read_tokenizer(transformers, self.words)

    @property
    def model(self) -> Any:
        """The encoder, loaded on each access."""
        transformers = needed("transformers", f"UMT5 in {self.folder}")
        if self.original:
            file = self.encoder
            weights = read_tensors(file)
            settings = settings_of(weights, str(file))
            tensors = {renamed(name): tensor for name, tensor in weights.items()}
        else:
            index = self.encoder / "model.safetensors.index.json"
            file = index if index.is_file() else self.encoder / "model.safetensors"
            settings = read_json(self.encoder / "config.json")
            tensors = read_tensors(file)
        if "shared.weight" in tensors:
            tensors[TIED] = tensors["shared.weight"]
        check_numbers(settings, BOUNDS, str(file))
        try:
            with torch.device("meta"):
                model = transformers.UMT5EncoderModel(transformers.UMT5Config(**settings))
        except Exception as fault:  # whatever odd values lead to
            raise TachyscopeError(
                f"{self.encoder} must have UMT5's own config.json, got {first_line(fault)}: get it "
                f"again"
            ) from fault
        # not `fit`, which reads them all: they stay in the file until they are used
        model.load_state_dict(matched(model, tensors, str(file)), strict=True, assign=True)
        return model.eval().requires_grad_(False)

    def write(self, folder: Path) -> None:
        model = self.model
        tensors = {name: x for name, x in model.state_dict().items() if name != TIED}
        write_json(folder / "text_encoder" / "config.json", model.config.to_dict())
        write_tensors(folder / "text_encoder" / "model.safetensors", tensors)
        self.tokenizer.save_pretrained(str(folder / "tokenizer"))


class PromptFile:
    """Prompts embedded before, each a file of tensors with `context` [L, text_dim].

    The first is the empty prompt, with which a video begins; `later` ones are named by their files.
    """

    kind = "prompt_file"
    file = "prompt.safetensors"

    def __init__(
        self, context: Tensor, length: int, later: Mapping[str, tuple[Tensor, int]] | None = None
    ) -> None:
        self.context, self.length = context, length  # [1, text_len, text_dim]
        self.later = dict(later or {})

    @classmethod
    def read(cls, path: Path, config: WanConfig, later: Sequence[str] = ()) -> Self:
        """The prompt in a file, or in a model's folder; and those of later files."""
        first = read_prompt(path / cls.file if path.is_dir() else path, config)
        return cls(*first, {name: read_prompt(Path(name), config) for name in later})

    def __call__(self, prompt: str) -> tuple[Tensor, int]:
        if prompt in self.later:
            return self.later[prompt]
        if prompt:
            raise TachyscopeError(
                f"the prompt was embedded before, got also {prompt!r}: leave one of them out"
            )
        return self.context, self.length

    def write(self, folder: Path) -> None:
        write_prompt(folder / self.file, self.context, self.length)


def read_prompt(file: Path, config: WanConfig) -> tuple[Tensor, int]:
    """A file's embedded prompt [1, text_len, text_dim], and its length."""
    tensors = read_tensors(file)
    context = tensors.get("context", torch.empty(0))
    plain = context.is_floating_point() and context.itemsize > 1  # torch computes little in float8
    shape = context.shape if context.dim() == 3 else (1, *context.shape)
    tokens, width = shape[1:] if plain and len(shape) == 3 and shape[0] == 1 else (0, 0)
    if not 0 < tokens <= config.text_len or width != config.text_dim:
        kinds = {name: kind_of(x) for name, x in tensors.items()}
        raise TachyscopeError(
            f"{file} must hold 'context' [L, {config.text_dim}] of at most {config.text_len} "
            f"tokens, as plain floats, got {kinds}: embed the prompt for this model"
        )
    context = context.view(1, tokens, width)
    _demand_finite(context, str(file))
    used = context[0].ne(0).any(1).nonzero()
    length = int(used.max()) + 1 if len(used) else 0
    return padded(context, config.text_len), length


def embed_prompt(folder: Path | str, prompt: str, out: Path | str, length: int = 512) -> None:
    """Embed a prompt by the UMT5 in a folder, and write it for `--prompt @FILE`."""
    write_prompt(Path(out), *UMT5(folder, length)(prompt))


def write_prompt(path: Path, context: Tensor, length: int) -> None:
    """Write an embedded prompt [1, L, text_dim], without its padding."""
    write_tensors(path, {"context": context[0, : max(length, 1)]})


def padded(context: Tensor, length: int) -> Tensor:
    """A prompt [1, L, W] padded with zeros."""
    zeros = context.new_zeros(1, length - context.shape[1], context.shape[2])
    return torch.cat([context, zeros], 1)


def clean(prompt: str) -> str:
    """The prompt cleaned as in training: ftfy, HTML entities resolved, single spaces."""
    if importlib.util.find_spec("ftfy"):
        prompt = importlib.import_module("ftfy").fix_text(prompt)
    elif not all(" " <= letter <= "~" or letter in "\t\n\f\r" for letter in prompt):
        # plain ASCII stays as it is with ftfy too
        warn(
            "ftfy is not installed, which Wan's authors clean prompts with, and this one has "
            "letters that it may change: pip install ftfy"
        )
    return " ".join(html.unescape(html.unescape(prompt)).split())


def renamed(name: str) -> str:
    """transformers' name of one of the original encoder's tensors."""
    part, _, kind = name.rpartition(".")
    if part.startswith("blocks."):
        _, number, rest = part.split(".", 2)
        return f"encoder.block.{number}.{NAMES.get(rest, rest)}.{kind}"
    return f"{NAMES.get(part, part)}.{kind}"


def settings_of(tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """A UMT5's settings, inferred from its original tensors' shapes."""
    try:
        words, width = tensors["token_embedding.weight"].shape
        buckets, heads = tensors["blocks.0.pos_embedding.embedding.weight"].shape
        inner = tensors["blocks.0.attn.q.weight"].shape[0]
        hidden = tensors["blocks.0.ffn.fc1.weight"].shape[0]
    except (KeyError, IndexError, ValueError):
        raise TachyscopeError(
            f"{where} must hold UMT5's encoder under Wan's names, "
            f"got {some(sorted(tensors)) or 'nothing'}: give the published {PUBLISHED}"
        ) from None
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    return {
        "vocab_size": words, "d_model": width, "d_kv": inner // heads, "d_ff": hidden,
        "num_layers": len(blocks), "num_heads": heads, "relative_attention_num_buckets": buckets,
    }  # fmt: skip


def _demand_finite(context: Tensor, where: str) -> None:
    if not context.isfinite().all():
        raise TachyscopeError(
            f"{where} must give finite numbers, this prompt's have NaN or infinity: get it again"
        )


def needed(package: str, what: str) -> Any:
    """An optional package; raises if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise TachyscopeError(
            f"{what} needs {package}, which is not installed: pip install -e '.[hf]'"
        ) from None
