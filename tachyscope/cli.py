"""The command line: thin verbs over the package, and every fault one line on stderr."""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from tachyscope import __version__
from tachyscope.bounds import check, check_prompt
from tachyscope.errors import TachyscopeError, TachyscopeWarning, as_typed, shown
from tachyscope.options import (
    OptionalNumber,
    OptionalPathText,
    OptionalWhole,
    PathOption,
    Whole,
    option_names,
    worded,
)
from tachyscope.process import run_command

# torch, rich, av and matplotlib are loaded by the verbs: help must not wait for them
if TYPE_CHECKING:
    from tachyscope.models.base import VideoModel
    from tachyscope.models.registry import Entry
    from tachyscope.video import Frames
    from tachyscope.worlds.visit import Visit

# a lone "-" would be taken for an option
Json = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
# the words that were typed, which main hands on
Said = Annotated[str, Parameter(parse=False)]

# an option of every verb
TRACEBACK = "--traceback"

# in which dtype a second dense run shows how far two of them agree
OTHER = {"float32": "float64", "float64": "float32", "bfloat16": "float32"}

app = App(
    "tachyscope",
    help="Fast autoregressive video generation without retraining, and what the speed cost. "
    f"With {TRACEBACK}, any verb also shows where in the code a fault came up.",
    version=__version__,
    help_format="plaintext",  # else the stars of 'w*20 a*24' are taken for emphasis
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
bench_app = App("bench", help="Time plans against dense, and dense against itself.")
app.command(bench_app)
app.command(
    "tachyscope.fpga.cli:app",
    name="fpga",
    help="The accelerator: build, simulate, synthesise, estimate.",
)


@Parameter(name="*")
@dataclass(frozen=True)
class Video:
    """What to make, on what; and changes to the plan."""

    cache: str | None = None
    "What to remember, a change of the plan: merge:budget=21f"
    attention: str | None = None
    "What to read of the video, a change of the plan: ann:read=0.2"
    text: str | None = None
    "What to read of the prompt, a change of the plan: pads"
    replay: str | None = None
    "What to compute again, a change of the plan: attentive:share=0.5"
    prompt: str = ""
    "What the video shows."
    prompt_file: tuple[str, ...] = ()
    "The prompt embedded before, in Wan-type models; and 'FRAME: FILE', another from a frame on."
    actions: str = ""
    "One action a frame, in models that take them: 'w*20 a*24'."
    world: OptionalWhole = None
    "Start in this unseen room of the model's world, with its prompt, first frame and truth."
    given: Whole = 1
    "True frames of the world that the video goes on from; actions, one less, lead through them."
    frames: Whole = 48
    "Pixel frames to make."
    seed: Whole = 0
    "Same seed, same video, but for a last bit where the device or its threads differ."
    size: str | None = None
    "HEIGHTxWIDTH in pixels, in models that make more than one size."
    weights: OptionalPathText = None
    "The checkpoint, where the model's name stands for one; 'random' to time a published model."
    decoder: OptionalPathText = None
    "A tiny decoder's file, taew2_1 or lighttaew2_1, to show a Wan-type checkpoint's latents."
    decoder_check: bool = False
    "Decode every chunk by Wan's VAE too, and tell the PSNR between the two; it costs its time."
    lora: OptionalPathText = None
    "A LoRA to merge into a Wan-type checkpoint."
    lora_alpha: OptionalNumber = None
    "The LoRA's alpha, where its file does not tell it: updates are scaled by alpha / rank."
    device: str = "cpu"
    "cpu, cuda or cuda:N."
    dtype: str = "float32"
    "float32, float64 or bfloat16."
    quiet: Annotated[bool, Parameter(negative=())] = False
    "No progress and no tables: files, --json and faults alone."

    def planned(self, plan: str, model: str) -> str:
        """The plan's text with the parts that were set apart, checked before a model is loaded."""
        from tachyscope.plan import POLICIES, check_text

        changes = []
        for part in POLICIES:
            spec = getattr(self, part)
            if spec is None:
                continue
            if spec.split() != [spec]:
                raise TachyscopeError(
                    f"--{part} is one policy without spaces, got {shown(spec)}: give another part "
                    f"by its own option, or all of them in --plan"
                )
            changes.append(f"{part}={spec}")
        text = " ".join([plan, *changes])
        check_text(text, _kind(model))
        return text

    def asked(self, changes: bool = False) -> dict[str, Any]:
        """What a rollout is asked for, checked before a model is loaded.

        changes: whether the verb takes changes of prompt.
        """
        check("frames", self.frames)
        check("given", self.given)
        if self.given > 1 and self.world is None:
            raise TachyscopeError(
                f"--given frames are a world's, got {self.given} of none: add --world"
            )
        check("seed", self.seed)
        if self.world is not None:
            check("world", self.world)
        check_prompt(self.prompt)
        from tachyscope.arguments import parse_prompt_files, parse_size

        size = parse_size(self.size)
        if parse_prompt_files(self.prompt_file)[1] and not changes:
            raise TachyscopeError(
                f"a prompt changes in generate alone, got {' and '.join(self.prompt_file)}: give "
                f"one --prompt-file without a frame"
            )
        return {"frames": self.frames, "prompt": self.prompt, "seed": self.seed, "size": size}

    def load(self, model: str, dtype: str | None = None) -> VideoModel:
        from tachyscope.arguments import parse_prompt_files
        from tachyscope.models.registry import load, with_prompt

        adapter = load(
            model, self.weights, device=self.device, dtype=dtype or self.dtype,
            decoder=self.decoder, decoder_check=self.decoder_check, lora=self.lora,
            lora_alpha=self.lora_alpha,
        )  # fmt: skip
        first, later = parse_prompt_files(self.prompt_file)
        return with_prompt(adapter, first, [name for _, name in later]) if first else adapter

    def visit(self, model: str, adapter: VideoModel) -> tuple[Visit | None, dict[str, Any]]:
        """The walk through a room whose truth is known, where one is asked for; and the actions.

        With the walk come its prompt, and the true frames that are given with their actions.
        """
        from tachyscope.arguments import parse_actions
        from tachyscope.models.registry import MODELS
        from tachyscope.worlds.visit import Visit

        if self.world is None:
            return None, {"actions": self.actions}
        if not MODELS[model].world:
            known = ", ".join(name for name, entry in MODELS.items() if entry.world)
            raise TachyscopeError(
                f"model {model!r} has no world whose truth is known, got --world {self.world}: "
                f"use {known}"
            )
        if self.prompt:
            raise TachyscopeError("a world brings its own prompt: leave --prompt or --world out")
        moves = parse_actions(self.actions, adapter.actions, self.frames + self.given - 1)
        visit = Visit(self.world, moves, pace=MODELS[model].pace)
        letters = [adapter.actions[move] for move in (0, *moves)]
        return visit, {
            "prompt": visit.prompt,
            "first": visit.frames(0, self.given),
            "first_actions": " ".join(letters[: self.given]),
            "actions": " ".join(letters[self.given :]),
        }


VIDEO = Video()


@app.command
def generate(
    model: str,
    /,
    *,
    out: PathOption,
    plan: str = "dense",
    video: Video = VIDEO,
    first: OptionalPathText = None,
    resize: bool = False,
    then: tuple[str, ...] = (),
    noise: OptionalPathText = None,
    compile: bool | None = None,
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
    first
        An image or a video file that the new frames follow, in models that encode.
    resize
        Cut the frames of --first in their middle and scale them to the video's size.
    then
        Another prompt from a new frame on, '24: a blue room', where the next chunk begins; may be
        given several times.
    noise
        A file with a tensor `noise` [draws, latent frames, C, h, w] to take instead of the seed's,
        in models made from noise: docs/models.md.
    compile
        Compile the layers of a Wan-type model first; left out, where a GPU and many chunks make it
        pay.
    json
        A file for the results, or - for the last line of stdout.
    """
    from tachyscope.arguments import parse_change, parse_prompt_files
    from tachyscope.bench import label
    from tachyscope.files import check_folder
    from tachyscope.meter import summary
    from tachyscope.plan_notes import notes
    from tachyscope.progress import frames_bar
    from tachyscope.rates import Clock, rates, tell_rates
    from tachyscope.report import Run
    from tachyscope.results import check_json, document, emit, size_of
    from tachyscope.rollout import change_frames, rollout, runs_beside
    from tachyscope.stream import open as open_stream
    from tachyscope.tables import show_runs
    from tachyscope.video import VideoWriter, read_frames

    text, asked = video.planned(plan, model), video.asked(changes=True)
    wanted = [parse_change(word) for word in then]
    wanted += parse_prompt_files(video.prompt_file)[1]
    check_json(json)
    if first is not None:
        if video.world is not None:
            raise TachyscopeError(
                "a world brings its own first frame: leave --first or --world out"
            )
        asked["first"] = read_frames(first)
    elif resize:
        raise TachyscopeError("--resize is for the frames of --first, got none: leave it out")
    target = check_folder(out) / "video.mp4"
    replaced = " (replaced)" if target.exists() else ""
    begun = time.perf_counter()
    adapter = video.load(model)
    load_s = time.perf_counter() - begun
    if first is not None:
        asked["first"] = _fitted(asked["first"], asked["size"] or adapter.size, resize)
    asked |= video.visit(model, adapter)[1]
    actions = asked.pop("actions")
    rows, size, name = [], "", label(text)
    with Clock() as clock:
        compiled = _compile(adapter, compile, asked)
        stream = open_stream(adapter, text, **asked, noise=noise)
        changes = change_frames(adapter, stream.session, wanted, video.frames)
        chunks = rollout(
            adapter, frames=video.frames, actions=actions, then=changes, stream=stream,
            overlap_decode=True,
        )  # fmt: skip
        with (
            frames_bar(video.frames, video.quiet) as watch,
            VideoWriter(target, adapter.fps, background=runs_beside(adapter.device)) as file,
        ):
            for chunk in chunks:
                clock.lap(chunk)
                file.write(chunk.frames)
                rows.append(chunk.stats)
                size = size_of(chunk)
                watch(name, chunk)
    found = rates(rows)
    sums = summary(rows) | found | {"load_s": load_s}
    run = Run(name, str(stream.session.plan), rows, sums, notes(stream.session, rows))
    if not video.quiet:
        print(tell_rates(name, found, load_s))
        show_runs([run])
        follow = "" if first is None else f", after the {len(asked['first'])} of {first}"
        changed = "".join(f"; from frame {at} on {prompt!r}" for at, prompt in changes)
        print(f"{target}{replaced}: {file.frames} frames of {size}{follow}{changed}")
    row: dict[str, Any] = {"name": name, "plan": run.plan, "model": adapter.name, "size": size}
    row |= {"decoder": adapter.decoder_name, "compiled": compiled}
    emit(document("generate", [row | dict(run.summary) | {"notes": run.notes}], said), json)


def _fitted(frames: Frames, size: tuple[int, int], resize: bool) -> Frames:
    """Given frames of the video's size, resized where that was asked for."""
    from tachyscope.video import resize_frames

    given: tuple[int, ...] = frames.shape[1:3]
    if given == size:
        return frames
    if not resize:
        told = ["{}x{}".format(*pixels) for pixels in (given, size)]
        raise TachyscopeError(
            f"--first has frames of {told[0]} (height x width), the video is {told[1]}: add "
            f"--resize, which cuts them in their middle and scales them"
        )
    return resize_frames(frames, *size)


@app.command
def compare(
    model: str,
    /,
    *,
    out: PathOption,
    plan: str = "fast",
    video: Video = VIDEO,
    floor: bool = True,
    aa: bool = True,
    compile: bool | None = None,
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
    compile
        Compile the layers of a Wan-type model first; left out, where a GPU and many chunks make it
        pay.
    json
        A file for the results, or - for the last line of stdout.
    """
    from tachyscope.compare import compare as play_both
    from tachyscope.compare import tell_floor
    from tachyscope.files import check_folder
    from tachyscope.models.registry import MODELS
    from tachyscope.progress import frames_bar
    from tachyscope.results import check_json, emit
    from tachyscope.tables import show_runs

    text, asked = video.planned(plan, model), video.asked()
    check_json(json)
    check_folder(out)
    begun = time.perf_counter()
    adapter = video.load(model)
    twin = video.load(model, OTHER[video.dtype]) if floor else None
    load_s = time.perf_counter() - begun
    _compile(adapter, compile, asked)
    visit, walk = video.visit(model, adapter)
    if visit is not None:
        walk["truth"] = visit.new_frames(video.given)
    with frames_bar(video.frames, video.quiet) as watch:
        found = play_both(
            adapter, text, **(asked | walk), out=out, twin=twin, aa=aa, command=said,
            about=_about(MODELS[model], video.weights), load_s=load_s, watch=watch,
        )  # fmt: skip
    if not video.quiet:
        print(found.lead)
        show_runs(found.runs)
        print(tell_floor(found))
        print(*(out / name for name in ("compare.mp4", "report.html")), sep="\n")
    emit(found.document, json)


@app.command
def inspect(
    model: str,
    /,
    *,
    out: PathOption,
    plan: str = "dense",
    video: Video = VIDEO,
    rounds: Whole = 3,
    json: Json = None,
    said: Said = "",
) -> None:
    """Measure why the methods can work on a model: time, likeness of frames, attention's mass.

    Parameters
    ----------
    model
        A name that `tachyscope models` lists.
    out
        Folder for inspect.json and the plots: time, similarity and mass, as PNG and SVG.
    plan
        What the video is made by: a name that `tachyscope methods` lists, or one with changes.
    rounds
        How many rollouts are timed, beside the one that is observed.
    json
        A file for the results, or - for the last line of stdout.
    """
    from tachyscope.files import check_folder
    from tachyscope.inspection import inspect_model, lines, write
    from tachyscope.progress import frames_bar
    from tachyscope.results import check_json, emit

    text, asked = video.planned(plan, model), video.asked()
    check("rounds", rounds)
    check_json(json)
    check_folder(out)
    adapter = video.load(model)
    asked |= video.visit(model, adapter)[1]
    with frames_bar(video.frames, video.quiet) as watch:
        found = inspect_model(adapter, text, **asked, rounds=rounds, command=said, watch=watch)
    paths = write(found, out)
    if not video.quiet:
        print(*lines(found), "", *paths, sep="\n")
    emit(found, json)


@app.command(name="eval")
def evaluate(
    what: Literal["atrium"],
    /,
    *,
    plan: tuple[str, ...] = (),
    worlds: OptionalWhole = None,
    seed: Whole = 0,
    quick: bool = False,
    only: Literal["both", "world", "tokens", "views"] = "both",
    device: str = "cpu",
    json: Json = None,
    said: Said = "",
) -> None:
    """Measure the shipped models and plans in unseen worlds whose truth is known.

    Parameters
    ----------
    what
        The world.
    plan
        A plan of the world model, a name or one with changes; may be given several times. Without
        any: dense, balanced, fast.
    worlds
        How many worlds; intervals are over them. 16 if not given, 4 when it must be quick.
    seed
        Another seed, other worlds.
    quick
        Fewer worlds, frames and measures.
    only
        One of the two models; or views: what a prompt names at first sight, in 200 worlds.
    device
        cpu, cuda or cuda:N; a token's time is always taken on the CPU.
    json
        A file for the results, or - for the last line of stdout.
    """
    from tachyscope.evaluation.atrium import evaluate_atrium, lines
    from tachyscope.models.registry import find_device
    from tachyscope.plan import check_text
    from tachyscope.progress import parts_bar
    from tachyscope.results import check_json, emit

    # faults show before it is said that this takes minutes
    if worlds is not None:
        check("worlds", worlds)
    check("seed", seed)
    for text in plan:
        check_text(text)
    find_device(device)
    check_json(json)
    with parts_bar() as watch:
        found = evaluate_atrium(
            plan, only=only, worlds=worlds, device=device, seed=seed, quick=quick, command=said,
            watch=watch,
        )  # fmt: skip
    if json != "-":
        print(*lines(found), sep="\n")
    emit(found, json)


def _compile(model: VideoModel, wanted: bool | None, asked: dict[str, Any]) -> bool:
    """Compile the model's layers where that is asked for, or pays; whether it was done."""
    from tachyscope.stream import chunks_for

    if wanted is None:
        chunks = chunks_for(model, model.shape(asked["size"]).chunk, 0, asked["frames"])
        wanted = model.compiling_pays(chunks)
    if wanted:
        model.compile()
    return wanted


def _kind(model: str) -> str:
    """Which named plans a model means, as far as its name tells."""
    from tachyscope.models.registry import MODELS

    return MODELS[model].kind if model in MODELS else "chunks"


def _about(model: Entry, weights: str | None) -> str:
    random = model.random or weights == "random"
    more = " Its weights are random, so its pictures say nothing of quality." if random else ""
    return f"Model: {model.about}.{more}"


@bench_app.command
def cpu(
    *,
    model: str = "toy-chunks",
    plans: str = "fast;balanced",
    frames: Whole = 48,
    rounds: Whole = 5,
    at: str | None = None,
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
    at
        Latent frames, set apart by commas: time single chunks after so many, their caches filled
        with random entries, instead of whole runs.
    json
        A file for the results, or - for the last line of stdout.
    """
    from tachyscope.bench import bench_asked, lines, split_plans
    from tachyscope.models.registry import load
    from tachyscope.progress import rounds_bar
    from tachyscope.results import check_json, emit

    texts = split_plans(plans)
    check_json(json)
    adapter = load(model)
    with rounds_bar(rounds if at is None else len(at.split(","))) as watch:
        found = bench_asked(
            adapter, texts, at=at, frames=frames, rounds=rounds, command=said, watch=watch
        )
    print(*lines(found), sep="\n")
    emit(found, json)


@bench_app.command
def wan(
    *,
    model: str = "self-forcing",
    weights: OptionalPathText = None,
    table: str = "main",
    rows: str | None = None,
    size: str = "480x832",
    lengths: str | None = None,
    rounds: Whole = 5,
    rollout: OptionalWhole = None,
    decode: bool = False,
    decoder: str | None = None,
    traced: bool = False,
    compile: bool | None = None,
    device: str = "cuda",
    dtype: str = "bfloat16",
    seed: Whole = 0,
    json: Json = None,
    said: Said = "",
) -> None:
    """Time a Wan-type model of full size: single chunks after filled caches, or whole rollouts.

    Parameters
    ----------
    model
        A name that `tachyscope models` lists, or a size: wan_1.3b, wan_14b.
    weights
        The checkpoint; left out, weights are random, which changes no time.
    table
        Which rows: main or all.
    rows
        Names of rows, or plans, set apart by ';', instead of a table's.
    size
        HEIGHTxWIDTH in pixels.
    lengths
        Latent frames, set apart by commas, before the chunks that are timed.
    rounds
        Chunks timed at each length.
    rollout
        Make so many pixel frames by each row (the headline's) instead, one chunk after the other.
    decode
        Of a rollout, also make it as a user meets it: decoded, beside the next chunk.
    decoder
        Decode by a tiny decoder's file, or by random-tiny, one of random weights.
    traced
        Fill caches from a trained model instead of at random.
    compile
        Compile the transformer's layers; on CUDA unless told not to.
    device
        cuda, cuda:N or cpu.
    dtype
        float32, float64 or bfloat16.
    seed
        Of noise and random entries.
    json
        A file for the results, written after every row, or - for the last line of stdout.
    """
    from tachyscope.bench.wan import bench_wan_asked, wan_lines
    from tachyscope.results import check_json, emit

    check_json(json)
    found = bench_wan_asked(
        model, weights, table=table, rows=rows, size=size, lengths=lengths, rounds=rounds,
        rollout=rollout, decode=decode, decoder=decoder, traced=traced, compile=compile,
        device=device, dtype=dtype, seed=seed, json=json, command=said,
    )  # fmt: skip
    print(*wan_lines(found), sep="\n")
    emit(found, json)


@bench_app.command
def fit(
    model: str,
    /,
    *,
    plan: str = "fast",
    frames: Whole = 48,
    size: str | None = None,
    prompt: str = "",
    weights: OptionalPathText = None,
    dtype: str = "bfloat16",
    gpu_gb: OptionalNumber = None,
    json: Json = None,
    said: Said = "",
) -> None:
    """Predict a plan's peak memory without running it, and whether it fits a GPU.

    Parameters
    ----------
    model
        A name that `tachyscope models` lists, or a size: wan_1.3b, wan_5b, wan_14b.
    plan
        A name that `tachyscope methods` lists, or one with changes: 'fast replay=none'.
    frames
        Pixel frames of the video.
    size
        HEIGHTxWIDTH in pixels, in models that make more than one size.
    prompt
        Counts in models that hold it in their cache.
    weights
        The checkpoint, where the model's name stands for an architecture.
    dtype
        float32, float64 or bfloat16.
    gpu_gb
        The GPU's memory in GB.
    json
        A file for the results, or - for the last line of stdout.
    """
    from tachyscope.arguments import parse_size
    from tachyscope.memory import fit as predict
    from tachyscope.memory import lines, sized
    from tachyscope.plan import check_text
    from tachyscope.results import check_json, emit

    check_text(plan, _kind(model))  # its faults show before a model is made
    pixels = parse_size(size)
    check_json(json)
    found = predict(
        sized(model, weights, dtype), plan, frames=frames, size=pixels, prompt=prompt,
        gpu_gb=gpu_gb, command=said,
    )  # fmt: skip
    print(*lines(found), sep="\n")
    emit(found, json)


@app.command
def methods(*, json: Json = None) -> None:
    """List every policy with its paper and parameters, and every named plan.

    Parameters
    ----------
    json
        A file for the list, or - for the last line of stdout.
    """
    from tachyscope.plan import NAMED
    from tachyscope.results import check_json, emit
    from tachyscope.tables import list_policies, show_methods

    check_json(json)
    found = {"schema": 1, "suite": "methods", "policies": list_policies(), "plans": NAMED}
    if json != "-":
        show_methods(found)
    emit(found, json)


@app.command
def models(*, json: Json = None) -> None:
    """List the models, what they are and what they make.

    Parameters
    ----------
    json
        A file for the list, or - for the last line of stdout.
    """
    from tachyscope.results import check_json, emit
    from tachyscope.tables import list_models, show_models

    check_json(json)
    found = {"schema": 1, "suite": "models", "models": list_models()}
    if json != "-":
        show_models(found)
    emit(found, json)


@app.command
def doctor(*, json: Json = None, said: Said = "") -> None:
    """Say what this machine has, and whether it can make and write a video.

    Parameters
    ----------
    json
        A file for the findings, or - for the last line of stdout.
    """
    from tachyscope.results import check_json, document, emit
    from tachyscope.tables import examine, show_doctor

    check_json(json)
    found = document("doctor", examine(), said)
    if json != "-":
        show_doctor(found)
    emit(found, json)
    if broken := [row["check"] for row in found["rows"] if row["needed"] and not row["ok"]]:
        raise TachyscopeError(f"this machine cannot serve: {', '.join(broken)} failed, see above")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code, as `run_command` tells it."""
    words = list(sys.argv[1:] if argv is None else argv)
    asked = [word for word in words if word != TRACEBACK]
    return run_command(lambda: _run(asked), show_traceback=len(asked) < len(words))


def _run(words: Sequence[str]) -> None:
    try:
        verb, given, unparsed = app.parse_args(words)
    except CycloptsError as error:
        raise TachyscopeError(worded(error)) from error
    more = {"said": shlex.join(["tachyscope", *words])} if "said" in unparsed else {}
    try:
        with _printing_warnings():
            verb(*given.args, **given.kwargs, **more)
    except TachyscopeError as error:
        raise TachyscopeError(as_typed(str(error), option_names(verb))) from error


@contextmanager
def _printing_warnings() -> Iterator[None]:
    """Our own warnings as a line each on stderr, every one once."""
    with warnings.catch_warnings():
        # Python's own "once" begins anew with every other change of filters
        warnings.simplefilter("always", TachyscopeWarning)
        others, printed = warnings.showwarning, set[str]()

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if not issubclass(category, TachyscopeWarning):
                others(message, category, *rest, **more)
            elif str(message) not in printed:
                printed.add(str(message))
                print(f"tachyscope: note: {message}", file=sys.stderr)

        warnings.showwarning = show
        yield
