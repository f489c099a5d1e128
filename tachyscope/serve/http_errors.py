"""Refusals in OpenAI's shape, and the headers that every answer has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

# the page loads nothing from anywhere else, and no other site may frame it
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def error(status: int, message: str, **headers: str) -> JSONResponse:
    """A refusal in OpenAI's shape."""
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    content = {"error": {"message": message, "type": "invalid_request_error", "code": status}}
    return JSONResponse(content, status, headers)


async def _refused(request: Request, fault: Any) -> Response:
    """Starlette's own refusals: no such path, no such method, a form that cannot be read."""
    assert isinstance(fault, HTTPException)
    return error(fault.status_code, fault.detail, **dict(fault.headers or {}))


async def _left(request: Request, fault: Exception) -> Response:
    """The client went away in the middle of its body; nobody reads this."""
    return Response(status_code=400)


async def _failed(request: Request, fault: Exception) -> Response:
    """A fault of ours; Starlette logs it, outside of `Admission`, which sets headers."""
    return error(500, "the server failed at this request, and its log has why", **HEADERS)


HANDLERS: Mapping[Any, Any] = {
    HTTPException: _refused,
    ClientDisconnect: _left,
    Exception: _failed,
}
