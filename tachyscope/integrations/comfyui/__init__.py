"""ComfyUI: load a model, choose a plan, stream a video into a file, compare two.

Nodes of ComfyUI's V3 API. A video is written to a file as it is generated and never held in memory
as a whole; ComfyUI's own nodes save it, show it, or split it into images. ComfyUI may unload the
weights when another model needs the GPU's memory; they are loaded again before the next video.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import comfy.model_management as management
import comfy.model_patcher
import comfy.utils
import folder_paths
import numpy as np
import torch
from comfy_api.latest import ComfyExtension, InputImpl, io
from PIL import Image

import tachyscope as ts
from tachyscope.cli.list import list_policies
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.observers import Observer
from tachyscope.core.plan import NAMED, NAMES, check_text
from tachyscope.core.rollout import runs_beside
from tachyscope.core.source_video import STRENGTH
from tachyscope.core.types import PassContext
from tachyscope.measure.videos import compare_videos, lines
from tachyscope.memory.predict import need
from tachyscope.models.registry import MODELS

CATEGORY = "Tachyscope"
STOCK = "what the model's authors run"
MODEL, PLAN = io.Custom("TACHYSCOPE_MODEL"), io.Custom("TACHYSCOPE_PLAN")
PREVIEW = 512  # pixels of a preview's longer side, at most


class Loaded(NamedTuple):
    """A model, and its weights in the patcher by which ComfyUI moves them."""

    model: ts.VideoModel
    weights: Any


class LoadModel(io.ComfyNode):
    """A model, on ComfyUI's device."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="TachyscopeLoad", display_name="Load video model", category=CATEGORY,
            description="A chunk-causal video model or world model, by name and checkpoint.",
            inputs=[
                io.Combo.Input("name", options=list(MODELS), default="self-forcing"),
                io.String.Input(
                    "weights", default="",
                    tooltip="The checkpoint's file or folder, where the model needs one; "
                    "'download' fetches a published model's.",
                ),
                io.String.Input("lora", default="", optional=True, tooltip="A LoRA's file."),
                io.Float.Input("lora_alpha", default=0.0, optional=True, tooltip="0: its own."),
                io.String.Input(
                    "decoder", default="", optional=True,
                    tooltip="A tiny decoder's file (taew2_1, lighttaew2_1) in the VAE's place.",
                ),
            ],
            outputs=[MODEL.Output(display_name="model")],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, name: str, weights: str, lora: str = "", lora_alpha: float = 0.0, decoder: str = ""
    ) -> Any:
        device = management.get_torch_device()
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        management.free_memory(_file_bytes(weights), device)
        model = ts.load(
            name, weights or None, device=device, dtype=dtype, lora=lora or None,
            lora_alpha=lora_alpha or None, decoder=decoder or None,
        )  # fmt: skip
        parts = torch.nn.ModuleList(_modules(model))
        patcher = comfy.model_patcher.ModelPatcher(parts, device, management.unet_offload_device())
        loaded = Loaded(model, patcher)
        bring(loaded)
        return io.NodeOutput(loaded)


