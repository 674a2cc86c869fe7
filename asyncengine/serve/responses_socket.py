"""The Responses API over a WebSocket: requests one after another, the same events as in a stream of HTTP."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from asyncengine.errors import InvalidParameter
from asyncengine.serve.answer import Answer
from asyncengine.serve.body import parse_json
from asyncengine.serve.dialects.openai_responses import Writer, error
from asyncengine.serve.fields import Fields
from asyncengine.serve.problems import Problem, problem_of
from asyncengine.serve.state import Serving

WAITING = 16
"""Requests that may wait on one connection for the one that is answered."""
Respond = Callable[[Fields, object], Awaitable[Answer]]
Forget = Callable[[str, object], None]


async def converse(serving: Serving, respond: Respond, forget: Forget, socket: WebSocket) -> None:
    """Serve one connection until its client leaves. A response that isn't to be stored stays as long as it does."""
    origin = socket.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != socket.headers.get("host"):
        # any page may open a connection to any host: a browser asks nobody before
        return await socket.close(1008, "a page of another site may not connect")
    await socket.accept()
    talk = _Conversation(serving, respond, forget, socket)
    listening = asyncio.create_task(talk.listen())
    try:
        await talk.answer_all()
    except (WebSocketDisconnect, RuntimeError):  # it was sent to a client that had left
        if not talk.left.is_set():
            raise
    finally:
        listening.cancel()
        for response_id in talk.mine:
            forget(response_id, talk)


class _Conversation:
    """The requests of one connection. Its responses are told as over HTTP, so this is where their bytes go."""

    def __init__(self, serving: Serving, respond: Respond, forget: Forget, socket: WebSocket) -> None:
        self._serving, self._respond, self._forget, self._socket = serving, respond, forget, socket
        self._waiting: asyncio.Queue[str | None] = asyncio.Queue()
        self._status = 200
        self.left = asyncio.Event()
        self.mine: deque[str] = deque(maxlen=1024)
        """Ids of the connection's last responses."""

    async def listen(self) -> None:
        """Take requests until the client leaves, or asks for too much at once."""
        try:
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                text = message.get("text")
                if text is None or self._waiting.qsize() >= WAITING:
                    await self._socket.close(1008, f"text is taken, and {WAITING} requests that wait")
                    break
                self._waiting.put_nowait(text)
        finally:
            self.left.set()
            self._waiting.put_nowait(None)

    async def answer_all(self) -> None:
        """Answer requests in turn."""
        while (text := await self._waiting.get()) is not None:
            previous: Any = None
            self._status = 200
            try:
                if len(text) > self._serving.max_body:
                    raise Problem(413, f"the request has more than {self._serving.max_body} characters")
                fields = Fields(body := await parse_json(text.encode()), strict=self._serving.strict)
                previous = body.get("previous_response_id")
                if fields.take("type") != "response.create":
                    raise InvalidParameter("type", "must be 'response.create'")
                if fields.take("background"):
                    raise InvalidParameter("background", "must be left out on a WebSocket")
                made = await self._respond(fields, self)
                assert isinstance(made.writer, Writer)
                self.mine.append(made.writer.response["id"])
                await made(self._socket.scope, self._receive, self._send)
            except Exception as failure:
                if self.left.is_set():
                    return
                problem = problem_of(failure)
                self._status = problem.status
                await self._tell(error(problem))
            if self._status != 200 and isinstance(previous, str):  # as the specification has it
                self._forget(previous, self)

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status != 200:
            await self._tell(json.loads(message["body"]))
        else:
            for frame in message["body"].decode().split("\n\n"):
                if data := frame.partition("data: ")[2]:
                    await self._socket.send_text(data)

    async def _tell(self, failure: dict[str, Any]) -> None:
        told = {"type": "error", "status": self._status, "error": failure["error"]}
        told["error"]["code"] = told["error"]["code"] or told["error"]["type"]
        await self._socket.send_text(json.dumps(told))
