"""Modules that feed keyboard and mouse into the layers: Matrix-Game 2.

The first half of the layers has one between cross-attention and the MLP. In it each position of the
image attends over time: with the mouse to itself in the latent frames before, with the keyboard to
the keys of these frames. A latent frame reads the actions of twelve pixel frames, which end before
its own last one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.features import Features
from tachyscope.models.wan import key_camera

HEADS, WIDE, EMBEDDED = 16, 1024, 128  # heads and width of attention; width of a frame's keys
BEFORE = 3  # earlier latent frames whose actions a latent frame reads
# pixel frames that it reads of each: the last of four, all, all, and the first three of its own
SHARES = (1, 4, 4, 3)
READ = sum(SHARES)
ROTATED, THETA = 8, 256.0  # channels of a head with a rotary embedding of time
TURN = 0.1  # mouse movement of a pixel frame
LOOK = {"i": (TURN, 0.0), "k": (-TURN, 0.0), "j": (0.0, -TURN), "l": (0.0, TURN)}
STEER = {"a": LOOK["j"], "d": LOOK["l"]}


class Layout(NamedTuple):
    """The actions of a model: the keys they press, and how they move the mouse."""

    actions: str
    both: dict[str, str]  # actions that press several keys, or none
    keyboard: str  # keys in the order of the input; "." is pressed if no other is
    mouse: dict[str, tuple[float, float]]  # up, to the right; empty without a mouse

    def pressed(self, action: str) -> str:
        return self.both.get(action, action)


LAYOUTS = {
    "walk": Layout(key_camera.ACTIONS, key_camera.BOTH, "wsad", LOOK),
    "drive": Layout(".wsadqe", {".": "", "q": "wa", "e": "wd"}, "ws", STEER),
    # nothing, jump, slide, turn left and right, step left and right
    "run": Layout(".wsadqe", {}, ".wsqead", {}),
}


class Norm(nn.Module):
    """RMS norm; the authors' code stores a weight and does not multiply by it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class ActionModule(nn.Module):
    """Attention to the mouse, then to the keyboard, each added to the stream; published names."""

    def __init__(self, dim: int, layout: Layout) -> None:
        super().__init__()
        head = WIDE // HEADS
        linear: Any = functools.partial(nn.Linear, bias=False)
        self.keyboard_embed = nn.Sequential(
            nn.Linear(len(layout.keyboard), EMBEDDED), nn.SiLU(), nn.Linear(EMBEDDED, EMBEDDED)
        )
        self.has_mouse = bool(layout.mouse)
        if self.has_mouse:
            self.mouse_mlp = nn.Sequential(
                nn.Linear(2 * READ + dim, WIDE), nn.GELU("tanh"), nn.Linear(WIDE, WIDE),
                nn.LayerNorm(WIDE),
            )  # fmt: skip
            self.t_qkv = linear(WIDE, 3 * WIDE)
            self.img_attn_q_norm, self.img_attn_k_norm = Norm(head), Norm(head)
            self.proj_mouse = linear(WIDE, dim)
        self.key_attn_q_norm, self.key_attn_k_norm = Norm(head), Norm(head)
        self.mouse_attn_q = linear(dim, WIDE)
        self.keyboard_attn_kv = linear(EMBEDDED * READ, 2 * WIDE)
        self.proj_keyboard = linear(WIDE, dim)

    def forward(self, x: Tensor, inputs: ActionInputs, layer: int) -> Tensor:
        """The stream [B, S, W] after the module."""
        if self.has_mouse:
            x = x + self.proj_mouse(_by_frame(self._mouse(x, inputs, layer), len(x)))
        return x + self.proj_keyboard(_by_frame(self._keyboard(x, inputs), len(x)))

    def _mouse(self, x: Tensor, inputs: ActionInputs, layer: int) -> Tensor:
        rows = _by_place(x, inputs.frames)
        mouse = inputs.mouse.to(x.dtype).expand(len(rows), -1, -1)
        qkv = self.t_qkv(self.mouse_mlp(torch.cat([rows, mouse], -1)))
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).unbind(2)
        own = inputs.angles[-inputs.frames :]
        q = _rotated(self.img_attn_q_norm(q), own)
        k, v = inputs.with_past(layer, _rotated(self.img_attn_k_norm(k), own), v)
        return _attend(q, k, v)

    def _keyboard(self, x: Tensor, inputs: ActionInputs) -> Tensor:
        q = _by_place(self.mouse_attn_q(x), inputs.frames).unflatten(-1, (HEADS, -1))
        keyboard = self.keyboard_embed(inputs.keyboard.to(x.dtype)).flatten(1)
        k, v = self.keyboard_attn_kv(keyboard)[None].unflatten(-1, (2, HEADS, -1)).unbind(2)
        q = _rotated(self.key_attn_q_norm(q), inputs.angles[-inputs.frames :])
        return _attend(q, _rotated(self.key_attn_k_norm(k), inputs.angles), v)

    def macs(self, dim: int) -> int:
        """Multiply-adds of a token, without attention."""
        mouse = WIDE * (2 * READ + 2 * dim + 4 * WIDE) if self.has_mouse else 0
        return mouse + 2 * WIDE * dim


