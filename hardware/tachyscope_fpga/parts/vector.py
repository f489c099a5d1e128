"""Fixed-point vectors between the arrays: 24 bits, 12 of them a fraction, and int8 with a scale.

Every vector that is no int8 operand is *wide*: the residual stream, norms, projections, the MLP's
inner activations. A dot product takes a vector as int8 with one scale a token, a power of two:
``value = int8 * 2**exponent / 2**FRACTION``. So a scale costs a shift and no multiplier.
"""

from __future__ import annotations

import numpy as np
from amaranth.hdl import Module, Signal, Value, signed
from amaranth.lib import data
from numpy.typing import ArrayLike, NDArray

from tachyscope_fpga.parts.fixed import Ints, round_shift, saturate

WIDE = 24
FRACTION = 12
MAX_EXPONENT = WIDE - 8
ONE = 1 << FRACTION


def to_wide(values: ArrayLike) -> Ints:
    """Real numbers as wide ones: rounded half up, saturated at about +-2048."""
    scaled = np.floor(np.asarray(values, np.float64) * ONE + 0.5)
    return saturate(np.clip(scaled, -(2.0**40), 2.0**40).astype(np.int64), WIDE)


def from_wide(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(values, np.float64) / ONE


def exponents(values: Ints) -> Ints:
    """The exponent of every vector [..., K]: the least at which its magnitudes have 7 bits.

    A magnitude is v or -v - 1, so that -128 fits where 128 does not. [...]
    """
    magnitude = np.bitwise_or.reduce(values ^ (values >> 63), axis=-1)
    # a double holds these exactly, and its exponent is the number of bits
    bits = np.frexp(magnitude.astype(np.float64))[1]
    return np.maximum(bits - 7, 0).astype(np.int64)


def to_int8(values: Ints) -> tuple[Ints, Ints]:
    """Wide vectors [..., K] as int8 and their exponents [...]; 127.5 and more is 127."""
    exponent = exponents(values)
    return saturate(round_shift(values, exponent[..., None])), exponent


def wide_vector(lanes: int) -> data.ArrayLayout:
    """A beat of wide numbers on a stream."""
    return data.ArrayLayout(signed(WIDE), lanes)


def bit_length(m: Module, value: Value) -> Signal:
    """Amaranth: how many bits an unsigned value has, its leading zeros left out."""
    length = Signal(range(len(value) + 1))
    for bit in range(len(value)):
        with m.If(value[bit]):
            m.d.comb += length.eq(bit + 1)
    return length
