"""A token model's step on fixed memory, so that one CUDA graph serves every token."""

from tachyscope.decode.engine import DecodeEngine, unsupported
from tachyscope.decode.parts import DecodeParts, DepthParts, LayerParts
from tachyscope.decode.quantise import CodedLinear, quantise

__all__ = [
    "CodedLinear",
    "DecodeEngine",
    "DecodeParts",
    "DepthParts",
    "LayerParts",
    "quantise",
    "unsupported",
]
