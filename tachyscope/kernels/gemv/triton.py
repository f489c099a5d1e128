"""A matrix times the rows of a decode step, at the rate at which memory hands it over (Triton).

A program takes BLOCK_N rows of the matrix at a time and goes along them in steps of BLOCK_K; the
next step's loads are under way while one is summed. One or two tokens are multiplied channel by
channel, more by the tensor cores. The norm of x is worked out by every program for itself: x is
small, and a launch of its own would cost more.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.gemv.weights import Norm, Weight
from tachyscope.kernels.launch import Overlap, launch
from tachyscope.kernels.pdl import wait_for_kernel_before


class Setting(NamedTuple):
    """How a product is cut: rows and columns of a step, warps of a program."""

    block_n: int
    block_k: int
    warps: int


def setting_for(columns: int, tokens: int, int8: bool) -> Setting:
    """Measured on an H200; other GPUs of that kind are near it."""
    if tokens > 2:
        return Setting(16, 256, 4)
    words = columns // 2 if int8 else columns
    return Setting(4, min(1024, max(16, triton.next_power_of_2(words))), 4)


def gemv(
    out: Tensor,
    x: Tensor,
    weights: tuple[Weight, ...],
    norm: Norm | None = None,
    gelu: bool = False,
    add: bool = False,
    setting: Setting | None = None,
) -> Tensor:
    """`gemv`; x and the weights' rows are contiguous, and so are out's."""
    first, tokens = weights[0], x.shape[0]
    second, third = (weights[i] if i < len(weights) else first for i in (1, 2))
    sizes = [weight.rows for weight in weights] + [0] * (3 - len(weights))
    made = setting or setting_for(first.columns, tokens, first.scale is not None)
    tiles = [triton.cdiv(size, made.block_n) for size in sizes]
    launch(
        _gemv, (sum(tiles),),
        out, x, *(part.data for part in (first, second, third)),
        *(_or(part.scale, out) for part in (first, second, third)),
        *(_or(part.bias, out) for part in (first, second, third)), *norm_args(norm, x),
        out.stride(0), *sizes, tiles[0], tiles[1],
        K=first.columns, HAS_BIAS=first.bias is not None, GELU=gelu, ADD=add,
        **Overlap.options(x),
        **tile_options(x, first, norm, made),
    )  # fmt: skip
    return out


def norm_args(norm: Norm | None, x: Tensor) -> tuple[Tensor, Tensor, float]:
    if norm is None:
        return x, x, 0.0
    return norm.weight, _or(norm.bias, norm.weight), norm.eps


def tile_options(x: Tensor, weight: Weight, norm: Norm | None, setting: Setting) -> dict[str, Any]:
    """What `dot_tile` is compiled for."""
    tokens, kind = x.shape[0], "" if norm is None else "rms" if norm.bias is None else "layer"
    return {
        "TOKENS": tokens, "R": tokens if tokens <= 2 else 16, "NORM": kind,
        "NORM_BLOCK": triton.next_power_of_2(x.shape[1]), "INT8": weight.scale is not None,
        "BLOCK_N": setting.block_n, "BLOCK_K": setting.block_k, "num_warps": setting.warps,
    }  # fmt: skip


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Where a tensor is not read, any stands in."""
    return other if x is None else x


