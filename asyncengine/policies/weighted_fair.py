"""Fair shares among tenants, adapters or cache salts, however much one of them asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from asyncengine.checks import as_number
from asyncengine.errors import InvalidParameter
from asyncengine.policies.base import Policy

if TYPE_CHECKING:
    from asyncengine.scheduler.request import Request

_MOST_IDLE = 4096
"""Flows without requests whose account is kept."""


class WeightedFair(Policy):
    """Tokens computed are shared among flows in proportion to their weights; within a flow, by arrival.

    Start-time fair queueing (Goyal, Vin and Cheng 1996) where costs are known afterwards (VTC; Sheng et al. 2024): each
    flow has an account of what was computed for it by weight, and the one that has least goes first. Who comes after a
    pause starts at the least of those that are active, the virtual time: idleness is no credit. Without memory for all,
    the flow that has most gives way.
    """

    name = "weighted-fair"
    dynamic = True

    def __init__(self, weights: Mapping[str, float] | None = None, *, by: str = "tenant") -> None:
        """`by`: the option of requests that names their flow, "tenant", "adapter" or "cache_salt"; those without it are
        the flow "". `weights`: of flows by name; 1 for all others. Raises `InvalidParameter`."""
        if by not in ("tenant", "adapter", "cache_salt"):
            raise InvalidParameter("by", "must be 'tenant', 'adapter' or 'cache_salt'", by)
        if weights is not None and not (isinstance(weights, Mapping) and all(isinstance(n, str) for n in weights)):
            raise InvalidParameter("weights", "must map names to numbers", weights)
        given = dict(weights or {}).items()
        self.terms = (by, {name: as_number("weights", each, 0, 1e9, exclusive_low=True) for name, each in given})
        self._requests: Counter[str] = Counter()
        self._accounts: dict[str, float] = {}
        """Accounts of flows that have requests."""
        self._idle: dict[str, float] = {}
        """Accounts of flows that have none now, the longest idle first."""
        self._tags: dict[int, float] = {}
        """Tags by ticket of a waiting request: its flow's account with the prompts of those before it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightedFair) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash((self.terms[0], *sorted(self.terms[1].items())))

    def flow(self, request: Request) -> str:
        return getattr(request.spec.options, self.terms[0]) or ""

    def key(self, request: Request) -> float:
        return self._tags[request.ticket]

    def victim_key(self, request: Request) -> float:
        return self._accounts[self.flow(request)]

    def prepare(self, waiting: Iterable[Request]) -> None:
        ahead, self._tags = dict(self._accounts), {}
        for request in sorted(waiting, key=lambda each: each.ticket):
            flow = self.flow(request)
            self._tags[request.ticket] = ahead[flow]
            ahead[flow] += len(request.tokens) / self.terms[1].get(flow, 1.0)

    def arrive(self, request: Request) -> None:
        flow = self.flow(request)
        if not self._accounts:
            self._idle.clear()  # nobody competed
        if flow not in self._accounts:
            virtual_time = min(self._accounts.values(), default=0.0)
            self._accounts[flow] = max(virtual_time, self._idle.pop(flow, 0.0))
        self._requests[flow] += 1

    def charge(self, request: Request, tokens: int) -> None:
        flow = self.flow(request)
        self._accounts[flow] += tokens / self.terms[1].get(flow, 1.0)

    def leave(self, request: Request) -> None:
        flow = self.flow(request)
        self._requests[flow] -= 1
        if not self._requests[flow]:
            del self._requests[flow]
            self._idle[flow] = self._accounts.pop(flow)
            if len(self._idle) > _MOST_IDLE:
                del self._idle[next(iter(self._idle))]
