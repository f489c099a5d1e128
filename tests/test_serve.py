"""The server by in-process clients: sessions, receipts, limits, snapshots, who is let in."""

import io
import json
import re
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from openai import BadRequestError, NotFoundError, OpenAI
from serving import Player, connected, make_engine, playing, serving, tiny
from starlette.testclient import WebSocketDenialResponse
from test_contract import CONTRACT, families, model_of

import tachyscope as ts
from tachyscope.core.errors import TachyscopeError
from tachyscope.measure.quality import psnr
from tachyscope.memory.predict import need
from tachyscope.serve import engine as engines
from tachyscope.serve import protocol, session_pool
from tachyscope.serve.action_log import Opening
from tachyscope.serve.limits import Bucket, Limits
from tachyscope.serve.read_map import ReadMap
from tachyscope.serve.security import Guard, read_tokens
from tachyscope.serve.server import Endpoint
from tachyscope.serve.snapshots import Snapshots

SECRET = "a-token-of-many-letters"


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def engine(model, tmp_path):
    return make_engine(model, tmp_path)


def rolled(model, steps, plan="live", seed=0, prompt=""):
    """The frames of an action log's steps, by the library alone."""
    with ts.open(model, plan, seed=seed, prompt=prompt) as stream:
        parts = []
        for step in steps:
            action, text = step if isinstance(step, list) else (step, None)
            if text is not None:
                stream.set_prompt(text)
            parts.append(stream.step(list(action) or None).frames)
        return np.concatenate(parts)


