"""Every method at equal bytes on the GPU and at equal pairs read, against the truth of worlds.

A method's one free number is found from the model's shape: the largest with which its cache takes
no more bytes, or its queries read no more entries, than a window of REFERENCE latent frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tachyscope.attention.ann import Ann
from tachyscope.attention.dense import Dense
from tachyscope.core.arguments import parse_plan
from tachyscope.core.errors import TachyscopeError, first_line, shown
from tachyscope.core.limits import check
from tachyscope.core.plan import Plan
from tachyscope.io.results import Document, Parts
from tachyscope.io.tables import format_table
from tachyscope.memory.predict import MetaSession
from tachyscope.models.atrium.world import TURN
from tachyscope.models.wan.model import WanModel
from tachyscope_lab.evaluation.intervals import combined
from tachyscope_lab.evaluation.scenes import check_pace, frames_a_step, make_world
from tachyscope_lab.evaluation.world import Request, measured_dtype, world_models
from tachyscope_lab.evaluation.world_rows import AT_ONCE, Task, play_tasks

REFERENCE = 21  # latent frames of the window that all are held to
# {n}: the number that is found; {keep}, {sink}: in the paper's ratio to it; {all}: latent frames of
# the whole video; {k}: past entries that the window reads; {twice}: its latent frames twice
SIZED = {
    "window": "lossless cache=window:budget={n}f",
    "merge": "lossless cache=merge:budget={n}f,newest=3",
    "dedup": "lossless cache=dedup:budget={n}f,newest=3",
    "frames": "lossless cache=frames:budget={n}f",
    # a quarter of a latent frame: an index of blocks of 4 takes as much as the window
    "bank": "lossless cache=bank:resident={n}f,budget={all}f attention=ann:read=1,block=16",
    "live": "live cache=dedup:budget={n}f",
    "memrope": "lossless cache=memrope:budget={n}f",
    "deep_forcing": "lossless cache=deep_forcing:budget={n}f,keep={keep},sink={sink}",
    "worldkv": "lossless cache=worldkv:retrieve={n},budget={all}f",
    "int8": "lossless cache=dedup:budget={n}f,newest=3 store=int8",
    "fp8": "lossless cache=dedup:budget={n}f,newest=3 store=fp8",
    "int4": "lossless cache=dedup:budget={n}f,newest=3 store=int4",
    # which keeps whole latent frames alone
    "int2": "lossless cache=frames:budget={n}f store=int2",
    "radial": "lossless cache=window:budget={n}f attention=radial",
    "svg": "lossless cache=window:budget={n}f attention=svg",
    "svg2": "lossless cache=window:budget={n}f attention=svg2",
    "teacache": "lossless cache=window:budget={n}f passes=teacache:threshold=0.15",
    "flowcache": "lossless cache=window:budget={n}f passes=flowcache:threshold=0.2",
}
# these keep more than they read, and read as much as the window
READING = {
    "bank k": "lossless cache=bank:resident={twice}f,budget={all}f attention=ann:k={k}",
    "ann k": "lossless attention=ann:k={k}",
}
# as their authors set them, whatever they keep and read
PUBLISHED = {
    "dense": "dense",
    "balanced": "balanced",
    "fast": "fast",
    "pose": "pose",
    "similar": "lossless cache=bank:resident=21f,budget={all}f,host=int8 attention=similar",
    "fast-ar": "fast-ar",
    "radial": "lossless attention=radial",
    "svg": "lossless attention=svg",
    "svg2": "lossless attention=svg2",
    "memrope": "lossless cache=memrope",
    "deep_forcing": "lossless cache=deep_forcing",
    "worldkv": "lossless cache=worldkv:budget={all}f",
    "teacache": "lossless passes=teacache:threshold=0.15",
    "flowcache": "lossless passes=flowcache:threshold=0.2",
}
LONG = (
    "dense",
    "balanced",
    "pose",
    "window",
    "dedup",
    "bank",
    "bank k",
)  # also long videos, several times
GROUPS = ("bytes", "pairs", "published", "long")
MOST = 8 * REFERENCE  # latent frames: the largest number that is tried
QUALITY = ("revisit_db", "new_place_db", "identity", "psnr_truth", "identity_last")


@dataclass(frozen=True)
class Rival:
    """A method as it is measured: its plan, why it is set so, and by which walk."""

    name: str
    plan: str
    groups: tuple[str, ...]
    pace: float
    frames: int
    runs: int = 1

    @property
    def part(self) -> str:
        return f"{self.plan}, pace {self.pace:g}, {self.frames} frames, {self.runs} runs"

    def request(self, seed: int) -> Request:
        return Request(
            (self.plan,), seed, self.frames, recall=False, world=False, pace=self.pace,
            runs=self.runs,
        )  # fmt: skip


def rivals(
    model: WanModel, *, pace: float, frames: int, long_frames: int, runs: int
) -> list[Rival]:
    """All methods for a walk at a pace, each plan once; those of long videos last."""
    given = len(Request((), pace=pace).given)
    fitting = equal_bytes(model, given + frames)
    same: dict[str, list[tuple[str, str, str]]] = {}
    for group, chosen in (
        ("bytes", {name: _all(text, given + frames) for name, text in fitting.items()}),
        ("pairs", equal_pairs(model, given + frames)),
        ("published", {name: _all(text, given + frames) for name, text in PUBLISHED.items()}),
    ):
        for name, text in chosen.items():
            same.setdefault(str(parse_plan(model, text)), []).append((name, text, group))
    out = [
        Rival(*of[0][:2], tuple(dict.fromkeys(group for *_, group in of)), pace, frames)
        for of in same.values()
    ]
    # set as in the shorter videos: an index of all that a bank holds comes on top
    texts = PUBLISHED | fitting | {name: _reading(model, name) for name in READING}
    longer = [(name, _all(texts[name], given + long_frames)) for name in LONG]
    return out + [Rival(name, text, ("long",), pace, long_frames, runs) for name, text in longer]


def equal_bytes(model: WanModel, frames: int) -> dict[str, str]:
    """Plans whose caches take no more bytes on the device than the reference's, by name.

    The length of a video is left open, as {all}.
    """
    most = device_bytes(model, SIZED["window"].format(n=REFERENCE), frames)

    def fits(plan: str) -> bool:
        return device_bytes(model, _all(plan, frames), frames) <= most

    return {name: _largest(text, fits) for name, text in SIZED.items()}


def equal_pairs(model: WanModel, frames: int) -> dict[str, str]:
    """Plans whose queries read no more entries than the reference's, by name.

    Methods whose reading depends on contents, or on how much there is, are not among them.
    """
    shape = model.shape()
    most = REFERENCE * shape.tokens_per_frame
    out = {}
    for name, text in SIZED.items():
        smallest = parse_plan(model, _sized(_all(text, frames), REFERENCE))
        if smallest.passes != Plan().passes or entries_read(smallest, model) is None:
            continue

        def within(plan: str) -> bool:
            read = entries_read(parse_plan(model, plan), model)
            return read is not None and read <= most

        out[name] = _largest(_all(text, frames), within)
    return out | {name: _all(_reading(model, name), frames) for name in READING}


def _reading(model: WanModel, name: str) -> str:
    """A plan that reads as many past entries as the reference holds."""
    shape = model.shape()
    k = REFERENCE * shape.tokens_per_frame - shape.max_pass_tokens
    return READING[name].replace("{twice}", str(2 * REFERENCE)).replace("{k}", str(k))


def device_bytes(model: WanModel, plan: str, frames: int) -> int:
    """What a plan's caches take on the device after so many frames, from shapes alone."""
    shape, parsed = model.shape(), parse_plan(model, plan)
    shapes = MetaSession(
        shape, parsed, model.rope(shape), latent_frames=frames, lengths=(), dtype=model.dtype
    )
    return sum(shapes.tensors().values())


