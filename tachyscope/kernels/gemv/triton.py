"""A matrix times the rows of a decode step, at the rate at which memory hands it over (Triton).

A program takes BLOCK_N rows of the matrix at a time and goes along them in steps of BLOCK_K; the
next step's loads are under way while one is summed. One or two tokens are multiplied channel by
channel, more by the tensor cores. The norm of x is worked out by every program for itself: x is
small, and a launch of its own would cost more.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tachyscope.kernels.device import MAX_DECODE_ROWS, has_large_smem
from tachyscope.kernels.gemv.weights import Norm, Weight
from tachyscope.kernels.launch import Overlap, launch
from tachyscope.kernels.pdl import wait_for_kernel_before


class Setting(NamedTuple):
    """How a product is cut: rows and columns of a step, warps of a program, steps under way."""

    block_n: int
    block_k: int
    warps: int
    stages: int = 3


# by bits, tokens, columns and rows of all matrices: what lab/scripts/tune_decode.py tries, and 7B's
# projection behind attention: all its rows load while that runs (a layer: 2.5 us less)
SETTINGS = {(16, 1, 4096, 4096): Setting(4, 4096, 8)}
PROGRAMS = 660  # of four warps, that an H200 runs at once


def setting_for(weights: Sequence[Weight], tokens: int) -> Setting:
    """What was fastest on an H200 by lab/scripts/tune_decode.py (2026-11-16), or is being tried."""
    first, rows = weights[0], sum(weight.rows for weight in weights)
    key = first.bits, tokens, first.columns, rows
    if key in SETTINGS:
        return SETTINGS[key]
    if tokens > MAX_DECODE_ROWS:
        # inputs of a step, for all codes of its words, lie in shared memory twice: 128 KB, or 64
        held = triton.next_power_of_2(tokens) * (32 // first.bits)
        most = 32768 if has_large_smem(first.data.device) else 16384
        return Setting(32, min(128, most // held), 4)
    if tokens > 2:
        return Setting(16, 256, 4)
    step = words_of_a_step(first)
    # short steps of more rows: for codes, and where long ones do not come out even
    short = first.columns % step > 0 if first.bits == 16 else (first.bits, tokens) != (4, 2)
    if short and rows >= 8 * PROGRAMS:
        return Setting(8, min(step, 512), 4)
    return Setting(2 if rows < 4 * PROGRAMS and first.bits == 16 else 4, step, 4)


def words_of_a_step(weight: Weight) -> int:
    """16 bytes a thread, or less where a row is shorter."""
    most = 1024 if weight.bits == 16 else 512
    return min(most, max(16, triton.next_power_of_2(weight.data.shape[1])))


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
    made = setting or setting_for(weights, tokens)
    tiles = [triton.cdiv(size, made.block_n) for size in sizes]
    launch(
        _gemv, (sum(tiles),),
        out, x, *(part.data for part in (first, second, third)),
        *(_or(part.scale, out) for part in (first, second, third)),
        *(_or(part.bias, out) for part in (first, second, third)), *norm_args(norm, x),
        out.stride(0), *sizes, tiles[0], tiles[1],
        K=first.columns, HAS_BIAS=first.bias is not None, GELU=gelu, ADD=add,
        maxnreg=_registers(first.bits, tokens), **Overlap.options(x),
        **tile_options(x, first, norm, made),
    )  # fmt: skip
    return out


def linear(x: Tensor, weight: Weight) -> Tensor:
    """`linear` of few tokens by codes, which are not decoded first: that takes longer."""
    return gemv(x.new_empty(len(x), weight.rows), x.contiguous(), (weight,))


def _registers(bits: int, tokens: int) -> int | None:
    """The most that a thread of a product may take; None: as many as it wants."""
    if bits == 16 or tokens > MAX_DECODE_ROWS:
        return None
    return 96 if tokens == 1 else 128


def norm_args(norm: Norm | None, x: Tensor) -> tuple[Tensor, Tensor, float]:
    if norm is None:
        return x, x, 0.0
    return norm.weight, _or(norm.bias, norm.weight), norm.eps


def tile_options(x: Tensor, weight: Weight, norm: Norm | None, setting: Setting) -> dict[str, Any]:
    """What `dot_tile` is compiled for."""
    tokens, kind = x.shape[0], "" if norm is None else "rms" if norm.bias is None else "layer"
    return {
        "TOKENS": tokens, "R": tokens if tokens <= 2 else max(16, triton.next_power_of_2(tokens)),
        "NORM": kind, "NORM_BLOCK": triton.next_power_of_2(x.shape[1]), "BITS": weight.bits,
        "BLOCK_N": setting.block_n, "BLOCK_K": setting.block_k, "num_warps": setting.warps,
        "num_stages": setting.stages,
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
    BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    second, third = pid >= tiles_0, pid >= tiles_0 + tiles_1
    w = tl.where(third, w_2, tl.where(second, w_1, w_0))
    n = tl.where(third, n_2, tl.where(second, n_1, n_0))
    tile = pid - tl.where(third, tiles_0 + tiles_1, tl.where(second, tiles_0, 0))
    first = tl.where(third, n_0 + n_1, tl.where(second, n_0, 0))
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # under way before x is normed
    WORDS: tl.constexpr = K if BITS == 16 else K // (32 // BITS)
    ahead = load_tile(w, tile * BLOCK_N, 0, n, WORDS, BLOCK_N, BLOCK_K)
    scale = tl.where(third, scale_2, tl.where(second, scale_1, scale_0))
    wait_for_kernel_before(PDL)
    stats = norm_stats(x, eps, K, TOKENS, R, NORM, NORM_BLOCK, BLOCK_K)
    token = tl.arange(0, R)[None, :]
    mask = (offs_n < n)[:, None] & (token < TOKENS)
    out += token * out_row + (first + offs_n)[:, None]
    # what does not depend on the product is under way while it is made
    if HAS_BIAS:
        bias = tl.where(third, bias_2, tl.where(second, bias_1, bias_0))
        shift = tl.load(bias + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)
    if ADD:
        total = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    y, _, _, _ = dot_tile(
        x, w, w, scale, scale, ahead, ahead, tile * BLOCK_N, n, n, n, stats, norm_w, norm_b, K,
        False, TOKENS, R, NORM, BITS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        y += shift[:, None]
    if GELU:
        y = gelu(y)
    if ADD:
        # rounded as it would be on its own, then added
        y = y.to(out.dtype.element_ty).to(tl.float32) + total
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
    x, w, w_pair, scale, scale_pair, ahead, ahead_pair, row, next_row, n, n_pair, stats,
    norm_w, norm_b,
    K: tl.constexpr, PAIR: tl.constexpr, TOKENS: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """w[row:] · norm(x) of all tokens [BLOCK_N, R], and with PAIR that of a second matrix.

    The matrices have n and n_pair rows. `ahead` is the tile's first step, loaded before; that of
    the tile at next_row is handed back, so that loads never pause between tiles.
    """
    WORDS: tl.constexpr = K if BITS == 16 else K // (32 // BITS)
    SIDE: tl.constexpr = 8 if BITS == 16 else 4  # words that a thread holds side by side
    offs_k = tl.arange(0, BLOCK_K)
    mean_0, rstd_0, mean_1, rstd_1 = stats
    if R <= 2:
        y_0 = tl.zeros([BLOCK_N, BLOCK_K // SIDE], tl.float32)
        y_1, pair_0, pair_1 = y_0, y_0, y_0
    else:
        y_0 = tl.zeros([BLOCK_N, R], tl.float32)
        y_1, pair_0, pair_1 = y_0, y_0, y_0
    for k in range(0, WORDS, BLOCK_K):
        now, now_pair = ahead, ahead_pair
        last = k + BLOCK_K >= WORDS
        then_row, then_k = tl.where(last, next_row, row), tl.where(last, 0, k + BLOCK_K)
        ahead = load_tile(w, then_row, then_k, n, WORDS, BLOCK_N, BLOCK_K)
        if PAIR:
            ahead_pair = load_tile(w_pair, then_row, then_k, n_pair, WORDS, BLOCK_N, BLOCK_K)
        inside = k + offs_k < WORDS
        if R > 2:
            token = tl.arange(0, R)
            for part in tl.static_range(1 if BITS == 16 else 32 // BITS):
                at = _columns_at(k + offs_k, part, WORDS, BITS)
                mask = (token < TOKENS)[None, :] & inside[:, None]
                a = tl.load(x + token[None, :] * K + at[:, None], mask=mask, other=0.0)
                if NORM != "":
                    f = (a.to(tl.float32) - mean_0[None, :]) * rstd_0[None, :]
                    f *= tl.load(norm_w + at, mask=inside, other=0.0).to(tl.float32)[:, None]
                    if NORM == "layer":
                        f += tl.load(norm_b + at, mask=inside, other=0.0).to(tl.float32)[:, None]
                    a = f.to(x.dtype.element_ty)
                f = _floats(now, scale, row, k, n, part, K, BITS, BLOCK_N, BLOCK_K)
                y_0 = tl.dot(f.to(a.dtype), a, y_0)
                if PAIR:
                    f = _floats(
                        now_pair, scale_pair, row, k, n_pair, part, K, BITS, BLOCK_N, BLOCK_K
                    )
                    pair_0 = tl.dot(f.to(a.dtype), a, pair_0)
        elif BITS == 16:
            at = k + offs_k
            a = x_at(x, at, inside, mean_0, rstd_0, norm_w, norm_b, NORM)
            f = now.to(tl.float32)
            y_0 += _side_by_side(f * a[None, :], SIDE)
            b = a
            if R == 2:
                b = x_at(x + K, at, inside, mean_1, rstd_1, norm_w, norm_b, NORM)
                y_1 += _side_by_side(f * b[None, :], SIDE)
            if PAIR:
                f = now_pair.to(tl.float32)
                pair_0 += _side_by_side(f * a[None, :], SIDE)
                if R == 2:
                    pair_1 += _side_by_side(f * b[None, :], SIDE)
        else:
            groups = _load_groups(scale, row, k, n, K, BITS, BLOCK_N, BLOCK_K)
            groups_pair = groups
            if PAIR:
                groups_pair = _load_groups(scale_pair, row, k, n_pair, K, BITS, BLOCK_N, BLOCK_K)
            zeros = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            t_0, t_1, p_0, p_1 = zeros, zeros, zeros, zeros
            ones_0 = tl.zeros([BLOCK_K], tl.float32)
            ones_1 = ones_0
            for part in tl.static_range(32 // BITS):
                at = _columns_at(k + offs_k, part, WORDS, BITS)
                a = x_at(x, at, inside, mean_0, rstd_0, norm_w, norm_b, NORM)
                ones_0 += a
                a = _huge(a, part, BITS)
                f = _tiny(now, part, BITS)
                t_0 += f * a[None, :]
                b = a
                if R == 2:
                    b = x_at(x + K, at, inside, mean_1, rstd_1, norm_w, norm_b, NORM)
                    ones_1 += b
                    b = _huge(b, part, BITS)
                    t_1 += f * b[None, :]
                if PAIR:
                    f = _tiny(now_pair, part, BITS)
                    p_0 += f * a[None, :]
                    if R == 2:
                        p_1 += f * b[None, :]
            y_0 += _from_codes(t_0, ones_0, groups, BITS, SIDE)
            if R == 2:
                y_1 += _from_codes(t_1, ones_1, groups, BITS, SIDE)
            if PAIR:
                pair_0 += _from_codes(p_0, ones_0, groups_pair, BITS, SIDE)
                if R == 2:
                    pair_1 += _from_codes(p_1, ones_1, groups_pair, BITS, SIDE)
    if R <= 2 and NORM == "rms":
        y_0, y_1, pair_0, pair_1 = y_0 * rstd_0, y_1 * rstd_1, pair_0 * rstd_0, pair_1 * rstd_1
    y = _finish(y_0, y_1, scale, row, n, R, BITS, BLOCK_N)
    pair = y
    if PAIR:
        pair = _finish(pair_0, pair_1, scale_pair, row, n_pair, R, BITS, BLOCK_N)
    return y, pair, ahead, ahead_pair


@triton.jit
def _finish(
    y_0, y_1, scale, row, n, R: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Products [BLOCK_N, R] from what was summed of them, by a row's scale."""
    y = y_0
    if R <= 2:
        y = _columns(y_0, y_1, R)
        if BITS == 8:
            y *= 562949953421312.0
    if BITS == 8:
        offs_n = row + tl.arange(0, BLOCK_N)
        y *= tl.load(scale + offs_n, mask=offs_n < n, other=0.0)[:, None]
    return y


