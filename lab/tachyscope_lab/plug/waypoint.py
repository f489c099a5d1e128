"""A process that runs Overworld's engine beside ours on small random weights.

python -m tachyscope_lab.plug.waypoint waypoint FOLDER

Its public repository is of before 1.5: the same network under other names, and with other defaults
of its windows; what 1.5 added there is not in it. It needs einops and rotary-embedding-torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

import tachyscope as ts
from tachyscope.models.waypoint.config import WaypointConfig
from tachyscope.models.waypoint.controls import PRESSES
from tachyscope.models.waypoint.loading import file_names, random_waypoint
from tachyscope.models.waypoint.model import WaypointModel
from tachyscope.models.waypoint.transformer import Block
from tachyscope_lab.plug.host import Torch
from tachyscope_lab.plug.worlds import SEED, Compared, report, stand_in

CONFIG = WaypointConfig(
    d_model=256, n_layers=8, n_heads=4, n_kv_heads=2, channels=8, height=8, width=16,
    local_window=4, global_window=16, global_pinned_dilation=4,
)  # fmt: skip
WALK = "wwwqqq.+ljjwuisadekk-wwrqqfaalewwww"


def draws(model: WaypointModel) -> Iterator[Tensor]:
    """The noise [1, 1, C, h, w] that a stream of the same seed draws."""
    rng = torch.Generator().manual_seed(SEED)
    _, channels, _, *sides = model.latent_size(model.shape(), 1)
    while True:
        yield torch.randn(1, channels, 1, *sides, generator=rng).transpose(1, 2)


def renamed(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The published tensors as that engine has them.

    There a noise level has one head, the controls have one linear, and the last layer is one.
    """
    own = {}
    for name, x in tensors.items():
        name = name.replace("dit_mlp.", "mlp.").replace("attn_cond_head.", "cond_head.")
        if ".mlp_cond_head.cond_proj." in name:
            head, _, number = name.removesuffix(".weight").rpartition(".")
            name = f"{head.replace('mlp_cond_head', 'cond_head')}.{int(number) + 3}.weight"
        if "mlp_cond_head.bias_in" not in name and "ctrl_mlpfusion" not in name:
            own[name] = x
    for i in range(0, layers, 3):
        at = f"transformer.blocks.{i}.ctrl_mlpfusion."
        both = [tensors[f"{at}fc1_{part}.weight"] for part in "xc"]
        own |= {f"{at}mlp.fc1.weight": torch.cat(both, 1)}
        own |= {f"{at}mlp.fc2.weight": tensors[f"{at}fc2.weight"]}
    last, bias = own["unpatchify.weight"], own["unpatchify.bias"]
    own["unpatchify.weight"] = last.flatten(1).T
    own["unpatchify.bias"] = bias.repeat_interleave(last[0, 0].numel())
    return own


def ours(model: WaypointModel) -> Tensor:
    """Latents [C, F, h, w] of the walk, an action a latent frame."""
    found = []
    with ts.open(model, "stock", seed=SEED) as stream:
        for action in WALK:
            stream.step([action] * 4)
            assert stream.session.memory.latents is not None
            found.append(stream.session.memory.latents[0])
    return torch.cat(found, 1)


def compare(folder: Path) -> list[Compared]:
    """Its network, cache and loop."""
    torch.compile = lambda f=None, **kwargs: f if f is not None else (lambda g: g)  # type: ignore
    stand_in("tensordict", TensorDict=lambda fields, **kwargs: fields)
    for name in ("world_engine", "world_engine.model"):
        stand_in(name).__path__ = [str(folder / "src" / name.partition(".")[2])]
    stand_in("world_engine.ae", InferenceAE=None)
    stand_in("world_engine.quantize", quantize_model=None)
    stand_in("omegaconf", OmegaConf=None)
    network: Any = importlib.import_module("world_engine.model.world_model")
    caches: Any = importlib.import_module("world_engine.model.kv_cache")
    vars(sys.modules["world_engine.model"]).update(
        WorldModel=network.WorldModel, StaticKVCache=caches.StaticKVCache, PromptEncoder=None
    )
    engine: Any = importlib.import_module("world_engine.world_engine")

    c, model = CONFIG, random_waypoint(CONFIG, seed=3)
    for i, block in enumerate(cast(list[Block], model.transformer.blocks)):
        block.bias_in.data[1] = block.bias_in.data[0]  # one there
        block.attn.v_lamb.data.fill_(0.1 + 0.1 * i)
    fields = {name: getattr(c, name) for name in c.__slots__} | {
        "tokens_per_frame": c.height * c.width, "n_frames": len(WALK), "value_residual": True,
        "gated_attn": False, "noise_conditioning": "wan", "prompt_conditioning": None,
        "ctrl_conditioning": "mlp_fusion", "ctrl_cond_dropout": 0.0,
    }  # fmt: skip
    config = SimpleNamespace(**fields)
    theirs = network.WorldModel(config).eval()
    theirs.load_state_dict(renamed(file_names(model.transformer), c.n_layers))

    made = engine.WorldEngine.__new__(engine.WorldEngine)
    made.device, made.dtype = torch.device("cpu"), torch.float32
    made.model_cfg, made.model, made.vae = config, theirs, SimpleNamespace()
    made.scheduler_sigmas = torch.tensor(c.scheduler_sigmas)
    made.frm_shape = 1, 1, c.channels, c.height * c.patch[0], c.width * c.patch[1]
    made.kv_cache = caches.StaticKVCache(config, batch_size=1, dtype=torch.float32)
    made.frame_ts = torch.tensor([[0]])
    sizes = {"button": c.n_buttons, "mouse": 2, "scroll": 1}
    made._ctx = {name: torch.zeros(1, 1, size) for name, size in sizes.items()}
    made._ctx["frame_timestamp"] = torch.empty((1, 1), dtype=torch.long)
    drawn = draws(model)
    engine.torch, latents = Torch(randn=lambda *size, **kind: next(drawn)), []
    for action in WALK:
        press = PRESSES[action]
        told = engine.CtrlInput(set(press.buttons), press.mouse, press.wheel)
        latents.append(made.gen_frame(told, return_img=False)[0].clone())
    return [(f"{len(WALK)} latent frames by keys", ours(model), torch.stack(latents, 1))]


if __name__ == "__main__":
    report(lambda: compare(Path(sys.argv[2])))
