"""Load and save Waypoint checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.checkpoint import allocate, fit, matched, read_tensors, write_tensors
from tachyscope.models.config_schema import written
from tachyscope.models.diffusion import Decoder
from tachyscope.models.random_weights import random_module
from tachyscope.models.wan.download import HubFiles
from tachyscope.models.waypoint.autoencoder import FILES, Stills, TinyAutoencoder
from tachyscope.models.waypoint.config import MODEL_TYPE, WaypointConfig
from tachyscope.models.waypoint.model import WaypointModel
from tachyscope.models.waypoint.transformer import Waypoint

WEIGHTS, CONFIG = "model.safetensors", "config.yaml"
HUB = HubFiles(
    "Overworld/Waypoint-1.5-1B",
    WEIGHTS,
    also=(CONFIG,),
    wan="Overworld-Models/taehv1_5",
    parts=FILES[:1],
)
ABOUT = "Waypoint 1.5 1B: a picture walked through by keys and mouse, a latent frame an action"
BLOCKS = "transformer.blocks."
HEADS = ("attn_cond_head", "mlp_cond_head")
NULL = "ctrl_cfg.null_emb"  # of training without controls


def load_waypoint(
    weights: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    decoder: Path | str | None = None,
) -> WaypointModel:
    """The model in a folder with config.yaml, or `random`, or `download`.

    `decoder` is a tiny decoder's file or its folder; by default the published one beside the
    weights, if there is one.
    """
    if str(weights) == "random":
        made = random_waypoint(WaypointConfig(), device=device, dtype=dtype, name="waypoint")
        if decoder is not None:
            made.decoder = TinyAutoencoder.open(Path(decoder), made.config, device, dtype)
        return made
    folder, parts, revisions = Path(weights), None, dict[str, str]()
    if str(weights) == "download":
        checkpoint, parts, _, revisions = HUB.fetch("waypoint")
        folder = checkpoint.parent
    if folder.name == WEIGHTS:
        folder = folder.parent
    if not folder.is_dir():
        raise TachyscopeError(f"no folder {folder}: give one that has {CONFIG} and {WEIGHTS}")
    config, where = WaypointConfig.read(folder / CONFIG), str(folder / WEIGHTS)
    tensors = own_names(read_tensors(folder / WEIGHTS), config, where)
    with torch.device("meta"):
        model = Waypoint(config).to(dtype)
    model = allocate(model, device, where)
    fit(model, tensors, where)
    places = [parts or folder, folder] if decoder is None else [Path(decoder)]
    shown = TinyAutoencoder.find(places, config, device, dtype)
    if shown is None and decoder is not None:
        raise TachyscopeError(
            f"`decoder` must be a file or a folder with {' or '.join(FILES)}, {decoder} has none: "
            f"leave it out to make latents alone"
        )
    made = WaypointModel("waypoint", model.eval().requires_grad_(False), shown)
    made.revisions = revisions
    return made


def own_names(
    tensors: Mapping[str, Tensor], config: WaypointConfig, where: str
) -> dict[str, Tensor]:
    """A file's tensors by the module's names; raises unless they are the published ones.

    The modulation's linears, which layers share, are in the file once for each layer.
    """
    wanted = {name: torch.empty(x, device="meta") for name, x in config.tensors().items()}
    given = matched(wanted, tensors, where)
    own = {"out_norm.weight": given["out_norm.fc.weight"]}
    for i in range(config.n_layers):
        at = f"{BLOCKS}{i}."
        biases = torch.stack([given[f"{at}{head}.bias_in"] for head in HEADS])
        own[f"blocks.{i}.bias_in"] = biases
        for j in range(6):
            name = f"{HEADS[j // 3]}.cond_proj.{j % 3}.weight"
            shared = own.setdefault(f"cond_proj.{j}.weight", given[f"{BLOCKS}0.{name}"])
            if not torch.equal(given[at + name], shared):
                raise TachyscopeError(
                    f"{where}: {at}{name} must equal block 0's, which all layers share, it does "
                    f"not: get the file again"
                )
    for name, x in given.items():
        if name not in ("out_norm.fc.weight", NULL) and "_cond_head." not in name:
            own[name.removeprefix("transformer.")] = x
    return own


def file_names(model: Waypoint) -> dict[str, Tensor]:
    """The module's tensors by their published names."""
    own, tensors = model.state_dict(), dict[str, Tensor]()
    for name, shape in model.config.tensors().items():
        block, _, inner = name.removeprefix(BLOCKS).partition(".")
        head, _, part = inner.partition(".")
        if name == NULL:
            tensors[name] = own["out_norm.weight"].new_zeros(shape)
        elif head in HEADS and part == "bias_in":
            tensors[name] = own[f"blocks.{block}.bias_in"][HEADS.index(head)]
        elif head in HEADS:
            number = 3 * HEADS.index(head) + int(part.split(".")[1])
            tensors[name] = own[f"cond_proj.{number}.weight"].clone()
        else:
            tensors[name] = own[name.removeprefix("transformer.").replace("norm.fc.", "norm.")]
    return tensors


def save_waypoint(made: WaypointModel, folder: Path) -> None:
    """Save a folder in the published form."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": MODEL_TYPE} | written(made.config)
    (folder / CONFIG).write_text(yaml.safe_dump(values), encoding="utf-8")
    write_tensors(folder / WEIGHTS, file_names(made.transformer))
    if made.decoder is not None:
        made.decoder.write(folder)


def random_waypoint(
    config: WaypointConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    name: str = "random",
) -> WaypointModel:
    """A model of random weights, at any size."""
    with torch.device("meta"):
        model = Waypoint(config).to(dtype)
    model = random_module(model, seed, device, name, _scale)
    decoder = Stills.seeded(config, seed)
    return WaypointModel(name, model.eval().requires_grad_(False), decoder)


def _scale(name: str, drawn: Tensor) -> None:
    if name.endswith("v_lamb"):
        drawn.fill_(0.5)
    elif drawn.dim() > 1 and not name.endswith("bias_in"):
        inputs = drawn.shape[0] if name.startswith("unpatchify") else drawn[0].numel()
        drawn *= inputs**-0.5


def sized_waypoint(dtype: torch.dtype, decoder: Path | str | None = None) -> WaypointModel:
    """The published model on the meta device."""
    config = WaypointConfig()
    with torch.device("meta"):
        model = Waypoint(config).to(dtype)
    shown: Decoder = TinyAutoencoder.sized(config, dtype)
    if decoder is not None:
        shown = TinyAutoencoder.open(Path(decoder), config, "cpu", dtype)
    return WaypointModel("waypoint", model, shown).on_meta()
