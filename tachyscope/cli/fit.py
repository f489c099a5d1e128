"""`tachyscope fit`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tachyscope.cli.options import PLAN, PLAN_HELP, check_plan, dtype_of, read_weights
from tachyscope.cli.verb import PathText, ResultsVerb, option, required
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.limits import check

if TYPE_CHECKING:
    from tachyscope.models.base import VideoModel

UNITS = {"": 1.0, "GB": 1.0, "GiB": 1.073741824, "MB": 1e-3, "MiB": 1.048576e-3}


@dataclass(frozen=True, kw_only=True)
class Fit(ResultsVerb):
    """Predict a plan's GPU memory and RAM without running it, and find settings that fit."""

    model: str = required(
        "A name that `tachyscope list models` shows, or a size: wan_1.3b, wan_5b, wan_14b.",
        positional=True,
    )
    plan: str = option(PLAN, PLAN_HELP)
    frames: int = option(240, "Pixel frames of the video.")
    size: str | None = option(
        None, "HEIGHTxWIDTH in pixels, in models that make more than one size."
    )
    prompt: str = option("", "Counts in models that hold it in their cache.")
    weights: tuple[PathText, ...] = option(
        (),
        "The checkpoint, if the model's name is an architecture. Also decoder=FILE, a "
        "tiny decoder (random-tiny without a file), decoder_bands=N and precision=fp8; may be "
        "given several times.",
    )
    device: str = option("cuda", "cuda, or cpu (everything in RAM); a prediction needs neither.")
    vram: str | None = option(
        None, "Your GPU's memory, as 16GB: the best that fits is chosen, instead of 12, 16 and 24."
    )
    ram: str | None = option(None, "RAM that a run may take, as 32GB: the same.")

    def run(self, command: str) -> None:
        from tachyscope.core.request import parse_size
        from tachyscope.measure.progress import progress
        from tachyscope.memory.fit import fit
        from tachyscope.memory.lines import lines

        check_plan(self.plan, self.model)  # refused before a model is made
        size = parse_size(self.size)
        vram, ram = read_gb(self.vram, "vram"), read_gb(self.ram, "ram")
        if self.device not in ("cpu", "cuda"):
            raise TachyscopeError(f"`device` is cuda or cpu here, got {shown(self.device)}")
        on_cpu = self.device == "cpu"
        if on_cpu and vram is not None:
            raise TachyscopeError(
                "a cpu has no GPU memory, got --vram: leave it out, or give --ram"
            )
        self.check_json()
        with progress() as watch:
            watch.stage(f"adding up {self.model}")
            results = fit(
                self._model(), self.plan, frames=self.frames, size=size, prompt=self.prompt,
                vram_gb=vram, ram_gb=ram, on_cpu=on_cpu, command=command,
            )  # fmt: skip
        print(*lines(results), sep="\n")
        self.emit(results)

    def _model(self) -> VideoModel:
        """The model that `generate` loads, on the meta device."""
        from tachyscope.memory.predict import sized

        path, beside = read_weights(self.weights)
        if more := sorted(beside.keys() - {"decoder", "decoder_bands", "precision"}):
            raise TachyscopeError(
                f"--weights {more[0]} takes no memory of its own: leave it out of fit"
            )
        return sized(self.model, path, dtype_of(self.device), **beside)


def read_gb(text: str | None, name: str) -> float | None:
    """Gigabytes in `16GB`, `16` or `15.9GiB`."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS:
        raise TachyscopeError(f"`{name}` is memory as 16GB, got {shown(text)}: use GB, GiB or MB")
    return check("memory_gb", float(match[1]) * UNITS[match[2]], f"`{name}`")
