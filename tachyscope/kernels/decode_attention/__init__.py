"""One token's attention in a decode step: rotate, write, read, and decide what is replayed."""

from tachyscope.kernels.decode_attention import torch as stock
from tachyscope.kernels.decode_attention.step import (
    Entries,
    Rotation,
    Scratch,
    Step,
    Window,
)
from tachyscope.kernels.dispatch import dispatch

__all__ = [
    "Entries",
    "Rotation",
    "Scratch",
    "Step",
    "Window",
    "decode_attention",
]

decode_attention = dispatch(stock.decode_attention)