def entries_read(plan: Plan, model: WanModel) -> int | None:
    """Entries that a query reads of a full cache; None where no shape tells."""
    shape = model.shape()
    slots = plan.cache.capacity(shape, 0, None)
    past = slots - shape.max_pass_tokens
    if isinstance(plan.attention, Ann):
        if plan.attention.read is None:
            return None
        past = round(plan.attention.read * past)
    elif not isinstance(plan.attention, Dense):
        return None
    return past + shape.max_pass_tokens


def _sized(text: str, n: int) -> str:
    """A plan with its number; Deep Forcing has 21, 16 and 10 latent frames."""
    numbers = {"n": n, "keep": round(n * 16 / 21), "sink": round(n * 10 / 21)}
    for name, number in numbers.items():
        text = text.replace(f"{{{name}}}", str(number))
    return text


def _all(text: str, frames: int) -> str:
    return text.replace("{all}", str(frames))


def _largest(text: str, fits: Callable[[str], bool]) -> str:
    """The plan with the largest number that fits; numbers that a policy refuses do not."""

    def tried(n: int) -> bool | None:
        try:
            return fits(_sized(text, n))
        except TachyscopeError:
            return None

    top = 1
    while top < MOST and tried(top) is not False:
        top *= 2
    for n in range(top, 0, -1):
        if tried(n):
            return _sized(text, n)
    raise TachyscopeError(f"no size of {text} fits {REFERENCE} latent frames: leave it out")