class MakePlan(io.ComfyNode):
    """What of the past is kept and read."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="TachyscopePlan", display_name="Plan", category=CATEGORY,
            description="What of the past is kept and read. `tachyscope list` has all settings.",
            inputs=[
                io.Combo.Input(
                    "base", options=list(NAMES), default="fast",
                    tooltip="\n".join(f"{x}: {NAMED['chunks'].get(x, STOCK)}" for x in NAMES),
                ),
                io.String.Input(
                    "changes", default="", optional=True, tooltip="\n".join([
                        "Settings instead of the base's: cache=bank:resident=30f. There are",
                        *(f"{x['part']}={x['name']}: {x['about']}" for x in list_policies()),
                    ]),
                ),
            ],
            outputs=[PLAN.Output(display_name="plan")],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, base: str | None, changes: str | None = "") -> bool | str:
        if base is None or changes is None:
            return True  # from another node: known when this one runs
        try:
            check_text(f"{base} {changes}")
        except TachyscopeError as fault:
            return str(fault)
        return True

    @classmethod
    def execute(cls, base: str, changes: str = "") -> Any:
        plan = f"{base} {changes}".strip()
        check_text(plan)
        return io.NodeOutput(plan)


class StreamVideo(io.ComfyNode):
    """A video, written chunk by chunk."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="TachyscopeStream", display_name="Stream video", category=CATEGORY,
            description="Makes a video of any length by a plan, and writes it as it is made.",
            inputs=[
                MODEL.Input("model"),
                PLAN.Input("plan"),
                io.String.Input("prompt", default="", multiline=True),
                io.Int.Input("frames", default=81, min=1, max=100_000),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**63 - 1, control_after_generate=True
                ),
                io.Int.Input("height", default=0, min=0, max=8192, tooltip="0: the model's own."),
                io.Int.Input("width", default=0, min=0, max=8192),
                io.String.Input(
                    "later_prompts", default="", multiline=True, optional=True,
                    tooltip="A line each, with the frame from which on it is meant: 48: snow falls",
                ),
                io.String.Input(
                    "actions", default="", optional=True,
                    tooltip="Camera keys of a world model, one a frame: w*20 q*24",
                ),
                io.Image.Input("first_frames", optional=True),
                io.Video.Input(
                    "video", optional=True, tooltip="A video to follow, a chunk behind it."
                ),
                io.Float.Input(
                    "strength", default=STRENGTH, min=0.01, max=1.0, step=0.01, optional=True,
                    tooltip="How much noise the video that is followed gets; at 1 it is gone.",
                ),
            ],
            outputs=[
                io.Video.Output(display_name="video"),
                io.Float.Output(display_name="fps"),
                io.String.Output(display_name="report"),
            ],
        )  # fmt: skip

    @classmethod
    def validate_inputs(
        cls,
        later_prompts: str | None = "",
        height: int | None = 0,
        width: int | None = 0,
    ) -> bool | str:
        try:  # None comes from another node, and is known when this one runs
            read_schedule(later_prompts or "")
            if height is not None and width is not None:
                size_of(height, width)
        except TachyscopeError as fault:
            return str(fault)
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        plan: str,
        prompt: str,
        frames: int,
        seed: int,
        height: int,
        width: int,
        later_prompts: str = "",
        actions: str = "",
        first_frames: torch.Tensor | None = None,
        video: Any = None,
        strength: float = STRENGTH,
    ) -> Any:
        loaded, model = model, model.model
        size = size_of(height, width)
        wanted = 0
        if model.device.type == "cuda":
            needed = need(
                model.on_meta(), plan, frames=frames, size=size, prompt=prompt,
                follows=video is not None,
            )  # fmt: skip
            wanted = needed.peak - needed.weights - needed.decoder
        bring(loaded, wanted)
        given: dict[str, Any] = {}
        if video is not None:
            given |= {"video": _file_of(video), "strength": strength}
        if first_frames is not None:
            given["first"] = (first_frames * 255).round().to(torch.uint8).cpu().numpy()
        stream = ts.open(
            model, plan, prompt=prompt, frames=frames, seed=seed, size=size,
            observers=[_Interrupt()], **given,
        )  # fmt: skip
        bar, path, rows = comfy.utils.ProgressBar(frames), _new_file(), []
        beside = runs_beside(model.device)
        with stream, ts.VideoWriter(path, fps=model.fps, background=beside) as file:
            for chunk in ts.rollout(
                model, stream=stream, frames=frames, actions=actions, overlap_decode=True,
                then=read_schedule(later_prompts),
            ):  # fmt: skip
                management.throw_exception_if_processing_interrupted()
                file.write(chunk.frames)
                rows.append(chunk.stats)
                bar.update_absolute(file.frames, frames, ("JPEG", _preview(chunk.frames), PREVIEW))
        return io.NodeOutput(InputImpl.VideoFromFile(path), float(model.fps), report(plan, rows))


