"""Counts the work of a chunk: of passes here, of policies where they do it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields

from torch import Tensor

from tachyscope.core.types import Shape

Count = float | Tensor  # a tensor stays on the device until the meter reads it


@dataclass(slots=True)
class Work:
    """Counters of a chunk; a saving that is only masked is counted as `simulated_`.

    Once a cache is full, `pairs_dense` alone grows from chunk to chunk: by `past_readers` for every
    entry more.
    """

    macs: Count = 0  # multiply-adds of linears, MLPs, attention and policies
    mlp_macs: Count = 0
    pairs: Count = 0  # scored query-key pairs
    pairs_dense: Count = 0  # that the dense model would have scored
    rows_computed: Count = 0  # of MLPs
    rows_replayed: Count = 0
    pairs_held: Count = 0  # that reading the whole cache would have scored
    rows_eligible: Count = 0
    simulated_rows_replayed: Count = 0
    simulated_pairs_skipped: Count = 0
    text_pairs: Count = 0
    text_pairs_dense: Count = 0
    passes: Count = 0  # of denoising
    passes_skipped: Count = 0
    drafts: Count = 0
    drafts_accepted: Count = 0
    queries: Count = 0  # of attention, where a Timing counts them
    blocks_wanted: Count = 0  # of a bank
    blocks_late: Count = 0
    blocks_denied: Count = 0
    blocks_fetched: Count = 0
    fetched_mb: Count = 0
    past_readers: Count = 0  # the dense model's queries of the past, over heads and layers

    def row(self) -> dict[str, float]:
        """The counters as numbers; those that not every plan has only if they are not 0."""
        row = {name: float(getattr(self, name)) for name in NAMES if name != "past_readers"}
        return {
            name: x for name, x in row.items() if x or name in ALWAYS or row.get(PART.get(name, ""))
        }

    def add(self, other: Work, later: int = 0) -> None:
        """Add another chunk's work, as if that chunk had come `later` entries later."""
        for name in NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.pairs_dense += other.past_readers * later

    def take(self) -> Work:
        """The counters so far, which are then reset to 0."""
        taken = copy(self)
        for name in NAMES:
            setattr(self, name, 0)
        return taken

    @property
    def of_host(self) -> bool:
        """Whether every counter is a number on the host."""
        return not any(isinstance(getattr(self, name), Tensor) for name in NAMES)

    def add_pass(
        self, shape: Shape, tokens: int, held: int, total: int, past: bool = True, unused: int = 0
    ) -> None:
        """A pass over `tokens` tokens with `held` past entries; an unbounded cache has `total`.

        With `past` False it does not read the past. A pass with `unused` multiply-adds of a token's
        linears ends in its last layer before attention. `add_tokens` counts a token model's pairs.
        """
        self.macs += shape.batch * tokens * (shape.macs - unused)
        if not shape.token_by_token:
            queries = shape.batch * shape.heads * (shape.layers - bool(unused)) * tokens
            self._add_dense(queries, total if past else 0, queries * tokens, past)
            self.pairs_held += queries * ((held if past else 0) + tokens)

    def skip_pass(self, shape: Shape, tokens: int, total: int) -> None:
        """A skipped denoising pass."""
        self.passes_skipped += 1
        queries = shape.batch * shape.heads * shape.layers * tokens
        self._add_dense(queries, total, queries * tokens)

    def add_tokens(self, shape: Shape, tokens: int, held: int, total: int) -> None:
        """Final tokens of a token model: of drafts, the accepted ones."""
        queries = shape.batch * shape.heads * shape.layers * tokens
        present = queries * (tokens + 1) // 2
        self._add_dense(queries, total, present)
        self.pairs_held += queries * held + present

    def _add_dense(self, queries: int, total: int, present: int, past: bool = True) -> None:
        self.pairs_dense += queries * total + present
        self.past_readers += queries * past

    def add_reads(self, q: Tensor, entries: int) -> None:
        """Attention of queries q [B, H, S, D] over `entries` keys each."""
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * entries
        self.pairs += pairs
        self.macs += 2 * pairs * q.shape[3]

    def add_pairs(self, pairs: Count, width: int) -> None:
        """Attention over `pairs` query-key pairs of head size `width`."""
        self.pairs += pairs
        self.macs += 2 * pairs * width

    def add_text_reads(self, q: Tensor, entries: int) -> None:
        """`add_reads` for cross-attention over the prompt."""
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * entries
        self.text_pairs += pairs
        self.macs += 2 * pairs * q.shape[3]

    def add_mlps(self, macs: float, computed: Count, rows: float) -> None:
        """MLPs over `rows` rows, `computed` of them; a part of the neurons is a part of a row."""
        self.rows_computed += computed
        self.rows_replayed += rows - computed
        self.macs += computed * macs
        self.mlp_macs += computed * macs

    def add_mlp_macs(self, macs: Count) -> None:
        self.macs += macs
        self.mlp_macs += macs


NAMES = tuple(field.name for field in fields(Work))
ALWAYS = NAMES[:6]
PART = {  # shown, even if 0, whenever the other counter is
    "drafts_accepted": "drafts",
    "blocks_late": "blocks_wanted",
    "blocks_denied": "blocks_wanted",
}
PART |= {"blocks_fetched": "blocks_wanted", "fetched_mb": "blocks_wanted"}
