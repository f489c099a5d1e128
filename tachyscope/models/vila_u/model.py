"""VILA-U as a stream drives it, and its checkpoints' files.

Containers are the published ones: `config.json` and the folders `llm`, `vision_tower` and
`mm_projector`, each with a `config.json` and its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.bounds import check, check_prompt
from tachyscope.decode import DecodeEngine, DecodeParts
from tachyscope.errors import TachyscopeError
from tachyscope.models.atrium.words import WordTokenizer
from tachyscope.models.base import MemoryParts, VideoModel
from tachyscope.models.checkpoint import (
    fit,
    matched,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.decode import decode_parts
from tachyscope.models.vila_u.depth import DepthConfig, draw_noise
from tachyscope.models.vila_u.tokenizers import BytesTokenizer, ChatTokenizer, Tokenizer
from tachyscope.models.vila_u.transformer import Layer, Vila
from tachyscope.models.vila_u.vqgan import PixelConfig
from tachyscope.numerics import own_numerics
from tachyscope.peak_memory import FreeAttention, peak, tensor_bytes
from tachyscope.session import Session
from tachyscope.types import Rope, Shape, SliceableMlp, TokenFrame

PARTS = ("llm", "vision_tower", "mm_projector")
CALIBRATION = "calibration.safetensors"
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids [B, L], padded on the left, and how many of each row are the prompt's."""

    ids: Tensor
    lengths: tuple[int, ...]


