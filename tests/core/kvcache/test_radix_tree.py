"""The prefix cache: what matches, what is evicted, and in which order."""

import random
from typing import get_type_hints

import pytest

from asyncengine.config import MemorySettings
from asyncengine.kvcache.radix_tree import STRATEGIES, Node, RadixTree

SIZE = 2
NS = ("", "")


def tree(strategy: str = "lru") -> RadixTree:
    return RadixTree(SIZE, STRATEGIES[strategy])


def insert(radix: RadixTree, tokens: list[int], pages: list[int], namespace=NS, priority: int = 0) -> Node:
    """Publish `tokens` as a request would, and let go."""
    node = radix.match(namespace, tokens, 0)
    radix.lock(node)
    for at, page in enumerate(pages):
        node = radix.extend(node, tuple(tokens[at * SIZE : (at + 1) * SIZE]), page, priority)
    radix.unlock(node)
    return node


def matched(radix: RadixTree, tokens: list[int], limit: int | None = None, namespace=NS) -> list[int]:
    return radix.path_pages(radix.match(namespace, tokens, len(tokens) if limit is None else limit))


def test_the_setting_has_the_rules_that_there_are():
    hints = get_type_hints(MemorySettings, include_extras=True)
    assert list(hints["eviction"].__metadata__[0].keywords["choices"]) == list(STRATEGIES)


def test_namespaces_never_see_each_other():
    radix = tree()
    insert(radix, [1, 2], [10], namespace=("adapter", ""))
    insert(radix, [1, 2], [11], namespace=("", "salt"))
    assert matched(radix, [1, 2]) == []
    assert matched(radix, [1, 2], namespace=("adapter", "")) == [10]
    assert matched(radix, [1, 2], namespace=("", "salt")) == [11]


def test_tokens_are_compared_so_equal_hashes_do_not_match():
    """In CPython hash(-1) == hash(-2), and so for tuples of them: a cache that trusted hashes would mix them up."""
    assert hash((-1, 5)) == hash((-2, 5))
    radix = tree()
    insert(radix, [-1, 5], [10])
    assert matched(radix, [-2, 5]) == []
    insert(radix, [-2, 5], [11])
    assert matched(radix, [-1, 5]) == [10]
    assert matched(radix, [-2, 5]) == [11]


@pytest.mark.parametrize(
    ("strategy", "priorities", "matches", "evicted"),
    [
        ("lru", (0, 0), [0], [11]),  # what was used longest ago
        ("lfu", (0, 0), [0, 0, 0, 1], [11, 10]),  # what was matched least often
        ("fifo", (0, 0), [0], [10]),  # the oldest, even if just used
        ("priority", (0, 5, 5), [1], [12, 11, 10]),  # the least important first, then as lru
    ],
)
def test_a_strategy_evicts(strategy: str, priorities: tuple[int, ...], matches: list[int], evicted: list[int]):
    """Pages 10, 11, ... of these priorities, of which some are matched afterwards."""
    radix = tree(strategy)
    for at, priority in enumerate(priorities):
        insert(radix, [at, at], [10 + at], priority=priority)
    for at in matches:
        matched(radix, [at, at])
    assert radix.evict(len(evicted)) == evicted


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_the_eviction_heap_stays_bounded_under_reuse_and_drops(strategy: str):
    radix = tree(strategy)
    insert(radix, [1, 2], [10])
    for turn in range(5000):
        node = radix.match(NS, [1, 2], 2)
        radix.lock(node)
        radix.unlock(node)
        private = ("", str(turn))
        insert(radix, [turn, 2], [99], namespace=private)
        radix.drop(radix.roots[private])
        assert len(radix._heap) <= 2 * radix.num_pages + 72


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_random_tree_evicts_every_unlocked_page_and_no_locked_one(strategy: str):
    rng = random.Random(5)
    for _ in range(30):
        radix, page, held = tree(strategy), 0, []
        for _ in range(40):
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 6))]
            node = radix.match(NS, tokens, len(tokens))
            radix.lock(node)
            for at in range(node.depth, len(tokens) // SIZE):
                page += 1
                node = radix.extend(node, tuple(tokens[at * SIZE : (at + 1) * SIZE]), page, rng.randrange(3))
            if rng.random() < 0.3:
                held.append(node)
            else:
                radix.unlock(node)
            if rng.random() < 0.3:
                radix.evict(rng.randrange(4))
        locked = {n.page for n in radix.nodes() if n.locks}
        evictable = radix.num_evictable
        gone = radix.evict(10**6)
        assert len(gone) == evictable
        assert not locked & set(gone)
        assert {n.page for n in radix.nodes()} == locked
        for node in held:
            radix.unlock(node)
        assert len(radix.evict(10**6)) == len(locked)
