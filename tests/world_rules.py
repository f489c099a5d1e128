"""World models as their authors state them: float64, every pass anew, nothing of the package."""

import math

import numpy as np
import torch
import torch.nn.functional as F


class Network:
    """Wan's transformer over a whole video, from its published tensors.

    `queries` lists for each chunk its latent frames, and the frames it sees with a position each;
    the chunk's own are the last of these.
    """

    def __init__(self, weights, heads, eps=1e-6):
        self.w = {name: x.double() for name, x in weights.items()}
        self.heads, self.eps = heads, eps
        self.layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})

    def linear(self, name, x):
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def rms(self, name, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.w[f"{name}.weight"]

    def norm(self, x):
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)

    def layer_norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def times(self, t):
        """t [F] -> [F, W]."""
        half = self.w["time_embedding.0.weight"].shape[1] // 2
        angle = t[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        e = self.linear("time_embedding.0", torch.cat([angle.cos(), angle.sin()], -1))
        return self.linear("time_embedding.2", F.silu(e))

    def text(self, context):
        if "img_emb.proj.1.weight" in self.w:  # a picture's tokens in a prompt's place
            e = self.layer_norm("img_emb.proj.0", context.double())
            e = self.linear("img_emb.proj.3", F.gelu(self.linear("img_emb.proj.1", e)))
            return self.layer_norm("img_emb.proj.4", e)
        e = F.gelu(self.linear("text_embedding.0", context.double()), approximate="tanh")
        return self.linear("text_embedding.2", e)

    def __call__(self, x, t, texts, queries, camera=None, added=None, told=None):
        """x [C, F, h, w], t [F], a text [L, W] and a line of `queries` for each chunk; `told` are
        the mouse's way and the keys in a latent frame's twelve pixel frames [F, 12, K]."""
        patches = F.conv3d(
            x[None], self.w["patch_embedding.weight"], self.w["patch_embedding.bias"],
            stride=(1, 2, 2),
        )[0]  # fmt: skip
        frames, self.high, self.wide = patches.shape[1:]
        y = patches.permute(1, 2, 3, 0).flatten(1, 2)  # [F, N, W]
        if added is not None:
            y = y + added
        e = self.times(t)
        six = self.linear("time_projection.1", F.silu(e)).unflatten(-1, (6, -1))
        if camera is not None:
            ray = self.linear("patch_embedding_wancamctrl", camera)
            hidden = F.silu(self.linear("c2ws_hidden_states_layer1", ray))
            ray = ray + self.linear("c2ws_hidden_states_layer2", hidden)
        for i in range(self.layers):
            at = f"blocks.{i}"
            m = (six + self.w[f"{at}.modulation"])[:, :, None]
            a = self.norm(y) * (1 + m[:, 1]) + m[:, 0]
            q, k, v = (self.linear(f"{at}.self_attn.{n}", a) for n in "qkv")
            q, k = self.rms(f"{at}.self_attn.norm_q", q), self.rms(f"{at}.self_attn.norm_k", k)
            seen = torch.cat([self.look(q, k, v, *one) for one in queries])
            y = y + self.linear(f"{at}.self_attn.o", seen) * m[:, 2]
            if camera is not None:
                hidden = F.silu(self.linear(f"{at}.cam_injector_layer1", ray))
                hidden = self.linear(f"{at}.cam_injector_layer2", hidden) + ray
                scale = self.linear(f"{at}.cam_scale_layer", hidden)
                y = (1 + scale) * y + self.linear(f"{at}.cam_shift_layer", hidden)
            read = []
            for text, (own, *_) in zip(texts, queries, strict=True):
                a = self.norm(y[own]) * self.w[f"{at}.norm3.weight"] + self.w[f"{at}.norm3.bias"]
                q = self.rms(f"{at}.cross_attn.norm_q", self.linear(f"{at}.cross_attn.q", a))
                k = self.rms(f"{at}.cross_attn.norm_k", self.linear(f"{at}.cross_attn.k", text))
                v = self.linear(f"{at}.cross_attn.v", text)
                out = self.attention(q.flatten(0, 1), k, v)
                read.append(self.linear(f"{at}.cross_attn.o", out).view_as(q))
            y = y + torch.cat(read)
            if told is not None and f"{at}.action_model.keyboard_attn_kv.weight" in self.w:
                y = self.act(f"{at}.action_model", y, queries, *told)
            a = self.norm(y) * (1 + m[:, 4]) + m[:, 3]
            a = F.gelu(self.linear(f"{at}.ffn.0", a), approximate="tanh")
            y = y + self.linear(f"{at}.ffn.2", a) * m[:, 5]
        shift, scale = (self.w["head.modulation"] + e[:, None]).unbind(1)
        y = self.linear("head.head", self.norm(y) * (1 + scale[:, None]) + shift[:, None])
        y = y.view(frames, self.high, self.wide, 2, 2, -1)
        return torch.einsum("fhwpqc->cfhpwq", y).reshape(-1, frames, 2 * self.high, 2 * self.wide)

    def look(self, q, k, v, own, seen, places):
        mine = places[len(seen) - len(own) :]
        q = self.turned(q[own], mine).flatten(0, 1)
        k = self.turned(k[seen], places).flatten(0, 1)
        return self.attention(q, k, v[seen].flatten(0, 1)).view(len(own), -1, v.shape[-1])

    def attention(self, q, k, v):
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(0, 1) for x in (q, k, v))
        share = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
        return (share @ v).transpose(0, 1).flatten(1)

    def act(self, at, y, queries, mouse, keyboard):
        """By the mouse, then by the keyboard: each place looks back at itself in time."""

        def unit(x):
            x = x.unflatten(-1, (16, 64))
            return (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten(-2)

        def plain(name, x):
            return x @ self.w[f"{at}.{name}.weight"].T

        if f"{at}.t_qkv.weight" in self.w:
            way = mouse.flatten(1)[:, None].expand(-1, y.shape[1], -1)
            h = self.linear(f"{at}.mouse_mlp.0", torch.cat([y, way], -1))
            h = self.linear(f"{at}.mouse_mlp.2", F.gelu(h, approximate="tanh"))
            q, k, v = plain("t_qkv", self.layer_norm(f"{at}.mouse_mlp.3", h)).chunk(3, -1)
            y = y + plain("proj_mouse", self.back(unit(q), unit(k), v, queries))
        e = F.silu(self.linear(f"{at}.keyboard_embed.0", keyboard))
        e = self.linear(f"{at}.keyboard_embed.2", e).flatten(1)
        k, v = plain("keyboard_attn_kv", e)[:, None].expand(-1, y.shape[1], -1).chunk(2, -1)
        return y + plain("proj_keyboard", self.back(unit(plain("mouse_attn_q", y)), unit(k), v,
                                                    queries))  # fmt: skip

    def back(self, q, k, v, queries):
        """What each place [F, N, W] reads of itself in the frames in view, 16 heads of 64."""
        speeds = 256.0 ** -(torch.arange(4).double() / 4)

        def spun(x):
            x = x.unflatten(-1, (16, 64)).clone()
            for f in range(len(x)):
                turn = torch.polar(torch.ones(4).double(), f * speeds)
                pairs = torch.view_as_complex(x[f, ..., :8].unflatten(-1, (4, 2)).contiguous())
                x[f, ..., :8] = torch.view_as_real(pairs * turn).flatten(-2)
            return x

        q, k, v, out = spun(q), spun(k), v.unflatten(-1, (16, 64)), torch.empty_like(q)
        for own, seen, _ in queries:
            share = torch.einsum("fnhd,gnhd->nhfg", q[own], k[seen]) / 8
            found = torch.einsum("nhfg,gnhd->fnhd", share.softmax(-1), v[seen])
            out[own] = found.flatten(-2)
        return out

    def turned(self, x, times):
        """RoPE of x [F, N, W]: pairs of numbers turned by time, row and column."""
        wide = x.shape[-1] // self.heads
        axis = 2 * (wide // 6)
        out = torch.empty_like(x).unflatten(-1, (self.heads, wide // 2, 2))
        pairs = torch.view_as_complex(x.unflatten(-1, (self.heads, wide // 2, 2)).contiguous())
        for f, time in enumerate(times):
            for row in range(self.high):
                for column in range(self.wide):
                    angles = [
                        at * 10000.0 ** (-2 * i / size)
                        for at, size in ((time, wide - 2 * axis), (row, axis), (column, axis))
                        for i in range(size // 2)
                    ]
                    n = row * self.wide + column
                    angles = torch.tensor(angles, dtype=torch.float64)
                    turn = torch.polar(torch.ones_like(angles), angles)
                    out[f, n] = torch.view_as_real(pairs[f, n] * turn)
        return out.flatten(-3)


def rolled(chunks, size, window, sink):
    """The frames that each chunk sees in a buffer that drops the oldest behind its sink."""
    buffer, seen = [], []
    for chunk in range(chunks):
        for _ in range(max(0, len(buffer) + size - window)):
            del buffer[sink]
        buffer += range(chunk * size, (chunk + 1) * size)
        seen.append(list(buffer))
    return seen


def key_field(weights, keys, high, wide):
    """What patches gain [F, N, W]: a picture a key and pixel frame, through the whole adapter."""
    down = {"q": "wj", "e": "wl", ".": ""}
    w = {name: x.double() for name, x in weights.items() if name.startswith("act_control_adapter.")}
    rows = [[key in down.get(action, action) for key in "wasdijkl"] for action in keys]
    shown = torch.tensor(rows).double().repeat_interleave(4, 1)[:, :, None, None]
    x = F.pixel_unshuffle(shown.expand(-1, -1, 32 * high, 32 * wide), 16)

    def conv(name, x, **more):
        at = f"act_control_adapter.{name}"
        return F.conv2d(x, w[f"{at}.weight"], w[f"{at}.bias"], **more)

    x = conv("conv", x, stride=2)
    x = x + conv("residual_blocks.0.conv2", conv("residual_blocks.0.conv1", x, padding=1).relu(),
                 padding=1)  # fmt: skip
    return x.flatten(2).transpose(1, 2)


def pressed(control, actions):
    """What latent frames are told: the mouse's way and the keys of twelve pixel frames [F, 12, K].

    An action holds for the four pixel frames of a latent one, the first for its only one. Told are
    the twelve before a latent frame's last; before the video its first frame stands.
    """
    down = {
        "walk": {"q": "wj", "e": "wl", ".": ""}, "drive": {"q": "wa", "e": "wd", ".": ""}, "run": {}
    }[control]  # fmt: skip
    keys = {"walk": "wsad", "drive": "ws", "run": ".wsqead"}[control]
    turns = {
        "walk": {"i": (0.1, 0), "k": (-0.1, 0), "j": (0, -0.1), "l": (0, 0.1)},
        "drive": {"a": (0, -0.1), "d": (0, 0.1)},
        "run": {},
    }[control]
    film = [actions[0]] + [action for action in actions[1:] for _ in range(4)]
    mouse, keyboard = [], []
    for f in range(len(actions)):
        shown = [film[max(0, at)] for at in range(4 * f - 12, 4 * f)]
        held = [down.get(action, action) for action in shown]
        keyboard.append([[float(key in one) for key in keys] for one in held])
        ways = [[turns.get(key, (0, 0)) for key in one] for one in held]
        mouse.append([[sum(way[i] for way in one) for i in range(2)] for one in ways])
    return tuple(torch.tensor(told, dtype=torch.float64) for told in (mouse, keyboard))


def unipc(shift):
    """Whole timesteps and levels of a schedule of a thousand steps, as the authors index it."""
    levels = np.linspace(1 - 1 / 1000, 0, 1001)[:-1]
    levels = shift * levels / (1 + (shift - 1) * levels)
    return (1000 * levels).astype(np.int64), levels


def poses_of(keys):
    """Camera-to-world matrices [F, 4, 4] of one action a latent frame; the first stays.

    OpenCV's camera: x right, y down, z ahead. A step is 1, a look 6 degrees to the side or 2 up.
    """
    down = {"q": "wj", "e": "wl", ".": ""}
    pose, poses = np.eye(4), []
    for i, action in enumerate(keys):
        held = down.get(action, action) if i else ""
        move = np.eye(4)
        yaw = math.radians(6 * (("l" in held) - ("j" in held)))
        pitch = math.radians(2 * (("i" in held) - ("k" in held)))
        side = np.array([[math.cos(yaw), 0, math.sin(yaw)], [0, 1, 0],
                         [-math.sin(yaw), 0, math.cos(yaw)]])  # fmt: skip
        up = np.array([[1, 0, 0], [0, math.cos(pitch), -math.sin(pitch)],
                       [0, math.sin(pitch), math.cos(pitch)]])  # fmt: skip
        move[:3, :3] = side @ up
        move[0, 3] = ("d" in held) - ("a" in held)
        move[2, 3] = ("w" in held) - ("s" in held)
        pose = pose @ move
        poses.append(pose)
    return np.stack(poses)


def plucker(poses, high, wide):
    """Rays by tokens [F, N, 6 * 16 * 16] of a path: relative from frame to frame, its largest step
    1, every pixel for itself; channels by number, then the pixel in a latent place, then places."""
    steps = [np.eye(4)]
    steps += [np.linalg.inv(a) @ b for a, b in zip(poses, poses[1:], strict=False)]
    longest = max(np.linalg.norm(step[:3, 3]) for step in steps)
    fx, fy = 415.53 * wide / 832, 415.69 * high / 480
    cx, cy = 415.78 * wide / 832, 239.78 * high / 480
    out = np.zeros((len(steps), high // 16, wide // 16, 6, 8, 8, 2, 2))
    for f, step in enumerate(steps):
        origin = step[:3, 3] / (longest or 1)
        for row in range(high):
            for column in range(wide):
                ray = np.array([(column + 0.5 - cx) / fx, (row + 0.5 - cy) / fy, 1.0])
                ray = step[:3, :3] @ (ray / np.linalg.norm(ray))
                at = f, row // 16, column // 16
                pixel = row % 8, column % 8, row // 8 % 2, column // 8 % 2
                out[(*at, slice(None), *pixel)] = [*origin, *ray]
    return torch.from_numpy(out).flatten(3).flatten(1, 2)
