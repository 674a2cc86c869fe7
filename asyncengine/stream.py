"""The consumer's end of a request: `TokenStream` for tasks, `SyncTokenStream` for plain threads.

A stream is an object, not a generator: it holds no task group or cancel scope across a yield (PEP 789), and leaving
it (break, aclose, cancellation, garbage collection) is one synchronous, idempotent abort that awaits nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from asyncengine.errors import RequestFailed
from asyncengine.outputs import Chunk, Completion, Sample, Timings, Usage
from asyncengine.submit import Accepted


class Assembler:
    """Merges waiting chunks into one for the reader, and all chunks into the completion. Pure."""

    def __init__(self, accepted: Accepted, now: Callable[[], float]) -> None:
        self.accepted = accepted
        self._now = now
        self._chunks: list[Chunk] = []
        self._open = accepted.params.n
        self._ended_at = 0.0
        self.finished = False

    def feed(self, chunks: list[Chunk]) -> list[Chunk]:
        """`chunks` with each run of chunks of the same sample merged into one."""
        merged = chunks if len(chunks) == 1 else _merge(chunks)
        self._chunks += merged
        for chunk in merged:
            if chunk.finish_reason is not None:
                self._open -= 1
                if not self._open:
                    self.finished = True
                    self._ended_at = self._now()
                    chunk.usage = self.usage
        return merged

    @property
    def usage(self) -> Usage:
        generated = sum(len(chunk.token_ids) for chunk in self._chunks)
        return Usage(len(self.accepted.prompt), generated, self.accepted.mailbox.cached_tokens)

    def failure(self) -> Exception | None:
        """What `result()` raises, if the request failed."""
        for chunk in self._chunks:
            if chunk.finish_reason == "engine_dead":
                return self.accepted.mailbox.failure()
            if chunk.finish_reason == "error":
                return RequestFailed(f"request {self.accepted.request_id}: {chunk.error}")
        return None

    def completion(self) -> Completion:
        """The finished request. Call once `finished`."""
        accepted, mailbox = self.accepted, self.accepted.mailbox
        samples = [self._sample(index) for index in range(accepted.params.n)]
        prompt_logprobs = None
        if accepted.params.prompt_logprobs:
            prompt_logprobs = [mailbox.prompt_logprobs.get(i) for i in range(len(accepted.prompt))]

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - accepted.arrival

        return Completion(
            text=samples[0].text,
            token_ids=samples[0].token_ids,
            finish_reason=samples[0].finish_reason,
            usage=self.usage,
            timings=Timings(
                since(mailbox.started_at), since(mailbox.first_token_at), self._ended_at - accepted.arrival
            ),
            request_id=accepted.request_id,
            logprobs=samples[0].logprobs,
            prompt_logprobs=prompt_logprobs,
            samples=samples,
        )

    def _sample(self, index: int) -> Sample:
        chunks = [chunk for chunk in self._chunks if chunk.index == index]
        last = chunks[-1]
        return Sample(
            text="".join(chunk.text for chunk in chunks),
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            finish_reason=last.finish_reason or "abort",
            logprobs=[entry for chunk in chunks for entry in chunk.logprobs or ()] or None,
            error=last.error,
        )


def _merge(chunks: list[Chunk]) -> list[Chunk]:
    """One chunk for each run of chunks of the same sample."""
    merged: list[Chunk] = []
    for _, group in itertools.groupby(chunks, key=lambda chunk: chunk.index):
        run = list(group)
        last = run[-1]
        logprobs = [entry for chunk in run for entry in chunk.logprobs or ()]
        merged.append(
            Chunk(
                "".join(chunk.text for chunk in run),
                [token for chunk in run for token in chunk.token_ids],
                last.finish_reason,
                last.index,
                logprobs or None,
                last.error,
            )
        )
    return merged


class _StreamBase:
    """What both kinds of stream share: chunks ready to be handed out, and the abort."""

    def __init__(self, abort: Callable[[list[int]], None]) -> None:
        self._abort_tickets = abort
        self._assembler: Assembler | None = None
        self._ready: deque[Chunk] = deque()
        self._left = False
        self._closed = False
        self._raised = False

    @property
    def request_id(self) -> str | None:
        """The request's label; None before it has been submitted."""
        return None if self._assembler is None else self._assembler.accepted.request_id

    def abort(self) -> None:
        """Leave: the engine drops the request before its next step. Synchronous, idempotent, from any thread.

        The stream then ends with reason "abort" (iterate on, or `result()`, to see what there was).
        """
        if self._assembler is not None and not self._assembler.finished:
            self._abort_tickets(self._assembler.accepted.tickets)
        self._left = True

    def _exhausted(self) -> bool:
        """Nothing more will come. Raises the failure, once, if the request failed."""
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

    def __del__(self) -> None:
        self.abort()


class TokenStream(_StreamBase):
    """Async iterator of `Chunk`s; nothing runs before the first await.

    Use `async with` or `contextlib.aclosing` to leave at a definite place; without it, leaving the loop drops the
    last reference and that aborts too. After a last chunk with reason "error" or "engine_dead" iteration raises
    `RequestFailed` or `EngineDead`; "abort" and "timeout" do not raise.
    """

    def __init__(self, start: Callable[[], Awaitable[Assembler]], abort: Callable[[list[int]], None]) -> None:
        super().__init__(abort)
        self._start = start

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        assembler = self._assembler
        if assembler is None or self._ready or assembler.finished or self._closed:
            if self._exhausted():
                raise StopAsyncIteration
            if self._ready:
                return self._ready.popleft()
            assembler = await self._started()
        mailbox = assembler.accepted.mailbox
        while not mailbox.ready:
            waiter = mailbox.announce()
            if waiter is not None:
                await waiter
        self._ready.extend(assembler.feed(mailbox.take()))
        return self._ready.popleft()

    async def _started(self) -> Assembler:
        if self._assembler is None:
            self._check_startable()
            self._assembler = await self._start()
            if self._left:  # while it waited for a place
                self.abort()
        return self._assembler

    async def result(self) -> Completion:
        """Read to the end; the whole completion. Raises `RequestFailed` or `EngineDead`."""
        assembler = await self._started()
        while not assembler.finished:
            assembler.feed(await assembler.accepted.mailbox.receive())
        return self._completion()

    async def aclose(self) -> None:
        """Abort if still running. Awaits nothing: safe inside a cancelled scope."""
        self.abort()
        self._closed = True

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class SyncTokenStream(_StreamBase):
    """Iterator of `Chunk`s for plain threads; otherwise as `TokenStream`."""

    def __init__(self, start: Callable[[], Assembler], abort: Callable[[list[int]], None]) -> None:
        super().__init__(abort)
        self._start = start

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._exhausted():
            raise StopIteration
        if not self._ready:
            assembler = self._started()
            self._ready.extend(assembler.feed(assembler.accepted.mailbox.receive_blocking()))
        return self._ready.popleft()

    def _started(self) -> Assembler:
        if self._assembler is None:
            self._check_startable()
            self._assembler = self._start()
            if self._left:
                self.abort()
        return self._assembler

    def result(self) -> Completion:
        """Read to the end; the whole completion. Raises `RequestFailed` or `EngineDead`."""
        assembler = self._started()
        while not assembler.finished:
            assembler.feed(assembler.accepted.mailbox.receive_blocking())
        return self._completion()

    def close(self) -> None:
        """Abort if still running."""
        self.abort()
        self._closed = True

    def __enter__(self) -> Self:
        self._started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