def read_bytes(file):
    """The frames of an mp4."""
    with av.open(io.BytesIO(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def left(player):
    """How the server ended the connection, after what it said before."""
    while True:
        message = player.next()
        if isinstance(message, dict) and message["type"] == "left":
            return message


def connect(client, *protocols, **headers):
    return connected(client, protocols or (protocol.SUBPROTOCOL,), headers)


def settle(engine, player):
    """Wait until a session that lost its client lies on disk."""
    live = engine.pool.sessions[player.opened["session"]]
    while live.emit is not None or live.chunk not in live.saved:
        time.sleep(0.01)
    return live


def metric_of(engine, name, **labels):
    """A number of the engine's own."""
    return engine.metrics.registry.get_sample_value(name, labels)


def metric(client, line):
    """A number of /metrics by the beginning of its line."""
    (found,) = [row for row in client.get("/metrics").text.splitlines() if row.startswith(line)]
    return float(found.split()[-1])


def test_keys_make_the_frames_that_a_stream_makes_and_the_log_repeats_them(engine, model):
    with serving(engine) as client:
        with playing(client, seed=3, prompt="a red room") as player:
            player.send("keys", id=1, actions="w")
            assert player.until("receipt", id=1)["phase"] == "received"
            applied = player.until("receipt", id=1, phase="applied")["chunk"]
            player.send("prompt", id=2, text="a blue room")
            player.until("receipt", id=2, phase="applied")
            player.until_frame(3 * applied + 8)
            player.send("log", id=3)
            log = player.until("log")["log"]
            # a tap that ends before any chunk saw it still counts
            player.send("keys", id=4, actions="q")
            player.send("keys", id=5, actions="")
            chunk = player.until("receipt", id=5, phase="applied")["chunk"]
            assert player.until("chunk", chunk=chunk)["actions"] == "q"
            player.send("close")
            assert player.until("closed")["reason"] == "closed by the client"
        assert log["steps"][applied] == "w"
        assert any(isinstance(step, list) and step[1] == "a blue room" for step in log["steps"])
        count = 3 * applied + 9
        wanted = rolled(model, log["steps"], seed=3, prompt="a red room")[:count]
        assert player.matches(wanted)
        with playing(client, log=log) as again:
            again.until_frame(count - 1)
        assert again.matches(wanted)
        chunk = player.chunks[1, 2]
        assert chunk["frames"] == 3 and chunk["frame"] == 6
        assert 0 < chunk["pairs"] <= chunk["dense_pairs"]
        assert metric(client, 'tachyscope_sessions_opened_total{how="open"}') == 2
        assert metric(client, 'tachyscope_steps_total{lane="main"}') >= count / 3
    assert not engine.pool.sessions or all(
        one.lane is None for one in engine.pool.sessions.values()
    )


def test_a_session_pauses_resets_and_takes_another_plan(engine, model):
    with serving(engine) as client, playing(client) as player:
        player.send("pause", id=1, paused=True)
        at = player.until("receipt", id=1, phase="applied")["chunk"]
        player.send("keys", id=2, actions="a")
        player.until("receipt", id=2, phase="received")
        player.send("reset", id=3, plan="balanced", seed=7)
        began = player.until("began")
        assert (began["generation"], began["chunk"], began["plan"]) == (2, 0, "balanced")
        assert max((chunk for _, chunk in player.chunks), default=-1) < at
        player.send("pause", id=4, paused=False)
        player.until_frame(2, generation=2)
        wanted = rolled(model, [""], plan="balanced", seed=7)
        assert player.matches(wanted, generation=2)
        player.send("reset", id=5, plan="no such plan")
        refused = player.until("receipt", id=5, phase="refused")
        assert "no plan 'no'" in refused["reason"]
        player.until_frame(5, generation=2)


def test_a_client_that_was_cut_off_goes_on_where_it_was(engine, model):
    with serving(engine) as client:
        with playing(client) as player:
            player.send("keys", id=1, actions="d")
            player.until_frame(8)
        known = {name: player.opened[name] for name in ("session", "secret")}
        stopped = settle(engine, player).chunk
        with playing(client, "resume", format="png", **known) as again:
            assert again.opened["chunk"] == stopped
            again.until_frame(3 * stopped + 2)
            again.send("log", id=9)
            log = again.until("log")["log"]
            with connect(client) as socket:
                other = Player(socket)
                other.send("resume", session=known["session"], secret="0" * 32)
                assert "no session of this name and secret" in other.until("error")["message"]
        wanted = rolled(model, log["steps"])
        assert again.matches(wanted[: 3 * stopped + 3], start=3 * stopped)


@pytest.mark.slow
def test_one_can_go_back_to_a_snapshot_and_take_another_way(engine, model):
    # no faster than it is watched: a snapshot is dropped when four newer ones are there
    with serving(engine) as client, playing(client, pace="model") as player:
        player.send("rewind", id=1, chunk=0)
        refused = player.until("receipt", id=1, phase="refused")
        assert "there is no snapshot before chunk 0: kept are none yet" in refused["reason"]
        player.send("keys", id=2, actions="w")
        player.until("snapshot", chunk=8)
        player.send("rewind", id=3, chunk=7)
        began = player.until("began")
        assert (began["generation"], began["chunk"], began["snapshots"]) == (2, 4, [4])
        player.send("keys", id=4, actions="a")
        player.until_frame(17, generation=2)
        player.send("log", id=5)
        steps = player.until("log")["log"]["steps"]
        assert "a" in steps[4:] and "w" not in steps[4:]
        wanted = rolled(model, steps)
        assert player.matches(wanted[:18], start=12, generation=2)


def test_dense_runs_beside_on_the_same_log(engine, model):
    with serving(engine) as client, playing(client, plan="cache=window:budget=6f") as player:
        player.send("keys", id=1, actions="w")
        player.until("receipt", id=1, phase="applied")
        player.send("beside", id=2, mode="follow")
        player.send("pause", id=3, paused=True)
        at = player.until("receipt", id=3, phase="applied")["chunk"]
        # a free-running plan leaves dense little time: it has followed once there is a pause
        player.once("beside", chunk=at - 1, behind=0)
        player.until_frame(3 * at - 1, lane=protocol.BESIDE)
        player.send("beside", id=4, mode="turns")
        player.send("pause", id=5, paused=False)
        told = [player.until("beside") for _ in range(4)]
        assert all(one["behind"] == 0 and len(one["psnr"]) == 3 for one in told)
        player.until_frame(3 * told[-1]["chunk"] + 2, lane=protocol.BESIDE)
        player.send("log", id=6)
        steps = player.until("log")["log"]["steps"]
        count = 3 * (told[-1]["chunk"] + 1)
        wanted = rolled(model, steps, plan="dense")[:count]
        assert player.matches(wanted, lane=protocol.BESIDE)
        main = rolled(model, steps, plan="cache=window:budget=6f")
        assert told[-1]["psnr"] == pytest.approx(
            psnr(main[count - 3 : count], wanted[-3:]), abs=0.01
        )
        assert engine.pool.sessions[player.opened["session"]].bytes == sum(
            map(engine.pool.bytes_of, ("dense", "cache=window:budget=6f"))
        )


def test_the_map_tells_what_was_read_merged_and_replayed(engine, model):
    plan = "cache=dedup:budget=12f,newest=1 attention=ann:read=0.5,block=2,tile=2,sink=0 replay=every_k"
    with serving(engine) as client, playing(client, plan=plan) as player:
        player.until_frame(2)
        player.send("map", id=1, on=True)
        player.until("receipt", id=1, phase="applied")
        maps = [player.until("map") for _ in range(6)]
        assert all(one["grid"] == [2, 3] for one in maps)
        groups = [group for one in maps for group in one["groups"]]
        assert all(group["layers"] == [0, 0] for group in groups) and len(groups) == 6
        for kind in ("read", "merged", "replayed"):
            values = [group[kind] for group in groups]
            assert all(len(one) == 6 and min(one) >= 0 and max(one) <= 1 for one in values)
            assert any(map(any, values)), kind
        assert 0.3 < sum(groups[-1]["read"]) / 6 < 1  # half of the blocks, the newest among them
        player.send("map", id=2, on=False)
        player.until("receipt", id=2, phase="applied")
        player.until_frame(player.latest() + 6)
        player.send("log", id=3)
        # watching changes nothing
        wanted = rolled(model, player.until("log")["log"]["steps"], plan=plan)
        assert player.matches(wanted)


@pytest.mark.parametrize("dense", ["0.3", pytest.param("1", marks=pytest.mark.slow)])
def test_the_map_shows_a_pass_that_leaves_entries_out(model, dense):
    """Of three passes over a chunk the first ones may read all; the map is of what they leave."""
    watch, settings = ReadMap(), f"read=0.5,block=2,tile=2,sink=0,dense_passes={dense}"
    with ts.open(model, f"cache=dedup:budget=12f attention=ann:{settings}", observers=[watch]) as s:
        for _ in range(5):
            s.step()
        (group,) = watch.take()["groups"]
    assert (min(group["read"]) == 1) == (dense == "1")
    assert dense == "1" or 0.3 < sum(group["read"]) / 6 < 0.9


def test_the_map_tells_what_a_bank_fetched(model):
    watch, plan = ReadMap(), "cache=bank:resident=12f,budget=60f attention=ann:k=24,block=2,tile=2"
    with ts.open(model, plan, observers=[watch]) as stream:
        for _ in range(8):
            fetched = stream.step("w").stats.get("blocks_fetched", 0)
            (group,) = watch.take()["groups"]
            assert any(group["fetched"]) == (fetched > 0) and group["read"] is None
    # of 12 blocks that a tile reads at most these can have come
    assert 0 < max(group["fetched"]) < 1 and len(group["fetched"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cache", "store", "attention", "replay"])
def test_the_map_watches_every_policy(kind):
    for name, (_, tight) in CONTRACT[kind].items():
        family = families(kind, name)[0]
        if family in ("chunks", "poses"):
            watch = ReadMap()
            with ts.open(model_of(family, "cpu"), f"{kind}={tight}", observers=[watch]) as stream:
                for _ in range(4):
                    stream.step()
                groups = watch.take()["groups"]
            for group in groups:
                found = [x for x in group.values() if x is not None]
                assert all(0 <= value <= 1 for x in found[1:] for value in x)


def test_a_killed_server_s_sessions_resume_from_their_last_snapshot(model, tmp_path):
    """The engine is left as kill -9 leaves it: only its files remain."""
    first = make_engine(model, tmp_path, chunks=2)
    with serving(first) as client, playing(client, prompt="a red room") as player:
        player.send("keys", id=1, actions="s")
        player.until_frame(26)  # more than the plan remembers
        known = {name: player.opened[name] for name in ("session", "secret")}
        live = first.pool.sessions[known["session"]]
        while not live.saved:
            time.sleep(0.01)
        first.writer.save = lambda live: None  # it dies before it can write again
    second = make_engine(model, tmp_path)
    with serving(second) as client, playing(client, "resume", format="png", **known) as again:
        chunk = again.opened["chunk"]
        assert chunk == live.saved[-1] > 0
        again.send("keys", id=1, actions="e")
        again.send("prompt", id=2, text="a blue room")  # prefills what was made before
        last = 3 * again.until("receipt", id=2, phase="applied")["chunk"] + 5
        again.until_frame(last)
        again.send("log", id=3)
        steps = again.until("log")["log"]["steps"]
        wanted = rolled(model, steps, prompt="a red room")
        assert again.matches(wanted[: last + 1], start=3 * chunk)


def test_a_bank_s_host_memory_is_counted(model, tmp_path, monkeypatch):
    pool = make_engine(model, tmp_path).pool
    predicted = need(model.on_meta(), "fast", frames=pool.limits.session_frames)
    # beside a CPU it is of the same memory
    assert pool.bytes_of("fast") == predicted.of_video + predicted.host and predicted.host > 0
    monkeypatch.setattr(session_pool, "memory_of", lambda device: int(2.5 * predicted.host))
    monkeypatch.setattr(pool, "model", SimpleNamespace(device=torch.device("cuda")))
    one = SimpleNamespace(log=SimpleNamespace(opening=SimpleNamespace(plan="fast")))
    pool.check_host("fast", [one])
    pool.check_host("live", [one] * 9)
    with pytest.raises(
        session_pool.Full, match=r"takes .* GB of host memory, and .* take plan live"
    ):
        pool.check_host("fast", [one, one])


def test_sessions_that_lost_their_client_make_room_on_disk(model, tmp_path):
    size = make_engine(model, tmp_path).pool.bytes_of("live")
    engine = make_engine(model, tmp_path, budget=size)
    with serving(engine) as client:
        with playing(client) as first:
            first.until_frame(5)
            with connect(client) as socket:
                other = Player(socket)
                other.send("open")
                error = other.until("error")
                assert error["code"] == 503 and error["retry_after_s"] == 30
                assert (
                    f"takes {size / 1e6:.1f} MB, and 0.0 of {size / 1e6:.1f} MB are free"
                    in (error["message"])
                )
                assert left(other)["code"] == 1013
        settle(engine, first)
        with playing(client) as second:
            second.until_frame(2)
            assert metric(client, 'tachyscope_sessions{state="on_disk"}') == 1
            assert metric(client, "tachyscope_reserved_bytes") == size
        settle(engine, second)
        known = {key: first.opened[key] for key in ("session", "secret")}
        with playing(client, "resume", **known) as again:
            again.until_frame(3 * again.opened["chunk"] + 2)


def test_a_session_whose_client_leaves_during_a_write_is_written_after_it(
    model, tmp_path, monkeypatch
):
    engine = make_engine(model, tmp_path, chunks=2)
    save = engine.writer.snapshots.save

    def slow(*args):
        time.sleep(0.3)  # meanwhile more chunks are made, and the client leaves
        return save(*args)

    monkeypatch.setattr(engine.writer.snapshots, "save", slow)
    with serving(engine) as client:
        with playing(client) as player:
            player.until_frame(14)
        live = engine.pool.sessions[player.opened["session"]]
        begun = time.monotonic()
        while live.chunk not in live.saved:
            assert time.monotonic() - begun < 20, "nobody writes it"
            time.sleep(0.01)


def test_a_step_that_raises_ends_its_session_and_no_other(engine, monkeypatch):
    with serving(engine) as client, playing(client) as well, playing(client) as ill:
        well.until_frame(2)
        live = engine.pool.sessions[ill.opened["session"]]

        def broken(step, show):
            raise ZeroDivisionError("a secret of the machine's")

        monkeypatch.setattr(live.lane, "step", broken)
        error = ill.until("error")
        assert (error["code"], error["message"]) == ("failed", "a step failed (ZeroDivisionError)")
        assert left(ill)["code"] == 1000
        latest = max(well.frames)[2]
        well.until_frame(latest + 6)
        assert metric(client, 'tachyscope_sessions_ended_total{why="failed"}') == 1


def test_a_full_disk_is_told_and_the_session_goes_on(model, tmp_path, monkeypatch):
    engine = make_engine(model, tmp_path, chunks=1)

    def full(path, mode):
        raise OSError(28, "No space left on device")

    with serving(engine) as client, playing(client) as player:
        monkeypatch.setattr(engine.writer.snapshots.fs, "open", full)
        notice = player.until("notice")
        assert notice["code"] == "snapshot_failed"
        assert "no space left on device" in notice["message"]
        assert notice["message"].endswith("after a fault cannot be resumed")  # there is no older
        latest = max(player.frames, default=(0, 0, 0))[2]
        player.until_frame(latest + 6)
        assert metric(client, 'tachyscope_snapshots_total{result="failed"}') > 0


@pytest.mark.slow
def test_snapshots_are_copied_one_at_a_time_and_none_is_left_out(model, tmp_path, monkeypatch):
    """Each is a copy of a whole session in the device's memory until it is written."""
    engine = make_engine(model, tmp_path, chunks=10**6)
    written, held, release = [], [], threading.Event()
    save = engine.writer.snapshots.save

    def slow(name, saved, chunk, state):
        held.append(name)
        release.wait()
        written.append((name, chunk, sorted(state)))
        return save(name, saved, chunk, state)

    monkeypatch.setattr(engine.writer.snapshots, "save", slow)
    with serving(engine) as client, playing(client) as one, playing(client) as two:
        one.until_frame(2), two.until_frame(2)
        lives = [engine.pool.sessions[player.opened["session"]] for player in (one, two)]
        for live in lives:
            engine.call(lambda live=live: engine.writer.save(live)).result()
        latest = two.latest()
        two.until_frame(latest + 6)  # which goes on meanwhile
        assert held == [lives[0].name] and not lives[1].saved
        release.set()
        one.until("snapshot"), two.until("snapshot")
    assert [name for name, *_ in written[:2]] == [live.name for live in lives]
    assert written[1][1] > latest // 3  # as it was when its copy was taken
    assert metric_of(engine, "tachyscope_snapshots_total", result="written") >= 2


@pytest.mark.slow
def test_a_snapshot_without_memory_for_its_copy_is_told(engine, monkeypatch):
    with serving(engine) as client, playing(client) as player:
        live = engine.pool.sessions[player.opened["session"]]

        def full(host=True):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(live.lane.stream, "snapshot", full)
        notice = player.until("notice")
        assert (notice["code"], "no memory" in notice["message"]) == ("snapshot_failed", True)
        player.until_frame(player.latest() + 6)
        monkeypatch.undo()


@pytest.mark.slow
def test_a_server_compiles_where_its_longest_session_gains(model, tmp_path, monkeypatch):
    asked, compiled = [], []
    monkeypatch.setattr(model, "compiling_pays", lambda n: asked.append(n) or n >= 75)
    monkeypatch.setattr(model, "compile", lambda: compiled.append(True))
    for frames in (30, 3_600):
        limits = Limits(session_frames=frames)
        served = engines.make_engine(model, "toy-chunks", Snapshots(str(tmp_path)), "live", limits)
        predicted = need(model.on_meta(), "live", frames=frames)
        assert served.pool.bytes_of("live") == predicted.of_video
        assert predicted.of_video == (
            sum(predicted.cache.values()) + predicted.prompt + predicted.decoder_state
        )
    assert (asked, compiled) == ([10, 1_200], [True])


def test_recorded_frames_are_an_mp4_for_who_has_the_secret(engine):
    with serving(engine) as client, playing(client) as player:
        player.send("record", id=1, on=True)
        player.until("receipt", id=1, phase="applied")
        player.until_frame(max(player.frames, default=(0, 0, 0))[2] + 6)
        player.send("record", id=2, on=False)
        assert player.until("recorded")["frames"] % 3 == 0
        url = f"/v1/sessions/{player.opened['session']}/recording"
        assert client.get(url).status_code == 404
        found = client.get(url, headers={"x-session-secret": player.opened["secret"]})
        assert found.headers["content-type"] == "video/mp4" and found.content[4:8] == b"ftyp"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("", "a message is a JSON object"),
        ("[" * 100_000, "a message is a JSON object"),
        ("[]", "got []"),
        ('{"type": "open", "seed": NaN}', "a message is a JSON object"),
        ("{}", "a message has one of the types open, resume, keys"),
        ('{"type": ["open"]}', "a message has one of the types"),
        ('{"type": "open", "speed": 3}', "takes format, id, image, log, look, pace, plan, prompt"),
        ('{"type": "open", "seed": 1.5}', "'seed' of message 'open' is a whole number, got 1.5"),
        ('{"type": "open", "seed": true}', "is a whole number, got true"),
        ('{"type": "open", "seed": -1}', "is from 0 to 9007199254740991, got -1"),
        ('{"type": "open", "format": 3}', "is jpeg or webp or png or h264, got 3"),
        ('{"type": "open", "id": ' + "9" * 4000 + "}", "from 0 to 2147483647"),
        ('{"type": "keys", "actions": "' + "w" * 300 + '"}', "at most 256 letters, got 300"),
        ('{"type": "prompt", "text": "' + "w" * 3000 + '"}', "at most 2000 letters here, got 3000"),
        ('{"type": "prompt", "text": "' + "w" * 70_000 + '"}', "at most 65536 bytes"),
        ('{"type": "replay", "log": "' + "w" * 2_000_000 + '"}', "at most 1048576 bytes"),
    ],
)
def test_a_message_that_is_none_is_refused_in_one_line(message, words):
    with pytest.raises(TachyscopeError) as fault:
        protocol.parse(message, Limits())
    assert words in str(fault.value) and "\n" not in str(fault.value)


def test_malformed_messages_are_answered_and_then_sent_away(model, tmp_path):
    engine = make_engine(model, tmp_path, faults=3)
    with serving(engine) as client, playing(client) as player:
        player.send("keys", id=4, actions="z")
        assert (
            player.until("error", id=4)["message"]
            == "an action is one of . w s a d q e, or empty, got 'z'"
        )
        player.socket.send_bytes(b"\0\1")
        assert "a client's messages are text, unless" in player.until("error")["message"]
        player.send("open")
        assert "this connection has a session" in player.until("error")["message"]
        assert left(player) == {"type": "left", "code": 1008, "reason": "3 malformed messages"}
        assert metric(client, 'tachyscope_messages_total{type="malformed"}') == 3


@pytest.mark.slow
def test_limits_on_rate_idle_time_length_and_number(model, tmp_path):
    engine = make_engine(model, tmp_path, session_frames=6)
    with serving(engine) as client, playing(client, pace="model") as player:
        error = player.until("error")
        assert error["code"] == "length"
        assert "a session has at most 6 frames here" in error["message"]
    engine = make_engine(model, tmp_path, messages_per_s=4)
    with serving(engine) as client, playing(client) as player:
        for i in range(100):
            player.send("keys", id=i, actions="w")
        assert left(player)["reason"] == "over 4 messages a second"
    engine = make_engine(model, tmp_path, idle_s=5.0, sessions=1)
    with serving(engine) as client, playing(client) as player:
        player.send("pause", id=1)
        with connect(client) as socket:
            other = Player(socket)
            other.send("open")
            assert "1 of 1 sessions are open" in other.until("error")["message"]
        assert left(player)["reason"] == "nothing was heard for 5 s"


def test_only_who_may_is_let_in(model, tmp_path):
    guard = Guard((SECRET,), ("https://friend.org",), ("localhost",))
    with serving(make_engine(model, tmp_path), guard) as client:
        bearer = {"authorization": f"Bearer {SECRET}"}
        assert client.get("/health").status_code == client.get("/").status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"authorization": "Bearer no"}).status_code == 401
        assert client.get("/metrics", headers=bearer).status_code == 200
        assert client.get("/health", headers={"host": "evil.org"}).status_code == 421
        assert client.get("/health", headers={"origin": "https://evil.org"}).status_code == 403
        assert client.get("/health", headers={"origin": "http://localhost"}).status_code == 200
        told = client.get("/metrics").json()["error"]
        assert (told["message"], told["code"]) == ("a bearer token is needed", 401)
        for refused, status, headers in (
            ([protocol.SUBPROTOCOL], 401, {}),
            ([protocol.SUBPROTOCOL, "bearer.no"], 401, {}),
            (["tachyscope.v2", f"bearer.{SECRET}"], 400, {}),
            ([protocol.SUBPROTOCOL, f"bearer.{SECRET}"], 403, {"origin": "https://evil.org"}),
        ):
            with (
                pytest.raises(WebSocketDenialResponse) as denied,
                connect(client, *refused, **headers),
            ):
                pytest.fail("was let in")
            assert denied.value.status_code == status
        offered = [protocol.SUBPROTOCOL, f"bearer.{SECRET}"]
        with connect(client, *offered, origin="https://friend.org") as socket:
            assert socket.accepted_subprotocol == protocol.SUBPROTOCOL


