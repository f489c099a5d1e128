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
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tachyscope.kernels.block_index import triton as index
from tachyscope.kernels.host_blocks import triton as host
from tachyscope.kernels.kmeans import triton as kmeans


def build(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, fixed)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.asm["cubin"]


whole = dict.fromkeys(("most", "count", "heads", "total"), "i32")
whole |= dict.fromkeys(("x_b", "x_h", "x_n"), "i64") | {"places": "*i32", "ids": "*i32"}
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
types = dict.fromkeys(("x_b", "x_h"), "i64") | dict.fromkeys(("x_n", "heads", "n", "count"), "i32")
types |= {"x": "*bf16", "near": "*bf16", "label": "*i64", "order": "*i64", "start": "*i64"}
types |= dict.fromkeys(("half", "weight", "total", "size"), "*fp32")
for kernel, options in ((kmeans._nearest, {"M": kmeans.ROWS, "N": kmeans.COLUMNS}), (kmeans._sum_clusters, {"N": kmeans.ADDED})):
    build(kernel, types, {"D": 128} | options, num_warps=8)
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
