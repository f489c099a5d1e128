"""Two replicas by Ray Serve on one machine: sessions bound to them, moved, killed, and videos."""

import asyncio
import dataclasses
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
import uvicorn
from openai import BadRequestError, NotFoundError, OpenAI
from serving import Player
from test_serve import read_bytes
from test_serve_faults import OPEN, metric, play, process

import tachyscope as ts
from tachyscope.measure.quality import psnr

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Cluster:
    """An ingress in this process, and two replicas."""

    def __init__(self, folder):
        from tachyscope.serve.limits import Limits
        from tachyscope.serve.ray import sessions as ours
        from tachyscope.serve.ray.ingress import Ingress
        from tachyscope.serve.security import Guard
        from tachyscope.serve.server import Endpoint, listen

        self.settings = ours.Settings(
            "toy-chunks", str(folder), "dense", snapshot_chunks=2, limits=Limits(send_s=60.0)
        )
        self.deploy = ours.deploy
        self.handle = self.deploy(self.settings, 2, 2)
        self.listener = listen(Endpoint(port=0))
        app = Ingress(self.settings, self.handle).app(Guard())
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))
        self.thread.start()
        while not self.server.started:
            time.sleep(0.05)
        self.url = f"http://localhost:{self.listener.getsockname()[1]}"

    def replicas(self):
        """What each replica holds, by its process."""
        found = self.handle.broadcast("whereabouts").results(return_exceptions=True)
        return {one["pid"]: one["sessions"] for one in found if isinstance(one, dict)}

    def stop(self):
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - else a busy machine starves them
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
    try:
        found = Cluster(tmp_path_factory.mktemp("state"))
        yield found
        found.stop()
    finally:
        ray.serve.shutdown()
        ray.shutdown()


@pytest.fixture(autouse=True)
def closing():
    yield
    while OPEN:
        OPEN.pop().__exit__(None, None, None)


def left(player):
    """How the server ended the connection."""
    while not (isinstance(message := player.next(), dict) and message["type"] == "left"):
        pass
    return message


def resumed(cluster, player):
    known = {name: player.opened[name] for name in ("session", "secret")}
    again = play(cluster.url, "resume", **known)
    assert isinstance(again, Player)
    return again


def goes_on(again, seed):
    """Whether a resumed session's frames are those of a stream that never stopped."""
    first = 3 * again.opened["chunk"]
    again.until_frame(first + 5)
    again.send("log", id=2)
    steps = again.until("log")["log"]["steps"]
    with ts.open(ts.load("toy-chunks"), "dense", seed=seed) as stream:
        wanted = np.concatenate([stream.step(step or None).frames for step in steps])
    return again.matches(wanted[: first + 6], start=first)


def until(check, what, seconds=90):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.5)


def test_one_command_serves_by_two_replicas(tmp_path):
    with process(tmp_path, "--replicas", "2") as (url, server):
        player = play(url)
        player.until_frame(5)
        seen = max(chunk for _, chunk in player.chunks)
        server.send_signal(signal.SIGTERM)
        assert left(player)["code"] == 1012
        assert server.wait(60) == 128 + signal.SIGTERM
    (saved,) = tmp_path.glob("*/session.json")
    assert len(json.loads(saved.read_text())["log"]["steps"]) > seen  # nothing is lost


def test_videos_through_the_ingress(cluster):
    openai = OpenAI(api_key="none", base_url=f"{cluster.url}/v1")
    made = openai.videos.create(
        prompt="a red room", seconds="0.5", extra_body={"actions": "w*2 a*3", "seed": "5"}
    )
    done = openai.videos.poll(made.id, poll_interval_ms=100)
    assert (done.id, done.status, done.progress) == (made.id, "completed", 100)
    frames = read_bytes(openai.videos.download_content(made.id).content)
    with ts.open(ts.load("toy-chunks"), "dense", seed=5, prompt="a red room") as stream:
        truth = np.concatenate([stream.step(list(x)).frames for x in ("wwa", "aa.", "...")])[:8]
    assert len(frames) == 8 and psnr(frames, truth).mean() > 20
    assert [one.id for one in openai.videos.list()] == [made.id]
    assert openai.videos.delete(made.id).deleted
    with pytest.raises(NotFoundError, match="there is no video of this id"):
        openai.videos.retrieve(made.id)
    with pytest.raises(BadRequestError, match="seconds are over 0"):
        openai.videos.create(prompt="", seconds="0")
    assert metric(cluster.url, "tachyscope_frames_made_total", every=True) >= 8
    # given up while it is made
    long = openai.videos.create(prompt="", seconds="60")
    assert openai.videos.delete(long.id).deleted
    until(lambda: not any(cluster.replicas().values()), "the end of a video that nobody wants")


def test_a_killed_replica_s_sessions_go_on_elsewhere(cluster):
    player = play(cluster.url, seed=4)
    name = player.opened["session"]
    player.send("keys", id=1, actions="w")
    player.until("receipt", id=1, phase="applied")
    while player.until("snapshot")["chunk"] < 4:
        pass
    (pid,) = [pid for pid, sessions in cluster.replicas().items() if name in sessions]
    os.kill(pid, signal.SIGKILL)
    assert left(player)["code"] == 1012
    again = resumed(cluster, player)
    assert max(chunk for _, chunk in player.chunks) - 3 <= again.opened["chunk"]
    assert goes_on(again, seed=4)


