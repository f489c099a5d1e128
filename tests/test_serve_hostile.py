"""One unfriendly client: what it sends is bounded, and nobody else's session or answer suffers."""

import asyncio
import json
import time

import pytest
from plain_clients import answer, head, raw
from serving import Player, connected, make_engine, playing, running, serving, tiny

from tachyscope.core.errors import TachyscopeError, TachyscopeWarning
from tachyscope.serve import protocol, session_pool
from tachyscope.serve.app import make_app
from tachyscope.serve.security import Guard, read_tokens

HALF = "\ud800"  # of a surrogate pair


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def engine(model, tmp_path):
    return make_engine(model, tmp_path)


@pytest.mark.parametrize("more", [["Content-Length: 5"], []])
def test_a_body_in_chunks_is_refused_before_it_is_read(engine, more):
    lines = ["Content-Type: application/json", *more, "Transfer-Encoding: chunked"]
    with running(engine) as url, raw(url) as plain:
        plain.sendall(head("POST /v1/videos", *lines))
        sent = 0
        try:
            for _ in range(64):
                sent += plain.send(b"100000\r\n" + b"A" * 2**20 + b"\r\n")
        except OSError:
            pass
        assert sent < 2**25  # what the system's own buffers take
        told = answer(plain)  # nothing, where the system threw it away with what was unread
        assert not told or told.startswith(b"HTTP/1.1 411")


@pytest.mark.parametrize("path", ["/health", "/v1/videos", "/v1/settings", "/nowhere"])
def test_a_body_too_large_is_refused_on_every_route(engine, path):
    with serving(engine) as client:
        told = client.request("POST", path, content=b"x" * 70_000)
        assert (told.status_code, told.json()["error"]["code"]) == (413, 413)
        assert told.headers["connection"] == "close"


def test_a_body_is_bounded_as_it_is_read_whatever_its_length_says(engine):
    app, sent, read = make_app(engine, Guard()), [], []
    headers = [(b"host", b"localhost"), (b"content-length", b"5"),
               (b"content-type", b"application/json")]  # fmt: skip
    scope = {"type": "http", "method": "POST", "path": "/v1/videos", "headers": headers,
             "query_string": b"", "http_version": "1.1"}  # fmt: skip

    async def receive():
        read.append(True)
        return {"type": "http.request", "body": b"x" * 10_000, "more_body": True}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 413 and len(read) == 7


@pytest.mark.parametrize("bad", [HALF, "a\0b"])
def test_text_that_no_answer_can_carry_is_refused_at_the_door(engine, bad):
    texts = {name: bad for name in ("prompt", "plan", "actions", "seconds", "size", "model")}
    with serving(engine) as client:
        for name, text in texts.items():
            told = client.post("/v1/videos", content=json.dumps({name: text}).encode(),
                               headers={"content-type": "application/json"})  # fmt: skip
            assert told.status_code == 400, name
            assert "text" in told.json()["error"]["message"]
        told = client.post("/v1/videos", data={"prompt": "a\0b"})
        assert told.status_code == 400
        assert client.get("/v1/videos").json()["data"] == []
        with playing(client) as player:
            for message in (
                {"type": "resume", "session": bad, "secret": bad},
                {"type": "prompt", "text": bad},
                {"type": "reset", "plan": bad},
                {"type": "replay", "log": {"version": 1, "opening": {"prompt": bad}}},
                {bad: 1, "type": "keys"},
            ):
                player.socket.send_text(json.dumps(message))
                assert "text" in player.until("error")["message"]
            player.until_frame(player.latest() + 6)


@pytest.mark.parametrize("text", ['{"seed": 1e400}', b'{"prompt": "\xed\xa0\x80"}', b"\xff\xfe{"])
def test_json_that_is_none_is_no_message(text):
    with pytest.raises(TachyscopeError, match="a message is a JSON object"):
        protocol.read_json(text)


def test_an_origin_that_is_no_address_is_refused(engine):
    with serving(engine) as client:
        for origin in ("http://[::1", "null", ""):
            told = client.get("/v1/settings", headers={"origin": origin})
            assert told.status_code == 403
            assert told.headers["x-content-type-options"] == "nosniff"  # refusals have them too


def test_faults_of_forms_paths_and_methods_have_the_shape_of_errors(engine):
    boundary = "multipart/form-data; boundary=b"
    fields = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n1\r\n' % i for i in range(40)
    )
    with serving(engine) as client:
        for content, kind in (
            (fields + b"--b--\r\n", boundary),
            (b"--b\r\n", "multipart/form-data"),
            (b"--b\r\nContent-Disposition: form-data\r\n\r\n1\r\n--b--\r\n", boundary),
        ):
            told = client.post("/v1/videos", content=content, headers={"content-type": kind})
            assert told.status_code == 400 and told.json()["error"]["code"] == 400
        assert client.get("/nowhere").json()["error"]["code"] == 404
        assert client.put("/v1/videos").json()["error"]["code"] == 405
        assert client.head("/v1/videos").status_code == 200


