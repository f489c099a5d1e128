"""What a finished chunk leaves for the next: one rule a published model's way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, spelled
from tachyscope.core.limits import LATENTS
from tachyscope.core.session import Session
from tachyscope.models.config_schema import Config, Tables, entry, written
from tachyscope.models.wan import sampler
from tachyscope.models.wan.parts import Controls

if TYPE_CHECKING:
    from tachyscope.models.wan.config import WanConfig
    from tachyscope.models.wan.model import WanModel


@dataclass(frozen=True)
class ContextRule(Config):
    """How a model denoises a chunk, remembers it, and takes up another prompt.

    The methods here are most models' way; a rule overrides where its authors differ.
    """

    subject, section = "a context rule's", ""
    name = ""
    kind = "chunks"  # which named plans are meant

    @property
    def decodes_in_loop(self) -> bool:
        """KV is computed from decoded frames: decoding cannot overlap the next chunk."""
        return False

    @property
    def graph_capturable(self) -> bool:
        """Chunks do the same work once the cache is full, so that a CUDA graph can replay it."""
        return not self.decodes_in_loop

    def check(self, config: WanConfig) -> tuple[str, object] | None:
        """What a configuration must be for this rule, and what it is, where these differ."""
        return None

    def rolling_frames(self, config: WanConfig) -> int:
        """Latent frames that are under way behind the chunk that is finished next."""
        return 0

    def denoise(self, model: WanModel, session: Session, controls: Controls) -> Tensor:
        """The next chunk's clean latents."""
        return sampler.denoise_chunk(model, session, controls)

    def remember(
        self, model: WanModel, session: Session, latents: Tensor, controls: Controls
    ) -> None:
        """The clean pass over a finished chunk, or over given latents."""
        sampler.clean_pass(model, session, latents, controls)

    def rewind(self, model: WanModel, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        """Make room for a new prompt's KV: the latents to prefill in one pass after it.

        `held` are the newest chunks. None where they are prefilled chunk by chunk instead, in a
        session that has forgotten everything.
        """
        return None

    def without_reencoding(self) -> ContextRule:
        """The rule for a model that has no VAE: it is run for its speed."""
        return self

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.name, **written(self)}


@final
@dataclass(frozen=True)
class Absolute(ContextRule):
    """A chunk is remembered as it was made, at its own time, and reads the past: Self-Forcing."""

    name = "absolute"


@final
@dataclass(frozen=True)
class Restart(ContextRule):
    """After so many latent frames all but the last chunk is forgotten: CausVid.

    With `reencode` the chunk then begins with a frame encoded again, as a video's first.
    """

    frames: int = entry(21, LATENTS)
    reencode: bool = entry(False)
    name = "restart"

    @property
    def decodes_in_loop(self) -> bool:
        return self.reencode

    @property
    def graph_capturable(self) -> bool:
        return False

    def check(self, config: WanConfig) -> tuple[str, object] | None:
        if self.frames > config.chunk:
            return None
        return f"frames must be over its chunk of {config.chunk} and at most {LATENTS.high:,}", (
            self.frames
        )

    def remember(
        self, model: WanModel, session: Session, latents: Tensor, controls: Controls
    ) -> None:
        chunk, frame = model.config.chunk, session.memory.latent_frame
        stretch = self.frames - chunk  # new latent frames of each
        end, before = (max(0, x - chunk) for x in (frame + latents.shape[2], frame))
        if end // stretch > before // stretch:
            session.memory.forget()
            if self.reencode and frame:
                latents = reencode_first(model, session, latents)
                model.restart_decoder(session, latents)
        sampler.clean_pass(model, session, latents, controls)

    def without_reencoding(self) -> ContextRule:
        return replace(self, reencode=False)


@final
@dataclass(frozen=True)
class Alone(ContextRule):
    """A chunk's clean pass reads nothing of the chunks before it: Krea Realtime.

    With `reencode` each chunk is remembered with its first frame encoded again.
    """

    reencode: bool = entry(False)
    name = "alone"

    @property
    def decodes_in_loop(self) -> bool:
        return self.reencode

    def remember(
        self, model: WanModel, session: Session, latents: Tensor, controls: Controls
    ) -> None:
        if self.reencode and session.memory.latent_frame:
            latents = reencode_first(model, session, latents)
        sampler.clean_pass(model, session, latents, controls, past=False)

    def without_reencoding(self) -> ContextRule:
        return replace(self, reencode=False)


