"""The router: by hand where it can be seen, against a plain model of sets, and over a simulated fleet."""

from __future__ import annotations

import random
from typing import Any

import pytest

from asyncengine.cache_news import CacheNews
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.placement.routing import PrefixIndex, Route, Router, RouteRequest, RoutingWeights
from benchmarks.routing import Traffic, simulate


def fleet(count: int, load: float = 0.0, seed: int = 0) -> Router:
    """Replicas r0, r1, ..., each with `load` by requests that nobody asks about any more."""
    router = Router(seed=seed)
    for number in range(count):
        router.add(f"r{number}")
        if load:
            router.assign(RouteRequest(load=load))  # all others have too much
    return router


def assign(router: Router, *pages: int, adapter: str = "", session: str = "", load: float = 1.0) -> Route:
    route = router.assign(RouteRequest(pages, adapter, session, load))
    assert route is not None
    return route


def test_a_burst_of_equal_prompts_goes_where_the_first_went_before_a_page_is_published() -> None:
    router = fleet(8, load=10)
    routes = [assign(router, 1, 2, 3) for _ in range(3)]
    assert len({route.replica for route in routes}) == 1
    assert [route.matched for route in routes] == [0, 3, 3]
    for route in routes:
        router.release(route)
    assert not router.index.match((1,))


def test_a_cold_replica_is_warmed() -> None:
    router = fleet(3)
    for name in ("r0", "r1", "r2"):
        router.update(name, CacheNews(tuple(range(1, 50))))
    for _ in range(30):
        assign(router, 1, 2, 3)
    router.add("r3")
    assert [assign(router, number, number + 1).replica for number in range(4, 9)] == ["r3"] * 5
    assert assign(router, 20, 21).replica != "r3"  # at half the mean load it must have something to offer
    assert assign(router, 4, 5).replica == "r3"


def test_a_closing_replica_takes_nothing_and_a_removed_one_leaves_nothing() -> None:
    router = fleet(2)
    router.update("r0", CacheNews((1, 2, 3)))
    route = assign(router, 1, 2, 3)
    router.close("r0")
    assert assign(router, 1, 2, 3).replica == "r1"
    with pytest.raises(InvalidParameter, match="released"):
        router.remove("r0")
    router.release(route)
    router.remove("r0")
    router.close("r1")
    assert router.assign(RouteRequest((1,))) is None
    with pytest.raises(InvalidParameter, match="name"):
        router.add("r1")


@pytest.mark.parametrize(("name", "value"), [("bound", 0.9), ("load", float("nan")), ("prefix", -1), ("match", "much")])
def test_weights_that_are_none_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=name):
        RoutingWeights(**{name: value})


def test_the_index_agrees_with_plain_sets() -> None:
    """Random news, requests, losses and returns: matches as of one set of pages per replica, and nothing is left."""
    rng, index = random.Random(5), PrefixIndex()
    cached: dict[int, set[int]] = {}
    on_the_way: list[tuple[int, list[int]]] = []
    for _ in range(3000):
        what = rng.random()
        if what < 0.05 and len(cached) < 6:
            bit = next(1 << number for number in range(6) if 1 << number not in cached)
            index.add(bit)
            cached[bit] = set()
        elif what < 0.08 and cached:
            bit = rng.choice(list(cached))
            for taken in [item for item in on_the_way if item[0] == bit]:
                on_the_way.remove(taken)
                index.settle(*taken)
            index.remove(bit)
            del cached[bit]
        elif what < 0.4 and cached:
            bit = rng.choice(list(cached))
            added = set(rng.sample(range(30), 6))
            removed = set(rng.sample(range(30), 6)) - added
            whole = rng.random() < 0.1
            index.update(bit, CacheNews(tuple(added), tuple(removed), whole))
            cached[bit] = added if whole else (cached[bit] - removed) | added
        elif what < 0.7 and cached:
            way = (rng.choice(list(cached)), rng.sample(range(30), 5))
            on_the_way.append(way)
            index.expect(*way)
        elif on_the_way:
            index.settle(*on_the_way.pop(rng.randrange(len(on_the_way))))
        pages = rng.sample(range(30), rng.randrange(1, 5))
        expected = {}
        for bit, held in cached.items():
            has = held | {page for at, way in on_the_way if at == bit for page in way}
            depth = next((at for at, page in enumerate(pages) if page not in has), len(pages))
            expected.update({bit: depth} if depth else {})
        assert index.match(pages) == expected
    for way in on_the_way:
        index.settle(*way)
    for bit in list(cached):
        index.remove(bit)
    assert not any(index.match((page,)) for page in range(30))


