"""New kernels of a decode step: right, and faster than what they replace?

for part in block_16_1 block_16_2; do
    timeout 60 python scripts/choose_decode.py --parts $part --out DIR
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
from tachyscope.kernels.decode_attention import Entries, Scratch, Step
from tachyscope.kernels.decode_block import BlockMemory, BlockWeights
from tachyscope.kernels.decode_block import triton as block_triton
from tachyscope.kernels.decode_mlp import MlpWeights
from tachyscope.kernels.gemv import Norm, Weight, to_codes

ON_GPU = torch.cuda.is_available()
KINDS: dict[str, Any] = {
    "device": "cuda" if ON_GPU else "cpu",
    "dtype": torch.bfloat16 if ON_GPU else torch.float32,
}
DEVICE = torch.device(KINDS["device"])
# of the trunk: heads, head size, width, entries; of the depth transformer: width, heads, blocks
HEADS, HEAD_DIM, WIDTH, ENTRIES = (32, 128, 4096, 1100) if ON_GPU else (2, 16, 48, 40)
DEPTH, DEPTH_HEADS, BLOCKS = (2560, 40, 6) if ON_GPU else (48, 4, 2)
POSITIONS, PLACES, CODES = 4, 64, 16384 if ON_GPU else 256
TOLERANCE = {"rtol": 4e-2, "atol": 6e-2} if ON_GPU else {"rtol": 1e-4, "atol": 1e-4}
# of a block: rows and columns of both steps, warps, programs
CUTS = (
    (4, 512, 4, 1024, 4, 660), (4, 512, 4, 1024, 4, 528), (8, 512, 4, 1024, 4, 528),
    (4, 512, 4, 512, 4, 660), (8, 512, 8, 512, 4, 396), (2, 512, 4, 1024, 4, 660),
) if ON_GPU else ((16, 16, 16, 16, 4, 3),)  # fmt: skip
CUTS_INT8 = ((4, 256, 4, 512, 4, 660), (4, 256, 8, 256, 4, 528), (8, 256, 4, 512, 4, 528))
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
    blocks, start = [block_of(kind) for _ in range(BLOCKS)], draw(rows, DEPTH)
    size = (rows, DEPTH_HEADS, POSITIONS, DEPTH // DEPTH_HEADS)
    caches = [(draw(*size), draw(*size)) for _ in blocks]
    scratch = Scratch(rows, DEPTH_HEADS, DEPTH_HEADS, size[3], DEVICE)
    x, slots = start.clone(), [whole(i) for i in range(POSITIONS)]
    steps = [[Step(Entries(*c, slot), DEPTH_HEADS, slot) for c in caches] for slot in slots]
    layers, memory = Layers(blocks, x, scratch), BlockMemory(x, 4 * DEPTH)
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
    for cut in CUTS_INT8 if bits < 16 and ON_GPU else CUTS:
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
    name, *sizes = part.split("_") if part.startswith("block") else [part]
    work = {"block": choose_block}[name]
    with torch.inference_mode():
        rows = work(log, *map(int, sizes))
    (folder / f"settings-{part}.json").write_text(json.dumps(rows, indent=1))
    log(part=part, chosen=rows)


if __name__ == "__main__":
    main()
