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

    takes     whether it serves a call: a function of some of the operation's arguments, by name
    module    of the operation's folder, or "folder.module"
    function  if it has not the operation's name
    """

    takes: Callable[..., bool]
    module: str = "triton"
    function: str = ""


class Operation(NamedTuple):
    """Backends of an operation, the fastest first; stock torch serves what none of them takes.

    definition  what it computes: a function of the folder's reference.py
    runs_on     the argument that lies on its device, a tensor or what holds one first; the
                operation's first argument, unless it is named
    """

    definition: str
    rows: tuple[Row, ...]
    runs_on: str = ""


def dispatch(stock: Callable[P, R]) -> Callable[P, R]:
    """An operation, from its form in stock torch; a row of the table may serve in its place."""
    name = f"{stock.__module__.split('.')[2]}.{stock.__name__}"
    runs_on = TABLE[name].runs_on
    if not HAS_TRITON:
        return stock
    parameters = inspect.signature(stock).parameters
    names = tuple(parameters)
    defaults = {x.name: x.default for x in parameters.values() if x.default is not x.empty}
    at = names.index(runs_on or names[0])

    @functools.wraps(stock)
    def serve(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[at] if at < len(args) else kwargs[names[at]]
        x: Tensor = first if isinstance(first, Tensor) else first[0]
        if x.device.type in device.DEVICES:
            row = find_row(name, {**defaults, **dict(zip(names, args, strict=False)), **kwargs})
            if row is not None:
                found: R = backend(name, row)(*args, **kwargs)
                return found
        return stock(*args, **kwargs)

    return serve


def find_row(name: str, given: Mapping[str, Any]) -> Row | None:
    """The backend that serves an operation with these arguments on a GPU; None for stock torch."""
    for row in TABLE[name].rows:
        if row.takes(*(given[argument] for argument in arguments(row.takes))):
            return row
    return None


@functools.cache
def arguments(takes: Callable[..., bool]) -> tuple[str, ...]:
    """The names of a function's arguments."""
    return tuple(inspect.signature(takes).parameters)


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


def _has_heads(x: Tensor) -> bool:
    """Whether x [B, H, n, D] has heads that the kernels know."""
    return has_kernel(x.device, x.dtype, x.shape[3])


