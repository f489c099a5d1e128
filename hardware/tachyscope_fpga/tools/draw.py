"""A small test frame, drawn token by token by the whole decoder in Amaranth's simulator.

A decoder of seeded random weights gets the patches of a test picture as its inputs. What its states
hold of them is read out by a linear map fitted to the integer model's states, so that a state that
is not the integers' spoils its patch. The second frame is the first again with the gate deciding.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tachyscope_fpga.decoder.model import DecoderModel, DecoderShape, Token
from tachyscope_fpga.parts.fixed import Ints
from tachyscope_fpga.parts.vector import from_wide, to_wide
from tachyscope_fpga.tools.decoder_bench import Bench, small_layers, small_model, small_top

Picture = NDArray[np.float64]  # grey, 0 to 1

SIDE, PATCH, FRAMES = 5, 4, 2
TOKENS = FRAMES * SIDE**2
SHAPE = DecoderShape(
    width=8, inner=12, layers=2, heads=2, kv_heads=1, head_dim=4,
    tokens_per_frame=SIDE**2, context=TOKENS,
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """The test picture and both frames as the hardware drew them, and what it took."""

    pictures: tuple[Picture, ...]
    tokens: int
    mismatches: int  # tokens whose state or replay flags are not the integer model's
    replayed: int  # MLPs of the second frame
    cycles: int


def card() -> Picture:
    """A bright ring before a slope."""
    y, x = np.mgrid[: SIDE * PATCH, : SIDE * PATCH] / (SIDE * PATCH - 1)
    ring = np.exp(-(((np.hypot(x - 0.5, y - 0.5) - 0.33) / 0.11) ** 2))
    return np.asarray(0.15 + 0.35 * x + 0.5 * ring)


def draw(seed: int = 0, watch: Callable[[int], None] | None = None) -> Drawn:
    """Both frames by the hardware, beside the integer model's states.

    watch: takes how many tokens are done.
    """
    rng = np.random.default_rng(seed)
    layers, top = small_layers(SHAPE, rng), small_top(SHAPE)
    picture = card()
    patches = _patches(picture)
    inputs = _inputs(patches)
    # a threshold a layer: the median score of the second frame when all is computed
    scores = [list(row) for _, _, row in _integers(small_model(top, layers, ()), inputs)]
    median = np.median(np.array(scores[SIDE**2 :], np.float64), axis=0)
    thresholds = [int(score) for score in median]
    want = _integers(small_model(top, layers, thresholds), inputs)
    bench = Bench(top, layers, thresholds)
    found, flags = bench.run([(inputs[None, token.place], token) for token in _tokens()], watch)
    wrong = sum(
        not np.array_equal(state[0], ours) or [bool(flag) for flag in seen] != replays
        for state, seen, (ours, replays, _) in zip(found, flags, want, strict=True)
    )
    seen_by = _features([ours for ours, _, _ in want])
    readout, *_ = np.linalg.lstsq(seen_by, np.tile(patches, (FRAMES, 1)))
    frames = _features([state[0] for state in found]) @ readout
    drawn = (_picture(frames[: SIDE**2]), _picture(frames[SIDE**2 :]))
    replayed = sum(sum(replays) for _, replays, _ in want)
    return Drawn((picture, *drawn), len(want), wrong, replayed, sum(bench.cycles))


def _tokens() -> list[Token]:
    count = SIDE**2
    return [Token(i, i % count, i >= count) for i in range(TOKENS)]


def _integers(model: DecoderModel, inputs: Ints) -> list[tuple[Ints, list[bool], tuple[int, ...]]]:
    """State, replay flags and scores of every token by the integer model."""
    results = []
    for token in _tokens():
        state, replays = model.step(inputs[token.place], token)
        results.append((state, replays, tuple(model.scores)))
    return results


def _inputs(patches: Picture) -> Ints:
    """The patches' principal components; one channel is high, so that the norm changes little."""
    centred = patches - patches.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    parts = centred @ axes[: SHAPE.width - 1].T
    parts *= 4 / parts.std()
    return to_wide(np.concatenate([np.full((len(parts), 1), 24.0), parts], 1))


def _features(states: list[Ints]) -> Picture:
    values = from_wide(np.array(states))
    return np.concatenate([values, np.ones((len(values), 1))], 1)


def _patches(picture: Picture) -> Picture:
    """[places, pixels]"""
    cut = picture.reshape(SIDE, PATCH, SIDE, PATCH).swapaxes(1, 2)
    return cut.reshape(SIDE**2, PATCH**2)


def _picture(patches: Picture) -> Picture:
    return patches.reshape(SIDE, SIDE, PATCH, PATCH).swapaxes(1, 2).reshape(SIDE * PATCH, -1)


def to_png(pictures: tuple[Picture, ...], scale: int = 12) -> bytes:
    """The pictures side by side, 8 bits of grey."""
    gap = np.ones((SIDE * PATCH, 1))
    row = np.concatenate([part for each in pictures for part in (each, gap)][:-1], 1)
    grey = np.clip(row * 255 + 0.5, 0, 255).astype(np.uint8)
    pixels = np.kron(grey, np.ones((scale, scale), np.uint8))
    height, width = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def chunk(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )
