"""What lies in the decoder's memories: weights, scales and KV entries, as beats of 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tachyscope_fpga.decoder.core import DecoderCore
from tachyscope_fpga.decoder.model import PARTS, DecoderModel, Layer
from tachyscope_fpga.parts.fixed import Ints


def weight_beats(core: DecoderCore, layers: Sequence[Layer]) -> NDArray[np.int8]:
    """Memory [beats, lanes, macs]: of every layer qkv, o, gate_up, down."""
    array = core.array
    packed = []
    for layer in layers:
        for part in PARTS:
            w = getattr(layer, part).weight
            tiles, beats = w.shape[0] // array.lanes, w.shape[1] // array.macs
            blocks = w.reshape(tiles, array.lanes, beats, array.macs).transpose(0, 2, 1, 3)
            packed.append(blocks.reshape(-1, array.lanes, array.macs))
    return np.concatenate(packed).astype(np.int8)


def scale_beats(core: DecoderCore, layers: Sequence[Layer]) -> NDArray[np.int64]:
    """Memory [beats, 2, lanes]: multipliers and shifts, in the weights' order."""
    beats = []
    for layer in layers:
        for part in PARTS:
            linear = getattr(layer, part)
            pair = np.stack([linear.multiplier, linear.shift])
            beats.append(pair.reshape(2, -1, core.lanes).transpose(1, 0, 2))
    return np.concatenate(beats)


def _bits(values: ArrayLike, bits: int) -> NDArray[np.uint8]:
    """Numbers [beats, n] of `bits` bits each as bits [beats, n * bits], the lowest first."""
    given = np.asarray(values, np.int64)
    return ((given[..., None] >> np.arange(bits)) & 1).reshape(len(given), -1).astype(np.uint8)


def _words(bits: NDArray[np.uint8]) -> NDArray[np.uint32]:
    full = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 32)))
    return np.packbits(full, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def pack(values: ArrayLike, bits: int) -> NDArray[np.uint32]:
    """Numbers [beats, n] of `bits` bits each as beats of words, the first in the lowest."""
    return _words(_bits(values, bits))


def unpack(beats: NDArray[np.uint32], bits: int, count: int) -> Ints:
    """The opposite of `pack`, of signed numbers: [beats, count]."""
    flat = np.unpackbits(beats.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    places = flat[:, : bits * count].reshape(-1, count, bits).astype(np.int64)
    values = (places << np.arange(bits)).sum(-1)
    return values - ((values >> (bits - 1)) << bits)


def words_of(bits: int) -> int:
    """Of a port in the harness: at most 32 bits, at most 64, or more."""
    return -(-bits // 32)


def memory_image(
    core: DecoderCore, layers: Sequence[Layer], model: DecoderModel
) -> tuple[NDArray[np.uint32], ...]:
    """Weights, scales, and the entries of a model's KV cache: [beats, words] each."""
    shape, array = core.shape, core.array
    weights = weight_beats(core, layers).reshape(-1, array.lanes * array.macs)
    # multipliers of 15 bits, then shifts of 6
    multipliers, shifts = scale_beats(core, layers).swapaxes(0, 1)
    bits = np.concatenate([_bits(multipliers, 15), _bits(shifts, 6)], axis=1)
    kv = model.kv.reshape(-1, shape.head_dim)
    exponents = np.broadcast_to(model.kv_exponents[:, :, None], model.kv.shape[:-1]).reshape(-1, 1)
    exponent_bits = core.attention.entry_layout().size - 8 * shape.head_dim
    entries = np.concatenate([_bits(kv, 8), _bits(exponents, exponent_bits)], axis=1)
    return pack(weights, 8), _words(bits), _words(entries)
