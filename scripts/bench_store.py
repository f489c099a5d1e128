"""Attention over a past stored as codes, on a GPU, beside attention over a native one.

    python scripts/bench_store.py --out store.json

One chunk of Self-Forcing against 18 latent frames of past: all of it, and a fifth of its blocks.
Each form is held to the definition on some of its queries before it is timed; one that fails is
noted and the others go on. Results are written after every form; none begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable

import torch
from bench_kernels import DEVICE, SHAPE, Rows, draw, measure
from torch import Tensor

from tachyscope.kernels.attention import attention
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.attention.triton import Setting, flash, setting_of
from tachyscope.kernels.block_sparse import BlockTable, block_sparse_attention
from tachyscope.kernels.block_sparse.torch import gather_entries, slots_of
from tachyscope.kernels.codes import Past, decode, encode
from tachyscope.results import check_json, document, emit

ENTRIES, BLOCK = 18 * SHAPE.tokens_per_frame, 128
CODES = {"native": None, "fp8": torch.uint8, "int8": torch.int8}
SETTINGS = [
    Setting(128, 128, 8, 2),
    Setting(128, 64, 8, 3),
    Setting(128, 64, 8, 4),
    Setting(128, 64, 4, 3),
    Setting(64, 128, 4, 3),
    Setting(128, 128, 8, 3, use_tma=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    check_json(args.out)
    end, rows = time.monotonic() + args.seconds, Rows()
    with torch.inference_mode():
        for form in forms(rows):
            if time.monotonic() > end:
                break
            form()
            emit(document("bench-store", rows, shlex.join(["python", *sys.argv])), args.out)


def forms(rows: Rows) -> list[Callable[[], object]]:
    """Native first, then codes as they are launched by default, then by other settings."""
    queries, k, v, log_count = draw(ENTRIES + SHAPE.max_pass_tokens, 1)
    q = queries[0]
    now_k, now_v = (x[:, :, ENTRIES:] for x in (k, v))
    weights, blocks = log_count[:, :, :ENTRIES].contiguous(), -(-ENTRIES // BLOCK)
    padded = torch.nn.functional.pad(weights, (0, blocks * BLOCK - ENTRIES), value=-torch.inf)
    every = torch.nn.functional.pad(weights, (0, now_k.shape[2]))
    tiles, most = -(-q.shape[2] // 128), blocks // 5
    ids = torch.rand(1, 12, tiles, blocks, device=DEVICE).argsort(-1)[..., :most].int()
    counts = torch.full((1, 12, tiles), most, dtype=torch.int32, device=DEVICE)

    def past(name: str) -> Past:
        if CODES[name] is None:
            return Past(k[:, :, :ENTRIES], v[:, :, :ENTRIES], log_count=weights)
        found = []
        for x in (k, v):
            code = torch.empty(1, 12, ENTRIES, 128, dtype=CODES[name], device=DEVICE)
            scale = torch.empty(1, 12, ENTRIES, device=DEVICE)
            encode(x[:, :, :ENTRIES], code, scale)
            found.append((code, scale))
        (codes_k, k_scale), (codes_v, v_scale) = found
        return Past(codes_k, codes_v, k_scale, v_scale, weights)

    def table(of: Past) -> BlockTable:
        return BlockTable(
            of.k, of.v, padded, ids, counts, 128, BLOCK, k_scale=of.k_scale, v_scale=of.v_scale
        )

    def wrong(of: Past, listed: bool) -> Callable[[Tensor], float]:
        def off(out: Tensor) -> float:
            some = slice(256, 272)  # of one tile
            keys, values = decode(of.k, of.k_scale, k.dtype), decode(of.v, of.v_scale, v.dtype)
            bias = weights
            if listed:
                slots = slots_of(table(of), ids[:, :, 2:3]).transpose(1, 2)
                keys, values = (gather_entries(x, slots)[:, 0] for x in (keys, values))
                bias = gather_entries(padded[..., None], slots)[:, 0, :, :, 0]
                bias = bias.masked_fill(slots[:, 0] < 0, -torch.inf)
            keys, values = torch.cat([keys, now_k], 2), torch.cat([values, now_v], 2)
            bias = torch.nn.functional.pad(bias, (0, now_k.shape[2]))
            want = attention_reference(q[:, :, some], keys, values, bias)
            return (out[:, :, some].double() - want.double()).abs().max().item()

        return off

    found: list[Callable[[], object]] = []

    def form(what: str, of: Past, listed: bool, call: Callable[[Tensor], Tensor]) -> None:
        read = most * BLOCK if listed else ENTRIES
        pairs = q.shape[:3].numel() * (read + now_k.shape[2])
        found.append(
            lambda: measure(
                rows, what, read, pairs, lambda i: call(queries[i % 3]), wrong(of, listed), q
            )
        )

    stored = {name: past(name) for name in CODES}
    for again in ("", " again"):
        for name, of in stored.items():

            def dense(q: Tensor, of: Past = of) -> Tensor:
                if of.k_scale is None:  # one run of slots
                    return attention(q, k, v, every)
                return attention(q, now_k, now_v, past=of)

            def sparse(q: Tensor, of: Past = of) -> Tensor:
                return block_sparse_attention(q, now_k, now_v, table(of)).out

            def decoding(q: Tensor, of: Past = of) -> Tensor:
                plain = Past(decode(of.k, of.k_scale, k.dtype), decode(of.v, of.v_scale, v.dtype))
                return block_sparse_attention(q, now_k, now_v, table(plain)).out

            form(f"a fifth, {name}{again}", of, True, sparse)
            form(f"all, {name}{again}", of, False, dense)
            if of.k_scale is not None:
                form(f"a fifth, {name}, decoded first{again}", of, True, decoding)
    for setting in [setting_of(DEVICE), *SETTINGS]:
        for name in ("fp8", "int8"):
            of = stored[name]

            def by_setting(q: Tensor, of: Past = of, setting: Setting = setting) -> Tensor:
                return flash(q, now_k, now_v, None, table(of), setting)

            form(f"a fifth, {name}, {tuple(setting)}", of, True, by_setting)
    return found


if __name__ == "__main__":
    main()
