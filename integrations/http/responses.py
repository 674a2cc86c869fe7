"""Endpoints of OpenAI's Responses API: making responses, over a WebSocket too, and coming back to those stored."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Message, Scope
from starlette.websockets import WebSocket

from asyncengine.checks import MAX_COUNT, as_choice, as_integer
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.answer import PING_SECONDS, Answer
from asyncengine.integrations.http.body import INLINE_BYTES, parse_json
from asyncengine.integrations.http.dialects import EVENT_STREAM
from asyncengine.integrations.http.dialects import openai_responses as dialect
from asyncengine.integrations.http.events import Event
from asyncengine.integrations.http.fields import Fields
from asyncengine.integrations.http.generating import Endpoint, answer, count, read_fields, routed
from asyncengine.integrations.http.models import Serving
from asyncengine.integrations.http.problems import Problem, problem_of
from asyncengine.integrations.http.requests import FACTS, KEY, facts_of
from asyncengine.integrations.http.turn import Answered, Turn
from asyncengine.outputs import Usage

# Responses that clients can come back to, within a number of bytes.

Item = dict[str, Any]
OVERHEAD = 1024
"""Bytes that an entry costs besides its JSON text, generously."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and its own input, as JSON text: that is what they cost, to the byte."""

    response: bytes
    items: bytes
    previous: str | None
    """Id of the response that it went on from."""
    owner: object
    """The only connection that may use it; None: all may."""
    events: bytes = b""
    """Its stream, where it was made in the background."""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + len(self.events) + OVERHEAD


class ResponseStore:
    """Responses by id, in memory; beyond `most` bytes the least recently used ones are dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self.used = 0
        """Bytes of all stored responses."""

    def put(self, response: Item, items: Sequence[Item], owner: object = None, events: str = "") -> None:
        """Keep a response, the items that were its own input, and the events of its stream."""
        numbered = [{**item, "id": item.get("id") or f"item_{response['id']}_{at}"} for at, item in enumerate(items)]
        previous = response["previous_response_id"]
        stored = Stored(_packed(response), _packed(numbered), previous, owner, events.encode())
        self.delete(response["id"])
        self._stored[response["id"]] = stored
        self.used += stored.size
        while self.used > self._most:
            self.used -= self._stored.popitem(last=False)[1].size

    def get(self, response_id: str, owner: object = None) -> Stored | None:
        """The response of that id, which counts as used now; None where there is none that `owner` may see."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner not in (None, owner):
            return None
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, response_id: str) -> bool:
        """Forget a response, and say whether there was one. Conversations that continue it cannot be continued then."""
        stored = self._stored.pop(response_id, None)
        self.used -= stored.size if stored else 0
        return stored is not None

    def chain(self, response_id: str | None, owner: object = None) -> list[Stored] | None:
        """A response and all those before it in its conversation, oldest first; None where one of them is gone."""
        newest_first: list[Stored] = []
        while response_id is not None:
            stored = self.get(response_id, owner)
            if stored is None:
                return None
            newest_first.append(stored)
            response_id = stored.previous
        return newest_first[::-1]


