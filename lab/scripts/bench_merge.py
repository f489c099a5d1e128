"""Check and time matching and merging of one cache on a GPU, at Wan-1.3B's shape.

A layer has 12 heads of 128 and 1,560 places a latent frame; every commit brings 3 latent frames,
4,680 entries, and folds as many, of 29,640 (newest=1). What that takes on an H200, at 550 TF/s of
bfloat16 and 4 TB/s, in microseconds a layer; 35 ms a chunk are 1,167:

    norms     91 MB read                                             25
    match     4,680 x 27,300 pairs x 12 x 256 FLOP = 392 GFLOP      715
    settle    two rows an entry, 29 MB                               10
    choose    bisection, about 18 looks at 12 x 29,640, on 12 SMs    35
    trace     pointers                                                5
    sort      56,160 numbers                                         35
    fold      60 MB                                                  20
    slide     k and v, 172 MB read and written                       90
    measure   172 MB                                                 45
    between   some 20 launches                                       20
                                                                  1,000

    python lab/scripts/bench_merge.py --out merge.json
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tachyscope.cache.merge import Merge
from tachyscope.core.types import PassContext, Shape, Size
from tachyscope.core.work import Work
from tachyscope.io.results import check_json, document, emit, to_json
from tachyscope.kernels import device as kernel_device
from tachyscope.kernels.match.torch import best_older
from tachyscope.kernels.match.triton import Setting, match, measure
from tachyscope.kernels.merge import Entries
from tachyscope.kernels.merge import triton as folding
from tachyscope.store import KVStore, LayerPass

MATCHES = [
    Setting(),
    Setting(registers=255),
    Setting(registers=255, stages=3),
    Setting(use_tma=False),
    Setting(columns=64, stages=3),
    Setting(rows=64, warps=4),
    Setting(span=8192),
    Setting(span=2048),
]
SLIDES = [folding.Setting(), folding.Setting(16, 1024, 8), folding.Setting(64, 512, 16)]
ROUNDS = 10
# so long the device waits, in cycles, while the host queues what is then timed
HEAD_START, LONG_HEAD_START = 2_000_000, 60_000_000


class Bench:
    """One layer in its steady state, and what it is measured with."""

    def __init__(self, places: int, newest: int, device: str) -> None:
        self.device = torch.device(device)
        high = max(h for h in range(1, 31) if places % h == 0)
        self.shape = Shape(
            layers=30, heads=12, kv_heads=12, head_dim=128, width=1536, grid=(high, places // high),
            chunk=3, passes=5,
        )  # fmt: skip
        self.policy = Merge(budget=Size(21, True), newest=newest)
        self.rng = torch.Generator(self.device).manual_seed(0)
        # the interpreter, where there is no GPU, multiplies no bfloat16
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float16
        self.scene = self.normal(1, 12, places, 128)
        self.layer = self.empty()
        self.past = 0
        for chunk in range(9):
            self.see(chunk)
            self.past = self.commit(self.layer)
        self.see(9)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.rng, device=self.device)

    def empty(self) -> KVStore:
        slots = 21 * self.shape.tokens_per_frame
        own = self.policy.tensors(self.shape, slots, self.device)
        return KVStore.empty(
            self.shape, slots, 12, self.dtype, self.device, declared={"cache": own}
        )

    def see(self, chunk: int) -> None:
        """Behind the past, keys of a scene that recurs, drifts, and is never quite the same."""
        tokens = self.shape.max_pass_tokens
        self.scene = 0.9 * self.scene + 0.44 * self.normal(*self.scene.shape)
        now = slice(self.past, self.past + tokens)
        noise = self.normal(1, 12, tokens, 128) * torch.rand(
            1, 12, tokens, 1, generator=self.rng, device=self.device
        )
        self.layer.k[:, :, now] = self.scene.repeat(1, 1, 3, 1) + noise
        self.layer.v[:, :, now] = self.normal(1, 12, tokens, 128)
        self.layer.pos[:, :, now] = self.shape.positions(3 * chunk, 3, self.device)
        self.layer.log_count[:, :, now] = 0.0

    def commit(self, layer: KVStore, by_kernels: bool = True) -> int:
        ctx = PassContext(
            self.shape, 0, 1, self.past, 0, self.shape.max_pass_tokens, 4, 5, (0.0,) * 3
        )
        with mock.patch.object(kernel_device, "HAS_TRITON", by_kernels):
            p = LayerPass(ctx, layer, Work(), lambda raw, pos: raw, torch.default_generator)
            return self.policy.commit(p, self.shape.max_pass_tokens)

    @property
    def total(self) -> int:
        return self.past + self.shape.max_pass_tokens

    @property
    def old(self) -> slice:
        """Entries that may be folded."""
        return slice(
            self.shape.tokens_per_frame,
            self.total - (self.policy.newest or 0) * self.shape.tokens_per_frame,
        )

    @property
    def left(self) -> int:
        """How many of old have looked for a partner before."""
        return self.past - ((self.policy.newest or 0) + 1) * self.shape.tokens_per_frame

    @property
    def excess(self) -> int:
        return self.total - 18 * self.shape.tokens_per_frame

    def ms(self, call: Callable[[], object], head_start: int = HEAD_START) -> float:
        """The median of some runs, after one that is not counted."""
        call()
        times = []
        for _ in range(ROUNDS if self.device.type == "cuda" else 1):
            if self.device.type == "cuda":
                torch.cuda._sleep(head_start)
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop))
            else:
                t0 = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - t0))
        return statistics.median(times)


def copied(layer: KVStore) -> KVStore:
    own = {"cache": {name: x.clone() for name, x in layer.own["cache"].items()}}
    return replace(layer, **{name: x.clone() for name, x in layer.entries().items()}, own=own)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory handed out uninitialised is NaN or a slot far away, so that a gap shows."""

    def bad(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            return out.fill_(float("nan") if out.is_floating_point() else 3)

        return call

    with (
        mock.patch.object(torch, "empty", bad(torch.empty)),
        mock.patch.object(torch, "empty_like", bad(torch.empty_like)),
    ):
        yield


def check_match(b: Bench, setting: Setting) -> dict[str, float]:
    """Sampled rows against all older entries in float64."""
    k, left = b.layer.k[:, :, b.old], b.left
    with poisoned():
        cosine, partner = match(k, left, setting)
    m = cosine.shape[2]
    rows = torch.randint(m, (64,), generator=b.rng, device=b.device)
    rows[:2] = torch.arange(2, device=b.device)
    unit = F.normalize(k.double(), dim=-1)
    exact = unit[:, :, left + rows] @ unit.mT
    newer = torch.arange(k.shape[2], device=b.device) >= (left + rows)[:, None]
    exact.masked_fill_(newer, -torch.inf)
    reached = exact.gather(3, partner[:, :, rows, None]).squeeze(-1)
    best, index = exact.max(-1)
    worst = (best - reached).max().item()
    off = (cosine[:, :, rows] - reached).abs().max().item()
    if not (worst < 2e-5 and off < 2e-6):
        raise AssertionError(f"match misses the best by {worst:.1e}, its cosine by {off:.1e}")
    older = (partner < left + torch.arange(m, device=b.device)).all().item()
    if not older or not cosine.isfinite().all().item():
        raise AssertionError("a partner is not older, or a cosine not finite")
    same = (index == partner[:, :, rows]).double().mean().item()
    return {"worst_miss": worst, "cosine_off": off, "same_partner": same}


def check_slide(b: Bench, setting: folding.Setting) -> None:
    """Moved in place, bit for bit what a gather gives; ten times, since a race may hide."""
    own = b.layer.own["cache"]
    folds = folding.choose(own["alike"][:, :, b.old], own["partner"][:, :, b.old], b.excess)
    used = slice(b.old.start, b.total)
    n, count = b.old.stop - b.old.start, used.stop - used.start
    tail = torch.arange(n, count, device=b.device).expand(1, 12, -1)
    order = torch.cat([folds.order.view(1, 12, -1), tail], 2)
    for _ in range(10):
        part = {name: x[:, :, used].clone() for name, x in b.layer.entries().items()}
        held = Entries(**{name: x.clone() for name, x in part.items()})
        folding.slide(held, folds, setting)
        for name, x in part.items():
            index = order if x.dim() == 3 else order[..., None].expand(-1, -1, -1, x.shape[3])
            moved = getattr(held, name)[:, :, : order.shape[2]]
            if not torch.equal(moved, x.gather(2, index)):
                raise AssertionError(f"slide moved {name} wrongly")


def check_commit(b: Bench) -> dict[str, float]:
    """A whole commit by kernels, twice, and by stock torch."""
    with poisoned():
        mine, again = copied(b.layer), copied(b.layer)
        past = b.commit(mine)
        b.commit(again)
    for name, x in mine.tensors().items():
        if not torch.equal(x, again.tensors()[name]):
            raise AssertionError(f"two commits of the same layer differ in {name}")
    stock = copied(b.layer)
    b.commit(stock, by_kernels=False)

    def places(layer: KVStore) -> Tensor:
        t, y, x = layer.pos[:, :, :past].long().unbind(-1)
        high, wide = b.shape.grid
        return ((t * high + y) * wide + x).sort(-1).values

    ours, theirs = places(mine), places(stock)
    ctx = torch.searchsorted(theirs, ours).clamp(max=past - 1)
    same = (theirs.gather(2, ctx) == ours).double().mean().item()
    seen = mine.log_count[:, :, :past].double().exp().sum(-1)
    before = b.layer.log_count[:, :, : b.total].double().exp().sum(-1)
    lost = ((seen - before) / before).abs().max().item()
    q = b.layer.k[:, :, b.past : b.total : 16].float()

    def read(layer: KVStore) -> Tensor:
        k, v = (x[:, :, :past].float() for x in (layer.k, layer.v))
        bias = layer.log_count[:, :, None, :past]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.expand(-1, -1, q.shape[2], -1)
        )

    want = read(stock)
    off = ((read(mine) - want).norm() / want.norm()).item()
    if not (same > 0.998 and lost < 1e-5 and off < 2e-2):
        raise AssertionError(
            f"commits by kernels and by torch differ: {same:.5f} of places are the same, weight "
            f"changed by {lost:.1e}, attention by {off:.1e}"
        )
    return {"same_places": same, "weight_lost": lost, "attention_off": off}


