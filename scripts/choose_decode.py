"""New kernels of a decode step: right, and faster than what they replace?

for parts in sample overlap_1,overlap_2 block_16_2 drafts_8_33,drafts_4_33; do
    timeout 60 python scripts/choose_decode.py --parts $parts --out DIR
done

A part that fails leaves the others, and its kernel unchosen; blocks, whose programs wait for each
other and could do so for ever, are processes of their own. Each part writes DIR/choose-PART.jsonl
and, where its kernel is right and faster, DIR/settings-PART.json, which `tune_decode.py --settings
DIR` reads. Without a GPU Triton's interpreter runs small sizes (TRITON_INTERPRET=1): a check of
this file.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tune_decode import graph_us, mlp_setting

from tachyscope.decode.layer import Layers
from tachyscope.kernels.decode_attention import Entries, Rotation, Scratch, Step
from tachyscope.kernels.decode_block import BlockMemory, BlockWeights
from tachyscope.kernels.decode_block import triton as block_triton
from tachyscope.kernels.decode_mlp import MlpWeights
from tachyscope.kernels.gemv import Norm, Weight, to_codes
from tachyscope.kernels.gemv import triton as gemv_triton
from tachyscope.kernels.launch import Overlap
from tachyscope.kernels.sample_code import Codes, Draw
from tachyscope.kernels.sample_code import triton as sample_triton

ON_GPU = torch.cuda.is_available()
KINDS: dict[str, Any] = {
    "device": "cuda" if ON_GPU else "cpu",
    "dtype": torch.bfloat16 if ON_GPU else torch.float32,
}
DEVICE = torch.device(KINDS["device"])
# of the trunk: heads, head size, width, entries; of the depth transformer: width, heads, blocks
HEADS, HEAD_DIM, WIDTH, ENTRIES = (32, 128, 4096, 1100) if ON_GPU else (3, 16, 48, 40)
DEPTH, DEPTH_HEADS, BLOCKS = (2560, 40, 6) if ON_GPU else (48, 4, 2)
LAYERS = 8 if ON_GPU else 2
POSITIONS, CODES = 4, 16384 if ON_GPU else 256
# of a block: rows and columns of both steps, warps, programs
CUTS = (
    (4, 512, 4, 1024, 4, 660), (4, 512, 4, 512, 4, 660), (8, 512, 4, 1024, 4, 660),
) if ON_GPU else ((16, 16, 16, 16, 4, 3),)  # fmt: skip
# codes and tokens of drafts: rows and columns, then cuts
DRAFT_SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008)) if ON_GPU else ((48, 128),)
DRAFT_CUTS = ((32, 128, 4), (64, 128, 8), (32, 64, 4)) if ON_GPU else ((16, 16, 4),)
# of attention's projection: a row at once is all under way while attention runs
OUT_CUTS = ((2, 4096, 4), (4, 4096, 4), (4, 4096, 8)) if ON_GPU else ((16, 32, 4),)
Rows = list[dict[str, Any]]


def draw(*size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*size, **KINDS).mul_(scale)


def whole(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=DEVICE)


def microseconds(work: Callable[[], object], count: int) -> float:
    if ON_GPU:
        return graph_us(work, count)
    begun = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - begun) / count


def choose_sample(log: Callable[..., None]) -> Rows:
    """The same codes, found otherwise or by more warps."""
    by, count, usual = Draw(True, 3.0, 1.0, min(900, CODES // 4), 0.96), 40 if ON_GPU else 2, 0.0
    best: tuple[float, Any] = (0.0, None)
    want: list[int] = []
    for search, warps in ((True, 16), (True, 32), (False, 16), (False, 32)):
        sample_triton.SETTING.update(search=search, warps=warps)
        drawn, us = [], []
        for i in range(count):
            torch.manual_seed(i)
            logits = torch.randn(2, CODES, device=DEVICE) * (1 + i % 4)
            noise = torch.empty(1, 4, 4, CODES, device=DEVICE).exponential_()
            codes, total = torch.full((1, 4, 4), -1, device=DEVICE), draw(2, 64)
            to = Codes(codes, noise, whole(2), 1, draw(CODES + 1, 64), total)
            sample_triton.sample_code(logits, by, to)
            drawn.append(int(to.codes[0, 2, 1]))
            if i % 10 == 0:
                us.append(
                    microseconds(lambda x=logits, t=to: sample_triton.sample_code(x, by, t), 1)
                )
        want, mean = want or drawn, sum(us) / len(us)
        log(kernel="sample", search=search, warps=warps, equal=drawn == want, us=us)
        usual = usual or mean
        if drawn == want and mean < 0.98 * (best[0] or usual):
            best = mean, dict(sample_triton.SETTING)
    return [] if best[1] is None else [{"part": "sample", "setting": best[1]}]


def choose_drafts(log: Callable[..., None], bits: int, tokens: int) -> Rows:
    """Codes times the tokens of a pass over drafts, against bf16 and against decoding first."""
    kind = {8: "int8", 4: "int4"}[bits]
    chosen: Rows = []
    for rows, columns in DRAFT_SHAPES:
        dense = [draw(rows, columns, scale=columns**-0.5) for _ in range(LAYERS)]
        weights, x = [to_codes(Weight(part), kind) for part in dense], draw(tokens, columns)
        out, case = draw(tokens, rows), {"bits": bits, "tokens": tokens, "shape": (rows, columns)}

        def by_torch(parts: list[Tensor] = dense, x: Tensor = x) -> None:
            for part in parts:
                torch.nn.functional.linear(x, part)

        def decoded(weights: list[Weight] = weights, x: Tensor = x) -> None:
            torch.nn.functional.linear(x, weights[0].dense(x.dtype))

        log(**case, bf16_us=microseconds(by_torch, LAYERS), decoded_us=microseconds(decoded, 1))
        best: tuple[float, Any] = (1e9, None)
        for cut in DRAFT_CUTS:
            setting = gemv_triton.Setting(*cut)

            def work(
                weights: list[Weight] = weights, x: Tensor = x, out: Tensor = out,
                setting: Any = setting,
            ) -> None:  # fmt: skip
                for weight in weights:
                    gemv_triton.gemv(out, x, (weight,), setting=setting)

            us, want = microseconds(work, LAYERS), x.float() @ weights[-1].dense(torch.float32).mT
            error = float((out.float() - want).norm() / want.norm())
            log(**case, cut=cut, us=us, relative_error=error)
            if error < 0.03 and us < best[0]:
                best = us, cut
        shape = columns, [rows], ""
        row = {"part": "gemv", "shape": shape, "tokens": tokens, "kind": kind, "cut": best[1]}
        chosen += [row] if best[1] else []
    return chosen


def trunk_of(rows: int) -> tuple[Layers, list[Step]]:
    """Layers of a LLaMA's shape."""

    def linear(n: int, k: int) -> Weight:
        return Weight(draw(n, k, scale=k**-0.5))

    x, inner = draw(rows, WIDTH), 11008 if ON_GPU else 80
    layers, steps = [], []
    for _ in range(LAYERS):
        norm, qkv = Norm(draw(WIDTH), None, 1e-5), tuple(linear(WIDTH, WIDTH) for _ in range(3))
        mlp = MlpWeights(norm, linear(inner, WIDTH), linear(inner, WIDTH), linear(WIDTH, inner))
        layers.append(BlockWeights(norm, qkv, linear(WIDTH, WIDTH), mlp))
        k, v = (draw(rows, HEADS, 2 * ENTRIES, HEAD_DIM) for _ in range(2))
        angle = torch.rand(rows, 256, HEAD_DIM, device=DEVICE)
        turn = Rotation(angle.cos(), angle.sin(), False)
        steps.append(Step(Entries(k, v, whole(ENTRIES)), HEADS, whole(7), turn))
    return Layers(layers, x, Scratch(rows, HEADS, HEADS, HEAD_DIM, DEVICE)), steps