def test_a_fault_of_the_server_tells_nothing_and_has_every_header(engine, monkeypatch):
    monkeypatch.setattr(engine.metrics, "text", lambda: 1 / 0)
    with running(engine) as url, raw(url) as plain:
        plain.sendall(head("GET /metrics", "Connection: close"))
        told = answer(plain)
    assert told.startswith(b"HTTP/1.1 500") and b"ZeroDivision" not in told
    assert b"x-content-type-options: nosniff" in told


def test_a_client_that_leaves_in_its_body_writes_no_traceback(engine, caplog):
    with running(engine) as url:
        with raw(url) as plain:
            lines = ["Content-Type: application/json", "Content-Length: 50"]
            plain.sendall(head("POST /v1/videos", *lines) + b"{")
        with raw(url) as plain:
            plain.sendall(head("GET /health", "Connection: close"))
            assert answer(plain).startswith(b"HTTP/1.1 200")
    assert not [one for one in caplog.records if one.exc_info]


def test_a_body_that_comes_too_slowly_is_given_up(model, tmp_path):
    engine = make_engine(model, tmp_path, request_s=0.3)
    with running(engine) as url, raw(url) as plain:
        lines = ["Content-Type: application/json", "Content-Length: 50"]
        plain.sendall(head("POST /v1/videos", *lines) + b"{")
        assert answer(plain).startswith(b"HTTP/1.1 408")


def test_tabs_that_left_make_room_for_new_ones_and_are_found_again(model, tmp_path):
    engine = make_engine(model, tmp_path, sessions=2)
    with serving(engine) as client:
        left = []
        for seed in range(4):
            with playing(client, seed=seed, pace="model") as player:
                player.until_frame(2)
            left.append(player.opened)
        assert len(engine.pool.sessions) == 2
        for opened in left:
            known = {name: opened[name] for name in ("session", "secret")}
            with playing(client, "resume", format="png", **known) as again:
                assert again.opened["seed"] == opened["seed"] and again.opened["chunk"] > 0
                again.until_frame(3 * again.opened["chunk"] + 2)
        with playing(client), playing(client), connected(client) as plain:
            third = Player(plain)
            third.send("open")
            assert "2 of 2 sessions are open" in third.until("error")["message"]


def test_the_oldest_sessions_on_disk_go_first_where_there_are_too_many(model, tmp_path):
    engine = make_engine(model, tmp_path, sessions=1, kept=2)
    with serving(engine) as client:
        names = []
        for seed in range(6):
            with playing(client, seed=seed, pace="model") as player:
                player.until_frame(2)
            names.append(player.opened["session"])
        with playing(client):
            engine.writer.wait()
            kept = [name for name in names if (tmp_path / name).exists()]
            assert kept == names[-len(kept) :] and 2 <= len(kept) <= 3


def test_a_burst_of_costly_messages_is_a_turn_each_and_others_play_between(model, tmp_path):
    engine = make_engine(model, tmp_path, messages_per_s=10**6)
    with serving(engine) as client, playing(client) as well, playing(client) as ill:
        begun, turns = [], engine.runner
        begin, step = turns._begin_again, turns._step

        def slow(live, log, steps):
            begun.append("reset")
            begin(live, log, steps)

        def counted(live, waited):
            if live.name == well.opened["session"]:
                begun.append("step")
            step(live, waited)

        turns._begin_again, turns._step = slow, counted
        for i in range(8):
            ill.send("reset", id=i, seed=i)
        ill.send("keys", id=99, actions="w")
        ill.until("receipt", id=99, phase="applied")
        assert begun.count("reset") >= 4
        text = "".join(one[0] for one in begun)
        assert "rr" not in text
        well.until_frame(well.latest() + 6)


def test_costly_messages_over_two_a_second_are_refused_and_cheap_ones_go_on(engine):
    with serving(engine) as client, playing(client) as player:
        for i in range(1, 11):
            player.send("reset", id=i, seed=i)
        refused = player.until("receipt", id=10)
        assert refused["phase"] == "refused"
        assert "at most two such a second" in refused["reason"]
        player.send("keys", id=20, actions="w")
        player.until("receipt", id=20, phase="applied")


def test_bytes_count_as_messages_do(engine):
    with serving(engine) as client, playing(client) as player:
        log = {"version": 1, "steps": "w" * 900_000}
        for i in range(8):
            player.send("replay", id=i, log=log)
        while (message := player.next()) and not (
            isinstance(message, dict) and message["type"] == "left"
        ):
            pass
        assert message["reason"] == "over 60 messages a second"


def test_the_needs_of_plans_are_not_kept_for_ever(engine, monkeypatch):
    monkeypatch.setattr(session_pool, "need", lambda meta, plan, frames, follows: plan)
    for i in range(100):
        engine.pool._need(f"live attention=ann:read={0.3 + i / 1000:.4f}")
    assert engine.pool._need.cache_info().currsize <= 64


