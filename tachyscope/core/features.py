"""What a model keeps of its stream between chunks, beside the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

NAMES = {  # in a state; others are a decoder's
    "hidden": "hidden",
    "window": "window",
    "camera": "camera",
    "image": "image",
    "seen": "world.seen",
    "pressed": "world.pressed",
    "moves": "world.moves",
    "shown": "shown",
    "codes": "draft.codes",
    "logits": "draft.logits",
}


@dataclass(slots=True)
class Features:
    """Tensors that a chunk leaves for the next; None where a model has no such."""

    hidden: Tensor | None = None  # a token model's state [B, W], which predicts the next token
    window: Tensor | None = None  # chunks that are under way behind the next one
    camera: Tensor | None = None  # where a world model's camera stands
    image: Tensor | None = None  # what a model makes of a first picture that it is told beside
    seen: Tensor | None = None  # of that picture, what cross-attention is given in a prompt's place
    pressed: Tensor | None = None  # the newest latent frames' actions, and what they left in layers
    moves: Tensor | None = None
    shown: Tensor | None = None  # frames that were decoded already, to be encoded again
    codes: Tensor | None = None  # of the last frame [V, N, D], and their logits, to draft from
    logits: Tensor | None = None
    # the next chunk's latents of a source video, and the noise level that they are brought to;
    # the stream has both, and no state of them is saved
    source: Tensor | None = None
    strength: float = 1.0
    decoders: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def last_state(self) -> Tensor:
        """`hidden`, behind a prompt or a frame."""
        assert self.hidden is not None
        return self.hidden

    def decoder(self, video: int = 0) -> dict[str, Tensor]:
        """The streaming state of a video's decoder, which that keeps by names of its own."""
        return self.decoders.setdefault(video, {})

    def tensors(self) -> dict[str, Tensor]:
        """By their names in a state."""
        named = {f"features.{NAMES[name]}": getattr(self, name) for name in NAMES}
        for video, state in self.decoders.items():
            prefix = f"features.video{video}." if video else "features."
            named |= {prefix + name: x for name, x in state.items()}
        return {name: x for name, x in named.items() if x is not None}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> Self:
        """From those of a state."""
        features, fields = cls(), {name: field for field, name in NAMES.items()}
        for key, x in tensors.items():
            name = key.removeprefix("features.")
            if name in fields:
                setattr(features, fields[name], x)
            elif key.startswith("features."):
                video, _, rest = name.removeprefix("video").partition(".")
                several = name.startswith("video") and video.isdecimal()
                at, name = (int(video), rest) if several else (0, name)
                features.decoder(at)[name] = x
        return features
