"""Published Wan-type causal models: configuration, files and licence of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.wan.action_modules import LAYOUTS
from tachyscope.models.wan.clip_vision import PUBLISHED as CLIP
from tachyscope.models.wan.clip_vision import TOKENS, WIDTH, ClipVisionSize
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.context import Alone, Kept, Recache, Restart, Rolling
from tachyscope.models.wan.download import TOKENIZER, HubFiles
from tachyscope.models.wan.key_camera import ACTIONS
from tachyscope.models.wan.loading import load_wan
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.random import random_wan
from tachyscope.models.wan.sizes import Umt5Size, VaeSize
from tachyscope.models.wan.text import PUBLISHED as UMT5
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope.models.wan.transformer import WanCausal
from tachyscope.models.wan.vae import PUBLISHED as VAE
from tachyscope.models.wan.vae import PUBLISHED_5B


@dataclass(frozen=True)
class Preset:
    """A published model, as its authors run it."""

    about: str
    config: WanConfig
    entry: str = "generator_ema"  # the copy of the weights in a file that has several
    hub: HubFiles | None = None  # None if its files are not known
    licence: str = "see its card"  # of the weights


def _stock(cache: str) -> str:
    return f"cache={cache} attention=dense text=dense replay=none"


# the authors' videos end at 21 latent frames; longer ones see the newest 21
NEWEST = _stock("window:budget=21f,sink=0")
FOUR = (1000, 750, 500, 250)
CAUSAL_FORCING = "zhuhz22/Causal-Forcing"
LINGBOT_1_3B = "robbyant/lingbot-world-v2-1.3b-causal-fast"
LINGBOT_14B = "robbyant/lingbot-world-v2-14b-causal-fast"
ABOT = "acvlab/ABot-World-0-5B-LF"
LINGBOT = WanConfig(
    chunk=4,
    image="channels",
    actions=ACTIONS,
    control="rays",
    levels_of="unipc",
    context=Kept(),
    size=(58, 104),
    stock=_stock("window:budget=18f,sink=6"),
)

MATRIX_GAME = "Skywork/Matrix-Game-2.0"
MATRIX_PARTS: dict[str, Any] = {"wan": MATRIX_GAME, "parts": (VAE, CLIP)}
MATRIX = WanConfig(
    text_dim=WIDTH,
    text_len=TOKENS,
    image="channels",
    actions=LAYOUTS["walk"].actions,
    control="walk",
    reach=6,
    steps=(1000, 666, 333),
    context=Kept(),
    size=(44, 80),
    fps=25,
    stock=_stock("window:budget=6f,sink=0"),
)

# WanConfig's defaults are Self-Forcing's
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
        "CC BY-NC-SA 4.0",
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
        licence="academic use",
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
    "lingbot-world": Preset(
        "LingBot-World 2.0: Wan 1.3B, a picture walked through by keys, 4 steps",
        LINGBOT,
        hub=HubFiles(LINGBOT_1_3B, "model.safetensors.index.json", wan=LINGBOT_14B),
        licence="CC BY-NC-SA 4.0",
    ),
    "lingbot-world-14b": Preset(
        "LingBot-World 2.0: Wan 14B, a picture walked through by keys, 4 steps",
        replace(LINGBOT, dim=5120, ffn_dim=13824, layers=40, heads=40, shift=10.0),
        hub=HubFiles(
            LINGBOT_14B,
            "transformers/diffusion_pytorch_model.safetensors.index.json",
            wan=LINGBOT_14B,
        ),
        licence="CC BY-NC-SA 4.0",
    ),
    "abot-world": Preset(
        "ABot-World-0-5B-LF: Wan 5B, a picture walked through by keys, 4 steps",
        WanConfig(
            dim=3072,
            ffn_dim=14336,
            heads=24,
            in_channels=48,
            image="held",
            actions=ACTIONS,
            control="keys",
            context=Kept(),
            size=(44, 80),
            stride=(4, 16, 16),
            fps=12,
            stock=_stock("window:budget=21f,sink=0,positions=reindexed"),
        ),
        hub=HubFiles(
            ABOT,
            "diffusion_pytorch_model.safetensors",
            wan=ABOT,
            parts=(UMT5, PUBLISHED_5B, TOKENIZER),
        ),
        licence="Apache-2.0",
    ),
    "matrix-game-2": Preset(
        "Matrix-Game 2: Wan 1.3B, a picture walked through by keys and mouse, 3 steps",
        MATRIX,
        hub=HubFiles(MATRIX_GAME, "base_distilled_model/base_distill.safetensors", **MATRIX_PARTS),
        licence="MIT",
    ),
    "matrix-game-2-drive": Preset(
        "Matrix-Game 2 for driving: Wan 1.3B, a picture driven through by keys, 3 steps",
        replace(
            MATRIX,
            actions=LAYOUTS["drive"].actions,
            control="drive",
            reach=4,
            stock=_stock("window:budget=4f,sink=0"),
        ),
        hub=HubFiles(
            MATRIX_GAME, "gta_distilled_model/gta_keyboard2dim.safetensors", **MATRIX_PARTS
        ),
        licence="MIT",
    ),
    "matrix-game-2-run": Preset(
        "Matrix-Game 2 for running: Wan 1.3B, a picture run through by keys, 4 steps",
        replace(MATRIX, actions=LAYOUTS["run"].actions, control="run", steps=FOUR),
        hub=HubFiles(
            MATRIX_GAME,
            "templerun_distilled_model/templerun_7dim_onlykey.safetensors",
            **MATRIX_PARTS,
        ),
        licence="MIT",
    ),
}

# sizes of published models, by which memory is predicted
SIZES = {
    "wan_1.3b": WanConfig(),
    "wan_5b": WanConfig(
        dim=3072, ffn_dim=14336, heads=24, in_channels=48, size=(44, 80), stride=(4, 16, 16)
    ),
    "wan_14b": WanConfig(dim=5120, ffn_dim=13824, layers=40, heads=40),
}


def sized_wan(name: str, dtype: torch.dtype, decoder: Path | str | None = None) -> WanModel:
    """A published model or size on the meta device.

    Its decoder is Wan's VAE, or the tiny decoder in a file.
    """
    config = SIZES[name] if name in SIZES else PRESETS[name].config
    with torch.device("meta"):
        transformer = WanCausal(config).cast(dtype)
        vae = VaeSize(config.in_channels, dtype)
    text: Any = ClipVisionSize() if config.action_modules else Umt5Size()
    if decoder is None:
        return WanModel(name, transformer, text, vae)
    tiny = TinyDecoder.read(decoder, config, dtype=dtype)
    return WanModel(name, transformer, text, tiny).on_meta()


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
    """Load a published model from its checkpoint.

    weights: a path; "random" for random weights, to measure time; or "download" to fetch them from
    Hugging Face, with LongLive's LoRA.
    """
    preset, parts = PRESETS[name], None
    revisions: dict[str, str] = {}
    if str(weights) == "download":
        if preset.hub is None:
            raise TachyscopeError(
                f"which published files are {name}'s is not known here, got weights='download': "
                f"give the path of its checkpoint"
            )
        weights, parts, published, revisions = preset.hub.fetch(name)
        lora = published if lora is None else lora
    if str(weights) != "random":
        model = load_wan(
            weights, device, dtype, preset.config, decoder=decoder, decoder_check=decoder_check,
            lora=lora, lora_alpha=lora_alpha, preset=name, entry=preset.entry, parts=parts,
        )  # fmt: skip
        model.revisions = revisions
        return model
    if lora is not None:
        raise TachyscopeError("random weights take no LoRA: leave `lora` out, or give a checkpoint")
    # a preview cannot encode
    config = replace(preset.config, context=preset.config.context.without_reencoding())
    made = random_wan(config, device=device, dtype=dtype, name=name)
    if decoder is not None:
        made.decoder = TinyDecoder.read(decoder, config, device, dtype, check=decoder_check)
    return made