def bench_rivals(
    *,
    rows: Sequence[str] = (),
    weights: str | None = None,
    device: str = "cpu",
    worlds: int = 16,
    seed: int = 0,
    frames: int = 208,
    long_frames: int = 1000,
    runs: int = 3,
    paces: Sequence[float] = (1.0, 0.25),
    jobs: int | None = None,
    seconds: float = 540,
    parts: Parts,
    report: Callable[[str], None] = print,
) -> Document:
    """Measure methods against the truth; a document whose rows are those measured so far.

    rows: names of methods, or of groups (bytes, pairs, published, long), instead of all. After so
    many seconds none is begun. A row has its plan, the groups it belongs to, pace, frames and runs,
    the quality of `evaluate_world` and what was counted: `pairs_frame`, `cache_mb` on the device,
    `host_mb`, `gmacs_frame`, and on a GPU with one job `frame_ms`, of a batch of up to 16. parts:
    keeps rows as they come, and has those of before. jobs: processes that play a method each, on a
    GPU 2, or 7 where NVIDIA's MPS runs. A slow pace needs a world model whose camera is told, and
    is left out without. report: is told what comes, a line at a time.
    """
    check("worlds", worlds)
    check("frames", frames)
    check("frames", long_frames)
    check("runs", runs)
    make_world(seed, worlds - 1)
    begun = time.monotonic()
    model, _ = world_models(weights, device)  # for its shape and dtype: others play
    parts.begin("rivals", model.name, model.fingerprint)
    wanted: list[Rival] = []
    for pace in paces:
        if pace != 1 and not model.camera:
            report(f"pace {pace:g} is left out: {model.name} is not told where its camera stands")
            continue
        check_pace(model, pace)
        turn_frames = TURN * frames_a_step(pace)
        if min(frames, long_frames) < turn_frames:
            raise TachyscopeError(
                f"a video has {turn_frames} frames or more at pace {pace:g}, a full turn, got "
                f"{min(frames, long_frames)}: ask for more"
            )
        wanted += rivals(model, pace=pace, frames=frames, long_frames=long_frames, runs=runs)
    known = [*dict.fromkeys(one.name for one in wanted), *GROUPS]
    for name in rows:
        if name not in known:
            raise TachyscopeError(f"no row {shown(name)}; there are: {', '.join(known)}")
    chosen = [one for one in wanted if not rows or {one.name, *one.groups} & set(rows)]
    left = [one for one in chosen if parts.get(one.part) is None]

    def turn(one: Rival) -> tuple[int, int, bool]:
        # of a group those that keep everything take longest, and are begun first
        grows = parse_plan(model, one.plan).cache.grows
        return one.frames, GROUPS.index(one.groups[0]), not grows

    left.sort(key=turn)
    starts = range(0, worlds, AT_ONCE)
    by_request = {one.request(seed): one for one in left}

    def tasks() -> Iterator[Task]:
        for request in by_request:
            if time.monotonic() - begun < seconds:
                yield from (Task(request, start) for start in starts)

    measured: dict[Request, dict[int, Document]] = {}
    for task, result in play_tasks(weights, device, False, worlds, jobs, tasks()):
        one, values = by_request[task.request], measured.setdefault(task.request, {})
        if isinstance(result, Exception):
            report(f"{one.name} failed: {first_line(result)}")
            continue
        values[task.start] = result
        if len(values) == len(starts):
            row = _row(model, one, [row for start in starts for row in values[start]["rows"]])
            parts.add(one.part, row)
            report(f"{one.name} ({', '.join(one.groups)}): {row['revisit_db']:.1f} dB")
    missing = sum(parts.get(one.part) is None for one in wanted)
    if missing:
        report(f"{missing} of {len(wanted)} rows are missing: go on with --resume")
    unfinished = {"unfinished": True} if missing else {}
    document = parts.document(dtype=measured_dtype(device), **unfinished)
    order = {one.part: i for i, one in enumerate(wanted)}
    document["rows"].sort(key=lambda row: order.get(row["part"], len(order)))
    return document


