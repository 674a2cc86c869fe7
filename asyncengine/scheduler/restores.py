"""Requests whose prefix is on a disk or at a peer: they wait until it is in pages here, as others for their grammar.

A request that has everything else is looked up first (`take_wanted`; the engine answers with `PrefixFound`). Where
reading is worth it, pages are taken for it, like a running request's, and an order to fill them goes out
(`take_orders`; the answer is `PrefixLoaded`). Then they are published, and the request waits for its turn: it finds
them as it finds everything in the cache. Requests whose next page is being read already wait for the same reading.

No other request waits. One that has waited long enough computes; a reading that fails yields fewer pages, and is no
error. Pages that are being read belong to the reading alone until its answer comes, even if its requests have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncengine.kvcache import KVCache, PageTable
from asyncengine.kvcache.kv_cache import TableAndTokens
from asyncengine.kvcache.radix_tree import Namespace
from asyncengine.scheduler.messages import ImportPrefix, PrefixFound, PrefixLoaded
from asyncengine.scheduler.request import Request, RequestState
from asyncengine.step import RecordType

MOST_TRIES = 3
"""Readings that a request waits for, at most: one that shares its beginning with several others may find more behind
each."""


class Wanted(NamedTuple):
    """A request to be looked up."""

    request: Request
    namespace: Namespace
    limit: int
    """The number of its tokens that may be found, at most."""
    cached: int
    """The number of those that are in the cache."""


@dataclass(slots=True, eq=False)
class RestoreOrder:
    """Pages to be filled from a disk or by a peer. Another thread reads it; only `cancelled` and `late` change."""

    number: int
    namespace: Namespace
    tokens: list[int]
    """Tokens up to the end of the last page."""
    start: int
    """The number of pages at the beginning that are in the cache."""
    pages: tuple[tuple[int, int], ...]
    """(index among the pages of `tokens`, page) to be filled, in order."""
    windows: tuple[tuple[int, int], ...] = ()
    """Window pages likewise."""
    slot: int = 0
    """The slot for the state after the last token; 0: there is none."""
    read: Callable[..., None] | None = None
    """Function that fills them, of the `PrefixFound`; None: an import, which its caller fills."""
    until: float = 0.0
    """Clock reading until which the first request waits for it."""
    cancelled: bool = False
    """Whether it may end early, since no request waits for it any more."""
    late: bool = False
    """It has taken so long that the requests which waited for it compute."""
    imported: int = 0
    """Number of the `ImportPrefix` that it answers; 0: requests wait for it."""

    @property
    def addresses(self) -> list[tuple[RecordType, int, int]]:
        """All that is to be filled: (type of record, index of its page, index in the memory of that type)."""
        addresses = [(RecordType.WINDOW, *page) for page in self.windows]
        if self.slot:
            addresses.append((RecordType.STATE, self.pages[-1][0], self.slot))
        return addresses + [(RecordType.PAGE, *page) for page in self.pages]

    def leave(self, *, late: bool = False) -> None:
        """No request waits for it any more: it may end early, unless it is an import."""
        if not self.imported:
            self.cancelled, self.late = True, late


@dataclass(slots=True, eq=False)
class _Reading:
    """A launched order, its pages, and those who wait for it."""

    order: RestoreOrder
    table: PageTable
    eviction_priority: int
    until: float
    """Clock reading until which the request waits."""
    waiting: dict[int, Request] = field(default_factory=dict)


class Restores:
    """Requests in the restore queue, and readings under way. `enabled` is False where nothing is stored."""

    def __init__(
        self, kv: KVCache, namespace: Callable[[Request], Namespace], match_limit: Callable[[Request], int]
    ) -> None:
        self.enabled = False
        self.queue: dict[int, Request] = {}
        """Requests by ticket that wait for an answer, or for a reading."""
        self._kv = kv
        self._namespace = namespace
        self._match_limit = match_limit
        self._wanted: list[Request] = []
        self._orders: list[RestoreOrder] = []
        self.readings: dict[int, _Reading] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self.readings)

    @property
    def tables(self) -> list[TableAndTokens]:
        """Tables of readings, each with the number of its tokens."""
        return [(reading.table, len(reading.order.tokens)) for reading in self.readings.values()]

    @property
    def next_deadline(self) -> float:
        """The clock reading before which no request has waited long enough."""
        return min((reading.until for reading in self.readings.values() if reading.waiting), default=float("inf"))

    # ---------------------------------------------------------------- requests

    def add(self, request: Request) -> bool:
        """Take `request`, which has everything else. False: nothing can be found for it."""
        if not self.enabled or request.spec.whole or self._match_limit(request) < self._kv.page_size:
            return False
        request.move(RequestState.RESTORE_QUEUE)
        self.queue[request.ticket] = request
        self._wanted.append(request)
        return True

    def discard(self, request: Request) -> None:
        """`request` waits for nothing any more. A reading that no request waits for may end early."""
        self.queue.pop(request.ticket, None)
        for reading in self.readings.values():
            if reading.waiting.pop(request.ticket, None) is not None and not reading.waiting:
                reading.order.leave()

    def take_wanted(self) -> list[Wanted]:
        """Requests to be looked up since the last call."""
        wanted, self._wanted = self._wanted, []
        lookups = []
        for request in wanted:
            if request.ticket in self.queue:
                space, limit = self._namespace(request), self._match_limit(request)
                cached = self._kv.peek(space, request.keys, limit)
                lookups.append(Wanted(request, space, limit, cached))
        return lookups

    def take_orders(self) -> list[RestoreOrder]:
        """Readings to begin."""
        orders, self._orders = self._orders, []
        return orders

    def import_prefix(self, message: ImportPrefix, running: Iterable[TableAndTokens]) -> None:
        """Take pages for what a file has. An order of number 0 says that there is no room beside those `running`, or
        nothing to be read: `start` pages are cached then."""
        space, tokens = (message.adapter_digest, message.salt), list(message.tokens)
        pages = len(tokens) // self._kv.page_size
        if self._begin(space, tokens, pages, 0, 0.0, running, imported=message.number) is None:
            start = self._kv.peek(space, tokens, len(tokens)) // self._kv.page_size
            self._orders.append(RestoreOrder(0, space, tokens, start, (), imported=message.number))

    # ---------------------------------------------------------------- answers

    def start_reading(self, answer: PrefixFound, running: Iterable[TableAndTokens]) -> Request | None:
        """Begin the reading of a request, of which `answer` says how many pages a source has. Returns the request if it
        is to compute instead: no pages, not worth it, or no room beside those `running`."""
        request = self.queue.get(answer.ticket)
        if request is None:
            return None
        if answer.pages and request.restores < MOST_TRIES:
            request.restores += 1
            space, priority = self._namespace(request), request.spec.options.priority
            reading = self._shared(request) or self._begin(
                space, request.keys, answer.pages, priority, answer.until, running, answer.read
            )
            if reading is not None:
                reading.waiting[request.ticket] = request
                reading.until = max(reading.until, answer.until)
                return None
        del self.queue[request.ticket]
        return request

    def end_reading(self, answer: PrefixLoaded) -> list[Request]:
        """Publish the pages of a reading that has ended. Returns its requests that go on to compute the rest."""
        reading = self.readings.pop(answer.number)
        order, table = reading.order, reading.table
        before = table.num_shared
        self._kv.end_restore(table, order.tokens, order.start + answer.pages, reading.eviction_priority)
        if order.slot and self._kv.states is not None:
            whole = answer.state and len(order.tokens) == table.num_shared * self._kv.page_size
            self._kv.states.settle_reserved(order.slot, table.node if whole else None)
        done = []
        for index, request in enumerate(reading.waiting.values()):
            request.restored_tokens += (table.num_shared - before) * self._kv.page_size
            if index:  # the disk may have more of it than it shares with this prompt: look again
                self._wanted.append(request)
            else:
                del self.queue[request.ticket]
                done.append(request)
        return done

    def overdue(self, now: float) -> list[Request]:
        """Requests that have waited long enough. They compute, and what they waited for ends early."""
        late: list[Request] = []
        if now >= self.next_deadline:
            for reading in self.readings.values():
                if now >= reading.until and reading.waiting:
                    late += reading.waiting.values()
                    reading.waiting.clear()
                    reading.order.leave(late=True)
        for request in late:
            del self.queue[request.ticket]
        return late

    def _shared(self, request: Request) -> _Reading | None:
        """The reading under way that fills the next page of `request`."""
        space, size = self._namespace(request), self._kv.page_size
        for reading in self.readings.values():
            end = (reading.order.start + 1) * size
            if reading.order.cancelled or reading.order.namespace != space:
                continue
            if self._match_limit(request) >= end and request.keys[:end] == reading.order.tokens[:end]:
                return reading
        return None

    def _begin(
        self, space: Namespace, tokens: list[int], pages: int, priority: int, until: float,
        running: Iterable[TableAndTokens], read: Callable[..., None] | None = None, *, imported: int = 0,
    ) -> _Reading | None:  # fmt: skip
        kv, size, slot = self._kv, self._kv.page_size, 0
        if kv.states is not None:
            slot = kv.states.reserve()
            if not slot:
                return None
        table = None
        probe = kv.open(space, tokens, pages * size)
        fits = kv.has_room(probe, len(tokens), kv.promised([*running, *self.tables]))
        kv.close(probe, 0)
        if fits:
            table = kv.begin_restore(space, tokens, pages)
        if table is None:
            if slot and kv.states is not None:
                kv.states.settle_reserved(slot, None)
            return None
        self._number += 1
        order = RestoreOrder(
            self._number, space, tokens[: pages * size], table.num_shared,
            table.numbered(table.num_shared), () if table.window is None else table.window.numbered(table.num_shared),
            slot, read, until, imported=imported,
        )  # fmt: skip
        self._orders.append(order)
        reading = self.readings[order.number] = _Reading(order, table, priority, until)
        return reading
