"""Keys, the mouse, prompts of later chunks and an uploaded picture, in a session."""

import base64
import dataclasses
import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from serving import Player, connected, make_engine, playing, serving, tiny

import tachyscope as ts
from tachyscope.models.wan import key_camera
from tachyscope.models.wan.model import WanModel
from tachyscope.models.wan.random import random_wan
from tachyscope.serve.live_session import ASKED
from tachyscope.serve.picture import read_picture


@pytest.fixture(scope="module")
def model():
    return tiny()


def test_two_keys_and_the_mouse_of_a_published_world(model, tmp_path):
    world = random_wan(
        dataclasses.replace(model.config, actions=key_camera.ACTIONS), name="toy-chunks"
    )
    assert isinstance(world, WanModel) and world.chords == {"q": "wj", "e": "wl"}
    with serving(make_engine(world, tmp_path)) as client, playing(client) as player:
        assert (
            player.opened["chords"] == {"wj": "q", "wl": "e"} and player.opened["looks"] == "jlik"
        )
        player.send("pause", id=1)
        player.until("receipt", id=1, phase="applied")
        player.send("keys", id=2, actions="lw")
        player.send("pause", id=3, paused=False)
        player.until("receipt", id=2, phase="applied")
        player.send("mouse", id=4, dx=-40, dy=3)
        at = player.until("receipt", id=4, phase="applied")["chunk"]
        while player.chunks.keys().isdisjoint({(1, at + 1)}):
            player.next()
        # w and l are held; the mouse turned once, for one chunk
        assert [player.chunks[1, i]["actions"] for i in (at - 1, at, at + 1)] == ["e", "j", "e"]
        player.send("keys", id=5, actions="wk")
        assert "wj, wl, or empty, got 'wk'" in player.until("error")["message"]


def test_prompts_take_effect_at_their_chunks_and_others_at_once(model, tmp_path):
    with serving(make_engine(model, tmp_path)) as client, playing(client) as player:
        player.send("pause", id=1)
        now = player.until("receipt", id=1, phase="applied")["chunk"]
        for i, later in ((2, 6), (3, 3)):
            player.send("prompt", id=i, text=f"room {i}", chunk=now + later)
        player.send("pause", id=4, paused=False)
        assert player.until("receipt", id=3, phase="applied")["chunk"] == now + 3
        assert player.until("receipt", id=2, phase="applied")["chunk"] == now + 6
        player.send("log", id=5)
        steps = player.until("log")["log"]["steps"]
    assert [i for i, one in enumerate(steps) if one[1:]] == [now + 3, now + 6]
    assert [steps[now + 3][1], steps[now + 6][1]] == ["room 3", "room 2"]


def test_a_paused_session_takes_so_many_keys_and_prompts_and_no_more(model, tmp_path):
    engine = make_engine(model, tmp_path, messages_per_s=10**6)
    with serving(engine) as client, playing(client) as player:
        player.send("pause", id=1)
        player.until("receipt", id=1, phase="applied")
        for i in range(ASKED + 1):
            player.send("prompt", id=2 + i, text="a room")
        refused = player.until("receipt", phase="refused")
        assert refused["id"] == ASKED + 2 and "wait for their chunk" in refused["reason"]
        player.send("pause", id=0, paused=False)
        player.until("receipt", id=ASKED + 1, phase="applied")


def picture(size, kind="PNG"):
    """A file in base64, red on the left and blue on the right."""
    frame = np.zeros((*size, 3), np.uint8)
    frame[:, : size[1] // 2, 0] = frame[:, size[1] // 2 :, 2] = 200
    file = io.BytesIO()
    Image.fromarray(frame).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def test_a_session_begins_with_an_uploaded_picture_and_resumes_with_it(
    model, tmp_path, monkeypatch
):
    def encode(frames):
        """A picture as the latents of its levels: toys have no encoder."""
        size = model.latent_size(model.shape(), len(frames))
        return torch.linspace(-1, float(frames.std()) / 99, math.prod(size)).view(size)

    monkeypatch.setattr(model.decoder, "encode", encode, raising=False)
    image = picture((64, 96))
    engine = make_engine(model, tmp_path)
    with serving(engine) as client, playing(client, seed=5, image=image) as player:
        player.until("snapshot")
        player.until_frame(8)
        player.send("log", id=1)
        log = player.until("log")["log"]
    first = read_picture(image, model.size)
    assert first.shape == (1, *model.size, 3) and log["opening"]["image"] == image
    with ts.open(model, "live", seed=5, first=first) as stream:
        wanted = np.concatenate([stream.step().frames for _ in range(3)])
    assert player.matches(wanted)
    known = {name: player.opened[name] for name in ("session", "secret")}
    with (
        serving(make_engine(model, tmp_path)) as client,
        playing(client, "resume", format="png", **known) as again,
    ):
        again.until_frame(3 * again.opened["chunk"] + 2)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("w", "an image is a file in base64"),
        (picture((8, 8))[:60], "a picture is a JPEG, PNG or WebP"),
        (picture((8, 8), "GIF"), "a picture is a JPEG, PNG or WebP"),
        (picture((2049, 2048)), "at most 4,194,304 pixels"),
        ("A" * 500_001, "at most 500000 letters"),
    ],
    ids=["none", "cut", "gif", "large", "long"],
)
def test_what_is_no_picture_is_refused_in_a_line(model, tmp_path, image, words):
    with serving(make_engine(model, tmp_path)) as client, connected(client) as plain:
        player = Player(plain)
        player.send("open", image=image)
        assert words in player.until("error")["message"]
        player.send("open", pace="free")
        player.until("opened")