def test_the_page_is_whole_and_names_no_other_host(engine):
    with serving(engine) as client:
        page = client.get("/")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for path, kind in (
            ("/", "text/html"),
            ("/page.css", "text/css"),
            ("/page.js", "text/javascript"),
        ):
            found = client.get(path)
            assert found.headers["content-type"].startswith(kind)
            assert "http://" not in found.text and "https://" not in found.text
        assert client.get("/v1/models").json()["data"][0]["id"] == "toy-chunks"
        assert client.get("/v1/settings").json()["plan"] == "live"


# OpenAI's own service is closing; the shape stays, as other engines speak it
@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_openai_s_own_client_makes_lists_fetches_and_deletes_videos(engine, model):
    with serving(engine) as client:
        openai = OpenAI(api_key="none", base_url="http://localhost/v1", http_client=client)
        made = openai.videos.create(
            prompt="a red room", model="toy-chunks", seconds="0.5",
            extra_body={"actions": "w*2 a*3", "seed": "5"},
        )  # fmt: skip
        assert (made.size, made.seconds, made.prompt) == ("48x32", "0.5", "a red room")
        second = openai.videos.create(prompt="", seconds="0.25")
        done = openai.videos.poll(made.id, poll_interval_ms=20)
        assert (done.status, done.progress, done.error) == ("completed", 100, None)
        file = openai.videos.download_content(made.id).content
        frames = read_bytes(file)
        assert len(frames) == 8  # half a second, and no more of the last chunk
        truth = rolled(model, ["wwa", "aa.", "..."], seed=5, prompt="a red room")[:8]
        assert psnr(frames, truth).mean() > 20
        assert openai.videos.poll(second.id, poll_interval_ms=20).status == "completed"
        assert [one.id for one in openai.videos.list()] == [second.id, made.id]
        assert metric(client, 'tachyscope_jobs{state="completed"}') == 2
        assert openai.videos.delete(made.id).deleted
        with pytest.raises(NotFoundError, match="there is no video of this id"):
            openai.videos.retrieve(made.id)
        for fields, words in (
            ({"seconds": "0"}, "seconds are over 0 and at most 75, got '0'"),
            ({"seconds": "1e9"}, "seconds are over 0"),
            ({"size": "720x1280"}, "videos here are 48x32"),
            ({"model": "sora-2"}, "here is model toy-chunks, got 'sora-2'"),
            ({"input_reference": b"123"}, "leave input_reference out"),
            ({"extra_body": {"world": "3"}}, "has no worlds by number"),
            ({"extra_body": {"speed": "3"}}, "got 'speed'"),
            ({"prompt": "x" * 3000}, "at most 2000 letters"),
        ):
            with pytest.raises(BadRequestError, match=re.escape(words)):
                openai.videos.create(**{"prompt": "", **fields})
        told = client.post("/v1/videos", content=b"x" * 70_000).json()["error"]
        assert told == {"message": "a body has at most 65536 bytes, got 70000",
                        "type": "invalid_request_error", "code": 413}  # fmt: skip
        assert client.post("/v1/videos", json=[1]).status_code == 400
    assert not engine.pool.sessions


