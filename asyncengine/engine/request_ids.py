"""Which requests a caller's request id stands for: tickets by label, and which of them have not ended."""

from __future__ import annotations

import threading

from asyncengine.engine.delivery import Delivery


class Labels:
    """From any thread. A label may be used again, and stands for all its requests that have not ended."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._tickets: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def remember(self, label: str, tickets: list[int]) -> None:
        """Of requests that are about to be posted."""
        delivery = self._delivery
        with self._lock:
            if len(self._tickets) > 64 + 2 * (len(delivery.streams) + len(delivery.expected)):
                self._forget_ended()
            delivery.expected.update(dict.fromkeys(tickets))
            self._tickets.setdefault(label, []).extend(tickets)

    def unfinished(self, label: str) -> list[int]:
        """Tickets of its requests that have not ended."""
        with self._lock:
            return [ticket for ticket in self._tickets.get(label, ()) if self._alive(ticket)]

    def _forget_ended(self) -> None:
        """Labels of ended requests pile up; drop them now and then, so that each costs O(1) on average."""
        for label, tickets in list(self._tickets.items()):
            alive = [ticket for ticket in tickets if self._alive(ticket)]
            if alive:
                self._tickets[label] = alive
            else:
                del self._tickets[label]

    def _alive(self, ticket: int) -> bool:
        return ticket in self._delivery.expected or ticket in self._delivery.streams
