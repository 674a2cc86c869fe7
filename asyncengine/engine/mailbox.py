"""The mailbox between the engine and one consumer: a single merging slot.

The engine's thread puts, one consumer (a task on any loop, or a plain thread) receives everything put so far at once. A
slow consumer delays no other and takes bounded memory. A stream may leave `UNREAD` outputs unread; then its request is
suspended until it has read half of them. A whole answer is bounded by `max_tokens`. Measured at 256 streams, a bare
future costs 2.7 us a token where an asyncio.Event costs 4.5, a memory object stream 4.7 and a thread-safe call for each
one 31; hence bare futures here, and one thread-safe call per loop and step.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any

from asyncengine.engine.process import PROCESS
from asyncengine.errors import EngineDead
from asyncengine.outputs import Chunk, FinishReason, Timings
from asyncengine.step import TokenLogprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

Waiter = asyncio.Future[None] | threading.Event

MAX_WOKEN = 64
"""Most consumers that are woken in one turn of their loop: each may write a frame to its client, and until the turn
ends no timer runs and no socket is read."""
WAKE_TOKENS = 64
"""Tokens after which the reader of a whole answer is woken: few enough that taking them in does not block its loop."""


UNREAD = 1024
"""Outputs that the reader of a stream may leave unread, of all samples together, before its request is suspended."""


class Mailbox:
    """Lock-free between one putting and one receiving thread: deque operations are atomic, and the receiver looks again
    after it has announced itself, so no wake-up is lost. A chunk that the receiver has seen is away for a moment while
    a token joins it: no caller relies on `ready`, and `take` may return nothing."""

    __slots__ = (
        "_born", "_chunks", "_min_tokens", "_resume", "_suspended", "_waiter", "_woken", "away", "cached_tokens",
        "cause", "context", "ended", "failure", "first_token_at", "generated", "is_chat", "joins", "limit", "num_put",
        "num_taken", "predicted", "prepared_at", "prompt_logprobs", "prompt_tokens", "restored_tokens", "started_at",
        "traces", "weight_versions",
    )  # fmt: skip

    def __init__(self) -> None:
        self._born = PROCESS.generation
        self._chunks: deque[Chunk] = deque()
        self._waiter: Waiter | None = None
        """The receiver's last waiter. Only the receiver clears it: the engine's thread might clear a newer one."""
        self._woken: Waiter | None = None
        """The last waiter that the engine's thread has had woken."""
        self._min_tokens = 1
        self.limit: int | None = None
        """Unread outputs from which on the request is suspended; None: it never is."""
        self.num_put = self.num_taken = 0
        """Numbers of outputs put, counted by the engine's thread, and taken, counted by the receiver's."""
        self._suspended: deque[int] = deque()
        """Tickets of the samples that wait for the receiver."""
        self._resume: Callable[[int], object] | None = None
        self.cached_tokens = self.restored_tokens = self.prompt_tokens = 0
        self.predicted = (0, 0)
        self.away: float | None = None
        """Seconds that the session spent on tool calls before this request; None: it made none."""
        self.prepared_at: float | None = None
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.is_chat = False
        """Whether the request is a chat, for observers of its end."""
        self.joins = True
        """Tokens that wait for the receiver become one chunk. False: it wants to count them one by one."""
        self.ended: tuple[FinishReason, ...] = ()
        """Reasons of the samples that have ended."""
        self.generated = 0
        """Tokens of these."""
        self.context: Context | None = None
        """The context of the caller, if an observer will want it."""
        self.prompt_logprobs: dict[int, TokenLogprob] = {}
        """Log-probabilities by prompt position; complete when sample 0 has its first token."""
        self.traces: list[tuple[int, int, NDArray[Any]]] = []
        """(sample, position of the first entry, entries) in the order in which they were computed."""
        self.weight_versions: dict[int, tuple[tuple[int, int], ...]] = {}
        """`Sample.weight_versions` by sample, of those that have ended; of others, up to the last weight update."""
        self.cause: Exception | None = None
        """The error to raise where reason is "error", if the failure has a type of its own."""
        self.failure: Callable[[], Exception] = EngineDead
        """Makes the error to raise where reason is "engine_dead"; each consumer gets one of its own."""

    def timings(self, arrival: float, ended_at: float) -> Timings:
        """Times of a request that arrived and ended at these clock readings."""
        moments = self.started_at, self.first_token_at, self.prepared_at
        started, first_token, prepared = (None if moment is None else moment - arrival for moment in moments)
        return Timings(started, first_token, ended_at - arrival, prepared)

    def put(self, chunk: Chunk) -> Waiter | None:
        """Append `chunk`. Returns the waiter to wake (see `wake_all`), or None."""
        chunks = self._chunks
        chunks.append(chunk)
        waiter = self._waiter
        if waiter is None or waiter is self._woken:  # no reader waits, or it is woken and has not looked yet
            return None
        if chunk.finish_reason is None and len(chunks) < self._min_tokens and len(chunk.token_ids) < self._min_tokens:
            return None  # the reader of a whole answer sleeps on
        self._woken = waiter
        return waiter

    def put_token(self, text: str, token: int, index: int) -> Waiter | None:
        """Append a plain token of sample `index` with its text. It joins the last chunk, if that was not taken yet: one
        chunk for each token of an answer that is read at its end would be many objects."""
        try:
            last = self._chunks.pop() if self._chunks else None  # popped, so the reader cannot take it while it grows
        except IndexError:  # the reader was faster
            last = None
        if last is not None:
            if self.joins and last.index == index and last.logprobs is None and len(last.token_ids) < WAKE_TOKENS:
                last.text += text
                last.token_ids.append(token)
                return self.put(last)
            self._chunks.append(last)
        return self.put(Chunk(text, [token], None, index))

    def suspend(self, ticket: int, suspend: Callable[[int], object], resume: Callable[[int], object]) -> None:
        """Call `suspend` with `ticket`, and `resume` once the receiver has read, perhaps at once, on any thread."""
        if ticket in self._suspended:
            return
        suspend(ticket)
        self._resume = resume
        self._suspended.append(ticket)
        # the receiver looks at `_suspended` after it has taken, so one of the two threads sees what the other did
        self._resume_if_read()

    def lift_limit(self) -> None:
        """Suspend the request no more: its reader needs the whole answer from here on."""
        self.limit = None
        self._resume_if_read()

    def _resume_if_read(self) -> None:
        if self.limit is not None and 2 * (self.num_put - self.num_taken) > self.limit:
            return
        while self._suspended and self._resume is not None:
            try:
                self._resume(self._suspended.popleft())
            except IndexError:  # the other thread was faster
                return

    @property
    def ready(self) -> bool:
        return bool(self._chunks)

    def take(self) -> list[Chunk]:
        """Every waiting chunk, without waiting for one."""
        chunks: list[Chunk] = []
        while self._chunks:
            try:
                chunk = self._chunks.popleft()
            except IndexError:  # the other thread has it, to join a token to it
                break
            chunks.append(chunk)
            self.num_taken += len(chunk.token_ids) or 1
        if self._suspended and self._born == PROCESS.generation:
            self._resume_if_read()
        return chunks

    def announce(self, min_tokens: int = 1) -> asyncio.Future[None] | None:
        """A future that is set once `min_tokens` tokens wait, or a sample's end; None if there is a chunk already.

        `while not mailbox.take(): await mailbox.announce()` in effect; not a coroutine, which would cost a token twice
        as much. Cancelling the wait loses nothing. Raises `WrongProcess` in a fork, where no engine runs.
        """
        PROCESS.check_unforked(self._born)
        previous = self._waiter
        if previous not in (None, self._woken) and not (isinstance(previous, asyncio.Future) and previous.done()):
            raise RuntimeError("two readers wait for one stream; read it in one place")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._min_tokens, self._waiter = min_tokens, waiter
        if self._chunks:  # put between the reader's look and its announcement
            self._waiter = None
            return None
        return waiter

    async def receive(self, min_tokens: int = 1) -> list[Chunk]:
        """Every waiting chunk, at least one. A reader of a whole answer passes `min_tokens` and is woken less often:
        each wake-up costs the engine, and the reader's loop, more time than a chunk."""
        while not (chunks := self.take()):
            waiter = self.announce(min_tokens)
            if waiter is not None:
                await waiter
        return chunks

    def receive_blocking(self, min_tokens: int = 1) -> list[Chunk]:
        """Receive as `receive` does, on a plain thread."""
        while not (chunks := self.take()):
            PROCESS.check_unforked(self._born)
            event = threading.Event()
            self._min_tokens, self._waiter = min_tokens, event
            if not self._chunks:
                event.wait()
            self._waiter = None
        return chunks


def wake_all(waiters: Iterable[Waiter]) -> None:
    """Wake consumers, with one thread-safe call for each foreign loop. Closed loops are skipped."""
    here: asyncio.AbstractEventLoop | None = None
    with suppress(RuntimeError):
        here = asyncio.get_running_loop()
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        if isinstance(waiter, asyncio.Future):
            loops.setdefault(waiter.get_loop(), []).append(waiter)
        else:
            waiter.set()
    for loop, futures in loops.items():
        if loop is here:
            _wake_some(loop, futures)
            continue
        try:
            loop.call_soon_threadsafe(_wake_some, loop, futures)
        except RuntimeError:
            continue  # closed: its streams are dropped with it, and dropping a stream aborts


def _wake_some(loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]], start: int = 0) -> None:
    """Wake `MAX_WOKEN` consumers from `start` on, the others in the loop's next turns, between which timers run."""
    for future in futures[start : start + MAX_WOKEN]:
        if not future.done():
            future.set_result(None)
    if start + MAX_WOKEN < len(futures):
        loop.call_soon(_wake_some, loop, futures, start + MAX_WOKEN)