def test_a_video_that_no_memory_holds_is_refused_with_the_arithmetic(model, tmp_path):
    with serving(make_engine(model, tmp_path, budget=1000, jobs=1)) as client:
        answer = client.post("/v1/videos", json={"prompt": ""})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "30"
        assert "MB, and this server has 0.0 MB" in answer.json()["error"]["message"]


def test_a_bucket_lets_through_its_rate_and_twice_as_many_at_once():
    now = [0.0]
    bucket = Bucket(10, lambda: now[0])
    assert sum(bucket.take() for _ in range(50)) == 20
    now[0] = 1.0
    assert sum(bucket.take() for _ in range(50)) == 10


def test_a_server_for_others_needs_tokens(tmp_path):
    with pytest.raises(TachyscopeError, match="give --token-file"):
        Endpoint(host="0.0.0.0")
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text("short\n")
    with pytest.raises(TachyscopeError, match="1 too short"):
        read_tokens(file)
    file.write_text(f"{SECRET}\n")
    assert Endpoint(host="0.0.0.0", tokens=read_tokens(file)).guard.hosts == ()


def test_a_log_of_another_model_or_shape_is_refused(engine):
    good = {"version": 1, "model": "toy-chunks", "weights": engine.model.fingerprint,
            "opening": {"plan": "live", "prompt": "", "seed": 0, "world": None, "given": 0}, "steps": ["w"]}  # fmt: skip
    good["opening"] = asdict(Opening(**good["opening"]))
    assert engine.pool.read_log(json.loads(json.dumps(good))).to_json() == good
    for change in ({"version": 2}, {"weights": "x"}, {"steps": ["z"]}, {"steps": [3]}, {"steps": {}},
                   {"opening": {}}, {"opening": good["opening"] | {"seed": "1"}}, {"more": 1}):  # fmt: skip
        with pytest.raises(TachyscopeError):
            engine.pool.read_log(good | change)
