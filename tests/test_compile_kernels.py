"""Kernels that no CPU runs at full size compile for an H200, without one: Triton needs no GPU to.

The interpreter of other tests takes what the compiler does not.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
# kernels are interpreted in this process, so that another one compiles them
SCRIPT = """
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tachyscope.kernels.admit import triton as admit
from tachyscope.kernels.block_index import triton as index
from tachyscope.kernels.host_blocks import triton as host


def build(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, fixed)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.asm["cubin"]
    return found


def tell(kernel, types, constants, **options):
    found = build(kernel, types, constants, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        told = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    registers, stack = re.search(r"REG:(\\d+) STACK:(\\d+)", told).groups()
    print(kernel.fn.__name__, registers, stack, found.metadata.shared)


whole = dict.fromkeys(("most", "count", "heads", "total"), "i32")
whole |= dict.fromkeys(("x_b", "x_h", "x_n"), "i64") | {"slots": "*i32", "ids": "*i32"}
for kind, code, scale in ((0, "*bf16", "*bf16"), (1, "*i8", "*fp32"), (2, "*u8", "*fp16")):
    types = whole | {"k": "*bf16", "v": "*bf16", "k_code": code, "v_code": code}
    types |= {"k_scale": scale, "v_scale": scale}
    constants = {"KIND": kind, "HALF": 64, "BLOCK": 128, "N": 128, "W": 64}
    for kernel in (host._store, host._load):
        build(kernel, types, constants, num_warps=8)
names = ("q_s", "most", "heads", "group", "queries", "blocks", "size", "tiles")
types = dict.fromkeys(names, "i32") | {"q_ptr": "*bf16", "code_ptr": "*i8", "factor": "fp32"}
types |= dict.fromkeys(("scale_ptr", "weight_ptr", "m_ptr", "l_ptr", "out_ptr"), "*fp32")
types |= {"q_b": "i64", "q_h": "i64"}
for kernel in (index._part_sums, index._part_mass):
    build(kernel, types, {"D": 128, "M": 64, "N": 64, "TILE": 16, "PARTS": 8}, num_warps=4)
names = ("k_b", "k_h", "s_b", "s_h", "w_b", "w_h")
types = dict.fromkeys(names, "i64") | dict.fromkeys(("k_s", "most", "slots", "heads"), "i32")
types |= dict.fromkeys(("k_scale", "log_count", "scale", "weight"), "*fp32")
sizes = {"CODED": False, "D": 128, "BLOCK": 120, "N": 128}
build(index._encode, types | {"k": "*bf16", "code": "*i8"}, sizes, num_warps=8)
whole = dict.fromkeys(("count", "of_row", "most", "slots", "at_once", "stay"), "i32")
types = whole | {"mass": "*fp32", "ids": "*i64", "demand": "*i64"}
tell(admit._add_up, types, {"N": admit.ADDED}, num_warps=4)
types = whole | dict.fromkeys(("slot", "block", "now", "later", "first", "keys"), "*i32")
types |= {"demand": "*i64", "comers": "*i64", "choices": "*fp32", "wanted": "*fp32"}
ints = ("m_t", "o_b", "o_h", "o_t", "heads", "group", "slots", "n", "sink")
near = dict.fromkeys(ints, "i32") | {"m_b": "i64", "m_h": "i64"}
near |= {"mass": "*fp32", "blocks": "*i32", "out": "*i32"}
for most, slots in ((14700, 194), (30000, 450), (32768, 1024)):
    n, p = (triton.next_power_of_2(x) for x in (most, slots))
    sizes = {"N": n, "C": admit.CHUNK, "P": p}
    tell(admit._admit, types, sizes, num_warps=16, enable_fp_fusion=False)
    tell(admit._best_slots, near, {"P": p}, num_warps=p // 256)
print("compiled")
"""


@pytest.mark.slow
def test_kernels_compile(tmp_path):
    free = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    free |= {"TRITON_CACHE_DIR": str(tmp_path)}
    path = tmp_path / "compile.py"  # a kernel's source must stand in a file
    path.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, path], env=free, capture_output=True, text=True)
    assert ran.returncode == 0 and "compiled" in ran.stdout, ran.stderr[-2000:]
    lines = [line.split() for line in ran.stdout.splitlines()[:-1]]
    assert [name for name, *_ in lines] == ["_add_up", *["_admit", "_best_slots"] * 3]
    for _, registers, stack, shared in lines:
        # all that 16 warps may have; next to nothing spills
        assert int(registers) <= 128 and int(stack) <= 32 and int(shared) <= 227 * 1024
