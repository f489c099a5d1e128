"""`tachyscope bench fit`, and `python -m tachyscope.bench fit`."""

from __future__ import annotations

from dataclasses import dataclass

from tachyscope.cli.verb import PathText, Verb, option, required
from tachyscope.cli.video import kind_of


@dataclass(frozen=True, kw_only=True)
class BenchFit(Verb):
    """Predict a plan's peak memory without running it, and whether it fits a GPU."""

    model: str = required(
        "A name that `tachyscope models` lists, or a size: wan_1.3b, wan_5b, wan_14b.",
        positional=True,
    )
    plan: str = option(
        "fast", "A name that `tachyscope methods` lists, or one with changes: 'fast replay=none'."
    )
    frames: int = option(48, "Pixel frames of the video.")
    size: str | None = option(
        None, "HEIGHTxWIDTH in pixels, in models that make more than one size."
    )
    prompt: str = option("", "Counts in models that hold it in their cache.")
    weights: PathText | None = option(
        None, "The checkpoint, where the model's name stands for an architecture."
    )
    dtype: str = option("bfloat16", "float32, float64 or bfloat16.")
    gpu_gb: float | None = option(None, "The GPU's memory in GB.")

    def run(self, command: str) -> None:
        from tachyscope.arguments import parse_size
        from tachyscope.memory import fit, lines, sized
        from tachyscope.plan import check_text

        check_text(self.plan, kind_of(self.model))  # its faults show before a model is made
        size = parse_size(self.size)
        self.check_json()
        results = fit(
            sized(self.model, self.weights, self.dtype), self.plan, frames=self.frames, size=size,
            prompt=self.prompt, gpu_gb=self.gpu_gb, command=command,
        )  # fmt: skip
        print(*lines(results), sep="\n")
        self.emit(results)
