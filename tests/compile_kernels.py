"""Compile the kernels of models that denoise for an H200, where none is: run by test_compile_kernels.

Sizes are those of Self-Forcing: 12 heads of 128, 4,680 queries of a chunk, 21 latent frames of a
window, 240 of a long video. Tensors take no memory, since nobody writes to them.
"""

from compile_on_cpu import Compiled, launch  # isort: split

import importlib
import itertools
import sys
from types import SimpleNamespace

import torch

from tachyscope.kernels.admit import Residency
from tachyscope.kernels.block_index import Codes
from tachyscope.kernels.block_table import BlockTable
from tachyscope.kernels.codes import Past
from tachyscope.kernels.host_blocks import HostBlocks
from tachyscope.kernels.merge.torch import Entries

HEADS, QUERIES, WIDTH, WINDOW, LONG = 12, 4680, 128, 21 * 1560, 240 * 1560
BF16, FINE, INT, LONG_INT = torch.bfloat16, torch.float32, torch.int32, torch.int64
INT8, BYTE, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype)


def held(n, width=WIDTH, dtype=BF16):
    """A cache's entries."""
    return empty(1, HEADS, n, width, dtype=dtype)


def fresh(n, width=WIDTH):
    """As a model makes them: heads beside each other."""
    return empty(1, n, HEADS, width).transpose(1, 2)


def module(name):
    """A kernel's module, whose launches compile."""
    found = importlib.import_module(f"tachyscope.kernels.{name}")
    found.launch = launch
    if name.endswith("hopper"):
        found._flash = Compiled(found._flash)
    return found


