"""Kernels of a decode step on a CUDA device: are they right, and which settings are fastest.

python scripts/tune_decode.py --out DIR [--seconds 150]

Each part stands alone; results are appended to DIR/tune_decode.jsonl as they come.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tachyscope.kernels.decode_attention import (
    Entries,
    Gate,
    Rotation,
    Scratch,
    Step,
    Window,
    decode_attention,
)
from tachyscope.kernels.decode_attention import torch as attention_torch
from tachyscope.kernels.decode_mlp import Kept, MlpWeights, decode_mlp
from tachyscope.kernels.decode_mlp import torch as mlp_torch
from tachyscope.kernels.decode_mlp import triton as mlp_triton
from tachyscope.kernels.device import multiprocessors
from tachyscope.kernels.gemv import Norm, Weight, gemv, to_int8
from tachyscope.kernels.gemv import torch as gemv_torch
from tachyscope.kernels.gemv import triton as gemv_triton
from tachyscope.kernels.gemv.triton import Setting
from tachyscope.kernels.launch import Overlap
from tachyscope.kernels.sample_code import Codes, Draw, sample_code
from tachyscope.kernels.sample_code import torch as sample_torch

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


def mlp_of(width: int, inner: int, int8: bool, gated: bool = True) -> MlpWeights:
    sizes = (inner, width), (inner, width), (width, inner)
    parts = [
        Weight(draw(*s, scale=s[1] ** -0.5), None, None if gated else draw(s[0])) for s in sizes
    ]
    parts = [to_int8(part) for part in parts] if int8 else parts
    norm = Norm(draw(width), None if gated else draw(width), 1e-5)
    return MlpWeights(norm, parts[0] if gated else None, *parts[1:])


def kept_of(tokens: int, width: int, places: int, skip: list[int]) -> Kept:
    age = torch.zeros(tokens, places, dtype=torch.int32, device="cuda")
    flags = torch.tensor(skip, dtype=torch.int32, device="cuda")
    return Kept(flags, whole(3), draw(tokens, places, width), age)


def check_gemv(log: Log) -> None:
    cases = (1, False, "rms"), (2, False, "layer"), (2, True, ""), (5, True, "rms"), (1, True, "")
    for tokens, int8, kind in cases:
        x = draw(tokens, 200)
        weights = tuple(
            Weight(draw(n, 200, scale=0.1), None, draw(n) if kind == "layer" else None)
            for n in (70, 33, 90)
        )
        weights = tuple(map(to_int8, weights)) if int8 else weights
        norm = Norm(draw(200), draw(200) if kind == "layer" else None, 1e-5) if kind else None
        base = draw(tokens, 193)
        want = gemv_torch.gemv(base.clone(), x, weights, norm, kind == "layer", True)
        got = gemv_triton.gemv(base.clone(), x, weights, norm, kind == "layer", True)
        torch.testing.assert_close(got, want, rtol=4e-2, atol=4e-2)
    log(part="gemv", right=True)


def check_mlp(log: Log) -> None:
    kinds = (1, False, True), (2, False, True), (2, True, True), (5, False, False), (1, True, False)
    for (tokens, int8, gated), skip in itertools.product(kinds, ("none", "all", "one")):
        mlp, x = mlp_of(328, 1000, int8, gated), draw(tokens, 328)
        flags = {"none": [0] * tokens, "all": [1] * tokens, "one": [1] + [0] * (tokens - 1)}[skip]
        kept = kept_of(tokens, 328, 6, flags)
        other = Kept(kept.skip, kept.place, kept.output.clone(), kept.age.clone())
        want, got = x.clone(), x.clone()
        mlp_torch.decode_mlp(want, mlp, kept)
        barrier = torch.zeros((), dtype=torch.int32, device="cuda")
        mlp_triton.decode_mlp(got, mlp, other, torch.empty(tokens, 1000, **KINDS), barrier)
        torch.testing.assert_close(got, want, rtol=4e-2, atol=6e-2)
        torch.testing.assert_close(other.output, kept.output, rtol=4e-2, atol=6e-2)
        assert torch.equal(other.age, kept.age)
    log(part="mlp", right=True)


def attention_step(rows: int, slots: int, slot: int, kind: str, window: bool, plain: bool) -> Step:
    k, v = (draw(rows, HEADS, slots, HEAD_DIM) for _ in range(2))
    angle = torch.rand(rows, 256, HEAD_DIM, device="cuda")
    log_count = None if plain else torch.rand(rows, 1, slots, device="cuda")
    near = Window(4, 16, 20, torch.zeros(rows, dtype=torch.int32, device="cuda"))
    gate = None
    if kind:
        one = torch.zeros(rows, 256, device="cuda")
        gate = Gate(
            kind, torch.tensor(0.5, device="cuda"), whole(1),
            torch.zeros(rows, dtype=torch.int32, device="cuda"),
            torch.zeros(2, dtype=torch.int32, device="cuda"),
            torch.zeros(rows, 256, dtype=torch.int32, device="cuda"), tied=rows == 2,
            key=draw(rows, HEADS, 256, HEAD_DIM), recent=one.clone() if kind == "share" else None,
            due=one[:, :1].clone() if kind == "share" else None, luck=one.T.contiguous(),
        )  # fmt: skip
    turn = Rotation(angle.cos(), angle.sin(), False)
    entries = Entries(k, v, whole(slot), log_count)
    return Step(entries, HEADS, whole(7), turn, near if window else None, gate)


def check_attention(log: Log) -> None:
    cases = (
        (1, "", False, True), (2, "threshold", False, False), (2, "share", True, False),
        (1, "share", False, True), (2, "draw", True, True),
    )  # fmt: skip
    for rows, kind, window, plain in cases:
        for slot in (0, 3, 500, 999):
            torch.manual_seed(slot)
            step = attention_step(rows, 1000, slot, kind, window, plain)
            torch.manual_seed(slot)
            other = attention_step(rows, 1000, slot, kind, window, plain)
            qkv = draw(rows, 3 * WIDTH)
            want, got = (torch.full((rows, WIDTH), torch.nan, **KINDS) for _ in range(2))
            attention_torch.decode_attention(want, qkv, step)
            scratch = Scratch(rows, HEADS, HEADS, HEAD_DIM, torch.device("cuda"))
            for _ in range(3):
                decode_attention(got, qkv, other, scratch)
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
            torch.testing.assert_close(other.entries.k, step.entries.k, rtol=2e-2, atol=2e-2)
            assert not scratch.done.any()
    log(part="attention", right=True)


def check_sample(log: Log) -> None:
    draw_by, same = Draw(True, 3.0, 1.0, 900, 0.96), 0
    for i in range(20):
        torch.manual_seed(i)
        logits = torch.randn(2, 16384, device="cuda") * 3
        noise = torch.empty(1, 4, 4, 16384, device="cuda").exponential_()
        book, found = draw(16385, 1024), []
        for work in (sample_torch.sample_code, sample_code):
            to = Codes(
                torch.full((1, 4, 4), -1, device="cuda"), noise, whole(2), 1, book,
                torch.zeros(2, 1024, **KINDS),
            )  # fmt: skip
            work(logits, draw_by, to)
            found.append(to)
        same += torch.equal(found[0].codes, found[1].codes)
    log(part="sample", equal=same, of=20)
    to = found[1]
    log(part="sample", us=graph_us(lambda: sample_code(logits, draw_by, to), 1))
    log(part="sample torch", us=graph_us(lambda: sample_torch.sample_code(logits, draw_by, to), 1))


def rates(log: Log) -> None:
    """What memory hands over: a copy by the driver and by a kernel, and reading alone."""
    a = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    b = torch.zeros_like(a)
    size = a.numel() * a.element_size()
    log(part="copy", tb_s=2 * size / graph_us(lambda: b.copy_(a), 1) / 1e6)
    log(part="copy by a kernel", tb_s=2 * size / graph_us(lambda: torch.neg(a, out=b), 1) / 1e6)
    log(part="read", tb_s=size / graph_us(lambda: a.sum(), 1) / 1e6)


def time_mlp(log: Log, tokens: int, int8: bool) -> None:
    layers = [mlp_of(WIDTH, INNER, int8) for _ in range(LAYERS)]
    x, inner = draw(tokens, WIDTH), torch.empty(tokens, INNER, **KINDS)
    kept = kept_of(tokens, WIDTH, 256, [0] * tokens)
    barrier = torch.zeros(LAYERS, dtype=torch.int32, device="cuda")
    size = sum(part.bytes for part in layers[0].parts)
    processors = multiprocessors(x.device)
    settings = [None]
    for n, k, n2, warps, programs in (
        (2, 1024, 4, 4, 5), (2, 1024, 4, 4, 6), (2, 2048, 2, 4, 4), (2, 1024, 2, 4, 4),
        (1, 2048, 2, 4, 4), (2, 512, 4, 2, 8),
    ):  # fmt: skip
        first, last = Setting(n, k, warps), Setting(n2, k, warps)
        settings.append(mlp_triton.MlpSetting(first, last, programs * processors))
    for setting in settings:
        if log.over:
            return

        def work(setting: Any = setting) -> None:
            barrier.zero_()
            for mlp, one in zip(layers, barrier, strict=True):
                mlp_triton.decode_mlp(x, mlp, kept, inner, one, setting)

        try:
            kept.skip.zero_()
            us = graph_us(work, LAYERS)
            kept.skip.fill_(1)
            skipped = graph_us(work, LAYERS)
        except Exception as fault:
            log(part="mlp", tokens=tokens, setting=setting, failed=str(fault)[:300])
            continue
        log(part="mlp", tokens=tokens, int8=int8, setting=setting, us=us, tb_s=size / us / 1e6,
            skipped_us=skipped)  # fmt: skip
    if not int8:
        us = graph_us(lambda: [mlp_torch.decode_mlp(x, mlp, None) for mlp in layers], LAYERS)
        log(part="mlp torch", tokens=tokens, us=us, tb_s=size / us / 1e6)


def time_gemv(log: Log, tokens: int, parts: int, int8: bool) -> None:
    layers = [
        tuple(Weight(draw(WIDTH, WIDTH, scale=0.02)) for _ in range(parts)) for _ in range(LAYERS)
    ]
    layers = [tuple(map(to_int8, layer)) for layer in layers] if int8 else layers
    x, out = draw(tokens, WIDTH), draw(tokens, parts * WIDTH)
    norm = Norm(draw(WIDTH), None, 1e-5) if parts == 3 else None
    size = sum(weight.bytes for weight in layers[0])
    cuts = (2, 1024, 4), (4, 1024, 2), (2, 1024, 2)
    for setting in [None, *(Setting(*cut) for cut in cuts)]:
        if log.over:
            return

        def work(setting: Any = setting) -> None:
            for weights in layers:
                gemv_triton.gemv(out, x, weights, norm, False, parts == 1, setting)

        us = graph_us(work, LAYERS)
        log(part="gemv", tokens=tokens, parts=parts, int8=int8, setting=setting, us=us,
            tb_s=size / us / 1e6)  # fmt: skip


def time_attention(log: Log, rows: int) -> None:
    scratch = Scratch(rows, HEADS, HEADS, HEAD_DIM, torch.device("cuda"))
    out, qkv = draw(rows, WIDTH), draw(rows, 3 * WIDTH)
    for kind, window, slot in itertools.product(("", "share"), (False, True), (300, 1100, 2100)):
        steps = [attention_step(rows, 2200, slot, kind, window, rows == 1) for _ in range(LAYERS)]
        us = graph_us(lambda s=steps: [decode_attention(out, qkv, x, scratch) for x in s], LAYERS)
        log(part="attention", rows=rows, gate=kind, window=window, entries=slot, us=us)


def time_layers(log: Log, rows: int, int8: bool) -> None:
    """All launches of a layer, computing and skipped, with and without overlap."""
    mlps = [mlp_of(WIDTH, INNER, int8) for _ in range(LAYERS)]
    heads = [[Weight(draw(WIDTH, WIDTH, scale=0.02)) for _ in range(4)] for _ in range(LAYERS)]
    heads = [[to_int8(x) for x in part] for part in heads] if int8 else heads
    x, qkv, attended = draw(rows, WIDTH), draw(rows, 3 * WIDTH), draw(rows, WIDTH)
    inner, kept = torch.empty(rows, INNER, **KINDS), kept_of(rows, WIDTH, 256, [0] * rows)
    barrier = torch.zeros(LAYERS, dtype=torch.int32, device="cuda")
    scratch = Scratch(rows, HEADS, HEADS, HEAD_DIM, torch.device("cuda"))
    steps = [attention_step(rows, 2200, 1100, "", False, rows == 1) for _ in range(LAYERS)]

    def work() -> None:
        barrier.zero_()
        for i in range(LAYERS):
            gemv(qkv, x, tuple(heads[i][:3]), mlps[i].norm)
            decode_attention(attended, qkv, steps[i], scratch)
            gemv(x, attended, (heads[i][3],), add=True)
            decode_mlp(x, mlps[i], kept, inner, barrier[i])

    x.normal_()
    start, found = x.clone(), []
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
            found.append(x.clone())
            log(part="layer", rows=rows, int8=int8, overlap=overlap, us=us[0], skipped_us=us[1])
        except Exception as fault:
            log(part="layer", rows=rows, int8=int8, overlap=overlap, failed=str(fault)[:400])
        Overlap.on = True
    if len(found) == 2:
        log(part="layer", rows=rows, int8=int8, same=torch.equal(*found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    given = parser.parse_args()
    log = Log(given.out, given.seconds)
    torch.manual_seed(0)
    with torch.inference_mode():
        log.part("rates", lambda: rates(log))
        for check in (check_gemv, check_attention, check_sample, check_mlp):
            log.part(check.__name__, lambda check=check: check(log))
        for rows, int8 in ((1, False), (2, False), (1, True), (2, True)):
            log.part("layers", lambda r=rows, i=int8: time_layers(log, r, i))
        for rows in (1, 2):
            log.part("attention", lambda r=rows: time_attention(log, r))
        for rows, int8 in ((1, False), (1, True), (2, False), (2, True)):
            log.part("mlp", lambda r=rows, i=int8: time_mlp(log, r, i))
            for parts in (3, 1):
                log.part("gemv", lambda r=rows, p=parts, i=int8: time_gemv(log, r, p, i))
    log(part="end", seconds=time.time() - log.start)


if __name__ == "__main__":
    main()
