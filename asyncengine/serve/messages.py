"""Endpoints of Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncengine.serve.answer import Answer
from asyncengine.serve.dialects import anthropic_messages
from asyncengine.serve.generating import Endpoint, answer, grant, read_fields, reporting
from asyncengine.serve.problems import Problem
from asyncengine.serve.state import Serving


class _Spoken:
    """The dialect for one request, whose errors tell its id."""

    Writer = anthropic_messages.Writer
    read = staticmethod(anthropic_messages.read)

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self.headers = (("request-id", f"req_{self.id}"),)

    def error(self, problem: Problem) -> dict[str, Any]:
        return anthropic_messages.error(problem, f"req_{self.id}")


def routes(serving: Serving) -> list[Route]:
    """Paths of this dialect."""
    return [
        Route("/v1/messages", _endpoint(serving, _message), methods=["POST"]),
        Route("/v1/messages/count_tokens", _endpoint(serving, _count), methods=["POST"]),
    ]


def _endpoint(
    serving: Serving, respond: Callable[[Serving, Request, _Spoken], Awaitable[Response | Answer]]
) -> Endpoint:
    """`respond` with errors in Anthropic's shape and the request's id in the headers."""

    async def endpoint(request: Request) -> Response | Answer:
        spoken = _Spoken()
        return await reporting(lambda asked: respond(serving, asked, spoken), spoken.error, spoken.headers)(request)

    return endpoint


async def _message(serving: Serving, request: Request, spoken: _Spoken) -> Answer:
    fields = await read_fields(request, serving)
    turn = anthropic_messages.read(fields)
    return await answer(serving, spoken, turn, fields, request_id=spoken.id, headers=spoken.headers)


async def _count(serving: Serving, request: Request, spoken: _Spoken) -> Response:
    """The tokens that the prompt of a request would have. A long one is counted on a thread."""
    fields = await read_fields(request, serving)
    turn = anthropic_messages.read(fields, counting=True)
    target = await serving.models.acquire(turn.model)
    try:
        grant(turn, target, fields)
        messages, tools, variables = turn.messages or (), turn.chat["tools"], turn.chat.get("template_kwargs")
        tokens = await anyio.to_thread.run_sync(target.engine.count_tokens, messages, tools, variables)
    finally:
        target.release()
    return JSONResponse({"input_tokens": tokens}, headers=dict(spoken.headers))
