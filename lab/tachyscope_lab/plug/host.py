"""A process that runs one family's own code with and without a plan, and prints what differs.

python -m tachyscope_lab.plug.host FAMILY FOLDER
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import io
import json
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tachyscope as ts

LATENT = (16, 24)  # latent rows and columns; a token is 2 x 2
TOKENS = LATENT[0] * LATENT[1] // 4
LAYERS, TEXT, WORDS = 2, 48, 20
SIZE: dict[str, Any] = dict(
    model_type="t2v", dim=256, ffn_dim=512, num_heads=2, num_layers=LAYERS, text_dim=TEXT,
    text_len=512, in_dim=16, out_dim=16,
)  # fmt: skip
WIDE = 64  # latent frames of a window that nothing leaves
STEPS = [1000, 750, 500, 250]
# what their packages import and inference does not need
UNUSED = (
    "demo_utils", "wan.distributed", "wan.image2video", "wan.text2video", "wan.configs",
    "pipeline.bidirectional_diffusion_inference", "pipeline.bidirectional_inference",
    "pipeline.causal_diffusion_inference", "pipeline.self_forcing_training",
    "pipeline.rolling_forcing_training",
    "pipeline.reward_forcing_training", "pipeline.rewarded_self_forcing_training",
    "pipeline.streaming_training", "pipeline.streaming_switch_training", "causvid.models.sdxl",
    "causvid.models.wan.bidirectional_inference",
    "causvid.models.wan.wan_base.distributed", "causvid.models.wan.wan_base.image2video",
    "causvid.models.wan.wan_base.text2video", "causvid.models.wan.wan_base.configs",
)  # fmt: skip

Video = Callable[..., Tensor]


class _Nothing(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of UNUSED, without what they would import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == part or name.startswith(f"{part}.") for part in UNUSED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


def sdpa(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """FlashAttention's call, [B, S, H, D], served by PyTorch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def weights(model: torch.nn.Module) -> None:
    """Seeded weights of the size that trained ones have, so that attention is not flat."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            x = torch.randn(p.shape, generator=rng)
            if name.endswith("modulation"):
                x = 0.2 * x
                if name.startswith("blocks"):
                    x[:, 2::3] += 0.7  # gates
            elif "norm" in name and name.endswith("weight"):
                x = 1.4 + 0.3 * x
            elif name.endswith("bias"):
                x = 0.1 * x
            else:
                x = x * p[0].numel() ** -0.5
            p.copy_(x)


def prompt(seed: int, batch: int = 1) -> Tensor:
    text = torch.zeros(batch, 512, TEXT)
    text[:, :WORDS] = torch.randn(1, WORDS, TEXT, generator=torch.Generator().manual_seed(seed))
    return text


class Torch:
    """PyTorch, but for a few names: in the place of a module's `torch`."""

    def __init__(self, **own: Any) -> None:
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Host:
    """Their model and pipeline; `video` makes latents [B, F, C, H, W]."""

    def __init__(self, pipeline: Any, loop: str = "inference") -> None:
        self.pipeline = pipeline
        self.loop = getattr(pipeline, loop)

    def cases(self) -> dict[str, dict[str, Any]]:
        """Options of `video` by what they make; the first one is made by every plan."""
        given = torch.randn(1, 6, 16, *LATENT, generator=torch.Generator().manual_seed(3))
        cases: dict[str, dict[str, Any]] = {
            "15 frames": {},
            "batch of 2": {"batch": 2, "chunks": 3},
        }
        # Rolling-Forcing takes given frames, and uses a name before it has a value
        taken = inspect.signature(self.loop).parameters
        if "initial_latent" in taken and self.loop.__name__ != "inference_rolling_forcing":
            cases["6 frames given"] = {"given": given}
        return cases

    def fresh(self) -> None:
        """Its own cache is made anew."""
        for name in ("kv_cache1", "kv_cache_clean"):
            if hasattr(self.pipeline, name):
                setattr(self.pipeline, name, None)

    def video(self, chunks: int = 5, batch: int = 1, given: Tensor | None = None) -> Tensor:
        torch.manual_seed(1)
        noise = torch.randn(batch, 3 * chunks, 16, *LATENT)
        self.pipeline.text_encoder = lambda text_prompts: {"prompt_embeds": prompt(2, batch)}
        more = {} if given is None else {"initial_latent": given}
        with torch.inference_mode(), contextlib.redirect_stdout(io.StringIO()):
            made = self.loop(noise, ["x"] * batch, return_latents=True, **more)
        latents: Tensor = made[1]
        return latents.clone()


