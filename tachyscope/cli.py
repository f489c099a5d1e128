"""The command line: thin verbs over the package, and every fault one line on stderr."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import metadata
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
    help_format="plaintext",  # else the stars of 'w*20 a*24' are taken for emphasis
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
        from tachyscope.plan import NAMED, POLICIES, Plan

        parts = {part: getattr(self, part) for part in POLICIES}
        changes = [f"{part}={spec}" for part, spec in parts.items() if spec is not None]
        text = " ".join([plan, *changes])
        # which model it is for matters to what a name stands for, not to whether it is known
        Plan.parse(text, stock=NAMED["chunks"]["dense"])
        return text

    def asked(self) -> dict[str, Any]:
        """What a rollout is asked for, checked before a model is loaded."""
        if self.frames < 1:
            raise TachyscopeError(f"frames must be 1 or more, got {self.frames}")
        if not 0 <= self.seed < 2**63:
            raise TachyscopeError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")
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
    from tachyscope.bench import check_json, document, emit, label, notes, size_of
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
    rows, size, name = [], "", label(text)
    with _progress(video.frames) as watch, VideoWriter(target, adapter.fps) as file:
        for chunk in chunks:
            file.write(chunk.frames)
            rows.append(chunk.stats)
            size = size_of(chunk)
            watch(name, chunk)
    run = Run(name, str(session.plan), rows, summary(rows), notes(session, rows))
    _show([run])
    print(f"{target}: {file.frames} frames of {size}")
    row = {"name": name, "plan": run.plan, "model": adapter.name, "size": size}
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
    from tachyscope.bench import check_json, emit, speed_word
    from tachyscope.compare import compare as play_both
    from tachyscope.compare import tell_floor
    from tachyscope.files import check_folder
    from tachyscope.models import MODELS

    text, asked = video.planned(plan), video.asked()
    check_json(json)
    check_folder(out)
    adapter = video.load(model)
    twin = video.load(model, OTHER[video.dtype]) if floor else None
    with _progress(video.frames) as watch:
        found = play_both(
            adapter, text, **asked, actions=video.actions, out=out, twin=twin, aa=aa, command=said,
            about=_about(MODELS[model].about), watch=watch,
        )  # fmt: skip
    _show(found.runs)
    if found.aa is None:
        print("Speeds of single runs are no benchmark: try tachyscope bench cpu.")
    else:
        row = found.document["rows"][1]
        print(
            f"Speed to dense {row['ratio_dense']:.2f}x, {speed_word(row)}: "
            f"dense against itself gave {found.aa[0]:.2f}x to {found.aa[1]:.2f}x."
        )
    print(tell_floor(found))
    print(found.lead)
    print(*(out / name for name in ("compare.mp4", "report.html")), sep="\n")
    emit(found.document, json)


def _about(model: str) -> str:
    random = " Its weights are random, so its pictures say nothing of quality."
    return f"Model: {model}.{random if 'random' in model else ''}"


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
    from tachyscope.bench import check_json, emit
    from tachyscope.plan import NAMED

    check_json(json)
    found = {"schema": 1, "suite": "methods", "policies": _policies(), "plans": NAMED}
    if json != "-":
        _show_methods(found)
    emit(found, json)


@app.command
def models(*, json: Json = None) -> None:
    """List the models, what they are and what they make.

    Parameters
    ----------
    json
        A file for the list, or - for the last line of stdout.
    """
    from tachyscope.bench import check_json, emit

    check_json(json)
    found: dict[str, Any] = {"schema": 1, "suite": "models", "models": _models()}
    if json != "-":
        columns = ("name", "about", "kind", "size", "chunk", "actions")
        _print_table(columns, [[_cell(row[key]) for key in columns] for row in found["models"]])
    emit(found, json)


@app.command
def doctor(*, json: Json = None, said: Said = "") -> None:
    """Say what this machine has, and whether it can make and write a video.

    Parameters
    ----------
    json
        A file for the findings, or - for the last line of stdout.
    """
    from tachyscope.bench import check_json, document, emit

    check_json(json)
    found = document("doctor", _examine(), said)
    if json != "-":
        checks = {row["check"]: row for row in found["rows"]}
        facts = found["machine"] | found["versions"]
        rows = [
            [name, "", _cell(value)]
            for name, value in facts.items()
            if value is not None and name not in checks
        ]
        words = {True: "yes", False: "no"}
        rows += [[name, words[row["ok"]], row["found"]] for name, row in checks.items()]
        _print_table(("", "usable", "found"), rows)
    emit(found, json)
    if broken := [row["check"] for row in found["rows"] if row["needed"] and not row["ok"]]:
        raise TachyscopeError(f"this machine cannot serve: {', '.join(broken)} failed, see above")


def _policies() -> list[dict[str, Any]]:
    from tachyscope.plan import POLICIES, parameters

    found = []
    for part, known in POLICIES.items():
        for name, make in known.items():
            defaults = {field.name: field.default for field in fields(make)}
            settings = [
                {"name": key, "type": _type(kind), "default": _json_value(defaults[key])}
                for key, kind in parameters(make).items()
            ]
            about = inspect.cleandoc(make.__doc__).split("\n\n")[0].replace("\n", " ")
            policy = {"part": part, "name": name, "about": about, "paper": make.paper}
            found.append(policy | {"parameters": settings})
    return found


def _type(kind: Any) -> str:
    """A parameter's type as a reader writes its values."""
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(options)
    if options:
        return _type(options[0])
    return str(kind.__name__).lower()


