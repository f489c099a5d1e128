"""The command line: thin verbs over the package, and every fault one line on stderr."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from tachyscope import __version__
from tachyscope.errors import TachyscopeError

# torch, rich, av and matplotlib are loaded by the verbs: help must not wait for them
if TYPE_CHECKING:
    from tachyscope.adapters import Adapter
    from tachyscope.report import Run
    from tachyscope.types import Chunk

# a lone "-" would be taken for an option
Json = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
# the words that were typed, which main hands on
Said = Annotated[str, Parameter(parse=False)]

# in which dtype a second dense run shows how far two of them agree
OTHER = {"float32": "float64", "float64": "float32", "bfloat16": "float32"}

app = App(
    "tachyscope",
    help="Fast autoregressive video generation without retraining, and what the speed cost.",
    version=__version__,
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
bench_app = App("bench", help="Time plans against dense, and dense against itself.")
app.command(bench_app)


@Parameter(name="*")
@dataclass(frozen=True)
class Video:
    """What to make, on what; and changes to the plan."""

    cache: str | None = None
    "What to remember, instead of the plan's: merge:budget=21f"
    attention: str | None = None
    "What to read of the video, instead of the plan's: ann:read=0.2"
    text: str | None = None
    "What to read of the prompt, instead of the plan's: pads"
    replay: str | None = None
    "What to compute again, instead of the plan's: attentive:share=0.5"
    prompt: str = ""
    "What the video shows."
    actions: str = ""
    "One action a frame, in models that take them: 'w*20 a*24'."
    frames: int = 48
    "Pixel frames to make."
    seed: int = 0
    "Same seed, same video."
    size: str | None = None
    "HEIGHTxWIDTH in pixels, in models that make more than one size."
    weights: str | None = None
    "The checkpoint, where the model's name stands for an architecture."
    device: str = "cpu"
    "cpu, cuda or cuda:N."
    dtype: str = "float32"
    "float32, float64 or bfloat16."

    def planned(self, plan: str) -> str:
        """The plan's text with the parts that were set apart, checked before a model is loaded."""
        parts = {part: getattr(self, part) for part in ("cache", "attention", "text", "replay")}
        changes = [f"{part}={spec}" for part, spec in parts.items() if spec is not None]
        text = " ".join([plan, *changes])
        from tachyscope.plan import NAMED, Plan

        # which model it is for matters to what a name stands for, not to whether it is known
        Plan.parse(text, stock=NAMED["chunks"]["dense"])
        return text

    def asked(self) -> dict[str, Any]:
        """What a rollout is asked for, checked before a model is loaded."""
        if self.frames < 1:
            raise TachyscopeError(f"frames must be 1 or more, got {self.frames}")
        size = None
        if self.size is not None:
            match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", self.size)
            if match is None:
                raise TachyscopeError(f"size is HEIGHTxWIDTH, got {self.size!r}: try 480x832")
            size = (int(match[1]), int(match[2]))
        return {"frames": self.frames, "prompt": self.prompt, "seed": self.seed, "size": size}

    def load(self, model: str, dtype: str | None = None) -> Adapter:
        from tachyscope.models import load

        return load(model, self.weights, device=self.device, dtype=dtype or self.dtype)


VIDEO = Video()


@app.command
def generate(
    model: str,
    /,
    *,
    out: Path,
    plan: str = "dense",
    video: Video = VIDEO,
    json: Json = None,
    said: Said = "",
) -> None:
    """Make a video by one plan, and count what it took.

    Parameters
    ----------
    model
        A name that `tachyscope models` lists.
    out
        Folder for video.mp4.
    plan
        A name that `tachyscope methods` lists, or one with changes: 'fast replay=none'.
    json
        A file for the results, or - for the last line of stdout.
    """
    from tachyscope.bench import check_json, document, emit, notes, size_of
    from tachyscope.files import check_folder
    from tachyscope.meter import summary
    from tachyscope.report import Run
    from tachyscope.rollout import open_session, rollout
    from tachyscope.video import VideoWriter

    text, asked = video.planned(plan), video.asked()
    check_json(json)
    target = check_folder(out) / "video.mp4"
    adapter = video.load(model)
    session = open_session(adapter, text, **asked)
    chunks = rollout(adapter, frames=video.frames, actions=video.actions, session=session)
    rows, size = [], ""
    with _progress(video.frames) as watch, VideoWriter(target, adapter.fps) as file:
        for chunk in chunks:
            file.write(chunk.frames)
            rows.append(chunk.stats)
            size = size_of(chunk)
            watch(plan, chunk)
    run = Run(plan, str(session.plan), rows, summary(rows), notes(session, rows))
    _show([run])
    _say(f"{target}: {file.frames} frames of {size}")
    row = {"name": plan, "plan": run.plan, "model": adapter.name, "size": size}
    emit(document("generate", [row | dict(run.summary) | {"notes": run.notes}], said), json)


