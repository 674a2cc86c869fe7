"""The Responses API over a WebSocket: requests one after another, the same events as in a stream of HTTP."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Message
from starlette.websockets import WebSocket

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


class Conversation:
    """One connection. A response that isn't to be stored stays as long as it does."""

    def __init__(
        self, serving: Serving, respond: Respond, forget: Callable[[str, object], None], socket: WebSocket
    ) -> None:
        """`respond`: the answer to a connection's request; `forget`: drops a response that it alone may go on from."""
        self._serving, self._respond, self._forget, self._socket = serving, respond, forget, socket
        self._waiting: asyncio.Queue[str | None] = asyncio.Queue()
        self._left = asyncio.Event()
        self._status = 200
        self._responses: deque[str] = deque(maxlen=1024)

    async def run(self) -> None:
        """Answer requests until the client leaves."""
        origin = self._socket.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != self._socket.headers.get("host"):
            # any page may open a connection to any host: a browser asks nobody before
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
                self._forget(response_id, self)

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
        previous, self._status = None, 200
        try:
            if len(text) > self._serving.max_body:
                raise Problem(413, f"the request has more than {self._serving.max_body} characters")
            fields = Fields(await parse_json(text.encode()), strict=self._serving.strict)
            previous = fields.peek("previous_response_id")
            if fields.take("type") != "response.create":
                raise InvalidParameter("type", "must be 'response.create'")
            made = await self._respond(fields, self)
            assert isinstance(made.writer, Writer)
            self._responses.append(made.writer.response["id"])
            await made(self._socket.scope, self._receive, self._send)
        except Exception as failure:
            problem = problem_of(failure)
            self._status = problem.status
            await self._refuse(error(problem)["error"])
        if self._status != 200 and isinstance(previous, str):
            self._forget(previous, self)  # the specification has it so

    # ---------------------------------------------------------------- an answer's end of the connection

    async def _receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status != 200:
            await self._refuse(json.loads(message["body"])["error"])
        else:
            for frame in message["body"].decode().split("\n\n"):
                if data := frame.partition("data: ")[2]:
                    await self._socket.send_text(data)

    async def _refuse(self, content: dict[str, Any]) -> None:
        content["code"] = content["code"] or content["type"]
        await self._socket.send_text(json.dumps({"type": "error", "status": self._status, "error": content}))