def _json_value(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _models() -> list[dict[str, Any]]:
    from tachyscope.bench import size_of
    from tachyscope.models import MODELS, load
    from tachyscope.rollout import rollout

    found = []
    for name, entry in MODELS.items():
        row: dict[str, Any] = {"name": name, "about": entry.about, "weights": entry.weights}
        row["kind"] = typing.get_type_hints(entry.make)["return"].kind
        row |= dict.fromkeys(("size", "chunk", "fps", "actions", "stock"))
        if not entry.weights:
            model = load(name)
            row["size"] = size_of(next(rollout(model, frames=1)))
            row["chunk"] = model.shape().chunk
            row |= {key: getattr(model, key) for key in ("fps", "actions", "stock")}
        found.append(row)
    return found


def _examine() -> list[dict[str, Any]]:
    import torch

    found = []

    def note(check: str, needed: bool, ok: bool, what: str) -> None:
        found.append({"check": check, "needed": needed, "ok": ok, "found": what})

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device is usable"
    note("cuda", False, torch.cuda.is_available(), gpu)
    for package in ("triton", "diffusers", "transformers"):
        try:
            note(package, False, True, metadata.version(package))
        except metadata.PackageNotFoundError:
            note(package, False, False, "not installed")
    for check, attempt in (("libx264", _try_codec), ("rollout", _try_rollouts)):
        try:
            note(check, True, True, attempt())
        except Exception as error:  # whatever is wrong with the machine is what is asked for
            note(check, True, False, f"{type(error).__name__}: {error}".splitlines()[0])
    return found


def _try_codec() -> str:
    import av

    return f"{av.Codec('libx264', 'w').long_name}, av {av.__version__}"


def _try_rollouts() -> str:
    from tachyscope.models import MODELS, load
    from tachyscope.rollout import rollout

    names = [name for name, entry in MODELS.items() if not entry.weights]
    for name in names:
        for _ in rollout(load(name), "fast", frames=2):
            pass
    return f"{', '.join(names)} made 2 frames each"


def _show_methods(found: dict[str, Any]) -> None:
    rows = []
    for policy in found["policies"]:
        settings = [
            f"{p['name']}: {p['type']}"
            + ("" if p["default"] is None else f" = {_cell(p['default'])}")
            for p in policy["parameters"]
        ]
        about = "\n".join(filter(None, (policy["about"], policy["paper"])))
        rows.append([f"{policy['part']}={policy['name']}", about, "\n".join(settings)])
    _print_table(("policy", "what it does, and where it is from", "parameters"), rows)
    for kind, plans in found["plans"].items():
        _print_table((f"plan for {kind}", "stands for"), [list(pair) for pair in plans.items()])
    print("stock: what the model's authors run; see tachyscope models --json -")


def _show(runs: Sequence[Run]) -> None:
    """The runs' sums side by side, then what a reader must know of them."""
    from tachyscope.report import MEASURES

    rows = []
    for measure in MEASURES:
        cells = []
        for run in runs:
            value, simulated = (run.summary.get(f"{x}{measure.key}") for x in ("", "simulated_"))
            if simulated and not value:
                cells.append(f"{measure.write(simulated)} simulated")
            elif measure.key == "ratio_dense" and value and not run.summary["real"]:
                cells.append(f"{measure.write(value)} no verdict")
            else:
                cells.append("" if value is None else measure.write(value))
        if any(cells):
            rows.append([measure.name, *cells])
    _print_table(("", *(run.name for run in runs)), rows, numbers=True)
    for run in runs:
        print(f"{run.name}: {run.plan}")
        for note in run.notes:
            print(f"{run.name}: {note}")


def _print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if numbers and i else "left", overflow="fold")
    for row in rows:
        # as Text: a bracket in a plan is no markup
        table.add_row(*map(Text, row))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def _progress(frames: int) -> Iterator[Callable[[str, Chunk], None]]:
    """A bar a run on stderr, where a person looks on; the value takes a run's name and a chunk."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    console = Console(stderr=True)
    columns = ("{task.completed:.0f}/{task.total:.0f} frames", "{task.fields[told]}")
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), *map(TextColumn, columns),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    sums: dict[str, defaultdict[str, float]] = {}

    def watch(name: str, chunk: Chunk) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=frames, told="")
            sums[name] = defaultdict(float)
        total = sums[name]
        for key in ("frames", "chunk_ms", "pairs", "pairs_dense"):
            total[key] += chunk.stats[key]
        told = (
            f"{1e3 * total['frames'] / total['chunk_ms']:.1f} frames/s, "
            f"cache {chunk.stats['cache_mb']:.1f} MB, "
            f"density {total['pairs'] / total['pairs_dense']:.0%}"
        )
        bars.update(tasks[name], completed=total["frames"], told=told)

    with bars:
        yield watch


@contextmanager
def _rounds(rounds: int) -> Iterator[Callable[[int], None]]:
    """A bar of rounds on stderr, where a person looks on; the value takes how many are done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("rounds", total=rounds)
        yield lambda done: bars.update(task, completed=done)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; 0, or 2 after a fault, or 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        verb, given, unparsed = app.parse_args(words)
        more = {"said": shlex.join(["tachyscope", *words])} if "said" in unparsed else {}
        verb(*given.args, **given.kwargs, **more)
    except (TachyscopeError, CycloptsError) as error:
        return _fault(str(error))
    except RuntimeError as error:
        # torch has an error of its own for CUDA's memory, and only words for the CPU's
        cuda = type(error).__name__ == "OutOfMemoryError"
        if not cuda and "allocate memory" not in str(error):
            raise
        return _fault(
            "the memory is not enough: lower --frames or --size, or bound the cache, for example "
            "--cache window:budget=21f"
        )
    except KeyboardInterrupt:
        print("tachyscope: interrupted", file=sys.stderr)
        return 130
    return 0


def _fault(message: str) -> int:
    print(f"tachyscope: {' '.join(message.split())}", file=sys.stderr)
    return 2
