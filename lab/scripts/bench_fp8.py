"""Float8 kernels on a GPU against their definitions, and their times beside bfloat16.

    python lab/scripts/bench_fp8.py --out fp8.json

One chunk of Self-Forcing: 4,680 rows of 1,536 channels, 12 heads of 128. Every kernel is first held
to its float64 definition on fresh random numbers, memory poisoned; one that fails is noted and the
others go on. A rate counts the pairs that are read; each time is a median, and taken twice.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.io.results import document, emit
from tachyscope.kernels.attention import attention
from tachyscope.kernels.attention import torch as stock_attention
from tachyscope.kernels.attention_fp8 import hopper, triton
from tachyscope.kernels.attention_fp8 import torch as stock
from tachyscope.kernels.attention_fp8.hopper import Variant
from tachyscope.kernels.attention_fp8.reference import attention_fp8_reference
from tachyscope.kernels.attention_fp8.torch import Entries, Listed
from tachyscope.kernels.block_sparse import block_sparse_attention
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.linear_fp8 import fp8_weight, linear_fp8
from tachyscope.kernels.linear_fp8.reference import linear_fp8_reference
from tachyscope.kernels.norm_quantise import torch as stock_rows
from tachyscope.kernels.norm_quantise import triton as rows
from tachyscope.kernels.norm_quantise.reference import (
    add_reference,
    gelu_reference,
    norm_reference,
    quantise_reference,
)
from tachyscope.models.wan.stages import _add, modulate

DEVICE, ROWS, HEADS, WIDTH = torch.device("cuda"), 4680, 12, 128
# How the kernel may be built, and entries of a block. A multiprocessor's tensor cores, exponentials
# and instruction slots are each busy for about 1,000 cycles a tile of 128 x 128, so that what
# overlaps them best wins; exponentials by polynomials would cost more slots than they free.
VARIANTS = {
    "": (Variant(), 128),
    ", adding in the tensor cores": (Variant(fresh=False), 128),
    ", 2 stages": (Variant(stages=2), 128),
    ", 6 stages": (Variant(stages=6), 128),
    ", blocks of 64": (Variant(), 64),
}
# groups of warps by turns; timed last, as they might wait for ever
TURNS = {
    ", turns": (Variant(turns=True), 128),
    ", turns, adding in the tensor cores": (Variant(turns=True, fresh=False), 128),
    ", turns, 2 stages": (Variant(turns=True, stages=2), 128),
    ", turns, blocks of 64": (Variant(turns=True), 64),
}
TABLE: list[dict[str, Any]] = []
PATH = ["/dev/null"]


def attempt(what: str, call: Callable[[], dict[str, Any] | None]) -> None:
    """Run one part, note what it gave and say it; a fault ends that part alone."""
    row: dict[str, Any] = {"what": what}
    try:
        row |= call() or {}
    except Exception as fault:
        row["fault"] = f"{type(fault).__name__}: {str(fault)[-600:]}"
    TABLE.append(row)
    command = shlex.join(["python", *sys.argv])
    emit(document("kernels-fp8", TABLE, command), PATH[0])  # what there is, should time run out
    print(
        " | ".join([f"{what:58}", *(f"{k} {_short(v)}" for k, v in row.items() if k != "what")]),
        flush=True,
    )


def _short(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)[:500]


def milliseconds(call: Callable[[], object], times: int = 9, calls: int = 6) -> float:
    """The median of a call, several in one CUDA graph: how long a launch takes does not count."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    spans = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        spans.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in spans) / calls


def timed(call: Callable[[], object], flops: float = 0) -> dict[str, Any]:
    """Its median twice."""
    first, again = milliseconds(call), milliseconds(call)
    return {"ms": first, "again": again} | ({"TF/s": flops / first / 1e9} if flops else {})


def poison(*shape: int) -> None:
    """Leave NaN in the memory that the next results will be given."""
    size = math.prod(shape)
    filled = [torch.full((2 * size,), math.nan, device=DEVICE) for _ in range(2)]
    filled.append(torch.full((size,), math.nan, device=DEVICE, dtype=torch.bfloat16))
    del filled


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def draw(rng: torch.Generator, b: int, heads: int, n: int, d: int) -> Tensor:
    """As a session has it: heads beside each other."""
    like = {"generator": rng, "device": DEVICE, "dtype": torch.bfloat16}
    return torch.randn(b, n, heads, d, **like).transpose(1, 2)


