"""`tachyscope generate`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from tachyscope.cli.options import (
    PLAN,
    PLAN_HELP,
    VideoVerb,
    check_plan,
    fit_first,
    promise_memory,
    read_prompts,
    read_video_word,
)
from tachyscope.cli.ranks import Joined, joined
from tachyscope.cli.verb import PathText, option
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import check


@dataclass(frozen=True, kw_only=True)
class Generate(VideoVerb):
    """Generate a video by one plan, and count its time, memory and work."""

    plan: str = option(PLAN, PLAN_HELP)
    first: PathText | None = option(
        None,
        "An image or a video file that the new frames follow, in models that encode; cut in the "
        "middle and scaled to the video's size.",
    )
    video: PathText | None = option(
        None,
        "A video file or a camera (/dev/video0) to follow, with the strength of the noise on it, "
        "over 0 to 1: clip.mp4:0.4; 0.6 unless given, and at 1 nothing of it is left.",
    )
    seed: int = option(
        0, "Same seed, same video, up to rounding on another device or with other threads."
    )
    out: Path = option(Path("out"), "Folder for video.mp4 and generate.json.")

    by_ranks: ClassVar[bool] = True

    def run(self, command: str) -> None:
        with joined(self.device) as ranks:
            replace(self, device=ranks.device)._generate(command, ranks)

    def _generate(self, command: str, ranks: Joined) -> None:
        from tachyscope.core.meter import summary
        from tachyscope.core.opening import open as open_stream
        from tachyscope.core.plan import label
        from tachyscope.core.request import chunks_for
        from tachyscope.core.rollout import change_frames, rollout, runs_beside
        from tachyscope.io.files import check_folder
        from tachyscope.io.machine import count_peak
        from tachyscope.io.results import document, emit, size_of
        from tachyscope.io.video import VideoWriter, read_frames
        from tachyscope.measure.plan_notes import notes
        from tachyscope.measure.progress import progress
        from tachyscope.measure.rates import Clock, rates, tell_rates
        from tachyscope.measure.runs import Run, run_lines
        from tachyscope.memory.promise import measured

        text = check_plan(self.plan, self.model)
        options = self.rollout_options(prompt_changes=True)
        options["seed"] = check("seed", self.seed)
        if self.first is not None:
            if self.world is not None:
                raise TachyscopeError(
                    "a world brings its own first frame: leave --first or --world out"
                )
            options["first"] = read_frames(self.first)
        if self.video is not None:
            options["video"], options["strength"] = read_video_word(self.video)
        target = (check_folder(self.out) if ranks.first else self.out) / "video.mp4"
        replaced = " (replaced)" if target.exists() else ""
        rows, size, name = [], "", label(text)
        with progress(self.frames, ranks.first) as watch:
            watch.stage(f"loading {self.model}")
            begun = time.perf_counter()
            model = self.load()
            load_s = time.perf_counter() - begun
            if self.first is not None:
                options["first"] = fit_first(options["first"], options["size"] or model.size)
            options |= self.visit(model)[1]
            actions = options.pop("actions")
            promised, first_line = None, ""
            if ranks.mesh is None:  # each of several ranks has a part of it
                promised, first_line = promise_memory(
                    model, self.model, [text], frames=self.frames, size=options["size"],
                    prompt=options["prompt"], given=len(options.get("first", ())),
                )  # fmt: skip
            count_peak(model.device)
            with Clock() as clock:
                chunk = model.shape(options["size"]).chunk
                compiled = model.compiling_pays(chunks_for(model, chunk, 0, self.frames))
                if compiled:
                    watch.stage(f"compiling {self.model}")
                    model.compile()
                watch.stage("")
                given = watch.reading(name, len(options.get("first", ())))
                stream = open_stream(model, text, **options, observers=given, mesh=ranks.mesh)
                for observer in given:
                    stream.session.unwatch(observer)
                wanted = read_prompts(self.prompt).changes
                changes = change_frames(model, stream.session, wanted, self.frames)
                chunks = rollout(
                    model, frames=self.frames, actions=actions, then=changes, stream=stream,
                    overlap_decode=True,
                )  # fmt: skip
                if first_line:
                    print(first_line, flush=True)
                if not ranks.first:
                    deque(chunks, 0)
                    return
                beside = runs_beside(model.device)
                with VideoWriter(target, model.fps, background=beside) as file:
                    for made in chunks:
                        clock.lap(made)
                        file.write(made.frames)
                        rows.append(made.stats)
                        size = size_of(made)
                        watch.chunk(name, made)
        speed = rates(rows)
        sums = summary(rows) | speed | {"load_s": load_s} | measured(model.device, promised)
        run = Run(name, str(stream.session.plan), rows, sums, notes(stream.session, rows))
        row = run.row(model.name, size, decoder=model.decoder_name, compiled=compiled)
        emit(document("generate", [row], command), str(self.out / "generate.json"))
        print(tell_rates(name, speed, load_s), *run_lines([run]), sep="\n")
        follow = f", after the {len(options['first'])} of {self.first}" if self.first else ""
        if self.video is not None:
            follow += f", behind {options['video']}{_dropped(rows)}"
        changed = "".join(f"; from frame {at} on {prompt!r}" for at, prompt in changes)
        print(f"{target}{replaced}: {file.frames} frames of {size}{follow}{changed}")


def _dropped(rows: list[dict[str, float]]) -> str:
    """A clause on the camera's frames that were dropped."""
    dropped = sum(row.get("source_dropped", 0.0) for row in rows)
    return f", {dropped:.0f} of whose frames were dropped" if dropped else ""
