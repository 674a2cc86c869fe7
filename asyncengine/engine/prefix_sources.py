"""The places besides memory that prefixes come from: tiers of the cache, asked in turn, and files that are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread

from asyncengine.engine.clock import Clock
from asyncengine.kvcache import KVCache
from asyncengine.kvcache.saving import Unsaved
from asyncengine.scheduler import Scheduler
from asyncengine.scheduler.messages import Message, PrefixFound, PrefixLoaded
from asyncengine.scheduler.restores import RestoreOrder, Wanted
from asyncengine.step import Batch

T = TypeVar("T")

LAST_WRITES = 5.0
"""Seconds that an engine waits for its prefix cache to be written when it closes or falls asleep, at most."""

Loaded = Callable[[PrefixLoaded], object]
"""Takes the end of a reading, from any thread."""


class Hit(NamedTuple):
    """Pages that a source fills sooner than they are computed."""

    pages: int = 0
    """The first so many of a request, those in the cache included; 0: none."""
    patience: float = 0.0
    """Seconds to wait for them, at most."""
    read: Callable[[RestoreOrder, Loaded], None] | None = None
    """Fills pages of an order, and calls `Loaded` in any case but the engine's end."""


def batches_of(items: Sequence[T], nbytes: Callable[[T], int], most: int) -> Iterator[Sequence[T]]:
    """`items` in order, in batches of `most` bytes at most, but of one item at least."""
    begun = total = 0
    for number, item in enumerate(items):
        total += nbytes(item)
        if total > most and number > begun:
            yield items[begun:number]
            begun, total = number, nbytes(item)
    if items[begun:]:
        yield items[begun:]


class Source:
    """A tier of the cache, which overrides what concerns it. Called on the engine's loop, but for `flush`."""

    def attach(self, kv: KVCache) -> None:
        """Called once, before all other methods. A source that stores pages sets `KVCache.saves`, whence `save`."""

    def find(self, wanted: Wanted, best: Hit, answer: Callable[[Hit], None]) -> None:
        """Call `answer`, at once or later, with more pages than the `best` of the sources before, or with that."""
        answer(best)

    def save(self, notes: list[Unsaved]) -> None:
        """Copy the noted pages, now or later; a copy whose note `is_intact` afterwards is whole. A page whose note is
        not intact now was evicted, and is overwritten after this call."""

    def saw(self, batch: Batch, seconds: float) -> None:
        """A step took so long."""

    def forget(self) -> None:
        """Store and find no more pages: the model has new weights, whose identity is unknown."""

    def flush(self, patience: float) -> None:
        """Wait up to `patience` seconds for what was handed over to be written and, once closed, for its threads."""

    def close(self) -> None:
        """Find and read no more; last writes go on. From any thread; idempotent."""


class PrefixSources:
    """Looks up what requests begin with, and has it read. Every method is called on the engine's loop."""

    def __init__(
        self, scheduler: Scheduler, clock: Clock, apply: Callable[[Message], None], post: Callable[[Message], object]
    ) -> None:
        """`apply` and `post` hand a message to the engine at once, or from any thread."""
        self._scheduler, self._clock, self._apply, self._post = scheduler, clock, apply, post
        self.tiers: list[Source] = []
        """Sources in the order in which they are asked (`add`)."""
        self._looking = False
        self.imports: dict[int, Future[RestoreOrder]] = {}
        """Callers that wait for the answer to an `ImportPrefix`, by its number."""
        self.updated = False
        """The model has other weights than those that were loaded."""

    def add(self, source: Source) -> None:
        """Ask `source` from now on, after those before it."""
        source.attach(self._scheduler.kv)
        self.tiers.append(source)
        self._scheduler.restores.enabled = self._scheduler.kv.prefix_caching

    def turn(self) -> None:
        """Look up the prefixes of new requests, between two steps, and start the readings that were ordered."""
        if self.tiers:
            self._looking = True
            for wanted in self._scheduler.restores.take_wanted():
                self._ask(iter(self.tiers), wanted, Hit())
            self._looking = False
            self.save()
        for order in self._scheduler.restores.take_orders():
            if order.read is not None:
                order.read(order, self._post)
            else:
                order.cancelled |= self.updated  # what other weights computed
                self.imports.pop(order.imported).set_result(order)

    def _ask(self, sources: Iterator[Source], wanted: Wanted, best: Hit) -> None:
        """Ask one source after another, each when the one before has answered."""
        source = next(sources, None)
        if source is not None:
            source.find(wanted, best, lambda hit: self._ask(sources, wanted, hit))
            return
        tell = self._apply if self._looking else self._post
        tell(PrefixFound(wanted.request.ticket, best.pages, self._clock.now() + best.patience, best.read))

    def save(self, rest: bool = False) -> None:
        """Give the noted pages to the sources: after `schedule`, and before its step overwrites those that it evicted.
        `rest`: all cached pages are about to go."""
        saves = self._scheduler.kv.saves
        notes = [] if saves is None else saves.take(rest)
        for source in self.tiers:
            source.save(notes)

    def saw(self, batch: Batch, seconds: float) -> None:
        """A step took so long."""
        for source in self.tiers:
            source.saw(batch, seconds)

    def forget(self) -> None:
        """The model has other weights from now on."""
        self.updated = True
        for source in self.tiers:
            source.forget()

    async def flush(self) -> None:
        """Wait until all that was computed is stored and, once closed, until nothing runs; also when cancelled."""
        self.save(rest=True)
        for source in self.tiers:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(source.flush, LAST_WRITES)

    def close(self) -> None:
        """Ask and read no more; last writes go on. Idempotent."""
        for number in list(self.imports):
            self.imports.pop(number).cancel()
        self.save(rest=True)
        for source in self.tiers:
            source.close()