def test_calls_leave_time_for_turns(engine):
    def steps():
        told = engine.metrics.registry.get_sample_value
        return told("tachyscope_steps_total", {"lane": "main"}) or 0

    with serving(engine) as client, playing(client) as player:
        before = steps()
        calls = [engine.call(lambda: time.sleep(0.05)) for _ in range(20)]
        calls[-1].result()
        assert steps() - before >= 15
        player.until_frame(player.latest() + 3)


def test_a_fault_of_the_server_closes_a_socket_with_its_code(engine, monkeypatch, caplog):
    monkeypatch.setattr(engine, "open", lambda *given: 1 / 0)
    with serving(engine) as client, connected(client) as plain:
        player = Player(plain)
        player.send("open")
        assert player.until("error")["code"] == 500
        assert player.next()["code"] == 1011
    assert "a message of a client failed" in caplog.text


def test_a_video_is_its_token_s_own(engine):
    tokens = ("a-token-of-many-letters", "b-token-of-many-letters")
    one, other = ({"authorization": f"Bearer {token}"} for token in tokens)
    with serving(engine, Guard(tokens)) as client:
        made = client.post("/v1/videos", json={"prompt": "mine", "seconds": "0.2"}, headers=one)
        path = f"/v1/videos/{made.json()['id']}"
        assert client.get("/v1/videos", headers=other).json()["data"] == []
        for ask in (client.get, client.delete):
            assert ask(path, headers=other).status_code == 404
        assert client.get(f"{path}/content", headers=other).status_code == 404
        assert client.get(path, headers=one).json()["prompt"] == "mine"
        assert len(client.get("/v1/videos", headers=one).json()["data"]) == 1
        assert client.delete(path, headers=one).json()["deleted"]


def test_tokens_that_no_browser_can_send_or_that_everybody_can_read_are_told(tmp_path):
    file = tmp_path / "tokens"
    file.touch(0o600)
    for bad in ("ab/cd+efghijklmnop", "abcdefghijklmnop=="):
        file.write_text(bad)
        with pytest.raises(TachyscopeError, match="which a browser cannot send"):
            read_tokens(file)
    file.write_text("a-token-of-many-letters")
    assert read_tokens(file) == ("a-token-of-many-letters",)
    file.chmod(0o644)
    with pytest.warns(TachyscopeWarning, match="may be read by every user"):
        read_tokens(file)


def test_prompts_of_a_log_are_as_short_as_others(engine):
    with serving(engine) as client, playing(client) as player:
        player.send("log", id=1)
        log = player.until("log", id=1)["log"]
        long = "x" * (engine.limits.prompt_letters + 1)
        opening = log["opening"] | {"prompt": long}
        for changed in ({"steps": [["w", long]]}, {"opening": opening}):
            player.send("replay", id=2, log=log | changed)
            reason = player.until("receipt", id=2, phase="refused")["reason"]
            assert reason.startswith("a prompt has at most 2000 letters here, got 2001")


def test_an_open_session_keeps_its_snapshots_however_many_others_come_and_go(model, tmp_path):
    engine = make_engine(model, tmp_path, sessions=3, kept=1)
    with serving(engine) as client, playing(client) as paused:
        paused.until("snapshot")
        paused.send("pause", id=1)
        paused.until("receipt", id=1, phase="applied")
        for _ in range(6):
            with playing(client) as other:
                other.until("snapshot")
        engine.call(engine.pool.sweep).result()
        engine.writer.wait()
        names = {path.name for path in tmp_path.iterdir()}
        assert paused.opened["session"] in names and len(names) <= 4
        paused.send("rewind", id=2, chunk=2**31 - 1)
        paused.until("began")


def test_a_clock_that_jumps_loses_no_open_session(model, tmp_path, monkeypatch):
    engine = make_engine(model, tmp_path)
    with serving(engine) as client, playing(client) as player:
        player.until("snapshot")
        player.send("pause", id=1)
        player.until("receipt", id=1, phase="applied")
        engine.writer.wait()
        now = time.time
        for jump in (10**6, -(10**6)):
            monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
            engine.call(engine.pool.sweep).result()
            engine.writer.wait()
            assert engine.writer.snapshots.has(player.opened["session"])
        player.send("pause", id=2, paused=False)
        player.until_frame(player.latest() + 3)


def test_messages_are_not_compressed(engine):
    offer = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
             "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol: tachyscope.v1",
             "Sec-WebSocket-Extensions: permessage-deflate"]  # fmt: skip
    with running(engine) as url, raw(url) as plain:
        plain.sendall(head("GET /v1/sessions", *offer))
        told = plain.recv(65_536)
        assert told.startswith(b"HTTP/1.1 101") and b"extensions" not in told.lower()
        plain.sendall(b"\xc1\x80\0\0\0\0")  # a text that says it is compressed
        assert b"\x03\xea" in answer(plain)  # 1002, a fault of the protocol
