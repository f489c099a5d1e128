"""`tachyscope-lab bench tokens`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tachyscope.cli.verb import ResultsVerb, option

if TYPE_CHECKING:
    from tachyscope.io.results import Document


GPU_ONLY = ("layers", "seconds", "batch", "peer", "places", "drafts")


@dataclass(frozen=True, kw_only=True)
class BenchTokens(ResultsVerb):
    """Time a token model token by token: a VILA-U of 7B on a GPU, one of 1B on a CPU."""

    out: Path | None = option(None, "A folder for tokens.json, which is written after every row.")
    rows: str | None = option(None, "Names of rows, separated by commas, instead of all.")
    layers: int = option(32, "Layers of the trunk; 32 is the published model.")
    rounds: int | None = option(None, "How often each row is timed: 3 times, on a CPU 5.")
    seconds: int = option(420, "No row is begun after so many seconds.")
    weights: str | None = option(
        None, "Of bf16, int8 and int4, which; on a CPU of float32, bf16 and int8, bf16 if left out."
    )
    batch: str = option("1,2", "Rows that share weights: 1, and 2 of a guidance pair.")
    peer: bool = option(True, "Also time Hugging Face's compiled trunk.")
    places: int = option(256, "Places of a frame, a square number: 256 is the published model.")
    drafts: tuple[Path, ...] = option(
        (),
        "Results of lab/scripts/bench_drafts.py: places that a pass settles; may be given again.",
    )
    device: str = option("cuda", "cuda, cuda:N or cpu.")
    shape: str = option("1b", "On a CPU: 1b, random weights, or atrium-tokens.")

    def run(self, command: str) -> None:
        if self.device == "cpu":
            self._run_cpu(command)
        else:
            self._run_gpu(command)

    def _run_cpu(self, command: str) -> None:
        from tachyscope.core.errors import TachyscopeError
        from tachyscope.core.limits import check
        from tachyscope.io.results import emit
        from tachyscope_lab.bench.token_lines import cpu_lines
        from tachyscope_lab.bench.tokens_cpu import NAMES, bench_tokens_cpu

        self.check_json()
        for one in fields(self):
            if one.name in GPU_ONLY and getattr(self, one.name) != one.default:
                raise TachyscopeError(
                    f"`{one.name}` is of a GPU's bench, got it with --device cpu: leave it out"
                )
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
        results = bench_tokens_cpu(
            self.shape, NAMES if self.rows is None else _words(self.rows),
            weights=_words(self.weights or "bf16"),
            rounds=check("rounds", 5 if self.rounds is None else self.rounds), command=command,
            on_line=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
        print(*cpu_lines(results), sep="\n")
        self.emit(results)
        if self.out is not None:
            emit(results, str(self.out / "tokens.json"))

    def _run_gpu(self, command: str) -> None:
        from tachyscope.core.limits import check, whole
        from tachyscope_lab.bench.random_vila import vila_7b
        from tachyscope_lab.bench.token_lines import token_lines
        from tachyscope_lab.bench.token_rows import NAMES
        from tachyscope_lab.bench.tokens import bench_tokens
        from tachyscope_lab.results import rows_of

        self.check_json()
        names = list(NAMES) if self.rows is None else _words(self.rows)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
        results = bench_tokens(
            vila_7b(self.layers, self.places), names, device=self.device,
            rounds=check("rounds", 3 if self.rounds is None else self.rounds),
            weights=_words(self.weights or "bf16,int8,int4"),
            batch=[whole(x, "batch") for x in _words(self.batch)],
            seconds=self.seconds, peer=self.peer, command=command, on_row=self._on_row,
            accepted=[
                row for file in self.drafts for row in rows_of(file, "atrium-drafts")
            ],
        )  # fmt: skip
        print(*token_lines(results), sep="\n")
        self.emit(results)

    def _on_row(self, results: Document) -> None:
        """Print a row when it is done, and write the file: the machine may go before the last."""
        from tachyscope.io.results import emit

        row = results["rows"][-1]
        what = row.get("failed") or f"trunk {row['trunk_ms']:.3f} ms"
        line = f"{row['name']} {row['weights']} {row['rows']}: {what}"
        print(line, file=sys.stderr, flush=True)
        if self.out is not None:
            emit(results, str(self.out / "tokens.json"))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]
