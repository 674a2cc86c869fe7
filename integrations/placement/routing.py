"""Routing of requests to replicas: where the prefix is cached, as long as that replica is not overloaded. Pure.

The ideas: SGLang's and Ray Serve LLM's prefix-aware routers (longest match while balanced, else power of two choices),
here fed by what the caches really published and evicted in place of a guess from the texts that were sent there;
bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018): no replica gets more than `bound` times the mean; the power of
two choices (Mitzenmacher 2001) for requests whose prefix no replica has.

Same calls, same seed: same choices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal, TypeVar, get_args

from asyncengine.cache_news import CacheNews
from asyncengine.checks import Settings, as_choice, number_in
from asyncengine.errors import InvalidParameter

T = TypeVar("T")

Role = Literal["both", "prefill", "decode"]
"""Work of a replica: "decode" takes requests, whose long prompts are computed by others; "prefill" computes those, and
takes requests only where nobody else is there; "both" does either, and computes the prompts of its own requests."""
ROLES: tuple[Role, ...] = get_args(Role)

MANY_SESSIONS = 65536
"""Sessions and adapters remembered; the one longest unused is forgotten first."""


class PrefixIndex:
    """Pages by replica: those that its cache has published, and those that requests on their way will leave there.

    A page's hash covers everything before it (`cache_news`), so the table stands for one trie of pages per
    replica: a prompt's cached prefix ends at the first of its hashes that the replica does not have. Replicas are bits
    of an integer, so that one walk along the prompt answers for all. Expected pages are counted: without them a burst
    of equal prompts would be spread over all replicas before the first page is published.
    """

    def __init__(self) -> None:
        self.cached: dict[int, int] = {}
        self.expected: dict[int, int] = {}
        """Bits of the replicas, by hash."""
        self._pages: dict[int, dict[int, None]] = {}
        """Pages that the replica's cache has, by its bit."""
        self._requests: dict[int, dict[int, int]] = {}
        """Number of requests that will leave a page at the replica, by its bit and by hash."""

    def add(self, bit: int) -> None:
        """Add a replica, named by an integer with one bit set, whose cache is empty."""
        self._pages[bit], self._requests[bit] = {}, {}

    def remove(self, bit: int) -> None:
        """Forget a replica, at which no request is expected any more."""
        for page in self._pages.pop(bit):
            _clear(self.cached, page, bit)
        del self._requests[bit]

    def num_pages(self, bit: int) -> int:
        return len(self._pages[bit])

    def update(self, bit: int, news: CacheNews) -> None:
        """Apply the pages that a replica's cache has added and removed."""
        pages = self._pages[bit]
        for page in list(pages) if news.whole else news.removed:
            if pages.pop(page, 0) is None:
                _clear(self.cached, page, bit)
        for page in news.added:
            pages[page] = None
            self.cached[page] = self.cached.get(page, 0) | bit

    def expect(self, bit: int, pages: Iterable[int]) -> None:
        """Note that a request with these pages is on its way to the replica."""
        requests = self._requests[bit]
        for page in pages:
            requests[page] = requests.get(page, 0) + 1
            self.expected[page] = self.expected.get(page, 0) | bit

    def settle(self, bit: int, pages: Iterable[int]) -> None:
        """Note that such a request has ended: from now on only the pages that the cache publishes count."""
        requests = self._requests[bit]
        for page in pages:
            requests[page] -= 1
            if not requests[page]:
                del requests[page]
                _clear(self.expected, page, bit)

    def match(self, pages: Sequence[int], *, expecting: bool = True) -> dict[int, int]:
        """Number of `pages`, from the first on, that each replica has, by its bit. Replicas with none are left out.
        `expecting`: pages that requests on their way will leave there count."""
        depths: dict[int, int] = {}
        cached, expected = self.cached, self.expected if expecting else {}
        alive = -1
        for depth, page in enumerate(pages):
            there = (cached.get(page, 0) | expected.get(page, 0)) & alive
            if alive not in (-1, there):
                _note(depths, alive & ~there, depth)
            alive = there
            if not alive:
                return depths
        if alive != -1:
            _note(depths, alive, len(pages))
        return depths


def _clear(table: dict[int, int], page: int, bit: int) -> None:
    left = table.get(page, 0) & ~bit
    if left:
        table[page] = left
    else:
        table.pop(page, None)