def _row(model: WanModel, one: Rival, by_world: Sequence[Document]) -> Document:
    sums = combined([{k: v for k, v in x.items() if k not in HELD} for x in by_world])
    sums["by_world"] = {key: sums["by_world"][key] for key in QUALITY if key in sums}
    return {
        "name": one.name,
        "plan": str(parse_plan(model, one.plan)),
        "asked": one.plan,
        "groups": list(one.groups),
        "model": model.name,
        "pace": one.pace,
        "frames": one.frames,
        "runs": one.runs,
        "worlds": len(by_world),
    } | sums


# of dense frames that another piece of the table may not have
HELD = ("psnr_dense", "work_dense")


COLUMNS = {
    "revisit_db": ("revisit", 1.0, 1),
    "revisit_db_worst": ("worst", 1.0, 1),
    "new_place_db": ("anew", 1.0, 1),
    "identity": ("same %", 100.0, 0),
    "identity_worst": ("worst", 100.0, 0),
    "identity_last": ("at end %", 100.0, 0),
    "density": ("pairs %", 100.0, 1),
    "simulated_density": ("less masked", 100.0, 1),
    "cache_mb": ("GPU MB", 1.0, 1),
    "host_mb": ("host MB", 1.0, 1),
    "gmacs_frame": ("GMAC a frame", 1.0, 2),
    "frame_ms": ("ms a frame", 1.0, 2),
}


def lines(document: Document) -> list[str]:
    """The table as a reader wants it, one for each group and pace."""
    out: list[str] = []
    rows = document["rows"]
    for pace in dict.fromkeys(row["pace"] for row in rows):
        for group in GROUPS:
            some = [row for row in rows if row["pace"] == pace and group in row["groups"]]
            if not some:
                continue
            keys = [key for key in COLUMNS if any(row.get(key) is not None for row in some)]
            cells = [
                [row["name"], *(_cell(row, key) for key in keys), row["asked"]] for row in some
            ]
            first = some[0]
            out.append(
                f"{TITLES[group]}, pace {pace:g}, {first['frames']} frames, {first['worlds']} "
                f"rooms, {first['runs']} runs"
            )
            out += format_table(["method", *(COLUMNS[key][0] for key in keys), "plan"], cells)
    out.append(
        "dB to the truth, mean over rooms (worst: the worst room; anew: from new places); same: "
        "surfaces in view that are right; pairs of dense's (less masked: less those that a GPU "
        "scored and masked); MB of one video"
    )
    return out


TITLES = {
    "bytes": f"equal bytes on the GPU: a window of {REFERENCE} latent frames",
    "pairs": f"equal pairs read: a window of {REFERENCE} latent frames",
    "published": "as published",
    "long": "long videos, equal bytes",
}


def _cell(row: Document, key: str) -> str:
    value = row.get(key)
    _, scale, digits = COLUMNS[key]
    return "" if value is None else f"{scale * value:.{digits}f}"
