"""The authors' Self-Forcing loop on a GPU: as it is, with `ts.accelerate`, and Tachyscope beside.

    python lab/scripts/bench_authors.py CLONE --out authors.json [--chunks 14] [--plan fast]

CLONE is their repository (github.com/guandeh17/Self-Forcing). Its own CausalInferencePipeline runs
at full size with random weights, in bfloat16, with its window of 21 latent frames; FlashAttention 3
is served by cuDNN through PyTorch. A chunk's time is that between two clean passes, once the window
is full. All videos are decoded by one tiny decoder of random weights, timed apart. Their loop runs
first and last.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tachyscope as ts
from tachyscope.core.rollout import rollout
from tachyscope.io.machine import count_peak, peak_gb
from tachyscope.io.results import Document, check_json, document, emit
from tachyscope.measure.noise import noise
from tachyscope.measure.rates import Clock, rates
from tachyscope.models.registry import load
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope_lab.plug.host import STEPS, _Unused

WINDOW, CHUNK = 21, 3  # latent frames
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
SMALL: dict[str, int] = dict(dim=256, ffn_dim=512, num_heads=2, num_layers=2, text_dim=48)


class Decoder:
    """What their pipeline calls for pixels: the tiny decoder, a chunk at a time."""

    def __init__(self, tiny: TinyDecoder) -> None:
        self.tiny, self.ms = tiny, 0.0

    def decode_to_pixel(self, latents: Tensor, use_cache: bool = False) -> Tensor:
        """Latents [B, F, C, H, W] decoded, their frames brought to the host; a token of them."""
        begun, features = clock_ms(latents.device), dict[str, Tensor]()
        for chunk in latents.split(CHUNK, 1):
            self.tiny(chunk.transpose(1, 2), features)
        self.ms = (clock_ms(latents.device) - begun) / (latents.shape[1] // CHUNK)
        return latents.new_zeros(1)


def clock_ms(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * time.perf_counter()


def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """FlashAttention's call, [B, S, H, D], by cuDNN."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def their_pipeline(decoder: Decoder, device: torch.device, dtype: torch.dtype, small: bool) -> Any:
    """Their pipeline with random weights."""
    for name in ("wan.modules.attention", "wan.modules.model", "wan.modules.causal_model"):
        module: Any = importlib.import_module(name)
        for call in ("attention", "flash_attention"):
            if hasattr(module, call):
                setattr(module, call, attention)
    causal: Any = importlib.import_module("wan.modules.causal_model")
    wrapper: Any = importlib.import_module("utils.wan_wrapper")
    pipeline: Any = importlib.import_module("pipeline.causal_inference")
    size = dict(model_type="t2v", text_len=512, in_dim=16, out_dim=16) | (
        SMALL if small else dict(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30, text_dim=4096)
    )

    def random_weights(path: str, **options: Any) -> Any:
        with torch.device(device):
            return causal.CausalWanModel(**size, **options)

    causal.CausalWanModel.from_pretrained = staticmethod(random_weights)
    generator = wrapper.WanDiffusionWrapper(
        timestep_shift=5.0, is_causal=True, local_attn_size=WINDOW
    )
    generator.to(device, dtype)
    args = SimpleNamespace(
        denoising_step_list=list(STEPS), warp_denoising_step=True, num_frame_per_block=CHUNK,
        independent_first_frame=False, context_noise=0,
    )  # fmt: skip
    rng = torch.Generator(device).manual_seed(0)
    text = torch.randn(1, 512, int(size["text_dim"]), generator=rng, device=device, dtype=dtype)  # type: ignore[call-overload]
    made = pipeline.CausalInferencePipeline(
        args, device, generator=generator, vae=decoder,
        text_encoder=lambda text_prompts: {"prompt_embeds": text},
    )  # fmt: skip
    if small:
        made.frame_seq_length, made.num_transformer_blocks = 96, int(SMALL["num_layers"])
        stores = made._initialize_kv_cache

        def initialize(**options: Any) -> None:
            stores(**options)  # which has the full size's heads
            for cache in made.kv_cache1:
                cache |= {name: cache[name][:, :, : SMALL["num_heads"]] for name in ("k", "v")}

        made._initialize_kv_cache = initialize
    return made


