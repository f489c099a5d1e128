"""Sessions that follow their client's camera: its pictures come in, chunks go out behind them."""

import io
import time

import numpy as np
import pytest
import toys
from faults import refused
from PIL import Image
from serving import connected, make_engine, playing, serving

import tachyscope as ts
from tachyscope.serve.picture import decode


def clip(count, size=(32, 48)):
    return np.random.default_rng(0).integers(0, 256, (count, *size, 3), np.uint8)


def file_of(frame, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(frame).save(file, kind)
    return file.getvalue()


@pytest.fixture
def engine(tmp_path):
    return make_engine(toys.encoding_chunks(), tmp_path)


@pytest.mark.slow
def test_chunks_come_behind_the_clients_pictures(engine):
    frames = clip(9)
    with serving(engine) as client, playing(client, prompt="a", seed=2, strength=0.6) as player:
        assert player.opened["strength"] == 0.6
        for at in (0, 3, 6):
            for frame in frames[at : at + 3]:
                player.socket.send_bytes(file_of(frame))
            player.until_frame(at + 2)
        # of what cannot be gone back to nothing is kept, and another plan cannot see it
        for kind, fields in {
            "beside": {"mode": "turns"},
            "rewind": {},
            "map": {"on": True},
        }.items():
            player.send(kind, **fields)
            assert "costly" not in player.until("receipt", phase="refused")["reason"]
            time.sleep(0.5)  # two such a second
        player.send("log")
        log = player.until("log")["log"]
    chunks = ts.rollout(
        engine.model, "live", frames=9, prompt="a", seed=2, video=frames, strength=0.6
    )
    assert player.matches(np.concatenate([chunk.frames for chunk in chunks]))
    assert not any(one["type"] == "snapshot" for one in player.said)
    refused(lambda: engine.pool.read_log(log), "followed a camera, whose pictures no log holds")


def test_a_session_begins_to_follow_and_ends_to(engine):
    with serving(engine) as client, playing(client, prompt="a", pace="free") as player:
        player.until_frame(2)
        player.send("reset", strength=1)
        assert player.until("began")["strength"] == 1
        for frame in clip(3):
            player.socket.send_bytes(file_of(frame, "JPEG"))
        player.until_frame(2, generation=2)
        player.send("reset", strength=0)
        assert player.until("began")["strength"] == 0
        player.until_frame(5, generation=3)


def test_pictures_that_nobody_takes_are_let_go(engine):
    with serving(engine) as client, playing(client, strength=0.5) as player:
        player.send("pause", paused=True)
        player.until("receipt", phase="applied")
        (live,) = engine.pool.sessions.values()
        for frame in clip(20):
            player.socket.send_bytes(file_of(frame))
        end = time.monotonic() + 20
        while live.lane.camera.dropped < 14 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(live.lane.camera) == 6 and live.lane.camera.dropped == 14
    end = time.monotonic() + 20
    while engine.pool.sessions and time.monotonic() < end:
        time.sleep(0.01)
    assert not engine.pool.sessions  # without its client there is nothing to go on with


def test_what_is_no_picture_is_refused_and_the_session_goes_on(engine):
    with serving(engine) as client, playing(client, strength=0.5) as player:
        large = file_of(clip(1, (300, 300))[0])
        assert len(large) > engine.limits.message_bytes
        wide = file_of(np.zeros((2049, 2049, 3), np.uint8))
        for data, words in (
            (b"", "a picture is a JPEG"), (b"GIF89a", "a picture is a JPEG"),
            (file_of(clip(1)[0])[:99], "a picture is"), (wide, "4,194,304 pixels"),
            (large, "at most 65536 bytes"),
        ):  # fmt: skip
            player.socket.send_bytes(data)
            assert words in player.until("error")["message"]
        for frame in clip(3, (64, 64)):  # cut and scaled
            player.socket.send_bytes(file_of(frame))
        player.until_frame(2)
        player.send("reset", strength=2)
        assert "'strength' of message 'reset' is from 0 to 1" in player.until("error")["message"]
        player.send("reset", strength="0.5")
        assert "is a number, got" in player.until("error")["message"]


def test_a_picture_is_for_sessions_that_follow(engine, tmp_path):
    with serving(engine) as client, playing(client) as player:
        player.socket.send_bytes(file_of(clip(1)[0]))
        assert "unless its session follows" in player.until("error")["message"]
    other = make_engine(toys.narrow_chunks(), tmp_path / "other")
    with serving(other) as client, connected(client) as socket:
        socket.send_text('{"type": "open", "strength": 0.5}')
        assert "a preview shows latents" in socket.receive_json()["message"]
    assert decode(file_of(clip(1)[0]), (32, 48)).shape == (32, 48, 3)