def self_forcing(
    pipeline_of: str = "pipeline.causal_inference", loop: str = "inference", **options: Any
) -> Host:
    """The authors' CausalInferencePipeline with a small model."""
    for name in ("wan.modules.attention", "wan.modules.model", "wan.modules.causal_model"):
        module: Any = importlib.import_module(name)
        for call in ("attention", "flash_attention"):
            if hasattr(module, call):
                setattr(module, call, sdpa)
    causal: Any = importlib.import_module("wan.modules.causal_model")
    wrapper: Any = importlib.import_module("utils.wan_wrapper")
    pipeline: Any = importlib.import_module(pipeline_of)

    model = causal.CausalWanModel
    model.from_pretrained = staticmethod(lambda path, **kwargs: model(**SIZE, **kwargs))
    known = inspect.signature(wrapper.WanDiffusionWrapper).parameters
    more = {"checkpoint_path": ""} if "checkpoint_path" in known else {}
    generator = wrapper.WanDiffusionWrapper(
        timestep_shift=5.0, is_causal=True, local_attn_size=WIDE, **more, **options
    )
    weights(generator.model)
    args = SimpleNamespace(
        denoising_step_list=list(STEPS), warp_denoising_step=True, num_frame_per_block=3,
        independent_first_frame=False, context_noise=0,
        model_kwargs=SimpleNamespace(local_attn_size=WIDE),
    )  # fmt: skip
    vae = SimpleNamespace(decode_to_pixel=lambda x, use_cache: x)
    made = pipeline.CausalInferencePipeline(
        args, "cpu", generator=generator, text_encoder=lambda text_prompts: None, vae=vae
    )
    made.frame_seq_length, made.num_transformer_blocks = TOKENS, LAYERS

    own = "kv_cache_clean" if hasattr(made, "kv_cache_clean") else "kv_cache1"

    def initialize(batch_size: int, **kwargs: Any) -> None:
        setattr(made, own, stores(batch_size))

    made._initialize_kv_cache = initialize
    for block in generator.model.blocks:
        block.self_attn.max_attention_size = 10**9
        block.self_attn.frame_length, block.self_attn.block_length = TOKENS, 3 * TOKENS
    return Host(made, loop)


def stores(batch: int) -> list[dict[str, Tensor]]:
    """Their KV cache at this size: its heads are numbers in their code."""
    ends = ("global_end_index", "local_end_index")
    return [
        {name: torch.zeros(batch, WIDE * TOKENS, 2, 128) for name in ("k", "v")}
        | {name: torch.tensor([0]) for name in ends}
        for _ in range(LAYERS)
    ]