class VilaModel(VideoModel):
    """VILA-U behind the session: one pass a place, all of a frame's codes as its latents."""

    transformer: Vila
    kind = "tokens"
    frame_dim = 1
    stock = "cache=keep_all attention=dense text=none replay=none"

    def __init__(
        self, transformer: Vila, config: VilaConfig, tokenizer: Tokenizer, name: str = "vila-u"
    ) -> None:
        self.transformer = transformer
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        weight = transformer.trunk.norm.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.fps, self.size = config.fps, config.size
        self.actions = config.actions

    @property
    def mlps(self) -> list[SliceableMlp]:
        return [cast(Layer, layer).mlp for layer in self.transformer.trunk.layers]

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
            token_by_token=True,
            batch=2 if c.sampler.guided else 1,
            paired=c.sampler.guided,
            macs=c.layers * projections,
        )

    def on_meta(self) -> Self:
        found = copy.copy(self)
        found.device = torch.device("meta")
        found.transformer = copy.deepcopy(self.transformer).to("meta")
        return found

    def memory_parts(self, shape: Shape, prompt: int) -> MemoryParts:
        c, vae = self.config, self.transformer.vae
        x = torch.empty(shape.batch, max(prompt, 1), c.hidden, dtype=self.dtype, device="meta")
        codes = torch.empty(1, *c.grid, c.depth, dtype=torch.int64, device="meta")
        return MemoryParts(
            weights=tensor_bytes(self.transformer.parameters()),
            decoder=0,  # among the weights
            prompt=0,  # in the cache
            activations=peak(lambda: self.transformer.trunk(FreeAttention(), x)),
            decoding=peak(lambda: vae.decode(vae.quantizer.sum(codes))),
        )

    def latent_size(self, shape: Shape, frames: int) -> tuple[int, ...]:
        return self._videos(shape), frames, *self.config.grid, self.config.depth

    def check_latents(self, shape: Shape, latents: Any) -> None:
        super().check_latents(shape, latents)
        low, high = int(latents.min()), int(latents.max())
        if low < 0 or high >= self.config.codes:
            raise TachyscopeError(
                f"latents must be codes from 0 to {self.config.codes - 1}, got {low} to {high}: "
                f"take session.latents"
            )

    def rope(self, shape: Shape) -> Rope:
        weights = (float(shape.tokens_per_frame), float(shape.grid[1]), 1.0)
        c = self.config
        return Rope(
            ((shape.head_dim, weights),), theta=c.theta, interleaved=False, scale=c.rope_scale
        )

    def pixel_frames(self, latents: int) -> int:
        return latents

    def encode_prompt(self, prompt: str) -> Prompt:
        texts = (prompt, "") if self.config.sampler.guided else (prompt,)
        rows = [self.tokenizer.ids(check_prompt(text)) for text in texts]
        longest = max(map(len, rows))
        check("prompt tokens", longest, "tokens of a prompt", "shorten it")
        padded = [[0] * (longest - len(row)) + row for row in rows]
        return Prompt(torch.tensor(padded, device=self.device), tuple(map(len, rows)))

    def join_prompts(self, prompts: Sequence[Prompt]) -> Prompt:
        """Rows are [conditional…, unconditional…]."""
        longest = max(prompt.ids.shape[1] for prompt in prompts)
        rows, lengths = [], []
        for row in range(len(prompts[0].lengths)):
            for prompt in prompts:
                pads = longest - prompt.ids.shape[1]
                rows.append(nn.functional.pad(prompt.ids[row], (pads, 0)))
                lengths.append(prompt.lengths[row])
        return Prompt(torch.stack(rows), tuple(lengths))

    @torch.no_grad()
    def prefill_prompt(self, session: Session, prompt: Prompt) -> None:
        x = self.transformer.trunk.embed_tokens(prompt.ids)
        self._run(session, x, session.prompt_positions())
        session.commit()

    @torch.no_grad()
    def sample(self, session: Session, actions: Sequence[int] | Tensor) -> Tensor:
        """Codes [V, 1, rows, columns, D]."""
        c, shape, noise = self.config, session.shape, self.frame_noise(session)
        pos = shape.positions(session.latent_frame, 1, self.device)
        frame = self._token_frame(session, noise, pos, actions)
        if (drafted := session.plan.passes.sample_frame(session, frame)) is not None:
            return drafted.reshape(-1, 1, *c.grid, c.depth)
        session.meter.add("macs", shape.batch * shape.tokens_per_frame * self.transformer.head.macs)
        codes = []
        for i in range(shape.tokens_per_frame):
            hidden = session.features["hidden"]
            books = self.transformer.vae.quantizer
            codes.append(self.transformer.head.generate(hidden, books, c.sampler, noise[:, i]))
            self._feed(session, codes[-1][:, None], pos[i : i + 1], actions)
        return torch.stack(codes, 1).reshape(-1, 1, *c.grid, c.depth)

    def _token_frame(
        self, session: Session, noise: Tensor, pos: Tensor, actions: Sequence[int] | Tensor
    ) -> TokenFrame:
        head, books = self.transformer.head, self.transformer.vae.quantizer

        def feed(codes: Tensor, at: int) -> Tensor:
            return self._feed(session, codes, pos[at : at + codes.shape[1]], actions)

        def draw(states: Tensor, at: int) -> tuple[Tensor, Tensor]:
            session.meter.add("macs", states.shape[:2].numel() * head.macs)
            part = noise[:, at : at + states.shape[1]]
            logits = torch.empty_like(part).flatten(0, 1)
            codes = head.generate(
                states.flatten(0, 1), books, self.config.sampler, part.flatten(0, 1), logits
            )
            return codes.unflatten(0, part.shape[:2]), logits.unflatten(0, part.shape[:2])

        return TokenFrame(noise, self.config.sampler.pick, feed, draw)

    def frame_noise(self, session: Session) -> Tensor:
        """Noise [V, N, D, K] for the next frame's codes."""
        c, shape = self.config, session.shape
        each = self._videos(shape) // len(session.generators)
        sizes = each, shape.tokens_per_frame, c.depth, c.codes
        return torch.cat([draw_noise(x, sizes, self.device) for x in session.generators])

    @torch.no_grad()
    def sample_by(
        self, engine: DecodeEngine, session: Session, actions: Sequence[int] | Tensor
    ) -> Tensor:
        """`sample`, token after token by the decode engine."""
        tokens = session.shape.batch * session.shape.tokens_per_frame
        session.meter.add("macs", tokens * self.transformer.head.macs)
        codes = engine.frame(self.frame_noise(session), self._action(actions))
        return codes.reshape(-1, 1, *self.config.grid, self.config.depth)

    def decode_parts(self) -> DecodeParts:
        return decode_parts(self.transformer, self.config.sampler)

    @torch.no_grad()
    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        pos = session.shape.positions(session.latent_frame, 1, self.device)
        codes, before = latents.flatten(1, 3), session.features["hidden"]
        states = self._feed(session, codes, pos, actions)

        def logits() -> Tensor:
            return self._logits(torch.cat([before[:, None], states[:, :-1]], 1), codes)

        session.plan.passes.keep_frame(session.features, codes, logits)

    def _logits(self, states: Tensor, codes: Tensor) -> Tensor:
        """Guided logits [V, N, D, K] of given codes [V, N, D], for the states that predict them."""
        sums = self.transformer.vae.quantizer.sums(codes)
        sums = sums.repeat(len(states) // len(sums), 1, 1, 1)
        return self.config.sampler.guide(self.transformer.head(states, sums))

    @torch.no_grad()
    def score(self, session: Session, latents: Tensor, actions: Sequence[int]) -> Tensor:
        """Guided logits [V, N, D, K] of a given frame's codes; the session goes on as by `sample`.

        Token by token, so that what the session skips when sampling it skips here too.
        """
        codes = latents.flatten(1, 3)
        pos = session.shape.positions(session.latent_frame, 1, self.device)
        states = []
        for i in range(session.shape.tokens_per_frame):
            states.append(session.features["hidden"])
            self._feed(session, codes[:, i : i + 1], pos[i : i + 1], actions)
        return self._logits(torch.stack(states, 1), codes)

    @torch.no_grad()
    def decode_latents(self, session: Session, latents: Tensor, video: int = 0) -> np.ndarray:
        pixels = self.transformer.vae.decode(
            self.transformer.vae.quantizer.sum(latents.flatten(0, 1))
        )
        levels = pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
        return levels.movedim(1, -1).cpu().numpy()

    @torch.no_grad()
    def encode_frames(self, frames: np.ndarray) -> Tensor:
        """Latents [1, F, rows, columns, D] of frames uint8 [F, H, W, 3]."""
        if frames.shape[1:3] != self.config.size:
            high, wide = self.config.size
            raise TachyscopeError(
                f"{self.name} takes frames of {high}x{wide} pixels only, "
                f"got {frames.shape[1]}x{frames.shape[2]}: resize them"
            )
        levels = torch.from_numpy(np.ascontiguousarray(frames)).to(self.device, self.dtype)
        vectors = self.transformer.vae.encode(levels.movedim(-1, 1) / 127.5 - 1)
        return self.transformer.vae.quantizer.quantise(vectors)[None]

    def _videos(self, shape: Shape) -> int:
        return shape.batch // (2 if shape.paired else 1)

    def _feed(
        self, session: Session, codes: Tensor, pos: Tensor, actions: Sequence[int] | Tensor
    ) -> Tensor:
        """The trunk's states [B, S, W] of codes [V, S, D], in both rows of a pair."""
        x = self.transformer.embed(codes, self._action(actions))
        return self._run(session, torch.cat([x, x]) if session.shape.paired else x, pos)

    def _action(self, actions: Sequence[int] | Tensor) -> int | Tensor | None:
        if not self.actions:
            if any(actions):
                raise TachyscopeError(
                    f"{self.name} takes no actions, got {list(actions)}: leave them out"
                )
            return None
        if isinstance(actions, Tensor) and len(actions) == 1:
            return actions
        if len(actions) != 1 or not 0 <= actions[0] < len(self.actions):
            raise TachyscopeError(
                f"{self.name} takes one action a frame, from 0 to {len(self.actions) - 1}, "
                f"got {list(actions)}: give one of these"
            )
        return actions[0]

    def _run(self, session: Session, x: Tensor, pos: Tensor) -> Tensor:
        session.begin(pos=pos, step=0, steps=1, noise=(0.0,))
        states = self.transformer.trunk(session, x)
        # the last token's state predicts the next token, which may be the next frame's first
        session.features["hidden"] = states[:, -1]
        return states


def load_vila(
    folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> VilaModel:
    """The model in a published folder, in the dtype that its config names if none is given."""
    folder = Path(folder)
    # releases differ in whether the model is the folder or is inside it
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    files = {part: read_json(folder / part / "config.json") for part in ("", *PARTS)}
    config = VilaConfig.parse(files)
    with torch.device("meta"):
        model = Vila(config)
    found = {part: _read(folder / part) for part in PARTS}
    if files["llm"].get("tie_word_embeddings"):
        llm = found["llm"][0]
        llm.setdefault("lm_head.weight", llm.get("model.embed_tokens.weight", Tensor()))
    if config.shared_codebook:
        _repeat_codebook(found["vision_tower"][0], config.depth)
    # configurations may say anything: memory is taken once the files have borne them out
    for part, (tensors, where) in found.items():
        matched(getattr(model, part), tensors, where, _unused(config))
    model.to(dtype or _dtype(files[""])).to_empty(device=device)
    for part, (tensors, where) in found.items():
        fit(getattr(model, part), tensors, where, _unused(config))
    if config.tokenizer == "bytes":
        tokenizer: Tokenizer = BytesTokenizer(config.vocab)
    elif config.tokenizer == "words":
        tokenizer = WordTokenizer(config.vocab)
    else:
        tokenizer = ChatTokenizer.load(folder / "llm")
    adapter = VilaModel(model.eval(), config, tokenizer, name=folder.resolve().name)
    if (folder / CALIBRATION).is_file():
        adapter.calibration = folder / CALIBRATION
    return adapter


def save_vila(model: VilaModel, folder: Path | str) -> None:
    """Write the model as the published folders hold it."""
    folder = Path(folder)
    files = model.config.files()
    files[""]["model_dtype"] = str(model.dtype)
    for part in PARTS:
        (folder / part).mkdir(parents=True, exist_ok=True)
        tensors = getattr(model.transformer, part).state_dict()
        # a file cannot say that two names are one tensor
        write_tensors(folder / part / WEIGHTS[0], {k: v.clone() for k, v in tensors.items()})
        write_json(folder / part / "config.json", files[part])
    model.tokenizer.save(folder / "llm")
    write_json(folder / "config.json", files[""])


def toy_tokens(
    seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> VilaModel:
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
    # drawn on the CPU, so that it is the same model on every device
    with own_numerics(seed):
        model = Vila(config).eval().to(device, dtype)
    return VilaModel(model, config, BytesTokenizer(config.vocab), name="toy-tokens")


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
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for dtype in kinds:
        if name in (str(dtype), str(dtype).removeprefix("torch.")):
            return dtype
    raise TachyscopeError(
        f"config.json: model_dtype must be one of {', '.join(map(str, kinds))}, got {name!r}: "
        f"mend it"
    )
