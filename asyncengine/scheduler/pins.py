"""Pinned prefixes: pages that stay in the cache although no request uses them, as tables without a request.

A prompt is pinned when the request that computed it ends, before anybody else could take its pages. A pin gives way
where a request could not run otherwise: what a user wants computed goes before what might be wanted again.
"""

from __future__ import annotations

import logging

from asyncengine.kvcache import KVCache, PageTable
from asyncengine.kvcache.radix_tree import Namespace
from asyncengine.kvcache.states import Snapshot
from asyncengine.scheduler.request import Request

logger = logging.getLogger("asyncengine")


class Pins:
    """Prompts to be pinned, and tables of those that are, by the ticket of the request that computed them."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self.wanted: set[int] = set()
        """Tickets of requests whose prompts are to be pinned when they have ended."""
        self._held: dict[int, tuple[PageTable, Snapshot | None]] = {}

    @property
    def tables(self) -> list[PageTable]:
        return [table for table, _ in self._held.values()]

    def want(self, ticket: int) -> None:
        """Pin the prompt of `ticket` when it has ended."""
        self.wanted.add(ticket)

    def hold(self, request: Request, namespace: Namespace) -> None:
        """Pin the prompt of `request`, which has ended, as far as its pages are in the tree."""
        self.wanted.remove(request.ticket)
        table = self._kv.open(namespace, request.spec.prompt, len(request.spec.prompt))
        states = self._kv.states
        snapshot = None if states is None else states.keep(table.node)
        self._held[request.ticket] = table, snapshot

    def release(self, ticket: int) -> None:
        """Unpin the prompt of `ticket`. Does nothing where it is not pinned."""
        self.wanted.discard(ticket)
        if ticket in self._held:
            table, snapshot = self._held.pop(ticket)
            if self._kv.states is not None:
                self._kv.states.keep_no_more(snapshot)
            self._kv.close(table, 0)  # steps in flight name its pages by locks of their own

    def drop(self, why: str) -> bool:
        """Unpin all there are, with a warning that says `why`. False: there are none."""
        if not self._held:
            return False
        logger.warning("%d pinned prefixes are not pinned any more: %s", len(self._held), why)
        for ticket in list(self._held):
            self.release(ticket)
        return True
