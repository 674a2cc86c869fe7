"""The places besides memory that prefixes come from: the durable cache, peers, and files that are imported."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import anyio
import anyio.to_thread

from asyncengine.engine.clock import Clock
from asyncengine.engine.peers import PeerPrefixes
from asyncengine.engine.prefix_store import PrefixStore
from asyncengine.scheduler import Scheduler
from asyncengine.scheduler.messages import Message, PrefixFound, PrefixLoaded
from asyncengine.scheduler.restores import RestoreOrder
from asyncengine.step import Batch

LAST_WRITES = 5.0
"""Seconds that an engine waits for its prefix cache to be written when it closes or falls asleep, at most."""


class PrefixSources:
    """Looks up what requests begin with, and has it read. Every method is called on the engine's loop."""

    def __init__(
        self, scheduler: Scheduler, clock: Clock, store: PrefixStore | None, apply: Callable[[Message], None],
        post: Callable[[Message], object],
    ) -> None:  # fmt: skip
        """`apply` and `post` hand a message to the engine at once, or from any thread."""
        self._scheduler, self._clock, self._apply, self._post = scheduler, clock, apply, post
        self.store = store
        self.peers: PeerPrefixes | None = None
        """Other engines that may have what a request begins with (`share`)."""
        self.imports: dict[int, Future[RestoreOrder]] = {}
        """Callers that wait for the answer to an `ImportPrefix`, by its number."""
        self.updated = False
        """The model has other weights than those that were loaded."""

    def share(self, peers: PeerPrefixes) -> None:
        """Ask `peers` for prefixes from now on."""
        self.peers = peers
        self._scheduler.restores.enabled = True

    def turn(self) -> None:
        """Look up what requests want, between two steps, and start what is to be read."""
        restores = self._scheduler.restores
        if restores.enabled:
            self._look_up()
        for order in restores.take_orders():
            reader = self.store if order.source is None else self.peers
            if order.imported:
                order.cancelled |= self.updated  # what other weights computed
                self.imports.pop(order.imported).set_result(order)
            elif reader is not None:
                reader.load(order, self._loaded)

    def _look_up(self) -> None:
        """Look on the disk, or ask a peer, where that is worth it."""
        restores, kv = self._scheduler.restores, self._scheduler.kv
        near = None if kv.windows is None or kv.windows.lookback is None else kv.windows.lookback.first
        for request, namespace, limit, cached in restores.take_wanted():
            pages, patience, peer = 0, 0.0, request.spec.peer
            if self.store is not None:
                where = namespace, request.tokens, limit, cached
                pages, patience = self.store.find(*where, near, kv.states is not None)
            found = PrefixFound(request.ticket, pages, self._clock.now() + patience)
            if self.peers is None or peer is None or peer.pages <= max(pages, cached // kv.page_size):
                self._apply(found)
            else:
                self.peers.ask(peer, namespace, request.tokens[:limit], cached, found, self._post)
        self._save()

    def _loaded(self, number: int, pages: int, state: bool) -> None:
        """The answer of the store or of a peer, from any thread."""
        self._post(PrefixLoaded(number, pages, state))

    def _save(self) -> None:
        if self.store is not None:
            self.store.save(self._scheduler.kv.take_unsaved())

    def saw(self, batch: Batch, seconds: float) -> None:
        """A step took so long."""
        if self.peers is not None:
            self.peers.saw(batch, seconds)

    def forget(self) -> None:
        """The model has other weights from now on."""
        self.updated = True
        for source in (self.store, self.peers):
            if source is not None:
                source.forget()

    async def flush(self) -> None:
        """Wait until all that was computed is stored."""
        self._save()
        if self.store is not None:
            await anyio.to_thread.run_sync(self.store.flush, LAST_WRITES)

    def close(self) -> None:
        """Ask and read no more; last writes go on until `join`. Idempotent."""
        for number in list(self.imports):
            self.imports.pop(number).cancel()
        if self.peers is not None:
            self.peers.close()
        self._save()
        if self.store is not None:
            self.store.close_soon()

    async def join(self) -> None:
        """Wait for the last writes, also when cancelled."""
        if self.store is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.store.join, LAST_WRITES)
