"""What is read: attention policies for the video's KV cache and for the prompt."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import Bound
from tachyscope.core.policy import Policy
from tachyscope.core.types import PassContext, Shape, Text
from tachyscope.core.work import Work
from tachyscope.kernels.attention import attention
from tachyscope.kernels.attention_fp8 import attention_fp8, block_sparse_attention_fp8
from tachyscope.kernels.block_sparse import BlockTable, Read, block_sparse_attention
from tachyscope.store import LayerPass, Tensors

NEWEST = 3  # default latent frames of weight 1: fewer lose 0.8 dB with a long past
# help of the settings with these names
PAST_WEIGHT = (
    "Weight of past entries between the sink and the newest frames, its logarithm added to their "
    "scores: over 1 changes what the model would do, 1 (or none) is its own attention."
)
WEIGHT_NEWEST = "With past_weight, the latest latent frames that weigh 1; 3 unless given."
WEIGHTS = Bound(0.001, 1_000.0)


class AttentionPolicy(Policy, question="attention"):
    """Decides which entries a query reads.

    It changes its own tensors of a layer and, between commits, the order of the past's entries.
    """

    indexes: ClassVar[bool] = False  # whether it keeps an index of the past
    wants_poses: ClassVar[bool] = False  # whether `before_chunk` needs the camera's poses
    reads_frames: ClassVar[bool] = False  # whether it reads a bank by latent frames, not blocks
    past_weight: float | None = None  # weight of entries between the sink and the newest frames

    @property
    def reorders(self) -> bool:
        """Whether it sorts the past's entries between commits."""
        return False

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        """Raise if the policy cannot serve this shape; `slots` are those of a bounded cache."""

    @property
    def bank_fault(self) -> str | None:
        """Why it cannot read a bank, and what to use; None if it can."""
        return f"attention={self}: use attention=ann:read=0.4"

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        """The policy's tensors of a layer of that many slots, own "attention"."""
        return {}

    def before_chunk(self, p: LayerPass, poses: Tensor) -> None:
        """Called before a chunk with its camera's poses [B, F, 3, 4], if `wants_poses`."""

    def build_index(self, p: LayerPass, past: int, kept: int = 0) -> None:
        """Index the past of `past` entries, after a commit.

        It may permute keys and values of the past, until `restore_order` is called. The first
        `kept` entries are indexed already and must stay in order.
        """

    def restore_order(self, p: LayerPass, past: int) -> None:
        """Put keys and values of the past back in the cache's order, before a commit."""

    def grow(self, own: dict[str, Tensor], larger: Mapping[str, Tensor], kept: int) -> None:
        """Move to tensors of more slots, with the index of the first `kept` entries."""
        own.update(larger)

    def to_index_order(self, p: LayerPass, x: Tensor) -> Tensor:
        """x [B, Hkv, N, D], rows in the cache's order, in the order of keys and values now."""
        return x

    def log_weights(self, p: LayerPass) -> Tensor:
        """Log-weights [B, Hkv or 1, end] of past and present entries, in the order of keys."""
        weights = p.layer.log_count[:, :, : p.ctx.end]
        if self.weighs(p.ctx):
            weights = weights.clone()
            weights[:, :, self.weighed(p.ctx)] += self.log_weight
        return weights

    @property
    def log_weight(self) -> float:
        """The logarithm of `past_weight`, which is added to the scores of `weighed` entries."""
        return 0.0 if self.past_weight is None else math.log(self.past_weight)

    def weighs(self, ctx: PassContext) -> bool:
        """Whether a pass applies `past_weight`. Given frames of a chunk model do not, so that their
        keys and values are the model's own."""
        return self.past_weight not in (None, 1) and (ctx.shape.token_by_token or not ctx.given)

    def weighed(self, ctx: PassContext) -> slice:
        """The slots that `past_weight` applies to: between the first frame and the newest."""
        return between(ctx.shape, ctx.prompt, ctx.past, 1, NEWEST)

    def first_sparse_pass(self, ctx: PassContext) -> int:
        """A chunk's first pass that may leave entries out; those before it read all."""
        return 0

    @abc.abstractmethod
    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        """Attention of rotated queries q [B, H, S, D] over the past and the present chunk."""


class TextPolicy(Policy, question="text"):
    """Decides which prompt tokens cross-attention reads."""

    query_by_query: ClassVar[bool] = False  # whether a query's output depends on no other query

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if not shape.text:
            raise TachyscopeError(
                f"this model has no cross-attention, got text={self}: leave text out"
            )

    @abc.abstractmethod
    def prepare(self, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Text:
        """Prepare a prompt's k, v [B, H, L, D], whose rows are padding behind their lengths."""

    @abc.abstractmethod
    def attend(self, q: Tensor, text: Text, work: Work) -> Tensor:
        """Attention of q [B, H, S, D] over the prepared prompt."""


def between(shape: Shape, prompt: int, past: int, sink: int, newest: int) -> slice:
    """The slots of the past between a prompt and `sink` latent frames, and the `newest`."""
    first = min(past, prompt + sink * shape.tokens_per_frame)
    return slice(first, past - min(past - first, newest * shape.tokens_per_frame))


def attend(
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_count: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention in the precision of the loaded model; token models have no float8."""
    if shape.fp8_attention:
        return attention_fp8(q, k, v, log_count)
    return attention(q, k, v, log_count, causal)


def attend_blocks(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, past: BlockTable, kept: tuple[Tensor, ...] = ()
) -> Read:
    """`attend` over the blocks of a table and the whole present chunk."""
    serve = block_sparse_attention_fp8 if shape.fp8_attention else block_sparse_attention
    return serve(q, k, v, past, kept)
