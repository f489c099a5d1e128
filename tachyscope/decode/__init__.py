"""A token model's step on fixed memory, so that one CUDA graph serves every token."""

from tachyscope.decode.engine import DecodeEngine, unsupported
from tachyscope.decode.int8 import Int8Linear, quantise_int8
from tachyscope.decode.parts import DecodeParts, DepthParts, LayerParts

__all__ = [
    "DecodeEngine",
    "DecodeParts",
    "DepthParts",
    "Int8Linear",
    "LayerParts",
    "quantise_int8",
    "unsupported",
]
