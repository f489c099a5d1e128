"""Integers of the accelerator: ranges, quantisation, rounding; in NumPy and in Amaranth."""

from __future__ import annotations

import math

import numpy as np
from amaranth.hdl import Const, Mux, Shape, Value, ValueLike, signed, unsigned
from amaranth.utils import bits_for
from numpy.typing import ArrayLike, NDArray

from tachyscope_fpga.errors import TachyscopeError

Ints = NDArray[np.int64]

ACC_BITS = 32
ACC_LOW, ACC_HIGH = -(2**31), 2**31 - 1
MAX_DEPTH = (2 ** (ACC_BITS - 1) - 1) // 2**14
"""The longest int8 dot product an int32 accumulator holds: 131,071 products of -128 * -128.

Llama-7B's longest, K = 11,008, reaches at most 11,008 * 2**14 = 180,355,072 = 2**27.4.
"""
MAX_MULTIPLIER = 2**15 - 1
MAX_SHIFT = 46


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise where a parameter is no integer from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise TachyscopeError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def check_multiple(name: str, value: int, of: str, step: int) -> None:
    """Raise where `value` is not a whole number of steps of the parameter `of`."""
    if value % step:
        raise TachyscopeError(f"{name} must be a multiple of {of} = {step}, got {value}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise where a parameter is none of its words."""
    if value not in choices:
        raise TachyscopeError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def ints(values: ArrayLike, name: str, low: int = -128, high: int = 127) -> Ints:
    """`values` as int64, after all of them were found to be integers from low to high."""
    given = np.asarray(values)
    if given.dtype.kind not in "iu" or (given.size and (given.min() < low or given.max() > high)):
        raise TachyscopeError(f"{name} must be integers from {low} to {high}")
    return given.astype(np.int64)


def saturate(values: ArrayLike, bits: int = 8) -> Ints:
    """Clip to what a signed number of `bits` bits can hold."""
    return np.clip(np.asarray(values, np.int64), -(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def round_shift(values: ArrayLike, shift: ArrayLike) -> Ints:
    """values / 2**shift, rounded half up."""
    shift = np.asarray(shift, np.int64)
    half = np.where(shift > 0, np.int64(1) << np.maximum(shift - 1, 0), 0)
    return (np.asarray(values, np.int64) + half) >> shift


def requantise(acc: ArrayLike, multiplier: ArrayLike, shift: ArrayLike, bits: int = 8) -> Ints:
    """acc * multiplier / 2**shift, rounded half up, saturated: no step leaves 48 bits."""
    return saturate(round_shift(np.asarray(acc, np.int64) * np.asarray(multiplier), shift), bits)


def quantise(values: ArrayLike, axis: int | None = -1) -> tuple[Ints, NDArray[np.float64]]:
    """Symmetric int8 (-127 to 127) and its scales, which keep `axis` as 1.

    Weights [N, K] get one scale an output channel with axis -1; so does a token's vector.
    """
    values = np.asarray(values, np.float64)
    top = np.abs(values).max(axis=axis, keepdims=True)
    scale = np.where(top > 0, top, 1.0) / 127
    return saturate(np.floor(values / scale + 0.5)), scale


def multiplier_and_shift(scale: ArrayLike) -> tuple[Ints, Ints]:
    """The multiplier (15 bits) and shift whose quotient is nearest to each positive scale."""
    scales = np.atleast_1d(np.asarray(scale, np.float64))
    top = MAX_MULTIPLIER + 0.5
    if not np.isfinite(scales).all() or (scales < 0).any() or (scales >= top).any():
        raise TachyscopeError(f"scales must be from 0 to {MAX_MULTIPLIER}, got {scales.tolist()}")
    shift = np.full(scales.shape, MAX_SHIFT)
    some = scales > 0
    shift[some] = np.clip(14 - np.floor(np.log2(scales[some])), 0, MAX_SHIFT)
    multiplier = np.floor(np.ldexp(scales, shift) + 0.5).astype(np.int64)
    over = multiplier > MAX_MULTIPLIER  # 0.99999 rounds up to 2**15
    shift = shift - over
    return np.where(over, (multiplier + 1) >> 1, multiplier), shift.astype(np.int64)


def ceil_log2(value: int) -> int:
    return max(0, math.ceil(math.log2(value))) if value < 2**48 else value.bit_length()


def index(count: int) -> Shape:
    """Amaranth: the shape of a number from 0 to count - 1; at least one bit, unlike range(1)."""
    return unsigned(max(1, bits_for(count - 1)))


def saturated(value: ValueLike, bits: int = 8) -> Value:
    """Amaranth: a signed value clipped to `bits` bits."""
    given = Value.cast(value)
    width = Shape.cast(given.shape()).width
    if width <= bits:
        return given
    top = given[bits - 1 :]  # all alike where the value fits
    fits = (top == 0) | top.all()
    low, high = Const(-(1 << (bits - 1)), signed(bits)), Const((1 << (bits - 1)) - 1, signed(bits))
    return Mux(fits, given[:bits].as_signed(), Mux(given[-1], low, high))
