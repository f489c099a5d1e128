"""Collapse the prompt's identical padding tokens, exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from tachyscope.attention import TextPolicy
from tachyscope.core.types import Text
from tachyscope.core.work import Work
from tachyscope.kernels.attention import attention


@final
@dataclass(frozen=True)
class Pads(TextPolicy, name="pads"):
    """Read a prompt's padding as one token, weighted by its length.

    Wan-type models pad to a fixed length without a mask, so the L - n padding tokens are read with
    the same key and value. One of them with + log(L - n) on its score has exactly their joint
    numerator and denominator.
    """

    paper: ClassVar[str] = "FAST-AR's lemma 5.1, arXiv 2602.01801, applied to padding"
    splits_heads: ClassVar[bool] = True
    query_by_query: ClassVar[bool] = True

    def prepare(self, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Text:
        return collapse(k, v, lengths)

    def attend(self, q: Tensor, text: Text, work: Work) -> Tensor:
        work.add_text_reads(q, text.k.shape[2])
        return attention(q, text.k, text.v, text.log_count)


def collapse(k: Tensor, v: Tensor, lengths: Sequence[int]) -> Text:
    """The longest row's tokens and one for the padding; shorter rows end in empty slots."""
    total = k.shape[2]
    size = min(max(lengths) + 1, total)
    log_count = torch.zeros(len(lengths), 1, size, dtype=torch.float32, device=k.device)
    for row, n in enumerate(lengths):
        if n < total:
            log_count[row, 0, n] = math.log(total - n)
            log_count[row, 0, n + 1 :] = -math.inf
    return Text(k[:, :, :size], v[:, :, :size], log_count)
