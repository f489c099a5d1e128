"""VILA-U: a LLaMA trunk writes video place by place, a depth transformer the codes of a place.

Containers and parameter names are the published ones: `config.json` and the folders `llm`,
`vision_tower` and `mm_projector`, each with a `config.json` and its weights. What the published
files cannot say stands under "tachyscope" in those configs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tachyscope.adapters import Adapter
from tachyscope.adapters.checkpoint import fit, read_json, read_tensors, write_json, write_tensors
from tachyscope.adapters.depth import DepthConfig, DepthTransformer, Sampler, draw_noise
from tachyscope.adapters.vqgan import PixelConfig, RqVae
from tachyscope.errors import TachyscopeError
from tachyscope.session import Session
from tachyscope.types import Mlp, Rope, Shape

PARTS = ("llm", "vision_tower", "mm_projector")
OURS = "tachyscope"
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
SPECIAL = ("<im_start>", "<im_end>", "<vi_start>", "<vi_end>")  # the last ids of a vocabulary
START = "<vi_start>"
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


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
    tokenizer: str = "hf"  # or "bytes"

    def __post_init__(self) -> None:
        named, tall = self.tokenizer, self.head_dim
        heads = self.heads, self.kv_heads
        _demand(named in ("hf", "bytes"), "tokenizer must be 'hf' or 'bytes'", named)
        _demand(heads[0] % heads[1] == 0, "heads must be a multiple of kv_heads", heads)
        _demand(tall % 2 == 0, "head_dim must be even", tall)
        once = len(set(self.actions)) == len(self.actions)
        _demand(once, "actions must be letters that differ", self.actions)

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


class SwiGlu(nn.Module):
    """LLaMA's MLP: down(silu(gate x) · up x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.macs = 3 * width * inner
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    @property
    def gate(self) -> Tensor:
        return self.gate_proj.weight

    @property
    def up(self) -> Tensor:
        return self.up_proj.weight

    @property
    def down(self) -> Tensor:
        return self.down_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attends(Protocol):
    """What the trunk asks of a session, or of what stands in for one in training."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor: ...


class SelfAttention(nn.Module):
    """The projections around attention, which itself is the session's."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inner, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden, shared, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden, bias=False)

    def forward(self, session: Attends, layer: int, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, S, D]
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(session.attend(layer, q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One layer of LLaMA."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.mlp = SwiGlu(config.hidden, config.intermediate)
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.eps)

    def forward(self, session: Attends, layer: int, x: Tensor) -> Tensor:
        x = x + self.self_attn(session, layer, self.input_layernorm(x))
        return x + session.mlp(layer, self.post_attention_layernorm(x), self.mlp)


class Trunk(nn.Module):
    """LLaMA less its head; attention and MLPs are the session's to run."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps)

    def forward(self, session: Attends, x: Tensor) -> Tensor:
        """States [B, S, W], normed, for inputs x [B, S, W]."""
        for i, layer in enumerate(self.layers):
            x = layer(session, i, x)
        return self.norm(x)


class Llm(nn.Module):
    """The folder `llm`."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.model = Trunk(config)
        # kept so that files hold what other readers of them expect; never run here
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)


class VisionTower(nn.Module):
    """The folder `vision_tower`."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        books = config.depth, config.codes, config.code_dim
        self.rqvaesiglip = RqVae(config.pixels, *books, config.shared_codebook)
        self.rqtransformer = DepthTransformer(config.head, *books, config.hidden)


class Projector(nn.Module):
    """The folder `mm_projector`: code sums, and a frame's action, to the trunk's inputs."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(config.code_dim, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.hidden),
        )
        count = len(config.actions)
        self.action_embedding = nn.Embedding(count, config.hidden) if count else None

    def forward(self, sums: Tensor, actions: Tensor | int | None = None) -> Tensor:
        """Inputs [..., W] of code sums [..., dim]; actions [...], or one for all."""
        x = self.layers(sums)
        return x if self.action_embedding is None else x + self.action_embedding.weight[actions]


class Vila(nn.Module):
    """The three folders' modules."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.llm = Llm(config)
        self.vision_tower = VisionTower(config)
        self.mm_projector = Projector(config)

    @property
    def trunk(self) -> Trunk:
        return self.llm.model

    @property
    def head(self) -> DepthTransformer:
        return self.vision_tower.rqtransformer

    @property
    def vae(self) -> RqVae:
        return self.vision_tower.rqvaesiglip

    def embed(self, codes: Tensor, actions: Tensor | int | None = None) -> Tensor:
        """The trunk's inputs [..., W] for codes [..., D]."""
        return self.mm_projector(self.vae.quantizer.sum(codes), actions)