def choose_overlap(log: Callable[..., None], rows: int) -> Rows:
    """When a launch lets the next one begin, and how much of attention's projection comes early."""
    depth, positions = depth_of([block_of("") for _ in range(BLOCKS)], rows)
    trunk, steps = trunk_of(rows)
    chosen: Rows = []
    gains = []
    for name, layers, turns, width in (
        ("depth", depth, positions, DEPTH), ("trunk", trunk, [steps], WIDTH)
    ):  # fmt: skip
        barriers, count = layers.barriers(len(turns)), len(layers.weights)
        start, times = draw(rows, width), {}

        def work(layers: Layers = layers, turns: Any = turns, barriers: Any = barriers) -> None:
            barriers.zero_()
            for step, barrier in zip(turns, barriers, strict=True):
                layers.step(step, [None] * len(step), barrier)

        want = None
        for early in (False, True):
            Overlap.early = early
            for cut in (None, *OUT_CUTS):
                if cut is not None:
                    gemv_triton.SETTINGS[16, rows, width, width] = gemv_triton.Setting(*cut)
                layers.x.copy_(start)
                work()
                want = layers.x.clone() if want is None else want
                error = float((layers.x - want).float().norm() / want.float().norm())
                us = microseconds(work, len(turns) * count)
                log(layers=name, rows=rows, early=early, out=cut, us=us, relative_error=error)
                if error < 0.03:
                    times[early, cut] = us
            gemv_triton.SETTINGS.pop((16, rows, width, width), None)
        Overlap.early = False
        best = min(times, key=lambda key: times[key])
        gains.append(best[0] and times[best] < 0.995 * min(times[False, cut] for _, cut in times))
        if best[1] is not None:
            shape = width, [width], ""
            chosen.append(
                {"part": "gemv", "shape": shape, "tokens": rows, "kind": "", "cut": best[1]}
            )
    # one rule for all
    return chosen + [{"part": "overlap", "early": all(gains)}] * (rows == 1)