@app.command
def compare(
    model: str,
    /,
    *,
    out: Path,
    plan: str = "fast",
    video: Video = VIDEO,
    floor: bool = True,
    aa: bool = True,
    json: Json = None,
    said: Said = "",
) -> None:
    """Make a video dense and by a plan, with the same seed, prompt and actions.

    Parameters
    ----------
    model
        A name that `tachyscope models` lists.
    out
        Folder for compare.mp4, dense.mp4, plan.mp4, report.html and compare.json.
    plan
        A name that `tachyscope methods` lists, or one with changes: 'fast replay=none'.
    floor
        Play dense in a second dtype too: from where the two part, closeness says nothing.
    aa
        Play dense twice: a ratio of speeds is given only beside the noise that this shows.
    json
        A file for the results, or - for the last line of stdout.
    """
    import tachyscope.compare
    from tachyscope.bench import check_json, emit, speed_word
    from tachyscope.files import check_folder
    from tachyscope.models import MODELS

    text, asked = video.planned(plan), video.asked()
    check_json(json)
    check_folder(out)
    adapter = video.load(model)
    twin = video.load(model, OTHER[video.dtype]) if floor else None
    if twin is not None and twin.dtype == adapter.dtype:
        # a model may come in one dtype only
        twin = None
    with _progress(video.frames) as watch:
        found = tachyscope.compare.compare(
            adapter, text, **asked, actions=video.actions, out=out, twin=twin, aa=aa, command=said,
            about=f"{adapter.name}: {MODELS[model].about}.", watch=watch,
        )  # fmt: skip
    _show(found.runs)
    if found.aa is None:
        _say("Speeds of single runs are no benchmark: try tachyscope bench cpu.")
    else:
        row, (low, high) = found.document["rows"][1], found.aa
        word = speed_word(row, {"low": low, "high": high})
        _say(
            f"Speed to dense {row['ratio_dense']:.2f}x, {word}: "
            f"dense against itself gave {low:.2f}x to {high:.2f}x."
        )
    _say(tachyscope.compare.tell_floor(found))
    _say(found.lead)
    for name in ("compare.mp4", "report.html"):
        _say(str(out / name))
    emit(found.document, json)


@bench_app.command
def cpu(
    *,
    model: str = "toy-chunks",
    plans: str = "fast;balanced",
    frames: int = 48,
    rounds: int = 5,
    json: Json = None,
    said: Said = "",
) -> None:
    """Time plans on this CPU by turns; a ratio is real only outside dense's own noise.

    Parameters
    ----------
    model
        A model that brings its own weights.
    plans
        Plans, set apart by ';'.
    frames
        Pixel frames of every run.
    rounds
        How often each plan is run.
    json
        A file for the results, or - for the last line of stdout.
    """
    from tachyscope.bench import bench, check_json, emit, lines, split_plans
    from tachyscope.models import load

    texts = split_plans(plans)
    check_json(json)
    adapter = load(model)
    with _rounds(rounds) as watch:
        found = bench(adapter, texts, frames=frames, rounds=rounds, command=said, watch=watch)
    for line in lines(found):
        _say(line)
    emit(found, json)


@app.command
def methods(*, json: Json = None, said: Said = "") -> None:
    """List every policy with its paper and parameters, and every named plan.

    Parameters
    ----------
    json
        A file for the list, or - for the last line of stdout.
    """
    from tachyscope.bench import check_json, emit

    check_json(json)
    found = {"schema": 1, "suite": "methods", "policies": _policies(), "plans": _plans()}
    if json != "-":
        _show_methods(found)
    emit(found, json)
