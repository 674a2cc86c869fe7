"""Keys: who may ask."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from asyncengine.serve.problems import Problem

OPEN_PATHS = frozenset(("/", "/page.js", "/page.css", "/health"))
"""Paths that need no key: they tell nothing of anybody."""


class RequireKey:
    """ASGI middleware that turns away requests without a key, in `Authorization: Bearer KEY` or `x-api-key`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], render: Callable[[str, Problem], dict[str, Any]]) -> None:
        """`render`: the error object for a path."""
        self._app, self._render = app, render
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in OPEN_PATHS and not self._may(HTTPConnection(scope)):
            problem = Problem(
                401, "a valid API key is needed, as Authorization: Bearer KEY or x-api-key", code="invalid_api_key"
            )
            response = JSONResponse(self._render(scope["path"], problem), 401, headers={"www-authenticate": "Bearer"})
            return await response(scope, receive, send)
        return await self._app(scope, receive, send)

    def _may(self, connection: HTTPConnection) -> bool:
        """Whether a key is one of ours. All are compared, in constant time: how long it takes says nothing of them."""
        kind, _, bearer = connection.headers.get("authorization", "").partition(" ")
        shown = bearer.strip() if kind.lower() == "bearer" else connection.headers.get("x-api-key", "")
        digest = hashlib.sha256(shown.encode("utf-8", "surrogateescape")).digest()
        return sum([hmac.compare_digest(digest, ours) for ours in self._digests]) > 0
