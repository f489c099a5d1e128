"""`/v1/videos` of a cluster: made by replicas, kept in the folder that all of them reach.

A video is one streaming call to a replica. Its record and its mp4 lie in `videos` beside the
sessions' snapshots, so that every ingress can list it. If a replica dies, another starts it again:
the same request makes the same video.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from typing import Any

import fsspec
from ray.exceptions import RayError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from tachyscope.core.errors import TachyscopeError
from tachyscope.serve.limits import Limits
from tachyscope.serve.session_pool import Full
from tachyscope.serve.snapshots import listed

NAME = re.compile(r"video_[0-9a-f]{24}")
TRIES = 3
AGAIN_S = 1.0  # before the next one
TOUCH_S = 10.0  # between two signs of life in a record
LOST_S = 60.0  # without one, after which nobody makes the video any more


class VideoFiles:
    """Records and mp4s of a folder or URL."""

    def __init__(self, place: str) -> None:
        self.fs, root = fsspec.core.url_to_fs(place, use_listings_cache=False)
        self.root = f"{root}/videos"
        self.fs.makedirs(self.root, exist_ok=True)

    def write(self, record: Mapping[str, Any]) -> None:
        self._put(f"{record['id']}.json", json.dumps(dict(record)).encode())

    def write_video(self, name: str, data: bytes) -> None:
        self._put(f"{name}.mp4", data)

    def read(self, name: str) -> dict[str, Any]:
        """A record; raises KeyError where there is none."""
        if not NAME.fullmatch(name):
            raise KeyError(name)
        try:
            record: dict[str, Any] = json.loads(self.fs.cat_file(f"{self.root}/{name}.json"))
        except (OSError, ValueError):
            raise KeyError(name) from None
        if (
            record["status"] in ("queued", "in_progress")
            and time.time() - record["touched"] > LOST_S
        ):
            words = "the machine that made this video is gone: ask for it again"
            record |= {"status": "failed", "error": {"code": "failed", "message": words}}
        return record

    def read_video(self, name: str) -> bytes:
        try:
            return bytes(self.fs.cat_file(f"{self.root}/{name}.mp4"))
        except OSError:
            raise KeyError(name) from None

    def names(self) -> list[str]:
        files = (path.rsplit("/", 1)[-1] for path in listed(self.fs, self.root))
        return [one.removesuffix(".json") for one in files if one.endswith(".json")]

    def remove(self, name: str) -> None:
        for kind in ("json", "mp4"):
            path = f"{self.root}/{name}.{kind}"
            if self.fs.exists(path):
                self.fs.rm_file(path)

    def _put(self, file: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{file}.part", data)
        self.fs.mv(f"{self.root}/{file}.part", f"{self.root}/{file}")


class RayVideos:
    """A cluster's videos, for the routes of `/v1/videos`."""

    def __init__(self, place: str, handle: Any, limits: Limits) -> None:
        self._files, self._handle, self._limits = VideoFiles(place), handle, limits
        self._making: dict[str, asyncio.Task[None]] = {}

    async def create(self, given: Mapping[str, Any], owner: str) -> dict[str, Any]:
        kept = await self._records()
        if len(kept) >= self._limits.jobs:
            raise Full(
                f"{len(kept)} of {self._limits.jobs} videos are kept here: delete one, or come "
                f"back later"
            )
        calls = self._call(given, "")
        first = await anext(calls)
        if "refused" in first:
            full, words = first["refused"]
            raise Full(words) if full else TachyscopeError(words)
        record = first | {"touched": time.time(), "owner": owner}
        await run_in_threadpool(self._files.write, record)
        name = str(record["id"])
        self._making[name] = asyncio.create_task(self._follow(record, given, calls))
        self._making[name].add_done_callback(lambda _: self._making.pop(name, None))
        return _public(record)

    async def listed(self, owner: str) -> list[dict[str, Any]]:
        """Newest first."""
        return [_public(one) for one in await self._records() if one.get("owner", "") == owner]

    async def _records(self) -> list[dict[str, Any]]:
        """All owners' records, newest first; those that are too old are removed."""
        records = []
        for name in await run_in_threadpool(self._files.names):
            try:
                record = await run_in_threadpool(self._files.read, name)
            except KeyError:
                continue
            if time.time() - record["touched"] > self._limits.kept_s:
                await run_in_threadpool(self._files.remove, name)
            else:
                records.append(record)
        return sorted(records, key=lambda one: -one["created_at"])

    async def find(self, name: str, owner: str) -> dict[str, Any]:
        record = await run_in_threadpool(self._files.read, name)
        if record.get("owner", "") != owner:
            raise KeyError(name)
        return _public(record)

    async def delete(self, name: str, owner: str) -> None:
        """Delete a video; the replica that makes it finds the record gone and stops."""
        await self.find(name, owner)  # raises where there is none
        await run_in_threadpool(self._files.remove, name)
        if task := self._making.get(name):
            task.cancel()

    async def content(self, name: str, owner: str) -> Response:
        await self.find(name, owner)
        data = await run_in_threadpool(self._files.read_video, name)
        return Response(data, media_type="video/mp4")

    def _call(self, given: Mapping[str, Any], name: str) -> Any:
        return self._handle.options(stream=True).make_video.remote(dict(given), name)

    async def _follow(self, record: dict[str, Any], given: Mapping[str, Any], calls: Any) -> None:
        """Record a video's progress, and restart it on another replica if its own dies."""
        for left in reversed(range(TRIES)):
            try:
                async for update in calls:
                    if "refused" in update:
                        raise TachyscopeError(update["refused"][1])
                    if not await self._note(record, update):
                        return
                return
            except (RayError, TachyscopeError) as fault:
                if not left:
                    own = isinstance(fault, TachyscopeError)
                    words = str(fault) if own else "the machines that made it died"
                    failed = {"status": "failed", "error": {"code": "failed", "message": words}}
                    await self._note(record, failed)
                    return
            finally:
                calls.cancel()
            await asyncio.sleep(AGAIN_S)
            calls = self._call(given, str(record["id"]))

    async def _note(self, record: dict[str, Any], update: Mapping[str, Any]) -> bool:
        """Update a record; False if it was deleted."""
        now, before = time.time(), dict(record)
        record |= update
        if record == before and now - record["touched"] < TOUCH_S:
            return True
        try:
            await run_in_threadpool(self._files.read, str(record["id"]))
        except KeyError:
            await run_in_threadpool(self._files.remove, str(record["id"]))
            return False
        record["touched"] = now
        await run_in_threadpool(self._files.write, record)
        return True


def _public(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as clients see it."""
    return {name: value for name, value in record.items() if name not in ("touched", "owner")}
