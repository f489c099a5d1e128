"""Kernels compile for an H200, without one: Triton needs no GPU to.

The interpreter of other tests, and the simulator, take what the compiler does not.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
KERNELS = Path(__file__).parents[1] / "tachyscope" / "kernels"
SHARED, REGISTERS = 227 * 1024, 65536  # of a program; of a multiprocessor
# bytes of a thread that do not fit in its registers; of others none
SPILLED = {
    "attention_fp8.hopper._flash": 24,
    "codes.triton._decode_packed": 112,
    "merge.triton._choose": 120,
    "admit.triton._admit": 32,
}
# compiled by test_decode_compile
DECODE = {"gemv", "decode_mlp", "decode_attention", "token_gate", "sample_code"}


def _launched():
    """The kernels that modules launch, as "module.kernel"."""
    for path in KERNELS.glob("*/*.py"):
        folder, text = path.parent.name, path.read_text()
        if folder in DECODE:
            continue
        names = re.findall(r"\blaunch\(\s*(_\w+),", text) + re.findall(r"\b(_flash)\[", text)
        names += re.findall(r"_copy\((_store|_load),", text)
        for group in re.findall(r"for kernel in \((.*?)\):", text):
            names += group.split(", ")
        yield from (f"{folder}.{path.stem}.{name}" for name in names)


@pytest.mark.slow
def test_kernels_compile_and_fit(tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    ran = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line.split() for line in ran.stdout.splitlines()]
    launched = set(_launched())
    assert len(launched) > 25
    assert launched <= {name for name, *_ in lines}
    for name, grid, warps, *used in lines:
        registers, stack, shared = map(int, used)
        _, *others = map(int, grid.split("x"))
        assert all(size < 2**16 for size in others), name
        assert shared <= SHARED and registers * 32 * int(warps) <= REGISTERS, name
        assert stack <= SPILLED.get(name, 0), name
