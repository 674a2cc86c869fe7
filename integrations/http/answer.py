"""Answering one request over HTTP, whole or as a stream, until its client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from asyncengine.errors import naming
from asyncengine.integrations.http.events import NO_USAGE, Event, EventReader
from asyncengine.integrations.http.problems import Problem, problem_of
from asyncengine.integrations.http.requests import facts_of, measured
from asyncengine.integrations.http.several import Beams, Several
from asyncengine.outputs import Chunk, Completion, Usage
from asyncengine.stream import TokenStream

PING_SECONDS = 10.0
"""A stream's headers go out when its first token is there, or after this long; so do signs of life between tokens."""


class AnswerWriter(Protocol):
    """The part of a dialect that writes one answer."""

    media_type: str
    """Media type of a stream."""
    ping: str
    """A frame without meaning, for a stream on which nothing else is sent; it may be empty."""

    def begin(self, usage: Usage, samples: int) -> str:
        """The frames that a stream begins with."""

    def write(self, event: Event) -> str:
        """The frames of one event; an empty text for none."""

    def end(self, usage: Usage) -> str:
        """The last frames of a stream."""

    def failed(self, problem: Problem) -> str:
        """The frames of a stream that broke off."""

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The response to a request that did not ask for a stream."""


class Answer:
    """An ASGI response that runs one request of the engine.

    A client that leaves is noticed because `receive` is awaited throughout: at any moment, also in a long prompt, and
    also where it did not ask for a stream. The request is aborted then, before the engine's next step. A slow reader
    makes `send` wait; meanwhile the engine's mailbox merges the chunks that are not taken yet. An error before anything
    is sent is raised, for the app to answer.
    """

    def __init__(
        self, stream: TokenStream | Several | Beams, writer: AnswerWriter, *, streaming: bool, samples: int = 1,
        token_ids: bool = False, headers: tuple[tuple[str, str], ...] = (),
        release: Callable[[], None] = lambda: None, facts: Mapping[str, Any] = MappingProxyType({}),
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`release`: called once, when the model is no longer needed. `facts`: those that the request's log line tells.
        `names`: the request's own names of parameters, for errors."""
        self._stream, self.writer = stream, writer
        self._streaming, self._samples = streaming, samples
        self._events = EventReader(token_ids)
        self.headers = [(name.encode(), _one_line(value)) for name, value in headers]
        self._facts, self._names = facts, names
        self.after = ExitStack()
        """Calls to make when the request has ended."""
        self.after.callback(release)
        self._reasons: list[str] = []
        self._left = False
        self._ended = False
        """The request was ended from here, not by its engine."""
        self._begun, self._beginning = False, asyncio.Lock()
        self._sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive, send))
        facts = facts_of(scope)
        facts |= self._facts
        try:
            if self._streaming:
                with naming(self._names):
                    await self._stream_events(send)
            else:
                with naming(self._names):
                    whole = await self._whole()
                body = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
                length = str(len(body.encode())).encode()
                await self._send_headers(send, b"application/json", (b"content-length", length))
                await self._send_text(send, body, more=False)
        except OSError:  # the client is gone, as some servers say it
            pass
        except Exception as error:
            if self._begun and not self._left:
                await self._begin(send)  # waits until `_watch`, if it was sending the headers, has sent them
                await self._send_text(send, self.writer.failed(problem_of(error)), more=False)
            elif not self._left:
                raise
        finally:
            watcher.cancel()
            self.abort()
            facts |= measured(self._stream.usage, self._stream.timings) | {"finish": ",".join(self._reasons) or None}
            self.after.close()

    async def submit(self) -> None:
        """Submit the request before it is read. Raises the engine's errors that refuse it."""
        assert not isinstance(self._stream, Beams)
        try:
            with naming(self._names):
                await self._stream.__aenter__()
        except BaseException:
            self.after.close()
            raise

    def abort(self) -> None:
        """End the request before the engine's next step."""
        self._ended = True
        self._stream.abort()

    async def _whole(self) -> dict[str, Any]:
        """The whole response. Raises `Problem` where the engine broke the request off."""
        completion = await self._stream.result()
        self._reasons = [sample.finish_reason for sample in completion.samples]
        if not self._ended and "abort" in self._reasons:
            raise _aborted(completion.samples[self._reasons.index("abort")].error)
        return self.writer.whole(completion)

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Abort the request when its client leaves; give signs of life on a stream on which nothing is sent."""
        now = asyncio.get_running_loop().time
        while True:
            try:
                message: Message = await asyncio.wait_for(receive(), PING_SECONDS if self._streaming else None)
            except TimeoutError:
                await self._begin(send)  # proxies and clients would give up
                if now() - self._sent >= PING_SECONDS:
                    await self._send_text(send, self.writer.ping)
                continue
            if message["type"] == "http.disconnect":
                self._left = True
                self._stream.abort()
                return

    # ---------------------------------------------------------------- a stream

    async def _stream_events(self, send: Send) -> None:
        stream, writer, read = self._stream, self.writer, self._events.read
        assert not isinstance(stream, Beams)  # which no dialect streams
        async with stream:  # a refusal raises here, while a status can still be sent
            chunk = await self._next(stream)
            await self._begin(send)
            await self._send_text(send, writer.begin(stream.usage or NO_USAGE, self._samples))
            while chunk is not None:
                if chunk.finish_reason is not None:
                    self._reasons.append(chunk.finish_reason)
                    if chunk.finish_reason == "abort":
                        raise _aborted(chunk.error)
                text = "".join([writer.write(event) for event in read(chunk)])
                if text:
                    await self._send_text(send, text)
                chunk = await self._next(stream)
            await self._send_text(send, writer.end(stream.usage or NO_USAGE), more=False)

    async def _begin(self, send: Send) -> None:
        """Send a stream's headers, unless they are sent. The lock keeps the reader's task and `_watch` apart."""
        async with self._beginning:
            if not self._begun:
                await self._send_headers(send, self.writer.media_type.encode())

    async def _next(self, stream: TokenStream | Several) -> Chunk | None:
        """The next chunk that is no failure: the stream raises a failure at its end, with its cause."""
        chunk = await anext(stream, None)
        while chunk is not None and chunk.finish_reason in ("error", "engine_dead"):
            chunk = await anext(stream, None)
        return chunk

    # ---------------------------------------------------------------- sending

    async def _send_headers(self, send: Send, content_type: bytes, *more: tuple[bytes, bytes]) -> None:
        self._begun = True
        fixed = [(b"content-type", content_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": [*fixed, *self.headers, *more]})

    async def _send_text(self, send: Send, text: str, *, more: bool = True) -> None:
        self._sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


def _one_line(text: str) -> bytes:
    """A text as a header may have it. Clients choose names of fields: a line break in one would begin a new header."""
    return "".join([letter if letter.isprintable() else "?" for letter in text]).encode("latin-1", "replace")


def _aborted(why: str | None) -> Problem:
    return Problem(503, f"the request was aborted: {why or 'it was stopped, or the engine is closing'}", code="aborted")
