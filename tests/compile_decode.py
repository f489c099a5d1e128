"""Compile the kernels of a decode step for an H200, where none is: run by test_decode_compile."""

from compile_on_cpu import launch  # isort: split

import itertools

import torch

from tachyscope.kernels.decode_attention import Entries, Rotation, Scratch, Step, several
from tachyscope.kernels.decode_mlp import COPIES, Error, Kept, MlpWeights
from tachyscope.kernels.decode_mlp import triton as mlp
from tachyscope.kernels.gemv import Norm, Weight
from tachyscope.kernels.gemv import triton as gemv
from tachyscope.kernels.token_gate import GateState, TokenGate
from tachyscope.kernels.token_gate import triton as gate

BF16, WIDTH, INNER, DEPTH = torch.bfloat16, 4096, 11008, 2560


def weight(rows, columns, kind):
    if not kind:
        return Weight(torch.empty(rows, columns, dtype=BF16))
    words = torch.empty(rows, columns // (4 if kind == "int8" else 8), dtype=torch.int32)
    groups = torch.empty(rows, columns // 128, dtype=torch.int32)
    return Weight(words, torch.empty(rows) if kind == "int8" else groups)


def main():
    gemv.launch = mlp.launch = several.launch = gate.launch = launch
    barrier, place = torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.int32)
    for tokens, kind in ((1, ""), (2, ""), (1, "int8"), (1, "int4"), (2, "int4")):
        x, norm = (
            torch.empty(tokens, WIDTH, dtype=BF16),
            Norm(torch.empty(WIDTH, dtype=BF16), None, 1e-5),
        )
        out, inner = (torch.empty(tokens, n, dtype=BF16) for n in (3 * WIDTH, INNER))
        gemv.gemv(out, x, (weight(WIDTH, WIDTH, kind),) * 3, norm)
        whole = MlpWeights(norm, *(weight(INNER, WIDTH, kind),) * 2, weight(WIDTH, INNER, kind))
        held = [torch.empty(tokens, 256, WIDTH, dtype=BF16) for _ in range(2)]
        age = torch.empty(tokens, 256, dtype=torch.int32)
        skip = torch.empty(tokens, dtype=torch.int32)
        mlp.decode_mlp(x, whole, Kept(skip, place, held[0], age, input=held[1]), inner, barrier)
        up, down = weight(3072, WIDTH, kind), weight(WIDTH, 3072, kind)
        part = MlpWeights(norm, weight(2752, WIDTH, kind), up, down, 320)
        error = Error(place, *held, 0.5, torch.empty(tokens))
        mlp.decode_mlp(x, part, error, inner, barrier)
        once = mlp.setting_for(whole, tokens, 132)._replace(prenorm=True)
        normed = torch.empty(COPIES, tokens, WIDTH, dtype=BF16)
        mlp.decode_mlp(x, whole, None, inner, barrier, normed=normed, setting=once)
    for rows, tokens in ((1, 17), (2, 33), (1, 65)):
        k, v = (torch.empty(rows, 32, 2112, 128, dtype=BF16) for _ in range(2))
        cos, sin = (torch.empty(rows, 256, 128) for _ in range(2))
        step = Step(Entries(k, v, place), 32, place, Rotation(cos, sin, False))
        qkv, out = (torch.empty(rows * tokens, n * WIDTH, dtype=BF16) for n in (3, 1))
        scratch = Scratch(rows, 32, 32, 128, torch.device("cpu"), tokens)
        several.decode_attention(out, qkv, step, scratch, tokens)
    for rows, rule in ((1, "threshold"), (2, "share"), (2, "budget")):
        held, fine = torch.empty(rows, 256, WIDTH, dtype=BF16), torch.empty(rows, 256)
        told = torch.zeros(rows, dtype=torch.int32)
        rules, age = TokenGate("input", rule, 0.5, tied=rows == 2), torch.zeros(rows, 256).int()
        limit = torch.zeros(())
        one = GateState(
            rules, limit, place, place, told, told, age, None, fine, fine, fine, input=held
        )
        gate.decide_by_input(torch.empty(rows, WIDTH, dtype=BF16), norm, one)
        gate.decide(one, torch.zeros(rows, 1))
    # times the tokens of drafts, of one row and of a pair; on a GPU of less shared memory too
    for has_large_smem in (True, False):
        gemv.has_large_smem = lambda device, answer=has_large_smem: answer
        for kind, tokens in itertools.product(("int8", "int4"), (33, 66, 128)):
            x, out = (torch.empty(tokens, n, dtype=BF16) for n in (WIDTH, INNER))
            gemv.gemv(out, x, (weight(INNER, WIDTH, kind),))
    # the depth transformer's layer norm, of the rows of several drafts
    row = torch.empty(DEPTH, dtype=BF16)
    x, out = (torch.empty(16, n, dtype=BF16) for n in (DEPTH, 3 * DEPTH))
    gemv.gemv(out, x, (weight(3 * DEPTH, DEPTH, ""),), Norm(row, row, 1e-5))


if __name__ == "__main__":
    main()
