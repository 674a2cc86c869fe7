"""The consumer's end of a request: `TokenStream` for tasks, `SyncTokenStream` for plain threads.

A stream is an object, not a generator: it holds no task group or cancel scope across a yield (PEP 789), and leaving
it (break, aclose, cancellation, garbage collection) is one synchronous, idempotent abort that awaits nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from asyncengine.errors import EngineDead, RequestFailed
from asyncengine.mailbox import Item
from asyncengine.outputs import Chunk, Completion, FinishReason, LogprobEntry, Sample, Timings, Usage
from asyncengine.submit import Accepted
from asyncengine.text import TokenTable


class _SampleParts:
    """What has come of one sample."""

    __slots__ = ("error", "logprobs", "reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[LogprobEntry] = []
        self.reason: FinishReason | None = None
        self.error: str | None = None


class Assembler:
    """Merges mailbox items into chunks, and chunks into the completion. Pure."""

    def __init__(self, accepted: Accepted, table: TokenTable | None, now: Callable[[], float]) -> None:
        self.accepted = accepted
        self._table = table
        self._now = now
        self._samples = [_SampleParts() for _ in range(accepted.params.n)]
        self._open = accepted.params.n
        self._ended_at = 0.0

    @property
    def finished(self) -> bool:
        return self._open == 0

    def feed(self, items: list[Item]) -> list[Chunk]:
        """Chunks for `items`, one per run of items of the same sample."""
        chunks: list[Chunk] = []
        chunk: Chunk | None = None
        texts: list[str] = []
        for item in items:
            if chunk is None or chunk.index != item.index:
                if chunk is not None:
                    chunk.text = "".join(texts)
                    texts.clear()
                chunk = Chunk(index=item.index)
                chunks.append(chunk)
            if item.text:
                texts.append(item.text)
            self._add(item, chunk)
        if chunk is not None:
            chunk.text = "".join(texts)
        return chunks

    def _add(self, item: Item, chunk: Chunk) -> None:
        parts = self._samples[item.index]
        if item.text:
            parts.texts.append(item.text)
        if item.token >= 0:
            chunk.token_ids.append(item.token)
            parts.token_ids.append(item.token)
        if item.logprob is not None:
            entry = self._entry(item.logprob.token_id, item.logprob.logprob, item.logprob.top)
            parts.logprobs.append(entry)
            chunk.logprobs = [*(chunk.logprobs or ()), entry]
        if item.reason is not None:
            parts.reason, parts.error = item.reason, item.error
            chunk.finish_reason, chunk.error = item.reason, item.error
            self._open -= 1
            if not self._open:
                self._ended_at = self._now()
                chunk.usage = self.usage

    def _entry(self, token: int, logprob: float, top: tuple[tuple[int, float], ...] = ()) -> LogprobEntry:
        text = "" if self._table is None else self._table.token_text(token)
        raw = b"" if self._table is None else self._table.token_bytes(token)
        return LogprobEntry(token, text, logprob, raw, tuple(self._entry(*alternative) for alternative in top))

    @property
    def usage(self) -> Usage:
        generated = sum(len(parts.token_ids) for parts in self._samples)
        return Usage(len(self.accepted.prompt), generated, self.accepted.mailbox.cached_tokens)

    def failure(self) -> Exception | None:
        """What `result()` raises, if the request failed."""
        for parts in self._samples:
            if parts.reason == "engine_dead":
                cause = self.accepted.mailbox.failure
                return cause if isinstance(cause, Exception) else EngineDead(cause)
            if parts.reason == "error":
                return RequestFailed(f"request {self.accepted.request_id}: {parts.error}")
        return None

    def completion(self) -> Completion:
        """The finished request. Call once `finished`."""
        accepted, mailbox = self.accepted, self.accepted.mailbox
        samples = [
            Sample("".join(p.texts), p.token_ids, p.reason or "abort", p.logprobs or None, p.error)
            for p in self._samples
        ]
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
            timings=Timings(since(mailbox.started_at), since(mailbox.first_token_at), self._ended_at - accepted.arrival),
            request_id=accepted.request_id,
            logprobs=samples[0].logprobs,
            prompt_logprobs=prompt_logprobs,
            samples=samples,
        )


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
        if self._exhausted():
            raise StopAsyncIteration
        if not self._ready:
            assembler = await self._started()
            self._ready.extend(assembler.feed(await assembler.accepted.mailbox.receive()))
        return self._ready.popleft()

    async def _started(self) -> Assembler:
        if self._assembler is None:
            self._check_startable()
            self._assembler = await self._start()
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
