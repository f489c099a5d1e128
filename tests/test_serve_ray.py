"""Two replicas by Ray Serve on one machine: sessions bound to them, and a replica that is killed."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import uvicorn
from serving import Player
from test_serve_faults import OPEN, play

import tachyscope as ts

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@contextmanager
def cluster(folder):
    """An ingress in this process, and two replicas; its address and the handle to them."""
    from tachyscope.serve import ray as ours
    from tachyscope.serve.limits import Limits
    from tachyscope.serve.security import Guard
    from tachyscope.serve.server import Place, listen

    settings = ours.Settings(
        "toy-chunks", str(folder), "dense", snapshot_chunks=2, limits=Limits(send_s=60.0)
    )
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - else a busy machine starves them
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
    try:
        handle = ours.deploy(settings, 2, 2)
        listener = listen(Place(port=0))
        app = ours.Ingress(settings, handle).app(Guard())
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.05)
            yield f"http://localhost:{listener.getsockname()[1]}", handle
        finally:
            while OPEN:
                OPEN.pop().__exit__(None, None, None)
            server.should_exit = True
            thread.join()
            listener.close()
    finally:
        ray.serve.shutdown()
        ray.shutdown()


def replicas(handle):
    """What each replica holds, by its process."""
    found = {}
    for _ in range(40):
        one = handle.whereabouts.remote().result()
        found[one["pid"]] = one["sessions"]
        if len(found) == 2:
            break
    return found


def test_a_killed_replica_s_sessions_go_on_elsewhere(tmp_path):
    with cluster(tmp_path) as (url, handle):
        player = play(url, seed=4)
        name = player.opened["session"]
        player.send("keys", id=1, actions="w")
        player.until("receipt", id=1, phase="applied")
        player.until("snapshot", chunk=4)
        held = replicas(handle)
        (pid,) = [pid for pid, sessions in held.items() if name in sessions]
        os.kill(pid, signal.SIGKILL)
        while not (isinstance(message := player.next(), dict) and message["type"] == "left"):
            pass
        assert message["code"] == 1012
        seen = max(chunk for _, chunk in player.chunks)
        again = play(url, "resume", session=name, secret=player.opened["secret"])
        assert isinstance(again, Player) and seen - 3 <= again.opened["chunk"]
        first = 3 * again.opened["chunk"]
        again.until_frame(first + 5)
        again.send("log", id=2)
        steps = again.until("log")["log"]["steps"]
    with ts.open(ts.load("toy-chunks"), "dense", seed=4) as stream:
        wanted = np.concatenate([stream.step(step or None).frames for step in steps])
    assert again.matches(wanted[: first + 6], start=first)


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [([], 1), ([0.1, 0.1], 1), ([0.8], 1), ([0.81], 2), ([0.8, 0.8], 2), ([0.9, 0.9], 3), ([1.0] * 9, 8)],
)  # fmt: skip
def test_replicas_follow_reserved_bytes(shares, wanted):
    from tachyscope.serve.ray import replicas_for

    assert replicas_for(shares, 1, 8) == wanted