@triton.jit(do_not_specialize=["eps"])
def _gemv(
    out, x, w_0, w_1, w_2, scale_0, scale_1, scale_2, bias_0, bias_1, bias_2, norm_w, norm_b, eps,
    out_row, n_0, n_1, n_2, tiles_0, tiles_1,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
    TOKENS: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, NORM_BLOCK: tl.constexpr,
    INT8: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    second, third = pid >= tiles_0, pid >= tiles_0 + tiles_1
    w = tl.where(third, w_2, tl.where(second, w_1, w_0))
    n = tl.where(third, n_2, tl.where(second, n_1, n_0))
    tile = pid - tl.where(third, tiles_0 + tiles_1, tl.where(second, tiles_0, 0))
    first = tl.where(third, n_0 + n_1, tl.where(second, n_0, 0))
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # under way before x is normed
    ahead = load_tile(w, tile * BLOCK_N, 0, n, K // 2 if INT8 else K, BLOCK_N, BLOCK_K)
    wait_for_kernel_before(PDL)
    stats = norm_stats(x, eps, K, TOKENS, R, NORM, NORM_BLOCK, BLOCK_K)
    y, _, _, _ = dot_tile(
        x, w, w, ahead, ahead, tile * BLOCK_N, n, n, n, stats, norm_w, norm_b, K, False,
        TOKENS, R, NORM, INT8, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if INT8:
        scale = tl.where(third, scale_2, tl.where(second, scale_1, scale_0))
        y *= tl.load(scale + offs_n, mask=offs_n < n, other=0.0)[:, None]
    if HAS_BIAS:
        bias = tl.where(third, bias_2, tl.where(second, bias_1, bias_0))
        y += tl.load(bias + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)[:, None]
    if GELU:
        y = gelu(y)
    token = tl.arange(0, R)[None, :]
    mask = (offs_n < n)[:, None] & (token < TOKENS)
    out += token * out_row + (first + offs_n)[:, None]
    if ADD:
        # rounded as it would be on its own, then added
        y = y.to(out.dtype.element_ty).to(tl.float32)
        y += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gelu(y):
    """The exact one."""
    return 0.5 * y * (1 + tl.math.erf(y * 0.7071067811865476))


@triton.jit
def silu(y):
    return y / (1 + tl.exp(-y))


@triton.jit
def load_tile(w, row, k, n, WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """w[row:, k:]; each weight is read once a step, so that it need not stay in any cache."""
    offs_n, offs_k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    place = offs_n[:, None] * WORDS + offs_k[None, :]
    mask = (row + offs_n < n)[:, None] & (k + offs_k < WORDS)[None, :]
    w += row.to(tl.int64) * WORDS + k
    return tl.load(w + place, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def dot_tile(
    x, w, w_pair, ahead, ahead_pair, row, next_row, n, n_pair, stats, norm_w, norm_b,
    K: tl.constexpr, PAIR: tl.constexpr, TOKENS: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, INT8: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """w[row:] · norm(x) of all tokens [BLOCK_N, R], and with PAIR that of a second matrix.

    The matrices have n and n_pair rows.
    `ahead` is the tile's first step, loaded before; that of the tile at next_row is handed back,
    so that loads never pause between tiles.
    """
    WORDS: tl.constexpr = K // 2 if INT8 else K
    offs_k = tl.arange(0, BLOCK_K)
    mean_0, rstd_0, mean_1, rstd_1 = stats
    if R <= 2:
        acc_0 = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
        acc_1, pair_0, pair_1 = acc_0, acc_0, acc_0
        for k in range(0, WORDS, BLOCK_K):
            now, now_pair = ahead, ahead_pair
            last = k + BLOCK_K >= WORDS
            then_row, then_k = tl.where(last, next_row, row), tl.where(last, 0, k + BLOCK_K)
            ahead = load_tile(w, then_row, then_k, n, WORDS, BLOCK_N, BLOCK_K)
            if PAIR:
                ahead_pair = load_tile(w_pair, then_row, then_k, n_pair, WORDS, BLOCK_N, BLOCK_K)
            inside = k + offs_k < WORDS
            for half in tl.static_range(2 if INT8 else 1):
                at = half * WORDS + k + offs_k
                a = normed_at(x, at, inside, mean_0, rstd_0, norm_w, norm_b, NORM)
                f = _floats(now, half, INT8)
                acc_0 += _by_eights(f * a[None, :])
                b = a
                if R == 2:
                    b = normed_at(x + K, at, inside, mean_1, rstd_1, norm_w, norm_b, NORM)
                    acc_1 += _by_eights(f * b[None, :])
                if PAIR:
                    f = _floats(now_pair, half, INT8)
                    pair_0 += _by_eights(f * a[None, :])
                    if R == 2:
                        pair_1 += _by_eights(f * b[None, :])
        y = _columns(acc_0, acc_1, R)
        pair = y
        if PAIR:
            pair = _columns(pair_0, pair_1, R)
    else:
        y = tl.zeros([BLOCK_N, R], tl.float32)
        pair = y
        token = tl.arange(0, R)
        for k in range(0, WORDS, BLOCK_K):
            now, now_pair = ahead, ahead_pair
            last = k + BLOCK_K >= WORDS
            then_row, then_k = tl.where(last, next_row, row), tl.where(last, 0, k + BLOCK_K)
            ahead = load_tile(w, then_row, then_k, n, WORDS, BLOCK_N, BLOCK_K)
            if PAIR:
                ahead_pair = load_tile(w_pair, then_row, then_k, n_pair, WORDS, BLOCK_N, BLOCK_K)
            inside = k + offs_k < WORDS
            for half in tl.static_range(2 if INT8 else 1):
                at = half * WORDS + k + offs_k
                mask = (token < TOKENS)[None, :] & inside[:, None]
                a = tl.load(x + token[None, :] * K + at[:, None], mask=mask, other=0.0)
                if NORM != "":
                    f = (a.to(tl.float32) - mean_0[None, :]) * rstd_0[None, :]
                    f *= tl.load(norm_w + at, mask=inside, other=0.0).to(tl.float32)[:, None]
                    if NORM == "layer":
                        f += tl.load(norm_b + at, mask=inside, other=0.0).to(tl.float32)[:, None]
                    a = f.to(x.dtype.element_ty)
                y = tl.dot(_floats(now, half, INT8).to(a.dtype), a, y)
                if PAIR:
                    pair = tl.dot(_floats(now_pair, half, INT8).to(a.dtype), a, pair)
    return y, pair, ahead, ahead_pair


@triton.jit
def _floats(tile, half: tl.constexpr, INT8: tl.constexpr):
    """A tile in float32; a byte becomes the mantissa of 2**23, which no unit must convert."""
    if INT8:
        byte = (tile.to(tl.int32) >> (8 * half)) & 255
        return (byte | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    else:
        return tile.to(tl.float32)


@triton.jit
def _by_eights(products):
    """Sums of eight neighbours, which one thread holds."""
    return tl.sum(products.reshape(products.shape[0], products.shape[1] // 8, 8), 2)


@triton.jit
def _columns(a, b, R: tl.constexpr):
    """Sums along rows, tokens side by side: [BLOCK_N, R]."""
    if R == 2:
        return tl.join(tl.sum(a, 1), tl.sum(b, 1))
    else:
        return tl.sum(a, 1)[:, None]


@triton.jit
def norm_stats(
    x, eps, K: tl.constexpr, TOKENS: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr,
    NORM_BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Means and 1 / deviations: of one or two tokens four numbers, else [R] each, twice."""
    if NORM == "":
        return 0.0, 1.0, 0.0, 1.0
    elif R <= 2:
        mean_0, rstd_0 = norm_of(x, K, eps, NORM, NORM_BLOCK)
        mean_1, rstd_1 = mean_0, rstd_0
        if R == 2:
            mean_1, rstd_1 = norm_of(x + K, K, eps, NORM, NORM_BLOCK)
        return mean_0, rstd_0, mean_1, rstd_1
    else:
        token = tl.arange(0, R)
        total = tl.zeros([R], tl.float32)
        square = total
        for k in range(0, K, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            mask = (token < TOKENS)[None, :] & (at < K)[:, None]
            a = tl.load(x + token[None, :] * K + at[:, None], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(a, 0)
            square += tl.sum(a * a, 0)
        mean = total * 0.0
        if NORM == "layer":
            mean = total / K
        rstd = tl.rsqrt(square / K - mean * mean + eps)
        return mean, rstd, mean, rstd


@triton.jit
def norm_of(x, K: tl.constexpr, eps, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """One token's mean and 1 / deviation."""
    offs = tl.arange(0, BLOCK)
    a = tl.load(x + offs, mask=offs < K, other=0.0).to(tl.float32)
    mean = 0.0
    if NORM == "layer":
        mean = tl.sum(a) / K
        a = tl.where(offs < K, a - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(a * a) / K + eps)


@triton.jit
def normed_at(x, at, inside, mean, rstd, norm_w, norm_b, NORM: tl.constexpr):
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if NORM != "":
        a = (a - mean) * rstd * tl.load(norm_w + at, mask=inside, other=0.0).to(tl.float32)
        if NORM == "layer":
            a += tl.load(norm_b + at, mask=inside, other=0.0).to(tl.float32)
    return a
