"""Published Wan-type causal models: each one's numbers, schedule and way of remembering."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tachyscope.errors import TachyscopeError
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.context import Alone, Recache, Restart, Rolling
from tachyscope.models.wan.download import HubFiles
from tachyscope.models.wan.loading import load_wan
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope.models.wan.toy import random_wan
from tachyscope.models.wan.transformer import WanCausal
from tachyscope.models.wan.vae import WanVae


@dataclass(frozen=True)
class Preset:
    """A published model: a sentence, the configuration its authors run, and which copy."""

    about: str
    config: WanConfig
    entry: str = "generator_ema"  # where a trainer's file holds several copies
    hub: HubFiles | None = None  # None where it is not known which files these are


def _stock(cache: str) -> str:
    return f"cache={cache} attention=dense text=dense replay=none"


# a video of at most 21 latent frames, all in view; a longer one sees its newest
NEWEST = _stock("window:budget=21f,sink=0")
FOUR = (1000, 750, 500, 250)
CAUSAL_FORCING = "zhuhz22/Causal-Forcing"

# what a configuration leaves out is Self-Forcing's
PRESETS = {
    "self-forcing": Preset(
        "Self-Forcing: Wan 1.3B, 4 steps",
        WanConfig(stock=NEWEST),
        hub=HubFiles("gdhe17/Self-Forcing", "checkpoints/self_forcing_dmd.pt"),
    ),
    "causal-forcing": Preset(
        "Causal-Forcing by chunks: Wan 1.3B, 4 steps",
        WanConfig(stock=NEWEST),
        "generator",
        HubFiles(CAUSAL_FORCING, "chunkwise/causal_forcing.pt"),
    ),
    "causal-forcing-framewise": Preset(
        "Causal-Forcing by latent frames: Wan 1.3B, 4 steps",
        WanConfig(chunk=1, stock=NEWEST),
        hub=HubFiles(CAUSAL_FORCING, "framewise/causal_forcing.pt"),
    ),
    "causal-forcing-2step": Preset(
        "Causal-Forcing++ by latent frames: Wan 1.3B, 2 steps, 4 for the first frame",
        WanConfig(chunk=1, steps=(1000, 500), first_steps=FOUR, stock=NEWEST),
        hub=HubFiles(CAUSAL_FORCING, "causal-forcing++/framewise-2step.pt"),
    ),
    "causal-forcing-1step": Preset(
        "Causal-Forcing++ by latent frames: Wan 1.3B, 1 step, 4 for the first frame",
        WanConfig(chunk=1, steps=(1000,), first_steps=FOUR, stock=NEWEST),
        hub=HubFiles(CAUSAL_FORCING, "causal-forcing++/framewise-1step.pt"),
    ),
    "causvid": Preset(
        "CausVid: Wan 1.3B, 3 steps",
        WanConfig(
            steps=(1000, 757, 522),
            warp=False,
            shift=8.0,
            context=Restart(frames=21, reencode=True),
            stock=NEWEST,
        ),
        "generator",
        HubFiles("tianweiy/CausVid", "autoregressive_checkpoint/model.pt"),
    ),
    "rolling-forcing": Preset(
        "Rolling-Forcing: Wan 1.3B, 5 chunks at 5 steps together",
        WanConfig(
            steps=(1000, 800, 600, 400, 200),
            context=Rolling(),
            # 15 latent frames under way, the first 3 and the newest 18
            stock=_stock("window:budget=36f,sink=3,positions=reindexed,view=21f"),
        ),
        hub=HubFiles("TencentARC/RollingForcing", "checkpoints/rolling_forcing_dmd.pt"),
    ),
    "longlive": Preset(
        "LongLive 1: Wan 1.3B, 4 steps; its LoRA is a file of its own",
        WanConfig(context=Recache(window=12, sink=3), stock=_stock("window:budget=12f,sink=3")),
        "generator",
        HubFiles(
            "Efficient-Large-Model/LongLive-1.3B", "models/longlive_base.pt", "models/lora.pt"
        ),
    ),
    "infinite-forcing": Preset(
        "Infinite-Forcing: Wan 1.3B, 4 steps",
        WanConfig(stock=_stock("window:budget=6f,sink=1,positions=reindexed")),
    ),
    "reward-forcing": Preset(
        "Reward-Forcing: Wan 1.3B, 4 steps",
        WanConfig(stock=_stock("window:budget=9f,sink=3,positions=reindexed,fold=0.999")),
    ),
    "krea": Preset(
        "Krea Realtime: Wan 14B, 5 steps",
        WanConfig(
            dim=5120,
            ffn_dim=13824,
            layers=40,
            heads=40,
            steps=(*FOUR, 0),
            context=Alone(reencode=True),
            stock=_stock("window:budget=6f,sink=0"),
        ),
        hub=HubFiles(
            "krea/krea-realtime-video",
            "krea-realtime-video-14b.safetensors",
            wan="Wan-AI/Wan2.1-T2V-14B",
        ),
    ),
}

# published sizes, for which no checkpoint is needed
SIZES = {
    "wan_1.3b": WanConfig(),
    "wan_5b": WanConfig(
        dim=3072, ffn_dim=14336, heads=24, in_channels=48, size=(44, 80), stride=(4, 16, 16)
    ),
    "wan_14b": WanConfig(dim=5120, ffn_dim=13824, layers=40, heads=40),
}


def sized_wan(name: str, dtype: torch.dtype) -> WanModel:
    """A published model or size whose weights are shapes alone, on the meta device."""
    config = SIZES[name] if name in SIZES else PRESETS[name].config
    with torch.device("meta"):
        transformer = WanCausal(config).cast(dtype)
        decoder = WanVae.sized(config.in_channels, dtype)
    return WanModel(name, transformer, None, decoder)


def load_preset(
    name: str,
    weights: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    lora: Path | str | None = None,
    lora_alpha: float | None = None,
    decoder: Path | str | None = None,
    decoder_check: bool = False,
) -> WanModel:
    """A published model from its checkpoint.

    `random` makes its weights up, for a clock; `download` fetches them from Hugging Face, where
    LongLive's LoRA comes with them.
    """
    preset, parts = PRESETS[name], None
    if str(weights) == "download":
        if preset.hub is None:
            raise TachyscopeError(
                f"which published files are {name}'s is not known here, got weights='download': "
                f"give the path of its checkpoint"
            )
        weights, parts, published = preset.hub.fetch(name)
        lora = published if lora is None else lora
    if str(weights) != "random":
        return load_wan(
            weights, device, dtype, preset.config, decoder=decoder, decoder_check=decoder_check,
            lora=lora, lora_alpha=lora_alpha, preset=name, entry=preset.entry, parts=parts,
        )  # fmt: skip
    if lora is not None:
        raise TachyscopeError("random weights take no LoRA: leave `lora` out, or give a checkpoint")
    # a preview cannot encode what it shows
    config = replace(preset.config, context=preset.config.context.without_reencoding())
    made = random_wan(config, device=device, dtype=dtype, name=name)
    if decoder is not None:
        made.decoder = TinyDecoder.read(decoder, config, device, dtype, check=decoder_check)
    return made
