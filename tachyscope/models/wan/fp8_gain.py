"""The most that float8 can save of a Wan-type model's time, counted from operations and bytes.

It is a bound, not a prediction: products of codes are taken as twice as fast, codes as made at the
full bandwidth of memory. A precision that saves less than `LEAST` even so is refused.
"""

from __future__ import annotations

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import Shape

LEAST = 0.01  # of the time of the linears, or of attention
# measured on an H200: bfloat16 operations a second of linears and of attention, bytes a second of
# its memory, and what a kernel of a CUDA graph takes that does nothing
LINEAR_FLOPS, ATTENTION_FLOPS, BANDWIDTH, LAUNCH_S = 728e12, 574e12, 3.8e12, 1.8e-6
RATIO = 2.0  # operations of float8 to those of bfloat16 in the same time, at most
QUANTISE_BYTES = 3  # a number is read in 16 bits and written in 8


def check_gain(shape: Shape, inner: int, linears: bool, attention: bool, what: str) -> None:
    """Raise if float8 linears, or attention of float8 codes, cannot save 1 % of their time.

    inner: neurons of an MLP. what: the model and its size, for the message.
    """
    tokens, saved = shape.max_pass_tokens, dict[str, float]()
    if linears:
        saved["linears"] = linears_saved(tokens, shape.width, inner)
    if attention:
        saved["attention"] = attention_saved(tokens, shape.passes)
    lost = [name for name, share in saved.items() if share < LEAST]
    if lost:
        useful = [f"use precision=fp8_{name}" for name in saved if name not in lost]
        raise TachyscopeError(
            f"float8 saves under 1 % of the time of {' and '.join(lost)} in {what}: its passes of "
            f"{tokens} tokens, {shape.width} channels wide, take no longer than making the codes: "
            f"{''.join(useful) or 'leave `precision` out'}"
        )


def linears_saved(tokens: int, width: int, inner: int) -> float:
    """The largest share of a layer's linears that float8 saves, negative where it costs time.

    Two of the four inputs are quantised within the kernel that makes them; the other two, those of
    attention's output projection and of the MLP, by a kernel of their own.
    """
    sizes = ((width, 3 * width), (width, width), (width, inner), (inner, width))
    own = max(LAUNCH_S, QUANTISE_BYTES * tokens * width / BANDWIDTH)
    plain = sum(_linear_s(tokens, *size, 2, LINEAR_FLOPS) for size in sizes)
    coded = sum(_linear_s(tokens, *size, 1, RATIO * LINEAR_FLOPS) for size in sizes)
    return 1 - (coded + 2 * own) / plain


def _linear_s(tokens: int, wide: int, out: int, bytes_each: int, flops: float) -> float:
    """Seconds of a linear from `wide` to `out` channels, whose outputs have 16 bits."""
    moved = bytes_each * (tokens * wide + wide * out) + 2 * tokens * out
    return max(LAUNCH_S, 2 * tokens * wide * out / flops, moved / BANDWIDTH)


def attention_saved(tokens: int, passes: int) -> float:
    """The largest share of attention that float8 saves, with any plan and length of video.

    Keys and values are quantised at most as seldom as once a chunk, and serve all its passes: the
    more queries read an entry, the less its codes cost.
    """
    read_s = 4 * tokens * passes / ATTENTION_FLOPS  # of an entry's channel, as key and as value
    made_s = 2 * QUANTISE_BYTES / BANDWIDTH
    return 1 - 1 / RATIO - made_s / read_s
