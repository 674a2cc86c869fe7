"""Conservation of pages over pool and tree: the check finds what is planted."""

from collections.abc import Callable

import pytest

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache, PageTable


def exchange_pages(kv: KVCache, table: PageTable) -> None:
    table.pages[0], table.pages[1] = table.pages[1], table.pages[0]


def lose_a_cached_page(kv: KVCache, table: PageTable) -> None:
    kv.close(table, 0)
    del table.node.parent.children[table.node.tokens]  # type: ignore[union-attr]


PLANTS: dict[str, tuple[Callable[[KVCache, PageTable], object], str]] = {
    "loses a page": (lambda kv, table: table.pages.pop(), "leaked"),
    "loses a free page": (lambda kv, table: kv.pool.take(1), "leaked"),
    "owns a page twice": (lambda kv, table: table.pages.append(table.pages[-1]), "held and held"),
    "frees a held page": (lambda kv, table: kv.pool.give([table.pages[-1]]), "free and held"),
    "frees a cached page": (lambda kv, table: kv.pool.give([table.node.page]), "free and cached"),
    "forgets a lock": (lambda kv, table: kv.tree.unlock(table.node), "0 locks, 1 holders"),
    "locks too often": (lambda kv, table: kv.tree.lock(table.node), "2 locks, 1 holders"),
    "miscounts locked pages": (lambda kv, table: setattr(kv.tree, "num_locked", kv.tree.num_locked + 1), "counted"),
    "keeps a stale page": (exchange_pages, "disagrees with the tree"),
    "retires while held": (lambda kv, table: kv.close(table, fence=3), "held and retiring"),
    "is not closed": (lambda kv, table: None, "leaked"),
    "lost a cached page": (lose_a_cached_page, "leaked"),
}
"""Damage that is done to a table, and the violation that the check names; the last two tables are not open."""


@pytest.mark.parametrize("name", PLANTS)
def test_conservation_finds_a_table_that(name: str) -> None:
    kv, tokens = KVCache(17, 4), list(range(10))
    table = kv.open(("", ""), tokens, len(tokens) - 1)
    assert kv.grow(table, len(tokens))
    kv.publish(table, tokens, len(tokens), 0)
    kv.check([table])
    plant, violation = PLANTS[name]
    plant(kv, table)
    with pytest.raises(InvariantViolation, match=violation):
        kv.check([] if name in [*PLANTS][-2:] else [table])


def windowed(num_window_pages: int) -> KVCache:
    return KVCache(65, 4, windows=[(8, 0), (0, 0)], num_window_pages=num_window_pages, most_ahead=4)


def test_too_few_for_a_window_are_refused() -> None:
    windowed(6)
    with pytest.raises(ValueError, match="5 window pages of 4 tokens do not hold what a token sees"):
        windowed(5)


def test_conservation_finds_a_window_page_that_leaked() -> None:
    kv, tokens = windowed(9), list(range(20))
    table = kv.open(("", ""), tokens, len(tokens) - 1)
    assert kv.grow(table, len(tokens))
    kv.publish(table, tokens, len(tokens), 0)
    kv.check([table])
    table.window.pages = table.window.pages[:-1]  # type: ignore[union-attr]
    with pytest.raises(InvariantViolation, match="window page"):
        kv.check([table])