def depth_of(blocks: list[BlockWeights], rows: int) -> tuple[Layers, list[list[Step]]]:
    """The depth transformer's blocks, and a step for each position."""
    size = (rows, DEPTH_HEADS, POSITIONS, DEPTH // DEPTH_HEADS)
    caches = [(draw(*size), draw(*size)) for _ in blocks]
    scratch = Scratch(rows, DEPTH_HEADS, DEPTH_HEADS, size[3], DEVICE)
    slots = [whole(i) for i in range(POSITIONS)]
    steps = [[Step(Entries(*c, slot), DEPTH_HEADS, slot) for c in caches] for slot in slots]
    return Layers(blocks, draw(rows, DEPTH), scratch), steps


def block_of(kind: str) -> BlockWeights:
    def linear(rows: int, columns: int) -> Weight:
        weight = Weight(draw(rows, columns, scale=columns**-0.5), None, draw(rows, scale=0.1))
        return to_codes(weight, kind) if kind else weight

    norms = [Norm(draw(DEPTH), draw(DEPTH), 1e-5) for _ in range(2)]
    q, k, v, out = (linear(DEPTH, DEPTH) for _ in range(4))
    up, down = linear(4 * DEPTH, DEPTH), linear(DEPTH, 4 * DEPTH)
    return BlockWeights(norms[0], (q, k, v), out, MlpWeights(norms[1], None, up, down))


def choose_block(log: Callable[..., None], bits: int, rows: int) -> Rows:
    """All blocks over all positions in one launch each, against four."""
    kind = {16: "", 8: "int8", 4: "int4"}[bits]
    blocks = [block_of(kind) for _ in range(BLOCKS)]
    layers, steps = depth_of(blocks, rows)
    x, start = layers.x, layers.x.clone()
    memory = BlockMemory(x, 4 * DEPTH)
    barriers, none = layers.barriers(POSITIONS), [None] * BLOCKS
    launches = 1 if ON_GPU else 5

    def before() -> None:
        barriers.zero_()
        for step, barrier in zip(steps, barriers, strict=True):
            layers.step(step, none, barrier)

    def by(setting: Any) -> None:
        barriers.zero_()
        for step, barrier in zip(steps, barriers, strict=True):
            for i, block in enumerate(blocks):
                block_triton.decode_block(x, block, step[i], memory, barrier[i], setting, launches)

    count = POSITIONS * BLOCKS
    before()
    want = x.clone()
    usual = microseconds(before, count)
    log(kernel="block", bits=bits, rows=rows, before_us=usual)
    best: tuple[float, Any] = (usual, None)
    for cut in CUTS:
        setting = mlp_setting(cut)
        try:
            x.copy_(start)
            by(setting)
            # positions go on from each other's answers, so that errors add up
            error = float((x - want).float().norm() / want.float().norm())
            us = microseconds(lambda s=setting: by(s), count)
        except Exception as fault:
            log(kernel="block", bits=bits, rows=rows, cut=cut, failed=str(fault)[:300])
            continue
        log(kernel="block", bits=bits, rows=rows, cut=cut, us=us, relative_error=error)
        if error < 0.03 and us < 0.99 * best[0]:
            best = us, cut
    if best[1] is None:
        return []
    return [{"part": "block", "kind": kind, "tokens": rows, "cut": best[1]}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", required=True, help="set apart by commas")
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for part in given.parts.split(","):
        try:
            choose(part, given.out)
        except Exception:
            traceback.print_exc()


def choose(part: str, folder: Path) -> None:
    begun = time.time()

    def log(**row: Any) -> None:
        line = json.dumps(row | {"at_s": round(time.time() - begun, 1)})
        print(line, flush=True)
        with (folder / f"choose-{part}.jsonl").open("a") as file:
            file.write(line + "\n")

    torch.manual_seed(0)
    name, *sizes = part.split("_")
    work = {
        "sample": choose_sample, "overlap": choose_overlap, "block": choose_block,
        "drafts": choose_drafts,
    }[name]  # fmt: skip
    with torch.inference_mode():
        rows = work(log, *map(int, sizes))
    (folder / f"settings-{part}.json").write_text(json.dumps(rows, indent=1))
    log(part=part, chosen=rows)


if __name__ == "__main__":
    main()
