"""Routes of `/v1/videos`, as OpenAI's client calls them."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from tachyscope.errors import TachyscopeError
from tachyscope.serve import protocol
from tachyscope.serve.jobs import Jobs
from tachyscope.serve.room import Full

RETRY_S = 30


def error(status: int, message: str, **headers: str) -> JSONResponse:
    """A refusal in OpenAI's shape."""
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    content = {"error": {"message": message, "type": "invalid_request_error", "code": status}}
    return JSONResponse(content, status, headers)


def video_routes(jobs: Jobs) -> list[Route]:
    """The routes of one server's videos."""
    engine = jobs.engine

    async def videos(request: Request) -> Response:
        if request.method == "GET":
            data = [job.to_json(engine.name) for job in jobs.listed()]
            return JSONResponse({"object": "list", "data": data, "has_more": False})
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            return error(411, "a request with a body tells its length")
        if int(length) > engine.limits.message_bytes:
            return error(
                413, f"a body has at most {engine.limits.message_bytes} bytes, got {length}"
            )
        try:
            job = await run_in_threadpool(jobs.create, await _fields(request))
        except Full as fault:
            engine.metrics.refused.labels("full").inc()
            return error(503, str(fault), **{"retry-after": str(RETRY_S)})
        except TachyscopeError as fault:
            return error(400, str(fault))
        return JSONResponse(job.to_json(engine.name))

    async def video(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            if request.method == "DELETE":
                await run_in_threadpool(jobs.delete, name)
                return JSONResponse({"id": name, "object": "video.deleted", "deleted": True})
            return JSONResponse(jobs.find(name).to_json(engine.name))
        except KeyError:
            return error(404, "there is no video of this id")

    async def content(request: Request) -> Response:
        try:
            job = jobs.find(request.path_params["name"])
        except KeyError:
            return error(404, "there is no video of this id")
        if job.status != "completed":
            return error(409, f"this video is {job.status}: ask again when it is completed")
        return FileResponse(jobs.path(job), media_type="video/mp4")

    return [
        Route("/v1/videos", videos, methods=["GET", "POST"]),
        Route("/v1/videos/{name}", video, methods=["GET", "DELETE"]),
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
