"""Authorization: bearer tokens, and the Host and Origin of pages."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from tachyscope.core.errors import TachyscopeError, first_line, warn

# how a page, which cannot set headers, sends its token with a WebSocket
TOKEN_PROTOCOL = "bearer."
LOCAL = ("localhost", "127.0.0.1", "::1")
SHORTEST = 16  # letters of a token
TOKEN = re.compile(r"[A-Za-z0-9._~+-]+")  # what a WebSocket's subprotocol may be


@dataclass(frozen=True)
class Guard:
    """The tokens, origins and hosts that are accepted; without tokens every client is."""

    tokens: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # names that the server goes by; any, if empty

    def refusal(self, headers: Headers, protocols: Collection[str] = ()) -> tuple[int, str] | None:
        """The status and message of a refused request; None if it is accepted."""
        host = _host(f"//{headers.get('host', '')}")
        if self.hosts and host not in self.hosts:
            return 421, f"this server goes by {', '.join(self.hosts)}"
        origin = headers.get("origin")
        # a page of another site must not use a browser's way to this one
        own = origin is None or (_netloc(origin) or None) == headers.get("host")
        if not own and origin not in self.origins:
            return 403, "pages of other sites are not let in: start the server with --origin"
        if self.tokens and not self.owner(headers, protocols):
            return 401, "a bearer token is needed"
        return None

    def owner(self, headers: Headers, protocols: Collection[str] = ()) -> str:
        """The owner of a request: a hash of its token; empty without a valid one."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        offered = [given] if scheme.lower() == "bearer" else []
        offered += [
            one.removeprefix(TOKEN_PROTOCOL) for one in protocols if one.startswith(TOKEN_PROTOCOL)
        ]
        # all are compared, so that time tells nothing
        found = [
            token
            for one in offered
            for token in self.tokens
            if hmac.compare_digest(one.encode(), token.encode())
        ]
        return hashlib.sha256(found[0].encode()).hexdigest()[:16] if found else ""


def read_tokens(path: Path) -> tuple[str, ...]:
    """The tokens of a file, one a line."""
    try:
        lines = path.read_text().split()
    except (OSError, UnicodeDecodeError) as fault:
        raise TachyscopeError(f"{path} cannot be read ({first_line(fault)})") from fault
    short = sum(len(line) < SHORTEST for line in lines)
    if not lines or short:
        raise TachyscopeError(
            f"{path} must have a token of at least {SHORTEST} letters a line, got {len(lines)} "
            f"lines and {short} too short: make one by openssl rand -hex 16"
        )
    if not all(TOKEN.fullmatch(line) for line in lines):
        raise TachyscopeError(
            f"{path} must have tokens of letters, digits and . _ ~ + -, got others, which a "
            f"browser cannot send: make one by openssl rand -hex 16"
        )
    if path.stat().st_mode & 0o004:
        warn(f"{path} may be read by every user of this machine: chmod o-r it")
    return tuple(lines)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""
