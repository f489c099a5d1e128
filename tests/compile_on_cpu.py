"""Compile Triton and Gluon kernels for an H200 where none is, as their wrappers launch them.

Import it before any kernel. `launch` stands in for `kernels/launch.launch`: it has Triton take a
kernel's arguments as it would on the GPU, types, alignment and descriptors included, and prints the
kernel's module and name, its grid, warps of a program, registers of a thread, bytes that did not
fit in them, and bytes of shared memory.
"""

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
)


def launch(kernel, grid, *args, **options):
    if "PDL" in options:  # as on a GPU
        options |= {"PDL": True, "launch_pdl": True}
    built = kernel.warmup(*args, grid=grid, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    folder = kernel.fn.__module__.split(".")[2:]
    name = ".".join([*folder, kernel.fn.__name__])
    size, used = "x".join(map(str, grid)), built.metadata
    print(name, size, used.num_warps, registers, stack, used.shared, flush=True)


class Compiled:
    """A Gluon kernel whose wrapper launches it by kernel[grid](...)."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return functools.partial(launch, self.kernel, grid)