def check_codes() -> dict[str, Any]:
    rng = torch.Generator(DEVICE).manual_seed(5)
    different = 0
    for n, block in ((300, 128), (1000, 64), (70, 32)):
        x, y = draw(rng, 2, 3, n, WIDTH), draw(rng, 2, 3, n, WIDTH)
        poison(2, 3, n, WIDTH)
        for got, want in zip(
            (*triton.quantise_queries(x), *triton.quantise_entries(x, y, block)[:3]),
            (*stock.quantise_queries(x), *stock.quantise_entries(x, y, block)[:3]), strict=True,
        ):  # fmt: skip
            different += int((got.float() != want.float()).sum())
    return {"different": different}


def check_attention(
    variant: Variant,
    b: int,
    h: int,
    kv: int,
    s: int,
    n: int,
    d: int,
    weighted: bool,
    block: int = 0,
) -> dict[str, Any]:
    """Against the definition on the same codes; block: of a past of 20 blocks, listed."""
    rng = torch.Generator(DEVICE).manual_seed(n)
    q, k, v = draw(rng, b, h, s, d), draw(rng, b, kv, n, d), draw(rng, b, kv, n, d)
    log_count, past = None, None
    if weighted:
        log_count = torch.rand(b, kv, n + 2, generator=rng, device=DEVICE)[:, :, :n] * 4
        log_count[:, :, 40:50] = -math.inf
        if n > 300:
            log_count[:, :, 128:300] = -math.inf
    if block:
        past, _, _ = draw_past(rng, b, h, kv, s, d, block)
    code, scale = triton.quantise_queries(q)
    entries = triton.quantise_entries(k, v, block or 128, log_count)
    poison(*q.shape)
    got = hopper.flash(code, scale, entries, n, log_count, past, variant=variant)
    want = attention_fp8_reference(code, scale, entries, n, log_count, past)
    answer = {"off": off(got, want)}
    if past is None:
        answer["from bf16"] = off(got, attention(q, k, v, log_count))
        if log_count is not None:
            empty = torch.full_like(log_count, -math.inf)
            nothing = hopper.flash(code, scale, entries, n, empty, None, variant=variant)
            answer["empty"] = float(nothing.abs().max())
    return answer


