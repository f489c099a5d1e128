"""Sessions on many machines, by Ray Serve.

The deployment `Sessions` has the model, one replica a GPU. The ingress has the page and the
WebSockets, on any machine of the cluster, and no model. A live session is one streaming call to the
replica with the most bytes free, and so bound to it; what its client sends goes through a mailbox.
Snapshots lie on an fsspec path that all replicas reach: if a replica dies, its clients get close
code 1012 and resume on another replica.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ray import serve

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.registry import load
from tachyscope.serve.app import ENCODERS
from tachyscope.serve.connection import Connection
from tachyscope.serve.engine import SNAPSHOT_CHUNKS, make_engine
from tachyscope.serve.jobs import Jobs
from tachyscope.serve.limits import Limits
from tachyscope.serve.ray import placement
from tachyscope.serve.ray.videos import VideoFiles
from tachyscope.serve.session_pool import Full
from tachyscope.serve.snapshots import Snapshots

PROGRESS_S = 0.5  # between two looks at a video that is made
DRAIN_S = 30  # for sessions of a replica that is stopped to be written
# a session that finds no room tells so at once; one that left may come back
PATIENCE = {
    "metrics_interval_s": 2.0,
    "look_back_period_s": 10.0,
    "upscale_delay_s": 4.0,
    "downscale_delay_s": 300.0,
}
FULL = 0.8  # share of the replicas' memory above which there should be more of them
MOVING_S = 3.0  # for a session's last replica to write it


@dataclass(frozen=True)
class Settings:
    """What all replicas share."""

    model: str
    state: str  # a path or fsspec URL that all of them reach
    plan: str = "live"
    weights: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    budget: int | None = None
    snapshot_chunks: int = SNAPSHOT_CHUNKS
    limits: Limits = Limits()


class RemoteSocket:
    """A replica's end of a WebSocket: reads a mailbox, and queues what is to be sent."""

    def __init__(self, mailbox: Any, key: str) -> None:
        self._mailbox, self._key = mailbox, key
        # one at a time: a slow client is felt here, and its frames are dropped here
        self.out: asyncio.Queue[str | bytes | tuple[int, str | None]] = asyncio.Queue(1)

    async def receive(self) -> Any:
        return await self._mailbox.get.remote(self._key)

    async def send_text(self, data: str) -> None:
        await self.out.put(data)

    async def send_bytes(self, data: bytes) -> None:
        await self.out.put(data)

    async def close(self, code: int, reason: str | None) -> None:
        await self.out.put((code, reason))


