"""Keyboard and mouse, told to a network inside its layers: Matrix-Game 2.

In half of its layers a module stands between the prompt's place and the MLP. There every place of
a picture looks back in time: by the mouse at what itself was in the latent frames before, and by
the keyboard at the keys that were down. Each latent frame is told the twelve pixel frames that end
before its own last one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tachyscope.core.features import Features
from tachyscope.models.wan import keys

HEADS, WIDE, EMBEDDED = 16, 1024, 128  # of its attention; of a pixel frame's keys
BEFORE = 3  # latent frames before its own that a latent frame is told of
# pixel frames that it is told of each: the last of four, all, all, and the first three of its own
SHARES = (1, 4, 4, 3)
TOLD = sum(SHARES)
ROTATED, THETA = 8, 256.0  # numbers of a head that are turned by time
TURN = 0.1  # of the mouse, in a pixel frame
LOOK = {"i": (TURN, 0.0), "k": (-TURN, 0.0), "j": (0.0, -TURN), "l": (0.0, TURN)}
STEER = {"a": LOOK["j"], "d": LOOK["l"]}


class Pad(NamedTuple):
    """Which actions a model knows: what they press, and how they move the mouse."""

    actions: str
    both: dict[str, str]  # actions that are several keys
    keyboard: str  # keys in the order of its input; "." is down where none other is
    mouse: dict[str, tuple[float, float]]  # up, to the right; empty without a mouse

    def down(self, action: str) -> str:
        return self.both.get(action, action)


PADS = {
    "walk": Pad(keys.ACTIONS, keys.BOTH, "wsad", LOOK),
    "drive": Pad(".wsadqe", {".": "", "q": "wa", "e": "wd"}, "ws", STEER),
    # nothing, jump, slide, turn left and right, step left and right
    "run": Pad(".wsadqe", {}, ".wsqead", {}),
}


class Norm(nn.Module):
    """Its authors keep a weight here and do not multiply by it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class ActionModule(nn.Module):
    """What a layer's stream gains by the mouse, then by the keyboard, under published names."""

    def __init__(self, dim: int, pad: Pad) -> None:
        super().__init__()
        head = WIDE // HEADS
        linear: Any = functools.partial(nn.Linear, bias=False)
        self.keyboard_embed = nn.Sequential(
            nn.Linear(len(pad.keyboard), EMBEDDED), nn.SiLU(), nn.Linear(EMBEDDED, EMBEDDED)
        )
        self.has_mouse = bool(pad.mouse)
        if pad.mouse:
            self.mouse_mlp = nn.Sequential(
                nn.Linear(2 * TOLD + dim, WIDE), nn.GELU("tanh"), nn.Linear(WIDE, WIDE),
                nn.LayerNorm(WIDE),
            )  # fmt: skip
            self.t_qkv = linear(WIDE, 3 * WIDE)
            self.img_attn_q_norm, self.img_attn_k_norm = Norm(head), Norm(head)
            self.proj_mouse = linear(WIDE, dim)
        self.key_attn_q_norm, self.key_attn_k_norm = Norm(head), Norm(head)
        self.mouse_attn_q = linear(dim, WIDE)
        self.keyboard_attn_kv = linear(EMBEDDED * TOLD, 2 * WIDE)
        self.proj_keyboard = linear(WIDE, dim)

    def forward(self, x: Tensor, moves: Moves, layer: int) -> Tensor:
        """The stream x [B, S, W] behind it."""
        if self.has_mouse:
            x = x + self.proj_mouse(_by_frame(self._mouse(x, moves, layer), len(x)))
        return x + self.proj_keyboard(_by_frame(self._keyboard(x, moves), len(x)))

    def _mouse(self, x: Tensor, moves: Moves, layer: int) -> Tensor:
        rows = _by_place(x, moves.frames)
        told = moves.mouse.to(x.dtype).expand(len(rows), -1, -1)
        made = self.t_qkv(self.mouse_mlp(torch.cat([rows, told], -1)))
        q, k, v = made.unflatten(-1, (3, HEADS, -1)).unbind(2)
        own = moves.angles[-moves.frames :]
        q = _turned(self.img_attn_q_norm(q), own)
        k, v = moves.behind(layer, _turned(self.img_attn_k_norm(k), own), v)
        return _attend(q, k, v)

    def _keyboard(self, x: Tensor, moves: Moves) -> Tensor:
        q = _by_place(self.mouse_attn_q(x), moves.frames).unflatten(-1, (HEADS, -1))
        told = self.keyboard_embed(moves.keyboard.to(x.dtype)).flatten(1)
        k, v = self.keyboard_attn_kv(told)[None].unflatten(-1, (2, HEADS, -1)).unbind(2)
        q = _turned(self.key_attn_q_norm(q), moves.angles[-moves.frames :])
        return _attend(q, _turned(self.key_attn_k_norm(k), moves.angles), v)

    def macs(self, dim: int) -> int:
        """Multiply-adds for a token, but those of its attention."""
        mouse = WIDE * (2 * TOLD + 2 * dim + 4 * WIDE) if self.has_mouse else 0
        return mouse + 2 * WIDE * dim