def test_sessions_go_where_the_most_bytes_are_free(cluster):
    until(lambda: len(cluster.replicas()) == 2, "the second replica")
    large = play(cluster.url, plan="dense")
    small = [play(cluster.url, plan="fast") for _ in range(5)]
    sizes = [player.opened["reserved_bytes"] for player in (large, small[0])]
    assert sizes[0] > 5 * sizes[1]
    names = [player.opened["session"] for player in (large, *small)]
    held = [sorted(map(names.index, sessions)) for sessions in cluster.replicas().values()]
    assert sorted(held) == [[0], [1, 2, 3, 4, 5]]  # by their number it would be three and three


def test_sessions_on_their_way_count_as_reserved():
    from tachyscope.serve.ray.placement import most_free

    a = {"replica": "a", "free_bytes": 100, "session_bytes": 30, "free_sessions": 2}
    b = {"replica": "b", "free_bytes": 60, "session_bytes": 30, "free_sessions": 9}
    assert most_free([a, b], {}) == "a"
    assert most_free([a, b], {"a": 1}) == "a"
    assert most_free([a, b], {"a": 2}) == "b"  # no session more is allowed there
    assert most_free([b, a | {"free_sessions": 9}], {"a": 2}) == "b"
    assert most_free([], {}) == ""


def test_an_upgrade_moves_sessions_without_loss_and_bytes_add_replicas(cluster):
    until(lambda: len(cluster.replicas()) == 2, "the second replica")
    player = play(cluster.url, seed=6)
    player.send("keys", id=1, actions="w")
    player.until_frame(8)
    before = set(cluster.replicas())
    size = player.opened["reserved_bytes"]
    # another version: one replica, or two where more than 80 % of the first one's bytes are taken
    settings = dataclasses.replace(cluster.settings, budget=int(1.1 * size))
    upgrade = threading.Thread(target=cluster.deploy, args=(settings, 1, 2))
    upgrade.start()
    assert left(player)["code"] == 1012
    again = resumed(cluster, player)
    # written when it was moved, not when its last snapshot was due
    assert again.opened["chunk"] > max(chunk for _, chunk in player.chunks)
    assert goes_on(again, seed=6)
    upgrade.join()
    until(lambda: len(set(cluster.replicas()) - before) == 2, "a replica for more bytes")


def test_sessions_of_a_killed_ingress_go_on_with_the_next_one(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    with process(tmp_path, "--replicas", "2") as (url, server):
        player = play(url, seed=8)
        player.send("keys", id=1, actions="w")
        player.until_frame(8)
        os.kill(server.pid, signal.SIGKILL)
        assert left(player)["code"] == 1006
        seen = max(chunk for _, chunk in player.chunks)
    with process(tmp_path, "--replicas", "2") as (url, server):
        known = {name: player.opened[name] for name in ("session", "secret")}
        again = play(url, "resume", **known)
        assert again.opened["chunk"] > seen  # it was written when its client was gone
        assert goes_on(again, seed=8)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [([], 1), ([0.1, 0.1], 1), ([0.8], 1), ([0.81], 2), ([0.8, 0.8], 2), ([0.9, 0.9], 3), ([1.0] * 9, 8)],
)  # fmt: skip
def test_replicas_follow_reserved_bytes(shares, wanted):
    from tachyscope.serve.ray.sessions import replicas_for

    assert replicas_for(shares, 1, 8) == wanted


def test_metrics_of_all_replicas_are_one_text():
    from tachyscope.serve.metrics import Metrics
    from tachyscope.serve.ray.ingress import merge_metrics

    texts = {}
    for i, name in enumerate("ab"):
        metrics = Metrics()
        metrics.steps.labels("main").inc(i + 1)
        metrics.step_s.observe(0.3)
        texts[name] = metrics.text()
    rows = merge_metrics(texts).decode().splitlines()
    for row in ('steps_total{lane="main",replica="a"} 1.0', 'steps_total{lane="main",replica="b"} 2.0',
                'step_seconds_bucket{le="0.5",replica="b"} 1.0'):  # fmt: skip
        assert f"tachyscope_{row}" in rows
    assert sum(row.startswith("# TYPE tachyscope_steps_total") for row in rows) == 1


def test_a_video_that_nobody_makes_any_more_has_failed(tmp_path):
    from tachyscope.serve.ray.videos import LOST_S, VideoFiles

    files, name = VideoFiles(str(tmp_path)), f"video_{'0' * 24}"
    record = {"id": name, "status": "in_progress", "touched": time.time()}
    files.write(record)
    assert files.read(name)["status"] == "in_progress" and files.names() == [name]
    files.write(record | {"touched": time.time() - LOST_S - 1})
    assert "ask for it again" in files.read(name)["error"]["message"]
    files.remove(name)
    for other in (name, "../../etc/passwd", "video_x"):
        with pytest.raises(KeyError):
            files.read(other)


def test_a_mailbox_keeps_nothing_of_connections_that_ended():
    from tachyscope.serve.ray.mailbox import GONE, Mailbox

    async def talk():
        box = Mailbox()
        await box.open("a", {"type": "1"})
        await box.open("b", {"type": "1"})
        await box.put("a", GONE)
        read = [await box.get("a") for _ in range(3)]
        await box.put("a", GONE)  # the ingress tells it once more
        await box.drop("b")
        return read, box._boxes

    assert asyncio.run(talk()) == ([{"type": "1"}, GONE, GONE], {})
