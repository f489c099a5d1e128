"""Context rules: how a published model remembers a finished chunk and changes the prompt."""

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
    """How a model denoises a chunk, remembers it, and changes the prompt.

    These methods serve most models; a rule overrides those in which its authors differ.
    """

    subject, section = "a context rule's", ""
    name = ""
    kind = "chunks"  # selects the form of named plans

    @property
    def decodes_in_loop(self) -> bool:
        """Whether KV is computed from decoded frames, so that decoding precedes the next chunk."""
        return False

    @property
    def graph_capturable(self) -> bool:
        """Whether chunks of a full cache do the same work, which a CUDA graph can replay."""
        return not self.decodes_in_loop

    def check(self, config: WanConfig) -> tuple[str, object] | None:
        """What a configuration must be for this rule, and what it is; None if it fits."""
        return None

    def rolling_frames(self, config: WanConfig) -> int:
        """Latent frames that are denoised along with the chunk that is finished next."""
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
        """`VideoModel.rewind` by this rule."""
        return None

    def without_reencoding(self) -> ContextRule:
        """The rule for a model without a VAE, which is run to measure time."""
        return self

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.name, **written(self)}


@final
@dataclass(frozen=True)
class Absolute(ContextRule):
    """The clean pass keeps a chunk's own positions and attends to the past: Self-Forcing."""

    name = "absolute"


@final
@dataclass(frozen=True)
class Restart(ContextRule):
    """Every `frames` latent frames the cache is cleared but for the last chunk: CausVid.

    With `reencode` that chunk's first frame is then encoded again, as a video's first.
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
        stretch = self.frames - chunk  # new latent frames between two restarts
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
    """A chunk's clean pass attends to the chunk alone: Krea Realtime.

    With `reencode` each chunk's first frame is encoded again before.
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
    """As many chunks as steps are denoised together, each one step behind: Rolling-Forcing.

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

    This holds for the authors' plan, a window of `window` latent frames with a sink of `sink`. With
    other plans a new prompt is prefilled as in other models.
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
        if before < 0:  # a session without a stream knows its last chunk alone
            return None
        session.memory.rewind(frames, keep)
        return latents.narrow(model.frame_dim, before, frames)


@final
@dataclass(frozen=True)
class Kept(ContextRule):
    """A new prompt leaves the cache unchanged: LingBot-World, ABot-World."""

    name = "kept"

    def rewind(self, model: WanModel, session: Session, held: Sequence[Tensor]) -> Tensor | None:
        return held[-1].narrow(model.frame_dim, 0, 0)


RULES: dict[str, type[ContextRule]] = {
    rule.name: rule for rule in (Absolute, Restart, Alone, Rolling, Recache, Kept)
}


def rule_from_json(value: Any, tables: Tables) -> ContextRule:
    """The context rule of a config.json, such as {"rule": "restart", "frames": 21}."""
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
    """The chunk with its first latent frame encoded again, as the first of a video.

    The last of the pixel frames that it decodes to is encoded. The decoded frames are kept for
    `decode_latents`.
    """
    decoder, frames = model.require_decoder(), latents.shape[2]
    # as in the authors' code, the frames are not rounded to 8 bits before
    features, frame = session.memory.features, session.memory.latent_frame
    pixels = decoder.levels(latents, features.decoder())
    features.shown = pixels.round().to(torch.uint8).cpu()
    later = decoder.pixel_frames(frame + frames) - decoder.pixel_frames(frame + 1)
    last = len(pixels) - later
    try:
        again = decoder.encode(pixels[last - 1 : last])
    except TachyscopeError as fault:
        raise TachyscopeError(
            f"{model.name} encodes a frame again after showing it, and its decoder only shows: "
            f"load it with its VAE"
        ) from fault
    return torch.cat([again.to(latents), latents[:, :, 1:]], 2)
