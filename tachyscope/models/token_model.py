"""What token models share: prompts in the cache, a pass for each token, sampling of codes."""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.limits import PART, Bound, check, check_prompt
from tachyscope.core.session import Session
from tachyscope.core.types import Mlp, Shape
from tachyscope.models.base import FrameEngine, Ready, VideoModel
from tachyscope.models.config_schema import WORDS, Config, entry


@dataclass(frozen=True, slots=True)
class Sampler(Config):
    """Sampling of a code from logits; rows are [conditional…, unconditional…] unless cfg is 1."""

    subject, section = "a sampler's", ""

    cfg: float = entry(3.0, Bound(0.0, 1e3))
    temperature: float = entry(1.0, Bound(1e-6, 1e3))
    top_k: int = entry(900, WORDS)
    top_p: float = entry(0.96, PART)

    @property
    def guided(self) -> bool:
        """Whether each video has two rows, for classifier-free guidance."""
        return self.cfg != 1

    def guide(self, logits: Tensor) -> Tensor:
        """Guided logits [V, ...] of V videos from those of their rows, in float32 or wider."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not self.guided:
            return logits
        with_prompt, without = logits.chunk(2)
        return without + self.cfg * (with_prompt - without)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that `pick` samples, of guided logits [..., K]; 0 for dropped codes."""
        kept, index = self._keep(logits)
        return torch.zeros_like(logits).scatter(-1, index, kept.softmax(-1))

    def pick(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Sample a code [...] of guided logits [..., K] with exponential noise [..., K].

        The noise is indexed by code, not by rank: runs with equal noise draw the same code if their
        logits nearly agree.
        """
        kept, index = self._keep(logits)
        best = (kept - noise.gather(-1, index).log()).argmax(-1, keepdim=True)
        return index.gather(-1, best)[..., 0]

    def _keep(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The top k logits, best first; -inf once the mass before one reaches top_p."""
        kept, index = (logits / self.temperature).topk(min(self.top_k, logits.shape[-1]))
        if self.top_p < 1:
            mass = kept.softmax(-1).cumsum(-1)
            kept = torch.cat(
                [
                    kept[..., :1],
                    kept[..., 1:].masked_fill(mass[..., :-1] >= self.top_p, float("-inf")),
                ],
                -1,
            )
        return kept, index


def draw_noise(generator: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Exponential noise for `Sampler.pick`, the only randomness of a video."""
    noise = torch.empty(shape, dtype=torch.float32, device=generator.device)
    noise.exponential_(generator=generator)
    return noise.clamp_min_(torch.finfo(noise.dtype).tiny).to(device, non_blocking=True)


class Attends(Protocol):
    """The session's methods that a trunk calls; training has its own."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def mlp(self, layer: int, x: Tensor, fn: Mlp) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids [B, L], padded on the left, and the number of prompt tokens in each row."""

    ids: Tensor
    lengths: tuple[int, ...]


class TokenModel(VideoModel):
    """A model that samples a frame token by token; its latents are the frame's codes.

    A subclass defines the modules: the embeddings of prompt and codes, the trunk, and the head that
    samples codes from its states.
    """

    kind = "tokens"
    frame_dim = 1
    stock = "cache=keep_all attention=dense text=none replay=none"
    grid: tuple[int, int]  # tokens of a frame: rows, columns
    depth: int  # codes of a token
    codes: int  # size of a codebook
    sampler: Sampler
    draw_macs: int  # multiply-adds from the trunk's state to a token's codes

    @abc.abstractmethod
    def prompt_ids(self, prompt: str) -> list[int]:
        """A prompt's tokens."""

    @abc.abstractmethod
    def embed_prompt(self, ids: Tensor) -> Tensor:
        """The trunk's inputs [B, L, W] for a prompt's ids [B, L]."""

    @abc.abstractmethod
    def embed(self, codes: Tensor, actions: int | Tensor | None) -> Tensor:
        """The trunk's inputs [V, S, W] for codes [V, S, D] of a frame."""

    @abc.abstractmethod
    def run_trunk(self, session: Attends, x: Tensor) -> Tensor:
        """The trunk's states [B, S, W] for inputs [B, S, W]."""

    @abc.abstractmethod
    def draw(self, states: Tensor, noise: Tensor, logits: Tensor | None = None) -> Tensor:
        """Codes [V, D] for states [B, W] and noise [V, D, K]; a video's rows share codes.

        The guided logits are written to `logits` [V, D, K], if it is given.
        """

    @abc.abstractmethod
    def logits(self, states: Tensor, codes: Tensor) -> Tensor:
        """Guided logits [V, N, D, K] of given codes [V, N, D], from the states before them."""

    def check_size(self, size: tuple[int, int] | None) -> None:
        """Raise unless a size in pixels is the model's own, the only one it was trained on."""
        if size is not None and tuple(size) != self.size:
            raise TachyscopeError(
                f"{self.name} makes frames of {self.size[0]}x{self.size[1]} pixels only, "
                f"got {size[0]}x{size[1]}: leave the size out"
            )

    def check_frames(self, frames: np.ndarray) -> None:
        """Raise unless given frames are of the model's own size."""
        if frames.shape[1:3] != self.size:
            high, wide = self.size
            raise TachyscopeError(
                f"{self.name} takes frames of {high}x{wide} pixels only, "
                f"got {frames.shape[1]}x{frames.shape[2]}: resize them"
            )

    def on_meta(self) -> Self:
        clone = copy.copy(self)
        clone.device = torch.device("meta")
        clone.transformer = copy.deepcopy(self.transformer).to("meta")
        return clone

    def latent_size(self, shape: Shape, frames: int) -> tuple[int, ...]:
        return self._videos(shape), frames, *self.grid, self.depth

    def check_latents(self, shape: Shape, latents: Any) -> None:
        super().check_latents(shape, latents)
        low, high = int(latents.min()), int(latents.max())
        if low < 0 or high >= self.codes:
            raise TachyscopeError(
                f"latents must be codes from 0 to {self.codes - 1}, got {low} to {high}: "
                f"take those of stream.generate()"
            )

    def encode_prompt(self, prompt: str) -> Prompt:
        texts = (prompt, "") if self.sampler.guided else (prompt,)
        rows = [self.prompt_ids(check_prompt(text)) for text in texts]
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
        self._run(session, self.embed_prompt(prompt.ids), session.memory.prompt_positions())
        session.commit()

    @torch.no_grad()
    def sample(
        self,
        session: Session,
        actions: Sequence[int] | Tensor,
        ready: Ready | None = None,
    ) -> Tensor:
        """Codes [V, 1, rows, columns, D]."""
        codes = self._sample_codes(session, actions).reshape(-1, 1, *self.grid, self.depth)
        if ready is not None:
            ready(codes)
        return codes

    @torch.no_grad()
    def sample_with_engine(
        self, engine: FrameEngine, session: Session, actions: Sequence[int] | Tensor
    ) -> Tensor:
        codes = engine.frame(self.frame_noise(session), self._action(actions))
        session.work.macs += engine.drawn * self.draw_macs
        return codes.reshape(-1, 1, *self.grid, self.depth)

    def _sample_codes(self, session: Session, actions: Sequence[int] | Tensor) -> Tensor:
        shape, noise = session.shape, self.frame_noise(session)
        pos = shape.positions(session.memory.latent_frame, 1, self.device)
        drafter = ModelDrafter(self, session, pos, actions)
        passes, features = session.plan.passes, session.memory.features
        if (drafted := passes.sample_frame(session, features, drafter, noise)) is not None:
            return drafted
        session.work.macs += shape.batch * shape.tokens_per_frame * self.draw_macs
        codes = []
        for i in range(shape.tokens_per_frame):
            codes.append(self.draw(features.last_state(), noise[:, i]))
            self.feed(session, codes[-1][:, None], pos[i : i + 1], actions)
        return torch.stack(codes, 1)

    def frame_noise(self, session: Session) -> Tensor:
        """Noise [V, N, D, K] for the next frame's codes."""
        shape = session.shape
        each = self._videos(shape) // len(session.generators)
        sizes = each, shape.tokens_per_frame, self.depth, self.codes
        if self.sampler.top_k == 1:  # greedy
            one = torch.ones((), dtype=torch.float32, device=self.device)
            return one.expand(self._videos(shape), *sizes[1:])
        return torch.cat([draw_noise(x, sizes, self.device) for x in session.generators])

    @torch.no_grad()
    def prefill_latents(
        self, session: Session, latents: Tensor, actions: Sequence[int], shown: bool = False
    ) -> None:
        pos = session.shape.positions(session.memory.latent_frame, 1, self.device)
        codes, before = latents.flatten(1, 3), session.memory.features.hidden
        states = self.feed(session, codes, pos, actions)

        def logits() -> Tensor:
            first = states[:, :1] if before is None else before[:, None]
            return self.logits(torch.cat([first, states[:, :-1]], 1), codes)

        session.plan.passes.keep_frame(session.memory.features, codes, logits)

    @torch.no_grad()
    def score(self, session: Session, latents: Tensor, actions: Sequence[int]) -> Tensor:
        """Guided logits [V, N, D, K] of a given frame's codes; advances the session like `sample`.

        Token by token, so that the session skips the same work as when sampling.
        """
        codes = latents.flatten(1, 3)
        pos = session.shape.positions(session.memory.latent_frame, 1, self.device)
        states = []
        for i in range(session.shape.tokens_per_frame):
            states.append(session.memory.features.last_state())
            self.feed(session, codes[:, i : i + 1], pos[i : i + 1], actions)
        return self.logits(torch.stack(states, 1), codes)

    @torch.no_grad()
    def finite(self, session: Session, latents: Tensor) -> Tensor:
        # codes are always finite, so the logits of a frame's last token are checked
        states, codes = session.memory.features.last_state()[:, None], latents.flatten(1, 3)[:, -1:]
        return self.logits(states, codes).isfinite().all()

    def _videos(self, shape: Shape) -> int:
        return shape.batch // (2 if shape.paired else 1)

    def feed(
        self,
        session: Session,
        codes: Tensor,
        pos: Tensor,
        actions: Sequence[int] | Tensor,
        drafted: bool = False,
    ) -> Tensor:
        """The trunk's states [B, S, W] of codes [V, S, D], repeated for both rows of a pair."""
        x = self.embed(codes, self._action(actions))
        return self._run(session, torch.cat([x, x]) if session.shape.paired else x, pos, drafted)

    def _action(self, actions: Sequence[int] | Tensor) -> int | Tensor | None:
        if not self.actions:
            if any(actions):
                raise TachyscopeError(
                    f"{self.name} takes no actions, got {list(actions)}: leave them out"
                )
            return None
        if isinstance(actions, Tensor) and actions.shape == (1,):
            return actions
        first: Any = actions[0] if len(actions) == 1 else None
        if isinstance(first, Tensor) and first.dim() == 1:  # one for each video
            return first[:, None]
        if len(actions) != 1 or not 0 <= actions[0] < len(self.actions):
            raise TachyscopeError(
                f"{self.name} takes one action a frame, from 0 to {len(self.actions) - 1}, "
                f"got {list(actions)}: give one of these"
            )
        return actions[0]

    def _run(self, session: Session, x: Tensor, pos: Tensor, drafted: bool = False) -> Tensor:
        session.begin(pos=pos, step=0, steps=1, noise=(0.0,), drafted=drafted)
        states = self.run_trunk(session, x)
        # the last token's state predicts the next token, which may be the next frame's first
        session.memory.features.hidden = states[:, -1]
        return states


@dataclass(frozen=True, slots=True)
class ModelDrafter:
    """Feeds and draws several tokens of a session's frame by a model's own passes."""

    model: TokenModel
    session: Session
    pos: Tensor  # of the frame's tokens
    actions: Sequence[int] | Tensor

    def feed(self, codes: Tensor, at: int) -> Tensor:
        pos = self.pos[at : at + codes.shape[1]]
        return self.model.feed(self.session, codes, pos, self.actions, drafted=True)

    def draw(self, states: Tensor, noise: Tensor, logits: Tensor | None = None) -> Tensor:
        self.session.work.macs += states.shape[:2].numel() * self.model.draw_macs
        made = None if logits is None else torch.empty_like(noise).flatten(0, 1)
        codes = self.model.draw(states.flatten(0, 1), noise.flatten(0, 1), made)
        if logits is not None and made is not None:
            logits.copy_(made.view_as(logits))
        return codes.unflatten(0, noise.shape[:2])

    def pick(self, logits: Tensor, noise: Tensor) -> Tensor:
        return self.model.sampler.pick(logits, noise)


class OneCodeModel(TokenModel):
    """A token model with one code a token, drawn from the logits of a linear head."""

    depth = 1

    @abc.abstractmethod
    def head(self, states: Tensor) -> Tensor:
        """Logits [..., K] for states [..., W]."""

    def draw(self, states: Tensor, noise: Tensor, logits: Tensor | None = None) -> Tensor:
        scores = self.sampler.guide(self.head(states))[:, None]
        if logits is not None:
            logits.copy_(scores)
        return self.sampler.pick(scores, noise)

    def logits(self, states: Tensor, codes: Tensor) -> Tensor:
        return self.sampler.guide(self.head(states))[:, :, None]
