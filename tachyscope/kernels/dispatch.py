"""Which backend serves an operation: one table, by device, dtype and shape."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.cuda import get_device_capability

from tachyscope.kernels import device
from tachyscope.kernels.device import (
    BLOCKS,
    DECODE_DTYPES,
    HAS_TRITON,
    MAX_DECODE_ROWS,
    MEANS,
    TILES,
    has_decode_kernel,
    has_fp8,
    has_kernel,
    reads_keys,
)

P = ParamSpec("P")
R = TypeVar("R")
# what one program of `admit` takes: blocks of a head, and its resident slots
ADMITTED_BLOCKS, ADMITTED_SLOTS = 2**15, 2**10
MAX_CODED_ROWS = 128  # tokens that share one reading of coded weights, as drafts do


class Row(NamedTuple):
    """A backend, and which of its operation's arguments it takes.

    module    of the operation's folder, or "folder.module"
    function  if it has not the operation's name
    """

    takes: Callable[..., bool]
    module: str = "triton"
    function: str = ""


class Operation(NamedTuple):
    """Backends of an operation, the fastest first; stock torch serves what none of them takes.

    definition  what it computes: a function of the folder's reference.py
    on          which argument lies on the device that counts
    """

    definition: str
    rows: tuple[Row, ...]
    on: int = 0


def dispatch(stock: Callable[P, R]) -> Callable[P, R]:
    """An operation, from what it is by stock torch; a row of the table may serve in its place."""
    name = f"{stock.__module__.split('.')[2]}.{stock.__name__}"
    on = TABLE[name].on
    if not HAS_TRITON:
        return stock

    @functools.wraps(stock)
    def serve(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[on]
        x: Tensor = first if isinstance(first, Tensor) else first[0]
        if x.device.type in device.DEVICES:
            for row in TABLE[name].rows:
                if row.takes(*args, **kwargs):
                    found: R = backend(name, row)(*args, **kwargs)
                    return found
        return stock(*args, **kwargs)

    return serve


def backend(name: str, row: Row) -> Callable[..., Any]:
    """The function of a row of an operation "folder.name"."""
    folder, function = name.split(".")
    module = row.module if "." in row.module else f"{folder}.{row.module}"
    found: Callable[..., Any] = getattr(_module(module), row.function or function)
    return found


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"tachyscope.kernels.{name}")


@functools.cache
def has_hopper(on: torch.device) -> bool:
    """Whether the kernels of a Hopper GPU run there; a device without data stands for one."""
    if on.type == "cpu" or (on.type == "cuda" and get_device_capability(on) != (9, 0)):
        return False
    try:
        importlib.import_module("tachyscope.kernels.attention.hopper")
    except (ImportError, AttributeError):  # a Triton whose Gluon is missing, or another
        return False
    return True


def _keys(x: Tensor, *args: Any, **more: Any) -> bool:
    return reads_keys(x)


def _heads(x: Tensor, *args: Any, **more: Any) -> bool:
    return has_kernel(x.device, x.dtype, x.shape[3])


def _rows(x: Tensor, *args: Any, **more: Any) -> bool:
    return has_decode_kernel(x)


def _attends(q: Tensor, k: Tensor, v: Tensor, log_count: Any = None, causal: bool = False) -> bool:
    # the kernels have no causal mask and no gradient
    return q.shape[2] >= min(TILES) and not causal and not q.requires_grad and _heads(q)


def _reads_blocks(q: Tensor, k: Tensor, v: Tensor, past: Any, kept: Any = ()) -> bool:
    sizes = past.tile in TILES and past.block in BLOCKS
    alike = v.dtype == q.dtype and v.shape[3] == q.shape[3]
    return sizes and alike and has_kernel(q.device, k.dtype, q.shape[3])


def _scores(q: Tensor, codes: Any, blocks: int, tile: int) -> bool:
    return codes.code.dtype == torch.int8 and _heads(q)


def _matches(vectors: Any, shared: bool) -> bool:
    return len(vectors) == 1 and not shared and reads_keys(vectors[0])


def _merges(held: Any, alike: Tensor, *args: Any) -> bool:
    k, scale = held.k, held.k_scale
    # the kernels know no codes of unrotated keys, nor several channels a byte
    codes = scale is None or (scale.dim() == 3 and held.unrotated is None)
    return alike.shape[1] == k.shape[1] and codes and reads_keys(k)


def _multiplies(x: Tensor, weight: Any) -> bool:
    # codes of few tokens: to decode them first takes longer than the product
    few = x.dim() == 2 and MAX_DECODE_ROWS < len(x) <= MAX_CODED_ROWS
    return x.is_cuda and few and x.dtype in DECODE_DTYPES and weight.bits < 16


def _attends_fp8(q: Tensor, k: Tensor, v: Tensor, log_count: Any = None) -> bool:
    return _attends(q, k, v, log_count) and has_hopper(q.device)


def _reads_codes(q: Tensor, past: Any) -> bool:
    sizes = past.tile in TILES and past.entries.block in BLOCKS
    return sizes and _heads(q) and has_fp8(q.device)


def _rows_of(x: Tensor, *args: Any) -> bool:
    return x.is_cuda and x.dtype == device.DTYPE


TABLE = {
    "admit.admit": Operation("admit_reference", (
        Row(lambda mass, ids, residency, at_once: mass.is_cuda
            and residency.wanted.shape[2] <= ADMITTED_BLOCKS
            and residency.block.shape[2] <= ADMITTED_SLOTS),
    )),
    "admit.best_slots": Operation("best_slots_reference", (
        Row(lambda mass, blocks, out, sink: mass.is_cuda and mass.dtype == torch.float32
            and out.shape[3] < blocks.shape[2] <= ADMITTED_SLOTS),
    )),
    "attention.attention": Operation("attention_reference", (
        Row(lambda q, *args: _attends(q, *args) and has_hopper(q.device),
            "hopper", "flash_attention"),
        # without weights cuDNN is faster
        Row(lambda q, k, v, log_count=None, *args: log_count is not None
            and _attends(q, k, v, log_count, *args), "triton", "flash_attention"),
    )),
    "attention_fp8.attention_fp8": Operation("attention_fp8_reference", (
        Row(_attends_fp8, "hopper"),
    )),
    "attention_fp8.block_sparse_attention_fp8": Operation("attention_fp8_reference", (
        Row(lambda q, k, v, past, kept=(): past.tile % 128 == 0
            and _reads_blocks(q, k, v, past) and has_hopper(q.device), "hopper"),
    )),
    "attention_fp8.listed_attention_fp8": Operation("attention_fp8_reference", (
        Row(lambda q, k, v, past, centre, kept=(): past.tile % 128 == 0
            and _reads_codes(q, past) and has_hopper(q.device), "hopper"),
        Row(lambda q, k, v, past, centre, kept=(): _reads_codes(q, past)),
    )),
    "attention_fp8.quantise_entries": Operation("dequantise", (
        Row(lambda k, v, block, log_count=None, centre=None: _heads(k) and has_fp8(k.device)
            and block in BLOCKS),
    )),
    "attention_fp8.quantise_queries": Operation("dequantise", (Row(_heads),)),
    "block_index.block_mass": Operation("block_mass_reference", (
        Row(lambda q, codes, blocks, tile: tile in TILES and _scores(q, codes, blocks, tile)),
    )),
    "block_index.buckets": Operation("buckets_reference", (Row(_keys),)),
    "block_index.encode_blocks": Operation("encode_blocks_reference", (
        Row(lambda past, log_count, block, codes, first=0: codes.code.dtype == torch.int8
            and block <= max(BLOCKS) and reads_keys(past.k)),
    )),
    "block_index.mean_mass": Operation("block_mass_reference", (
        Row(lambda q, codes, blocks, tile: tile > MEANS and tile % MEANS == 0
            and _scores(q, codes, blocks, tile)),
    )),
    "block_sparse.block_sparse_attention": Operation("block_sparse_attention_reference", (
        Row(lambda q, k, v, past, kept=(): past.tile % 128 == 0
            and _reads_blocks(q, k, v, past) and has_hopper(q.device), "attention.hopper"),
        Row(_reads_blocks, "attention.triton"),
    )),
    "codes.decode_into": Operation("encode_reference", (
        Row(lambda code, scale, out: out.dtype == device.DTYPE and reads_keys(code)),
    )),
    "codes.decode_packed": Operation("decode_packed_reference", (
        Row(lambda code, scale, out, *args: _heads(out)),
    ), on=2),
    "codes.encode": Operation("encode_reference", (
        Row(lambda x, code, scale: x.dtype == device.DTYPE and reads_keys(code)),
    )),
    "decode_attention.decode_attention": Operation("decode_attention_reference", (
        Row(lambda out, qkv, step, scratch, tokens=1: tokens > 1 and has_decode_kernel(qkv[:1]),
            "several"),
        Row(lambda out, qkv, *args: has_decode_kernel(qkv[:1])),
    )),
    "decode_mlp.decode_mlp": Operation("decode_mlp_reference", (
        Row(lambda x, mlp, kept, inner, barrier, tokens=1, normed=None: has_decode_kernel(x)
            and (tokens == 1 or kept is None)),
    )),
    "gemv.gemv": Operation("gemv_reference", (Row(lambda out, x, *args, **more: _rows(x)),)),
    "gemv.linear": Operation("gemv_reference", (Row(_multiplies),)),
    "host_blocks.load_blocks": Operation("stored_reference", (Row(lambda *args: True),), on=2),
    "host_blocks.store_blocks": Operation("stored_reference", (Row(lambda *args: True),)),
    "match.best_older": Operation("best_older_reference", (
        Row(lambda vectors, first, shared=False: _matches(vectors, shared)),
    )),
    "match.measure": Operation("best_older_reference", (
        Row(lambda vectors, partner, alike, shared=False: _matches(vectors, shared)),
    )),
    "merge.merge_entries": Operation("merge_entries_reference", (Row(_merges),)),
    "norm_quantise.add_gated": Operation("add_reference", (Row(_rows_of),)),
    "norm_quantise.add_norm": Operation("norm_reference", (Row(_rows_of),)),
    "norm_quantise.gelu_quantise": Operation("gelu_reference", (Row(_rows_of),)),
    "norm_quantise.norm_quantise": Operation("norm_reference", (Row(_rows_of),)),
    "norm_quantise.quantise": Operation("quantise_reference", (Row(_rows_of),)),
    "prompt_hits.count_nearest": Operation("count_nearest_reference", (Row(_heads),)),
    "rotary.apply_rotary": Operation("apply_rotary_reference", (
        Row(lambda out, x, *args: _heads(x)),
    ), on=1),
    "sample_code.sample_code": Operation("sample_code_reference", (
        Row(lambda logits, draw, to: logits.is_cuda),
    )),
    "slots.permute": Operation("permute_reference", (Row(_keys),)),
    "slots.shift": Operation("shift_reference", (
        Row(lambda x, *args: x.dim() == 4 and reads_keys(x)),
    )),
    "token_gate.decide": Operation("decide_reference", (
        Row(lambda state, score: score.is_cuda),
    ), on=1),
    "token_gate.decide_by_input": Operation("decide_by_input_reference", (Row(_rows),)),
}  # fmt: skip