SMALL = Traffic(replicas=16, requests=4000, load=10, documents=250, document_pages=(8, 24), capacity=1024)


def test_affinity_finds_what_one_endless_replica_finds_at_an_even_load() -> None:
    """The short form of the table in docs/performance.md (`python -m benchmarks.routing`)."""
    ours = simulate("prefix-affine (ours)", SMALL)
    assert ours.share >= 0.95
    assert ours.mean_ratio <= 1.3
    assert ours.p99_ratio <= 1.4  # ten requests on each: one more is a tenth
    theirs = simulate("round robin", SMALL)
    assert theirs.share < ours.share - 0.1
    assert simulate("Ray Serve LLM (default)", SMALL).mean_ratio > 2 * ours.mean_ratio


# ---------------------------------------------------------------- roles


def roles(**given: Any) -> Router:
    router = Router()
    for name, role in given.items():
        router.add(name, role)
    return router


def prefill(router: Router, route: Route, least: int = 3, *names: str) -> str | None:
    found = router.assign_prefill(route, least, names or [*router.roles()])
    return None if found is None else found.replica


def test_requests_go_to_decoders_and_long_prompts_elsewhere() -> None:
    router = roles(p="prefill", d="decode")
    routes = [assign(router, 1, 2, 3, number) for number in range(4, 7)]
    assert {route.replica for route in routes} == {"d"}
    assert [prefill(router, route) for route in routes] == ["p"] * 3, "what is only on its way is not there"
    assert router.loads() == {"p": 3, "d": 3}
    router.update("d", CacheNews((1, 2)))
    assert prefill(router, routes[0]) is None, "two of four pages are there"
    assert prefill(router, routes[0], 2) == "p"
    assert prefill(router, assign(router, 7, 8)) is None, "a short one"
    assert prefill(router, assign(router, 7, 8, 9, session="talk"), 3, "d") is None, "it cannot be pulled from there"
    assert prefill(router, assign(router, 7, 8, 9, session="talk"), 3) == "p"
    router.set_role("p", "both")
    for route in routes:
        router.release(route)
    assert assign(router, 11, session="talk").replica == "d", "whoever computes prompts for others has no sessions"


def test_roles_change_but_somebody_takes_requests() -> None:
    router = roles(a="both", b="both")
    assert prefill(router, assign(router, 1, 2, 3)) is None
    router.set_role("a", "prefill")
    route = assign(router, 1, 2, 3)
    assert (route.replica, prefill(router, route)) == ("b", None), "it is there for prompts, too"
    with pytest.raises(InvalidParameter, match='role: must be "decode" or "both": no other'):
        router.set_role("b", "prefill")
    router.set_role("b", "decode")
    assert prefill(router, route) == "a"
    router.set_role("a", "decode")
    assert prefill(router, route) is None
    assert router.roles() == {"a": "decode", "b": "decode"}
    with pytest.raises(InvalidParameter, match="replica: must be one of 'a', 'b'"):
        router.set_role("c", "decode")
    with pytest.raises(InvalidParameter, match="role: must be one of 'both', 'prefill', 'decode'"):
        router.set_role("a", "encode")  # type: ignore[arg-type]
