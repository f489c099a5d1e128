"""`tachyscope bench tokens`, and `python -m tachyscope.bench tokens`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tachyscope.cli.verb import Verb, option

if TYPE_CHECKING:
    from tachyscope.results import Document


@dataclass(frozen=True, kw_only=True)
class BenchTokens(Verb):
    """Time a VILA-U of 7B, random weights, token by token: dense, windows, replay, int8, int4."""

    out: Path | None = option(None, "A folder for tokens.json, which is written after every row.")
    rows: str | None = option(None, "Names of rows, set apart by commas, instead of all.")
    layers: int = option(32, "Layers of the trunk; 32 is the published model.")
    rounds: int = option(3, "How often each row is timed.")
    seconds: int = option(420, "No row is begun after so many seconds.")
    weights: str = option("bf16,int8,int4", "Of bf16, int8 and int4, which: set apart by commas.")
    batch: str = option("1,2", "Rows that share weights: 1, and 2 of a guidance pair.")
    peer: bool = option(True, "Also time Hugging Face's compiled trunk.")
    places: int = option(256, "Places of a frame, a square number: 256 is the published model.")
    drafts: Path | None = option(
        None,
        "Results of scripts/bench_drafts.py: how many places a pass settles.",
    )
    device: str = option("cuda", "cuda, cuda:N or cpu.")

    def run(self, command: str) -> None:
        from tachyscope.bench.tokens import NAMES, bench_tokens, token_lines, vila_7b
        from tachyscope.bounds import check, whole
        from tachyscope.results import read_results

        self.check_json()
        names = list(NAMES) if self.rows is None else _words(self.rows)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
        results = bench_tokens(
            vila_7b(self.layers, self.places), names, device=self.device,
            rounds=check("rounds", self.rounds),
            weights=_words(self.weights), batch=[whole(x, "batch") for x in _words(self.batch)],
            seconds=self.seconds, peer=self.peer, command=command, told=self._on_row,
            accepted=None if self.drafts is None else read_results(self.drafts, "atrium-drafts"),
        )  # fmt: skip
        print(*token_lines(results), sep="\n")
        self.emit(results)

    def _on_row(self, results: Document) -> None:
        """Print a row when it is done, and write the file: the machine may go before the last."""
        from tachyscope.results import emit

        row = results["rows"][-1]
        what = row.get("failed") or f"trunk {row['trunk_ms']:.3f} ms"
        line = f"{row['name']} {row['weights']} {row['rows']}: {what}"
        print(line, file=sys.stderr, flush=True)
        if self.out is not None:
            emit(results, str(self.out / "tokens.json"))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]
