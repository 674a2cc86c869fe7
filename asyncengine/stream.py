"""The consumer's end of a request: `TokenStream` for tasks, `SyncTokenStream` for plain threads.

A stream is an object, not a generator: it holds no task group or cancel scope across a yield (PEP 789), and leaving
it (break, aclose, cancellation, garbage collection) is one synchronous, idempotent abort that awaits nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import NoReturn, Self, SupportsIndex, TypeVar

from asyncengine.engine.assembler import Assembler
from asyncengine.engine.mailbox import UNREAD, WAKE_TOKENS
from asyncengine.errors import RequestFailed
from asyncengine.outputs import Chunk, Completion, Timings, Usage
from asyncengine.step import TokenLogprob

T = TypeVar("T")


class _StreamBase:
    """The common part of both kinds of stream: chunks ready to be handed out, and the abort."""

    def __init__(self, abort: Callable[[list[int]], None]) -> None:
        self._abort_tickets = abort
        self._assembler: Assembler | None = None
        self._ready: deque[Chunk] = deque()
        self._left = False
        self._closed = False
        self._raised = False
        self._reading = threading.Lock()
        """Held while a task or thread starts or reads it."""

    @property
    def request_id(self) -> str | None:
        """The request's label; None before it has been submitted."""
        return None if self._assembler is None else self._assembler.prepared.spec.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the model sees it; empty before it has been submitted."""
        return () if self._assembler is None else self._assembler.prepared.spec.prompt_ids

    @property
    def usage(self) -> Usage | None:
        """Token counts so far; None before it has been submitted. From the first chunk on those of the prompt are
        final."""
        return None if self._assembler is None else self._assembler.usage

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """`Completion.prompt_logprobs`, all of them from the first chunk on; None where they are not asked for."""
        return None if self._assembler is None else self._assembler.prompt_logprobs

    @property
    def timings(self) -> Timings | None:
        """Times so far, `total` up to now until it has ended; None before it has been submitted."""
        return None if self._assembler is None else self._assembler.timings

    def abort(self) -> None:
        """Leave: the engine drops the request before its next step. Synchronous, idempotent, from any thread.

        The stream then ends with reason "abort" (iterate on, or `result()`, to see what there was).
        """
        if self._assembler is not None and not self._assembler.finished:
            self._abort_tickets(self._assembler.prepared.tickets)
        self._left = True

    def _exhausted(self) -> bool:
        """Whether the stream has ended. Raises the failure, once, if the request failed."""
        if self._closed:
            return True
        if self._ready:
            return False
        if self._assembler is None:
            return self._left
        if not self._assembler.finished:
            return False
        if not self._raised:
            self._raised = True
            failure = self._assembler.failure()
            if failure is not None:
                raise failure
        return True

    def _read_alone(self) -> None:
        """Take `_reading`. A second reader would start the request once more, or take what the first one waits for."""
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("the stream is being read by another task or thread; read it in one place")

    def _check_startable(self) -> None:
        if self._left:
            raise RequestFailed("the stream was left before it started")

    def _completion(self) -> Completion:
        assert self._assembler is not None
        self._ready.clear()
        self._raised = True
        failure = self._assembler.failure()
        if failure is not None:
            raise failure
        return self._assembler.completion()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copy, deepcopy and pickle."""
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: one request has one reader")

    def __del__(self) -> None:
        self.abort()


class TokenStream(_StreamBase):
    """Async iterator of `Chunk`s; nothing runs before the first await.

    A reader that leaves more than 1,024 tokens unread suspends the request, which goes on when half of them are read;
    `result()` waits for the whole and suspends nothing. Use `async with` or `contextlib.aclosing` to leave at a
    definite place; without it, leaving the loop drops the last reference and that aborts too.
    After a last chunk with reason "error" or "engine_dead" iteration raises `RequestFailed` or `EngineDead`; "abort"
    and "timeout" do not raise.
    """

    def __init__(self, start: Callable[[], Awaitable[Assembler]], abort: Callable[[list[int]], None]) -> None:
        super().__init__(abort)
        self._start = start

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        self._read_alone()
        try:
            assembler, ready = self._assembler, self._ready
            if assembler is None or ready or assembler.finished or self._closed:
                if self._exhausted():
                    raise StopAsyncIteration
                if ready:
                    return ready.popleft()
                assembler = await self._started()
                assembler.prepared.mailbox.limit = UNREAD
            mailbox = assembler.prepared.mailbox
            while not (chunks := mailbox.take()):
                waiter = mailbox.announce()
                if waiter is not None:
                    await waiter
            ready.extend(assembler.feed(chunks))
            return ready.popleft()
        finally:
            self._reading.release()

    async def _started(self) -> Assembler:
        if self._assembler is None:
            self._check_startable()
            self._assembler = await self._start()
            if self._left:  # it was left while it waited for a place in the queue
                self.abort()
        return self._assembler

    async def result(self) -> Completion:
        """Read to the end; the whole completion. Raises `RequestFailed` or `EngineDead`."""
        self._read_alone()
        try:
            assembler = await self._started()
            assembler.prepared.mailbox.lift_limit()
            while not assembler.finished:
                assembler.keep(await assembler.prepared.mailbox.receive(WAKE_TOKENS))
            return self._completion()
        finally:
            self._reading.release()

    async def aclose(self) -> None:
        """Abort if still running. Awaits nothing: safe inside a cancelled scope."""
        self.abort()
        self._closed = True

    async def __aenter__(self) -> Self:
        self._read_alone()
        try:
            (await self._started()).prepared.mailbox.limit = UNREAD
        finally:
            self._reading.release()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()


class SyncTokenStream(_StreamBase):
    """Iterator of `Chunk`s for plain threads, of a request that has been submitted; otherwise as `TokenStream`."""

    def __init__(
        self, assembler: Assembler, abort: Callable[[list[int]], None], check_thread: Callable[[], None]
    ) -> None:
        """`check_thread`: raises where waiting on this thread would wait for ever."""
        super().__init__(abort)
        self._assembler = self._submitted = assembler
        assembler.prepared.mailbox.limit = UNREAD
        self._check_thread = check_thread

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        self._read_alone()
        try:
            if self._exhausted():
                raise StopIteration
            if not self._ready:
                self._ready.extend(self._submitted.feed(self._receive()))
            return self._ready.popleft()
        finally:
            self._reading.release()

    def _receive(self, min_tokens: int = 1) -> list[Chunk]:
        mailbox = self._submitted.prepared.mailbox
        if not mailbox.ready:
            self._check_thread()
        return mailbox.receive_blocking(min_tokens)

    def result(self) -> Completion:
        """Read to the end; the whole completion. Raises `RequestFailed` or `EngineDead`."""
        self._read_alone()
        try:
            self._submitted.prepared.mailbox.lift_limit()
            while not self._submitted.finished:
                self._submitted.keep(self._receive(WAKE_TOKENS))
            return self._completion()
        finally:
            self._reading.release()

    def close(self) -> None:
        """Abort if still running."""
        self.abort()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


async def submitted(stream: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """An iterator over `stream`, a `TokenStream` or what a framework made of one, that has its first item already.

    `QueueFull` and whatever else refuses a request is raised here, while an HTTP handler can still answer by a status.
    Leaving the iterator leaves `stream`.
    """
    try:
        first = [await anext(stream)]
    except StopAsyncIteration:
        first = []

    async def continued() -> AsyncGenerator[T, None]:
        async with aclosing(stream):  # type: ignore[type-var]  # generators and token streams have it
            for item in first:
                yield item
            async for item in stream:
                yield item

    return continued()
