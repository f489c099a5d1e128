"""Programmatic dependent launch inside a kernel (Triton)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_kernel_before(PDL: tl.constexpr):
    """Wait for the kernel before, to read its results; then let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
