"""The four config files of a VILA-U checkpoint.

Settings that the published files lack are under "tachyscope" in them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tachyscope.core.limits import Bound
from tachyscope.models.config_schema import (
    ACTIONS,
    EPS,
    FPS,
    HEADS,
    INNER,
    LAYERS,
    SIDE,
    THETA,
    WIDTH,
    WORDS,
    Config,
    Tables,
    entry,
    merge,
    put,
    written,
)
from tachyscope.models.token_model import Sampler
from tachyscope.models.vila_u.depth import DepthConfig
from tachyscope.models.vila_u.vqgan import PixelConfig

OURS = "tachyscope"
# paths begin with a file's folder; the root's is ""
CODES = "vision_tower.rqvaesiglip"
DEPTH = "vision_tower.rqtransformer"
SCALE = Bound(1e-6, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class VilaConfig(Config):
    """A model's configuration, from its four config files."""

    subject = "a VILA-U config's"

    hidden: int = entry(bound=WIDTH, at="llm.hidden_size")
    intermediate: int = entry(bound=INNER, at="llm.intermediate_size")
    layers: int = entry(bound=LAYERS, at="llm.num_hidden_layers")
    heads: int = entry(bound=HEADS, at="llm.num_attention_heads")
    kv_heads: int = entry(bound=HEADS, at="llm.num_key_value_heads")
    head_dim: int = entry(bound=Bound(2, 8_192), at="llm.head_dim")
    vocab: int = entry(bound=WORDS, at="llm.vocab_size")
    eps: float = entry(1e-6, EPS, at="llm.rms_norm_eps")
    theta: float = entry(10000.0, THETA, at="llm.rope_theta")
    # divides positions
    rope_scale: float = entry(1.0, SCALE, at="llm.rope_scaling.factor")
    grid: tuple[int, int] = entry(bound=SIDE)  # tokens of a frame: rows, columns
    depth: int = entry(bound=SIDE)  # codes of a token
    # size of a codebook, without its padding row
    codes: int = entry(bound=WORDS, at=f"{CODES}.n_embed")
    code_dim: int = entry(bound=WIDTH, at=f"{CODES}.embed_dim")
    shared_codebook: bool = entry(False, at=f"{CODES}.shared_codebook")
    head: DepthConfig = entry(at=DEPTH)
    pixels: PixelConfig = entry(at="vision_tower")
    sampler: Sampler = entry(Sampler(), at=f".{OURS}.sampler")
    fps: int = entry(8, FPS, at=f".{OURS}.fps")
    actions: str = entry("", ACTIONS, at=f".{OURS}.actions")
    # frames of a training video
    clip: int = entry(8, Bound(1, 1_000_000), at=f".{OURS}.clip")
    tokenizer: Literal["hf", "bytes", "words"] = entry("hf", at=f"llm.{OURS}.tokenizer")

    def check_fields(self) -> None:
        heads, actions = (self.heads, self.kv_heads), self.actions
        self.demand(heads[0] % heads[1] == 0, "heads must be a multiple of kv_heads", heads)
        self.demand(self.head_dim % 2 == 0, "head_dim must be even", self.head_dim)
        differ = len(set(actions)) == len(actions)
        self.demand(differ, "actions must be letters that differ", repr(actions))

    @property
    def qk_norm(self) -> bool:
        return False

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        rows, columns = self.pixels.latent or self.grid
        return rows * self.pixels.scale, columns * self.pixels.scale

    @classmethod
    def parse(cls, files: Mapping[str, Mapping[str, Any]]) -> VilaConfig:
        """The configuration in the config files' objects, by folder; the root's is ""."""
        advice = "give a VILA-U checkpoint's own file"
        tables = Tables({**files, "llm": _filled(Tables(files, "", advice))}, "", advice)
        tables.must(".model_type", "vila_u_llama", "vila_u")
        tables.must("mm_projector.mm_projector_type", "mlp2x_gelu")
        for path, only in FIXED.items():
            tables.must(path, only, None)
        for path in (f".{OURS}", f".{OURS}.sampler", f"llm.{OURS}", f"vision_tower.{OURS}"):
            tables.only(cls, path)
        rows, columns, depth = tables.value(f"{CODES}.code_shape", int, SIDE, Bound(3, 3))
        config = cls(**tables.fields(cls), grid=(rows, columns), depth=depth)
        for path, value in config._repeated().items():
            tables.must(path, value)
        return config

    def _repeated(self) -> dict[str, Any]:
        """Values that the files repeat, by path."""
        shape = [*self.grid, self.depth]
        return {
            f"{CODES}.code_shape": shape,
            f"{CODES}.latent_shape": [*self.grid, self.code_dim],
            f"{DEPTH}.block_size": shape,
            f"{DEPTH}.input_embed_dim_1": self.code_dim,
            f"{DEPTH}.input_embed_dim_2": self.hidden,
            f"{DEPTH}.vocab_size": self.codes,
            f"{CODES}.ddconfig.out_ch": 3,
        }

    def files(self) -> dict[str, dict[str, Any]]:
        """The config files' objects, by folder; the root's is ""."""
        files = copy.deepcopy(FORM)
        merge(files, written(self))
        for path, value in self._repeated().items():
            put(files, path, value)
        llm = files["llm"]
        linear = self.rope_scale != 1
        llm["rope_scaling"] = {"type": "linear", "factor": self.rope_scale} if linear else None
        root, tower = files[""], files["vision_tower"]
        tower["hidden_size"] = root["mm_hidden_size"] = self.code_dim
        root["hidden_size"] = self.hidden
        root |= {"llm_cfg": llm, "vision_tower_cfg": tower}
        return files | {"": root | {"mm_projector_cfg": files["mm_projector"]}}