class Moves:
    """What actions tell a chunk, and what of it the next chunk is left.

    `pressed` are the actions of latent frames, the chunk's last; `past` the mouse's keys and values
    [layers, 2, B · N, P, H, D] of those before it that are in view, None for a video's first.
    """

    def __init__(
        self, control: str, frames: int, pressed: Tensor, at: Tensor, past: Tensor | None, seen: int
    ) -> None:
        self.frames, self.pressed, self.past = frames, pressed, past
        self.latest: dict[int, tuple[Tensor, Tensor]] = {}
        keyboard, mouse, columns = tables(control, pressed.device)
        told = pressed.unfold(0, BEFORE + 1, 1)[:, columns]  # [L, 12]
        self.keyboard = keyboard[told[-frames - seen :]]
        self.mouse = mouse[told[-frames:]].flatten(1)
        fine: Any = {"dtype": torch.float64, "device": at.device}
        at = torch.cat([at[:1] + torch.arange(-seen, 0, **fine), at])
        turns = THETA ** -(torch.arange(0, ROTATED, 2, **fine) / ROTATED)
        self.angles = at[:, None] * turns  # [L, ROTATED / 2]

    def behind(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with those of the past before them."""
        if self.past is not None:
            k, v = (torch.cat([old, new], 1) for old, new in zip(self.past[layer], (k, v),
                                                                 strict=True))  # fmt: skip
        self.latest[layer] = k, v
        return k, v

    def commit(self, features: Features, keep: int) -> None:
        """Leave what the last pass made for the next chunk: of so many latent frames.

        In place where there is something: launches that were recorded once find it there.
        """
        features.pressed = _renewed(features.pressed, self.pressed[-keep - BEFORE :])
        if self.latest and keep:
            pairs = [torch.stack(self.latest[layer])[:, :, -keep:] for layer in sorted(self.latest)]
            features.moves = _renewed(features.moves, torch.stack(pairs))


def add_to_layers(layers: Iterable[nn.Module], dim: int, control: str) -> None:
    """Give the first half of the layers their modules."""
    every = list(layers)
    for layer in every[: len(every) // 2]:
        layer.action_model = ActionModule(dim, PADS[control])


def seen_before(latent_frame: int, reach: int, chunk: int) -> int:
    """Latent frames before a chunk that its modules look back at."""
    return min(latent_frame, reach - chunk)


@functools.cache
def tables(control: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of each action the keys that are down [A, K], and the mouse's way [A, 2]; by pixel frame
    told [12], which of the latent frames it is."""
    pad = PADS[control]
    keyboard: Any = [[key in pad.down(action) for key in pad.keyboard] for action in pad.actions]
    ways = [[pad.mouse.get(key, (0.0, 0.0)) for key in pad.down(a)] for a in pad.actions]
    mouse = [[sum(way[i] for way in each) for i in range(2)] for each in ways]
    fine: Any = {"dtype": torch.float64, "device": device}
    columns = [i for i, share in enumerate(SHARES) for _ in range(share)]
    return (
        torch.tensor(keyboard, **fine),
        torch.tensor(mouse, **fine),
        torch.tensor(columns, device=device),
    )


def _renewed(old: Tensor | None, new: Tensor) -> Tensor:
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


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [R, F, H, D], its first numbers turned by time in twos."""
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x[..., :ROTATED].to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = (part.to(wide)[:, None] for part in (angles.cos(), angles.sin()))
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., ROTATED:]], -1)
