"""A token model on a CPU: what a token costs by plan, where a step is one native program.

Plans take turns in every round, dense among them twice, in an order drawn anew: a machine that
others use is faster now and slower then. Ratios are medians over rounds of dense / plan.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tachyscope.attention.dense import Dense
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.meter import summary
from tachyscope.core.opening import open as open_stream
from tachyscope.decode import quantise, store_bf16
from tachyscope.decode.cpu import is_direct
from tachyscope.io.results import Document, document
from tachyscope.measure.noise import noise, verdict
from tachyscope.models.registry import load
from tachyscope.models.token_model import Sampler
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.depth import DepthConfig
from tachyscope.models.vila_u.model import VilaModel
from tachyscope.models.vila_u.vqgan import PixelConfig
from tachyscope_lab.bench.device_clock import memory_rates
from tachyscope_lab.bench.random_vila import random_vila
from tachyscope_lab.bench.token_rows import FRAMES, ROWS
from tachyscope_lab.bench.tokens import LATER, Clock, Timed, weight_bytes

SHAPES = ("1b", "atrium-tokens")
WEIGHTS = ("float32", "bf16", "int8")
NAMES = (
    "dense", "replay80", "all", "neurons75", "window16", "all-window16", "neurons75-window16",
)  # fmt: skip
AGAIN, HOLLOW = "again", "no-mlp"  # dense once more, and without its MLPs
PROMPT, CAMERAS, DRAFTS = "a red room", {"still": ".", "walk": "w"}, (8, 16, 32)
GOLDEN = 0.6180339887498949
TOKENS = {"1b": 2, "atrium-tokens": 24}  # timed in a row


def vila_1b(layers: int | None = None) -> VilaConfig:
    """A trunk of Llama-3.2-1B's shape, and a depth transformer in proportion; one row."""
    return VilaConfig(
        hidden=2048, intermediate=8192, layers=layers or 16, heads=32, kv_heads=8, head_dim=64,
        vocab=261, eps=1e-5, grid=(16, 16), depth=4, codes=4096, code_dim=256,
        head=DepthConfig(width=1024, layers=4, heads=16),
        pixels=PixelConfig(
            ch=8, ch_mult=(1, 1, 2, 2), num_res_blocks=1, attn_resolutions=(), z_channels=16,
            resolution=128, groups=4,
        ),
        sampler=Sampler(cfg=1.0), tokenizer="bytes",
    )  # fmt: skip


