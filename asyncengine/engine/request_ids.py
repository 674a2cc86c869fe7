"""Which requests a caller's request id stands for: tickets by id, and which of them have not ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from asyncengine.engine.delivery import Delivery, OutputStream
from asyncengine.engine.vector_window import VectorWindow


class RequestIds:
    """Tickets by request id, from any thread.

    An id may be used again, and stands for all its requests that have not ended.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._tickets: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def remember(self, request_id: str, streams: Sequence[OutputStream]) -> None:
        """Of a request that is about to be posted: `delivery` will open these."""
        expected = {stream.spec.ticket: stream for stream in streams}
        with self._lock:
            self._note(request_id, list(expected))
            self._delivery.expected.update(expected)

    def remember_window(self, request_id: str, window: VectorWindow) -> None:
        """The same of texts whose vectors are waited for together."""
        tickets = window.tickets
        with self._lock:
            self._note(request_id, tickets)
            self._delivery.windows.update(dict.fromkeys(tickets, window))

    def _note(self, request_id: str, tickets: list[int]) -> None:
        delivery = self._delivery
        if len(self._tickets) > 64 + 2 * (len(delivery.streams) + len(delivery.expected) + len(delivery.windows)):
            self._forget_ended()
        known = self._tickets.setdefault(request_id, [])
        if len(known) > 64 + 2 * len(tickets):  # many windows of one call
            known[:] = [ticket for ticket in known if self._alive(ticket)]
        known += tickets

    def unfinished(self, request_id: str) -> list[int]:
        """Tickets of its requests that have not ended."""
        with self._lock:
            return [ticket for ticket in self._tickets.get(request_id, ()) if self._alive(ticket)]

    def _forget_ended(self) -> None:
        """Ids of ended requests pile up; drop them now and then, so that each costs O(1) on average."""
        for request_id, tickets in list(self._tickets.items()):
            alive = [ticket for ticket in tickets if self._alive(ticket)]
            if alive:
                self._tickets[request_id] = alive
            else:
                del self._tickets[request_id]

    def _alive(self, ticket: int) -> bool:
        delivery = self._delivery
        return ticket in delivery.expected or ticket in delivery.streams or ticket in delivery.windows
