"""Routes of `/v1/videos`, as OpenAI's client calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from prometheus_client import Counter
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from tachyscope.errors import TachyscopeError
from tachyscope.serve import protocol
from tachyscope.serve.jobs import Jobs
from tachyscope.serve.limits import Limits
from tachyscope.serve.room import Full

RETRY_S = 30


def error(status: int, message: str, **headers: str) -> JSONResponse:
    """A refusal in OpenAI's shape."""
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    content = {"error": {"message": message, "type": "invalid_request_error", "code": status}}
    return JSONResponse(content, status, headers)


class Videos(Protocol):
    """What the routes ask for; a video is told as OpenAI's JSON. KeyError: there is none."""

    async def create(self, given: Mapping[str, Any]) -> dict[str, Any]: ...

    async def listed(self) -> list[dict[str, Any]]: ...

    async def find(self, name: str) -> dict[str, Any]: ...

    async def delete(self, name: str) -> None: ...

    async def content(self, name: str) -> Response: ...


class LocalVideos:
    """Videos of this process's engine."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs, self._model = jobs, jobs.engine.name

    async def create(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return (await run_in_threadpool(self._jobs.create, given)).to_json(self._model)

    async def listed(self) -> list[dict[str, Any]]:
        return [job.to_json(self._model) for job in self._jobs.listed()]

    async def find(self, name: str) -> dict[str, Any]:
        return self._jobs.find(name).to_json(self._model)

    async def delete(self, name: str) -> None:
        await run_in_threadpool(self._jobs.delete, name)

    async def content(self, name: str) -> Response:
        return FileResponse(self._jobs.path(self._jobs.find(name)), media_type="video/mp4")


def video_routes(videos: Videos, limits: Limits, refused: Counter) -> list[Route]:
    """The routes of a server's videos."""

    async def every(request: Request) -> Response:
        if request.method == "GET":
            data = await videos.listed()
            return JSONResponse({"object": "list", "data": data, "has_more": False})
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            return error(411, "a request with a body tells its length")
        if int(length) > limits.message_bytes:
            return error(413, f"a body has at most {limits.message_bytes} bytes, got {length}")
        try:
            return JSONResponse(await videos.create(await _fields(request)))
        except Full as fault:
            refused.labels("full").inc()
            return error(503, str(fault), **{"retry-after": str(RETRY_S)})
        except TachyscopeError as fault:
            return error(400, str(fault))

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            if request.method == "DELETE":
                await videos.delete(name)
                return JSONResponse({"id": name, "object": "video.deleted", "deleted": True})
            return JSONResponse(await videos.find(name))
        except KeyError:
            return error(404, "there is no video of this id")

    async def content(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            status = (await videos.find(name))["status"]
            if status != "completed":
                return error(409, f"this video is {status}: ask again when it is completed")
            return await videos.content(name)
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
    try:
        async with request.form(max_files=1, max_fields=32) as form:
            given = dict(form)
    except MultiPartException as fault:
        raise TachyscopeError(f"this form cannot be read ({fault.message})") from None
    if any(isinstance(value, UploadFile) for value in given.values()):
        raise TachyscopeError("first frames are not taken over HTTP: leave input_reference out")
    return given
