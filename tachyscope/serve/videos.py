"""Routes of `/v1/videos`, as OpenAI's client calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from prometheus_client import Counter
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.serve import protocol
from tachyscope.serve.http_errors import error
from tachyscope.serve.jobs import Job, Jobs
from tachyscope.serve.session_pool import Full

RETRY_S = 30
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")


class Videos(Protocol):
    """The videos of owners, each as OpenAI's JSON.

    Raises KeyError if the owner has no such video.
    """

    async def create(self, given: Mapping[str, Any], owner: str) -> dict[str, Any]: ...

    async def listed(self, owner: str) -> list[dict[str, Any]]: ...

    async def find(self, name: str, owner: str) -> dict[str, Any]: ...

    async def delete(self, name: str, owner: str) -> None: ...

    async def content(self, name: str, owner: str) -> Response: ...


class LocalVideos:
    """Videos of this process's engine."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs, self._model = jobs, jobs.engine.name
        self._alone = asyncio.Lock()  # what a plan takes is costly to find out

    async def create(self, given: Mapping[str, Any], owner: str) -> dict[str, Any]:
        async with self._alone:
            job = await run_in_threadpool(self._jobs.create, given, "", owner)
        return job.to_json(self._model)

    async def listed(self, owner: str) -> list[dict[str, Any]]:
        return [job.to_json(self._model) for job in self._jobs.listed() if job.owner == owner]

    async def find(self, name: str, owner: str) -> dict[str, Any]:
        return self._own(name, owner).to_json(self._model)

    async def delete(self, name: str, owner: str) -> None:
        self._own(name, owner)
        await run_in_threadpool(self._jobs.delete, name)

    async def content(self, name: str, owner: str) -> Response:
        return FileResponse(self._jobs.path(self._own(name, owner)), media_type="video/mp4")

    def _own(self, name: str, owner: str) -> Job:
        job = self._jobs.find(name)
        if job.owner != owner:
            raise KeyError(name)
        return job


def video_routes(videos: Videos, refused: Counter) -> list[Route]:
    """The routes of a server's videos."""

    async def every(request: Request) -> Response:
        if request.method != "POST":
            data = await videos.listed(request.scope["owner"])
            return JSONResponse({"object": "list", "data": data, "has_more": False})
        if "content-length" not in request.headers:
            return error(411, "a body is sent with its length (Content-Length)")
        try:
            return JSONResponse(await videos.create(await _fields(request), request.scope["owner"]))
        except Full as fault:
            refused.labels("full").inc()
            return error(503, str(fault), **{"retry-after": str(RETRY_S)})
        except TachyscopeError as fault:
            return error(400, str(fault))

    async def one(request: Request) -> Response:
        name, owner = request.path_params["name"], request.scope["owner"]
        try:
            if request.method == "DELETE":
                await videos.delete(name, owner)
                return JSONResponse({"id": name, "object": "video.deleted", "deleted": True})
            return JSONResponse(await videos.find(name, owner))
        except KeyError:
            return error(404, "there is no video of this id")

    async def content(request: Request) -> Response:
        name, owner = request.path_params["name"], request.scope["owner"]
        try:
            status = (await videos.find(name, owner))["status"]
            if status != "completed":
                return error(409, f"this video is {status}: ask again when it is completed")
            return await videos.content(name, owner)
        except KeyError:
            return error(404, "there is no video of this id")

    return [
        Route("/v1/videos", every, methods=["GET", "POST"]),
        Route("/v1/videos/{name}", one, methods=["GET", "DELETE"]),
        Route("/v1/videos/{name}/content", content),
    ]


async def _fields(request: Request) -> dict[str, Any]:
    """A request's fields, from JSON or a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return protocol.read_json(await request.body())
    if kind not in FORMS and request.headers["content-length"] != "0":
        raise TachyscopeError(f"a video's fields are JSON or a form, got {shown(kind)}")
    async with request.form(max_files=1, max_fields=32) as form:  # raises HTTPException, 400
        given = dict(form)
    if any(isinstance(value, UploadFile) for value in given.values()):
        raise TachyscopeError("first frames are not taken over HTTP: leave input_reference out")
    return given