class Chunks:
    """The time between two clean passes of their loop."""

    def __init__(self, pipeline: Any) -> None:
        self.calls, self.marks, self.passes = 0, list[float](), len(STEPS) + 1
        pipeline.generator.register_forward_hook(self._called)

    def _called(self, module: Any, args: Any, out: tuple[Tensor, Tensor]) -> None:
        self.calls += 1
        if self.calls % self.passes == 0:
            self.marks.append(clock_ms(out[0].device))

    def take(self) -> list[float]:
        """Of the video that was made; the next one begins."""
        spans = [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        self.calls, self.marks = 0, []
        return spans


def run_theirs(pipeline: Any, timed: Chunks, chunks: int, latent: tuple[int, int]) -> Document:
    """A video by their loop; times are of chunks whose window was full."""
    weight = next(pipeline.generator.parameters())
    like = {"device": weight.device, "dtype": weight.dtype}
    start = torch.randn(1, CHUNK * chunks, 16, *latent, **like)
    count_peak(weight.device)
    with torch.inference_mode(), contextlib.redirect_stdout(io.StringIO()):
        pipeline.inference(start, ["x"])
    spans = timed.take()
    settled = spans[WINDOW // CHUNK :]
    ms = statistics.median(settled)
    decode = pipeline.vae.ms
    return {
        "chunk_ms": ms, "chunk_ms_all": spans, "decode_ms": decode, "fps": 4e3 * CHUNK / ms,
        "fps_shown": 4e3 * CHUNK / (ms + decode), "peak_gb": peak_gb(weight.device),
        "halves": noise_of(settled),
    }  # fmt: skip


def noise_of(spans: list[float]) -> list[float] | None:
    """A run beside itself, chunk about."""
    half = len(spans) // 2
    return list(noise(spans[0 : 2 * half : 2], spans[1 : 2 * half : 2])) if half else None


def run_ours(model: Any, plan: str, chunks: int) -> Document:
    """The same video by Tachyscope: decoded beside the next chunk, and each chunk's model part."""
    count_peak(model.device)
    rows = []
    frames = model.pixel_frames(CHUNK * chunks)
    with Clock() as clock:
        for chunk in rollout(model, plan, frames=frames, overlap_decode=True):
            clock.lap(chunk)
            rows.append(chunk.stats)
    speed = rates(rows)
    return {
        "chunk_ms": speed["model_ms"], "shown_ms": speed["steady_ms"],
        "fps": 4e3 * CHUNK / speed["model_ms"], "fps_shown": speed["fps_steady"],
        "peak_gb": peak_gb(model.device), "recompiled": speed["recompiled"],
    }  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("clone", type=Path)
    parser.add_argument("--out", required=True, help="a JSON file of all rows")
    parser.add_argument("--chunks", type=int, default=14)
    parser.add_argument("--plan", default="fast")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a model that a CPU can run")
    args = parser.parse_args(argv)
    check_json(args.out)
    sys.path.insert(0, str(args.clone))
    sys.meta_path.insert(0, _Unused())
    if args.device == "cpu":
        torch.cuda.current_device = lambda: 0  # a default of theirs
    device, dtype = torch.device(args.device), torch.float32 if args.small else torch.bfloat16
    config = WanConfig()
    decoder = Decoder(TinyDecoder.read("random-tiny", config, device, dtype))
    if device.type == "cuda":
        decoder.tiny.compile()
    pipeline = their_pipeline(decoder, device, dtype, args.small)
    timed, latent = Chunks(pipeline), (16, 24) if args.small else (60, 104)
    rows: list[Document] = []

    def add(name: str, work: Callable[[], Document]) -> None:
        """A row, kept as soon as it is there; its fault ends no other."""
        try:
            row = work()
        except Exception as fault:
            row = {"failed": f"{type(fault).__name__}: {fault}"[:500]}
        if rows and "chunk_ms" in row and "chunk_ms" in rows[0]:
            row["over_theirs"] = rows[0]["chunk_ms"] / row["chunk_ms"]
            row["shown_over_theirs"] = row["fps_shown"] / rows[0]["fps_shown"]
        rows.append({"name": name} | row)
        command = shlex.join(["python", "lab/scripts/bench_authors.py", *argv])
        emit(document("bench-authors", rows, command, size="480x832"), args.out)
        print({k: v for k, v in rows[-1].items() if k != "chunk_ms_all"}, flush=True)

    def theirs() -> Document:
        return run_theirs(pipeline, timed, args.chunks, latent)

    theirs()  # libraries choose their kernels
    add("theirs", theirs)
    try:
        with ts.accelerate(pipeline, args.plan):
            theirs()  # kernels are built
            add(f"theirs, accelerate {args.plan}", theirs)
    except Exception as fault:
        print(f"accelerate {args.plan}: {type(fault).__name__}: {fault}", flush=True)
    add("theirs again", theirs)
    if not args.small:
        model: Any = load("self-forcing", "random", device=device, dtype="bfloat16")
        model.decoder = decoder.tiny
        model.compile()
        for plan in ("stock", args.plan):
            add(f"ours, {plan}", lambda plan=plan: run_ours(model, plan, 3 * args.chunks))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
