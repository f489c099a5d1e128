"""Videos that nobody watches: deleted at any moment, and made on a disk that is full."""

import threading
import time

import pytest
from serving import Player, connected, make_engine, playing, serving, tiny

from tachyscope.io.files import unwritable
from tachyscope.io.video import VideoWriter
from tachyscope.serve.recording import Recording


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def engine(model, tmp_path):
    return make_engine(model, tmp_path)


def ask(client, **fields):
    told = client.post("/v1/videos", json={"seconds": "0.3"} | fields)
    assert told.status_code == 200, told.text
    return told.json()["id"]


def until_done(client, name):
    for _ in range(3000):
        told = client.get(f"/v1/videos/{name}").json()
        if told["status"] in ("completed", "failed"):
            return told
        time.sleep(0.01)
    raise AssertionError(told)


def test_videos_that_are_deleted_before_they_begin_take_no_place(engine):
    held, go_on = threading.Event(), threading.Event()

    def hold():
        held.set()
        go_on.wait()

    with serving(engine) as client:
        engine.call(hold)
        held.wait()
        gone = []
        for _ in range(20):
            name = ask(client, seconds="50")
            gone.append(threading.Thread(target=client.delete, args=(f"/v1/videos/{name}",)))
            gone[-1].start()
            while client.get(f"/v1/videos/{name}").status_code == 200:
                time.sleep(0.001)
        go_on.set()
        for one in gone:
            one.join()
        assert until_done(client, ask(client))["status"] == "completed"
        assert engine.pool.sessions == {}
        assert client.get("/v1/videos").json()["data"][0]["status"] == "completed"


def no_space(*given):
    fault = OSError(28, "No space left on device")
    raise unwritable("/a/path/of/the/server.mp4", fault) from fault


@pytest.mark.parametrize("when", ["__enter__", "write", "__exit__"])
def test_a_video_that_a_full_disk_does_not_take_fails_and_the_next_one_is_made(
    engine, monkeypatch, when
):
    with serving(engine) as client:
        with monkeypatch.context() as full:
            full.setattr(VideoWriter, when, no_space)
            told = until_done(client, ask(client))
        assert told["status"] == "failed"
        words = "the recording cannot be written (no space left on device)"
        assert told["error"]["message"].startswith(words)
        assert "/a/path" not in str(told)
        assert until_done(client, ask(client))["status"] == "completed"
        assert engine.pool.sessions == {}


def test_a_fault_of_the_server_ends_one_video_and_tells_nothing(engine, monkeypatch):
    with serving(engine) as client:
        with monkeypatch.context() as broken:
            broken.setattr(Recording, "finish", lambda self: 1 / 0)
            told = until_done(client, ask(client))
        assert told["error"]["message"] == "the server failed at this video, and its log has why"
        assert until_done(client, ask(client))["status"] == "completed"
        assert engine.pool.sessions == {}


def test_a_session_goes_on_without_its_recording_where_the_disk_is_full(engine, monkeypatch):
    with serving(engine) as client, playing(client) as player:
        monkeypatch.setattr(VideoWriter, "write", no_space)
        player.send("record", id=1)
        notice = player.until("notice")
        assert notice["code"] == "recording_failed" and "/a/path" not in notice["message"]
        player.until_frame(player.latest() + 6)
        player.send("record", id=2, on=False)
        player.until("receipt", id=2, phase="applied")


def test_a_recording_of_nothing_is_refused_without_a_path(engine):
    with serving(engine) as client, connected(client) as socket:
        player = Player(socket)
        player.send("open")
        player.send("pause", id=1)
        player.until("receipt", id=1, phase="applied")
        player.send("record", id=2)
        player.until("receipt", id=2, phase="applied")
        player.send("record", id=3, on=False)
        told = player.until("receipt", id=3, phase="refused")["reason"]
        assert told == "the recording has no frames: let one be made first"