class _CausVidPipeline:
    """CausVid's loop over its own model: its pipeline has CUDA in its text."""

    num_frame_per_block, num_transformer_blocks, denoising_step_list = 3, LAYERS, STEPS

    def __init__(self, model: Any) -> None:
        self.generator = SimpleNamespace(model=model)
        self.kv_cache1: list[dict[str, Tensor]] | None = None
        self.text_encoder: Any = None

    def _initialize_kv_cache(self, batch_size: int, dtype: Any, device: Any) -> None:
        self.kv_cache1 = stores(batch_size)

    def inference(
        self, noise: Tensor, text_prompts: list[str], return_latents: bool, initial_latent: Any = ()
    ) -> tuple[None, Tensor]:
        batch, model = noise.shape[0], self.generator.model
        context = self.text_encoder(text_prompts)["prompt_embeds"]
        if self.kv_cache1 is None:
            self._initialize_kv_cache(batch, noise.dtype, noise.device)
        cross = [{"is_init": False} for _ in range(LAYERS)]
        out: list[Tensor] = []

        def run(x: Tensor, t: float) -> Tensor:
            start = sum(part.shape[1] for part in out) * TOKENS
            size = x.shape[1] * TOKENS
            flow = model(
                x.transpose(1, 2), t=torch.full((batch, x.shape[1]), float(t)), context=context,
                seq_len=size, kv_cache=self.kv_cache1, crossattn_cache=cross,
                current_start=start, current_end=start + size,
            )  # fmt: skip
            clean: Tensor = x - t / 1000 * flow.transpose(1, 2)
            return clean

        for part in initial_latent.split(3, 1) if len(initial_latent) else ():
            run(part, 0)
            out.append(part)
        for x in noise.split(3, 1):
            for t in STEPS:
                x = run(x, t)
            run(x, 0)
            out.append(x)
        return None, torch.cat(out, 1)


def causvid() -> Host:
    base = "causvid.models.wan.wan_base.modules"
    for name in (f"{base}.attention", f"{base}.model", "causvid.models.wan.causal_model"):
        module: Any = importlib.import_module(name)
        for call in ("attention", "flash_attention"):
            if hasattr(module, call):
                setattr(module, call, sdpa)
    causal: Any = importlib.import_module("causvid.models.wan.causal_model")
    model = causal.CausalWanModel(**SIZE).eval()
    model.num_frame_per_block = 3
    weights(model)
    return Host(_CausVidPipeline(model))


MAKE: dict[str, Callable[[], Host]] = {
    "self-forcing": self_forcing,
    "reward-forcing": partial(self_forcing, sink_size=3),  # without a sink theirs does not run
    "longlive": self_forcing,
    "infinite-forcing": self_forcing,
    "rolling-forcing": partial(
        self_forcing,
        pipeline_of="pipeline.rolling_forcing_inference",
        loop="inference_rolling_forcing",
    ),
    "causvid": causvid,
}


def checks(host: Host) -> list[dict[str, Any]]:
    """A row a check: relative error to their own video, or whether two are equal to the bit."""
    rows: list[dict[str, Any]] = []

    def add(what: str, plan: str, ours: Tensor, theirs: Tensor) -> None:
        error = float((ours - theirs).norm() / theirs.norm())
        rows.append({"check": what, "plan": plan, "error": error, "equal": error == 0})

    cases = host.cases()
    whole, *others = cases
    own = {}
    for what, options in cases.items():
        host.fresh()
        own[what] = host.video(**options)
    for plan in ("dense", "lossless", "balanced", "fast", "live"):
        host.fresh()
        with ts.accelerate(host.pipeline, plan) as handle:
            first = host.video()
            rows.append({"check": "counted", "plan": plan, "density": handle.stats()["density"]})
            add(whole, plan, first, own[whole])
            add("a second video", plan, host.video(), first)
            for what in others if plan in ("dense", "lossless") else ():
                host.fresh()
                add(what, plan, host.video(**cases[what]), own[what])
    host.fresh()
    add("removed", "dense", host.video(), own[whole])
    return rows


def report(make: Callable[[], Host], folder: str) -> None:
    """Print the checks of what `make` builds of the code in a folder."""
    sys.path.insert(0, folder)
    sys.meta_path.insert(0, _Unused())
    torch.set_num_threads(1)
    same: Any = lambda f=None, **kwargs: f if f is not None else (lambda g: g)  # noqa: E731
    torch.compile = same
    torch.cuda.current_device = lambda: 0
    print(json.dumps(checks(make())))


if __name__ == "__main__":
    report(MAKE[sys.argv[1]], sys.argv[2])
