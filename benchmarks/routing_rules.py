"""Rules of routing to compare: ours, and those that others publish."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Protocol

from asyncengine.cache_news import CacheNews
from asyncengine.integrations.placement.routing import Route, Router, RouteRequest, RoutingWeights


class RoutingRule(Protocol):
    """Chooses a replica for each request and hears of what becomes of it."""

    def add(self, replica: str) -> None: ...

    def remove(self, replica: str) -> None:
        """It is lost; none of its requests is heard of again."""
        ...

    def choose(self, pages: Sequence[int], now: float) -> tuple[str, object]:
        """The replica, and what `ended` wants to know of the choice."""
        ...

    def ended(self, replica: str, choice: object) -> None: ...

    def news(self, replica: str, news: CacheNews) -> None:
        """A replica's cache has published and evicted this."""
        ...


class PrefixAffine:
    """`asyncengine.integrations.placement.routing.Router`."""

    def __init__(self, seed: int, weights: RoutingWeights | None = None) -> None:
        self.router = Router(weights, seed=seed)
        self._routes: dict[str, dict[Route, None]] = {}

    def add(self, replica: str) -> None:
        self.router.add(replica)
        self._routes[replica] = {}

    def remove(self, replica: str) -> None:
        for route in self._routes.pop(replica):
            self.router.release(route)
        self.router.remove(replica)

    def choose(self, pages: Sequence[int], now: float) -> tuple[str, object]:
        route = self.router.assign(RouteRequest(pages))
        assert route is not None
        self._routes[route.replica][route] = None
        return route.replica, route

    def ended(self, replica: str, choice: object) -> None:
        assert isinstance(choice, Route)
        del self._routes[replica][choice]
        self.router.release(choice)

    def news(self, replica: str, news: CacheNews) -> None:
        self.router.update(replica, news)


class _Counting:
    """Knows how many requests each replica has."""

    def __init__(self, seed: int) -> None:
        self.loads: dict[str, int] = {}
        self.random = random.Random(seed)

    def add(self, replica: str) -> None:
        self.loads[replica] = 0

    def remove(self, replica: str) -> None:
        del self.loads[replica]

    def took(self, replica: str) -> tuple[str, object]:
        self.loads[replica] += 1
        return replica, None

    def ended(self, replica: str, choice: object) -> None:
        self.loads[replica] -= 1

    def news(self, replica: str, news: CacheNews) -> None:
        pass

    def two_choices(self, among: Sequence[str]) -> str:
        return min(self.random.choice(among), self.random.choice(among), key=lambda name: self.loads[name])


class RoundRobin(_Counting):
    """One after the other."""

    def choose(self, pages: Sequence[int], now: float) -> tuple[str, object]:
        replica = next(iter(self.loads))
        self.loads[replica] = self.loads.pop(replica)  # to the end of the line
        return self.took(replica)


class LeastLoaded(_Counting):
    """The replica with the fewest requests."""

    def choose(self, pages: Sequence[int], now: float) -> tuple[str, object]:
        return self.took(min(self.loads, key=lambda name: self.loads[name]))


class RayServePrefixAware(_Counting):
    """The published rule of Ray Serve LLM's `PrefixCacheAffinityRouter`.

    While the longest and the shortest queue differ by at most `imbalance` (its default: infinity), the replicas with
    the longest match take the request if it is at least 10 % of the prompt, else the replica with the smallest part of
    the tree; the power of two choices decides among several, and where the queues differ by more. The tree is made of
    the texts sent to each replica, cut from 400,000 to 360,000 characters every 10 s, the longest unused first.
    """

    PAGE_CHARS = 64
    """Characters of 16 tokens."""
    LONGEST, CUT_TO, PERIOD = 400_000, 360_000, 10.0

    def __init__(self, seed: int, imbalance: float = math.inf) -> None:
        super().__init__(seed)
        self._imbalance = imbalance
        self._sent: dict[str, dict[int, None]] = {}
        """Pages by replica, of the texts it was sent, the last used last."""
        self._cut_at = self.PERIOD

    def add(self, replica: str) -> None:
        super().add(replica)
        self._sent[replica] = {}

    def remove(self, replica: str) -> None:
        super().remove(replica)
        del self._sent[replica]

    def choose(self, pages: Sequence[int], now: float) -> tuple[str, object]:
        if now >= self._cut_at:
            self._cut(now)
        replica = self.two_choices(self._candidates(pages))
        sent = self._sent[replica]
        for page in reversed(pages):  # a prefix is used whenever what follows it is
            sent.pop(page, None)
            sent[page] = None
        return self.took(replica)

    def _candidates(self, pages: Sequence[int]) -> list[str]:
        if max(self.loads.values()) - min(self.loads.values()) > self._imbalance:
            return list(self.loads)
        alive, depth = list(self._sent), 0
        for page in pages:
            further = [name for name in alive if page in self._sent[name]]
            if not further:
                break
            alive, depth = further, depth + 1
        if depth >= 0.1 * len(pages):
            return alive
        smallest = min(len(sent) for sent in self._sent.values())
        return [name for name, sent in self._sent.items() if len(sent) == smallest]

    def _cut(self, now: float) -> None:
        self._cut_at = now + self.PERIOD
        for sent in self._sent.values():
            if len(sent) * self.PAGE_CHARS > self.LONGEST:
                while len(sent) * self.PAGE_CHARS > self.CUT_TO:
                    del sent[next(iter(sent))]
