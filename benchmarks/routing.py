"""Routing simulated: how much of the prompts is found in the caches, and how even the load is, under several rules.

    python -m benchmarks.routing [--replicas 64 --requests 40000 --json]

Every replica has a prefix cache of the engine's own kind (`KVCache`, one token standing for a page), and its news
reaches the rule a moment late. Prompts are documents of Zipf-distributed popularity with a question of their own
behind; documents come and go, and replicas are lost and replaced by empty ones. What is found is compared with one
replica of endless memory that is never lost.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncengine.cache_news import page_hashes
from asyncengine.kvcache import KVCache, PageTable
from asyncengine.kvcache.cache_log import CacheLog
from benchmarks.routing_rules import LeastLoaded, PrefixAffine, RayServePrefixAware, RoundRobin, RoutingRule

RULES: dict[str, Callable[[int], RoutingRule]] = {
    "prefix-affine (ours)": PrefixAffine,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "Ray Serve LLM (default)": RayServePrefixAware,
    "Ray Serve LLM (imbalance 10)": lambda seed: RayServePrefixAware(seed, 10.0),
}
NAMESPACE = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic that is simulated. Times in seconds, lengths in pages of 16 tokens."""

    replicas: int = 64
    requests: int = 40_000
    load: float = 16.0
    """Requests that a replica has at once, on average."""
    documents: int = 2000
    zipf: float = 1.0
    """The k-th most popular document is asked about in proportion to k ** -zipf."""
    document_pages: tuple[int, int] = (16, 64)
    question_pages: tuple[int, int] = (1, 4)
    output_seconds: float = 3.0
    """Duration of a request's answer, on average (exponentially distributed)."""
    page_seconds: float = 0.005
    """To compute a page that is not cached."""
    capacity: int = 8192
    """Pages of a replica's cache."""
    news_period: float = 0.1
    document_life: float = 0.05
    """New documents a second, each in the place of another: any of them."""
    loss_period: float = 20.0
    """A replica is lost this often, with all it has, and an empty one takes its place at once."""
    warm_up: float = 0.2
    """Share of the requests that are not counted."""
    seed: int = 0


@dataclass(slots=True)
class RoutingResult:
    """Figures of a rule."""

    rule: str
    hit_rate: float
    """Share of the prompts' pages that was found."""
    endless: float
    """The share that one replica of endless memory would have found."""
    mean_ratio: float
    """Greatest load over mean load, over all arrivals: on average, and what 99 % of the arrivals stay below."""
    p99_ratio: float

    @property
    def share(self) -> float:
        return self.hit_rate / self.endless if self.endless else 1.0


@dataclass(slots=True, eq=False)
class _Cache:
    """A replica."""

    name: str
    kv: KVCache
    log: CacheLog
    load: int = 0
    alive: bool = True


@dataclass(slots=True)
class _Sums:
    pages: int = 0
    found: int = 0
    endless: int = 0
    ratios: list[float] = field(default_factory=list)


