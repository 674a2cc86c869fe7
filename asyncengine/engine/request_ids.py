"""The requests that a caller's request id stands for: tickets by id, and those of them that have not ended."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from asyncengine.engine.delivery import Delivery, Receiver


class RequestIds:
    """Tickets by request id, from any thread.

    An id may be used again, and stands for all its requests that have not ended.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._tickets: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def remember(self, request_id: str, receivers: Mapping[int, Receiver]) -> None:
        """Note the tickets of requests that are about to be posted, and have `delivery` expect them."""
        delivery = self._delivery
        with self._lock:
            if len(self._tickets) > 64 + 2 * (len(delivery.streams) + len(delivery.expected)):
                self._forget_ended()
            known = self._tickets.setdefault(request_id, [])
            if len(known) > 64 + 2 * len(receivers):  # many batches of one call
                known[:] = [ticket for ticket in known if self._alive(ticket)]
            known += receivers
            delivery.expected.update(receivers)

    def unfinished(self, request_id: str) -> list[int]:
        """Tickets of the id's requests that have not ended."""
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
        return ticket in self._delivery.expected or ticket in self._delivery.streams
