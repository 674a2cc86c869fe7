"""Keys and host names: who may ask, and how those who may not are told."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Sequence

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from asyncengine.integrations.http.dialects import anthropic_messages, openai_chat
from asyncengine.integrations.http.generating import identified
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.requests import facts_of, path_of

OPEN_PATHS = frozenset(("/", "/page.js", "/page.css", "/health"))
"""Paths that need no key: they tell nothing of anybody."""


class RequireKey:
    """ASGI middleware that turns away requests without a key, in `Authorization: Bearer KEY` or `x-api-key`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and path_of(scope) not in OPEN_PATHS and not self._may(HTTPConnection(scope)):
            # a key in the address is none: addresses are logged on the way
            need = "a valid API key is needed, as Authorization: Bearer KEY or x-api-key"
            problem = Problem(401, need, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))
            return await refusal(HTTPConnection(scope), problem)(scope, receive, send)
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

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            host = HTTPConnection(scope).headers.get("host", "").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in self._hosts:
                message = f"a server without a key answers to {', '.join(sorted(self._hosts))} only"
                problem = Problem(403, message, "host", "wrong_host")
                return await refusal(HTTPConnection(scope), problem)(scope, receive, send)
        return await self._app(scope, receive, send)


def refusal(connection: HTTPConnection, problem: Problem) -> JSONResponse:
    """The response that tells a problem, in the shape of the dialect that is spoken there."""
    request_id = secrets.token_hex(16)
    facts = facts_of(connection.scope)
    facts |= {"id": facts.get("id", request_id), "error": problem.code or "refused"}
    content = openai_chat.error(problem)
    if is_anthropics(connection):
        content = anthropic_messages.error(problem, f"req_{request_id}")
    return JSONResponse(content, problem.status, headers=dict((*identified(request_id), *problem.headers)))


def is_anthropics(connection: HTTPConnection) -> bool:
    """Whether a client of Anthropic's API asks: by its path, or by the header that it sends with every request."""
    return "anthropic-version" in connection.headers or path_of(connection.scope).startswith("/v1/messages")
