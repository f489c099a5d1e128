"""What was observed, gathered token by token, and tables of its means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tachyscope.inspection.stats import ALIKE, ASPECTS, MASS, PERCENTS, Record
from tachyscope.results import Document


@dataclass(frozen=True, slots=True)
class Samples:
    """Records of one kind, one row a token: where it was seen [n, 3], and its values [n, …]."""

    where: np.ndarray  # layer, latent frame, pass
    values: np.ndarray

    @classmethod
    def of(cls, records: Iterable[Record]) -> Samples:
        where, values = [], []
        for record in records:
            spot = (record.layer, record.frame, record.step)
            where.append(np.tile(spot, (len(record.values), 1)))
            values.append(record.values.numpy())
        return cls(np.concatenate(where), np.concatenate(values))

    def since(self, frame: int) -> Samples:
        late = self.where[:, 1] >= frame
        return Samples(self.where[late], self.values[late])

    def groups(self, axes: Sequence[str]) -> dict[tuple[int, ...], np.ndarray]:
        """Values by what they have in common on the axes; all of them for none."""
        if not len(self.values):
            return {}
        columns = [("layer", "frame", "pass").index(axis) for axis in axes]
        keys = self.where[:, columns]
        order = np.lexsort(keys.T[::-1]) if columns else np.arange(len(keys))
        keys = keys[order]
        cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(1)) + 1
        parts = np.split(self.values[order], cuts)
        return {tuple(map(int, keys[i])): v for i, v in zip((0, *cuts), parts, strict=True)}


def table(found: Mapping[str, Samples], axes: Sequence[str]) -> list[Document]:
    """A row for each place on the axes, with the measures of every kind."""
    rows: dict[tuple[int, ...], Document] = {}
    for kind in (*ALIKE, *MASS):
        if kind in found:
            for key, values in found[kind].groups(axes).items():
                row = rows.setdefault(key, dict(zip(axes, key, strict=True)))
                row |= _measures(kind, values)
    return [rows[key] for key in sorted(rows)] if rows else [{}]


def _measures(kind: str, values: np.ndarray) -> dict[str, float]:
    means = [float(mean) for mean in values.mean(0)]
    if kind in MASS:
        return {f"{kind}_{p}": mean for p, mean in zip(PERCENTS, means, strict=True)}
    named = {f"{kind}_{x}": mean for x, mean in zip(ASPECTS, means, strict=True)}
    low, high = np.quantile(values[:, 0], (0.05, 0.95))
    return named | {f"{kind}_cosine_p5": float(low), f"{kind}_cosine_p95": float(high)}