class Tokenizer(Protocol):
    """From a prompt to ids that end in <vi_start>; "" is the prompt that asks for nothing."""

    def ids(self, prompt: str) -> list[int]: ...

    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class BytesTokenizer:
    """UTF-8 bytes as they are; <bos> and the special tokens are the last ids of the vocabulary."""

    vocab: int

    def __post_init__(self) -> None:
        least = 256 + 1 + len(SPECIAL)
        if self.vocab < least:
            raise TachyscopeError(
                f"the bytes tokenizer needs a vocabulary of {least} ids or more, got {self.vocab}: "
                f"raise vocab_size"
            )

    def ids(self, prompt: str) -> list[int]:
        special = self.vocab - len(SPECIAL)
        return [special - 1, *prompt.encode(), special + SPECIAL.index(START)]

    def save(self, folder: Path) -> None:
        """Nothing: the config says all."""


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """The checkpoint's own tokenizer, and the chat template that VILA-U was trained with."""

    inner: Any  # a transformers tokenizer

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        if not any((folder / name).is_file() for name in TOKENIZER):
            raise TachyscopeError(
                f"{folder} must have a tokenizer, it has none of {', '.join(TOKENIZER)}: "
                f"copy them from the published checkpoint"
            )
        try:
            transformers = importlib.import_module("transformers")
        except ImportError:
            raise TachyscopeError(
                f"the tokenizer in {folder} needs transformers, which is not installed: "
                f"pip install 'tachyscope[hf]'"
            ) from None
        try:
            inner = transformers.AutoTokenizer.from_pretrained(str(folder), legacy=False)
        except (OSError, ValueError, ImportError) as fault:
            reason = (str(fault).strip() or type(fault).__name__).splitlines()[0]
            raise TachyscopeError(
                f"the tokenizer in {folder} must load, got {reason}: get its files again, "
                f"or pip install 'tachyscope[hf]'"
            ) from None
        if START not in inner.get_vocab():
            raise TachyscopeError(
                f"the tokenizer in {folder} must know {START}, it does not: "
                f"copy it from a checkpoint that makes video"
            )
        return cls(inner)

    def ids(self, prompt: str) -> list[int]:
        text = prompt.strip()
        # a blank prompt leaves no space at all between the two speakers, as in training
        said = f" {text} " if text else ""
        return list(self.inner(f"{SYSTEM} USER:{said}ASSISTANT: {START}").input_ids)

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(str(folder))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids [B, L], padded on the left, and how many of each row are the prompt's."""

    ids: Tensor
    lengths: tuple[int, ...]