@triton.jit
def _columns_at(word, part: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr):
    """The columns whose codes are a word's parts: see `Weight`."""
    if BITS == 4:
        return word // 16 * 128 + part * 16 + word % 16
    else:
        return part * WORDS + word


@triton.jit
def _tiny(word, part: tl.constexpr, BITS: tl.constexpr):
    """One of a word's codes as a float32 too small to have an exponent: code · 2**(shift - 149).

    So nothing has to be converted, and few codes be shifted: the code's bits are its mantissa.
    """
    FIRST: tl.constexpr = 2 if BITS == 8 else 5  # codes that lie in a mantissa's 23 bits
    if part >= FIRST:
        word = (word >> (FIRST * BITS)) & ((2**BITS - 1) << (part - FIRST) * BITS)
    else:
        word = word & ((2**BITS - 1) << part * BITS)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _huge(a, part: tl.constexpr, BITS: tl.constexpr):
    """a · 2**(100 - shift), which with what `_tiny` gives makes code · a · 2**-49."""
    FIRST: tl.constexpr = 2 if BITS == 8 else 5
    return a * (1.2676506002282294e30 / 2 ** (part % FIRST * BITS))


@triton.jit
def _from_codes(t, ones, groups, BITS: tl.constexpr, SIDE: tl.constexpr):
    """Sums of weight · a from t, those of code · a · 2**-49, and `ones`, those of a.

    Of 8 bits they still lack a row's scale and 2**49, which `_finish` gives them.
    """
    ones = tl.broadcast_to(ones[None, :], t.shape[0], t.shape[1])
    if BITS == 8:
        return _side_by_side(t, SIDE) - 2.2737367544323206e-13 * _side_by_side(ones, SIDE)
    else:
        size = (groups << 16).to(tl.float32, bitcast=True) * 562949953421312.0
        offset = (groups & -65536).to(tl.float32, bitcast=True)
        return _side_by_side(t, SIDE) * size + _side_by_side(ones, SIDE) * offset


