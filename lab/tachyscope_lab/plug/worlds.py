"""Authors' world models and ours on the same small random weights: what differs in the latents.

python -m tachyscope_lab.plug.worlds FAMILY FOLDER

Their networks, caches and schedules run as they are, attention by PyTorch; loops that have CUDA or
files in their text are stated again here, call by call.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import tachyscope as ts
from tachyscope.models.wan import key_camera
from tachyscope.models.wan.action_modules import LAYOUTS, tables
from tachyscope.models.wan.clip_vision import encode
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.plain_parts import Preview
from tachyscope.models.wan.presets import PRESETS
from tachyscope.models.wan.random import random_wan
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope.models.wan.vae import WanVae
from tachyscope.models.wan.vae_5b import MEAN, STD
from tachyscope_lab.plug.host import Torch, sdpa

SMALL: dict[str, Any] = {
    "dim": 256, "ffn_dim": 512, "layers": 2, "heads": 2, "in_channels": 4, "text_dim": 48,
    "text_len": 16, "freq_dim": 64,
}  # fmt: skip
SEED, PROMPT = 7, "a"
Compared = tuple[str, Tensor, Tensor]  # what, ours, theirs
WALK = "wwwqqq..ljjwisadekkwwwqqaalewwww"  # an action a latent frame


def small(name: str, **changes: Any) -> WanModel:
    """A preset at a small size, with a small VAE of Wan 2.1's layout."""
    from diffusers import AutoencoderKLWan

    model = random_wan(replace(PRESETS[name].config, **(SMALL | changes)), seed=3, name=name)
    channels = model.config.in_channels
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=channels, latents_mean=[0.1] * channels, latents_std=[0.5] * channels
    )
    model.decoder = WanVae(vae)
    return model


def picture(model: WanModel) -> np.ndarray:
    """A smooth picture of the model's size, [1, H, W, 3]."""
    high, wide = model.size
    rows, columns = np.mgrid[:high, :wide]
    waves = [np.sin(rows / (5 + i)) * np.cos(columns / (7 - i)) for i in range(3)]
    return (127 + 120 * np.stack(waves, -1))[None].astype(np.uint8)


def ours(model: WanModel, walk: str) -> Tensor:
    """Latents [C, F, h, w] of a walk behind the picture, an action a latent frame."""
    chunk, found = model.config.chunk, []
    prompt = "" if model.config.action_modules else PROMPT
    with ts.open(model, "stock", prompt=prompt, seed=SEED, first=picture(model)) as stream:
        for i in range(0, len(walk), chunk):
            held = [key for key in walk[i : i + chunk] for _ in range(4)]
            stream.step(held[0 if i else 3 :])  # a video's first latent frame is one frame
            latents = stream.session.memory.latents
            assert latents is not None
            found.append(latents[0])
    return torch.cat(found, 1)


def draws(model: WanModel) -> Iterator[Tensor]:
    """The noise [C, F, h, w] that a stream of the same seed draws, one after another."""
    rng = torch.Generator().manual_seed(SEED)
    size = model.config.in_channels, model.config.chunk, *model.config.size
    while True:
        yield torch.randn(1, *size, generator=rng)[0]


def module_at(path: Path, name: str) -> Any:
    """A module of one file, whatever package it lies in."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def stand_in(name: str, **members: Any) -> ModuleType:
    """A module of a few names, in the place of one that would import much more."""
    made = sys.modules[name] = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    return made


def cache(entries: int, layers: int, **more: Any) -> list[dict[str, Any]]:
    """A KV cache as these authors keep it, two heads of 128."""
    names = ("global_end_index", "local_end_index")
    return [
        {name: torch.zeros(1, entries, 2, 128) for name in ("k", "v")}
        | {name: torch.tensor([0]) for name in names}
        | {name: torch.tensor([x]) for name, x in more.items()}
        for _ in range(layers)
    ]


class _Dit(torch.nn.Module):
    """FastVideo's base class, as far as a network needs it."""

    def __init__(self, config: Any = None, hf_config: Any = None) -> None:
        super().__init__()

    def __post_init__(self) -> None:
        return


