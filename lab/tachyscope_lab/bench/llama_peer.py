"""The same trunk by Hugging Face's transformers: static cache, torch.compile, CUDA graphs."""

from __future__ import annotations

import time
from typing import Any

import torch

from tachyscope.io.results import Document
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope_lab.bench.device_clock import milliseconds


@torch.inference_mode()
def bench_llama(
    config: VilaConfig, rows: int, entries: int, slots: int, device: torch.device, rounds: int
) -> Document:
    """Milliseconds of one token after so many entries; the trunk alone, less head and sampling.

    It is what `generate(cache_implementation="static")` with a compiled forward does for a token.
    """
    from transformers import LlamaConfig, LlamaModel, StaticCache

    sized: Any = LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        vocab_size=64,  # inputs are vectors
        rms_norm_eps=config.eps,
        max_position_embeddings=slots,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model: Any = LlamaModel(sized)
    model = model.to(dtype).eval()
    cache = StaticCache(config=sized, max_cache_len=slots)
    x = torch.randn(rows, 1, config.hidden, dtype=dtype, device=device)
    place = torch.full((rows, 1), entries, device=device)
    step = torch.compile(
        model.forward, fullgraph=True, mode="reduce-overhead" if device.type == "cuda" else None
    )

    def work() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        step(
            inputs_embeds=x, position_ids=place, cache_position=place[0], past_key_values=cache,
            use_cache=True,
        )  # fmt: skip

    # the cache is made by a first call that is not compiled
    model(inputs_embeds=x.expand(-1, entries, -1), past_key_values=cache, use_cache=True)
    begun = time.perf_counter()
    for _ in range(4):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    compile_s = time.perf_counter() - begun
    takes = [milliseconds(work, 20, device) for _ in range(rounds)]
    size = sum(p.numel() * p.element_size() for p in model.layers.parameters())
    return {"ms": min(takes), "takes_ms": takes, "compile_s": compile_s, "bytes": size}
