"""Types shared by all rooms: a model's shape and RoPE, a pass, a chunk.

Shape letters: B batch, H query heads, Hkv key/value heads, S tokens of a pass, C slots of a cache,
N tokens of a latent frame, D head size, W model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown


def dtype_name(dtype: torch.dtype | str) -> str:
    """`float32` of torch.float32, or of its name in either form."""
    return str(dtype).removeprefix("torch.")


def kind_of(tensor: Tensor) -> str:
    """A tensor's dtype and shape, for an error."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a session must know of a model at one video size."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # channels of the residual stream
    grid: tuple[int, int]  # tokens of a latent frame: rows, columns
    chunk: int = 1  # latent frames finished together
    # of a rolling model: latent frames in flight behind the chunk, at rising noise levels
    rolling_frames: int = 0
    passes: int = 1  # passes over a chunk, the clean one included; 1 in token models
    text: int = 0  # prompt tokens that cross-attention reads; 0: no cross-attention
    token_by_token: bool = False  # causal within a frame: one token a pass
    batch: int = 1  # rows made together; a CFG pair is two of them
    paired: bool = False  # rows are [conditional…, unconditional…]
    macs: int = 0  # multiply-adds of one token's linears outside the MLPs, all layers
    poses: bool = False  # whether the model has camera poses
    fp8_attention: bool = False  # whether self-attention is computed in float8
    rank: int = 0  # this process, of those that make a stream with some heads each
    ranks: int = 1  # how many they are

    @property
    def tokens_per_frame(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def max_pass_tokens(self) -> int:
        """Tokens of the widest pass: the chunk's, and those in flight behind it."""
        return (self.chunk + self.rolling_frames) * self.tokens_per_frame

    def positions(self, frame: int, frames: int, device: torch.device | str = "cpu") -> Tensor:
        """(t, y, x) of every token of `frames` latent frames from `frame` on: [frames * N, 3]."""
        t = torch.arange(frame, frame + frames, dtype=torch.float32, device=device)
        y = torch.arange(self.grid[0], dtype=torch.float32, device=device)
        x = torch.arange(self.grid[1], dtype=torch.float32, device=device)
        return torch.cartesian_prod(t, y, x)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, computed from (t, y, x): no table, so no maximum length.

    `axes` lists (channels, weights): that many channels of a head rotate with the coordinate
    weights · (t, y, x). Wan has three axes of one coordinate each; LLaMA has one axis, with the
    token's index t·N + y·W + x. Channel pair i of an axis has frequency theta^(-2i / channels).
    """

    axes: tuple[tuple[int, tuple[float, float, float]], ...]
    theta: float = 10000.0
    interleaved: bool = True  # pairs are (2i, 2i + 1); else (i, i + half)
    scale: float = 1.0  # coordinates are divided by it (linear scaling)
    speeds: tuple[float, ...] = ()  # frequencies of all pairs, axis after axis; if empty, theta's
    amplitude: float = 1.0  # cos and sin are multiplied by it (YaRN's attention factor)

    def frequencies(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Every channel's coordinate, as weights [3, D] of (t, y, x), and its frequency [D].

        The first channel of a pair has the negative one, for the sign of sin in the rotation. Made
        on the device: a copy from the host would synchronise.
        """
        kind: dict[str, Any] = {"dtype": torch.float64, "device": device}
        weights, speeds = [], []
        for channels, parts in self.axes:
            weights.append(torch.stack([torch.full((channels // 2,), w, **kind) for w in parts]))
            i = torch.arange(0, channels, 2, **kind)
            speeds.append(self.theta ** (-i / channels) / self.scale)

        def pairs(first: Tensor, second: Tensor) -> Tensor:
            return torch.stack([first, second], -1 if self.interleaved else -2).flatten(-2)

        weight, speed = torch.cat(weights, -1), torch.cat(speeds)
        if self.speeds:
            speed = torch.tensor(self.speeds, **kind)
        return pairs(weight, weight), pairs(-speed, speed)

    def cos_sin(
        self,
        pos: Tensor,
        dtype: torch.dtype,
        origin: Tensor | None = None,
        frequencies: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """cos and sin [..., D] that rotate x of `dtype` at pos [..., 3]; `origin` shifts positions.

        Computed in float64: a float32 angle is off by 1e-4 after a thousand latent frames. Pass
        `frequencies` if they are known, to save computing them.
        """
        weights, speeds = frequencies or self.frequencies(pos.device)
        place = pos.double() @ weights
        angle = (place if origin is None else place + origin) * speeds
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = angle.cos(), angle.sin()
        if self.amplitude != 1:
            cos, sin = cos * self.amplitude, sin * self.amplitude
        return cos.to(wide), sin.to(wide)

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., D] rotated by cos and sin that broadcast to it; computed in their dtype."""
        if self.interleaved:
            partner = x.unflatten(-1, (-1, 2)).roll(1, -1).flatten(-2)
        else:
            partner = x.roll(x.shape[-1] // 2, -1)
        return (x * cos).add_(partner * sin).to(x.dtype)

    def rotate(
        self,
        x: Tensor,
        pos: Tensor,
        origin: Tensor | None = None,
        frequencies: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """x [B, H, N, D] at positions pos [B, H or 1, N, 3]."""
        return self.apply(x, *self.cos_sin(pos, x.dtype, origin, frequencies))


@dataclass(frozen=True, slots=True)
class CustomRope(Rope):
    """RoPE by a function that maps pos [..., 3] to cos and sin [..., D / 2]."""

    axes: tuple[tuple[int, tuple[float, float, float]], ...] = ()
    turn: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def frequencies(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.empty(0, device=device), torch.empty(0, device=device)

    def cos_sin(
        self,
        pos: Tensor,
        dtype: torch.dtype,
        origin: Tensor | None = None,
        frequencies: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert self.turn is not None
        wide, dim = torch.promote_types(dtype, torch.float32), -1 if self.interleaved else -2
        cos, sin = (x.to(wide) for x in self.turn(pos))
        both = (torch.stack(x, dim).flatten(-2) for x in ((cos, cos), (-sin, sin)))
        cos, sin = (x if x.dim() > 2 else x[None, None] for x in both)
        return cos, sin


class Mlp(Protocol):
    """A model's MLP, called on rows [..., W] or fused into a kernel."""

    macs: int  # multiply-adds of one row

    def __call__(self, x: Tensor) -> Tensor: ...


class SliceableMlp(Mlp, Protocol):
    """An MLP whose output is down [W, inner] times activations(x), so that neurons can be cut."""

    @property
    def down(self) -> Tensor: ...

    def activations(self, x: Tensor) -> Tensor:
        """The neurons' activations [..., inner]."""

    def slice(self, index: Tensor) -> SliceableMlp:
        """The MLP of these neurons alone, whose weights are copied to be contiguous."""


class PassContext(NamedTuple):
    """The host's facts about the running pass: all that a policy may know besides tensors.

    A tuple, because every layer makes one for every token.
    """

    shape: Shape
    layer: int
    chunk: int  # chunks committed so far
    past: int  # entries of finished chunks
    start: int  # slot, behind past, of this pass's first token
    tokens: int  # S
    pass_index: int  # index of this pass over the chunk
    pass_count: int  # how many passes the chunk gets
    noise: tuple[float, ...]  # of each latent frame of the present chunk; 0 is clean
    prompt: int = 0  # entries at the front that hold the prompt (token models), protected
    left_padding: tuple[int, ...] = ()  # empty entries before each row's prompt
    plain: bool = True  # every entry in use has log_count 0
    before: tuple[int, ...] = ()  # passes already run over these tokens
    hidden_slots: tuple[int, int] = (0, 0)  # slots of the past [from, to) that the pass ignores
    room: int | None = None  # the most past entries that a bounded cache holds
    drafted: bool = False  # the tokens after the first are drafts, which may be rejected
    total: int = 0  # entries that an unbounded cache would hold before this chunk

    @property
    def end(self) -> int:
        """Entries in use, this pass's included."""
        return self.past + self.start + self.tokens

    @property
    def prefilling(self) -> bool:
        """Whether the tokens are the prompt's, in models that hold it in their cache."""
        return self.prompt > 0 and self.past == 0

    @property
    def given(self) -> bool:
        """Whether the tokens are given, not generated: a prompt or first frames."""
        if self.shape.token_by_token:
            return self.tokens > 1 and not self.drafted
        return self.pass_index > 0 and not self.before and not any(self.noise)

    @property
    def chunk_passes(self) -> tuple[int, ...]:
        """The index of this pass for each chunk in it: in a rolling model each is one behind."""
        if not self.shape.rolling_frames:
            return (self.pass_index,)
        chunks = -(-self.tokens // (self.shape.chunk * self.shape.tokens_per_frame))
        return tuple(self.pass_index - i for i in range(chunks))

    def for_layer(self, layer: int) -> PassContext:
        return self._replace(layer=layer)

    def token(self, i: int) -> PassContext:
        """The i-th token of a token model's pass, as if it came alone."""
        return self._replace(start=self.start + i, tokens=1)


@dataclass(frozen=True, slots=True)
class DenoisePass:
    """A denoising pass before it runs: all that a passes policy may know of it."""

    index: int  # among the chunk's denoising passes
    count: int  # of these passes
    timestep: float  # from 0 to 1000, as the model takes it
    noise: float  # share of noise in x
    x: Tensor  # latents [B, C, F, h, w]
    embed_time: Callable[[float], Tensor]  # a timestep's embedding [W], in host memory
    embed_patches: Callable[[Tensor], Tensor]  # latents' tokens [B, S, W] before the first layer


@dataclass(frozen=True, slots=True)
class Size:
    """A number of cache entries, given as entries (`1344`) or as latent frames (`21f`)."""

    count: int
    frames: bool = False

    @classmethod
    def parse(cls, text: str) -> Size:
        digits = text.removesuffix("f")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 30):
            raise TachyscopeError(
                f"a size is entries (1344) or latent frames (21f), got {shown(text)}: "
                f"give one of these"
            )
        return cls(int(digits), text.endswith("f"))

    @classmethod
    def of(cls, value: Size | str | int) -> Size:
        """A Size from its text or from a number of entries."""
        if isinstance(value, Size):
            return value
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise TachyscopeError(
                f"a size is entries (1344) or latent frames ('21f'), got {value!r:.60}: give one "
                f"of these"
            )
        return cls.parse(value) if isinstance(value, str) else cls(value)

    def entries(self, shape: Shape) -> int:
        return self.count * shape.tokens_per_frame if self.frames else self.count

    def __str__(self) -> str:
        return f"{self.count}f" if self.frames else str(self.count)


if TYPE_CHECKING:

    class SizeSetting:
        """The type of a field that is set by a Size, its text or a number, and read as a Size."""

        def __get__(self, policy: object, owner: type | None = None) -> Size:
            raise NotImplementedError

        def __set__(self, policy: object, value: Size | str | int) -> None:
            raise NotImplementedError

    class OptionalSizeSetting:
        """The same for a field that may be None."""

        def __get__(self, policy: object, owner: type | None = None) -> Size | None:
            raise NotImplementedError

        def __set__(self, policy: object, value: Size | str | int | None) -> None:
            raise NotImplementedError
else:
    SizeSetting, OptionalSizeSetting = Size, Size | None


@dataclass(frozen=True, slots=True)
class Text:
    """One layer's prompt for cross-attention: k, v [B, H, L, D]; log_count [B, 1, L] or None."""

    k: Tensor
    v: Tensor
    log_count: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Latents:
    """A chunk before decoding: its number, latents, number of pixel frames, and stats."""

    index: int
    latents: Tensor
    frames: int
    stats: dict[str, float]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of frames uint8 [F, H, W, 3], in a batch [B, F, H, W, 3], and their stats.

    Stats are one row of the meter; names that end in _ms are times in milliseconds.
    """

    index: int
    frames: np.ndarray
    stats: dict[str, float]

    def __repr__(self) -> str:
        size, kind = list(self.frames.shape), self.frames.dtype
        return f"<Chunk {self.index}: frames {kind} {size}, {len(self.stats)} stats>"
