"""Orders of the waiting queue that need no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncengine.policies.base import Policy

if TYPE_CHECKING:
    from asyncengine.scheduler.request import Request


class FirstComeFirstServed(Policy):
    """Order of arrival."""

    name = "fcfs"

    def key(self, request: Request) -> int:
        return 0


class ByPriority(Policy):
    """Lower `priority` first, then arrival; who runs gives way to who is more important."""

    name = "priority"

    def key(self, request: Request) -> int:
        return request.spec.options.priority

    victim_key = key

    def preempts(self, request: Request, victim: Request) -> bool:
        return self.key(request) < self.key(victim)


class LongestPrefixMatch(Policy):
    """Longest cached prefix first, then arrival: requests that share a prefix run while it is cached (SGLang's lpm).

    Beyond `admission_lookahead` waiting requests the hint of those behind stays 0, which is arrival order.
    """

    name = "longest-prefix-match"
    dynamic = True
    prefix_hints = True

    def key(self, request: Request) -> int:
        return -request.prefix_hint


class ShortestRemaining(Policy):
    """Fewest tokens to compute and generate first, counting `max_tokens` as if it were used up.

    A waiting request has nothing computed (a preempted one computes again), so what remains is all of it.
    """

    name = "shortest-remaining"

    def key(self, request: Request) -> int:
        return request.spec.max_total
