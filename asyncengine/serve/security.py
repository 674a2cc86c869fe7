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
    """ASGI middleware that answers to some host names only, which keeps DNS rebinding out.

    A web page's own host name, made to resolve to this machine, would have browsers treat this server as the page's.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], render: Render) -> None:
        self._app, self._hosts, self._render = app, frozenset(hosts), render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            host = HTTPConnection(scope).headers.get("host", "").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in self._hosts:
                message = f"a server without a key answers to {', '.join(sorted(self._hosts))} only"
                response = JSONResponse(self._render(path_of(scope), Problem(403, message, "host", "wrong_host")), 403)
                return await response(scope, receive, send)
        return await self._app(scope, receive, send)


def path_of(scope: Scope) -> str:
    """The path within this app, which may be mounted below another's."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path
