"""Rates of the attention kernels on a GPU, beside cuDNN's and what stock torch could do instead.

    python lab/scripts/bench_kernels.py --out kernels.json

One chunk of Self-Forcing: 12 heads of 128, 4,680 queries. A rate counts the pairs that are read.
`ours` is what serves on this GPU; beside it stands the Triton form that serves on any other.
Each variant is held to the definition on some of its queries before it is timed; one that
fails is noted and the others go on.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tachyscope.attention.ann import Ann
from tachyscope.core.types import PassContext, Shape
from tachyscope.core.work import Work
from tachyscope.io.results import check_json, document, emit
from tachyscope.kernels.attention import attention
from tachyscope.kernels.attention import triton as any_gpu
from tachyscope.kernels.attention.reference import attention_reference
from tachyscope.kernels.attention.torch import attention_by_channels, bias
from tachyscope.kernels.block_sparse import BlockTable, block_sparse_attention
from tachyscope.kernels.replay import replay_rows
from tachyscope.store import KVStore, LayerPass

DEVICE, TIMES = torch.device("cuda"), 10
SHAPE = Shape(
    layers=1, heads=12, kv_heads=12, head_dim=128, width=1536, grid=(30, 52), chunk=3, passes=5
)
LENGTHS, BLOCKS, SECONDS = (32768, 131072), (128, 64), 3

Rows = list[dict[str, Any]]


def milliseconds(call: Callable[[int], object]) -> float:
    """The median of what a call takes; it is handed a number, to take other inputs by."""
    for i in range(3):
        call(i)
    spans = []
    for i in range(TIMES):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(i)
        stop.record()
        spans.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in spans)


def poison(q: Tensor) -> None:
    """Leave NaN in the memory that the next results will be given."""
    filled = [torch.full((4, *q.shape), math.nan, device=q.device) for _ in range(2)]
    filled.append(torch.full_like(q, math.nan))
    del filled


def measure(
    rows: Rows,
    what: str,
    entries: int,
    pairs: int,
    call: Callable[[int], Tensor],
    wrong: Callable[[Tensor], float],
    q: Tensor,
    **more: Any,
) -> float:
    """Hold a variant to the definition, time it, note it and say it; its milliseconds."""
    row: dict[str, Any] = {"what": what, "entries": entries, "pairs": pairs} | more
    rows.append(row)
    try:
        poison(q)
        row["error"] = wrong(call(0))
        if not row["error"] < 0.03:
            raise ValueError(f"off by {row['error']:.2g}")
        row["ms"] = milliseconds(call)
        row["again_ms"] = milliseconds(call)
        row["tflops"] = 4 * pairs * q.shape[3] / row["ms"] / 1e9
        print(
            f"{what:46} x {entries:6} {row['ms']:8.3f} ms (again {row['again_ms']:.3f}) "
            f"{row['tflops']:6.0f} TF/s, off by {row['error']:.1e}",
            flush=True,
        )
    except Exception as fault:  # a variant that does not build must not end the others
        row["fault"] = f"{type(fault).__name__}: {str(fault)[:300]}"
        print(f"{what:46} x {entries:6} failed: {row['fault'][:160]}", flush=True)
    return row.get("ms", math.nan)


def draw(entries: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Queries (three of them), keys, values, log-weights; near queries and near keys are alike."""
    rng = torch.Generator(DEVICE).manual_seed(seed)
    heads, width, like = SHAPE.heads, SHAPE.head_dim, {"generator": rng, "device": DEVICE}
    centres = torch.randn(1, heads, 64, width, **like)

    def some(n: int, run: int) -> Tensor:
        of = torch.randint(64, (1, heads, -(-n // run)), **like).repeat_interleave(run, 2)[:, :, :n]
        near = centres.gather(2, of.unsqueeze(-1).expand(-1, -1, -1, width))
        return (near + torch.randn(1, heads, n, width, **like)).to(torch.bfloat16)

    queries = [some(SHAPE.max_pass_tokens, 40) for _ in range(3)]
    keys, values = some(entries, 7), some(entries, 7)
    log_count = (torch.rand(1, heads, entries, **like) * 40 + 1).log()
    log_count.masked_fill_(torch.rand(log_count.shape, **like) < 0.02, -math.inf)
    return queries, keys, values, log_count


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def dense(rows: Rows, entries: int) -> None:
    queries, k, v, log_count = draw(entries, 0)
    q = queries[0]
    pairs = q.shape[:3].numel() * entries
    some = torch.randperm(q.shape[2], device=DEVICE)[:40]
    want = {w is None: attention_reference(q[:, :, some], k, v, w) for w in (None, log_count)}

    def run(what: str, call: Callable[[Tensor], Tensor], plain: bool, **more: Any) -> None:
        def wrong(out: Tensor) -> float:
            return (out[:, :, some].double() - want[plain].double()).abs().max().item()

        measure(rows, what, entries, pairs, lambda i: call(queries[i % 3]), wrong, q, **more)

    run("cuDNN, plain", lambda q: cudnn(q, k, v), True)

    for name, weights in (("weighted", log_count), ("plain", None)):
        for form, call in (("ours", attention), ("for any GPU", any_gpu.flash_attention)):
            run(f"{form}, {name}", lambda q, w=weights, f=call: f(q, k, v, w), weights is None)
    if entries > LENGTHS[0]:
        return

    # without our kernels: the log-weight as channels, or as a mask, or in the values
    def by_channels(q: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attention_by_channels(q, k, v, log_count)

    run("cuDNN, weight as channels of q and k", by_channels, False)
    run(
        "torch, weight as a mask",
        lambda q: F.scaled_dot_product_attention(q, k, v, attn_mask=bias(log_count, q)),
        False,
    )
    # m·v and m as value channels, built before; an empty slot is k = 0, m = 0
    m = log_count.exp().unsqueeze(-1)
    bare_k = k.masked_fill(m == 0, 0.0)
    mass = torch.cat([v * m, m, torch.zeros_like(m.expand(-1, -1, -1, 7))], -1).to(torch.bfloat16)

    def by_values(q: Tensor) -> Tensor:
        out = cudnn(q, bare_k, mass)
        return out[..., : v.shape[3]] / out[..., v.shape[3] : v.shape[3] + 1]

    run("cuDNN, weight in the values", by_values, False)


def listed(rows: Rows, entries: int, block: int) -> None:
    """Policy ann at read 0.2, as a session calls it: index, choose, read."""
    queries, k, v, log_count = draw(entries + SHAPE.max_pass_tokens, 1)
    log_count[:, :, entries:] = 0.0
    policy, q = Ann(read=0.2, block=block), queries[0]
    own = dict(policy.tensors(SHAPE, k.shape[2], DEVICE))
    layer = KVStore(k, v, log_count, log_count, own={"attention": own})
    tokens = SHAPE.max_pass_tokens
    first = PassContext(SHAPE, 0, 9, entries, 0, tokens, 0, 5, (1.0,) * 3, plain=False)
    later = first._replace(pass_index=1, before=(0,))
    at_first = LayerPass(first, layer, Work(), lambda raw, pos: raw, torch.default_generator)
    at_later = at_first._replace(ctx=later)
    policy.build_index(at_first, entries)

    def reindex(_: int) -> None:
        """What a commit does, beside the cache policy's own work."""
        policy.restore_order(at_first, entries)
        policy.build_index(at_first, entries)

    index_ms = milliseconds(reindex)
    policy.attend(at_first, q)
    blocks = policy._cut(SHAPE, 0, entries)
    tile, most = policy._tile(SHAPE), policy._blocks_read(blocks, first)
    past = BlockTable(k, v, own["log_count"], own["map"][..., :most], own["count"], tile, block)
    pairs = q.shape[:3].numel() * (most * block + tokens)
    now_k, now_v = (x[:, :, entries:] for x in (k, v))

    weights = policy.log_weights(at_first)

    def wrong(out: Tensor) -> float:
        worst = 0.0
        for h in range(0, SHAPE.heads, 5):
            for i in (0, past.ids.shape[2] // 2, past.ids.shape[2] - 1):
                ids = past.ids[0, h, i].long()
                entry = (ids[:, None] * block + torch.arange(block, device=DEVICE)).flatten()
                entry = torch.cat(
                    [entry[entry < entries], torch.arange(entries, k.shape[2], device=DEVICE)]
                )
                part = slice(i * tile, i * tile + 16)
                want = attention_reference(
                    q[:, h : h + 1, part], k[:, h : h + 1, entry], v[:, h : h + 1, entry],
                    weights[:, h : h + 1, entry],
                )  # fmt: skip
                got = out[:, h : h + 1, part]
                worst = max(worst, (got.double() - want.double()).abs().max().item())
        return worst

    # the share of blocks that two neighbouring tiles, or the same tiles of two heads, both read
    read = torch.zeros(*past.ids.shape[1:3], blocks.all, device=DEVICE)
    read.scatter_(2, past.ids[0].long(), 1.0)
    tiles_share = (read[:, 1:] * read[:, :-1]).sum(-1).mean().item() / most
    heads_share = (read[1:] * read[:-1]).sum(-1).mean().item() / most
    print(
        f"  blocks of {block}: {most} of {blocks.all} read; {tiles_share:.0%} are the next tile's "
        f"too, {heads_share:.0%} the next head's",
        flush=True,
    )
    forms = {"ours": block_sparse_attention, "for any GPU": any_gpu.block_sparse_attention}
    for form, call in forms.items():
        measure(
            rows, f"{form}, blocks of {block}", entries, pairs,
            # the map is queries[0]'s: other queries read by it as well
            lambda i, f=call: f(queries[i % 3], now_k, now_v, past).out,
            wrong, q, block=block,
        )  # fmt: skip
    more = {"block": block, "index_ms": index_ms, "tiles_share": tiles_share}
    kept = measure(
        rows, f"ann, blocks of {block}: a pass that reads", entries, pairs,
        lambda i: policy.attend(at_later, queries[i % 3]),
        wrong, q, **more,
    )  # fmt: skip
    chosen = measure(
        rows, f"ann, blocks of {block}: a pass that chooses", entries, pairs,
        lambda i: policy.attend(at_first, queries[0]), wrong, q, **more,
    )  # fmt: skip
    flops = 4 * pairs * SHAPE.head_dim
    spread = (chosen + 4 * kept) / 5
    row = {
        "what": f"ann, blocks of {block}: a chunk's passes", "entries": entries, "pairs": pairs,
        "choose_ms": chosen - kept, "ms": spread, "tflops": flops / spread / 1e9,
        "tflops_with_index": flops / (spread + index_ms / 5) / 1e9,
    }  # fmt: skip
    rows.append(row | more)
    print(
        f"{row['what']:46} x {entries:6} {spread:8.3f} ms {row['tflops']:6.0f} TF/s; choosing "
        f"{row['choose_ms']:.3f} ms, indexing {index_ms:.3f} ms (with it "
        f"{row['tflops_with_index']:.0f} TF/s)",
        flush=True,
    )


def sustained(rows: Rows, entries: int) -> None:
    """Plain attention for seconds without a pause, as a long dense chunk runs it: a GPU that works
    at its full power lowers its clock, which bursts of milliseconds do not meet."""
    queries, k, v, _ = draw(entries, 2)
    pairs = queries[0].shape[:3].numel() * entries

    for what, attend in (("cuDNN", cudnn), ("ours", attention)):
        attend(queries[0], k, v)
        torch.cuda.synchronize()
        begun, count = time.perf_counter(), 0
        while (seconds := time.perf_counter() - begun) < SECONDS:
            for _ in range(20):
                attend(queries[count % 3], k, v)
                count += 1
            torch.cuda.synchronize()
        row = {
            "what": f"{what}, plain, for {SECONDS} s", "entries": entries, "pairs": pairs,
            "ms": 1e3 * seconds / count,
            "tflops": 4 * pairs * SHAPE.head_dim * count / seconds / 1e12,
        }  # fmt: skip
        rows.append(row)
        print(
            f"{row['what']:46} x {entries:6} {row['ms']:8.3f} ms {row['tflops']:6.0f} TF/s",
            flush=True,
        )


def replayed(rows: Rows) -> None:
    """An MLP on some of a chunk's rows: picked out, computed and put back, and computed alone."""
    rng = torch.Generator(DEVICE).manual_seed(3)
    like = {"generator": rng, "device": DEVICE, "dtype": torch.bfloat16}
    tokens, width = SHAPE.max_pass_tokens, SHAPE.width
    up, down = (torch.randn(*size, **like) / 64 for size in ((8960, width), (width, 8960)))
    streams = [torch.randn(1, tokens, width, **like) for _ in range(3)]
    old = torch.randn(1, tokens, width, **like)

    def mlp(x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)

    for share in (0.0, 0.25, 0.5, 0.75):
        kept = tokens - round(share * tokens)
        picked = torch.rand(1, tokens, generator=rng, device=DEVICE).argsort(-1)[:, :kept]
        row = {
            "what": f"MLP, {share:.0%} of the rows replayed", "rows": kept,
            "ms": milliseconds(lambda i, p=picked: replay_rows(streams[i % 3], old, p, mlp)),
            "alone_ms": milliseconds(lambda i, n=kept: mlp(streams[i % 3][:, :n])),
        }  # fmt: skip
        rows.append(row)
        print(f"{row['what']:46} {row['ms']:8.3f} ms, the rows alone {row['alone_ms']:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="write the rows as JSON")
    args = parser.parse_args()
    check_json(args.out)
    began = time.perf_counter()
    rows: Rows = []
    with torch.inference_mode():
        for entries in LENGTHS:
            dense(rows, entries)
            for block in BLOCKS:
                listed(rows, entries, block)
        sustained(rows, LENGTHS[-1])
        replayed(rows)
    seconds = time.perf_counter() - began
    print(f"{seconds:.0f} s")
    command = shlex.join(["python", *sys.argv])
    emit(document(f"bench-kernels-{DEVICE.type}", rows, command, seconds=seconds), args.out)


if __name__ == "__main__":
    main()