class CompareVideos(io.ComfyNode):
    """How similar two videos are."""

    @classmethod
    def define_schema(cls) -> Any:
        return io.Schema(
            node_id="TachyscopeCompare", display_name="Compare videos", category=CATEGORY,
            description="PSNR, and LPIPS and FVD where their weights are, of one video to another.",
            inputs=[io.Video.Input("video"), io.Video.Input("reference")],
            outputs=[
                io.Float.Output(display_name="psnr"),
                io.String.Output(display_name="report"),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, video: Any, reference: Any) -> Any:
        results = compare_videos(_file_of(video), _file_of(reference))
        return io.NodeOutput(results["rows"][0]["psnr_reference"], "\n".join(lines(results)))


class Tachyscope(ComfyExtension):
    async def get_node_list(self) -> list[Any]:
        return [LoadModel, MakePlan, StreamVideo, CompareVideos]


async def comfy_entrypoint() -> Tachyscope:
    return Tachyscope()


class _Interrupt(Observer):
    """Ends a chunk between two passes when the user interrupts."""

    host = False

    def on_pass(self, ctx: PassContext) -> None:
        management.throw_exception_if_processing_interrupted()


def read_schedule(text: str) -> list[tuple[int, str]]:
    """Changes of prompt, a line each: `48: snow falls`."""
    changes = []
    for line in filter(None, map(str.strip, text.splitlines())):
        match = re.fullmatch(r"(\d{1,9})\s*:\s*(.*)", line)
        if match is None:
            raise TachyscopeError(
                f"a later prompt is a frame and words, got {shown(line)}: try '48: snow falls'"
            )
        changes.append((int(match[1]), match[2]))
    return changes


def size_of(height: int, width: int) -> tuple[int, int] | None:
    """A video's size; the model's own if both sides are 0."""
    if bool(height) != bool(width):
        raise TachyscopeError(f"give both height and width, or 0 for both, got {height} x {width}")
    return (height, width) if height else None


def report(plan: str, rows: list[Any]) -> str:
    """A line about the work of a video."""
    total = {key: sum(row.get(key, 0.0) for row in rows) for key in ("frames", "chunk_ms")}
    pairs, dense = (sum(row.get(key, 0.0) for row in rows) for key in ("pairs", "pairs_dense"))
    speed = 1e3 * total["frames"] / max(total["chunk_ms"], 1e-9)
    return (
        f"{plan}: {total['frames']:.0f} frames, {speed:.1f} frames/s, {pairs / max(dense, 1):.0%} "
        f"of the full cache's pairs read, {rows[-1]['cache_mb']:.0f} MB of cache"
    )


def bring(loaded: Loaded, wanted: int = 0) -> None:
    """Load a model's weights to its device, and free `wanted` more bytes there."""
    management.load_models_gpu([loaded.weights], memory_required=wanted, force_full_load=True)
    fuse = getattr(loaded.model.transformer, "fuse", None)
    if fuse is not None and loaded.model.device.type == "cuda":
        fuse()  # moved, its weights no longer lie side by side


def _modules(model: ts.VideoModel) -> list[torch.nn.Module]:
    """The modules of a model that ComfyUI moves; text encoders stay on the CPU."""
    held = [model, getattr(model, "decoder", None)]
    parts = [x for one in held if one is not None for x in vars(one).values()]
    return [x for x in parts if isinstance(x, torch.nn.Module)]


def _file_bytes(path: str) -> int:
    """The size of a checkpoint's files."""
    if not os.path.exists(path):
        return 0
    files = [path] if os.path.isfile(path) else Path(path).rglob("*.safetensors")
    return sum(os.path.getsize(file) for file in files)


def _preview(frames: np.ndarray) -> Image.Image:
    return Image.fromarray(frames[-1])


def _new_file() -> str:
    folder = folder_paths.get_temp_directory()
    os.makedirs(folder, exist_ok=True)
    number = 0
    while os.path.exists(path := os.path.join(folder, f"tachyscope_{number:05}.mp4")):
        number += 1
    return path


def _file_of(video: Any) -> str:
    """The path of a video's file; a video in memory is written to one first."""
    source = video.get_stream_source()
    if isinstance(source, str):
        return source
    path = _new_file()
    video.save_to(path)
    return path