# keys with the only value that is supported
FIXED = {
    "llm.hidden_act": "silu",
    "llm.attention_bias": False,
    "llm.mlp_bias": False,
    f"{CODES}.ddconfig.in_channels": 3,
    f"{CODES}.ddconfig.resamp_with_conv": True,
    f"{CODES}.ddconfig.give_pre_end": False,
}
# values that are the same for every model
FORM: dict[str, dict[str, Any]] = {
    "": {
        "model_type": "vila_u_llama",
        "architectures": ["VILAULlamaModel"],
        "mm_use_im_start_end": True,
        "mm_use_vi_start_end": True,
        "mm_use_im_patch_token": False,
    },
    "llm": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "vision_tower": {
        "model_type": "rqvaesigliptransformer_model",
        "architectures": ["RQVAESIGLIPTransformer"],
        "rqvaesiglip": {"model_type": "rqvaesiglip_model", "ddconfig": {"in_channels": 3}},
        "rqtransformer": {"model_type": "rqtransformer_model"},
    },
    "mm_projector": {"model_type": "v2l_projector", "mm_projector_type": "mlp2x_gelu"},
}


def _filled(tables: Tables) -> dict[str, Any]:
    """llm's config.json with its defaults filled in, and RoPE scaling in one form."""
    llm = {key: value for key, value in tables.values["llm"].items() if value is not None}
    hidden, heads = llm.get("hidden_size"), llm.get("num_attention_heads")
    llm.setdefault("num_key_value_heads", heads)
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        llm.setdefault("head_dim", hidden // heads)
    # transformers writes the first since release 5, the second before
    key = next((key for key in ("rope_parameters", "rope_scaling") if key in llm), None)
    if key is None:
        return llm
    rope = tables.at(f"llm.{key}")
    kind = "rope_type" if tables.at(f"llm.{key}.rope_type") is not None else "type"
    tables.must(f"llm.{key}.{kind}", "linear", "default")
    linear = rope[kind] == "linear"
    factor = tables.value(f"llm.{key}.factor", float, SCALE) if linear else 1.0
    llm |= {"rope_theta": rope["rope_theta"]} if rope.get("rope_theta") else {}
    return llm | {"rope_scaling": {"factor": factor}}
