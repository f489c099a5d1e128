"""What a model keeps of its stream between chunks, besides the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

NAMES = {  # field: its name in a state; other names there are a decoder's
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
    """Tensors that a chunk leaves for the next one; None if the model has no use for them."""

    hidden: Tensor | None = None  # a token model's hidden state [B, W] after the newest token
    window: Tensor | None = None  # of a rolling model: chunks in flight behind the next one
    camera: Tensor | None = None  # a world model's camera position
    image: Tensor | None = None  # the conditioning latents of a first picture
    seen: Tensor | None = None  # that picture's tokens for cross-attention, in place of a prompt
    pressed: Tensor | None = None  # the newest latent frames' actions
    moves: Tensor | None = None  # what layers keep of them
    shown: Tensor | None = None  # frames that were decoded already and are encoded again
    codes: Tensor | None = None  # the last frame's codes [V, N, D], to draft from
    logits: Tensor | None = None  # and their logits
    # a source video's latents for the next chunk and the noise level that they get; a state leaves
    # them out, since the stream reads them again
    source: Tensor | None = None
    strength: float = 1.0
    decoders: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def last_state(self) -> Tensor:
        """`hidden`, which every prompt and frame leaves."""
        assert self.hidden is not None
        return self.hidden

    def decoder(self, video: int = 0) -> dict[str, Tensor]:
        """The streaming state of a video's decoder, by the decoder's own names."""
        return self.decoders.setdefault(video, {})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their names in a state."""
        named = {f"features.{NAMES[name]}": getattr(self, name) for name in NAMES}
        for video, state in self.decoders.items():
            prefix = f"features.video{video}." if video else "features."
            named |= {prefix + name: x for name, x in state.items()}
        return {name: x for name, x in named.items() if x is not None}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> Self:
        """From the tensors of a state."""
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
