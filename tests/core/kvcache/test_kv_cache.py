"""Page tables over pool and tree: what matches, grows and is shared, and conservation."""

import pytest

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache, PageTable

NS = ("", "")


def cache(pages: int = 17, **settings) -> KVCache:
    return KVCache(pages, 4, **settings)


def computed(kv: KVCache, tokens: list[int], namespace=NS, fence: int = 0) -> PageTable:
    """An open table whose request has computed all of `tokens` and published them."""
    table = kv.open(namespace, tokens, len(tokens) - 1)
    assert kv.grow(table, len(tokens))
    kv.publish(table, tokens, len(tokens), fence)
    return table


# -------------------------------------------------------------------- the checker finds what is planted


def _loses_a_page(kv: KVCache, table: PageTable) -> None:
    table.pages.pop()


def _loses_a_free_page(kv: KVCache, table: PageTable) -> None:
    kv.pool.take(1)


def _loses_a_cached_page(kv: KVCache, table: PageTable) -> None:
    assert table.node.parent is not None
    kv.close(table, 0)
    parent = table.node.parent
    del parent.children[table.node.tokens]


def _owns_a_page_twice(kv: KVCache, table: PageTable) -> None:
    table.pages.append(table.pages[-1])


def _frees_a_held_page(kv: KVCache, table: PageTable) -> None:
    kv.pool.give([table.pages[-1]])


def _frees_a_cached_page(kv: KVCache, table: PageTable) -> None:
    kv.pool.give([table.node.page])


def _forgets_a_lock(kv: KVCache, table: PageTable) -> None:
    kv.tree.unlock(table.node)


def _locks_too_often(kv: KVCache, table: PageTable) -> None:
    kv.tree.lock(table.node)


def _miscounts_locked_pages(kv: KVCache, table: PageTable) -> None:
    kv.tree.num_locked += 1


def _keeps_a_stale_page(kv: KVCache, table: PageTable) -> None:
    table.pages[0], table.pages[1] = table.pages[1], table.pages[0]


@pytest.mark.parametrize(
    ("plant", "finding"),
    [
        (_loses_a_page, "leaked"),
        (_loses_a_free_page, "leaked"),
        (_owns_a_page_twice, "held and held"),
        (_frees_a_held_page, "free and held"),
        (_frees_a_cached_page, "free and cached"),
        (_forgets_a_lock, "0 locks, 1 holders"),
        (_locks_too_often, "2 locks, 1 holders"),
        (_miscounts_locked_pages, "counted"),
        (_keeps_a_stale_page, "disagrees with the tree"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_conservation_finds_a_table_that(plant, finding: str):
    kv = cache()
    table = computed(kv, list(range(10)))
    kv.check([table])
    plant(kv, table)
    with pytest.raises(InvariantViolation, match=finding):
        kv.check([table])


def test_conservation_finds_a_cached_page_that_fell_out_of_the_tree():
    kv = cache()
    _loses_a_cached_page(kv, computed(kv, list(range(10))))
    with pytest.raises(InvariantViolation, match="leaked"):
        kv.check([])


def test_conservation_finds_a_table_nobody_closed():
    kv = cache()
    computed(kv, list(range(10)))
    with pytest.raises(InvariantViolation, match="leaked"):
        kv.check([])


def test_conservation_finds_a_page_that_retires_while_held():
    kv = cache()
    table = computed(kv, list(range(10)))
    kv.close(table, fence=3)
    with pytest.raises(InvariantViolation, match="held and retiring"):
        kv.check([table])
