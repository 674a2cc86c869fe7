"""Keys and host names: who may ask."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Sequence
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from asyncengine.serve.problems import Problem

OPEN_PATHS = frozenset(("/", "/page.js", "/page.css", "/health"))
"""Paths that need no key: they tell nothing of anybody."""
Render = Callable[[str, Problem], dict[str, Any]]
"""The error object for a path."""


class RequireKey:
    """ASGI middleware that turns away requests without a key, in `Authorization: Bearer KEY` or `x-api-key`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], render: Render) -> None:
        self._app, self._render = app, render
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and path_of(scope) not in OPEN_PATHS and not self._may(HTTPConnection(scope)):
            # a key in the address is none: addresses are logged on the way
            problem = Problem(
                401, "a valid API key is needed, as Authorization: Bearer KEY or x-api-key", code="invalid_api_key"
            )
            response = JSONResponse(self._render(path_of(scope), problem), 401, headers={"www-authenticate": "Bearer"})
            return await response(scope, receive, send)
        return await self._app(scope, receive, send)

    def _may(self, connection: HTTPConnection) -> bool:
        """Whether a key is one of ours. All are compared, in constant time: how long it takes says nothing of them."""
        kind, _, bearer = connection.headers.get("authorization", "").partition(" ")
        shown = bearer.strip() if kind.lower() == "bearer" else connection.headers.get("x-api-key", "")
        digest = hashlib.sha256(shown.encode("utf-8", "surrogateescape")).digest()
        return sum([hmac.compare_digest(digest, ours) for ours in self._digests]) > 0


class RequireHost:
    """ASGI middleware that answers to some host names only, and opens WebSockets only for their pages.

    A web page's own host name, made to resolve to this machine, would have browsers treat this server as the page's
    (DNS rebinding); and a browser opens a WebSocket for any page, to any host, saying only whose it is.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str], render: Render) -> None:
        """`origins`: those whose pages may ask, whatever their host."""
        self._app, self._hosts, self._origins, self._render = app, frozenset(hosts), frozenset(origins), render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            headers = HTTPConnection(scope).headers
            origin = headers.get("origin", "") if scope["type"] == "websocket" else ""
            foreign = origin and not self._origins & {origin, "*"} and _name_in(origin) not in self._hosts
            if foreign or _name_in(headers.get("host", "")) not in self._hosts:
                known = ", ".join(sorted(self._hosts))
                message = f"a server without a key answers to {known} and to their pages only"
                response = JSONResponse(self._render(path_of(scope), Problem(403, message, "host", "wrong_host")), 403)
                return await response(scope, receive, send)
        return await self._app(scope, receive, send)


def _name_in(address: str) -> str:
    """The host name of "name:port" or "http://name:port"; an IPv6 address keeps its brackets."""
    host = address.lower().rpartition("://")[2]
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def path_of(scope: Scope) -> str:
    """The path within this app, which may be mounted below another's."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path