def tried(call: Callable[[], Any]) -> Any:
    """What a call gives, or in words why not."""
    try:
        return call()
    except Exception as fault:  # a setting that does not compile is a result
        return f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--places", type=int, default=1560, help="of a latent frame")
    parser.add_argument("--newest", type=int, default=1, help="latent frames that are never folded")
    args = parser.parse_args()
    check_json(args.out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    row: dict[str, Any] = {"places": args.places, "newest": args.newest}
    with torch.inference_mode():
        run(row, Bench(args.places, args.newest, device))
    results = document(f"bench-merge-{device}", [row], shlex.join(["python", *sys.argv]))
    print(to_json(results, indent=1))
    emit(results, args.out)


def run(results: dict[str, Any], b: Bench) -> None:
    layer, old, left = b.layer, b.old, b.left
    entries = old.stop - old.start
    looking = entries - left
    results |= {"entries": entries, "looking": looking, "folded": b.excess}
    results["checks"] = {
        "match": tried(lambda: check_match(b, Setting())),
        "slide": tried(lambda: check_slide(b, folding.Setting()) or "equal"),
        "commit": tried(lambda: check_commit(b)),
    }
    k = layer.k[:, :, old]
    alike, partner = (layer.own["cache"][x][:, :, old] for x in ("alike", "partner"))
    flop = 2 * 128 * 12 * looking * (left + looking / 2)

    def rate(setting: Setting) -> dict[str, Any]:
        ms = b.ms(lambda: match(k, left, setting))
        return {
            "ms": ms,
            "tflops": flop / ms / 1e9,
            "check": tried(lambda: check_match(b, setting)),
        }

    results["match"] = [{**s._asdict(), "result": tried(lambda s=s: rate(s))} for s in MATCHES]
    alike[:, :, left:], partner[:, :, left:] = match(k, left)
    folds = folding.choose(alike, partner, b.excess)
    used = slice(old.start, b.total)
    held = Entries(**{name: x[:, :, used].clone() for name, x in layer.entries().items()})
    # what was moved or folded before changes the content, not how much there is to do
    results["slide"] = [
        {**s._asdict(), "ms": tried(lambda s=s: b.ms(lambda: folding.slide(held, folds, s)))}
        for s in SLIDES
    ]
    heirs = folds.heir.view(1, 12, -1).long()
    numbers = folds.root.flatten()
    parts: dict[str, Callable[[], object]] = {
        "match": lambda: match(k, left),
        "match again": lambda: match(k, left),
        "choose": lambda: folding.choose(alike, partner, b.excess),
        "fold": lambda: folding.fold_groups(held, folds, True, True),
        "slide": lambda: folding.slide(held, folds),
        "measure": lambda: measure([held.k], heirs, alike.clone()[:, :, : heirs.shape[2]]),
        "of choose, sort": lambda: numbers.sort(stable=True),
        "torch's topk": lambda: alike.topk(b.excess, 2),
        "torch's match": lambda: best_older(F.normalize(k.float(), dim=-1), left),
    }
    results["ms"] = {name: tried(lambda call=call: b.ms(call)) for name, call in parts.items()}
    layers = [copied(layer) for _ in range(b.shape.layers if b.device.type == "cuda" else 1)]

    def chunk() -> None:
        for one in layers:
            b.commit(one)

    for name in ("chunk", "chunk again"):  # 30 layers
        results["ms"][name] = tried(lambda: b.ms(chunk, LONG_HEAD_START))
    if b.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        b.commit(layers[0])
        results["workspace_bytes"] = torch.cuda.max_memory_allocated() - before
        results["waits"] = tried(lambda: without_waits(lambda: b.commit(layers[0])) or "none")
        t0 = time.perf_counter()
        chunk()
        results["ms"]["the host's part of a chunk"] = 1e3 * (time.perf_counter() - t0)
        torch.cuda.synchronize()


def without_waits(call: Callable[[], object]) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main()