@final
@dataclass(frozen=True)
class Rolling(ContextRule):
    """As many chunks as steps are denoised together, each a step behind the last: Rolling-Forcing.

    Every pass finishes the first of them.
    """

    name = "rolling"
    kind = "rolling"

    def check(self, config: WanConfig) -> tuple[str, object] | None:
        if config.image != "frames":
            return "takes a given picture as frames alone", f"image={config.image}"
        if not (config.first_steps or config.actions):
            return None
        return "leaves no room for first_steps and actions", (
            f"first_steps={config.first_steps}, actions={config.actions!r}"
        )

    def rolling_frames(self, config: WanConfig) -> int:
        return (len(config.steps) - 1) * config.chunk

    def denoise(self, model: WanModel, session: Session, controls: Controls) -> Tensor:
        return sampler.denoise_rolling(model, session)


@final
@dataclass(frozen=True)
class Recache(ContextRule):
    """A new prompt recomputes the window's KV in one pass, and keeps the sink's: LongLive.

    So it is where the authors' plan runs, a window of `window` latent frames of which the first
    `sink` stay. By other plans a new prompt is taken up as in other models.
    """

    window: int = entry(12, LATENTS)
    sink: int = entry(3, LATENTS)
    name = "recache"

    def check(self, config: WanConfig) -> tuple[str, object] | None:
        cache = f"cache=window:budget={self.window}f,sink={self.sink}"
        if config.stock.split()[:1] == [cache] and not config.actions:
            return None
        return f"needs a stock plan with {cache} first, and no actions", (
            f"stock={config.stock!r}, actions={config.actions!r}"
        )

    def rewind(self, model: WanModel, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        if session.plan != session.plan.parse("stock", model.kind, model.stock):
            return None
        keep = self.sink if session.memory.latent_frame > self.window else 0
        frames = min(session.memory.latent_frame, self.window) - keep
        latents = torch.cat(list(held), model.frame_dim)
        before = latents.shape[model.frame_dim] - frames
        if before < 0:  # of a session that was made by hand, no more than its last chunk is known
            return None
        session.memory.rewind(frames, keep)
        return latents.narrow(model.frame_dim, before, frames)


@final
@dataclass(frozen=True)
class Kept(ContextRule):
    """A new prompt leaves what is remembered as it is: LingBot-World, ABot-World."""

    name = "kept"

    def rewind(self, model: WanModel, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        return held[-1].narrow(model.frame_dim, 0, 0)


RULES: dict[str, type[ContextRule]] = {
    rule.name: rule for rule in (Absolute, Restart, Alone, Rolling, Recache, Kept)
}


def rule_from_json(value: Any, tables: Tables) -> ContextRule:
    """The rule that a config.json names under "tachyscope": {"rule": "restart", "frames": 21}."""
    path = "tachyscope", "context"
    name = value.get("rule") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or name not in RULES:
        raise TachyscopeError(
            f"{tables.name(path)} must be {{'rule': NAME}} with one of {', '.join(RULES)}, "
            f"got {spelled(value)}: change it"
        )
    tables.only(RULES[name], ".".join(path), ["rule"], under=path)
    return RULES[name](**tables.fields(RULES[name], path))


def reencode_first(model: WanModel, session: Session, latents: Tensor) -> Tensor:
    """The chunk, its first latent frame encoded again as the first of a video.

    It is encoded from the last of the frames it is decoded to. The chunk's frames are kept for
    `decode_latents`.
    """
    decoder, frames = model.require_decoder(), latents.shape[2]
    # as in the authors' code, what is encoded again was not rounded to 8 bits
    pixels = decoder.levels(latents, session.memory.features.decoder())
    session.memory.features.shown = pixels.round().to(torch.uint8).cpu()
    later = decoder.pixel_frames(session.memory.latent_frame + frames) - decoder.pixel_frames(
        session.memory.latent_frame + 1
    )
    last = len(pixels) - later
    try:
        again = decoder.encode(pixels[last - 1 : last])
    except TachyscopeError as fault:
        raise TachyscopeError(
            f"{model.name} encodes a frame again after showing it, and its decoder only shows: "
            f"load it with its VAE"
        ) from fault
    return torch.cat([again.to(latents), latents[:, :, 1:]], 2)