def bench_tokens_cpu(
    model: str | VilaConfig = "1b",
    names: Sequence[str] = NAMES,
    *,
    weights: Sequence[str] = ("bf16",),
    rounds: int = 5,
    tokens: int | None = None,
    command: str = "",
    on_line: Callable[[str], None] | None = None,
) -> Document:
    """Time a token's trunk and whole step by each row's plan, for every kind of weights.

    model: of SHAPES, or a configuration, whose weights are then random. tokens: timed in a row.
    `on_line` is handed a line after every round.
    """
    _check(model, names, weights)
    device = torch.device("cpu")
    trained = model == "atrium-tokens"
    name = model if isinstance(model, str) else "vila-u-random"
    rate = memory_rates(device)["read_tb_s"]
    rows: list[Document] = []
    widest = (1.0, 1.0)
    with torch.inference_mode():
        for kind in weights:
            config = vila_1b() if model == "1b" else model
            made = load("atrium-tokens") if isinstance(config, str) else None
            one: Any = made or random_vila(config, device, torch.float32)  # type: ignore[arg-type]
            places = one.config.grid[0] * one.config.grid[1]
            for part in (one.transformer.trunk, one.transformer.head):
                if kind == "bf16":
                    store_bf16(part)
                elif kind == "int8":
                    quantise(part, "int8")
            count = tokens or TOKENS.get(name, 4)
            clock = Clock(device, rounds, min(count, places // 4), places // 2 - places // 16)
            begun = time.perf_counter()
            takes, timed = _takes(one, names, clock, partial(_tell, on_line, kind))
            measured, aa = _rows(takes, timed, rate)
            widest = min(widest[0], aa[0]), max(widest[1], aa[1])
            more = {"weights": kind, "model": name, "trained": trained, "places": places}
            more["seconds"] = time.perf_counter() - begun
            rows += [row | more for row in measured]
            if trained:
                rows += [row | more for row in _videos(one, rounds, measured[0])]
            del one, timed
    head = {"threads": torch.get_num_threads(), "read_gb_s": 1e3 * rate}
    return document("bench-tokens-cpu", rows, command, widest, **head)


def _videos(model: VilaModel, rounds: int, dense: Document) -> list[Document]:
    """Frames of real videos by plans against dense's, by turns: drafts, and replay by inputs.

    `dense` is that row: what MLPs take of its step tells what replay can reach.
    """
    model.compile()
    rows = []
    for camera, letter in CAMERAS.items():
        plans = {"dense": "dense", AGAIN: "dense"}
        plans |= {f"draft{n}": f"dense passes=draft:places={n}" for n in DRAFTS}
        plans["input75"] = "dense replay=input:share=0.75"
        streams = {
            name: open_stream(model, plan, prompt=PROMPT, frames=rounds + 2)
            for name, plan in plans.items()
        }
        action = [model.actions.index(letter)]
        takes: dict[str, list[float]] = {name: [] for name in plans}
        counts: dict[str, list[dict[str, float]]] = {name: [] for name in plans}
        draw = random.Random(0)
        for i in range(rounds + 2):
            for name in draw.sample(list(plans), len(plans)):
                begun = time.perf_counter()
                stats = streams[name].generate(action).stats
                if i > 1:  # a second frame is the first that has one to draft from
                    takes[name].append(1e3 * (time.perf_counter() - begun))
                    counts[name].append(stats)
        aa = noise(takes["dense"], takes[AGAIN])
        places = model.shape().tokens_per_frame
        mlps = dense["mlp_share"] * dense["trunk_points_ms"][2] / dense["step_middle_ms"]
        for name in list(plans)[2:]:
            ratios = [a / b for a, b in zip(takes["dense"], takes[name], strict=True)]
            row: Document = {"name": name, "camera": camera, "plan": plans[name], "aa": list(aa)}
            row |= {"frame_ms": statistics.median(takes[name]), "frame_takes_ms": takes[name]}
            row["frames_s"] = 1e3 / row["frame_ms"]
            row |= verdict(ratios, aa)
            total = summary(counts[name])
            accepted = total.get("drafts_accepted", 0.0) / rounds
            row["places_a_pass"] = places / (places - accepted)
            replayed = total["rows_replayed"] / (total["rows_replayed"] + total["rows_computed"])
            if replayed:
                row |= {"replayed": replayed, "limit": 1 / (1 - replayed * mlps)}
                row["of_limit"] = row["ratio_dense"] / row["limit"]
            rows.append(row)
    return rows


def _tell(on_line: Callable[[str], None] | None, kind: str, line: str) -> None:
    if on_line is not None:
        on_line(f"{kind}, {line}")


def _check(model: Any, names: Sequence[str], weights: Sequence[str]) -> None:
    shapes = () if isinstance(model, VilaConfig) else (model,)
    choices = (("shape", shapes, SHAPES), ("row", names, ROWS), ("weights", weights, WEIGHTS))
    for what, given, known in choices:
        for one in given:
            if one not in known:
                raise TachyscopeError(f"no {what} {one!r}; there are: {', '.join(known)}")
    if "dense" not in names:
        raise TachyscopeError(f"`rows` are held against dense, got {', '.join(names)}: add dense")


Take = dict[str, list[float]]


def _takes(
    model: VilaModel, names: Sequence[str], clock: Clock, on_line: Callable[[str], object]
) -> tuple[dict[str, list[Take]], dict[str, Timed]]:
    """Of every row, rounds of a token's milliseconds: the trunk at four frames, depth and step."""
    turns = [*names, AGAIN, HOLLOW]
    timed = {
        name: Timed(model, ROWS["dense" if name in (AGAIN, HOLLOW) else name], clock)
        for name in turns
    }
    for one in timed.values():
        _spread_luck(one)
    for name in turns:  # programs are built, and memory met, before a clock runs
        for frame in (0, *LATER):
            timed[name].ms(_trunk(name), frame)
    takes: dict[str, list[Take]] = {name: [] for name in turns}
    draw = random.Random(0)
    for i in range(clock.rounds):
        for name in draw.sample(turns, len(turns)):
            one = timed[name]
            take = {"trunk": [one.ms(_trunk(name), frame) for frame in (0, *LATER)]}
            if name != HOLLOW:
                take["step"] = [one.ms("step", LATER[1])]
                take["depth"] = [one.ms("depth", LATER[1])]
            takes[name].append(take)
        on_line(f"round {i + 1} of {clock.rounds}")
    return takes, timed


def _spread_luck(one: Timed) -> None:
    """Numbers for draws that lie evenly: of few tokens as many are replayed as of many."""
    luck, count = one.engine.luck, one.clock.tokens
    draws = torch.arange(luck.shape[0] * count).add(0.5).mul(GOLDEN).frac()
    start = one.clock.start
    luck[:, start : start + count] = draws.view(-1, count, 1)


def _trunk(name: str) -> str:
    return "hollow" if name == HOLLOW else "trunk"


def _video(trunk: Sequence[float]) -> float:
    """A token's mean over a video, of its times at frame 0 and at LATER."""
    return (trunk[0] + (FRAMES - 1) * statistics.mean(trunk[1:])) / FRAMES


def _rows(
    takes: dict[str, list[Take]], timed: dict[str, Timed], rate: float
) -> tuple[list[Document], tuple[float, float]]:
    dense = takes["dense"]
    aa = noise(*([_video(take["trunk"]) for take in takes[name]] for name in ("dense", AGAIN)))

    def ratio(name: str, of: Callable[[Take], float]) -> list[float]:
        return [of(a) / of(b) for a, b in zip(dense, takes[name], strict=True)]

    # what a trunk without MLPs takes of dense's time, after frame 0
    rest = 1 / statistics.median(ratio(HOLLOW, lambda take: statistics.mean(take["trunk"][1:])))
    rows = []
    for name, one in timed.items():
        if name in (AGAIN, HOLLOW):
            continue
        points = [
            statistics.median(x) for x in zip(*(t["trunk"] for t in takes[name]), strict=True)
        ]
        step, depth = (statistics.median(t[k][0] for t in takes[name]) for k in ("step", "depth"))
        shape = one.session.shape
        later = ratio(name, lambda take: statistics.mean(take["trunk"][1:]))
        ms = _video(points)
        row: Document = {
            "name": name, "plan": str(one.session.plan), "trunk_points_ms": points,
            "trunk_ms": ms, "depth_ms": depth, "step_middle_ms": step,
            "trunk_takes_ms": [take["trunk"] for take in takes[name]],
            "step_ms": ms + step - points[2], "later_speedup": statistics.median(later),
            "step_speedup": statistics.median(ratio(name, lambda take: take["step"][0])),
            "mlp_share": 1 - rest,
        }  # fmt: skip
        row |= verdict(ratio(name, lambda take: _video(take["trunk"])), aa)
        row["frames_s"] = 1e3 / (row["step_ms"] * shape.tokens_per_frame)
        row |= _work(one, points[2], rate)
        if isinstance(one.session.plan.attention, Dense):
            row["limit"] = 1 / (rest + (1 - rest) * row["mlp_work"])
            row["of_limit"] = row["later_speedup"] / row["limit"]
        rows.append(row)
    return rows, aa


def _work(one: Timed, ms: float, rate: float) -> Document:
    """Bytes of a token in the video's middle and at what rate they are read; MLP work left."""
    engine, shape = one.engine, one.session.shape
    mlp = engine.trunk.weights[0].mlp
    whole = sum(part.rows * part.columns for part in mlp.parts)
    left = 1.0
    if engine.neurons is not None:
        left = engine.slice_work() / whole
    elif engine.gates:
        engine.counts.zero_()
        one.ms("trunk", LATER[0])
        skipped = int(engine.counts[:, 0].sum())
        left = 1 - skipped / (one.clock.tokens * shape.layers * shape.batch)
    entry = 2 * shape.batch * shape.kv_heads * shape.head_dim * one.session.dtype.itemsize
    values = {"mlp_work": left}
    if not engine.gates:
        size = weight_bytes(engine.trunk, engine.neurons is not None)
        if engine.neurons is not None:  # what only hands a square map on is not read
            parts = [part for part in engine.trunk.slices if is_direct(part)]
            size -= sum(part.linear**2 * part.down.data.element_size() for part in parts)
        size += entry * shape.layers * one.entries_read(LATER[1])
        values |= {"trunk_bytes": size, "gb_s": size / ms / 1e6, "of_read": size / ms / 1e9 / rate}
    return values
