"""Who is preempted when memory runs out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncengine.protocols import Policy
from asyncengine.scheduler.request import Request


def choose_victim(running: Iterable[Request], policy: Policy) -> Request:
    """The running request that loses its pages.

    Under "priority" the largest (priority, arrival), else the last arrived; one that was passed over too often is
    taken last. The rule is a fixed total order, so its smallest element is never a victim, runs to its end, and
    preemption cannot go on for ever.
    """

    def key(request: Request) -> Any:
        rank = request.priority if policy.name == "priority" and not request.overdue else 0
        return (not request.overdue, rank, request.ticket)

    return max(running, key=key)
