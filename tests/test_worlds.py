"""Published world models: each is held to its authors' rules, stated again in `world_rules`."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from faults import refused
from world_rules import Network, key_field, plucker, poses_of, rolled, unipc
from world_rules import pressed as pressed_rule

import tachyscope as ts
from tachyscope.models.checkpoint import write_tensors
from tachyscope.models.diffusion import Decoder
from tachyscope.models.wan.clip_vision import PUBLISHED as CLIP
from tachyscope.models.wan.clip_vision import ClipVision
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.key_adapter import pressed
from tachyscope.models.wan.key_camera import ACTIONS
from tachyscope.models.wan.loading import load_wan, save_wan
from tachyscope.models.wan.presets import PRESETS, sized_wan
from tachyscope.models.wan.random import random_wan
from tachyscope.models.wan.tiny_decoder import TinyDecoder
from tachyscope.models.wan.tiny_layers import RANDOM
from tachyscope.models.wan.vae import WanVae
from tachyscope.serve.action_log import ActionLog, Opening, Step
from tachyscope.serve.lane import Lane

SMALL = {
    "dim": 96, "ffn_dim": 64, "layers": 2, "heads": 2, "in_channels": 4, "text_dim": 16,
    "text_len": 8, "freq_dim": 32, "size": (4, 4),
}  # fmt: skip


# a latent place of 16 x 16 pixels
SIZES = {"abot-world": {"size": (2, 2)}}


def small(name, **changes):
    size = SIZES.get(name, {})
    config = dataclasses.replace(PRESETS[name].config, **(SMALL | size | changes))
    made = random_wan(config, seed=3, dtype=torch.float64, name=name)
    made.decoder = Blocks(config)
    return made


class Blocks(Decoder):
    """Stands in for a VAE: a latent is its frames' mean by blocks, and half of the one before."""

    kind = name = "blocks"

    def __init__(self, config):
        rng = torch.Generator().manual_seed(1)
        self.mix = torch.randn(config.in_channels, 3, generator=rng).double()
        self.stride = config.stride

    def pixel_frames(self, latents):
        return max(0, 4 * latents - 3)

    def encode(self, frames):
        pixels = torch.as_tensor(frames).double().permute(3, 0, 1, 2) / 127.5 - 1
        pixels = torch.cat([pixels[:, :1]] * 3 + [pixels], 1)
        pixels = torch.nn.functional.avg_pool3d(pixels, self.stride)
        latents = torch.einsum("ck,kfhw->cfhw", self.mix, pixels)
        latents[:, 1:] += latents[:, :-1].clone() / 2
        return latents[None]

    def levels(self, latents, features):
        frames = 1 if "seen" not in features else 0
        features["seen"] = latents.new_zeros(())
        shown = torch.einsum("ck,cfhw->fhwk", self.mix, latents[0].double())
        shown = (128 + 20 * shown).clamp(0, 255).repeat_interleave(4, 0)
        return shown[3 * frames :]

    def write(self, folder):
        raise NotImplementedError


PICTURE = np.random.default_rng(3).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
# a latent frame each: four frames of video, but the first, which is one
WALK = "wwwqqq..ljjwisadekkwwwqqaalewwww"


@dataclass(frozen=True)
class Rules:
    """How authors run a model behind a picture, in their own numbers."""

    levels: Sequence[tuple[float, float, float]]  # timestep; noise taken away; noise added before
    chunk: int = 3
    window: int = 21
    sink: int = 0
    relative: bool = False  # positions count from the first frame in view
    held: bool = False  # the picture is the first latent frame, and not channels beside


def lingbot(shift):
    """By indices into UniPC's table, found again by their whole timesteps."""
    times, levels = unipc(shift)
    rows = []
    for step in (0, 250, 500, 750):
        alike = np.flatnonzero(times == times[step])
        rows.append((times[step], levels[alike[0]], levels[alike[min(1, len(alike) - 1)]]))
    return Rules(rows, chunk=4, window=18, sink=6)


def self_forcing():
    table = [5 * n / (1000 + 4 * n) for n in range(1, 1001)]
    steps = (1000, 937.5, 2500 / 3, 625)
    return Rules([(t, *[min(table, key=lambda s: abs(1000 * s - t))] * 2) for t in steps])


