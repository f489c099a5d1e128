"""Which backend serves an operation: one table, by device, dtype and shape."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
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
    """A backend, and which calls it serves.

    takes     whether it serves a call, by some of the operation's arguments
    looks_at  the names of these
    module    of the operation's folder, or "folder.module"
    function  if it has not the operation's name
    """

    takes: Callable[..., bool]
    looks_at: str
    module: str = "triton"
    function: str = ""


class Operation(NamedTuple):
    """Backends of an operation, the fastest first; stock torch serves what none of them takes.

    definition  what it computes: a function of the folder's reference.py
    runs_on     the argument that lies on its device: a tensor, or what holds one first
    """

    definition: str
    runs_on: str
    rows: tuple[Row, ...]


def dispatch(stock: Callable[P, R]) -> Callable[P, R]:
    """An operation, from its form in stock torch; a row of the table may serve in its place."""
    name = f"{stock.__module__.split('.')[2]}.{stock.__name__}"
    assert name in TABLE
    if not HAS_TRITON:
        return stock
    parameters = inspect.signature(stock).parameters
    names = tuple(parameters)
    defaults = {x.name: x.default for x in parameters.values() if x.default is not x.empty}
    at = names.index(TABLE[name].runs_on)

    @functools.wraps(stock)
    def serve(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[at] if at < len(args) else kwargs[names[at]]
        x: Tensor = first if isinstance(first, Tensor) else first[0]
        if x.device.type in device.DEVICES:
            given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            row = find_row(name, given)
            if row is not None:
                found: R = backend(name, row)(*args, **kwargs)
                return found
        return stock(*args, **kwargs)

    return serve


def find_row(name: str, given: Mapping[str, Any]) -> Row | None:
    """The backend that serves an operation with these arguments on a GPU; None for stock torch."""
    for row in TABLE[name].rows:
        if row.takes(*(given[argument] for argument in row.looks_at.split())):
            return row
    return None


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
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another Gluon
        return False
    return True


# what rows ask of arguments


def _always() -> bool:
    return True


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _has_heads(x: Tensor) -> bool:
    """Whether x [B, H, n, D] has heads that the kernels know."""
    return has_kernel(x.device, x.dtype, x.shape[3])


def _fits_a_program(mass: Tensor, residency: Any) -> bool:
    blocks, slots = residency.wanted.shape[2], residency.block.shape[2]
    return mass.is_cuda and blocks <= ADMITTED_BLOCKS and slots <= ADMITTED_SLOTS


def _chooses_slots(mass: Tensor, blocks: Tensor, out: Tensor) -> bool:
    some = out.shape[3] < blocks.shape[2] <= ADMITTED_SLOTS
    return some and mass.is_cuda and mass.dtype == torch.float32


def _attends(q: Tensor, causal: bool) -> bool:
    # the kernels have no causal mask and no gradient
    return q.shape[2] >= min(TILES) and not causal and not q.requires_grad and _has_heads(q)


def _attends_on_hopper(q: Tensor, causal: bool = False) -> bool:
    return _attends(q, causal) and has_hopper(q.device)


def _attends_with_weights(q: Tensor, log_count: Tensor | None, causal: bool) -> bool:
    # without weights cuDNN is faster
    return log_count is not None and _attends(q, causal)


def _reads_blocks(q: Tensor, k: Tensor, v: Tensor, past: Any) -> bool:
    sizes = past.tile in TILES and past.block in BLOCKS
    alike = v.dtype == q.dtype and v.shape[3] == q.shape[3]
    return sizes and alike and has_kernel(q.device, k.dtype, q.shape[3])


def _reads_blocks_on_hopper(q: Tensor, k: Tensor, v: Tensor, past: Any) -> bool:
    return past.tile % 128 == 0 and _reads_blocks(q, k, v, past) and has_hopper(q.device)


def _reads_codes(q: Tensor, past: Any) -> bool:
    sizes = past.tile in TILES and past.entries.block in BLOCKS
    return sizes and _has_heads(q) and has_fp8(q.device)


def _reads_codes_on_hopper(q: Tensor, past: Any) -> bool:
    return past.tile % 128 == 0 and _reads_codes(q, past) and has_hopper(q.device)


def _makes_codes(x: Tensor) -> bool:
    return _has_heads(x) and has_fp8(x.device)


def _makes_blocks_of_codes(k: Tensor, block: int) -> bool:
    return block in BLOCKS and _makes_codes(k)


def _scores_tiles(q: Tensor, codes: Any, tile: int) -> bool:
    return tile in TILES and codes.code.dtype == torch.int8 and _has_heads(q)


def _scores_means(q: Tensor, codes: Any, tile: int) -> bool:
    whole = tile > MEANS and tile % MEANS == 0
    return whole and codes.code.dtype == torch.int8 and _has_heads(q)


def _indexes(past: Any, block: int, codes: Any) -> bool:
    return codes.code.dtype == torch.int8 and block <= max(BLOCKS) and reads_keys(past.k)


def _codes_entries(x: Tensor, code: Tensor) -> bool:
    return x.dtype == device.DTYPE and reads_keys(code)


def _decodes(qkv: Tensor) -> bool:
    return has_decode_kernel(qkv[:1])


def _decodes_several(qkv: Tensor, tokens: int) -> bool:
    return tokens > 1 and _decodes(qkv)


def _runs_mlp(x: Tensor, kept: Any, tokens: int) -> bool:
    return has_decode_kernel(x) and (tokens == 1 or kept is None)


def _multiplies_codes(x: Tensor, weight: Any) -> bool:
    # of few tokens: to decode the weight first takes longer than the product
    few = x.dim() == 2 and MAX_DECODE_ROWS < len(x) <= MAX_CODED_ROWS
    return x.is_cuda and few and x.dtype in DECODE_DTYPES and weight.bits < 16


def _matches(vectors: Any, shared: bool) -> bool:
    return len(vectors) == 1 and not shared and reads_keys(vectors[0])


def _merges(held: Any, alike: Tensor) -> bool:
    k, scale = held.k, held.k_scale
    # the kernels know no codes of unrotated keys, nor several channels a byte
    codes = scale is None or (scale.dim() == 3 and held.unrotated is None)
    return alike.shape[1] == k.shape[1] and codes and reads_keys(k)


def _has_rows(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == device.DTYPE


def _quantises_rows(x: Tensor) -> bool:
    return _has_rows(x) and has_fp8(x.device)


def _shifts(x: Tensor) -> bool:
    return x.dim() == 4 and reads_keys(x)


TABLE = {
    "admit.admit": Operation("admit_reference", "mass", (
        Row(_fits_a_program, "mass residency"),
    )),
    "admit.best_slots": Operation("best_slots_reference", "mass", (
        Row(_chooses_slots, "mass blocks out"),
    )),
    "attention.attention": Operation("attention_reference", "q", (
        Row(_attends_on_hopper, "q causal", "hopper", "flash_attention"),
        Row(_attends_with_weights, "q log_count causal", "triton", "flash_attention"),
    )),
    "attention_fp8.attention_fp8": Operation("attention_fp8_reference", "q", (
        Row(_attends_on_hopper, "q", "hopper"),
    )),
    "attention_fp8.block_sparse_attention_fp8": Operation("attention_fp8_reference", "q", (
        Row(_reads_blocks_on_hopper, "q k v past", "hopper"),
    )),
    "attention_fp8.listed_attention_fp8": Operation("attention_fp8_reference", "q", (
        Row(_reads_codes_on_hopper, "q past", "hopper"),
        Row(_reads_codes, "q past"),
    )),
    "attention_fp8.quantise_entries": Operation("dequantise", "k", (
        Row(_makes_blocks_of_codes, "k block"),
    )),
    "attention_fp8.quantise_queries": Operation("dequantise", "q", (Row(_makes_codes, "q"),)),
    "block_index.block_mass": Operation("block_mass_reference", "q", (
        Row(_scores_tiles, "q codes tile"),
    )),
    "block_index.buckets": Operation("buckets_reference", "x", (Row(reads_keys, "x"),)),
    "block_index.encode_blocks": Operation("encode_blocks_reference", "past", (
        Row(_indexes, "past block codes"),
    )),
    "block_index.mean_mass": Operation("block_mass_reference", "q", (
        Row(_scores_means, "q codes tile"),
    )),
    "block_sparse.block_sparse_attention": Operation("block_sparse_attention_reference", "q", (
        Row(_reads_blocks_on_hopper, "q k v past", "attention.hopper"),
        Row(_reads_blocks, "q k v past", "attention.triton"),
    )),
    "codes.decode_into": Operation("encode_reference", "code", (Row(_codes_entries, "out code"),)),
    "codes.decode_packed": Operation("decode_packed_reference", "out", (Row(_has_heads, "out"),)),
    "codes.encode": Operation("encode_reference", "x", (Row(_codes_entries, "x code"),)),
    "decode_attention.decode_attention": Operation("decode_attention_reference", "out", (
        Row(_decodes_several, "qkv tokens", "several"),
        Row(_decodes, "qkv"),
    )),
    "decode_mlp.decode_mlp": Operation("decode_mlp_reference", "x", (
        Row(_runs_mlp, "x kept tokens"),
    )),
    "gemv.gemv": Operation("gemv_reference", "out", (Row(has_decode_kernel, "x"),)),
    "gemv.linear": Operation("gemv_reference", "x", (Row(_multiplies_codes, "x weight"),)),
    "host_blocks.load_blocks": Operation("stored_reference", "k", (Row(_always, ""),)),
    "host_blocks.store_blocks": Operation("stored_reference", "k", (Row(_always, ""),)),
    "match.best_older": Operation("best_older_reference", "vectors", (
        Row(_matches, "vectors shared"),
    )),
    "match.measure": Operation("best_older_reference", "vectors", (
        Row(_matches, "vectors shared"),
    )),
    "merge.merge_entries": Operation("merge_entries_reference", "held", (
        Row(_merges, "held alike"),
    )),
    "norm_quantise.add_gated": Operation("add_reference", "x", (Row(_has_rows, "x"),)),
    "norm_quantise.add_norm": Operation("norm_reference", "x", (Row(_has_rows, "x"),)),
    "norm_quantise.gelu_quantise": Operation("gelu_reference", "x", (Row(_quantises_rows, "x"),)),
    "norm_quantise.norm_quantise": Operation("norm_reference", "x", (Row(_quantises_rows, "x"),)),
    "norm_quantise.quantise": Operation("quantise_reference", "x", (Row(_quantises_rows, "x"),)),
    "prompt_hits.count_nearest": Operation("count_nearest_reference", "q", (
        Row(_has_heads, "q"),
    )),
    "rotary.apply_rotary": Operation("apply_rotary_reference", "x", (Row(_has_heads, "x"),)),
    "sample_code.sample_code": Operation("sample_code_reference", "logits", (
        Row(_is_on_gpu, "logits"),
    )),
    "slots.permute": Operation("permute_reference", "x", (Row(reads_keys, "x"),)),
    "slots.shift": Operation("shift_reference", "x", (Row(_shifts, "x"),)),
    "token_gate.decide": Operation("decide_reference", "score", (Row(_is_on_gpu, "score"),)),
    "token_gate.decide_by_input": Operation("decide_by_input_reference", "x", (
        Row(has_decode_kernel, "x"),
    )),
}  # fmt: skip
