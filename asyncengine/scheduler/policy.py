"""In what order waiting requests are admitted, one small object per rule, and who is preempted when memory runs out.

Whatever the rule, a request passed over `max_passes` times goes before all that are not (aging), so each of these
has bounded waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from asyncengine.errors import InvalidParameter
from asyncengine.scheduler.request import Request


class Policy(Protocol):
    """Order of the waiting queue. Small, stateless objects."""

    name: str
    dynamic: bool
    """True: keys change between steps, the queue is sorted anew each time."""

    def key(self, request: Any) -> Any:
        """Sort key, smallest first. Must be a total order: end it with the request's ticket."""
        ...


class FirstComeFirstServed:
    """By arrival."""

    name = "fcfs"
    dynamic = False

    def key(self, request: Request) -> Any:
        return request.ticket


class ByPriority:
    """Lower `priority` first, then arrival."""

    name = "priority"
    dynamic = False

    def key(self, request: Request) -> Any:
        return (request.spec.options.priority, request.ticket)


class LongestPrefixMatch:
    """Longest cached prefix first, then arrival: requests that share a prefix run while it is cached (SGLang's lpm).

    The scheduler refreshes `prefix_hint` before sorting; beyond `admission_lookahead` waiting requests the hint of
    those behind stays 0, which is arrival order.
    """

    name = "longest-prefix-match"
    dynamic = True

    def key(self, request: Request) -> Any:
        return (-request.prefix_hint, request.ticket)


class ShortestRemaining:
    """Fewest tokens to compute and generate first, counting `max_tokens` as if it were used up.

    A waiting request has nothing computed (a preempted one computes again), so what remains is all of it.
    """

    name = "shortest-remaining"
    dynamic = False

    def key(self, request: Request) -> Any:
        return (request.spec.max_total, request.ticket)


_POLICIES = (FirstComeFirstServed, ByPriority, LongestPrefixMatch, ShortestRemaining)


def scheduling_policy(name: str) -> Policy:
    for policy in _POLICIES:
        if policy.name == name:
            return policy()
    raise InvalidParameter("policy", "must be one of " + ", ".join(p.name for p in _POLICIES), name)


def choose_victim(running: Iterable[Request], policy: Policy) -> Request:
    """The running request that loses its pages.

    Under "priority" the largest (priority, arrival), else the last arrived; one that was passed over too often is
    taken last. The rule is a fixed total order, so its smallest element is never a victim, runs to its end, and
    preemption cannot go on for ever.
    """

    def key(request: Request) -> Any:
        rank = request.spec.options.priority if policy.name == "priority" and not request.overdue else 0
        return (not request.overdue, rank, request.ticket)

    return max(running, key=key)
