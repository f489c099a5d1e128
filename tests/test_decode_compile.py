"""The decode step's kernels compile for a GPU that is not there, and fit its memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_of_a_decode_step_compile_for_a_hopper_gpu():
    env = os.environ | {"TRITON_INTERPRET": "0"}
    file = Path(__file__).with_name("compile_decode.py")
    done = subprocess.run(
        [sys.executable, file], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    names = [name.split(".")[-1] for name, *_ in lines]
    registers, stacks, shared = (
        list(map(int, column)) for column in list(zip(*lines, strict=True))[3:]
    )
    assert names[:20] == ["_gemv", *["_decode_mlp"] * 3] * 5
    assert (
        names[20:]
        == ["_several_attention"] * 3 + ["_decide_by_input", "_decide"] * 3 + ["_gemv"] * 13
    )
    # as many programs as are launched must be there at once: 96 or 128 registers, or 168 for int4
    assert all(count <= 168 for count in registers[:20])
    # but for int4 with two tokens, whose four rows a program were faster than two all the same
    assert all(size <= (256 if i == 16 else 64) for i, size in enumerate(stacks))
    assert all(size <= 232448 for size in shared)
    # the last are for a GPU like an RTX 4090
    assert all(size <= 99 * 1024 for size in shared[-7:])