def table(block, tile=128, most=20):
    ids = empty(1, HEADS, -(-QUERIES // tile), most, dtype=INT)
    log_count = empty(1, HEADS, 512 * block, dtype=FINE)
    past = held(512 * block)
    return BlockTable(past, past, log_count, ids, ids[..., 0].contiguous(), tile, block)


def attention():
    triton, hopper = module("attention.triton"), module("attention.hopper")
    q, log_count = fresh(QUERIES), empty(1, HEADS, WINDOW, dtype=FINE)
    for n, weights in ((WINDOW, None), (WINDOW, log_count), (LONG, None)):
        for kernel in (triton, hopper):
            kernel.flash_attention(q, held(n), held(n), weights)
    for block, tile in itertools.product((128, 64, 32), (128, 64)):
        past = table(block, tile)
        by_pointers = triton.setting_of(q.device, tile, block)._replace(
            keys=min(block, 64), use_tma=False
        )
        for setting in (None, by_pointers):
            triton.block_sparse_attention(q, q, q, past, setting=setting)
        if tile == 128:
            hopper.block_sparse_attention(q, q, q, past)


def attention_fp8():
    triton, hopper = module("attention_fp8.triton"), module("attention_fp8.hopper")
    stock = importlib.import_module("tachyscope.kernels.attention_fp8.torch")
    q, log_count = fresh(QUERIES), empty(1, HEADS, WINDOW, dtype=FINE)
    for n, weights in ((WINDOW, None), (WINDOW, log_count), (LONG, None)):
        hopper.attention_fp8(q, held(n), held(n), weights)
    code, scale = empty(*q.shape, dtype=FP8), empty(1, HEADS, QUERIES, dtype=FINE)
    for block in (128, 64, 32):
        past = table(block)
        hopper.block_sparse_attention_fp8(q, q, q, past)
        k, v = held(512 * block, dtype=FP8), empty(1, HEADS, 512, WIDTH, block, dtype=FP8)
        entries = stock.Entries(k, v, empty(1, HEADS, 512, 2, dtype=FINE), block)
        listed = stock.Listed(entries, past.log_count, past.ids, past.counts, 128)
        for kernel in (triton, hopper):
            kernel.listed_attention_fp8(q, q, q, listed, empty(1, HEADS, WIDTH, dtype=FINE))
        for variant in (hopper.Variant(fresh=False), hopper.Variant(turns=True)):
            hopper.flash(code, scale, entries, QUERIES, None, listed, variant=variant)


def between_linears():
    rows = module("norm_quantise.triton")
    for width in (1536, 3072, 5120, 8960):
        x, y = empty(1, QUERIES, width), empty(1, QUERIES, width)
        shift, scale, gate = empty(1, 3, 6, width, dtype=FINE)[:, :, :3].unbind(2)
        weight = empty(width, dtype=FINE)
        rows.quantise(x)
        rows.gelu_quantise(x)
        rows.norm_quantise(x, shift, scale, 1e-6)
        rows.add_norm(x, y, gate, weight, weight, 1e-6)
        rows.add_gated(x, y, gate)


def entries():
    rotary, slots, codes = module("rotary.triton"), module("slots.triton"), module("codes.triton")
    x, past = fresh(QUERIES), held(LONG)
    angles = empty(1, 1, QUERIES, WIDTH, dtype=FINE)
    for interleaved in (True, False):
        rotary.apply_rotary(None, x, angles, angles, SimpleNamespace(interleaved=interleaved))
    slots.permute(past, empty(1, HEADS, LONG, dtype=LONG_INT))
    slots.permute(past, empty(1, HEADS, LONG, dtype=LONG_INT), back=True)
    slots.shift(past, 4680, 1560, LONG - 4680)
    for dtype in (INT8, BYTE):
        scale = empty(1, HEADS, LONG, dtype=FINE)
        codes.encode(x, held(QUERIES, dtype=dtype), scale[:, :, :QUERIES])
        codes.decode_into(held(LONG, dtype=dtype), scale, past)
    for bits, group in itertools.product((2, 4), (1, 40)):
        steps = held(QUERIES // group, 2 * WIDTH // (32 if group == 1 else 1), torch.float16)
        packed = held(QUERIES, WIDTH * bits // 8, BYTE)
        codes.decode_packed(packed, steps, held(QUERIES), bits, group)
    module("prompt_hits.triton").count_nearest(x, held(512), empty(1, HEADS, 512, dtype=FINE))


def merging():
    match, merge = module("match.triton"), module("merge.triton")
    n, excess = WINDOW + QUERIES, QUERIES
    match.match(held(n), WINDOW)
    alike, partner = empty(1, HEADS, n, dtype=FINE), empty(1, HEADS, n, dtype=LONG_INT)
    match.measure((held(n),), partner, alike)
    folded, stay = empty(HEADS, excess, dtype=INT), empty(HEADS, n - excess, dtype=INT)
    folds = merge.Folds(folded, folded, stay, stay)
    merge.choose(torch.zeros(1, 1, 300), torch.zeros(1, 1, 300, dtype=LONG_INT), 70)
    for dtype in (BF16, INT8):
        vectors = [held(n, dtype=dtype) for _ in range(3)]
        scales = [empty(1, HEADS, n, dtype=FINE) if dtype == INT8 else None for _ in range(2)]
        pos, unrotated = empty(1, HEADS, n, 3, dtype=FINE), vectors[2] if dtype == BF16 else None
        cache = Entries(*vectors[:2], alike, pos, unrotated, *scales)
        merge.fold_groups(cache, folds, newest=True, mean=False)
        merge.fold_groups(cache, folds, newest=False, mean=True)
        merge.slide(cache, folds)


def banks():
    index, blocks = module("block_index.triton"), module("host_blocks.triton")
    admit, block = module("admit.triton"), 120
    past, count = held(LONG), LONG // block
    code = held(count, dtype=INT8)
    known = Codes(code, empty(1, HEADS, count, 1, dtype=FINE), empty(1, HEADS, count, dtype=FINE))
    log_count = empty(1, HEADS, LONG, dtype=FINE)
    index.buckets(past, 8)
    index.encode_blocks(Past(past, past), log_count, block, known)
    coded = Past(held(LONG, dtype=INT8), held(LONG, dtype=INT8), log_count, log_count)
    index.encode_blocks(coded, log_count, block, known)
    q = fresh(QUERIES)
    for tile in (128, 64):
        index.block_mass(q, known, count, tile)
    index.mean_mass(q, known, count, 128)
    ids, half = empty(1, HEADS, 64, dtype=INT), WIDTH // 2
    for dtype, width, scales in (
        (BF16, WIDTH, None),
        (INT8, WIDTH, (block, 1, FINE)),
        (BYTE, half, (2, WIDTH, torch.float16)),
    ):
        host = [empty(1, HEADS, 200, block, width, dtype=dtype)] * 2
        if scales is not None:
            host += [empty(1, HEADS, 200, *scales[:2], dtype=scales[2])] * 2
        x = held(64 * block)
        blocks.store_blocks(x, x, ids, HostBlocks(*host), ids)
        blocks.load_blocks(HostBlocks(*host), ids, x, x)
    for most, slots in ((14700, 194), (30000, 450), (32768, 1024)):
        of_block = empty(1, HEADS, most + 1, dtype=INT)
        of_slot = [empty(1, HEADS, slots, dtype=INT) for _ in range(3)]
        wanted = empty(1, HEADS, most, dtype=FINE)
        residency = Residency(empty(1, dtype=FINE), wanted, of_block, *of_slot)
        wishes, near = empty(1, HEADS, 37, 64, dtype=FINE), empty(1, HEADS, 37, most, dtype=FINE)
        # with 64 wishes a tile, and with a mass on every block
        admit.admit(wishes, empty(1, HEADS, 37, 64, dtype=LONG_INT), residency, 32)
        admit.best_slots(near, of_slot[0], empty(1, HEADS, 37, 64, dtype=INT), 2)


if __name__ == "__main__":
    for part in (attention, attention_fp8, between_linears, entries, merging, banks):
        print(f"# {part.__name__}", file=sys.stderr)
        part()
