"""What a VILA-U checkpoint's four config files say.

What the published files cannot say stands under "tachyscope" in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tachyscope.bounds import VILA, bound_fault, demand, describe, has_type, within
from tachyscope.errors import TachyscopeError
from tachyscope.models.token_model import Sampler
from tachyscope.models.vila_u.depth import DepthConfig
from tachyscope.models.vila_u.vqgan import PixelConfig

OURS = "tachyscope"


@dataclass(frozen=True, slots=True, kw_only=True)
class VilaConfig:
    """All that the four config files say of a model, and how it is sampled."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    theta: float = 10000.0
    rope_scale: float = 1.0  # positions are divided by it
    grid: tuple[int, int]  # places of a frame: rows, columns
    depth: int  # codes a place
    codes: int  # entries of a codebook, its padding row not counted
    code_dim: int
    shared_codebook: bool = False
    head: DepthConfig
    pixels: PixelConfig
    sampler: Sampler = field(default_factory=Sampler)
    fps: int = 8
    actions: str = ""
    clip: int = 8  # frames of the videos it was trained on
    tokenizer: str = "hf"  # or "bytes", or "words"

    def __post_init__(self) -> None:
        tokenizer, heads, actions = self.tokenizer, (self.heads, self.kv_heads), self.actions
        known = "hf", "bytes", "words"
        _demand(tokenizer in known, f"tokenizer must be one of {', '.join(known)}", tokenizer)
        _demand(heads[0] % heads[1] == 0, "heads must be a multiple of kv_heads", heads)
        _demand(self.head_dim % 2 == 0, "head_dim must be even", self.head_dim)
        differ = len(set(actions)) == len(actions)
        _demand(differ, "actions must be letters that differ", actions)

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
        """From the objects in the config files, by folder; the root's is ""."""
        root, llm, projector = (_Table(files[part], part) for part in ("", "llm", "mm_projector"))
        tower = _Table(files["vision_tower"], "vision_tower")
        vae, head = tower.table("rqvaesiglip"), tower.table("rqtransformer")
        root.must("model_type", "vila_u_llama", "vila_u")
        llm.must("hidden_act", "silu", default="silu")
        llm.must("attention_bias", False, default=False)
        llm.must("mlp_bias", False, default=False)
        projector.must("mm_projector_type", "mlp2x_gelu")

        hidden, heads = llm.whole("hidden_size"), llm.whole("num_attention_heads")
        rows, columns, depth = vae.wholes("code_shape", 3)
        code_dim, codes = vae.whole("embed_dim"), vae.whole("n_embed")
        vae.must("latent_shape", [rows, columns, code_dim])
        head.must("block_size", [rows, columns, depth])
        head.must("input_embed_dim_1", code_dim)
        head.must("input_embed_dim_2", hidden)
        head.must("vocab_size", codes)
        theta, rope_scale = _rotation(llm)
        ours = root.ours(fps=int, actions=str, clip=int, sampler=dict)
        sampler = _Table(ours.pop("sampler", {}), "", f"{OURS}.sampler.")
        return cls(
            hidden=hidden,
            intermediate=llm.whole("intermediate_size"),
            layers=llm.whole("num_hidden_layers"),
            heads=heads,
            kv_heads=llm.whole("num_key_value_heads", heads),
            head_dim=llm.whole("head_dim", hidden // heads),
            vocab=llm.whole("vocab_size"),
            eps=llm.number("rms_norm_eps", 1e-6),
            theta=theta,
            rope_scale=rope_scale,
            grid=(rows, columns),
            depth=depth,
            codes=codes,
            code_dim=code_dim,
            shared_codebook=vae.get("shared_codebook", bool, False),
            head=DepthConfig(
                width=head.whole("embed_dim"),
                layers=head.table("head").whole("n_layer"),
                heads=head.table("head").table("block").whole("n_head"),
            ),
            pixels=_pixels(vae, **tower.ours(encoder=bool, groups=int)),
            sampler=Sampler(**sampler.only(cfg=float, temperature=float, top_k=int, top_p=float)),
            **ours,
            **llm.ours(tokenizer=str),
        )

    def files(self) -> dict[str, dict[str, Any]]:
        """The objects that the config files hold, by folder; the root's is ""."""
        rows, columns = self.grid
        pixels, head = self.pixels, self.head
        scaling = {"type": "linear", "factor": self.rope_scale} if self.rope_scale != 1 else None
        llm = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "rope_scaling": scaling,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            OURS: {"tokenizer": self.tokenizer},
        }
        tower = {
            "model_type": "rqvaesigliptransformer_model",
            "architectures": ["RQVAESIGLIPTransformer"],
            "hidden_size": self.code_dim,
            "rqvaesiglip": {
                "model_type": "rqvaesiglip_model",
                "embed_dim": self.code_dim,
                "n_embed": self.codes,
                "latent_shape": [rows, columns, self.code_dim],
                "code_shape": [rows, columns, self.depth],
                "shared_codebook": self.shared_codebook,
                "decoder_latent_shape": list(pixels.latent) if pixels.latent else None,
                "ddconfig": {
                    "ch": pixels.ch,
                    "ch_mult": list(pixels.ch_mult),
                    "num_res_blocks": pixels.num_res_blocks,
                    "attn_resolutions": list(pixels.attn_resolutions),
                    "z_channels": pixels.z_channels,
                    "resolution": pixels.resolution,
                    "in_channels": 3,
                    "out_ch": 3,
                },
            },
            "rqtransformer": {
                "model_type": "rqtransformer_model",
                "block_size": [rows, columns, self.depth],
                "input_embed_dim_1": self.code_dim,
                "input_embed_dim_2": self.hidden,
                "embed_dim": head.width,
                "vocab_size": self.codes,
                "head": {"n_layer": head.layers, "block": {"n_head": head.heads}},
            },
            OURS: {"encoder": pixels.encoder, "groups": pixels.groups},
        }
        projector = {"model_type": "v2l_projector", "mm_projector_type": "mlp2x_gelu"}
        root = {
            "model_type": "vila_u_llama",
            "architectures": ["VILAULlamaModel"],
            "hidden_size": self.hidden,
            "mm_hidden_size": self.code_dim,
            "mm_use_im_start_end": True,
            "mm_use_vi_start_end": True,
            "mm_use_im_patch_token": False,
            "llm_cfg": llm,
            "vision_tower_cfg": tower,
            "mm_projector_cfg": projector,
            OURS: {
                "fps": self.fps,
                "actions": self.actions,
                "clip": self.clip,
                "sampler": {f.name: getattr(self.sampler, f.name) for f in fields(Sampler)},
            },
        }
        return {"": root, "llm": llm, "vision_tower": tower, "mm_projector": projector}


