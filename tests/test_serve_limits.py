"""What a client may ask of a server in a second, and what it is sent where it is too slow."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from faults import refused
from serving import make_engine, tiny

from tachyscope.models.wan import key_camera
from tachyscope.serve import protocol
from tachyscope.serve.connection import FRAMES, Connection
from tachyscope.serve.key_map import KeyMap
from tachyscope.serve.limits import Bucket, Limits
from tachyscope.serve.live_session import ChunkFrames
from tachyscope.serve.metrics import Metrics


def test_a_bucket_is_never_fuller_than_two_seconds():
    now = [0.0]
    bucket = Bucket(10, lambda: now[0])
    for rest in (300.0, 3_000.0):
        now[0] += rest
        assert sum(bucket.take() for _ in range(500)) == 20


def test_of_the_frames_that_wait_the_newest_stay():
    async def waiting():
        engine = SimpleNamespace(limits=Limits(), metrics=Metrics())
        connection = Connection(SimpleNamespace(), engine, None)
        header = protocol.Header(protocol.VERSION, 0, protocol.MAIN, 0, 0, 0, 7)
        frames = np.zeros((FRAMES + 3, 8, 8, 3), np.uint8)
        await connection._release(ChunkFrames(header, frames, 0.0))
        return [protocol.Header.read(data)[0].frame for data, _ in connection._frames]

    count = FRAMES + 3
    assert asyncio.run(waiting()) == [7 + i for i in range(count - FRAMES, count)]


def test_reserved_bytes_are_counted_while_another_thread_opens_a_session(tmp_path):
    pool = make_engine(tiny(), tmp_path).pool

    class Opened:
        bytes = 3

        @property
        def lane(self):  # read by the thread that counts, and meanwhile one is opened
            pool.sessions[str(len(pool.sessions))] = SimpleNamespace(lane=None)
            return self

    pool.sessions |= {"first": Opened(), "second": Opened()}
    assert pool.reserved == 6 and len(pool.sessions) == 4


@pytest.mark.parametrize("keys", ["wa", "ww", "x", "wjl"])
def test_keys_are_an_action_or_two_that_are_one(keys):
    known = KeyMap(".wasdjlq", {"wj": "q"})
    refused(lambda: known.action(keys), "an action is one of . w a s d j l q, wj, or empty")
    assert [known.action(one) for one in ("w", "", "wj", "jw")] == ["w", "", "q", "q"]


@pytest.mark.parametrize(
    ("actions", "held", "moved", "action"),
    [
        (key_camera.ACTIONS, "w", (-30, 9), "q"), (key_camera.ACTIONS, "w", (30, 9), "e"),
        (key_camera.ACTIONS, "", (3, -40), "i"), (key_camera.ACTIONS, "a", (0, 9), "k"),
        (key_camera.ACTIONS, "w", (4, -4), "w"), (".wsadqe", "w", (-9, 0), "q"),
        (".wsadqe", "w", (0, 99), "w"), ("", "", (99, 0), ""),
    ],
)  # fmt: skip
def test_a_mouse_looks_there_while_keys_walk_on(actions, held, moved, action):
    chords = {both: one for one, both in key_camera.BOTH.items() if both and "j" in actions}
    assert KeyMap(actions, chords).turned(held, *moved) == action
