"""One stream on several devices (Ulysses): one process for each, which holds some of the heads.

Attention mixes tokens but not heads, linears mix heads but not tokens. So each rank computes its
share of every latent frame's tokens, and around attention an all-to-all exchanges all heads of some
tokens for all tokens of some heads. Only the present chunk is exchanged: a rank keeps the past, the
index and the bank of its heads. Every rank has the whole latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, first_line
from tachyscope.core.types import Shape
from tachyscope.core.work import NAMES, Work
from tachyscope.io.fingerprint import digest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def alone(x: Tensor) -> Tensor:
    """`Ranks.mean` where one process holds all heads."""
    return x


class Ranks:
    """The processes that make one stream, seen from one of them.

    All ranks must call every method in the same order.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._group, self._device = mesh.get_group(), torch.device(mesh.device_type)

    def share(self, shape: Shape) -> Shape:
        """The shape of this rank's share; raises if heads or tokens cannot be divided."""
        whole = shape.heads, shape.kv_heads, shape.tokens_per_frame
        if shape.token_by_token:
            raise TachyscopeError(
                f"a model that writes token by token has one token a pass, which {self.size} "
                f"ranks cannot share: start one process"
            )
        if any(n % self.size for n in whole):
            fit = [n for n in range(2, min(whole) + 1) if not any(x % n for x in whole)]
            then = f"start {' or '.join(map(str, fit))}" if fit else "start one process"
            raise TachyscopeError(
                f"{shape.kv_heads} heads and latent frames of {shape.tokens_per_frame} tokens "
                f"cannot be shared by {self.size} ranks: {then}"
            )
        return replace(
            shape, heads=shape.heads // self.size, kv_heads=shape.kv_heads // self.size,
            macs=shape.macs // self.size, rank=self.rank, ranks=self.size,
        )  # fmt: skip

    def agree(self, **given: object) -> None:
        """Raise unless all ranks were given the same."""
        marks = [int(digest(repr(x))[:15], 16) for x in given.values()]
        mine = torch.tensor(marks, dtype=torch.int64, device=self._device)
        theirs = self._gather(mine).tolist()
        for i, name in enumerate(given):
            for rank in range(self.size):
                if theirs[rank][i] != theirs[0][i]:
                    raise TachyscopeError(
                        f"the ranks of one stream need the same {name}, and rank {rank} has "
                        f"another than rank 0: give all of them the same"
                    )

    # ---- between tokens and heads

    def own_tokens(self, x: Tensor, tokens: int) -> Tensor:
        """This rank's part of x [B, S, W]; `tokens` are those of a latent frame."""
        part = tokens // self.size
        cut: Tensor = x.unflatten(1, (-1, self.size, part))  # [B, F, R, n, W]
        return cut[:, :, self.rank].flatten(1, 2)

    def all_tokens(self, x: Tensor, tokens: int) -> Tensor:
        """The whole x [B, S, W], from every rank's part."""
        parts = self._gather(x.unflatten(1, (-1, tokens // self.size)))  # [R, B, F, n, W]
        return parts.permute(1, 2, 0, 3, 4).flatten(1, 3)

    def own_heads(self, x: Tensor) -> Tensor:
        """This rank's part of x [B, H, S, D]."""
        cut: Tensor = x.unflatten(1, (self.size, -1))
        return cut[:, self.rank]

    def to_heads(self, tokens: int, *several: Tensor) -> tuple[Tensor, ...]:
        """From all heads of this rank's tokens to all tokens of its heads: [B, H, S, D] each."""
        cut = [x.unflatten(1, (self.size, -1)) for x in several]
        heads = [x.shape[2] for x in cut]
        parts = self._exchange(torch.cat(cut, 2).transpose(0, 1))  # [R, B, h, s, D]
        frames: Tensor = parts.unflatten(3, (-1, tokens // self.size))  # [R, B, h, F, n, D]
        return tuple(frames.permute(1, 2, 3, 0, 4, 5).flatten(2, 4).split(heads, 1))

    def to_tokens(self, tokens: int, x: Tensor) -> Tensor:
        """The inverse: from all tokens of this rank's heads to all heads of its tokens."""
        cut = x.unflatten(2, (-1, self.size, tokens // self.size))  # [B, h, F, R, n, D]
        parts = self._exchange(cut.permute(3, 0, 1, 2, 4, 5))
        return parts.transpose(0, 1).flatten(1, 2).flatten(2, 3)

    # ---- sums

    def mean(self, x: Tensor) -> Tensor:
        """The mean of every rank's x."""
        return self._sum(x) / self.size

    def add_up(self, work: Work) -> None:
        """Replace this rank's counters by the sums over all ranks."""
        kind: dict[str, Any] = {"dtype": torch.float64, "device": self._device}
        counts = [torch.as_tensor(getattr(work, name), **kind) for name in NAMES]
        for name, x in zip(NAMES, self._sum(torch.stack(counts)).unbind(), strict=True):
            setattr(work, name, x)

    # ---- what travels

    def _exchange(self, x: Tensor) -> Tensor:
        """All-to-all: part r of x [R, ...] goes to rank r; returns the received parts by rank."""
        sent, came = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._together(lambda: dist.all_to_all_single(came, sent, group=self._group))
        return came

    def _gather(self, x: Tensor) -> Tensor:
        """Every rank's x, by rank."""
        return self._exchange(x.expand(self.size, *x.shape))

    def _sum(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self._together(lambda: dist.all_reduce(total, group=self._group))
        return total

    def _together(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as fault:
            raise TachyscopeError(
                f"rank {self.rank} of {self.size} has lost another, which ended or did not answer "
                f"({first_line(fault)}): start all of them again"
            ) from fault
