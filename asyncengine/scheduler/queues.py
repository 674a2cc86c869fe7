"""Requests that are not running, in order. No sets: the order of everything iterated is part of the behaviour."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from asyncengine.policies import Policy
from asyncengine.scheduler.request import Request


class WaitingQueue:
    """Waiting requests in the policy's order, overdue ones first.

    A static policy keeps the list sorted on insertion; a dynamic one sorts when asked for the order.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._requests: list[Request] = []

    def _key(self, request: Request) -> Any:
        return (not request.overdue, 0 if request.overdue else self._policy.key(request), request.ticket)

    def add(self, request: Request) -> None:
        if self._policy.dynamic or not self._requests or self._key(self._requests[-1]) < self._key(request):
            self._requests.append(request)  # of a static policy, too: nearly everybody goes to the end
        else:
            insort(self._requests, request, key=self._key)

    def remove(self, request: Request) -> None:
        if self._policy.dynamic:
            self._requests.remove(request)
            return
        if self._requests and self._requests[0] is request:
            del self._requests[0]
            return
        index = bisect_left(self._requests, self._key(request), key=self._key)
        if self._requests[index] is not request:
            raise ValueError(f"{request} is not where its key says")
        del self._requests[index]

    @property
    def first(self) -> Request | None:
        """The first to be admitted, by a static policy."""
        return self._requests[0] if self._requests else None

    def in_order(self) -> list[Request]:
        """A snapshot, first to be admitted first."""
        if self._policy.dynamic:
            self._requests.sort(key=self._key)
        return list(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class Deadlines:
    """When the next request times out. Most requests have no deadline and cost nothing here.

    Deadlines only ever move later (a token restarts the inter-token clock), so the earliest one seen at the last scan
    is a safe time to scan again.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        """Requests that have a deadline, by ticket."""
        self._scan_at = _NEVER

    def add(self, request: Request) -> None:
        spec = request.spec
        if spec.deadline is None and spec.waiting_deadline is None and spec.inter_token_timeout is None:
            return
        self.requests[request.ticket] = request
        # An inter-token limit starts counting with the first token: unknown yet, so never later than from now.
        first = spec.inter_token_timeout
        self._scan_at = min(self._scan_at, _due(request), _NEVER if first is None else spec.arrival + first)

    def discard(self, request: Request) -> None:
        self.requests.pop(request.ticket, None)

    def next(self) -> float:
        """No request is too late before this clock reading."""
        return self._scan_at if self.requests else _NEVER

    def expired(self, now: float) -> list[Request]:
        """Requests that are too late at `now`, in order of arrival."""
        if now < self._scan_at:
            return []
        late: list[Request] = []
        self._scan_at = _NEVER
        for request in self.requests.values():
            due = _due(request)
            if due <= now:
                late.append(request)
            else:
                gap = request.spec.inter_token_timeout  # before its first token it has one from now on
                self._scan_at = min(self._scan_at, due, _NEVER if gap is None else now + gap)
        return late


_NEVER = float("inf")


def _due(request: Request) -> float:
    """Earliest clock reading at which `request` is too late, as things stand."""
    spec = request.spec
    due = _NEVER if spec.deadline is None else spec.deadline
    if spec.waiting_deadline is not None and request.first_step_at is None:
        due = min(due, spec.waiting_deadline)
    if spec.inter_token_timeout is not None and request.num_output and not request.suspended:
        due = min(due, request.last_token_at + spec.inter_token_timeout)
    return due
