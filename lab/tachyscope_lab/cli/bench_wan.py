"""`tachyscope-lab bench wan`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tachyscope.cli.verb import RESUME, PathText, ResultsVerb, option
from tachyscope.core.errors import TachyscopeError

if TYPE_CHECKING:
    from tachyscope.io.results import Document


@dataclass(frozen=True, kw_only=True)
class BenchWan(ResultsVerb):
    """Time a Wan-type model of full size: single chunks after filled caches, or whole rollouts."""

    model: str = option(
        "self-forcing",
        "A name that `tachyscope list models` lists, or a size: wan_1.3b, wan_14b, or "
        "wan_1.3b_camera, whose camera turns.",
    )
    weights: PathText | None = option(
        None, "The checkpoint; left out, weights are random, which changes no time."
    )
    table: str = option("main", "Which rows: main or all.")
    rows: str | None = option(
        None, "Names of rows, or plans, separated by ';', instead of a table's."
    )
    size: str = option("480x832", "HEIGHTxWIDTH in pixels.")
    lengths: str | None = option(
        None, "Latent frames, separated by commas, before the chunks that are timed."
    )
    rounds: int = option(5, "Chunks timed at each length.")
    rollout: int | None = option(
        None,
        "Make so many pixel frames by each row (the headline's) instead, one chunk after the "
        "other.",
    )
    decode: bool = option(
        False, "Of a rollout, also make it as a user meets it: decoded, beside the next chunk."
    )
    decoder: str | None = option(
        None, "Decode by a tiny decoder's file, or by random-tiny, one of random weights."
    )
    traced: bool = option(False, "Fill caches from a trained model instead of at random.")
    compile: bool | None = option(
        None, "Compile the transformer's layers; on CUDA unless told not to."
    )
    device: str = option("cuda", "cuda, cuda:N or cpu.")
    dtype: str = option(
        "bfloat16", "float32, float64, bfloat16, or fp8, fp8_linears, fp8_attention."
    )
    memory_gb: float | None = option(
        None, "Hold the allocator to so much of the GPU's memory, as on a smaller one."
    )
    seed: int = option(0, "Of noise and random entries.")
    resume: bool = option(False, RESUME)
    json: str | None = option(
        None, "A file for the results, written after every row, or - for the last line of stdout."
    )

    def run(self, command: str) -> None:
        from tachyscope.core.limits import check
        from tachyscope.core.request import parse_size
        from tachyscope.measure.bench import split_lengths
        from tachyscope.models.wan.presets import PRESETS, SIZES
        from tachyscope.models.wan.tiny_decoder import TinyDecoder
        from tachyscope_lab.bench.rollout import bench_rollout
        from tachyscope_lab.bench.single_chunk import hold_memory
        from tachyscope_lab.bench.stand_ins import random_vae
        from tachyscope_lab.bench.wan import bench_wan, load_sized
        from tachyscope_lab.bench.wan_lines import wan_lines
        from tachyscope_lab.bench.wan_rows import choose_rows

        self.check_json()
        rows = "headline" if self.rows is None and self.rollout is not None else self.rows
        plans, size = choose_rows(self.table, rows), parse_size(self.size)
        lengths = split_lengths(self.lengths, "lengths") if self.lengths is not None else []
        if self.decode and self.rollout is None:
            raise TachyscopeError("a rollout is decoded, got --decode alone: give --rollout too")
        if self.decoder is not None and not self.decode:
            raise TachyscopeError(
                f"{self.decoder} would decode nothing: give --decode, or leave it out"
            )
        if self.memory_gb is not None:
            hold_memory(self.device, check("memory_gb", self.memory_gb))
        model = load_sized(self.model, self.weights, self.device, self.dtype)
        if self.decoder is not None:
            model.decoder = TinyDecoder.read(self.decoder, model.config, model.device, model.dtype)
        elif self.decode and self.weights is None and self.model in (SIZES | PRESETS):
            # of random weights too, but as large as the published one
            model.decoder = random_vae(model.config.in_channels, model.dtype)
        if model.device.type == "cuda" if self.compile is None else self.compile:
            model.compile()
        options: Any = {"size": size, "seed": self.seed, "command": command, "on_row": self._on_row}
        options["parts"] = self.parts(command)
        if self.rollout is not None:
            results = bench_rollout(
                model, plans, frames=self.rollout, decode=self.decode, traced=self.traced, **options
            )
        else:
            results = bench_wan(
                model, plans, lengths=lengths, rounds=self.rounds, traced=self.traced, **options
            )
        print(*wan_lines(results), sep="\n")
        self.emit(results)

    def _on_row(self, results: Document) -> None:
        """Print a row when it is done."""
        row = results["rows"][-1]
        rate = f"{row['fps']:.1f} frames/s" if "fps" in row else ""
        done = row.get("failed") or rate or f"{row['chunk_ms']:.1f} ms a chunk"
        print(f"{row['name']}: {done}", file=sys.stderr, flush=True)
