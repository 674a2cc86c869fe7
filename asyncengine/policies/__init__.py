"""Scheduling policies. A new one is a file with a class that inherits from `Policy`, and its place in `POLICIES`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from asyncengine.checks import as_number
from asyncengine.errors import InvalidParameter

if TYPE_CHECKING:
    from asyncengine.scheduler.request import Request


class Policy:
    """A rule by which requests share an engine. A policy of one's own inherits from it and has a `name` and a `key`.

    Requests are there to be read: `spec` (its `options`, `params`, `prompt`, `max_total`), `tokens` (prompt and output
    so far), `ticket` (in order of arrival). Each engine works with a deep copy of the object that it is given. It must
    be deterministic, so it asks no clock (a request's age: tokens that `charge` counted since `arrive`), and an
    exception in it ends the engine. Whatever it says, a request passed over `max_passes` times goes before all that are
    not, and gives way last.
    """

    name: str
    key: Callable[[Request], Any]
    """Sort key of a waiting request, smallest first; arrival decides among equals."""
    dynamic = False
    """Keys change between steps: the queue is sorted anew, after `prepare`, whenever a request may start."""
    prefix_hints = False
    """`key` wants to know `request.prefix_hint`, the tokens of it that are cached. Needs `dynamic`."""

    def victim_key(self, request: Request) -> Any:
        """Sort key of a running request: the largest gives way first, of equals the last arrived."""
        return 0

    def preempts(self, request: Request, victim: Request) -> bool:
        """Whether waiting `request` takes the place of running `victim` if there is no other: a strict order."""
        return False

    def flow(self, request: Request) -> Hashable:
        """The line that it stands in: `max_passes` counts who overtakes it there. Separate lines are for a policy that
        itself lets none of them wait for ever."""
        return None

    def prepare(self, waiting: Iterable[Request]) -> None:
        """Keys of `waiting` will be asked for."""

    def arrive(self, request: Request) -> None:
        """`request` has come; before its first `key`. It does not come again after preemption."""

    def charge(self, request: Request, tokens: int) -> None:
        """A step that is launched computes `tokens` of its tokens, or as many guesses were right."""

    def leave(self, request: Request) -> None:
        """`request` has ended."""


def overrides(policy: Policy, name: str) -> bool:
    """Whether `policy` overrides the method `name`."""
    return getattr(type(policy), name, None) is not getattr(Policy, name)


def victim_rank(policy: Policy) -> Callable[[Request], Any]:
    """The order of running requests in which the last gives way first.

    Where `victim_key` is fixed the first is never a victim and runs to its end, so that preemption cannot go on for
    ever. Where it is not, admission leaves each request room to advance: between two preemptions one gets a token.
    """
    key = policy.victim_key
    return lambda request: (not request.overdue, 0 if request.overdue else key(request), request.ticket)


# Orders of the waiting queue that need no memory.


class FirstComeFirstServed(Policy):
    """Order of arrival."""

    name = "fcfs"

    def key(self, request: Request) -> int:
        return 0


class ByPriority(Policy):
    """Lower `priority` first, then arrival; a running request gives way to a more important one."""

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


# Fair shares among tenants, adapters or cache salts, however much one of them asks.

_MOST_IDLE = 4096
"""Flows without requests whose account is kept."""


class WeightedFair(Policy):
    """Tokens computed are shared among flows in proportion to their weights; within a flow, by arrival.

    Start-time fair queueing (Goyal, Vin and Cheng 1996) where costs are known afterwards (VTC; Sheng et al. 2024): each
    flow has an account of what was computed for it by weight, and the one that has least goes first. A flow that comes
    back after a pause starts at the least account of the active ones, the virtual time: idleness is no credit. Without
    memory for all, the flow that has most gives way.
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
        items = dict(weights or {}).items()
        self.terms = (by, {name: as_number("weights", weight, 0, 1e9, exclusive_low=True) for name, weight in items})
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
            self._idle.clear()  # no flow was active: old accounts mean nothing
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


_ALL: tuple[type[Policy], ...] = (FirstComeFirstServed, ByPriority, LongestPrefixMatch, ShortestRemaining, WeightedFair)
POLICIES = {policy.name: policy for policy in _ALL}
"""Policies by name, the choices of the setting `policy`."""


def as_policy(name: str, value: Any, choices: Collection[str] = POLICIES) -> str | Policy:
    """One of `choices`, or an object like `Policy`. Raises `InvalidParameter`, naming what it lacks of the protocol."""
    if isinstance(value, str) and value in choices:
        return value
    rule = f"must be one of {', '.join(map(repr, choices))}, or an object like asyncengine.Policy"
    if isinstance(value, str | int | type) or value is None:
        raise InvalidParameter(name, rule, value)
    protocol = [member for member in (*Policy.__annotations__, *vars(Policy)) if not member.startswith("_")]
    if missing := [member for member in protocol if not hasattr(value, member)]:
        raise InvalidParameter(name, f"{rule}; {type(value).__name__} lacks {', '.join(missing)}")
    if type(value).__hash__ is None:
        raise InvalidParameter(name, "must be hashable, as configurations are", value)
    return cast(Policy, value)


def start_policy(value: str | Policy) -> Policy:
    """The policy of one scheduler, its own."""
    return POLICIES[value]() if isinstance(value, str) else copy.deepcopy(value)
