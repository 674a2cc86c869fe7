"""Endpoints of OpenAI's Responses API: making responses, and coming back to those that are stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from asyncengine.checks import as_choice, as_integer
from asyncengine.errors import InvalidParameter
from asyncengine.outputs import Usage
from asyncengine.serve.answer import Answer
from asyncengine.serve.body import INLINE_BYTES
from asyncengine.serve.dialects import openai_responses as dialect
from asyncengine.serve.dialects.responses_items import Item
from asyncengine.serve.fields import Fields
from asyncengine.serve.generating import Endpoint, answer, grant, read_fields, reporting
from asyncengine.serve.problems import Problem
from asyncengine.serve.response_store import ResponseStore, Stored
from asyncengine.serve.responses_socket import Conversation
from asyncengine.serve.state import Serving
from asyncengine.serve.turn import Answered, Turn

INLINE_ITEMS = 1000
"""A longer input is read on a thread."""


def routes(serving: Serving) -> list[BaseRoute]:
    """Paths of the Responses API."""
    api, one = _Responses(serving), "/v1/responses/{id}"
    paths: list[tuple[str, Endpoint, str]] = [
        ("/v1/responses", api.create, "POST"),
        ("/v1/responses/input_tokens", api.input_tokens, "POST"),
        ("/v1/responses/compact", api.compact, "POST"),
        (one, api.retrieve, "GET"),
        (one, api.delete, "DELETE"),
        (f"{one}/cancel", api.cancel, "POST"),
        (f"{one}/input_items", api.input_items, "GET"),
    ]
    made = [Route(path, reporting(endpoint, dialect.error), methods=[method]) for path, endpoint, method in paths]
    return [*made, WebSocketRoute("/v1/responses", api.converse)]


class _Keeping(dialect.Writer):
    """A writer whose response is stored before its last frame goes out: the next request may ask for it at once."""

    def __init__(self, turn: Turn, answered: Answered, store: ResponseStore, owner: object) -> None:
        super().__init__(turn, answered)
        self._items, self._store, self._owner = turn.extra["items"], store, owner

    def end(self, usage: Usage) -> str:
        return self._kept(super().end(usage))

    def failed(self, problem: Problem) -> str:
        return self._kept(super().failed(problem))

    def _kept(self, frames: str) -> str:
        if self.response["store"] or self._owner is not None:
            self._store.put(self.response, self._items, None if self.response["store"] else self._owner)
        return frames


class _Responses:
    """The endpoints, over one store."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._store = ResponseStore(serving.response_memory)
        self._running: dict[str, Answer] = {}
        """Answers under way, by the ids of their responses."""

    async def _read(self, fields: Fields, read: Callable[..., Turn] = dialect.read, owner: object = None) -> Turn:
        """The turn of a request, which is made on a thread where it is long, so that streams go on meanwhile."""
        previous, given = fields.peek("previous_response_id"), fields.peek("input")
        chain = self._store.chain(previous, owner) if isinstance(previous, str) else []
        long = isinstance(given, list) and len(given) > INLINE_ITEMS
        if long or sum([stored.size for stored in chain or ()]) > INLINE_BYTES:
            return await anyio.to_thread.run_sync(read, fields, partial(_recalled, chain))
        return read(fields, partial(_recalled, chain))

    # ---------------------------------------------------------------- making them

    async def create(self, request: Request) -> Answer:
        return await self.respond(await read_fields(request, self._serving))

    async def respond(self, fields: Fields, owner: object = None) -> Answer:
        """The answer to a request's fields. `owner`: the connection that may come back to it though it isn't stored."""
        turn = await self._read(fields, owner=owner)
        turn.stream |= owner is not None
        made = await answer(self._serving, dialect, turn, fields, partial(_Keeping, store=self._store, owner=owner))
        assert isinstance(made.writer, _Keeping)
        response_id = made.writer.response["id"]
        self._running[response_id] = made
        made.then(lambda: self._running.pop(response_id, None))
        return made

    def forget(self, response_id: str, owner: object) -> None:
        """Drop a response that is kept for one connection alone."""
        if (found := self._store.get(response_id, owner)) is not None and found.owner is owner:
            self._store.delete(response_id)

    async def converse(self, socket: WebSocket) -> None:
        await Conversation(self._serving, self.respond, self.forget, socket).run()

    async def compact(self, request: Request) -> Answer:
        fields = await read_fields(request, self._serving)
        turn = await self._read(fields, dialect.read_compact)
        return await answer(self._serving, dialect, turn, fields, dialect.Compacting)

    async def input_tokens(self, request: Request) -> Response:
        fields = await read_fields(request, self._serving)
        turn = await self._read(fields)
        target = await self._serving.models.acquire(turn.model)
        try:
            grant(turn, target, fields)
            given = turn.messages or [], turn.chat.get("tools"), turn.chat.get("template_kwargs")
            count = await asyncio.to_thread(target.engine.count_tokens, *given)
        finally:
            target.release()
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    # ---------------------------------------------------------------- coming back to them

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() != "false":
            raise InvalidParameter("stream", "is not served: a stored response is returned whole")
        if (made := self._running.get(request.path_params["id"])) is not None:
            assert isinstance(made.writer, _Keeping)
            return JSONResponse(made.writer.response)
        return Response(self._find(request).response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        if response_id in self._running:
            raise Problem(409, "the response is being written: cancel it first", "response_id")
        self._find(request)
        self._store.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        made = self._running.get(request.path_params["id"])
        if made is None:  # it has ended: cancelling changes nothing
            return Response(self._find(request).response, media_type="application/json")
        assert isinstance(made.writer, _Keeping)
        made.writer.cancelled = True
        made.abort()
        return JSONResponse({**made.writer.response, "status": "cancelled"})

    async def input_items(self, request: Request) -> Response:
        query = request.query_params
        most = _number(query, "limit", 20, 1, 100)
        stored = self._find(request)
        items = [*_recalled(self._store.chain(stored.previous), stored.previous or ""), *json.loads(stored.items)]
        if as_choice("order", query.get("order", "desc"), ("asc", "desc")) == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
        page = items[start : start + most]
        ends = [item["id"] for item in page[:1] + page[-1:]] or ["", ""]
        more = start + most < len(items)
        return JSONResponse(
            {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[-1], "has_more": more}
        )

    def _find(self, request: Request) -> Stored:
        response_id = request.path_params["id"]
        stored = self._store.get(response_id)
        if stored is None:
            raise Problem(404, f"no response {response_id[:100]!r} is stored", "response_id", "response_not_found")
        return stored


def _recalled(chain: Sequence[Stored] | None, response_id: str) -> list[Item]:
    """Input and output of a chain of responses, in order. Raises `Problem` where one of them is not stored."""
    if chain is None:
        dialect.not_found(response_id)
    items: list[Item] = []
    for stored in chain:
        items += json.loads(stored.items)
        items += json.loads(stored.response)["output"]
    return items


def _number(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    given = query.get(name, str(default))
    return as_integer(name, int(given) if given.lstrip("-").isdecimal() and len(given) < 12 else given, low, high)