class Sessions:
    """A replica: the model, and the sessions that are bound to it."""

    def __init__(self, settings: Settings) -> None:
        model = load(settings.model, settings.weights, device=settings.device, dtype=settings.dtype)
        self.engine = make_engine(
            model, settings.model, Snapshots(settings.state), settings.plan, settings.limits,
            settings.budget, settings.snapshot_chunks,
        )  # fmt: skip
        self.jobs, self._files = Jobs(self.engine), VideoFiles(settings.state)
        self._encoders = ThreadPoolExecutor(ENCODERS, "tachyscope-encoder")
        self.name: str = serve.get_replica_context().replica_id.unique_id
        self.engine.start()

    async def play(
        self, mailbox: Any, key: str, resumed: str, *, replica: str
    ) -> AsyncIterator[Any]:
        """This replica's name, then all that one client's session sends, until it ends.

        `resumed` is a session's name; `replica` was read by `NamedReplica` on the way. When the
        last item has come, a session that goes on elsewhere has been written.
        """
        yield {"replica": self.name}
        await self._wait_for(resumed)
        socket = RemoteSocket(mailbox, key)
        running = asyncio.create_task(Connection(socket, self.engine, self._encoders).run())
        coming = asyncio.create_task(socket.out.get())
        try:
            while True:
                await asyncio.wait({coming, running}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    return
                yield coming.result()
                coming = asyncio.create_task(socket.out.get())
        finally:
            coming.cancel()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            with suppress(Full):  # an engine that stops writes everything itself
                await asyncio.wrap_future(self.engine.call(self.engine.release_detached))

    async def _wait_for(self, session: str) -> None:
        """A session that was elsewhere until now may still be being written."""
        snapshots = self.engine.writer.snapshots
        for _ in range(int(10 * MOVING_S)):
            if not session or session in self.engine.pool.sessions or snapshots.has(session):
                return
            await asyncio.sleep(0.1)

    async def make_video(self, given: dict[str, Any], name: str) -> AsyncIterator[dict[str, Any]]:
        """How a video goes on, as OpenAI's JSON, until it lies in the folder of videos."""
        try:
            job = await asyncio.to_thread(self.jobs.create, given, name)
        except TachyscopeError as fault:
            yield {"refused": (isinstance(fault, Full), str(fault))}
            return
        try:
            while job.status in ("queued", "in_progress"):
                yield job.to_json(self.engine.name)
                await asyncio.sleep(PROGRESS_S)
            if job.status == "completed":
                data = await asyncio.to_thread(self.jobs.path(job).read_bytes)
                await asyncio.to_thread(self._files.write_video, job.name, data)
            yield job.to_json(self.engine.name)
        finally:
            with suppress(KeyError):
                await asyncio.to_thread(self.jobs.delete, job.name)

    def whereabouts(self) -> dict[str, Any]:
        """The replica's name, its process, its sessions, and what is left for more of them."""
        pool = self.engine.pool
        lives = list(pool.sessions.values())
        return {
            "replica": self.name,
            "pid": os.getpid(),
            "sessions": [one.name for one in lives],
            "free_sessions": pool.limits.sessions - sum(one.emit is not None for one in lives),
            "free_bytes": pool.budget - pool.reserved,
            "session_bytes": pool.bytes_of(self.engine.plan),
        }

    def recording(self, session: str, secret: str) -> bytes | None:
        """A session's finished mp4, where it is here."""
        path = self.engine.finished(session, secret)
        return None if path is None else path.read_bytes()

    def metrics(self) -> tuple[str, bytes]:
        """The replica's name, and its text for Prometheus."""
        self.engine.count()
        self.jobs.count()
        return self.name, self.engine.metrics.text()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scale_by_bytes` decides by."""
        pool = self.engine.pool
        return {"reserved_share": pool.reserved / max(1, pool.budget)}

    def __del__(self) -> None:
        """The replica is drained: what is still open is saved."""
        engine = getattr(self, "engine", None)
        if engine is not None:
            self.jobs.stop()
            engine.stop()


def replicas_for(shares: list[float], fewest: int, most: int) -> int:
    """How many replicas hold what is reserved, at `FULL` of the memory of each."""
    return max(fewest, min(most, math.ceil(sum(shares) / FULL - 1e-9)))


def scale_by_bytes(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy: by reserved bytes, not by requests."""
    reported = context.raw_metrics.get("reserved_share", {})
    shares = [values[-1].value for values in reported.values() if values]
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return replicas_for(shares, least, most), {}


def deploy(settings: Settings, fewest: int, most: int, gpus: float = 0) -> Any:
    """The sessions' deployment, started on the cluster; the handle to its replicas."""
    limits = settings.limits  # replicas share a folder: none may sweep what another has open
    settings = replace(settings, limits=replace(limits, kept=limits.kept + most * limits.sessions))
    more: dict[str, Any] = {"num_replicas": fewest}
    if most > fewest:
        more = {
            "autoscaling_config": {
                "min_replicas": fewest,
                "max_replicas": most,
                "policy": {"policy_function": scale_by_bytes},
                **PATIENCE,
            }
        }
    sessions = serve.deployment(
        name="Sessions",
        max_ongoing_requests=2 * settings.limits.sessions,  # and calls that are no sessions
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_gpus": gpus, "num_cpus": 1},
        request_router_config={"request_router_class": f"{placement.__name__}.NamedReplica"},
        **more,
    )(Sessions)
    serve.start(proxy_location="Disabled")  # the ingress is ours
    return serve.run(sessions.bind(settings), name="tachyscope", route_prefix=None)