class ActionInputs:
    """Actions of a chunk as the modules read them, and the keys and values of its past.

    `pressed` are the actions of latent frames, the chunk's last; `at` the chunk's positions in
    time. `past` [layers, 2, B · N, P, H, D] are keys and values of the mouse attention for the
    `seen` latent frames before the chunk, None for a video's first chunk.
    """

    def __init__(
        self, control: str, frames: int, pressed: Tensor, at: Tensor, past: Tensor | None, seen: int
    ) -> None:
        self.frames, self.pressed, self.past = frames, pressed, past
        self.latest: dict[int, tuple[Tensor, Tensor]] = {}
        keyboard, mouse, columns = tables(control, pressed.device)
        read = pressed.unfold(0, BEFORE + 1, 1)[:, columns]  # [L, 12]
        self.keyboard = keyboard[read[-frames - seen :]]
        self.mouse = mouse[read[-frames:]].flatten(1)
        fine: Any = {"dtype": torch.float64, "device": at.device}
        at = torch.cat([at[:1] + torch.arange(-seen, 0, **fine), at])
        speeds = THETA ** -(torch.arange(0, ROTATED, 2, **fine) / ROTATED)
        self.angles = at[:, None] * speeds  # [L, ROTATED / 2]

    def with_past(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of the past and the chunk, which are kept for `commit`."""
        if self.past is not None:
            k, v = (torch.cat([old, new], 1) for old, new in zip(self.past[layer], (k, v),
                                                                 strict=True))  # fmt: skip
        self.latest[layer] = k, v
        return k, v

    def commit(self, features: Features, keep: int) -> None:
        """Store actions, keys and values of the newest `keep` latent frames for the next chunk.

        In place if there are some already, where a CUDA graph reads them.
        """
        features.pressed = _stored(features.pressed, self.pressed[-keep - BEFORE :])
        if self.latest and keep:
            pairs = [torch.stack(self.latest[layer])[:, :, -keep:] for layer in sorted(self.latest)]
            features.moves = _stored(features.moves, torch.stack(pairs))


def add_to_layers(layers: Iterable[nn.Module], dim: int, control: str) -> None:
    """Add a module to each of the first half of the layers."""
    every = list(layers)
    for layer in every[: len(every) // 2]:
        layer.action_model = ActionModule(dim, LAYOUTS[control])


def seen_before(latent_frame: int, reach: int, chunk: int) -> int:
    """Latent frames before a chunk that its modules attend to."""
    return min(latent_frame, reach - chunk)


@functools.cache
def tables(control: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The pressed keys [A, K] and mouse movement [A, 2] of each action, and the latent frame [12]
    of each pixel frame that is read."""
    layout = LAYOUTS[control]
    pressed = [layout.pressed(action) for action in layout.actions]
    keyboard: Any = [[key in keys for key in layout.keyboard] for keys in pressed]
    ways = [[layout.mouse.get(key, (0.0, 0.0)) for key in keys] for keys in pressed]
    mouse = [[sum(way[i] for way in each) for i in range(2)] for each in ways]
    fine: Any = {"dtype": torch.float64, "device": device}
    columns = [i for i, share in enumerate(SHARES) for _ in range(share)]
    return (
        torch.tensor(keyboard, **fine),
        torch.tensor(mouse, **fine),
        torch.tensor(columns, device=device),
    )


def _stored(old: Tensor | None, new: Tensor) -> Tensor:
    return new.clone() if old is None or old.shape != new.shape else old.copy_(new)


def _by_place(x: Tensor, frames: int) -> Tensor:
    """Tokens [B, F · N, W] as rows of frames [B · N, F, W]."""
    return x.unflatten(1, (frames, -1)).transpose(1, 2).flatten(0, 1)


def _by_frame(rows: Tensor, batch: int) -> Tensor:
    """Rows of frames [B · N, F, W] as tokens [B, F · N, W]."""
    return rows.unflatten(0, (batch, -1)).transpose(1, 2).flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[R, F, H · D] of q [R, F, H, D] and keys and values [R or 1, L, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [R, F, H, D] with a rotary embedding of its first channels, in interleaved pairs."""
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x[..., :ROTATED].to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = (part.to(wide)[:, None] for part in (angles.cos(), angles.sin()))
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), x[..., ROTATED:]], -1)