def draw_past(
    rng: torch.Generator, b: int, h: int, kv: int, s: int, d: int, block: int, blocks: int = 20,
    most: int = 7,
) -> tuple[Listed, Tensor, Tensor]:  # fmt: skip
    slots = blocks * block
    old_k, old_v = draw(rng, b, kv, slots, d), draw(rng, b, kv, slots, d)
    log_count = torch.rand(b, kv, slots, generator=rng, device=DEVICE)
    log_count[:, :, -5:] = -math.inf
    tiles = -(-s // 128)
    ids = torch.rand(b, h, tiles, blocks, generator=rng, device=DEVICE).argsort(-1)[..., :most]
    ids = ids.int().contiguous()
    counts = torch.full((b, h, tiles), most, dtype=torch.int32, device=DEVICE)
    counts[0, 0, 0] = most // 2
    entries = triton.quantise_entries(old_k, old_v, block, log_count)
    return Listed(entries, log_count, ids, counts, 128), old_k, old_v


def time_dense(
    entries: int, weighted: bool, variants: dict[str, tuple[Variant, int]], beside: bool = True
) -> None:
    rng = torch.Generator(DEVICE).manual_seed(entries)
    q, k, v = (draw(rng, 1, HEADS, n, WIDTH) for n in (ROWS, entries, entries))
    log_count = torch.rand(1, HEADS, entries + 4, generator=rng, device=DEVICE)[:, :, :entries]
    w = log_count if weighted else None
    flops = 4 * HEADS * ROWS * entries * WIDTH
    name = f"{ROWS} x {entries}{' weighted' if weighted else ''}:"
    code, scale = triton.quantise_queries(q)
    some = slice(1000, 1256)
    for label, (variant, block) in variants.items():
        held = triton.quantise_entries(k, v, block)

        def run(variant: Variant = variant, held: Entries = held) -> Tensor:
            return hopper.flash(code, scale, held, entries, w, None, variant=variant)

        def both(run: Callable[[], Tensor] = run, held: Entries = held) -> dict[str, Any]:
            poison(*q.shape)
            want = attention_fp8_reference(code[:, :, some], scale[:, :, some], held, entries, w)
            return {"off": off(run()[:, :, some], want)} | timed(run, flops)

        attempt(f"{name} fp8{label}", both)
    if not beside:
        return
    attempt(f"{name} codes of q", lambda: timed(lambda: triton.quantise_queries(q)))
    attempt(f"{name} codes of k and v", lambda: timed(lambda: triton.quantise_entries(k, v, 128)))
    attempt(
        f"{name} fp8, codes made", lambda: timed(lambda: hopper.attention_fp8(q, k, v, w), flops)
    )
    attempt(f"{name} bf16, ours", lambda: timed(lambda: attention(q, k, v, w), flops))
    attempt(f"{name} bf16, cuDNN", lambda: timed(lambda: stock_attention.attention(q, k, v), flops))


def fastest() -> dict[str, Any]:
    """Of all ways to build the kernel that are right, the fastest by size."""
    best: dict[str, Any] = {}
    for row in TABLE:
        size, _, variant = row["what"].partition(": fp8")
        right = row.get("off", 1.0) < 0.03 and size.startswith(f"{ROWS} x")
        if right and row["TF/s"] > best.get(size, {"TF/s": 0.0})["TF/s"]:
            best[size] = {"variant": variant.lstrip(", "), "TF/s": row["TF/s"]}
    return best


def time_listed(block: int, most: int, variants: dict[str, tuple[Variant, int]]) -> None:
    rng = torch.Generator(DEVICE).manual_seed(block)
    blocks = 32768 // block
    q, k, v = (draw(rng, 1, HEADS, ROWS, WIDTH) for _ in range(3))
    past, old_k, old_v = draw_past(rng, 1, HEADS, HEADS, ROWS, WIDTH, block, blocks, most)
    code, scale = triton.quantise_queries(q)
    held = triton.quantise_entries(k, v, block)
    table = BlockTable(old_k, old_v, past.log_count, past.ids, past.counts, 128, block)
    flops = 4 * HEADS * ROWS * (ROWS + most * block) * WIDTH
    name = f"{ROWS} x {ROWS} + {most} blocks of {block}:"
    for label, (variant, _) in variants.items():
        attempt(
            f"{name} fp8{label}",
            lambda variant=variant: timed(
                lambda: hopper.flash(code, scale, held, ROWS, None, past, variant=variant), flops
            ),
        )
    attempt(
        f"{name} bf16",
        lambda: timed(lambda: block_sparse_attention(q, k, v, table), flops),
    )


def modulation(rng: torch.Generator, width: int) -> Tensor:
    """Shift, scale and gate of three frames, and of the MLP's, in float32."""
    return torch.randn(1, 3, 6, width, generator=rng, device=DEVICE)


def near(code: Tensor, scale: Tensor, want: Tensor) -> dict[str, float]:
    """How far codes are from the definition's, and from the numbers themselves."""
    number, _ = quantise_reference(want)
    back = code.double() * scale.double()
    return {"off": off(back, number), "rounding": off(back, want)}


def rows_of_a_layer(width: int = 1536, hidden: int = 8960) -> None:
    """Norms, modulation, GELU and codes: checked, then beside what stands there in bfloat16."""
    rng = torch.Generator(DEVICE).manual_seed(1)
    like = {"generator": rng, "device": DEVICE, "dtype": torch.bfloat16}
    x, y = (torch.randn(1, ROWS, width, **like) for _ in range(2))
    up = torch.randn(1, ROWS, hidden, **like)
    six, eps = modulation(rng, width), 1e-6
    shift, scale, gate = six[:, :, 0], six[:, :, 1], six[:, :, 2]
    weight, bias = torch.randn(2, width, generator=rng, device=DEVICE)

    def norm() -> dict[str, Any]:
        poison(*x.shape)
        got = rows.norm_quantise(x, shift, scale, eps)
        return near(*got, norm_reference(x, shift, scale, eps))

    def add_norm() -> dict[str, Any]:
        poison(*x.shape)
        total, normed = rows.add_norm(x, y, gate, weight, bias, eps)
        affine = (one.expand(1, 1, width) for one in (bias, weight))
        want = norm_reference(total, *affine, eps, plus_one=False)
        alone = rows.add_gated(x, y, gate)
        return {
            "off": off(normed, want), "sum off": off(total, add_reference(x, y, gate)),
            "same": bool(torch.equal(alone, total)),
        }  # fmt: skip

    attempt(
        "rows: codes of x", lambda: near(*rows.quantise(x), x) | timed(lambda: rows.quantise(x))
    )
    attempt(
        "rows: codes of gelu(x)",
        lambda: (
            near(*rows.gelu_quantise(up), gelu_reference(up))
            | timed(lambda: rows.gelu_quantise(up))
        ),
    )
    attempt("rows: gelu(x), bf16", lambda: timed(lambda: F.gelu(up, approximate="tanh")))
    attempt(
        "rows: codes of norm(x), modulated",
        lambda: norm() | timed(lambda: rows.norm_quantise(x, shift, scale, eps)),
    )
    attempt("rows: norm(x), modulated, bf16", lambda: timed(lambda: modulate(x, shift, scale, eps)))
    attempt(
        "rows: x + y · gate, affine norm",
        lambda: add_norm() | timed(lambda: rows.add_norm(x, y, gate, weight, bias, eps)),
    )
    attempt("rows: x + y · gate", lambda: timed(lambda: rows.add_gated(x, y, gate)))
    attempt("rows: x + y · gate, bf16", lambda: timed(lambda: _add(x, y, gate)))
    attempt("rows: codes of x by stock torch", lambda: timed(lambda: stock_rows.quantise(x)))


def linear(inner: int, outer: int) -> None:
    """A linear of 4,680 rows: checked on some of them, beside bfloat16."""
    rng = torch.Generator(DEVICE).manual_seed(inner + outer)
    like = {"generator": rng, "device": DEVICE, "dtype": torch.bfloat16}
    x = torch.randn(1, ROWS, inner, **like)
    weight, bias = torch.randn(outer, inner, **like) / inner**0.5, torch.randn(outer, **like)
    held = fp8_weight(weight)
    code, scale = rows.quantise(x)
    flops, name = 2 * ROWS * inner * outer, f"linear {inner} to {outer}:"

    def fp8() -> dict[str, Any]:
        poison(1, ROWS, outer)
        got = linear_fp8(code, scale, held, bias, torch.bfloat16)
        want = linear_fp8_reference(code[:, :500], scale[:, :500], held, bias)
        exact = F.linear(x[:, :500].double(), weight.double(), bias.double())
        return {"off": off(got[:, :500], want), "from bf16": off(got[:, :500], exact)} | timed(
            lambda: linear_fp8(code, scale, held, bias, torch.bfloat16), flops
        )

    def slow() -> dict[str, Any]:
        def call() -> Tensor:
            return torch._scaled_mm(
                code[0], held.code.mT, scale[0], held.scale.mT, bias=bias,
                out_dtype=torch.bfloat16, use_fast_accum=False,
            )  # fmt: skip

        want = linear_fp8_reference(code[0, :500], scale[0, :500], held, bias)
        return {"off": off(call()[:500], want)} | timed(call, flops)

    attempt(f"{name} fp8", fp8)
    attempt(f"{name} fp8, adding in float32", slow)
    attempt(f"{name} bf16", lambda: timed(lambda: F.linear(x, weight, bias), flops))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="a JSON file of all rows")
    PATH[0] = parser.parse_args().out
    attempt("rows", rows_of_a_layer)
    for shape in ((1536, 4608), (1536, 1536), (1536, 8960), (8960, 1536)):
        attempt(f"{shape}", lambda shape=shape: linear(*shape))
    attempt("codes equal stock torch's", check_codes)
    cases = {
        "shares of tiles": (1, 6, 3, 300, 2003, 128, False),
        "whole tiles": (2, 12, 12, 780, 1500, 128, False),
        "less than a block": (1, 2, 2, 64, 100, 128, False),
        "heads of 64": (2, 4, 2, 300, 1000, 64, False),
        "weighted": (2, 12, 12, 780, 1500, 128, True),
        "blocks of 128": (1, 6, 3, 300, 200, 128, False, 128),
        "blocks of 64": (1, 6, 3, 300, 200, 128, False, 64),
        "blocks of 32": (1, 6, 3, 300, 200, 64, False, 32),
    }
    base, turns = {"": VARIANTS[""]}, {", turns": TURNS[", turns"]}
    for name, case in cases.items():
        attempt(f"attention, {name}", lambda case=case: check_attention(Variant(), *case))
    for entries, weighted, variants in (
        (32760, False, VARIANTS),
        (32760, True, base),
        (ROWS, False, base),
        (131040, False, base),
    ):
        attempt(f"{entries}", lambda e=entries, w=weighted, v=variants: time_dense(e, w, v))
    lists = ((128, 64), (64, 128))
    for block, most in lists:
        attempt(f"lists of {block}", lambda b=block, m=most: time_listed(b, m, base))
    # last, as they might wait for ever
    for name, case in cases.items():
        attempt(
            f"attention, {name}, turns",
            lambda case=case: check_attention(Variant(turns=True), *case),
        )
    for entries, weighted, some in (
        (32760, False, TURNS),
        (32760, True, turns),
        (ROWS, False, turns),
    ):
        attempt(f"{entries}", lambda e=entries, w=weighted, v=some: time_dense(e, w, v, False))
    for block, most in lists:
        attempt(f"lists of {block}", lambda b=block, m=most: time_listed(b, m, turns))
    attempt("fastest", fastest)


if __name__ == "__main__":
    main()
