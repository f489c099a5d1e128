"""Waypoint's config.yaml, and the names and shapes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import SHARE, Bound
from tachyscope.models.checkpoint import read_mapping
from tachyscope.models.config_schema import (
    FPS,
    HEADS,
    LAYERS,
    SIDE,
    THETA,
    WIDTH,
    Config,
    Tables,
    entry,
)
from tachyscope.models.waypoint.controls import ACTIONS

MODEL_TYPE = "waypoint-1.5"
FOURIER = 512  # channels of a noise level's sinusoidal embedding
STRIDE = (4, 16, 16)  # pixel frames, rows and columns of a latent position
PERIOD = Bound(1, 256)
# settings in which Waypoints differ, and the values that are supported
MUST: dict[str, tuple[Any, ...]] = {
    "model_type": (MODEL_TYPE, None),
    "prompt_conditioning": (None,),
    "noise_conditioning": ("wan", None),
    "ctrl_conditioning": (True, "mlp_fusion", None),
    "rope_impl": ("ortho", None),
    "value_residual": (True, None),
    "gated_attn": (False, None),
    "moe": (False, None),
    "taehv_ae": (True, None),
    "temporal_compression": (STRIDE[0], None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WaypointConfig(Config):
    """Sizes under their names in config.yaml; the defaults are those of Waypoint-1.5-1B."""

    subject, section = "a Waypoint config's", ""

    d_model: int = entry(2048, WIDTH)
    n_layers: int = entry(24, LAYERS)
    n_heads: int = entry(32, HEADS)
    n_kv_heads: int = entry(16, HEADS)
    mlp_ratio: int = entry(4, Bound(1, 64))
    channels: int = entry(32, SIDE)
    height: int = entry(16, SIDE)  # tokens of a latent frame
    width: int = entry(32, SIDE)
    patch: tuple[int, int] = entry((2, 2), Bound(1, 16))
    n_buttons: int = entry(256, Bound(91, 4_096))  # includes those of the actions
    ctrl_conditioning_period: int = entry(3, PERIOD)
    local_window: int = entry(16, Bound(1, 1_000_000))
    global_window: int = entry(128, Bound(1, 1_000_000))
    global_pinned_dilation: int = entry(8, Bound(1, 1_000_000))
    global_attn_period: int = entry(4, PERIOD)
    global_attn_offset: int = entry(-1, Bound(-1, 256))
    scheduler_sigmas: tuple[float, ...] = entry((1.0, 0.9, 0.75, 0.3, 0.0), SHARE)
    rope_theta: float = entry(10000.0, THETA)
    rope_nyquist_frac: float = entry(0.8, Bound(1e-6, 1e3))
    base_fps: int = entry(15, FPS)
    inference_fps: int = entry(60, FPS)

    def check_fields(self) -> None:
        heads, period = (self.n_heads, self.n_kv_heads), self.global_attn_period
        self.demand(heads[0] % heads[1] == 0, "n_heads must be a multiple of n_kv_heads", heads)
        right = self.d_model % self.n_heads == 0 and self.head_dim % 16 == 0
        self.demand(right, "d_model must be n_heads times a multiple of 16", self.d_model)
        sigmas = list(self.scheduler_sigmas)
        falls = len(set(sigmas)) == len(sigmas) > 1 and sigmas == sorted(sigmas, reverse=True)
        self.demand(falls and not sigmas[-1], "scheduler_sigmas must fall to 0", sigmas)
        last = (self.global_attn_offset + 1) % period == 0
        rule = "global_attn_offset must be -1, the last layer of each global_attn_period"
        self.demand(last, rule, self.global_attn_offset)
        whole = self.global_window % self.global_pinned_dilation == 0
        rule = "global_window must be a multiple of global_pinned_dilation"
        self.demand(whole, rule, (self.global_window, self.global_pinned_dilation))
        rule = f"base_fps must be inference_fps / {STRIDE[0]}: a latent frame is a step of time"
        self.demand(self.base_fps * STRIDE[0] == self.inference_fps, rule, self.base_fps)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def in_channels(self) -> int:
        return self.channels

    @property
    def stride(self) -> tuple[int, int, int]:
        return STRIDE

    @property
    def fps(self) -> int:
        return self.inference_fps

    @property
    def actions(self) -> str:
        return ACTIONS

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        sides = zip((self.height, self.width), self.patch, STRIDE[1:], strict=True)
        high, wide = (places * patch * by for places, patch, by in sides)
        return high, wide

    @property
    def stock(self) -> str:
        """The plan of its training context."""
        return (
            f"cache=strided:budget={self.local_window}f,far={self.global_window},"
            f"every={self.global_pinned_dilation},period={self.global_attn_period} "
            f"attention=dense text=none replay=none"
        )

    def fuses(self, layer: int) -> bool:
        """Whether a layer reads the controls."""
        return layer % self.ctrl_conditioning_period == 0

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor in model.safetensors."""
        wide, hidden = self.d_model, self.mlp_ratio * self.d_model
        queries, values = (n * self.head_dim for n in (self.n_heads, self.n_kv_heads))
        ends = (wide, self.channels, *self.patch)
        shapes: dict[str, tuple[int, ...]] = {
            "patchify.weight": ends,
            "unpatchify.weight": ends,
            "unpatchify.bias": (self.channels,),
            "out_norm.fc.weight": (2 * wide, wide),
            "denoise_step_emb.mlp.fc1.weight": (hidden, FOURIER),
            "denoise_step_emb.mlp.fc2.weight": (wide, hidden),
            "ctrl_emb.mlp.fc1.weight": (hidden, self.n_buttons + 3),
            "ctrl_emb.mlp.fc2.weight": (wide, hidden),
            "ctrl_cfg.null_emb": (1, 1, wide),
        }
        for layer in range(self.n_layers):
            inner = {
                "attn.q_proj.weight": (queries, wide),
                "attn.k_proj.weight": (values, wide),
                "attn.v_proj.weight": (values, wide),
                "attn.out_proj.weight": (wide, queries),
                "attn.v_lamb": (),
                "dit_mlp.fc1.weight": (hidden, wide),
                "dit_mlp.fc2.weight": (wide, hidden),
            }
            for head in ("attn_cond_head", "mlp_cond_head"):
                inner[f"{head}.bias_in"] = (wide,)
                inner |= {f"{head}.cond_proj.{i}.weight": (wide, wide) for i in range(3)}
            if self.fuses(layer):
                names = ("fc1_x", "fc1_c", "fc2")
                inner |= {f"ctrl_mlpfusion.{name}.weight": (wide, wide) for name in names}
            shapes |= {f"transformer.blocks.{layer}.{name}": x for name, x in inner.items()}
        return shapes

    @classmethod
    def read(cls, path: Path) -> WaypointConfig:
        """Read a config.yaml; settings of training are ignored."""
        tables = Tables(_read_yaml(path), str(path))
        for key, allowed in MUST.items():
            tables.must(key, *allowed)
        return cls(**tables.fields(cls))


def _read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        import yaml
    except ImportError:
        raise TachyscopeError(
            f"{path} is YAML, which needs pyyaml: pip install -e '.[hf]'"
        ) from None
    return read_mapping(path, "YAML", yaml.safe_load, (yaml.YAMLError, ValueError))
