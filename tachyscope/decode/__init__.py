"""A token model's step on fixed memory, so that one CUDA graph, or program, serves every token."""

from tachyscope.decode.bf16 import Bf16Linear, store_bf16
from tachyscope.decode.cpu_library import can_compile, compile_step
from tachyscope.decode.drafts import DraftEngine
from tachyscope.decode.engine import DecodeEngine, unsupported
from tachyscope.decode.parts import DecodeParts, DepthParts, LayerParts
from tachyscope.decode.program import TokenStep
from tachyscope.decode.quantise import CodedLinear, quantise

__all__ = [
    "Bf16Linear",
    "CodedLinear",
    "DecodeEngine",
    "DecodeParts",
    "DepthParts",
    "DraftEngine",
    "LayerParts",
    "TokenStep",
    "can_compile",
    "compile_step",
    "quantise",
    "store_bf16",
    "unsupported",
]
