"""`tachyscope generate`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tachyscope.cli.verb import PathText, option, required
from tachyscope.cli.video import CompiledVerb
from tachyscope.errors import TachyscopeError

if TYPE_CHECKING:
    from tachyscope.quality import Frames


@dataclass(frozen=True, kw_only=True)
class Generate(CompiledVerb):
    """Make a video by one plan, and count what it took."""

    out: Path = required("Folder for video.mp4.")
    first: PathText | None = option(
        None, "An image or a video file that the new frames follow, in models that encode."
    )
    resize: bool = option(
        False, "Cut the frames of --first in their middle and scale them to the video's size."
    )
    then: tuple[str, ...] = option(
        (),
        "Another prompt from a new frame on, '24: a blue room', where the next chunk begins; may "
        "be given several times.",
    )
    noise: PathText | None = option(
        None,
        "A file with a tensor `noise` [draws, latent frames, C, h, w] to take instead of the "
        "seed's, in models made from noise: docs/models.md.",
    )

    def run(self, command: str) -> None:
        from tachyscope.arguments import parse_change, parse_prompt_files
        from tachyscope.files import check_folder
        from tachyscope.meter import summary
        from tachyscope.plan import label
        from tachyscope.plan_notes import notes
        from tachyscope.progress import frames_bar
        from tachyscope.rates import Clock, rates, tell_rates
        from tachyscope.results import document, size_of
        from tachyscope.rollout import change_frames, rollout, runs_beside
        from tachyscope.runs import Run, run_lines
        from tachyscope.stream import open as open_stream
        from tachyscope.video import VideoWriter, read_frames

        text, options = self.plan_text(), self.rollout_options(prompt_changes=True)
        wanted = [parse_change(word) for word in self.then]
        wanted += parse_prompt_files(self.prompt_file)[1]
        self.check_json()
        if self.first is not None:
            if self.world is not None:
                raise TachyscopeError(
                    "a world brings its own first frame: leave --first or --world out"
                )
            options["first"] = read_frames(self.first)
        elif self.resize:
            raise TachyscopeError("--resize is for the frames of --first, got none: leave it out")
        target = check_folder(self.out) / "video.mp4"
        replaced = " (replaced)" if target.exists() else ""
        begun = time.perf_counter()
        model = self.load()
        load_s = time.perf_counter() - begun
        if self.first is not None:
            options["first"] = self._fit(options["first"], options["size"] or model.size)
        options |= self.visit(model)[1]
        actions = options.pop("actions")
        rows, size, name = [], "", label(text)
        with Clock() as clock:
            compiled = self.compile_layers(model)
            stream = open_stream(model, text, **options, noise=self.noise)
            changes = change_frames(model, stream.session, wanted, self.frames)
            chunks = rollout(
                model, frames=self.frames, actions=actions, then=changes, stream=stream,
                overlap_decode=True,
            )  # fmt: skip
            with (
                frames_bar(self.frames, self.quiet) as watch,
                VideoWriter(target, model.fps, background=runs_beside(model.device)) as file,
            ):
                for chunk in chunks:
                    clock.lap(chunk)
                    file.write(chunk.frames)
                    rows.append(chunk.stats)
                    size = size_of(chunk)
                    watch(name, chunk)
        speed = rates(rows)
        sums = summary(rows) | speed | {"load_s": load_s}
        run = Run(name, str(stream.session.plan), rows, sums, notes(stream.session, rows))
        if not self.quiet:
            print(tell_rates(name, speed, load_s), *run_lines([run]), sep="\n")
            follow = ""
            if self.first is not None:
                follow = f", after the {len(options['first'])} of {self.first}"
            changed = "".join(f"; from frame {at} on {prompt!r}" for at, prompt in changes)
            print(f"{target}{replaced}: {file.frames} frames of {size}{follow}{changed}")
        row = run.row(model.name, size, decoder=model.decoder_name, compiled=compiled)
        self.emit(document("generate", [row], command))

    def _fit(self, frames: Frames, size: tuple[int, int]) -> Frames:
        """Given frames of the video's size, resized where --resize says so."""
        from tachyscope.video import resize_frames

        given: tuple[int, ...] = frames.shape[1:3]
        if given == size:
            return frames
        if not self.resize:
            sizes = ["{}x{}".format(*pixels) for pixels in (given, size)]
            raise TachyscopeError(
                f"--first has frames of {sizes[0]} (height x width), the video is {sizes[1]}: add "
                f"--resize, which cuts them in their middle and scales them"
            )
        return resize_frames(frames, *size)