@triton.jit
def _load_groups(
    scale, row, k, n, K: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scale and offset of a step's groups, for every four words; nothing where rows have one."""
    if BITS == 4:
        return _groups_at(scale, row, k + 4 * tl.arange(0, BLOCK_K // 4), n, K, BLOCK_N)
    else:
        return 0


@triton.jit
def _groups_at(scale, row, word, n, K: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = row + tl.arange(0, BLOCK_N)
    place = offs_n[:, None] * (K // 128) + (word // 16)[None, :]
    mask = (offs_n < n)[:, None] & (word < K // 8)[None, :]
    return tl.load(scale + place, mask=mask, other=0)


@triton.jit
def _floats(
    tile, scale, row, k, n, part: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile, or of words one part, in float32; of 8 bits still without a row's scale."""
    if BITS == 16:
        return tile.to(tl.float32)
    elif BITS == 8:
        return ((tile >> 8 * part & 255) - 128).to(tl.float32)
    else:
        groups = _groups_at(scale, row, k + tl.arange(0, BLOCK_K), n, K, BLOCK_N)
        size = (groups << 16).to(tl.float32, bitcast=True)
        code = (tile >> 4 * part & 15).to(tl.float32)
        return code * size + (groups & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _side_by_side(products, SIDE: tl.constexpr):
    """Sums of neighbours, which one thread holds."""
    return tl.sum(products.reshape(products.shape[0], products.shape[1] // SIDE, SIDE), 2)


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
        # a layer norm's sums are of differences to a row's first number, which is at most sqrt(K)
        # deviations from the mean: their squares cannot drown the variance, and x is read once
        first = tl.zeros([R], tl.float32)
        if NORM == "layer":
            first = tl.load(x + token * K, mask=token < TOKENS, other=0.0).to(tl.float32)
        total = tl.zeros([R], tl.float32)
        square = total
        for k in range(0, K, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            mask = (token < TOKENS)[None, :] & (at < K)[:, None]
            a = tl.load(x + token[None, :] * K + at[:, None], mask=mask, other=0.0).to(tl.float32)
            a = tl.where(mask, a - first[None, :], 0.0)
            total += tl.sum(a, 0)
            square += tl.sum(a * a, 0)
        mean = total * 0.0
        if NORM == "layer":
            mean = total / K
        rstd = tl.rsqrt(square / K - mean * mean + eps)
        mean += first
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
def x_at(x, at, inside, mean, rstd, norm_w, norm_b, NORM: tl.constexpr):
    """Columns of x in float32, by its norm; an RMS norm's rstd is left to the end."""
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if NORM != "":
        w = tl.load(norm_w + at, mask=inside, other=0.0).to(tl.float32)
        if NORM == "layer":
            a = (a - mean) * rstd * w + tl.load(norm_b + at, mask=inside, other=0.0).to(tl.float32)
        else:
            a *= w
    return a