def lingbot(folder: Path, name: str) -> list[Compared]:
    """FastVideo's network, camera and schedule in its pipeline's loop."""
    stand_in("fastvideo.configs.models.dits.lingbotworld2", LingBotWorld2CausalFastVideoConfig=None)
    stand_in(
        "fastvideo.distributed.communication_op", sequence_model_parallel_all_gather=None,
        sequence_model_parallel_all_to_all_4D=None,
    )  # fmt: skip
    stand_in(
        "fastvideo.distributed.parallel_state", get_sp_parallel_rank=lambda: 0,
        get_sp_world_size=lambda: 1,
    )  # fmt: skip
    stand_in("fastvideo.models.dits.base", BaseDiT=_Dit)
    backends = SimpleNamespace(FLASH_ATTN=0, TORCH_SDPA=1)
    stand_in("fastvideo.platforms", AttentionBackendEnum=backends)
    at = folder / "fastvideo" / "models"
    module_at(at / "schedulers/base.py", "fastvideo.models.schedulers.base")
    unipc = module_at(at / "schedulers/scheduling_flow_unipc_multistep.py", "fv_unipc")
    camera = module_at(at / "dits/lingbotworld2/cam_utils.py", "fv_camera")
    network = module_at(at / "dits/lingbotworld2/causal_fast.py", "fv_network")
    network.attention = network.flash_attention = sdpa

    model = small(name, size=(8, 12))
    c, high, wide = model.config, *model.size
    config = SimpleNamespace(
        model_type="i2v", patch_size=c.patch, text_len=c.text_len, dim=c.dim, ffn_dim=c.ffn_dim,
        in_dim=c.in_channels + c.condition_channels, out_dim=c.in_channels, freq_dim=c.freq_dim,
        text_dim=c.text_dim, num_heads=c.heads, num_layers=c.layers, qk_norm=True, eps=c.eps,
        cross_attn_norm=True, local_attn_size=18, sink_size=6,
    )  # fmt: skip
    theirs = network.LingBotWorld2CausalFastTransformer3DModel(config, {})
    theirs.load_state_dict(model.transformer.state_dict())

    poses = torch.eye(4, dtype=torch.float64).repeat(len(WALK), 1, 1)
    moves = key_camera.motions(torch.device("cpu"))
    for i, key in enumerate(WALK[1:], 1):
        move = torch.eye(4, dtype=torch.float64)
        move[:3] = moves[key_camera.ACTIONS.index(key)]
        poses[i] = poses[i - 1] @ move
    lens = torch.tensor([[415.53, 415.69, 415.78, 239.78]], dtype=torch.float64)
    size = {f"{side}_{kind}": n for side, n in (("height", high), ("width", wide))
            for kind in ("resize", "final")}  # fmt: skip
    lens = camera.get_Ks_transformed(lens, height_org=480, width_org=832, **size)
    relative = camera.compute_relative_poses(poses, framewise=True)
    rays = camera.get_plucker_embeddings(relative, lens, high, wide)
    rays = rays.unflatten(2, (-1, 8)).unflatten(1, (-1, 8)).permute(5, 2, 4, 0, 1, 3)
    rays = rays.flatten(0, 2)[None].float()  # [1, 6 · 8 · 8, F, h, w]

    frames = 4 * len(WALK) - 3
    video = torch.full((frames, high, wide, 3), 127.5)
    video[:1] = torch.from_numpy(picture(model))
    mask = torch.zeros(4, len(WALK), *c.size)
    mask[:, 0] = 1
    beside = torch.cat([mask, model.decoder.encode(video)[0]])  # type: ignore[union-attr]
    steps = unipc.FlowUniPCMultistepScheduler(shift=1.0, use_dynamic_shifting=False)
    steps.set_timesteps(1000, shift=c.shift)
    times = steps.timesteps[[0, 250, 500, 750]]
    tokens, drawn, done = c.size[0] * c.size[1] // 4, draws(model), []
    kept = cache(18 * tokens, c.layers)
    text = [
        {"k": torch.zeros(1, c.text_len, 2, 128), "v": torch.zeros(1, c.text_len, 2, 128),
         "is_init": torch.tensor([0])}
        for _ in range(c.layers)
    ]  # fmt: skip
    for n in range(len(WALK) // 4):
        own = slice(4 * n, 4 * n + 4)
        asked: dict[str, Any] = {
            "context": [model.text(PROMPT)[0][0]], "seq_len": 4 * tokens,  # type: ignore[misc]
            "y": [beside[:, own]], "dit_cond_dict": {"c2ws_plucker_emb": (rays[:, :, own],)},
            "kv_cache": kept, "crossattn_cache": text, "current_start": 4 * n * tokens,
            "max_attention_size": 18 * tokens, "frame_seqlen": tokens,
        }  # fmt: skip
        x = clean = next(drawn)
        for i, time in enumerate(times):
            flow = theirs(x=[x], t=time[None], **asked)[0]
            sigma = steps.sigmas[(steps.timesteps.double() - time).abs().argmin()].double()
            clean = (x.double() - sigma * flow.double()).float()
            if i + 1 < len(times):
                x = steps.add_noise(clean, next(drawn), times[i + 1][None])
        done.append(clean)
        theirs(x=[clean], t=times[-1:] * 0.0, **asked)
    return [(f"{len(WALK)} latent frames by keys", ours(model, WALK), torch.cat(done, 1))]


def abot(folder: Path, name: str) -> list[Compared]:
    """Its pipeline, network, schedule and VAE, and its tiny decoder's class."""
    sys.path.insert(0, str(folder))
    nothing: Any = lambda *args, **kwargs: None  # noqa: E731
    torch.cuda.synchronize = nothing
    stand_in("wan").__path__ = [str(folder / "wan")]
    stand_in("wan.modules").__path__ = [str(folder / "wan" / "modules")]
    stand_in("wan.modules.attention", attention=sdpa, flash_attention=sdpa)
    stand_in("wan.modules.tokenizers", HuggingfaceTokenizer=None)
    stand_in("wan.modules.t5", umt5_xxl=None)
    stand_in(
        "utils.memory", gpu=None, get_cuda_free_memory_gb=nothing, DynamicSwapInstaller=None,
        move_model_to_device_with_memory_preservation=nothing,
    )  # fmt: skip
    wrapper: Any = importlib.import_module("utils.wan_wrapper")
    pipeline: Any = importlib.import_module("pipeline.causal_inference")
    causal: Any = importlib.import_module("wan.modules.causal_model")
    vae: Any = importlib.import_module("wan.modules.vae2_2")
    tiny: Any = importlib.import_module("wan.modules.taehv")

    model = small(name, in_channels=48, size=(6, 14))
    c, tokens, (high, wide) = model.config, 21, model.size
    torch.manual_seed(0)
    own = vae.WanVAE_(dim=8, dec_dim=8, z_dim=48, dim_mult=[1, 2, 4, 4], num_res_blocks=2,
                      attn_scales=[], temperal_downsample=[False, True, True])  # fmt: skip
    with tempfile.TemporaryDirectory() as files:
        torch.save(own.state_dict(), Path(files) / "Wan2.2_VAE.pth")
        model.decoder = WanVae.read(Path(files))

    made = causal.CausalWanModel(
        model_type="ci2v", in_dim=48, out_dim=48, dim=c.dim, ffn_dim=c.ffn_dim, num_heads=c.heads,
        freq_dim=c.freq_dim, text_dim=c.text_dim, text_len=c.text_len, num_layers=c.layers,
        local_attn_size=21, use_relative_rope=True, downscale_factor_control_adapter=16,
    )  # fmt: skip
    made.load_state_dict(model.transformer.state_dict())
    for block in made.blocks:
        block.self_attn.max_attention_size = 21 * tokens
    causal.CausalWanModel.from_pretrained = staticmethod(lambda *args, **kwargs: made)
    generator = wrapper.WanDiffusionWrapper(timestep_shift=5.0, is_causal=True, model_type="ci2v")
    encoder = wrapper.WanVAEWrapper.__new__(wrapper.WanVAEWrapper)
    torch.nn.Module.__init__(encoder)
    encoder.model, encoder.mean, encoder.std = own, torch.tensor(MEAN), torch.tensor(STD)
    args = SimpleNamespace(
        model_kwargs={}, model_type="t2v", denoising_step_list=[1000, 750, 500, 250],
        warp_denoising_step=True, image_or_video_shape=[1, 31, 48, *c.size],
        num_frame_per_block=3, independent_first_frame=True, context_noise=0,
    )  # fmt: skip
    text = model.text(PROMPT)[0]  # type: ignore[misc]
    theirs = pipeline.CausalInferencePipeline(
        args, torch.device("cpu"), generator=generator, vae=encoder,
        text_encoder=lambda **more: {"prompt_embeds": text},
    )  # fmt: skip
    theirs.num_transformer_blocks = c.layers
    theirs.set_prompts([PROMPT], device=torch.device("cpu"))
    theirs.reset_stream(1, torch.float32, torch.device("cpu"))
    shown = torch.from_numpy(picture(model)).permute(3, 0, 1, 2)[None] / 127.5 - 1
    theirs.conditional_dict["first_frame_latents"] = encoder.encode_to_latent(shown)
    walk, drawn, done = WALK[:27], draws(model), []
    # a pipeline that adds noise draws it by itself: from the same source
    pipeline.torch = Torch(randn_like=lambda x: next(drawn).transpose(0, 1))
    for i in range(0, len(walk), 3):
        parts = []
        for key in walk[i : i + 3]:
            down = {letter.upper(): letter in key_camera.pressed(key) for letter in "wasdijkl"}
            theirs.set_act(down, height=high, width=wide, num_frames=1)
            parts.append(theirs.conditional_dict["act_context"].float())
        theirs.conditional_dict["act_context"] = torch.cat(parts, 2)
        latents = theirs.generate_next_block(next(drawn).transpose(0, 1)[None])
        done.append(latents[0].transpose(0, 1))
    expected = torch.cat(done, 1)
    video = torch.randint(0, 256, (9, high, wide, 3), generator=torch.Generator().manual_seed(1))
    encoded = encoder.encode_to_latent(video.permute(3, 0, 1, 2)[None] / 127.5 - 1)
    return [
        (f"{len(walk)} latent frames by keys", ours(model, walk), expected),
        ("9 frames encoded", model.decoder.encode(video)[0].transpose(0, 1), encoded[0]),
        _warmed(model, tiny, expected),
    ]


def _warmed(model: WanModel, tiny: Any, latents: Tensor) -> Compared:
    """Frames of a tiny decoder that has seen the first latent frame before."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as files:
        plain = tiny.TAEHV(None, patch_size=2, latent_channels=48).eval()
        torch.save(plain.state_dict(), Path(files) / "taew2_2.pth")
        decoder = TinyDecoder.read(Path(files) / "taew2_2.pth", model.config)
    streaming, parts = tiny.StreamingTAEHV(plain), latents.transpose(0, 1)[None]
    streaming.decode(parts[:, :1])
    # of the first latent frame its last picture is the video's first
    expected = torch.cat([streaming.decode(part) for part in parts.split(3, 1)], 1)[0, 3:]
    features: dict[str, Tensor] = {}
    found = torch.cat([decoder.levels(part, features) for part in latents[None].split(3, 2)]) / 255
    return "a warm tiny decoder's frames", found.permute(0, 3, 1, 2), expected


class _Pooled(Preview):
    """An encoder of nothing but means."""

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        pixels = torch.as_tensor(frames).float().permute(3, 0, 1, 2) / 127.5 - 1
        pixels = torch.cat([pixels[:, :1]] * 3 + [pixels], 1)
        return torch.einsum("kc,kfhw->cfhw", self.weight, F.avg_pool3d(pixels, self.stride))[None]


def matrix(folder: Path, name: str) -> list[Compared]:
    """Its pipeline, network and schedule, and its copy of CLIP."""
    folder = folder / "Matrix-Game-2"
    sys.path.insert(0, str(folder))
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    same: Any = lambda f=None, **kwargs: f if f is not None else (lambda g: g)  # noqa: E731
    torch.compile = same
    stand_in("wan").__path__ = [str(folder / "wan")]
    stand_in("wan.modules").__path__ = [str(folder / "wan" / "modules")]
    stand_in("wan.modules.attention", attention=sdpa, flash_attention=sdpa)
    stand_in("wan.modules.tokenizers", HuggingfaceTokenizer=None)
    stand_in("wan.modules.vae", _video_vae=None)
    stand_in("wan.modules.xlm_roberta", XLMRoberta=torch.nn.Module)
    stand_in("flash_attn", flash_attn_func=sdpa)
    stand_in("utils.visualize", process_video=None)
    stand_in("demo_utils.constant", ZERO_VAE_CACHE=[])
    stand_in("pipeline").__path__ = [str(folder / "pipeline")]
    wrapper: Any = importlib.import_module("utils.wan_wrapper")
    pipeline: Any = importlib.import_module("pipeline.causal_inference")
    stand_in("torchvision").__path__ = []
    stand_in("torchvision.transforms")
    clip: Any = importlib.import_module("wan.modules.clip")

    mode = {"walk": "universal", "drive": "gta_drive", "run": "templerun"}
    model = small(name, in_channels=16, size=(44, 80), text_dim=1280, text_len=257)
    c, layout = model.config, LAYOUTS[model.config.control]
    model.decoder = _Pooled.seeded(c, 0)
    file = folder / "configs" / "distilled_model" / mode[c.control] / "config.json"
    stated = json.loads(file.read_text())
    stated["action_config"] |= {"blocks": [0], "img_hidden_size": c.dim}
    stated |= {"dim": c.dim, "ffn_dim": c.ffn_dim, "freq_dim": c.freq_dim, "num_heads": c.heads,
               "num_layers": c.layers}  # fmt: skip
    generator = wrapper.WanDiffusionWrapper(stated)
    generator.model.load_state_dict(model.transformer.state_dict())
    window, tokens = stated["local_attn_size"], 880
    args = SimpleNamespace(
        denoising_step_list=list(c.steps), warp_denoising_step=True, num_frame_per_block=3,
        context_noise=0,
    )  # fmt: skip
    theirs = pipeline.CausalInferencePipeline(
        args, "cpu", generator=generator, vae_decoder=lambda x, *kept: (x, [])
    )
    theirs.num_transformer_blocks = c.layers

    def initialize(**more: Any) -> None:
        theirs.kv_cache1 = cache(window * tokens, c.layers)
        for name, rows in (("kv_cache_mouse", tokens), ("kv_cache_keyboard", 1)):
            setattr(theirs, name, [
                kept | {n: torch.zeros(rows, window, 16, 64) for n in ("k", "v")}
                for kept in cache(1, c.layers)
            ])  # fmt: skip

    theirs._initialize_kv_cache = theirs._initialize_kv_cache_mouse_and_keyboard = initialize
    walk = WALK[:12] if c.control == "walk" else "wwqaae..dsqq"
    film = [walk[0]] + [key for key in walk[1:] for _ in range(4)]
    keyboard, mouse, _ = tables(c.control, torch.device("cpu"))
    numbers = [layout.actions.index(key) for key in film]
    first = picture(model)
    video = torch.full((len(film), *first.shape[1:]), 127.5)
    video[:1] = torch.from_numpy(first)
    beside = model.decoder.encode(video)
    mask = torch.zeros(1, 4, *beside.shape[2:])
    mask[:, :, 0] = 1
    cond = {
        "cond_concat": torch.cat([mask, beside], 1), "visual_context": model.embed_images([first]),
        "keyboard_cond": keyboard[numbers][None].float(),
    } | ({"mouse_cond": mouse[numbers][None].float()} if layout.mouse else {})  # fmt: skip
    drawn = draws(model)
    noise = [[next(drawn) for _ in c.steps] for _ in range(len(walk) // 3)]
    later = iter([x for each in noise for x in each[1:]])
    pipeline.torch = Torch(randn_like=lambda x: next(later).transpose(0, 1))
    expected = theirs.inference(
        torch.cat([each[0] for each in noise], 1)[None], cond, return_latents=True,
        mode=mode[c.control],
    )[0]  # fmt: skip
    return [(f"{len(walk)} latent frames by keys", ours(model, walk), expected), _seen(clip)]


def _seen(clip: Any) -> Compared:
    """What CLIP sees, up to the layer before its last."""
    torch.manual_seed(0)
    theirs = clip.VisionTransformer(
        image_size=28, patch_size=14, dim=128, num_heads=16, num_layers=3, out_dim=8,
        activation="gelu",
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 28, 28)
    return "CLIP's tokens", encode(theirs.state_dict(), x), theirs(x, use_31_block=True)


WORLDS: dict[str, Callable[[Path, str], list[Compared]]] = {
    **dict.fromkeys(("matrix-game-2", "matrix-game-2-drive", "matrix-game-2-run"), matrix),
    "abot-world": abot,
    "lingbot-world": lingbot,
    "lingbot-world-14b": lingbot,
}


def report(compare: Callable[[], list[Compared]]) -> None:
    """Print a row for each of what was compared."""
    torch.set_num_threads(1)
    with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
        compared = compare()
    rows = []
    for check, found, expected in compared:
        error = float((found - expected).norm() / expected.norm())
        rows.append({"check": check, "plan": "stock", "error": error, "equal": error == 0})
    print(json.dumps(rows))


def main(family: str, folder: str) -> None:
    report(lambda: WORLDS[family](Path(folder), family))


if __name__ == "__main__":
    main(*sys.argv[1:])