def prompt_of(model):
    return "" if model.config.action_modules else "a"


def film(model, rules, texts, draw, keys=None):
    """Latents by the authors' loop, a text a chunk; every pass goes over the whole video anew."""
    c, net = model.config, Network(model.transformer.state_dict(), model.config.heads)
    n, chunks = rules.chunk, len(texts)
    # the whole video's channels at once: a mask, and the picture with grey behind it
    grey = np.full((4 * (n * chunks - 1), *PICTURE.shape[1:]), 127.5)
    condition = model.decoder.encode(np.concatenate([PICTURE, grey]))[0]
    mask = torch.zeros(4, *condition.shape[1:], dtype=torch.float64)
    mask[:, 0] = 1
    beside, picture = torch.cat([mask, condition]), condition[:, :1]
    rays = gained = told = None
    if c.action_modules:
        told = pressed_rule(c.control, keys)
    elif rules.held:
        beside = beside[:0]
        gained = key_field(model.transformer.state_dict(), keys, c.size[0] // 2, c.size[1] // 2)
    elif keys is not None:
        rays = plucker(poses_of(keys), 8 * c.size[0], 8 * c.size[1])
    seen = rolled(chunks, n, rules.window, rules.sink)
    places = [list(range(len(one))) if rules.relative else one for one in seen]
    done = torch.zeros(c.in_channels, 0, *c.size).double()
    if c.action_modules:
        texts = [net.text(model.clip(PICTURE)[0])] * chunks
    else:
        texts = [net.text(model.text(text)[0][0]) for text in texts]
    for chunk in range(chunks):
        end = n * (chunk + 1)
        queries = [(list(range(n * i, n * i + n)), seen[i], places[i]) for i in range(chunk + 1)]
        x, clean = draw(), None
        for time, taken, added in rules.levels:
            if clean is not None:
                x = (1 - added) * clean + added * draw()
            t = torch.zeros(end)  # a model is told times in float32
            t[-n:] = time
            if rules.held and not chunk:
                x[:, :1], t[0] = picture, 0
            whole = torch.cat([torch.cat([done, x], 1), beside[:, :end]])
            ray, gain = (None if part is None else part[:end] for part in (rays, gained))
            acts = None if told is None else [part[:end] for part in told]
            flow = net(whole, t.double(), texts[: chunk + 1], queries, ray, gain, acts)
            clean = x - taken * flow[:, -n:]
            if rules.held and not chunk:
                clean[:, :1] = picture
        done = torch.cat([done, clean], 1)
    return done


def drawn(seed, config):
    rng = torch.Generator().manual_seed(seed)
    size = (1, config.in_channels, config.chunk, *config.size)
    return lambda: torch.randn(size, generator=rng)[0].double()


def played(stream, keys):
    """Latents of a walk, a chunk at a time, each key held for a latent frame."""
    found, size = [], stream.session.shape.chunk
    for i in range(0, len(keys), size):
        held = [key for key in keys[i : i + size] for _ in range(4)]
        # a video's first latent frame is one frame
        held = held if stream.session.memory.latent_frame else held[3:]
        stream.step(held if stream.model.actions else None)
        found.append(stream.session.memory.latents[0])
    return torch.cat(found, 1)


def walked(model, plan="stock", keys=WALK, **options):
    with ts.open(model, plan, prompt=prompt_of(model), seed=7, **options) as stream:
        return played(stream, keys)


@pytest.mark.parametrize("name, shift", [("lingbot-world", 5.0), ("lingbot-world-14b", 10.0)])
def test_lingbot_is_the_authors_loop_past_its_window_and_across_a_restart(name, shift):
    """Behind a picture, by keys, under a prompt that changes."""
    model = small(name)
    assert model.config.shift == shift
    texts = ["a"] * 6 + ["b"] * 2
    expected = film(model, lingbot(shift), texts, drawn(7, model.config), WALK)
    with ts.open(model, "stock", prompt="a", seed=7, first=PICTURE) as stream:
        head = played(stream, WALK[:20])
        state = stream.snapshot()
    with ts.open(model, "stock", prompt="a", seed=7, first=PICTURE) as stream:
        stream.restore(state)
        middle = played(stream, WALK[20:24])
        stream.set_prompt("b")
        found = torch.cat([head, middle, played(stream, WALK[24:])], 1)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_abot_is_the_authors_loop_past_its_window_and_across_a_restart():
    """Behind a picture that is a latent frame, by keys, under a prompt that changes."""
    model = small("abot-world")
    rules = dataclasses.replace(self_forcing(), relative=True, held=True)
    texts, walk = ["a"] * 7 + ["b"] * 2, WALK[:27]
    expected = film(model, rules, texts, drawn(7, model.config), walk)
    with ts.open(model, "stock", prompt="a", seed=7, first=PICTURE) as stream:
        head = played(stream, walk[:15])
        state = stream.snapshot()
    with ts.open(model, "stock", prompt="a", seed=7, first=PICTURE) as stream:
        stream.restore(state)
        middle = played(stream, walk[15:21])
        stream.set_prompt("b")
        found = torch.cat([head, middle, played(stream, walk[21:])], 1)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    with ts.open(model, "stock", prompt="a", seed=7, first=PICTURE) as stream:
        frames = [len(stream.step("w").frames) for _ in range(2)]
    assert frames == [9, 12]  # the picture is shown


@pytest.mark.parametrize(
    "name, walk, window",
    [
        ("matrix-game-2", "wwqlkaaej..dsqq", 6),
        pytest.param("matrix-game-2-drive", "wwqqaae..dsq", 4, marks=pytest.mark.slow),
        pytest.param("matrix-game-2-run", "..wqsseadd.w", 6, marks=pytest.mark.slow),
    ],
)
def test_matrix_game_is_the_authors_loop_past_its_window_and_across_a_restart(name, walk, window):
    """Behind a picture that CLIP sees, by keyboard and mouse; both in two layers of four."""
    model = small(name, layers=4)
    table = [5 * n / (1000 + 4 * n) for n in range(1, 1001)]
    steps = (1000, 750, 500, 250) if name.endswith("run") else (1000, 666, 333)
    times = [5000 * s / (1000 + 4 * s) for s in steps]
    levels = [(t, *[min(table, key=lambda s: abs(1000 * s - t))] * 2) for t in times]
    rules, chunks = Rules(levels, window=window), len(walk) // 3
    expected = film(model, rules, [""] * chunks, drawn(7, model.config), walk)
    with ts.open(model, "stock", seed=7, first=PICTURE) as stream:
        head = played(stream, walk[:9])
        state = stream.snapshot()
    with ts.open(model, "stock", seed=7, first=PICTURE) as stream:
        stream.restore(state)
        found = torch.cat([head, played(stream, walk[9:])], 1)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    other = walked(model, keys=walk[:3] + "." * 3, first=PICTURE)
    assert (other[:, 3:] - found[:, 3:6]).abs().max() > 0.01


@pytest.mark.parametrize("grid", [(6, 7), (5, 3), (1, 9)])
def test_a_key_tells_every_place_what_its_whole_picture_would(grid):
    model = small("abot-world")
    adapter = model.transformer.act_control_adapter
    found = adapter(pressed(model.device)[:], grid)
    expected = key_field(model.transformer.state_dict(), ACTIONS, *grid)
    torch.testing.assert_close(found[0], expected.flatten(0, 1), rtol=0, atol=1e-12)
    assert expected.std() > 0.1


@pytest.mark.parametrize(
    "plan", ["dense passes=teacache:threshold=1", "dense cache=merge:budget=6f"]
)
def test_a_picture_that_is_held_stays_under_any_plan(plan):
    model = small("abot-world")
    picture = model.encode_frames(PICTURE)[0]
    assert torch.equal(walked(model, plan, WALK[:9], first=PICTURE)[:, :1], picture)


@torch.no_grad()
def test_a_tiny_decoder_sees_a_held_picture_before_it_shows_it():
    model = small("abot-world", in_channels=48)
    decoder = TinyDecoder.read(RANDOM, model.config, dtype=torch.float64)
    latents = walked(model, keys=WALK[:6], first=np.zeros((1, 32, 32, 3), np.uint8))[None]
    features = {}
    shown = [decoder.levels(part, features) for part in latents.split(3, 2)]
    # the whole video at once, its first latent frame twice: what that one shows first is left out
    twice = torch.cat([latents[:, :, :1], latents], 2)
    plain = TinyDecoder.read(RANDOM, small("abot-world", in_channels=48, image="frames").config,
                             dtype=torch.float64)  # fmt: skip
    expected = plain.levels(twice, {})[4:]
    torch.testing.assert_close(torch.cat(shown), expected, rtol=0, atol=1e-9)
    assert (shown[0][0] - plain.levels(latents, {})[0]).abs().max() > 1


def test_whole_timesteps_are_those_that_were_seen():
    """Of the authors' own runs: 999, 967, 908, 768 by a shift of 10, 999, 937, 833, 624 by 5."""
    for name, times in (
        ("lingbot-world", [999, 937, 833, 624]),
        ("lingbot-world-14b", [999, 967, 908, 768]),
    ):
        assert [one.timestep for one in small(name).levels.values()] == times


def test_plain_wan_takes_a_picture_by_channels(tmp_path):
    """Self-Forcing's schedule and window on an image-to-video model's 36 channels."""
    made = small("self-forcing", image="channels")
    decoder, made.decoder = made.decoder, None
    save_wan(made, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["model_type"], stored["in_dim"], stored["out_dim"]) == ("i2v", 12, 4)
    model = load_wan(tmp_path, dtype=torch.float64)
    assert model.config == dataclasses.replace(made.config, text_encoder="bytes")
    model.decoder = decoder
    found = walked(model, keys="." * 27, first=PICTURE)
    expected = film(model, self_forcing(), ["a"] * 9, drawn(7, model.config))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert (found - walked(model, keys="." * 27)).abs().max() > 0.01


def test_the_shapes_of_an_image_to_video_file_tell_its_channels(tmp_path):
    made = small("self-forcing", image="channels", dim=256)
    save_wan(made, tmp_path / "x.safetensors")
    config = load_wan(tmp_path / "x.safetensors").config
    assert config.image == "channels" and config.in_channels == 4
    refused(
        lambda: WanConfig.from_json({"model_type": "i2v", "in_dim": 33, "out_dim": 16}),
        "in_dim must be 36, a picture's latents and their mask beside those made, got 33",
    )


POSE = "dense cache=bank:resident=99f attention=pose:past_weight=1"


@pytest.mark.parametrize(
    "name, plan",
    [
        ("lingbot-world", "dense cache=window:budget=99f"),
        ("lingbot-world", "dense cache=merge:budget=99f"),
        ("lingbot-world", "dense cache=bank:resident=99f attention=ann:read=1"),
        ("lingbot-world", POSE),
        ("lingbot-world", "dense replay=attentive:share=0"),
        ("abot-world", "dense cache=bank:resident=99f attention=ann:read=1"),
        ("matrix-game-2", "dense cache=bank:resident=99f attention=ann:read=1"),
        ("matrix-game-2", "dense replay=attentive:share=0"),
    ],
)
def test_a_policy_wide_open_leaves_a_world_as_it_is(name, plan):
    model = small(name)
    walk = WALK[: 4 * model.config.chunk]
    found, expected = (walked(model, one, walk, first=PICTURE) for one in (plan, "dense"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["abot-world", "matrix-game-2"])
def test_a_world_without_poses_says_so(name):
    words = "given their camera's poses, and this one is not"
    refused(lambda: walked(small(name), POSE), words)


def test_poses_by_keys_are_handed_to_a_plan_that_retrieves_by_them(monkeypatch):
    model, told = small("lingbot-world"), []
    with ts.open(model, "pose", prompt="a", first=PICTURE) as stream:
        whole = stream.session.set_poses
        monkeypatch.setattr(stream.session, "set_poses", lambda x: (told.append(x), whole(x)))
        played(stream, WALK)
    expected = poses_of(WALK)[:, :3]
    expected[:, :, 3] /= 20  # a step is a twentieth
    np.testing.assert_allclose(torch.cat(told, 1)[0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("name", ["lingbot-world", "abot-world", "matrix-game-2"])
def test_a_held_key_in_play_gives_what_a_script_gives(name):
    model = small(name)
    model.opening = PICTURE  # `play --first FILE`
    prompt = prompt_of(model)
    log = ActionLog(name, model.fingerprint, Opening("stock", prompt, 7))
    lane, more = Lane(model, log, prompt, "stock"), 4 * model.config.chunk
    films = [lane.step(Step("w" * (more - 3))).frames, lane.step(Step("q" * more)).frames]
    walk = f"w*{more - 3} q*{more}"
    asked = {"prompt": prompt, "seed": 7, "frames": 2 * more - 3, "actions": walk, "first": PICTURE}
    made = ts.rollout(small(name), "stock", **asked)
    assert np.array_equal(np.concatenate(films), np.concatenate([one.frames for one in made]))


@torch.no_grad()
def test_the_channels_of_a_picture_are_those_of_the_whole_video():
    """Wan's encoder sees 29 latent frames back: those after them are alike, however many come."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, latents_mean=[0.1] * 4,
                                     latents_std=[2.0] * 4).double()  # fmt: skip
    model = small("lingbot-world", size=(2, 2))
    model.decoder = WanVae(vae)
    picture = PICTURE[:, :16, :16]
    channels = model.encode_frames(picture)
    assert channels.shape == (1, 8, 30, 2, 2)
    grey = torch.full((4 * 33, 16, 16, 3), 127.5)
    whole = model.decoder.encode(torch.cat([torch.from_numpy(picture), grey]))
    at = torch.arange(34).clamp(max=29)
    torch.testing.assert_close(channels[:, 4:, at], whole, rtol=0, atol=1e-12)
    assert (whole[:, :, 28] != whole[:, :, 29]).any()
    assert channels[:, :4, 0].eq(1).all() and channels[:, :4, 1:].eq(0).all()


@pytest.mark.parametrize(
    "name, tensors, parameters",
    [
        ("lingbot-world", 1071, 1_709_502_016),
        ("lingbot-world-14b", 1421, 18_544_332_864),
        ("abot-world", 831, 5_270_329_536),
        ("matrix-game-2", 1114, 1_619_242_304),
        ("matrix-game-2-drive", 1114, 1_619_238_464),
        ("matrix-game-2-run", 964, 1_508_715_584),
    ],
)
def test_a_world_has_the_tensors_that_were_published(name, tensors, parameters):
    held = sized_wan(name, torch.bfloat16).transformer.state_dict()
    assert (len(held), sum(x.numel() for x in held.values())) == (tensors, parameters)
    shapes = {
        "abot-world": {"patch_embedding": (3072, 48, 1, 2, 2),
                       "act_control_adapter.conv": (3072, 8192, 2, 2),
                       "act_control_adapter.residual_blocks.0.conv2": (3072, 3072, 3, 3)},
        "matrix-game-2": {"img_emb.proj.3": (1536, 1280),
                          "blocks.14.action_model.mouse_mlp.0": (1024, 1560),
                          "blocks.14.action_model.keyboard_embed.0": (128, 4)},
        "matrix-game-2-drive": {"blocks.0.action_model.keyboard_embed.0": (128, 2)},
        "matrix-game-2-run": {"blocks.0.action_model.keyboard_attn_kv": (2048, 1536)},
    }  # fmt: skip
    wide = PRESETS[name].config.dim
    lingbot = {"patch_embedding": (wide, 36, 1, 2, 2), "patch_embedding_wancamctrl": (wide, 1536)}
    for part, shape in shapes.get(name, lingbot).items():
        assert held[f"{part}.weight"].shape == shape


def test_files_of_a_world_are_checked_by_name_and_shape(monkeypatch, tmp_path):
    preset, made = PRESETS["lingbot-world"], small("lingbot-world", dim=256)
    monkeypatch.setitem(PRESETS, "lingbot-world", dataclasses.replace(preset, config=made.config))
    tensors = made.transformer.state_dict()
    write_tensors(tmp_path / "model-00001-of-00001.safetensors", tensors)
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        model = ts.load("lingbot-world", path, dtype="float64")
        assert torch.equal(model.transformer.blocks[1].cam_shift_layer.weight,
                           made.transformer.blocks[1].cam_shift_layer.weight)  # fmt: skip
    name = "blocks.1.cam_scale_layer.weight"
    for broken, words in (
        ({n: x for n, x in tensors.items() if n != name}, f"it lacks {name}"),
        (tensors | {name: torch.zeros(3, 3)}, f"{name} is float32 [3, 3] and must be"),
        (tensors | {"img_emb.proj.0.weight": torch.zeros(3)}, "it also has img_emb.proj.0.weight"),
    ):
        write_tensors(tmp_path / "broken.safetensors", broken)
        refused(lambda: ts.load("lingbot-world", tmp_path / "broken.safetensors"), words)


@torch.no_grad()
def test_clip_sees_a_picture_as_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=16,
        image_size=28, patch_size=14, hidden_act="gelu", layer_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.CLIPVisionModel(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    held = {n.removeprefix("vision_model."): x for n, x in theirs.state_dict().items()}
    names = {
        "patch_embedding.weight": held["embeddings.patch_embedding.weight"],
        "cls_embedding": held["embeddings.class_embedding"][None, None],
        "pos_embedding": held["embeddings.position_embedding.weight"][None],
    }
    for kind in ("weight", "bias"):
        names[f"pre_norm.{kind}"] = held[f"pre_layrnorm.{kind}"]
        for i in range(3):
            at, ours = f"encoder.layers.{i}", f"transformer.{i}"
            parts = {"attn.proj": "self_attn.out_proj", "norm1": "layer_norm1",
                     "norm2": "layer_norm2", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"}  # fmt: skip
            names |= {f"{ours}.{o}.{kind}": held[f"{at}.{t}.{kind}"] for o, t in parts.items()}
            three = [held[f"{at}.self_attn.{n}_proj.{kind}"] for n in "qkv"]
            names[f"{ours}.attn.to_qkv.{kind}"] = torch.cat(three)
    file, last = tmp_path / CLIP, "transformer.2.mlp.0.weight"
    write_tensors(file, {f"visual.{name}": x for name, x in names.items()})
    assert ClipVision.found(tmp_path)
    ours = ClipVision(file, 5, 64)
    x = torch.from_numpy(PICTURE).permute(0, 3, 1, 2).float() / 255
    x = torch.nn.functional.interpolate(x, (28, 28), mode="bicubic")
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    states = theirs((x - mean) / std, output_hidden_states=True).hidden_states
    torch.testing.assert_close(ours(PICTURE), states[-2], rtol=0, atol=1e-4)
    for broken, words in (
        ({"pos_embedding": names["pos_embedding"]}, "its published names, got pos_embedding"),
        ({n: x * torch.nan for n, x in names.items()}, "NaN or infinity in visual."),
        ({n: x for n, x in names.items() if n != last}, f"lacks {last}:"),
        (names | {last: torch.ones(3, 3)}, f"{last} is float32 [3, 3] and must be float32 [96, 64"),
        (names | {last: names[last].int()}, f"{last} is int32 [96, 64] and must be float32"),
        (names | {"patch_embedding.weight": torch.ones(())}, "under its published names"),
        (names | {"pos_embedding": torch.ones(1, 6, 64)}, "pos_embedding is float32 [1, 6, 64]"),
    ):
        write_tensors(file, {f"visual.{name}": x for name, x in broken.items()})
        refused(lambda: ClipVision(file, 5, 64)(PICTURE), CLIP, words)


def test_matrix_game_sees_a_picture_and_reads_no_prompt(tmp_path, monkeypatch):
    name = "matrix-game-2"
    model = small(name)
    refused(lambda: ts.open(model, "stock", prompt="a", first=PICTURE), "reads no prompt, got 'a'")
    preset, made = PRESETS[name], small(name, dim=256)
    monkeypatch.setitem(PRESETS, name, dataclasses.replace(preset, config=made.config))
    save_wan(made, tmp_path / "x.pt")
    loaded = ts.load(name, tmp_path / "x.pt", dtype="float64")
    loaded.decoder = made.decoder
    refused(lambda: ts.open(loaded, "stock", first=PICTURE), "without CLIP", CLIP)
    loaded.clip = made.clip
    assert torch.equal(*(walked(one, keys="wqe", first=PICTURE) for one in (loaded, made)))
    refused(
        lambda: dataclasses.replace(made.config, reach=2),
        "reach is for controls walk, drive and run, and at least the chunk, got 2",
    )


def test_a_world_begins_with_one_picture():
    model = small("lingbot-world")
    two = np.concatenate([PICTURE, PICTURE])
    refused(lambda: ts.open(model, first=two), "begins with one picture, got 2")
    refused(
        lambda: dataclasses.replace(model.config, actions=".wsa"),
        "control rays needs actions '.wsadikjlqe', and no camera, got '.wsa', camera=False",
    )