def _demand(right: bool, rule: str, got: object) -> None:
    demand(right, "a VILA-U config's", rule, repr(got))


def _rotation(llm: _Table) -> tuple[float, float]:
    """Theta and the linear scale, as written by transformers of before and since release 5."""
    for key in ("rope_parameters", "rope_scaling"):
        if llm.values.get(key) is not None:
            rope = llm.table(key)
            theta = rope.number("rope_theta", llm.number("rope_theta", 10000.0))
            kind = "rope_type" if "rope_type" in rope.values else "type"
            rope.must(kind, "linear", "default")
            return theta, rope.number("factor") if rope.values[kind] == "linear" else 1.0
    return llm.number("rope_theta", 10000.0), 1.0


def _pixels(vae: _Table, **ours: Any) -> PixelConfig:
    convs = vae.table("ddconfig")
    convs.must("out_ch", 3)
    convs.must("in_channels", 3, default=3)
    convs.must("resamp_with_conv", True, default=True)
    convs.must("give_pre_end", False, default=False)
    resized = vae.values.get("decoder_latent_shape") is not None
    latent = vae.wholes("decoder_latent_shape", 2) if resized else None
    return PixelConfig(
        ch=convs.whole("ch"),
        ch_mult=convs.wholes("ch_mult"),
        num_res_blocks=convs.whole("num_res_blocks"),
        attn_resolutions=convs.wholes("attn_resolutions"),
        z_channels=convs.whole("z_channels"),
        resolution=convs.whole("resolution"),
        latent=(latent[0], latent[1]) if latent else None,
        **ours,
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """An object of a config file, read key by key; faults name the file and the key."""

    values: Mapping[str, Any]
    folder: str
    path: str = ""

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if not has_type(value, kind):
            self.fail(key, f"of type {kind.__name__}")
        bounded = kind in (int, float) or (kind is str and key in VILA)
        if bounded and (rule := bound_fault(VILA[key], value)):
            self.fail(key, rule)
        return float(value) if kind is float else value

    def whole(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: float = self.get(key, float, default)
        return value

    def wholes(self, key: str, count: int | None = None) -> tuple[int, ...]:
        values = self.get(key, list)
        right = within(VILA["list"], len(values)) and all(within(VILA[key], v) for v in values)
        if not right or count not in (None, len(values)):
            most = f"at most {VILA['list'].high}" if count is None else count
            self.fail(key, f"{most} numbers, each {VILA[key]}")
        return tuple(values)

    def table(self, key: str) -> _Table:
        return _Table(self.get(key, dict), self.folder, f"{self.path}{key}.")

    def must(self, key: str, *allowed: Any, default: Any = None) -> None:
        if self.values.get(key, default) not in allowed:
            self.fail(key, " or ".join(repr(a) for a in allowed))

    def only(self, **kinds: type) -> dict[str, Any]:
        """Those of the named keys that are there; any other key is a fault."""
        for key in self.values:
            if key not in kinds:
                self.fail(key, f"absent: the keys are {', '.join(kinds)}")
        return {key: self.get(key, kinds[key]) for key in self.values}

    def ours(self, **kinds: type) -> dict[str, Any]:
        """What stands under "tachyscope", if anything does."""
        return self.table(OURS).only(**kinds) if OURS in self.values else {}

    def fail(self, key: str, rule: str) -> Any:
        file = f"{self.folder}/config.json" if self.folder else "config.json"
        raise TachyscopeError(
            f"{file}: {self.path}{key} must be {rule}, got {describe(self.values.get(key))}: "
            f"give a VILA-U checkpoint's own file"
        )
