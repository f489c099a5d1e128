"""Kernels of a decode step on a CUDA device: which settings are fastest.

    python lab/scripts/tune_decode.py --out DIR [--only rates,piece,drafts,layer] [--jobs 14]
    python lab/scripts/tune_decode.py --settings DIR -- tokens --out DIR ...

Each part stands alone; results are appended to DIR/tune_decode.jsonl as they come. With --jobs that
many processes first compile what is then timed. Which settings were fastest is written to
DIR/settings.json; the second line runs a benchmark with these, or with --compile only compiles what
it would run. tests/test_kernels.py holds the kernels to their definitions.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tachyscope.kernels.decode_attention import (
    Entries,
    Rotation,
    Scratch,
    Step,
    decode_attention,
)
from tachyscope.kernels.decode_mlp import COPIES, Error, Kept, MlpWeights, decode_mlp
from tachyscope.kernels.decode_mlp import triton as mlp_triton
from tachyscope.kernels.gemv import Norm, Weight, gemv, to_codes
from tachyscope.kernels.gemv import triton as gemv_triton
from tachyscope.kernels.gemv.triton import Setting
from tachyscope.kernels.launch import Overlap
from tachyscope_lab.bench import device_clock
from tachyscope_lab.bench import tokens as bench_tokens
from tachyscope_lab.cli.app import main as main_lab

WIDTH, INNER, HEADS, HEAD_DIM, LAYERS = 4096, 11008, 32, 128, 8
BF16, KINDS = torch.bfloat16, {"device": "cuda", "dtype": torch.bfloat16}


class Log:
    """Lines of JSON, printed and written at once."""

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.start, self.seconds = folder / "tune_decode.jsonl", time.time(), seconds

    @property
    def over(self) -> bool:
        return time.time() - self.start > self.seconds

    def __call__(self, **row: Any) -> None:
        line = json.dumps(row | {"at_s": round(time.time() - self.start, 1)})
        print(line, flush=True)
        with self.file.open("a") as file:
            file.write(line + "\n")

    def part(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as fault:
            self(part=name, failed=f"{type(fault).__name__}: {fault}"[:600])
            traceback.print_exc()


def draw(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*size, **KINDS).mul_(scale)


def whole(*values: int) -> Tensor:
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.int32, device="cuda")


def graph_us(work: Callable[[], None], count: int, rounds: int = 7) -> float:
    """Microseconds of one of `count` equal pieces of work, recorded as one CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / 5 / count)
    return statistics.median(times)


def weight_of(rows: int, columns: int, kind: str, bias: bool = False) -> Weight:
    weight = Weight(draw(rows, columns, scale=columns**-0.5), None, draw(rows) if bias else None)
    return to_codes(weight, kind) if kind else weight


def mlp_of(width: int, inner: int, kind: str, gated: bool = True, linear: int = 0) -> MlpWeights:
    sizes = (inner - linear, width), (inner, width), (width, inner)
    parts = [weight_of(*size, kind, not gated) for size in sizes]
    norm = Norm(draw(width), None if gated else draw(width), 1e-5)
    return MlpWeights(norm, parts[0] if gated else None, *parts[1:], linear)


def kept_of(tokens: int, width: int, places: int, skip: list[int]) -> Kept:
    age = torch.zeros(tokens, places, dtype=torch.int32, device="cuda")
    flags = torch.tensor(skip, dtype=torch.int32, device="cuda")
    return Kept(flags, whole(3), draw(tokens, places, width), age)


def error_of(tokens: int, width: int, places: int) -> Error:
    held = (draw(tokens, places, width) for _ in range(2))
    return Error(whole(3), *held, 0.5, torch.zeros(tokens, device="cuda"))


def attention_step(rows: int, slots: int, slot: int, plain: bool) -> Step:
    k, v = (draw(rows, HEADS, slots, HEAD_DIM) for _ in range(2))
    angle = torch.rand(rows, 256, HEAD_DIM, device="cuda")
    log_count = None if plain else torch.rand(rows, 1, slots, device="cuda")
    turn = Rotation(angle.cos(), angle.sin(), False)
    return Step(Entries(k, v, whole(slot), log_count), HEADS, whole(7), turn)


def rates(log: Log) -> None:
    """What memory hands over: a copy by the driver and by a kernel, and reading alone."""
    a = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    b = torch.zeros_like(a)
    size = a.numel() * a.element_size()
    log(part="copy", tb_s=2 * size / graph_us(lambda: b.copy_(a), 1) / 1e6)
    log(part="copy by a kernel", tb_s=2 * size / graph_us(lambda: torch.neg(a, out=b), 1) / 1e6)
    log(part="read", tb_s=size / graph_us(lambda: a.sum(), 1) / 1e6)


