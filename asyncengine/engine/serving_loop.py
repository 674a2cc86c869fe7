"""The base of loops that serve requests: places in the queue, the inbox, and the mailboxes of open requests."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from math import inf
from typing import NamedTuple

from asyncengine.config import EngineConfig
from asyncengine.engine.clock import Clock, MonotonicClock
from asyncengine.engine.delivery import Delivery
from asyncengine.engine.inbox import Inbox
from asyncengine.engine.threads import finished, promised
from asyncengine.errors import EngineClosed, EngineDead, QueueFull
from asyncengine.events import Hooks
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.messages import Abort, Drain, Message, StopText
from asyncengine.seams import AdapterStore, GrammarCompiler
from asyncengine.stats import Meter
from asyncengine.text.token_table import TokenTable

# Back-pressure at submit: how many samples, and prompt tokens, may wait before the engine says no.


class _QueuedSubmit(NamedTuple):
    """One caller in line for places in the queue."""

    samples: int
    tokens: int
    granted: Future[bool]
    """False: its time was up."""


Left = Callable[[], float]


class QueueLimit:
    """Limits of the samples and prompt tokens that may wait to start. Counts them until they start or end. Thread-safe.

    `enter` is all or nothing for the `n` samples of a request. Limits of None admit everything. With a limit of 0 a
    request is admitted only while no other waits to start; a request larger than a limit is never admitted.
    """

    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._lock = threading.RLock()  # reentrant: a collected coroutine withdraws on whatever thread collects it
        self.waiting = self.waiting_tokens = 0
        """Samples that wait to start, and their prompt tokens."""
        self._closed = False
        self.line: deque[_QueuedSubmit] = deque()
        """Callers that wait for a place, in order."""
        self.expired = 0
        """Samples whose deadline came while they waited for a place."""

    def enter(self, samples: int, tokens: int) -> None:
        """Take `samples` places, of `tokens` prompt tokens in all. Raises `QueueFull`."""
        with self._lock:
            self._check_open()
            if (full := self._full(samples, tokens)) is not None:
                raise QueueFull(*full, self.waiting)
            if self.line:
                raise QueueFull("max_queued_requests", self._max_requests or 0, self.waiting)
            self._take(samples, tokens)

    async def enter_when_free(self, samples: int, tokens: int, left: Left = lambda: inf) -> bool:
        """Take places as `enter` does, but wait for them, first come first served. Cancelling leaves the line.

        False: `left()`, the seconds that the caller may still wait, reached 0 before, and it has left the line.
        """
        entry = self._join_line(samples, tokens)
        if entry is None:
            return True
        try:
            while not entry.granted.done():
                seconds = left()
                if seconds <= 0:
                    self._expire(entry)
                with suppress(TimeoutError):  # then `left` is asked again, by the engine's clock
                    async with asyncio.timeout(None if seconds == inf else max(0.0, seconds)):
                        await finished(entry.granted)
        except BaseException:
            self._give_up(entry)
            raise
        return entry.granted.result()

    def enter_blocking(self, samples: int, tokens: int, left: Left = lambda: inf) -> bool:
        """Take places as `enter_when_free` does, on a plain thread."""
        entry = self._join_line(samples, tokens)
        if entry is None:
            return True
        try:
            while not entry.granted.done():
                seconds = left()
                if seconds <= 0:
                    self._expire(entry)
                wait([entry.granted], None if seconds == inf else min(max(0.0, seconds), threading.TIMEOUT_MAX))
        except BaseException:  # KeyboardInterrupt
            self._give_up(entry)
            raise
        return entry.granted.result()

    def leave(self, samples: int, tokens: int) -> None:
        """Note that `samples` samples, of `tokens` prompt tokens in all, have started or ended."""
        with self._lock:
            self._take(-samples, -tokens)
            self._grant()

    def close(self) -> None:
        """Admit no more requests; those in line are refused. Called on the engine's loop."""
        with self._lock:
            self._closed = True
            while self.line:
                error = EngineClosed("the engine closed while the request waited for a place in its queue")
                self.line.popleft().granted.set_exception(error)

    def _join_line(self, samples: int, tokens: int) -> _QueuedSubmit | None:
        with self._lock:
            self._check_open()
            full = self._full(samples, tokens)
            limits = (self._max_requests, samples), (self._max_tokens, tokens)
            if full is not None and any(limit is not None and 0 < limit < size for limit, size in limits):
                raise QueueFull(*full)  # it never fits
            if full is None and not self.line:
                self._take(samples, tokens)
                return None
            entry = _QueuedSubmit(samples, tokens, promised())
            self.line.append(entry)
            return entry

    def _expire(self, entry: _QueuedSubmit) -> None:
        """Take `entry`, whose time is up, out of the line, if it is there still."""
        with self._lock:
            if entry in self.line:
                self.line.remove(entry)
                self.expired += entry.samples
                entry.granted.set_result(False)
                self._grant()

    def _give_up(self, entry: _QueuedSubmit) -> None:
        """Take `entry`, whose caller has left, out of the line, and give back places that it was granted."""
        with self._lock:
            if entry in self.line:
                self.line.remove(entry)
            elif entry.granted.exception() is None and entry.granted.result():
                self._take(-entry.samples, -entry.tokens)
            self._grant()

    def _grant(self) -> None:
        while self.line and self._full(self.line[0].samples, self.line[0].tokens) is None:
            entry = self.line.popleft()
            self._take(entry.samples, entry.tokens)
            entry.granted.set_result(True)

    def _take(self, samples: int, tokens: int) -> None:
        self.waiting += samples
        self.waiting_tokens += tokens

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed or draining: it takes no more requests")

    def _full(self, samples: int, tokens: int) -> tuple[str, int] | None:
        """The setting that `samples` more would break, with its value."""
        if _over(self.waiting, samples, self._max_requests):
            return "max_queued_requests", self._max_requests or 0
        if _over(self.waiting_tokens, tokens, self._max_tokens):
            return "max_queued_tokens", self._max_tokens or 0
        return None