def _packed(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


INLINE_ITEMS = 1000
"""A longer input is read on a thread."""
WAITING = 16
"""Requests that may wait on one WebSocket for the one that is answered."""


def routes(serving: Serving) -> list[BaseRoute]:
    """Paths of the Responses API."""
    api, path = _Responses(serving), "/v1/responses"
    served: dict[str, Endpoint] = {
        f"POST {path}": api.create, f"POST {path}/input_tokens": api.input_tokens, f"POST {path}/compact": api.compact,
        f"GET {path}/{{id}}": api.retrieve, f"DELETE {path}/{{id}}": api.delete,
        f"POST {path}/{{id}}/cancel": api.cancel, f"GET {path}/{{id}}/input_items": api.input_items,
    }  # fmt: skip
    return [*routed(served), WebSocketRoute(path, api.converse)]


class _Keeping(dialect.Writer):
    """A writer whose response is stored before its last frame goes out: the next request may ask for it at once. The
    frames of a background response are kept, for clients that follow it."""

    def __init__(self, turn: Turn, answered: Answered, store: ResponseStore, owner: object) -> None:
        super().__init__(turn, answered)
        self._items, self._store, self._owner = turn.extra["items"], store, owner
        self.frames = list[str]()
        self._more = asyncio.Event()
        if self.response["background"]:
            self.response["status"] = "queued"

    def begin(self, usage: Usage, samples: int = 1) -> str:
        self.response["status"] = "in_progress"
        return self._noted(super().begin(usage, samples))

    def write(self, event: Event) -> str:
        return self._noted(super().write(event))

    def finish(self, outcome: Mapping[str, Any]) -> str:
        frames = self._noted(super().finish(outcome))
        if self.response["store"] or self._owner is not None:
            owner = None if self.response["store"] else self._owner
            self._store.put(self.response, self._items, owner, "\n\n".join(self.frames))
        return frames

    def _noted(self, frames: str) -> str:
        if self.response["background"]:
            self.frames += frames.split("\n\n")[:-1]
            self._more.set()  # wakes all who follow; the next frame has an event of its own, so no wake-up is lost
            self._more = asyncio.Event()
        return frames

    @property
    def shown(self) -> Item:
        """The response as it is now."""
        return {**self.response, **({"status": "cancelled"} if self.cancelled else {})}

    async def follow(self, at: int) -> AsyncIterator[str]:
        """The frames from number `at` on, as they come, with signs of life between them."""
        while self.response["status"] in ("queued", "in_progress") or at < len(self.frames):
            if at < len(self.frames):
                yield self.frames[at] + "\n\n"
                at += 1
                continue
            try:
                await asyncio.wait_for(self._more.wait(), PING_SECONDS)
            except TimeoutError:
                yield self.ping


class _Responses:
    """The endpoints, over one store."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._store = ResponseStore(serving.response_memory)
        self._running: dict[str, tuple[Answer, _Keeping]] = {}
        """Answers under way and their writers, by the ids of their responses."""
        self._tasks = set[asyncio.Task[None]]()
        """Tasks that make responses in the background: the loop alone would not keep them."""

    async def _read(self, fields: Fields, read: Callable[..., Turn] = dialect.read, owner: object = None) -> Turn:
        """The turn of a request. That of a long one is made on a thread, so that streams go on meanwhile."""
        previous, raw_input = fields.peek("previous_response_id"), fields.peek("input")
        chain = self._store.chain(previous, owner) if isinstance(previous, str) else []
        if chain is None and previous in self._running:
            raise Problem(409, f"response {previous!r} is still being written", "previous_response_id")
        long = isinstance(raw_input, list) and len(raw_input) > INLINE_ITEMS
        if long or sum([stored.size for stored in chain or ()]) > INLINE_BYTES:
            return await anyio.to_thread.run_sync(read, fields, partial(_recalled, chain))
        return read(fields, partial(_recalled, chain))

    # ---------------------------------------------------------------- making them

    async def create(self, request: Request) -> Answer | Response:
        fields = await read_fields(request, self._serving)
        streaming = fields.peek("stream") is True
        answer, writer = await self.respond(fields)
        if not writer.response["background"]:
            return answer
        await answer.submit()
        task = asyncio.create_task(self._make(answer, writer, request.scope))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        events = StreamingResponse(writer.follow(0), media_type=EVENT_STREAM)
        response = events if streaming else JSONResponse(writer.response)
        response.raw_headers.extend(answer.headers)
        return response

    async def _make(self, answer: Answer, writer: _Keeping, scope: Scope) -> None:
        """Make a response in the background. It is counted and logged as a request of its own."""

        async def receive() -> Message:
            await asyncio.Event().wait()  # for ever: there is no client that could leave
            return {"type": "http.disconnect"}

        async def send(_message: Message) -> None: ...

        try:
            facts = {**facts_of(scope)}
            await self._serving.requests.run(answer, {**scope, "method": "TASK", FACTS: facts}, receive, send)
        except Exception as error:  # before its first token
            writer.failed(problem_of(error))

    async def respond(self, fields: Fields, owner: object = None) -> tuple[Answer, _Keeping]:
        """The answer to a request's fields, and its writer. `owner`: the connection that may continue the response even
        if the request has it not stored."""
        turn = await self._read(fields, owner=owner)
        background = turn.extra["echo"]["background"]
        if background and owner is not None:
            raise InvalidParameter("background", "is not served over a WebSocket")
        turn.stream |= background or owner is not None
        reply = await answer(self._serving, partial(_Keeping, store=self._store, owner=owner), turn, fields)
        writer = reply.writer
        assert isinstance(writer, _Keeping)
        self._running[writer.response["id"]] = reply, writer
        reply.after.callback(self._running.pop, writer.response["id"], None)
        return reply, writer

    def forget(self, response_id: str, owner: object) -> None:
        """Drop a response that is kept for one connection alone."""
        if (stored := self._store.get(response_id, owner)) is not None and stored.owner is owner:
            self._store.delete(response_id)

    async def converse(self, socket: WebSocket) -> None:
        await _Conversation(self, self._serving, socket).run()

    async def compact(self, request: Request) -> Answer:
        fields = await read_fields(request, self._serving)
        turn = await self._read(fields, dialect.read_compact)
        return await answer(self._serving, dialect.Compacting, turn, fields)

    async def input_tokens(self, request: Request) -> Response:
        fields = await read_fields(request, self._serving)
        tokens = await count(self._serving, await self._read(fields), fields)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    # ---------------------------------------------------------------- coming back to them

    async def retrieve(self, request: Request) -> Response:
        query = request.query_params
        streamed = query.get("stream", "false").lower() != "false"
        at = _number(query, "starting_after", -1, -1, MAX_COUNT) + 1
        _, writer = self._running.get(request.path_params["id"], (None, None))
        if writer is not None:
            if not streamed:
                return JSONResponse(writer.shown)
            if writer.response["background"]:
                return StreamingResponse(writer.follow(at), media_type=EVENT_STREAM)
        elif not streamed:
            return _stored_response(self._find(request))
        elif events := self._find(request).events:
            frames = events.decode().split("\n\n")[at:]
            return Response("".join([f"{frame}\n\n" for frame in frames]), media_type=EVENT_STREAM)
        raise InvalidParameter("stream", "is served of responses that were made with background=true")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        if response_id in self._running:
            raise Problem(409, "the response is being written: cancel it first", "response_id")
        self._find(request)
        self._store.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        if (running := self._running.get(request.path_params["id"])) is not None:
            answer, writer = running
            writer.cancelled = True
            answer.abort()
            return JSONResponse(writer.shown)
        stored = self._find(request)
        if not stored.events:
            why = "Cannot cancel a synchronous response."  # in OpenAI's words
            raise Problem(400, why, "response_id", "invalid_value")
        return _stored_response(stored)  # it has ended: cancelling changes nothing

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
            why = f"Response with id {response_id[:100]!r} not found."  # in OpenAI's words
            raise Problem(404, why, "response_id", "response_not_found")
        return stored


class _Conversation:
    """One WebSocket: requests are answered one after another, by the events that a stream over HTTP has.

    A response that its request has not stored is kept until the connection ends.
    """

    def __init__(self, api: _Responses, serving: Serving, socket: WebSocket) -> None:
        self._api, self._serving, self._socket = api, serving, socket
        self._waiting: asyncio.Queue[str | None] = asyncio.Queue()
        self._left = asyncio.Event()
        self._responses: deque[str] = deque(maxlen=1024)

    async def run(self) -> None:
        """Answer requests until the client leaves."""
        origin = self._socket.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != self._socket.headers.get("host"):
            # any page may open a WebSocket to any host: browsers ask no permission first, as CORS has them do for fetch
            return await self._socket.close(1008, "a page of another site may not connect")
        await self._socket.accept()
        listening = asyncio.create_task(self._listen())
        try:
            while (text := await self._waiting.get()) is not None:
                await self._answer(text)
        except Exception:
            if not self._left.is_set():  # else it was sent to a client that had left
                raise
        finally:
            listening.cancel()
            for response_id in self._responses:
                self._api.forget(response_id, self)

    async def _listen(self) -> None:
        try:
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                text = message.get("text")
                if text is None or self._waiting.qsize() >= WAITING:
                    return await self._socket.close(1008, f"text is taken, and {WAITING} requests that wait")
                self._waiting.put_nowait(text)
        finally:
            self._left.set()
            self._waiting.put_nowait(None)

    async def _answer(self, text: str) -> None:
        previous = None
        try:
            if len(text) > self._serving.max_body:
                raise Problem(413, f"the request has more than {self._serving.max_body} characters")
            fields = Fields(await parse_json(text.encode()), strict=self._serving.strict)
            previous = fields.peek("previous_response_id")
            if fields.take("type") != "response.create":
                raise InvalidParameter("type", "must be 'response.create'")
            if (key := self._socket.scope.get(KEY)) is not None and (problem := key.admit()) is not None:
                raise problem
            reply, writer = await self._api.respond(fields, self)
            self._responses.append(writer.response["id"])
            await self._serving.requests.run(reply, {**self._socket.scope, FACTS: {}}, self._receive, self._send)
        except Exception as failure:
            problem = problem_of(failure)
            content = dialect.error(problem)["error"]
            content["code"] = content["code"] or content["type"]
            await self._socket.send_text(json.dumps({"type": "error", "status": problem.status, "error": content}))
            if isinstance(previous, str):
                self._api.forget(previous, self)  # a failed request takes its predecessor along, says the specification

    # ---------------------------------------------------------------- an answer's end of the connection

    async def _receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        for frame in message.get("body", b"").decode().split("\n\n"):
            if data := frame.partition("data: ")[2]:
                await self._socket.send_text(data)


def _recalled(chain: Sequence[Stored] | None, response_id: str) -> list[Item]:
    """Input and output of a chain of responses, in order. Raises `Problem` where one of them is not stored."""
    if chain is None:
        dialect.not_found(response_id)
    items: list[Item] = []
    for stored in chain:
        items += json.loads(stored.items)
        items += json.loads(stored.response)["output"]
    return items


def _stored_response(stored: Stored) -> Response:
    return Response(stored.response, media_type="application/json")


def _number(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name, str(default))
    return as_integer(name, int(text) if text.lstrip("-").isdecimal() and len(text) < 12 else text, low, high)