def _note(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        bit = bits & -bits
        depths[bit] = depth
        bits ^= bit


MAX_WEIGHT = 1e6
Weight = Annotated[float, number_in(0.0, MAX_WEIGHT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingWeights(Settings):
    """Weights of the router's rules. A replica's score for a request is

        prefix * (share of the prompt's pages it has) + adapter * (1 if it has used the adapter) \
+ session * (1 if the session's last request went there) - load * (its load / mean load)

    and the highest wins among those whose load, with the request, stays within `bound` times the mean, or at most
    `slack` above it (where a replica has two requests on average, three are no overload). The unit is a
    whole prompt: with `load` 0.1 a replica of twice the mean load must have 10 % more of the prompt to win. `prefix`
    saves computing the prompt, `adapter` saves copying weights to the device, `session` decides where prompts are
    shorter than a page. A request that no replica has `match` of, nor its adapter or session, is new: two replicas are
    drawn, and the less loaded one takes it. While a replica is `cold` (it has less than that share of the pages that
    replicas have on average) and has less than `warm` of the mean load, and that is a request or more, it takes what
    comes: its misses now are its hits later.

    Raises `InvalidParameter` for what is no number or out of range.
    """

    prefix: Weight = 1.0
    adapter: Weight = 0.2
    session: Weight = 0.1
    load: Weight = 0.1
    bound: Annotated[float, number_in(1.0, MAX_WEIGHT)] = 1.2
    slack: Weight = 2.0
    match: Weight = 0.1
    cold: Weight = 0.5
    warm: Weight = 0.5


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as the router knows it."""

    pages: Sequence[int] = ()
    """Hashes of its prompt's full pages, in order (`page_hashes`)."""
    adapter: str = ""
    """Digest of its adapter; "" for none."""
    session: str = ""
    """Requests of one session like to go where its last one went; "" for none."""
    load: float = 1.0
    """Load that it adds to its replica: its number of samples."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A request's assignment to a replica, from `assign` to `release`."""

    replica: str
    request: RouteRequest
    matched: int
    """Number of its pages that were expected to be there."""


@dataclass(slots=True, eq=False)
class _Replica:
    name: str
    bit: int
    role: Role = "both"
    load: float = 0.0
    adapters: dict[str, None] = field(default_factory=dict)
    closing: bool = False


class Router:
    """Assigns requests to replicas. O(pages of the prompt + replicas) each; holds no clock and starts nothing."""

    def __init__(self, weights: RoutingWeights | None = None, *, seed: int = 0) -> None:
        self.weights = weights or RoutingWeights()
        self.index = PrefixIndex()
        self._random = random.Random(seed)
        self._replicas: dict[str, _Replica] = {}
        self._sessions: dict[str, str] = {}

    # ---------------------------------------------------------------- replicas

    def add(self, name: str, role: Role = "both") -> None:
        """Add a replica, whose cache is empty. Raises `InvalidParameter` for a known name."""
        if name in self._replicas:
            raise InvalidParameter("replica", "has this name already", name)
        used = sum(replica.bit for replica in self._replicas.values())
        bit = ~used & (used + 1)  # the lowest that no replica has; bits are used again, so that masks stay short
        self.index.add(bit)
        self._replicas[name] = _Replica(name, bit, role)

    def close(self, name: str) -> None:
        """Give a replica no more requests; those it has go on."""
        self._replicas[name].closing = True

    def remove(self, name: str) -> None:
        """Forget a replica, all of whose requests have been released."""
        replica = self._replicas[name]
        if replica.load > 1e-9:  # fractional loads may not add up to exactly 0
            raise InvalidParameter("replica", f"{replica.load:g} requests have not been released", name)
        del self._replicas[name]
        self.index.remove(replica.bit)

    def update(self, name: str, news: CacheNews) -> None:
        """Apply the pages that a replica's prefix cache has added and removed."""
        self.index.update(self._replicas[name].bit, news)

    def set_role(self, name: str, role: Role) -> None:
        """Give a replica another role; requests under way stay where they are. Raises `InvalidParameter` for an unknown
        name or role, and where no replica would be left that takes requests."""
        as_choice("replica", name, self._replicas)
        as_choice("role", role, ROLES)
        rest = (replica for replica in self._open_ones() if replica.name != name)
        if role == "prefill" and all(replica.role == "prefill" for replica in rest):
            raise InvalidParameter("role", 'must be "decode" or "both": no other replica takes requests', role)
        self._replicas[name].role = role

    def roles(self) -> dict[str, Role]:
        """Role of every replica. From any thread."""
        return {replica.name: replica.role for replica in list(self._replicas.values())}

    def loads(self) -> dict[str, float]:
        """Load of every replica, closing ones too. From any thread."""
        return {replica.name: replica.load for replica in list(self._replicas.values())}

    # ---------------------------------------------------------------- requests

    def assign(self, request: RouteRequest) -> Route | None:
        """Choose the replica that takes `request`; its load grows. None if there is no replica. Those with the role
        "prefill" are chosen only if there are no others."""
        open_ones = self._open_ones()
        return self._assign([replica for replica in open_ones if replica.role != "prefill"] or open_ones, request)

    def assign_prefill(self, route: Route, least: int, among: Collection[str]) -> Route | None:
        """Choose the replica, of those named `among`, that computes the prompt for the one that has the request; its
        load grows by one. None if the latter is to compute it itself: its role is not "decode", it lacks fewer than
        `least` of the pages, or there is no other replica."""
        request, taker = route.request, self._replicas[route.replica]
        if taker.role != "decode" or len(request.pages) < least:
            return None
        # expected pages do not count: they are still to be computed, as this request's are
        cached = self.index.match(request.pages, expecting=False).get(taker.bit, 0)
        candidates = [e for e in self._open_ones() if e.role != "decode" and e is not taker and e.name in among]
        if len(request.pages) - cached < least:
            return None
        return self._assign(candidates, RouteRequest(request.pages, request.adapter))

    def _open_ones(self) -> list[_Replica]:
        return [replica for replica in self._replicas.values() if not replica.closing]

    def _assign(self, replicas: list[_Replica], request: RouteRequest) -> Route | None:
        if not replicas:
            return None
        depths = self.index.match(request.pages)
        chosen = self._choose(replicas, request, depths)
        chosen.load += request.load
        if request.adapter:
            _remember(chosen.adapters, request.adapter, None)
        if request.session:
            _remember(self._sessions, request.session, chosen.name)
        self.index.expect(chosen.bit, request.pages)
        return Route(chosen.name, request, depths.get(chosen.bit, 0))

    def holders(self, route: Route) -> dict[str, int]:
        """Number of the request's pages, from the first on, that other replicas have now, by name. Only those that have
        more than its own replica is expected to have are listed, the one with most of them first."""
        if len(self._replicas) < 2 or route.matched >= len(route.request.pages):
            return {}
        depths = self.index.match(route.request.pages, expecting=False)
        depth_of = {r.name: depths.get(r.bit, 0) for r in self._replicas.values() if r.name != route.replica}
        more = [name for name, depth in depth_of.items() if depth > route.matched]
        return {name: depth_of[name] for name in sorted(more, key=lambda name: -depth_of[name])}

    def release(self, route: Route) -> None:
        """Take a request from its replica: it has ended, or goes elsewhere. To be called once for each route."""
        replica = self._replicas[route.replica]
        replica.load -= route.request.load
        self.index.settle(replica.bit, route.request.pages)

    def _choose(self, replicas: list[_Replica], request: RouteRequest, depths: dict[int, int]) -> _Replica:
        weights, total = self.weights, sum(replica.load for replica in replicas)
        mean = (total + request.load) / len(replicas)
        # a rounding error of the product must not raise the bound by one request
        most = max(math.ceil(weights.bound * mean - 1e-9), mean + weights.slack)
        allowed = [replica for replica in replicas if replica.load + request.load <= most]
        if not allowed:  # one request of many samples may exceed any bound
            allowed = [min(replicas, key=attrgetter("load"))]
        cold = self._cold(replicas, total / len(replicas))
        if cold is not None:
            return cold
        size, last = len(request.pages) or 1, self._sessions.get(request.session)
        best, best_score, familiar = None, -math.inf, False
        for replica in allowed:
            share = depths.get(replica.bit, 0) / size
            has_adapter = bool(request.adapter) and request.adapter in replica.adapters
            familiar = familiar or has_adapter or share >= weights.match or replica.name == last
            score = weights.prefix * share + weights.adapter * has_adapter + weights.session * (replica.name == last)
            score -= weights.load * replica.load / mean
            if score > best_score:
                best, best_score = replica, score
        if familiar and best is not None:
            return best
        return min(self._random.sample(allowed, min(2, len(allowed))), key=attrgetter("load"))

    def _cold(self, replicas: list[_Replica], mean: float) -> _Replica | None:
        """The least loaded replica, if its cache is to be filled first (`RoutingWeights`); None if there is none."""
        quietest = min(replicas, key=attrgetter("load"))
        if mean < 1 or quietest.load >= self.weights.warm * mean:
            return None
        pages = sum(self.index.num_pages(replica.bit) for replica in replicas) / len(replicas)
        return quietest if self.index.num_pages(quietest.bit) < self.weights.cold * pages else None


def _remember(table: dict[str, T], key: str, value: T) -> None:
    """Add an entry as the last. The first is forgotten where there are too many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MANY_SESSIONS:
        del table[next(iter(table))]