def _over(taken: int, more: int, limit: int | None) -> bool:
    """Whether `more` on top of `taken` breaks `limit`. A limit of 0 admits one request at a time."""
    if limit is None:
        return False
    return taken > 0 if limit == 0 else taken + more > limit


class ServingLoop:
    """A loop as front ends use it. `EngineLoop` computes the requests that are posted here, a fleet's loop has other
    engines compute them."""

    noun = "engine"
    """Name of what it runs, in errors."""

    def __init__(
        self, config: EngineConfig, clock: Clock | None = None, *, grammars: GrammarCompiler | None = None,
        adapters: AdapterStore | None = None, table: TokenTable | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.clock = clock or MonotonicClock()
        self.grammars = grammars
        self.adapters = adapters
        self.queue_limit = QueueLimit(config.max_queued_requests, config.max_queued_tokens)
        self.inbox: Inbox[Message] = Inbox()
        self.meter = Meter()
        self.hooks = Hooks()
        self.delivery = Delivery(self.clock, self.meter, self.hooks, self.end_early, table, self.inbox.post)
        self.failure: BaseException | None = None
        """The error that killed the loop, if one did."""
        self._drain: Drain | None = None

    @property
    def refuses(self) -> bool:
        """Whether new requests are turned away for a while. From any thread."""
        return False

    def compute_now(self, specs: Sequence[RequestSpec]) -> bool:
        """Whether requests were computed at once, on the calling thread; else they are to be posted."""
        return False

    def have_loop(self) -> None:
        """Called before `run`: no other code will use the event loop that it runs on."""

    async def run(self) -> None:
        """Serve until drained. Raises only cancellation: every stream raises an error that kills the loop."""
        raise NotImplementedError

    def end_early(self, message: StopText | Abort) -> None:
        """Take note that delivery has ended a stream by itself, before the loop does more for its request."""
        self.let_go(message.ticket)
        self.inbox.post(message)

    def let_go(self, ticket: int) -> None:
        """Cancel the grammar and release the adapter of a request that has ended."""
        if self.grammars is not None:
            self.grammars.cancel(ticket)
        if self.adapters is not None:
            self.adapters.cancel(ticket)

    def start_drain(self, drain: Drain) -> None:
        """Take no more requests. Closing again may shorten a drain, not lengthen it."""
        deadlines = [one.deadline for one in (self._drain, drain) if one is not None and one.deadline is not None]
        self._drain = Drain(min(deadlines, default=None))
        self.queue_limit.close()  # callers in line for a place are refused like new ones

    def finished(self) -> dict[str, int]:
        """Samples that have ended, by reason, with those whose time was up in line for the queue."""
        finished = dict(self.meter.finished)
        if self.queue_limit.expired:
            finished["timeout"] = finished.get("timeout", 0) + self.queue_limit.expired
        return finished

    def end_all(self) -> None:
        """Fail every open request, and refuse those that come later."""
        self.queue_limit.close()
        unopened = [message.ticket for message in self.inbox.close() if isinstance(message, RequestSpec)]
        self.delivery.fail_all(self.make_failure, unopened)
        for service in (self.grammars, self.adapters):
            if service is not None:
                service.close()

    def make_failure(self) -> Exception:
        """The error of requests that are left when it has ended."""
        return EngineClosed(f"the {self.noun} has closed") if self.failure is None else EngineDead(self.failure)
