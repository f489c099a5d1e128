"""The session as a transformer calls it if several ranks make one stream (Ulysses)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from tachyscope.core.ranks import Ranks
from tachyscope.core.session import Session
from tachyscope.core.types import Mlp


@final
class Exchange:
    """Session calls for a transformer that computes only this rank's tokens.

    q, k, v and results [B, H, S, D] have all heads and this rank's tokens; the session gets all
    tokens of this rank's heads.
    """

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self.session, self.ranks = session, ranks
        self._tokens = session.shape.tokens_per_frame

    def own(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [B, S, W]."""
        return self.ranks.own_tokens(x, self._tokens)

    def whole(self, x: Tensor) -> Tensor:
        """All ranks' tokens [B, S, W], from this rank's own."""
        return self.ranks.all_tokens(x, self._tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self.session.attend(layer, *self.ranks.to_heads(self._tokens, q, k, v))
        return self.ranks.to_tokens(self._tokens, out)

    def write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.session.write_kv(layer, *self.ranks.to_heads(self._tokens, q, k, v))

    def cross(self, layer: int, q: Tensor) -> Tensor:
        text = self.session.plan.text
        assert text is not None
        if text.query_by_query:
            return self.session.cross(layer, q)
        (heads,) = self.ranks.to_heads(self._tokens, q)
        return self.ranks.to_tokens(self._tokens, self.session.cross(layer, heads))

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor:
        if self.session.plan.replay is None:
            return self.session.mlp(layer, x, fn)
        # replay chooses among all tokens, so every rank computes the same rows
        return self.own(self.session.mlp(layer, self.whole(x), fn))


def agree_on_session(session: Session, ranks: Ranks) -> None:
    """Raise unless all ranks opened the same stream."""
    source, camera, device = session.memory.source, session.memory.features.camera, session.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    ranks.agree(
        model=(source.weights, source.decoder), plan=str(session.plan), prompt=source.prompt,
        seed=session.memory.seeds, size=session.shape.grid, first=source.first, noise=source.noise,
        frames=session.memory.latent_frames, start=None if camera is None else camera.tolist(),
        dtype=session.dtype, device=kind, torch=torch.__version__,
    )  # fmt: skip


def agree_on_chunk(session: Session, ranks: Ranks, actions: Sequence[int]) -> None:
    """Raise unless all ranks make the same chunk."""
    where = session.memory.chunk, session.memory.latent_frame, session.memory.made
    ranks.agree(chunk=where, actions=list(actions), prompt=session.memory.source.prompt)


def calls_of(session: Session) -> Session | Exchange:
    """What a transformer calls: the session, or the exchange of the ranks that share it."""
    return session if session.ranks is None else Exchange(session, session.ranks)
