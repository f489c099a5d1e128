"""Waypoint 1.5 is held to its authors' rules, stated again here in float64."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from faults import refused
from test_tiny_decoder import brute_force, published

import tachyscope as ts
from tachyscope.core.rollout import rollout
from tachyscope.memory.fit import fit
from tachyscope.memory.predict import need, sized
from tachyscope.models.checkpoint import read_tensors, write_tensors
from tachyscope.models.wan.download import Fetched, HubFiles
from tachyscope.models.waypoint.autoencoder import TinyAutoencoder
from tachyscope.models.waypoint.config import WaypointConfig
from tachyscope.models.waypoint.controls import ACTIONS
from tachyscope.models.waypoint.loading import (
    file_names,
    load_waypoint,
    random_waypoint,
    save_waypoint,
)
from tachyscope.serve.action_log import ActionLog, Opening, Step
from tachyscope.serve.key_map import KeyMap
from tachyscope.serve.lane import Lane

SMALL = WaypointConfig(
    d_model=64, n_layers=4, n_heads=4, n_kv_heads=2, mlp_ratio=2, channels=4, height=2, width=3,
    local_window=3, global_window=8, global_pinned_dilation=2, global_attn_period=2,
)  # fmt: skip
WALK = "wwqqlld.suf+-rwwkie"


class Authors:
    """The published network and cache, from a file's tensors, every latent frame by itself."""

    def __init__(self, weights, config):
        self.w = {name: x.double() for name, x in weights.items()}
        self.c, self.cache, self.frame = config, [{} for _ in range(config.n_layers)], 0

    def linear(self, name, x):
        return x @ self.w[f"{name}.weight"].T

    def mlp(self, name, x):
        return self.linear(f"{name}.fc2", F.silu(self.linear(f"{name}.fc1", x)))

    def rms(self, x):
        return x * (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).rsqrt()

    def turned(self, x, frame):
        """x [N, H, D] turned by column, row and time; the halves of the turned pairs in a row."""
        c, head = self.c, x.shape[-1]
        most = 0.8 * min(c.height, c.width) / 2
        count = head // 16
        pixel = [math.pi * (1 + (most - 1) * i / max(1, count - 1)) for i in range(count)]
        out = torch.empty_like(x)
        for n in range(len(x)):
            row, column = divmod(n, c.width)
            angles = [f * ((2 * column + 1) / c.width - 1) for f in pixel for _ in range(2)]
            angles += [f * ((2 * row + 1) / c.height - 1) for f in pixel for _ in range(2)]
            time = [10000.0 ** (-i / (head // 4)) for i in range(0, head // 4, 2)]
            angles += [frame * f for f in time for _ in range(2)]
            cos, sin = (
                f(torch.tensor(angles, dtype=torch.float64)) for f in (torch.cos, torch.sin)
            )
            even, odd = x[n, :, 0::2], x[n, :, 1::2]
            out[n] = torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)
        return out

    def seen(self, layer):
        """Past latent frames that a layer reads before the present one."""
        c, now = self.c, self.frame
        if layer % c.global_attn_period == c.global_attn_period - 1:
            every = c.global_pinned_dilation
            return [t for t in range(now) if t % every == 0 and t > now - c.global_window]
        return [t for t in range(now) if t > now - c.local_window]

    def __call__(self, x, sigma, control, commit=False):
        """The velocity [C, h, w] of latents at a noise level."""
        c = self.c
        speeds = 10000.0 ** -(torch.arange(256).double() / 255)
        angle = 1000 * sigma * speeds
        e = self.mlp("denoise_step_emb.mlp", 2**0.5 * torch.cat([angle.sin(), angle.cos()]))
        told = self.rms(self.mlp("ctrl_emb.mlp", control.double()))
        y = F.conv2d(x[None], self.w["patchify.weight"], stride=c.patch)[0].flatten(1).T
        first = None
        for i in range(c.n_layers):
            at = f"transformer.blocks.{i}."
            s0, b0, g0, s1, b1, g1 = (
                self.linear(f"transformer.blocks.0.{part}.cond_proj.{j}",
                            F.silu(e + self.w[f"{at}{part}.bias_in"]))
                for part in ("attn_cond_head", "mlp_cond_head") for j in range(3)
            )  # fmt: skip
            a = self.rms(y) * (1 + s0) + b0
            q, k, v = (
                self.linear(f"{at}attn.{n}_proj", a).unflatten(-1, (heads, -1))
                for n, heads in zip("qkv", (c.n_heads, c.n_kv_heads, c.n_kv_heads), strict=True)
            )
            first = v if first is None else first
            v = v + self.w[f"{at}attn.v_lamb"] * (first - v)
            q, k = self.turned(self.rms(q), self.frame), self.turned(self.rms(k), self.frame)
            past = [self.cache[i][t] for t in self.seen(i)]
            keys, values = (torch.cat([pair[j] for pair in [*past, (k, v)]]) for j in range(2))
            each = c.n_heads // c.n_kv_heads
            scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(each, 1))
            share = (scores / c.head_dim**0.5).softmax(-1)
            out = torch.einsum("hqk,khd->qhd", share, values.repeat_interleave(each, 1))
            y = y + g0 * self.linear(f"{at}attn.out_proj", out.flatten(1))
            if i % c.ctrl_conditioning_period == 0:
                gained = self.linear(f"{at}ctrl_mlpfusion.fc1_x", self.rms(y))
                gained = F.silu(gained + self.linear(f"{at}ctrl_mlpfusion.fc1_c", told))
                y = y + self.linear(f"{at}ctrl_mlpfusion.fc2", gained)
            y = y + g1 * self.mlp(f"{at}dit_mlp", self.rms(y) * (1 + s1) + b1)
            if commit:
                self.cache[i][self.frame] = k, v
        scale, shift = self.linear("out_norm.fc", F.silu(e)).chunk(2)
        y = F.silu(self.rms(y) * (1 + scale) + shift)
        out = torch.empty(c.channels, c.height * c.patch[0], c.width * c.patch[1]).double()
        for n, row in enumerate(y):
            top, left = (at * size for at, size in zip(divmod(n, c.width), c.patch, strict=True))
            piece = torch.einsum("d,dcij->cij", row, self.w["unpatchify.weight"])
            piece = piece + self.w["unpatchify.bias"][:, None, None]
            out[:, top : top + c.patch[0], left : left + c.patch[1]] = piece
        return out

    def make(self, noise, control):
        """The next latent frame: Euler's steps, then the pass that is remembered."""
        x, sigmas = noise.double(), self.c.scheduler_sigmas
        for sigma, then in zip(sigmas, sigmas[1:], strict=False):
            x = x + (then - sigma) * self(x, sigma, control)
        self(x, 0.0, control, commit=True)
        self.frame += 1
        return x

    def video(self, noise, actions):
        return torch.stack(
            [self.make(*each) for each in zip(noise, map(pressed, actions), strict=True)], 1
        )


def pressed(action, buttons=256):
    """What a letter tells: the mouse's way right and down, buttons by number, the wheel's sign."""
    down = {"w": [87], "s": [83], "a": [65], "d": [68], "q": [87], "e": [87], "r": [87, 16],
            "u": [32], "f": [1]}.get(action, [])  # fmt: skip
    mouse = {"i": (0, -0.3), "k": (0, 0.3), "j": (-0.4, 0), "l": (0.4, 0), "q": (-0.4, 0),
             "e": (0.4, 0)}.get(action, (0, 0))  # fmt: skip
    row = torch.zeros(buttons + 3, dtype=torch.float64)
    row[0], row[1] = mouse
    row[[2 + button for button in down]] = 1
    row[-1] = {"+": 1, "-": -1}.get(action, 0)
    return row


def small(dtype=torch.float64, **changes):
    model = random_waypoint(dataclasses.replace(SMALL, **changes), dtype=dtype)
    # each layer's share of the first one's values is its own
    for i, block in enumerate(model.transformer.blocks):
        block.attn.v_lamb.data.fill_(0.2 + 0.1 * i)
    return model


def noise_of(model, frames, seed=3):
    _, *size = model.latent_size(model.shape(), 1)
    return torch.randn(1, frames, size[0], *size[2:], generator=torch.Generator().manual_seed(seed))


def latents_of(model, plan, actions, noise):
    with ts.open(model, plan, noise=noise, frames=4 * len(actions)) as stream:
        return torch.cat([stream.generate([ACTIONS.index(a)]).latents[0] for a in actions], 1)


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_the_published_file_has_393_tensors_of_1_860_823_096_numbers():
    shapes = WaypointConfig().tensors()
    assert len(shapes) == 393
    assert sum(math.prod(shape) for shape in shapes.values()) == 1_860_823_096


def test_stock_is_the_authors_loop_past_both_windows():
    model = small()
    noise = noise_of(model, len(WALK))
    expected = Authors(file_names(model.transformer), model.config).video(noise[0], WALK)
    assert error(latents_of(model, "stock", WALK, noise), expected) < 1e-12


def test_a_restart_in_the_midst_and_given_latents_change_nothing():
    model = small()
    noise = noise_of(model, 12)
    whole = latents_of(model, "stock", WALK[:12], noise)
    for cut in (2, 5, 10):  # before both windows are full, between them, and behind them
        with ts.open(model, "stock", noise=noise) as stream:
            for action in WALK[:cut]:
                stream.step([action] * 4)
            state = stream.snapshot()
        with ts.open(model, "stock", noise=noise) as stream:
            stream.restore(state)
            for action in WALK[cut:12]:
                stream.step([action] * 4)
            assert torch.equal(stream.session.memory.latents[0], whole[:, -1:])


def test_a_layer_reads_its_own_window():
    """Counted: newest frames, or every second one of eight, and the present one."""
    model = small(n_layers=2)
    tokens = 6
    with ts.open(model, "stock") as stream:
        rows = [stream.step("w*4").stats for _ in range(20)]
    for frame, row in enumerate(rows):
        near = min(frame, 2) + 1
        far = len([t for t in range(frame) if t % 2 == 0 and t > frame - 8]) + 1
        # four passes through both layers, and the clean one through the first
        pairs = 4 * tokens * tokens * (4 * (near + far) + near)
        assert row["pairs"] == pairs
    assert {row["entries"] for row in rows[5:]} == {4 * tokens}  # a slot for each that is kept
    assert len({row["cache_allocated_mb"] for row in rows}) == 1


def test_with_its_windows_open_stock_is_dense():
    model = small(local_window=99, global_window=99, global_pinned_dilation=1)
    noise = noise_of(model, 9)
    found, expected = (latents_of(model, plan, WALK[:9], noise) for plan in ("stock", "dense"))
    assert error(found, expected) < 1e-12
    closed = latents_of(small(), "stock", WALK[:9], noise)
    assert error(closed[:, :2], expected[:, :2]) < 1e-12
    assert error(closed, expected) > 1e-3


@pytest.mark.parametrize("plan", ["lossless", "balanced", "fast", "live", "similar", "fastcar"])
def test_named_plans_run_past_their_budgets(plan):
    model = small(torch.float32)
    budget = {"live": " cache=dedup:budget=10f", "similar": " cache=bank:resident=13f"}
    whole = plan in ("lossless", "fastcar")
    change = "" if whole else budget.get(plan, " cache=bank:resident=9f")
    with ts.open(model, plan + change, frames=4 * len(WALK)) as stream:
        rows = [stream.step([a] * 4).stats for a in WALK]
    assert all(row["pairs"] <= row["pairs_dense"] for row in rows)
    assert (rows[-1]["pairs"] < rows[-1]["pairs_dense"]) == (not whole)
    refused(lambda: ts.open(model, "pose"), "camera")


def test_what_says_itself_what_a_pass_reads_takes_dense_attention():
    message = refused(lambda: ts.open(small(), "stock attention=ann:k=9"), "use attention=dense")
    assert "leave view out" not in message
    refused(lambda: ts.open(small(), "stock cache=strided:far=0"), "far must be from 1")


def test_keys_give_what_the_script_gives():
    """As `play` sends them: letters, two keys at once, and a mouse that looks beside a key."""
    model = small(torch.float32)
    keys = KeyMap.of(model)
    assert keys.action("wj") == keys.action("jw") == keys.turned("w", -50, 3) == "q"
    assert keys.turned("", 4, -90) == "i"
    log = ActionLog("waypoint", model.fingerprint, Opening("stock", "", 7))
    lane = Lane(model, log, "", "stock")
    sent = [keys.action("w"), keys.turned("w", 60, 0), "u", keys.turned("", 0, 80)]
    played = np.concatenate([lane.step(Step(4 * action)).frames for action in sent])
    script = rollout(model, "stock", frames=16, seed=7, actions="w*4 e*4 u*4 k*4")
    assert np.array_equal(played, np.concatenate([chunk.frames for chunk in script]))
    other = rollout(model, "stock", frames=16, seed=7, actions="w*4 q*4 u*4 k*4")
    assert not np.array_equal(played, np.concatenate([chunk.frames for chunk in other]))


def test_every_letter_presses_what_it_says():
    model = small(torch.float64)
    assert torch.equal(model.presses, torch.stack([pressed(letter) for letter in ACTIONS]))
    refused(lambda: rollout(model, frames=4, actions="x*4"), "takes letters of", "got 'x*4'")


def test_a_file_is_read_by_its_names(tmp_path):
    model = small(torch.float32)
    save_waypoint(model, tmp_path)
    tensors = read_tensors(tmp_path / "model.safetensors")
    assert {name: tuple(x.shape) for name, x in tensors.items()} == model.config.tensors()
    loaded = load_waypoint(tmp_path)
    assert loaded.config == model.config
    for name, x in model.transformer.state_dict().items():
        assert torch.equal(loaded.transformer.state_dict()[name], x)
    last = "transformer.blocks.3."
    for broken, words in (
        ({n: x for n, x in tensors.items() if n != f"{last}attn.v_lamb"}, "lacks transformer.b"),
        (tensors | {"patchify.weight": torch.zeros(3)}, "patchify.weight is float32 [3] and must"),
        (tensors | {"prompt_cfg.null_emb": torch.zeros(3)}, "it also has prompt_cfg.null_emb"),
        (
            tensors | {f"{last}mlp_cond_head.cond_proj.1.weight": torch.ones(64, 64)},
            "must equal block 0's",
        ),
    ):
        write_tensors(tmp_path / "model.safetensors", broken)
        refused(lambda: load_waypoint(tmp_path), words)


@pytest.mark.parametrize(
    "text, words",
    [
        ("d_model: 60", "d_model must be n_heads times a multiple of 16, got 60"),
        ("prompt_conditioning: cross_attention", "prompt_conditioning must be null"),
        ("moe: true", "moe must be false"),
        ("scheduler_sigmas: [1.0, 0.2]", "scheduler_sigmas must fall to 0"),
        ("scheduler_sigmas: 1", "must be from 0 to 16 numbers, each from 0 to 1, got 1:"),
        ("global_attn_offset: 0", "global_attn_offset must be -1"),
        ("n_layers: [", "must be YAML"),
        ("- 1", "must hold a YAML object, got list"),
        ("x: " + 3000 * "[", "must be YAML that Python can read, it is nested too deep"),
    ],
)
def test_a_configuration_that_is_another_models_is_refused(tmp_path, text, words):
    (tmp_path / "config.yaml").write_text(text)
    refused(lambda: load_waypoint(tmp_path), words)


def test_weights_are_a_folder_or_fetched(tmp_path, monkeypatch):
    refused(lambda: ts.load("waypoint"), "needs a checkpoint", "hf download Overworld/Waypoint-1.5",
            "--revision 391f928", "config.yaml")  # fmt: skip
    refused(lambda: ts.load("waypoint", tmp_path / "none"), "no folder", "config.yaml")
    refused(lambda: ts.load("waypoint", tmp_path, lora="x"), "takes no LoRA")
    refused(lambda: ts.load("waypoint", tmp_path, decoder="x", decoder_check=True), "check it by")
    model = small(torch.float32)
    save_waypoint(model, tmp_path)
    fetched = Fetched(tmp_path / "model.safetensors", tmp_path, None, {"Overworld": "1"})
    monkeypatch.setattr(HubFiles, "fetch", lambda self, name: fetched)
    loaded = ts.load("waypoint", "download")
    assert loaded.revisions == {"Overworld": "1"} and loaded.decoder is None
    refused(lambda: loaded.decode_latents(ts.open(loaded).session, torch.zeros(1, 4, 1, 4, 6)),
            "without a decoder", "put taehv1_5.pth beside its weights")  # fmt: skip


def test_fit_knows_its_size():
    model = sized("waypoint")
    (row,) = fit(model, "stock", frames=240, vram_gb=16)["rows"]
    assert [(one["fits"], one["plan"]) for one in row["recipes"]] == [(True, "stock")]
    # 17 latent frames of 512 tokens, 16 heads of 64, in 24 layers
    cache = row["cache_bytes"]
    assert cache["k"] == cache["v"] == 24 * 17 * 512 * 16 * 64 * 2
    weights = 1_860_823_096 - 23 * 6 * 2048**2 - 2048  # linears that layers share, once
    assert row["weights_bytes"] == 2 * weights


def test_what_memory_a_session_was_said_to_take_it_takes():
    model = small(torch.float32)
    with ts.open(model, "stock", frames=40) as stream:
        stream.step("w*4")
        held = sum(
            x.nbytes for layer in stream.session.memory.layers for x in layer.tensors().values()
        )
    assert sum(need(model.on_meta(), "stock", frames=40).cache.values()) == held


def autoencoder(folder, channels=4, dtype="float64"):
    """A file of the published layout, narrow but for the encoder; its tensors, and it read."""
    tensors = published(widths=(8, 6, 4, 5), channels=channels, patch=2)
    tensors = {name: x for name, x in tensors.items() if name.startswith("decoder.")}
    shapes = {"encoder.0": (64, 12, 3, 3), "encoder.17": (channels, 64, 3, 3)}
    for i, times in ((2, 2), (7, 2), (12, 1)):
        shapes |= {f"encoder.{i}.conv": (64, 64 * times, 1, 1), f"encoder.{i + 1}": (64, 64, 3, 3)}
        for j in range(i + 2, i + 5):
            for part, wide in ((0, 128), (2, 64), (4, 64)):
                shapes[f"encoder.{j}.conv.{part}"] = (64, wide, 3, 3)
    rng = torch.Generator().manual_seed(1)
    for name, (out, wide, high, _) in shapes.items():
        tensors[f"{name}.weight"] = torch.randn(out, wide, high, high, generator=rng)
        tensors[f"{name}.weight"] *= (wide * high**2) ** -0.5
        if high == 3 and name not in ("encoder.3", "encoder.8", "encoder.13"):
            tensors[f"{name}.bias"] = 0.1 * torch.randn(out, generator=rng)
    write_tensors(folder / "taehv1_5.safetensors", tensors)
    config = dataclasses.replace(SMALL, channels=channels)
    return tensors, TinyAutoencoder.find([folder], config, "cpu", getattr(torch, dtype))


def encoded(tensors, frames):
    """Latents [C, F, h, w] of frames, layer by layer over the whole film, each frame by itself."""
    w = {name: x.double() for name, x in tensors.items()}

    def conv(name, x, stride=1, padding=1):
        return F.conv2d(x, w[f"{name}.weight"], w.get(f"{name}.bias"), stride, padding)

    film = torch.from_numpy(frames).double().permute(0, 3, 1, 2) / 255
    film = [conv("encoder.0", F.pixel_unshuffle(x[None], 2)).relu() for x in film]
    for i, times in ((2, 2), (7, 2), (12, 1)):
        groups = [film[t : t + times] for t in range(0, len(film), times)]
        film = [conv(f"encoder.{i}.conv", torch.cat(group, 1), padding=0) for group in groups]
        film = [conv(f"encoder.{i + 1}", x, stride=2) for x in film]
        for j in range(i + 2, i + 5):
            before = [torch.zeros_like(film[0]), *film]
            made = []
            for x, last in zip(film, before, strict=False):
                y = conv(f"encoder.{j}.conv.0", torch.cat([x, last], 1)).relu()
                y = conv(f"encoder.{j}.conv.4", conv(f"encoder.{j}.conv.2", y).relu())
                made.append((y + x).relu())
            film = made
    return torch.cat([conv("encoder.17", x) for x in film]).transpose(0, 1)


def film(count, seed=0):
    size = (count, *SMALL.size, 3)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@torch.no_grad()
def test_pictures_are_encoded_and_shown_as_the_published_layout_says(tmp_path):
    """A latent frame is four frames; the first one was seen three times before it is shown."""
    tensors, tiny = autoencoder(tmp_path)
    frames = film(8)
    latents = encoded(tensors, frames)
    torch.testing.assert_close(tiny.encode(frames)[0], latents, rtol=0, atol=1e-12)
    still = encoded(tensors, frames[:1].repeat(4, 0))
    torch.testing.assert_close(tiny.encode(frames[:1])[0], still, rtol=0, atol=1e-12)
    refused(lambda: tiny.encode(frames[:3]), "one picture, or frames by 4, got 3")
    seen = torch.cat([latents[:, :1]] * 3 + [latents], 1)
    expected = brute_force(tensors, seen[None], patch=2)[-8:]
    features = {}
    found = torch.cat([tiny.levels(part[None], features) for part in latents.split(1, 1)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert tiny.pixel_frames(2) == len(found) == 8


def test_a_video_goes_on_from_a_picture(tmp_path):
    model, picture = small(), film(1)
    tensors, model.decoder = autoencoder(tmp_path)
    authors = Authors(file_names(model.transformer), model.config)
    authors(encoded(tensors, picture.repeat(4, 0))[:, 0], 0.0, pressed("."), commit=True)
    authors.frame = 1
    noise = noise_of(model, 3)
    expected = authors.video(noise[0], "wqu")
    with ts.open(model, "stock", first=picture, noise=noise) as stream:
        found = torch.cat([stream.generate([ACTIONS.index(a)]).latents[0] for a in "wqu"], 1)
    assert error(found, expected) < 1e-12
    chunks = list(rollout(model, "stock", first=picture, frames=6, actions="w*6"))
    assert [len(chunk.frames) for chunk in chunks] == [4, 2]
    refused(lambda: ts.open(model, first=film(3)), "encodes one picture, or frames by 4, got 3")


def test_a_decoder_is_found_beside_the_weights_or_given(tmp_path):
    model = small(torch.float32)
    save_waypoint(model, tmp_path)
    _, tiny = autoencoder(tmp_path)
    assert load_waypoint(tmp_path).decoder_name == tiny.name == "taehv1_5"
    other = tmp_path / "other"
    other.mkdir()
    save_waypoint(model, other)
    assert load_waypoint(other).decoder is None
    given = load_waypoint(other, decoder=tmp_path / "taehv1_5.safetensors")
    assert given.decoder_name == "taehv1_5"
    (tmp_path / "wrong").mkdir()
    autoencoder(tmp_path / "wrong", channels=5)
    refused(
        lambda: load_waypoint(other, decoder=tmp_path / "wrong"), "decodes latents of 5 channels"
    )
    refused(lambda: load_waypoint(other, decoder=other), "taehv1_5.safetensors", "has none: leave")
    blind = TinyAutoencoder.open(Path("random-tiny"), SMALL, "cpu", torch.float32)
    refused(lambda: blind.encode(film(1)), "has no encoder", "taehv1_5.pth")