class VilaAdapter(Adapter):
    """VILA-U behind the session: one pass a place, all of a frame's codes as its latents."""

    kind = "tokens"
    stock = "cache=keep_all attention=dense text=none replay=none"

    def __init__(
        self, model: Vila, config: VilaConfig, tokenizer: Tokenizer, name: str = "vila-u"
    ) -> None:
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        weight = model.trunk.norm.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.fps = config.fps
        self.actions = config.actions

    def shape(self, size: tuple[int, int] | None = None) -> Shape:
        c = self.config
        if size is not None and tuple(size) != c.size:
            raise TachyscopeError(
                f"{self.name} makes frames of {c.size[0]}x{c.size[1]} pixels only, "
                f"got {size[0]}x{size[1]}: leave the size out"
            )
        projections = 2 * c.hidden * (c.heads + c.kv_heads) * c.head_dim
        return Shape(
            layers=c.layers,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            width=c.hidden,
            grid=c.grid,
            causal=True,
            rows=2 if c.sampler.guided else 1,
            paired=c.sampler.guided,
            macs=c.layers * projections,
        )

    def rope(self, shape: Shape) -> Rope:
        weights = (float(shape.places), float(shape.grid[1]), 1.0)
        c = self.config
        return Rope(
            ((shape.head_dim, weights),), theta=c.theta, interleaved=False, scale=c.rope_scale
        )

    def frames(self, latents: int) -> int:
        return latents

    def encode(self, prompt: str) -> Prompt:
        texts = (prompt, "") if self.config.sampler.guided else (prompt,)
        rows = [self.tokenizer.ids(text) for text in texts]
        longest = max(map(len, rows))
        padded = [[0] * (longest - len(row)) + row for row in rows]
        return Prompt(torch.tensor(padded, device=self.device), tuple(map(len, rows)))

    @torch.no_grad()
    def start(self, session: Session, prompt: Prompt) -> None:
        x = self.model.trunk.embed_tokens(prompt.ids)
        self._run(session, x, session.prompt_positions())
        session.commit()

    @torch.no_grad()
    def sample(self, session: Session, actions: Sequence[int]) -> Tensor:
        """Codes [V, 1, rows, columns, D]."""
        c, shape = self.config, session.shape
        sizes = self._videos(session), shape.places, c.depth, c.codes
        noise = draw_noise(session.generator, sizes, self.device)
        pos = shape.positions(session.frame, 1, self.device)
        codes = []
        for i in range(shape.places):
            hidden = session.features["hidden"]
            books = self.model.vae.quantizer
            codes.append(self.model.head.generate(hidden, books, c.sampler, noise[:, i]))
            self._feed(session, codes[-1][:, None], pos[i : i + 1], actions)
        return torch.stack(codes, 1).reshape(-1, 1, *c.grid, c.depth)

    @torch.no_grad()
    def clean(self, session: Session, latents: Tensor, actions: Sequence[int]) -> None:
        pos = session.shape.positions(session.frame, 1, self.device)
        self._feed(session, latents.flatten(1, 3), pos, actions)

    @torch.no_grad()
    def score(self, session: Session, latents: Tensor, actions: Sequence[int]) -> Tensor:
        """Guided logits [V, N, D, K] of a given frame's codes; the session goes on as by `sample`.

        Token by token, so that what the session skips when sampling it skips here too.
        """
        codes = latents.flatten(1, 3)
        pos = session.shape.positions(session.frame, 1, self.device)
        states = []
        for i in range(session.shape.places):
            states.append(session.features["hidden"])
            self._feed(session, codes[:, i : i + 1], pos[i : i + 1], actions)
        sums = self.model.vae.quantizer.sums(codes)
        sums = sums.repeat(len(states[0]) // len(sums), 1, 1, 1)
        return self.config.sampler.guide(self.model.head(torch.stack(states, 1), sums))

    @torch.no_grad()
    def decode(self, session: Session, latents: Tensor) -> np.ndarray:
        pixels = self.model.vae.decode(self.model.vae.quantizer.sum(latents.flatten(0, 1)))
        levels = pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
        return levels.movedim(1, -1).cpu().numpy()

    @torch.no_grad()
    def codes(self, frames: np.ndarray) -> Tensor:
        """Latents [1, F, rows, columns, D] of frames uint8 [F, H, W, 3]."""
        if frames.shape[1:3] != self.config.size:
            high, wide = self.config.size
            raise TachyscopeError(
                f"{self.name} takes frames of {high}x{wide} pixels only, "
                f"got {frames.shape[1]}x{frames.shape[2]}: resize them"
            )
        levels = torch.from_numpy(np.ascontiguousarray(frames)).to(self.device, self.dtype)
        vectors = self.model.vae.encode(levels.movedim(-1, 1) / 127.5 - 1)
        return self.model.vae.quantizer.quantise(vectors)[None]

    def _videos(self, session: Session) -> int:
        return session.shape.rows // (2 if session.shape.paired else 1)

    def _feed(self, session: Session, codes: Tensor, pos: Tensor, actions: Sequence[int]) -> None:
        """Run the trunk over tokens of codes [V, S, D], in both rows of a pair."""
        x = self.model.embed(codes, self._action(actions))
        self._run(session, torch.cat([x, x]) if session.shape.paired else x, pos)

    def _action(self, actions: Sequence[int]) -> int | None:
        if not self.actions:
            if any(actions):
                raise TachyscopeError(
                    f"{self.name} takes no actions, got {list(actions)}: leave them out"
                )
            return None
        if len(actions) != 1 or not 0 <= actions[0] < len(self.actions):
            raise TachyscopeError(
                f"{self.name} takes one action a frame, from 0 to {len(self.actions) - 1}, "
                f"got {list(actions)}: give one of these"
            )
        return actions[0]

    def _run(self, session: Session, x: Tensor, pos: Tensor) -> None:
        session.begin(pos=pos, step=0, steps=1, noise=(0.0,))
        # the last token's state predicts the next token, which may be the next frame's first
        session.features["hidden"] = self.model.trunk(session, x)[:, -1]


def load_vila(
    folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> VilaAdapter:
    """The model in a published folder, in the dtype that its config names if none is given."""
    folder = Path(folder)
    # releases differ in whether the model is the folder or is inside it
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    files = {part: read_json(folder / part / "config.json") for part in ("", *PARTS)}
    config = VilaConfig.parse(files)
    with torch.device("meta"):
        model = Vila(config)
    model.to(dtype or _dtype(files[""])).to_empty(device=device)
    for part in PARTS:
        tensors, where = _read(folder / part)
        if part == "llm" and files[part].get("tie_word_embeddings"):
            tensors.setdefault("lm_head.weight", tensors.get("model.embed_tokens.weight", Tensor()))
        if part == "vision_tower" and config.shared_codebook:
            _repeat_codebook(tensors, config.depth)
        fit(getattr(model, part), tensors, where, _unused(config))
    if config.tokenizer == "bytes":
        tokenizer: Tokenizer = BytesTokenizer(config.vocab)
    else:
        tokenizer = ChatTokenizer.load(folder / "llm")
    return VilaAdapter(model.eval(), config, tokenizer)


def save_vila(adapter: VilaAdapter, folder: Path | str) -> None:
    """Write the model as the published folders hold it."""
    folder = Path(folder)
    files = adapter.config.files()
    files[""]["model_dtype"] = str(adapter.dtype)
    for part in PARTS:
        (folder / part).mkdir(parents=True, exist_ok=True)
        tensors = getattr(adapter.model, part).state_dict()
        # a file cannot say that two names are one tensor
        write_tensors(folder / part / WEIGHTS[0], {k: v.clone() for k, v in tensors.items()})
        write_json(folder / part / "config.json", files[part])
    adapter.tokenizer.save(folder / "llm")
    write_json(folder / "config.json", files[""])


def toy_tokens(seed: int = 0) -> VilaAdapter:
    """A tiny random model: 32x32 pixels of 4x4 places, with every part that a large one has."""
    config = VilaConfig(
        hidden=64,
        intermediate=160,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=261,
        eps=1e-5,
        grid=(4, 4),
        depth=4,
        codes=32,
        code_dim=16,
        head=DepthConfig(width=48, layers=2, heads=4),
        pixels=PixelConfig(
            ch=8,
            ch_mult=(1, 1, 2, 2),
            num_res_blocks=1,
            attn_resolutions=(8,),
            z_channels=16,
            resolution=32,
            groups=4,
            encoder=True,
        ),
        actions=".wsadqe",
        tokenizer="bytes",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Vila(config).eval()
    return VilaAdapter(model, config, BytesTokenizer(config.vocab), name="toy-tokens")


def _read(folder: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors in a folder, and the file they were found by."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return read_tensors(folder / name), str(folder / name)
    raise TachyscopeError(
        f"{folder} must hold one of {', '.join(WEIGHTS)}, it has none: "
        f"copy it from the published checkpoint"
    )


def _repeat_codebook(tensors: dict[str, Tensor], depth: int) -> None:
    """Writers that know of tied tensors leave out all but the first."""
    name = "rqvaesiglip.quantizer.codebooks.{}.weight"
    for d in range(1, depth if name.format(0) in tensors else 0):
        tensors.setdefault(name.format(d), tensors[name.format(0)])


def _unused(config: VilaConfig) -> tuple[str, ...]:
    """How the names of tensors begin that published files have and video does not need."""
    books = [f"rqvaesiglip.quantizer.codebooks.{d}." for d in range(config.depth)]
    return (
        "rqvaesiglip.siglip_model.",
        "rqvaesiglip.logit_",
        "rqvaesiglip.encoder.",
        *(book + kind for book in books for kind in ("cluster_size_ema", "embed_ema")),
        *(f"model.layers.{i}.self_attn.rotary_emb." for i in range(config.layers)),
    )


def _dtype(root: Mapping[str, Any]) -> torch.dtype:
    name = str(root.get("model_dtype", "torch.bfloat16"))
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise TachyscopeError(
            f"config.json: model_dtype must name a torch dtype, got {name!r}: mend it"
        )
    return found


def _demand(right: bool, rule: str, got: object) -> None:
    if not right:
        raise TachyscopeError(f"a VILA-U config's {rule}, got {got!r}: change it")


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
        # JSON does not tell 10000 from 10000.0, and to Python True is an int
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.fail(key, f"of type {kind.__name__}")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        return value if value > 0 else self.fail(key, "above 0")

    def number(self, key: str, default: float | None = None) -> float:
        value: float = self.get(key, float, default)
        return value if value > 0 else self.fail(key, "above 0")

    def wholes(self, key: str, count: int | None = None) -> tuple[int, ...]:
        values = self.get(key, list)
        if any(type(v) is not int for v in values) or count not in (None, len(values)):
            self.fail(key, f"{'some' if count is None else count} whole numbers")
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
            f"{file}: {self.path}{key} must be {rule}, got {self.values.get(key)!r}: "
            f"give a VILA-U checkpoint's own file"
        )