# rows and columns of both steps, warps, programs; and whether inputs are normed once
Cut = tuple[int, int, int, int, int, int] | tuple[int, int, int, int, int, int, int]
SLICE, DENSE, DEPTH = (WIDTH, 3008, 256), (WIDTH, INNER, 0), (2560, 10240, 0)
SLICE_INT4 = (WIDTH, 3072, 320)
# of an MLP: width, inner width and linear rows; tokens; codes; cuts beside the usual one
MLPS: list[tuple[tuple[int, int, int], int, str, list[Cut]]] = [
    # 512 programs have 3 and 2 tiles each, 752 have 2 and 3, 1,024 of half a size 2 and 1
    (SLICE, 1, "", [
        (2, 1024, 4, 1024, 4, 512), (2, 1024, 2, 1024, 4, 752), (2, 512, 4, 512, 2, 1024),
        (2, 1024, 4, 1024, 4, 512, 1), (4, 1024, 4, 1024, 4, 376), (2, 2048, 2, 2048, 4, 512),
    ]),
    (SLICE, 2, "", [
        (2, 1024, 4, 1024, 4, 512), (2, 1024, 4, 1024, 4, 512, 1), (2, 1024, 2, 1024, 4, 752),
    ]),
    (DENSE, 2, "", [(2, 1024, 4, 1024, 4, 528, 1), (4, 512, 4, 1024, 4, 528)]),
    *((DEPTH, tokens, "", [(8, 512, 4, 1024, 4, 660), (8, 512, 8, 512, 4, 528)])
      for tokens in (1, 2)),
    *((DENSE, tokens, "int8", [
        (4, 512, 4, 512, 4, 528), (2, 512, 4, 512, 4, 660, 1), (4, 512, 4, 512, 4, 528, 1),
    ]) for tokens in (1, 2)),
    (DENSE, 1, "int4", [
        (4, 512, 4, 512, 4, 528), (2, 512, 4, 512, 4, 660, 1), (4, 512, 4, 512, 4, 528, 1),
    ]),
    (DENSE, 2, "int4", [(2, 512, 2, 512, 4, 396, 1), (1, 512, 2, 512, 4, 528)]),
    *((SLICE_INT4 if kind == "int4" else SLICE, 1, kind, [(4, 512, 4, 512, 4, 376)])
      for kind in ("int8", "int4")),
]  # fmt: skip
# of a product: columns, rows of its matrices, norm; tokens; codes; cuts beside the usual one, which
# may say how many steps are under way
QKV = (WIDTH, (WIDTH,) * 3, "rms")
DEPTH_QKV, DEPTH_OUT, CODES = (
    (2560, (2560,) * 3, "layer"),
    (2560, (2560,), ""),
    (2560, (16384,), "layer"),
)
ONE_TWO, DRAFTS = (1, 2), (33, 66)  # tokens: one row or a pair, and the same with 32 drafts each
# Compiled for 33 tokens, the usual cuts leave room for one program of 4 warps on a multiprocessor,
# which cannot keep memory busy; these leave room for 8 to 24 warps. From 64 rows on, wgmma serves.
DRAFT_CUTS: dict[str, list[tuple[int, ...]]] = {
    "int8": [
        (32, 64, 4), (32, 32, 4), (32, 32, 4, 4), (16, 64, 4), (64, 64, 4), (64, 32, 4),
        (64, 64, 4, 2), (128, 32, 8), (64, 16, 4, 4),
    ],
    "int4": [
        (32, 32, 4), (32, 32, 4, 2), (32, 16, 4), (32, 16, 4, 4), (64, 32, 4, 2), (64, 16, 4),
        (64, 16, 4, 4), (128, 16, 8), (16, 32, 4),
    ],
}  # fmt: skip
GEMVS: list[
    tuple[tuple[int, tuple[int, ...], str], tuple[int, ...], str, list[tuple[int, ...]]]
] = [
    (DEPTH_QKV, ONE_TWO, "", [(8, 512, 4), (4, 512, 4)]),
    (DEPTH_OUT, ONE_TWO, "", [(4, 512, 4), (2, 1024, 4)]),
    (CODES, ONE_TWO, "", [(8, 512, 4)]),
    (QKV, ONE_TWO, "int8", [(8, 512, 4)]),
    (QKV, ONE_TWO, "int4", [(8, 512, 4), (4, 512, 4)]),
    *(((columns, (rows,), ""), DRAFTS, kind, DRAFT_CUTS[kind])
      for rows, columns in ((WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
      for kind in ("int8", "int4")),
]  # fmt: skip
Work = Callable[[], None]


@functools.lru_cache(maxsize=1)
def mlps_of(shape: tuple[int, int, int], kind: str) -> list[MlpWeights]:
    width, inner, linear = shape
    return [mlp_of(width, inner, kind, shape != DEPTH, linear) for _ in range(LAYERS)]


@functools.lru_cache(maxsize=1)
def weights_of(shape: tuple[int, tuple[int, ...], str], kind: str) -> list[tuple[Weight, ...]]:
    columns, sizes, norm = shape
    return [
        tuple(weight_of(n, columns, kind, norm == "layer") for n in sizes) for _ in range(LAYERS)
    ]


def mlp_setting(cut: Sequence[int]) -> mlp_triton.MlpSetting:
    n, k, n2, k2, warps, programs, *prenorm = cut
    cuts = Setting(n, k, warps), Setting(n2, k2, warps)
    return mlp_triton.MlpSetting(*cuts, programs, bool(prenorm))


def mlp_work(
    shape: tuple[int, int, int], tokens: int, kind: str, cut: Cut | None
) -> tuple[Work, int]:
    layers, x = mlps_of(shape, kind), draw(tokens, shape[0])
    kept = error_of(tokens, shape[0], 256) if shape[2] else None
    inner, normed = torch.empty(tokens, shape[1], **KINDS), draw(COPIES, tokens, shape[0])
    barrier = torch.zeros(LAYERS, dtype=torch.int32, device="cuda")
    setting = None if cut is None else mlp_setting(cut)

    def work() -> None:
        barrier.zero_()
        for mlp, one in zip(layers, barrier, strict=True):
            mlp_triton.decode_mlp(x, mlp, kept, inner, one, normed=normed, setting=setting)

    return work, sum(part.bytes for part in layers[0].parts)


def gemv_work(
    shape: tuple[int, tuple[int, ...], str], tokens: int, kind: str, cut: Sequence[int] | None
) -> tuple[Work, int]:
    layers, (columns, sizes, name) = weights_of(shape, kind), shape
    x, out = draw(tokens, columns), draw(tokens, sum(sizes))
    norm = Norm(draw(columns), draw(columns) if name == "layer" else None, 1e-5) if name else None
    setting = None if cut is None else Setting(*cut)

    def work() -> None:
        for weights in layers:
            gemv_triton.gemv(out, x, weights, norm, False, len(sizes) == 1 and not name, setting)

    return work, sum(weight.bytes for weight in layers[0])


def pieces(only: Sequence[str]) -> list[tuple[dict[str, Any], Callable[[], tuple[Work, int]]]]:
    """Those parts of what is timed: what each is, and what makes its work and tells its bytes."""
    listed: list[tuple[dict[str, Any], Callable[[], tuple[Work, int]]]] = []
    for shape, tokens, kind, cuts in MLPS:
        for cut in (None, *cuts):
            case = {"part": "mlp", "shape": shape, "tokens": tokens, "kind": kind, "cut": cut}
            listed.append((case, functools.partial(mlp_work, shape, tokens, kind, cut)))
    for one, counts, kind, settings in GEMVS:
        for tokens in counts:
            for setting in (None, *settings):
                case = {
                    "part": "gemv",
                    "shape": one,
                    "tokens": tokens,
                    "kind": kind,
                    "cut": setting,
                }
                listed.append((case, functools.partial(gemv_work, one, tokens, kind, setting)))
    parts = ["drafts" if case["tokens"] in DRAFTS else "piece" for case, _ in listed]
    return [piece for part, piece in zip(parts, listed, strict=True) if part in only]


def time_pieces(log: Log, folder: Path, only: Sequence[str]) -> None:
    """Every piece; of each shape the fastest cut, where it gains a hundredth part, is written."""
    usual: dict[str, float] = {}
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for setting, make in pieces(only):
        if log.over:
            break
        try:
            work, size = make()
            us = graph_us(work, LAYERS)
            log(**setting, us=us, tb_s=size / us / 1e6)
        except Exception as fault:
            log(**setting, failed=f"{type(fault).__name__}: {fault}"[:300])
            continue
        key = json.dumps({name: setting[name] for name in ("part", "shape", "tokens", "kind")})
        if setting["cut"] is None:
            usual[key] = us
        elif us < min(0.99 * usual.get(key, 0.0), best.get(key, (1e9, {}))[0]):
            best[key] = us, setting
        fastest = json.dumps([setting for _, setting in best.values()], indent=1)
        (folder / "settings.json").write_text(fastest)


def use_settings(folder: Path) -> None:
    """Let kernels use what was fastest, where something was timed."""
    file = folder / "settings.json"
    for setting in json.loads(file.read_text()) if file.exists() else []:
        bits = {"": 16, "int8": 8, "int4": 4}[setting["kind"]]
        if setting["part"] == "mlp":
            width, inner, linear = setting["shape"]
            gate = 0 if tuple(setting["shape"]) == DEPTH else inner - linear
            key = bits, setting["tokens"], width, inner, gate
            mlp_triton.SETTINGS[key] = mlp_setting(setting["cut"])
        else:
            columns, sizes, _ = setting["shape"]
            key = bits, setting["tokens"], columns, sum(sizes)
            gemv_triton.SETTINGS[key] = Setting(*setting["cut"])


def warm(part: str, only: Sequence[str]) -> None:
    """Compile what others do not: pieces i, i + n, i + 2n, ... for "i/n"."""
    first, step = map(int, part.split("/"))
    for setting, make in pieces(only)[first::step]:
        try:
            make()[0]()
            torch.cuda.synchronize()
        except Exception as fault:
            print(setting, f"{type(fault).__name__}: {fault}"[:300], flush=True)


def compile_ahead(jobs: int, only: str) -> None:
    """Let other processes compile all pieces into Triton's cache, each its share."""
    words = [sys.executable, __file__, "--only", only, "--warm"]
    running = [subprocess.Popen([*words, f"{i}/{jobs}"]) for i in range(jobs)]
    for process in running:
        process.wait()


def time_layers(log: Log, rows: int, kind: str) -> None:
    """All launches of a layer, computing and skipped, with and without overlap."""
    mlps = mlps_of(DENSE, kind)
    heads = [[weight_of(WIDTH, WIDTH, kind) for _ in range(4)] for _ in range(LAYERS)]
    x, qkv, attended = draw(rows, WIDTH), draw(rows, 3 * WIDTH), draw(rows, WIDTH)
    inner, kept = torch.empty(rows, INNER, **KINDS), kept_of(rows, WIDTH, 256, [0] * rows)
    barrier = torch.zeros(LAYERS, dtype=torch.int32, device="cuda")
    scratch = Scratch(rows, HEADS, HEADS, HEAD_DIM, torch.device("cuda"))
    steps = [attention_step(rows, 2200, 1100, rows == 1) for _ in range(LAYERS)]

    def work() -> None:
        barrier.zero_()
        for i in range(LAYERS):
            gemv(qkv, x, tuple(heads[i][:3]), mlps[i].norm)
            decode_attention(attended, qkv, steps[i], scratch)
            gemv(x, attended, (heads[i][3],), add=True)
            decode_mlp(x, mlps[i], kept, inner, barrier[i])

    x.normal_()
    start, times = x.clone(), []
    for overlap in (False, True):
        Overlap.on = overlap
        try:
            us = []
            for skip in (0, 1):
                kept.skip.fill_(skip)
                us.append(graph_us(work, LAYERS))
            kept.skip.zero_()
            x.copy_(start)
            work()
            times.append(x.clone())
            log(part="layer", rows=rows, kind=kind, overlap=overlap, us=us[0], skipped_us=us[1])
        except Exception as fault:
            log(part="layer", rows=rows, kind=kind, overlap=overlap, failed=str(fault)[:400])
        Overlap.on = True
    if len(times) == 2:
        log(part="layer", rows=rows, kind=kind, same=torch.equal(*times))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first")
    parser.add_argument("--warm", help="i/n: only compile each n-th piece from the i-th on")
    parser.add_argument(
        "--only", default="rates,piece,drafts,layer", help="what, separated by commas"
    )
    parser.add_argument(
        "--settings", type=Path, help="folder of an earlier run: with its settings do what follows"
    )
    parser.add_argument(
        "--compile", action="store_true", help="let a benchmark only compile what it would time"
    )
    parser.add_argument("bench", nargs="*", help="arguments of tachyscope-lab bench")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.settings:
        use_settings(given.settings)
        if given.compile:
            device_clock.COPY_BYTES, bench_tokens.JOULES_S = 1 << 20, 0
        main_lab(["bench", *given.bench])
        return
    only = given.only.split(",")
    with torch.inference_mode():
        if given.warm:
            warm(given.warm, only)
            return
        compile_ahead(given.jobs, given.only)
        log = Log(given.out, given.seconds)
        if "rates" in only:
            log.part("rates", lambda: rates(log))
        time_pieces(log, given.out, only)
        for rows, kind in itertools.product((1, 2), ("", "int8", "int4")):
            if "layer" in only and not log.over:
                log.part("layers", lambda r=rows, k=kind: time_layers(log, r, k))
    log(part="end", seconds=time.time() - log.start)


if __name__ == "__main__":
    main()