class _Simulation:
    def __init__(self, rule: RoutingRule, traffic: Traffic) -> None:
        self._rule, self._traffic = rule, traffic
        self._random = random.Random(traffic.seed)
        self._names = itertools.count()
        self._numbers = itertools.count()
        """Pages' contents: each number is a page never seen before."""
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._caches: dict[str, _Cache] = {}
        self._documents = [self._pages(traffic.document_pages) for _ in range(traffic.documents)]
        weights = [(rank + 1) ** -traffic.zipf for rank in range(traffic.documents)]
        self._popularity = list(itertools.accumulate(weights))
        self._seen: set[int] = set()
        self.sums = _Sums()

    def run(self) -> None:
        traffic, now = self._traffic, 0.0
        for _ in range(traffic.replicas):
            self._start(now)
        self._at(traffic.loss_period, self._lose)
        self._at(1.0 / traffic.document_life, self._replace_document)
        rate = traffic.replicas * traffic.load / traffic.output_seconds
        for number in range(traffic.requests):
            now += self._random.expovariate(rate)
            while self._events and self._events[0][0] <= now:
                when, _, event = heapq.heappop(self._events)
                event(when)
            self._arrive(now, number >= traffic.warm_up * traffic.requests)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _pages(self, lengths: tuple[int, int]) -> list[int]:
        return [next(self._numbers) for _ in range(self._random.randint(*lengths))]

    def _start(self, now: float) -> None:
        kv = KVCache(self._traffic.capacity + 1, 1)
        cache = _Cache(f"replica-{next(self._names)}", kv, kv.tree.keep_log(self._traffic.capacity))
        self._caches[cache.name] = cache
        self._rule.add(cache.name)
        self._at(now + self._traffic.news_period, lambda at: self._tell(cache, at))

    def _tell(self, cache: _Cache, now: float) -> None:
        if cache.alive:
            if news := cache.log.news(cache.kv.tree.nodes()):
                self._rule.news(cache.name, news)
            self._at(now + self._traffic.news_period, lambda at: self._tell(cache, at))

    def _lose(self, now: float) -> None:
        name = self._random.choice(list(self._caches))
        self._caches.pop(name).alive = False
        self._rule.remove(name)
        self._start(now)
        self._at(now + self._traffic.loss_period, self._lose)

    def _replace_document(self, now: float) -> None:
        self._documents[self._random.randrange(len(self._documents))] = self._pages(self._traffic.document_pages)
        self._at(now + 1.0 / self._traffic.document_life, self._replace_document)

    def _arrive(self, now: float, counted: bool) -> None:
        drawn = self._random.random() * self._popularity[-1]
        document = self._documents[bisect.bisect_left(self._popularity, drawn)]
        tokens = document + self._pages(self._traffic.question_pages)
        hashes = page_hashes(NAMESPACE, tokens, 1)
        name, choice = self._rule.choose(hashes, now)
        cache = self._caches[name]
        table = cache.kv.open(NAMESPACE, tokens, len(tokens) - 1)
        found = table.num_shared
        cache.load += 1
        if counted:
            self._count(tokens, hashes, found)
        self._seen.update(hashes)
        if not cache.kv.grow(table, len(tokens)):
            raise RuntimeError("the simulated caches are too small for the requests they have at once")
        computed = now + self._traffic.page_seconds * (len(tokens) - found)
        self._at(computed, lambda _: self._publish(cache, table, tokens))
        answered = computed + self._random.expovariate(1.0 / self._traffic.output_seconds)
        self._at(answered, lambda _: self._end(cache, table, choice))

    def _count(self, tokens: list[int], hashes: list[int], found: int) -> None:
        sums = self.sums
        sums.pages += len(tokens) - 1
        sums.found += found
        sums.endless += next((at for at, page in enumerate(hashes[:-1]) if page not in self._seen), len(hashes) - 1)
        loads = [cache.load for cache in self._caches.values()]
        sums.ratios.append(max(loads) * len(loads) / sum(loads))

    def _publish(self, cache: _Cache, table: PageTable, tokens: list[int]) -> None:
        if cache.alive:
            cache.kv.publish(table, tokens, len(tokens), 0)

    def _end(self, cache: _Cache, table: PageTable, choice: object) -> None:
        if cache.alive:
            cache.load -= 1
            cache.kv.close(table, 0)
            self._rule.ended(cache.name, choice)


def simulate(name: str, traffic: Traffic) -> RoutingResult:
    """Figures of the rule called `name` (see `RULES`) for the traffic. Deterministic."""
    simulation = _Simulation(RULES[name](traffic.seed), traffic)
    simulation.run()
    sums = simulation.sums
    ratios = sorted(sums.ratios)
    return RoutingResult(
        name,
        sums.found / sums.pages,
        sums.endless / sums.pages,
        sum(ratios) / len(ratios),
        ratios[int(0.99 * len(ratios))],
    )


def main() -> None:
    """Print a table, one line per rule."""
    usual = Traffic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=usual.replicas)
    parser.add_argument("--requests", type=int, default=usual.requests)
    parser.add_argument("--documents", type=int, default=usual.documents)
    parser.add_argument("--zipf", type=float, default=usual.zipf, help="exponent of the documents' popularity")
    parser.add_argument("--load", type=float, default=usual.load, help="requests at once on each replica, on average")
    parser.add_argument("--capacity", type=int, default=usual.capacity, help="pages of each replica's cache")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--rule", choices=list(RULES), action="append", help="only this one (may be repeated)")
    parser.add_argument("--json", action="store_true", help="one object per rule in place of a table")
    options = vars(parser.parse_args())
    rules, as_json = options.pop("rule") or RULES, options.pop("json")
    if not as_json:
        print("| rule | hit rate | of one endless replica's | max/mean load, mean | p99 |")
        print("|---|---|---|---|---|")
    for name in rules:
        found = simulate(name, Traffic(**options))
        if as_json:
            print(json.dumps({"rule": name, "hit_rate": found.hit_rate, "share": found.share,
                              "max_over_mean": found.mean_ratio, "max_over_mean_p99": found.p99_ratio}))  # fmt: skip
        else:
            figures = f"{found.hit_rate:.3f} | {found.share:.3f} | {found.mean_ratio:.2f} | {found.p99_ratio:.2f}"
            print(f"| {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
