"""New kernels of a decode step: right, and faster than what they replace?

for parts in several,input_gate,sample block_16_1 block_16_2 block_8_1; do
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
import dataclasses
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
from tachyscope.kernels.decode_attention import Entries, Rotation, Scratch, Step, several
from tachyscope.kernels.decode_attention import torch as attention_torch
from tachyscope.kernels.decode_block import BlockMemory, BlockWeights
from tachyscope.kernels.decode_block import triton as block_triton
from tachyscope.kernels.decode_mlp import MlpWeights
from tachyscope.kernels.gemv import Norm, Weight, to_codes
from tachyscope.kernels.input_gate import InputGate
from tachyscope.kernels.input_gate import torch as gate_torch
from tachyscope.kernels.input_gate import triton as gate_triton
from tachyscope.kernels.sample_code import Codes, Draw
from tachyscope.kernels.sample_code import triton as sample_triton

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


def copy(step: Step) -> Step:
    held = step.entries
    return dataclasses.replace(
        step, entries=dataclasses.replace(held, k=held.k.clone(), v=held.v.clone())
    )


def choose_several(log: Callable[..., None]) -> Rows:
    """Attention of several tokens, against stock torch's over all slots."""
    faster = []
    for rows, tokens in ((1, 33), (2, 33), (1, 65), (1, 17)) if ON_GPU else ((2, 5),):
        k, v = (draw(rows, HEADS, 2 * ENTRIES, HEAD_DIM) for _ in range(2))
        angle = torch.rand(rows, 256, HEAD_DIM, device=DEVICE)
        turn = Rotation(angle.cos(), angle.sin(), False)
        step = Step(Entries(k, v, whole(ENTRIES)), HEADS, whole(7), turn)
        other, qkv = copy(step), draw(rows * tokens, 3 * HEADS * HEAD_DIM)
        want, got = (torch.full_like(qkv[:, : HEADS * HEAD_DIM], torch.nan) for _ in range(2))
        want, got = want.contiguous(), got.contiguous()
        scratch = Scratch(rows, HEADS, HEADS, HEAD_DIM, DEVICE, tokens)
        attention_torch.decode_attention(want, qkv, step, tokens)
        for _ in range(3):
            several.several_attention(got, qkv, other, scratch, tokens)
        torch.testing.assert_close(got, want, **TOLERANCE)
        torch.testing.assert_close(other.entries.k, step.entries.k, **TOLERANCE)
        us = microseconds(
            lambda g=got, q=qkv, o=other, s=scratch, t=tokens: several.several_attention(
                g, q, o, s, t
            ),
            1,
        )
        before = microseconds(
            lambda w=want, q=qkv, o=step, t=tokens: attention_torch.decode_attention(w, q, o, t), 1
        )
        log(kernel="several", rows=rows, tokens=tokens, us=us, before_us=before)
        faster.append(us < before)
    return [{"part": "chosen", "name": "several_attention"}] if all(faster) else []


def choose_input_gate(log: Callable[..., None]) -> Rows:
    faster = []
    norm = Norm(draw(WIDTH), None, 1e-5)
    for rows, kind in ((1, "threshold"), (2, "share"), (2, "budget"), (1, "share")):
        fine = torch.rand(rows, PLACES, device=DEVICE)
        flags = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        x, held = draw(rows, WIDTH), draw(rows, PLACES, WIDTH)
        gates = [
            InputGate(
                kind, 0.5, rows == 2, 4.0, whole(3), whole(1), flags.clone(),
                torch.zeros(2, dtype=torch.int32, device=DEVICE), held.clone(),
                fine[:, :1].clone(), -fine.clone(), fine[:, :1].clone(),
            )
            for _ in range(2)
        ]  # fmt: skip
        gate_torch.input_gate(x, norm, gates[0])
        gate_triton.input_gate(x, norm, gates[1])
        for name in ("skip", "counts", "input", "credit", "recent", "due"):
            want, got = (getattr(gate, name) for gate in gates)
            torch.testing.assert_close(got, want, **TOLERANCE)
        us = microseconds(lambda x=x, g=gates[1]: gate_triton.input_gate(x, norm, g), 1)
        before = microseconds(lambda x=x, g=gates[0]: gate_torch.input_gate(x, norm, g), 1)
        log(kernel="input_gate", rows=rows, kind=kind, us=us, before_us=before)
        faster.append(us < before)
    return [{"part": "chosen", "name": "input_gate"}] if all(faster) else []


def choose_sample(log: Callable[..., None]) -> Rows:
    """Codes drawn in fewer turns; they are the same codes."""
    by, same, count = Draw(True, 3.0, 1.0, min(900, CODES // 4), 0.96), 0, 20 if ON_GPU else 2
    for i in range(count):
        torch.manual_seed(i)
        logits = torch.randn(2, CODES, device=DEVICE) * 3
        noise = torch.empty(1, 4, 4, CODES, device=DEVICE).exponential_()
        codes, total = torch.full((1, 4, 4), -1, device=DEVICE), draw(2, 64)
        to = Codes(codes, noise, whole(2), 1, draw(CODES + 1, 64), total)
        drawn = []
        for by_value in (False, True):
            sample_triton.sample_code(logits, by, to, by_value)
            drawn.append(int(to.codes[0, 2, 1]))
        same += drawn[0] == drawn[1]
    us, before = (
        microseconds(lambda v=v: sample_triton.sample_code(logits, by, to, v), 1)
        for v in (True, False)
    )
    log(kernel="sample", equal=same, of=count, us=us, before_us=before)
    good = same == count and us < 0.99 * before
    return [{"part": "chosen", "name": "sample_by_value"}] if good else []


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
    setting = {"part": "block", "kind": kind, "tokens": rows, "width": DEPTH, "cut": best[1]}
    return [{"part": "chosen", "name": f"decode_block_{bits}_{rows}"}, setting]


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
    work = {
        "several": choose_several, "input_gate": choose_input_gate, "sample": choose_sample,
        "block": choose_block,
    }[name]  # fmt: skip
    with torch.inference_mode():
        rows = work(log, *map(int, sizes))
    (folder / f"settings-{part}.json").write_text(json.dumps(rows, indent=1))
    log(part=part, chosen=[row["name"] for row in rows if row["part"] == "chosen"])


if __name__ == "__main__":
    main()
