"""What to read: policies for the video's own entries and for the prompt's."""

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

NEWEST = 3  # latent frames that weigh 1 unless asked for: fewer lose 0.8 dB where a past is long
# what the settings of that name do
PAST_WEIGHT = (
    "Weight of past entries between the sink and the newest frames, its logarithm added to their "
    "scores: over 1 changes what the model would do, 1 (or none) is its own attention."
)
WEIGHT_NEWEST = "With past_weight, the latest latent frames that weigh 1; 3 unless given."
WEIGHTS = Bound(0.001, 1_000.0)


class AttentionPolicy(Policy, question="attention"):
    """Decides which entries a query reads.

    It changes its own tensors of a layer and, between commits, how the past's entries are ordered.
    """

    indexes: ClassVar[bool] = False  # whether it keeps anything of the past
    wants_poses: ClassVar[bool] = False  # whether it must be told where the camera stands
    reads_frames: ClassVar[bool] = False  # whether of a bank it reads latent frames, not blocks
    past_weight: float | None = None  # of entries between the sink and the newest frames

    @property
    def reorders(self) -> bool:
        """Whether it puts the past's entries in another order."""
        return False

    def check(self, shape: Shape, prompt: int, slots: int | None) -> None:
        """Raise where the policy cannot serve this shape; `slots` is a bounded cache's size."""

    @property
    def bank_fault(self) -> str | None:
        """Why it cannot choose among a bank's blocks, and what to do; None where it can."""
        return f"attention={self}: use attention=ann:k=1280"

    def tensors(self, shape: Shape, slots: int, device: torch.device) -> Tensors:
        """Fixed tensors to keep beside a layer of that many slots, its own "attention" ones."""
        return {}

    def before_chunk(self, p: LayerPass, poses: Tensor) -> None:
        """Before a chunk whose camera stands at poses [B, F, 3, 4]; where `wants_poses`."""

    def build_index(self, p: LayerPass, past: int, kept: int = 0) -> None:
        """The past has changed and now holds `past` entries: bring the tensors up to date.

        Keys and values of the past may be put in another order, until `restore_order` is called.
        The first `kept` entries are as the last index left them, and stay so.
        """

    def restore_order(self, p: LayerPass, past: int) -> None:
        """The past is about to change: put its keys and values back in the cache's order."""

    def grow(self, own: dict[str, Tensor], larger: Mapping[str, Tensor], kept: int) -> None:
        """Take over tensors for more slots, with the index of the first `kept` entries."""
        own.update(larger)

    def to_index_order(self, p: LayerPass, x: Tensor) -> Tensor:
        """x [B, Hkv, N, D], one row a slot of the cache, as keys and values stand now."""
        return x

    def log_weights(self, p: LayerPass) -> Tensor:
        """Log-weights [B, Hkv or 1, end] of past and now, in the order of keys and values."""
        weights = p.layer.log_count[:, :, : p.ctx.end]
        if self.weighs(p.ctx):
            weights = weights.clone()
            weights[:, :, self.weighed(p.ctx)] += self.log_weight
        return weights

    @property
    def log_weight(self) -> float:
        """What is added to the scores of the past's entries that are weighed."""
        return 0.0 if self.past_weight is None else math.log(self.past_weight)

    def weighs(self, ctx: PassContext) -> bool:
        """Whether a pass weighs the past. A chunk model's given frames do not: what they leave in
        the cache stays the model's own."""
        return self.past_weight not in (None, 1) and (ctx.shape.token_by_token or not ctx.given)

    def weighed(self, ctx: PassContext) -> slice:
        """The slots that are weighed: all between the first latent frame and the newest."""
        return between(ctx.shape, ctx.prompt, ctx.past, 1, NEWEST)

    def first_sparse_pass(self, ctx: PassContext) -> int:
        """The first pass over a chunk that may leave entries out; those before it read all."""
        return 0

    @abc.abstractmethod
    def attend(self, p: LayerPass, q: Tensor) -> Tensor:
        """Attention of rotated queries q [B, H, S, D] over past and now."""


class TextPolicy(Policy, question="text"):
    """Decides which prompt tokens cross-attention reads."""

    query_by_query: ClassVar[bool] = False  # whether a query's answer depends on no other query

    def check_plan(self, plan: Mapping[str, Any], shape: Shape) -> None:
        if not shape.text:
            raise TachyscopeError(
                f"this model has no cross-attention, got text={self}: leave text out"
            )

    @abc.abstractmethod
    def prepare(self, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Text:
        """Once a prompt: k, v [B, H, L, D] whose rows are padding from their true length on."""

    @abc.abstractmethod
    def attend(self, q: Tensor, text: Text, work: Work) -> Tensor:
        """Attention of q [B, H, S, D] over the prepared prompt."""


def between(shape: Shape, prompt: int, past: int, sink: int, newest: int) -> slice:
    """The slots of the past behind a prompt and `sink` latent frames, before the `newest`."""
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
    """Attention in the precision that the model was loaded in; token models have no float8."""
    if shape.fp8_attention:
        return attention_fp8(q, k, v, log_count)
    return attention(q, k, v, log_count, causal)


def attend_blocks(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, past: BlockTable, kept: tuple[Tensor, ...] = ()
) -> Read:
    """`attend` over listed blocks of the past and all of the present."""
    serve = block_sparse_attention_fp8 if shape.fp8_attention else block_sparse_attention
    return serve(q, k, v, past, kept)
