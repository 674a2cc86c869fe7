"""The cache's log of pages: adding up all news gives exactly what the tree holds, however it came about."""

from __future__ import annotations

import random

import pytest

from asyncengine.cache_news import CacheNews, page_hashes
from asyncengine.kvcache import KVCache

SPACES = (("", ""), ("adapter", ""), ("", "salt"))


def told(known: set[int], news: CacheNews) -> set[int]:
    """The pages that a listener knows after `news`; it must never be told what it knows."""
    if news.whole:
        return set(news.added)
    assert not known & set(news.added)
    assert known >= set(news.removed)
    return (known - set(news.removed)) | set(news.added)


@pytest.mark.parametrize("limit", [100_000, 12])
def test_news_add_up_to_the_tree(limit: int) -> None:
    rng = random.Random(limit)
    kv = KVCache(40, 2)
    log = kv.tree.keep_log(limit)
    known: set[int] = set()
    wholes = 0
    for _ in range(600):
        space = rng.choice(SPACES)
        tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 20))]
        table = kv.open(space, tokens, len(tokens) - 1)
        if kv.grow(table, len(tokens)):
            kv.publish(table, tokens, len(tokens), 0)
        kv.close(table, 0)
        if rng.random() < 0.3:
            news = log.news(kv.tree.nodes())
            wholes += news.whole
            known = told(known, news)
            assert known == {node.hash for node in kv.tree.nodes()}
            assert len(known) == kv.tree.num_pages
    assert bool(wholes) == (limit == 12)


def test_hashes_of_a_prompt_are_those_of_its_pages() -> None:
    kv = KVCache(40, 4)
    log = kv.tree.keep_log(100)
    tokens = list(range(18))
    for space in SPACES:
        table = kv.open(space, tokens, 17)
        assert kv.grow(table, 18)
        kv.publish(table, tokens, 18, 0)
        kv.close(table, 0)
        assert list(log.news(kv.tree.nodes()).added) == page_hashes(space, tokens, 4)
    assert len({page for space in SPACES for page in page_hashes(space, tokens, 4)}) == 3 * 4


def test_hashes_are_the_same_in_every_process() -> None:
    """A router and its replicas hash apart from each other; these are of another process."""
    assert page_hashes(("a", "b"), [1, 2, 3, 4, 5], 2) == [-5991268453750382120, -7307681305262182363]


def test_nobody_pays_who_keeps_no_log() -> None:
    kv = KVCache(10, 2)
    table = kv.open(("", ""), [1, 2, 3], 2)
    assert kv.grow(table, 3)
    kv.publish(table, [1, 2, 3], 3, 0)
    assert not kv.tree.logs
    assert [node.hash for node in kv.tree.nodes()] == [0]
    kv.tree.keep_log(10)
    assert [node.hash for node in kv.tree.nodes()] == page_hashes(("", ""), [1, 2], 2), "from when there is a log"
