"""Compile the kernels of a decode step for a Hopper GPU, where none is: run by test_decode_compile.

Prints a line for each launch: its name, registers of a thread, bytes that did not fit in them, bytes
of shared memory.
"""

import itertools
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tachyscope.kernels.decode_attention import Entries, Rotation, Scratch, Step, several
from tachyscope.kernels.decode_mlp import COPIES, Error, Kept, MlpWeights
from tachyscope.kernels.decode_mlp import triton as mlp
from tachyscope.kernels.gemv import Norm, Weight
from tachyscope.kernels.gemv import triton as gemv
from tachyscope.kernels.token_gate import GateState, TokenGate
from tachyscope.kernels.token_gate import triton as gate

BF16, WIDTH, INNER, DEPTH = torch.bfloat16, 4096, 11008, 2560
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def weight(rows, columns, kind):
    if not kind:
        return Weight(torch.empty(rows, columns, dtype=BF16))
    words = torch.empty(rows, columns // (4 if kind == "int8" else 8), dtype=torch.int32)
    groups = torch.empty(rows, columns // 128, dtype=torch.int32)
    return Weight(words, torch.empty(rows) if kind == "int8" else groups)


def source(kernel, args, options):
    """What is compiled, as the launcher would say it: types, constants, aligned pointers."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    plain = {kernel.arg_names[x] if isinstance(x, int) else x for x in kernel.do_not_specialize}
    types, constants, facts = {}, {}, {}
    for i, (name, param) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = given[name]
        if param.is_constexpr:
            types[name], constants[i,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[name] = POINTERS[value.dtype]
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32"
        even = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if types[name] != "constexpr" and even and name not in plain:
            facts[i,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, types, constants, facts)


def launch(kernel, grid, *args, **options):
    options = options | ({"PDL": True} if "PDL" in options else {})
    names = set(kernel.arg_names)
    settings = {name: value for name, value in options.items() if name not in names}
    settings.pop("launch_pdl", None)
    built = triton.compile(
        source(kernel, args, options), target=GPUTarget("cuda", 90, 32), options=settings
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", told).groups()
    print(kernel.fn.__name__, registers, stack, built.metadata.shared, flush=True)


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
    # times the tokens of drafts, of one row and of a pair
    for kind, tokens in itertools.product(("int8", "int4"), (33, 66)):
        x, out = (torch.empty(tokens, n, dtype=BF16) for n in (WIDTH, INNER))
        gemv.gemv(out, x, (weight(INNER, WIDTH, kind),))


if __name__ == "__main__":
    main()