def _has_rows(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == device.DTYPE


def _quantises_rows(x: Tensor) -> bool:
    return _has_rows(x) and has_fp8(x.device)


def _attends(q: Tensor) -> bool:
    # the kernels have no gradient
    return q.shape[2] >= min(TILES) and not q.requires_grad and _has_heads(q)


def _reads_blocks(q: Tensor, k: Tensor, v: Tensor, past: Any) -> bool:
    sizes = past.tile in TILES and past.block in BLOCKS
    alike = v.dtype == q.dtype and v.shape[3] == q.shape[3]
    return sizes and alike and has_kernel(q.device, k.dtype, q.shape[3])


def _reads_blocks_on_hopper(q: Tensor, k: Tensor, v: Tensor, past: Any) -> bool:
    return past.tile % 128 == 0 and _reads_blocks(q, k, v, past) and has_hopper(q.device)


def _reads_codes(q: Tensor, past: Any) -> bool:
    sizes = past.tile in TILES and past.entries.block in BLOCKS
    return sizes and _has_heads(q) and has_fp8(q.device)


def _scores(q: Tensor, codes: Any) -> bool:
    return codes.code.dtype == torch.int8 and _has_heads(q)


def _codes_entries(x: Tensor, code: Tensor) -> bool:
    return x.dtype == device.DTYPE and reads_keys(code)


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


TABLE = {
    "admit.admit": Operation("admit_reference", (
        Row(lambda mass, residency: mass.is_cuda
            and residency.wanted.shape[2] <= ADMITTED_BLOCKS
            and residency.block.shape[2] <= ADMITTED_SLOTS),
    )),
    "admit.best_slots": Operation("best_slots_reference", (
        Row(lambda mass, blocks, out: mass.is_cuda and mass.dtype == torch.float32
            and out.shape[3] < blocks.shape[2] <= ADMITTED_SLOTS),
    )),
    "attention.attention": Operation("attention_reference", (
        # the kernels have no causal mask; without weights cuDNN is faster than Triton's
        Row(lambda q, causal: not causal and _attends(q) and has_hopper(q.device),
            "hopper", "flash_attention"),
        Row(lambda q, log_count, causal: not causal and log_count is not None and _attends(q),
            "triton", "flash_attention"),
    )),
    "attention_fp8.attention_fp8": Operation("attention_fp8_reference", (
        Row(lambda q: _attends(q) and has_hopper(q.device), "hopper"),
    )),
    "attention_fp8.block_sparse_attention_fp8": Operation("attention_fp8_reference", (
        Row(_reads_blocks_on_hopper, "hopper"),
    )),
    "attention_fp8.listed_attention_fp8": Operation("attention_fp8_reference", (
        Row(lambda q, past: past.tile % 128 == 0 and _reads_codes(q, past) and has_hopper(q.device),
            "hopper"),
        Row(_reads_codes),
    )),
    "attention_fp8.quantise_entries": Operation("dequantise", (
        Row(lambda k, block: block in BLOCKS and _has_heads(k) and has_fp8(k.device)),
    )),
    "attention_fp8.quantise_queries": Operation("dequantise", (
        Row(lambda q: _has_heads(q) and has_fp8(q.device)),
    )),
    "block_index.block_mass": Operation("block_mass_reference", (
        Row(lambda q, codes, tile: tile in TILES and _scores(q, codes)),
    )),
    "block_index.buckets": Operation("buckets_reference", (Row(lambda x: reads_keys(x)),)),
    "block_index.encode_blocks": Operation("encode_blocks_reference", (
        Row(lambda past, block, codes: codes.code.dtype == torch.int8
            and block <= max(BLOCKS) and reads_keys(past.k)),
    )),
    "block_index.mean_mass": Operation("block_mass_reference", (
        Row(lambda q, codes, tile: tile > MEANS and tile % MEANS == 0 and _scores(q, codes)),
    )),
    "block_sparse.block_sparse_attention": Operation("block_sparse_attention_reference", (
        Row(_reads_blocks_on_hopper, "attention.hopper"),
        Row(_reads_blocks, "attention.triton"),
    )),
    "codes.decode_into": Operation("encode_reference", (
        Row(lambda out, code: _codes_entries(out, code)),
    )),
    "codes.decode_packed": Operation("decode_packed_reference", (
        Row(lambda out: _has_heads(out)),
    ), "out"),
    "codes.encode": Operation("encode_reference", (Row(_codes_entries),)),
    "decode_attention.decode_attention": Operation("decode_attention_reference", (
        Row(lambda qkv, tokens: tokens > 1 and has_decode_kernel(qkv[:1]), "several"),
        Row(lambda qkv: has_decode_kernel(qkv[:1])),
    )),
    "decode_mlp.decode_mlp": Operation("decode_mlp_reference", (
        Row(lambda x, kept, tokens: has_decode_kernel(x) and (tokens == 1 or kept is None)),
    )),
    "gemv.gemv": Operation("gemv_reference", (Row(has_decode_kernel),)),
    "gemv.linear": Operation("gemv_reference", (Row(_multiplies_codes),)),
    "host_blocks.load_blocks": Operation("stored_reference", (Row(lambda: True),), "k"),
    "host_blocks.store_blocks": Operation("stored_reference", (Row(lambda: True),)),
    "match.best_older": Operation("best_older_reference", (Row(_matches),)),
    "match.measure": Operation("best_older_reference", (Row(_matches),)),
    "merge.merge_entries": Operation("merge_entries_reference", (Row(_merges),)),
    "norm_quantise.add_gated": Operation("add_reference", (Row(_has_rows),)),
    "norm_quantise.add_norm": Operation("norm_reference", (Row(_has_rows),)),
    "norm_quantise.gelu_quantise": Operation("gelu_reference", (Row(_quantises_rows),)),
    "norm_quantise.norm_quantise": Operation("norm_reference", (Row(_quantises_rows),)),
    "norm_quantise.quantise": Operation("quantise_reference", (Row(_quantises_rows),)),
    "prompt_hits.count_nearest": Operation("count_nearest_reference", (
        Row(lambda q: _has_heads(q)),
    )),
    "rotary.apply_rotary": Operation("apply_rotary_reference", (Row(_has_heads),), "x"),
    "sample_code.sample_code": Operation("sample_code_reference", (
        Row(lambda logits: logits.is_cuda),
    )),
    "slots.permute": Operation("permute_reference", (Row(lambda x: reads_keys(x)),)),
    "slots.shift": Operation("shift_reference", (Row(lambda x: x.dim() == 4 and reads_keys(x)),)),
    "token_gate.decide": Operation("decide_reference", (
        Row(lambda score: score.is_cuda),
    ), "score"),
    "token_gate.decide_by_input": Operation("decide_by_input_reference", (
        Row(has_decode_kernel),
    )),
}  # fmt: skip
