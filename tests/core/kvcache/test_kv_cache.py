"""Page tables over pool and tree: what matches, grows and is shared, and conservation."""

import pytest

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache, PageTable
from asyncengine.kvcache.radix_tree import Node

NS = ("", "")


def cache(pages: int = 17, **settings) -> KVCache:
    return KVCache(pages, 4, **settings)


def computed(kv: KVCache, tokens: list[int], namespace=NS, fence: int = 0) -> PageTable:
    """An open table whose request has computed all of `tokens` and published them."""
    table = kv.open(namespace, tokens, len(tokens) - 1)
    assert kv.grow(table, len(tokens))
    kv.publish(table, tokens, len(tokens), fence)
    return table


def test_a_prompt_never_matches_its_own_last_token():
    """A full hit would leave nothing to compute, and no logits to sample from (nano-vllm #144)."""
    kv = cache()
    tokens = list(range(8))
    kv.close(computed(kv, tokens), 0)
    assert kv.open(NS, tokens, len(tokens) - 1).num_shared == 1
    assert kv.open(NS, [*tokens, 9], len(tokens)).num_shared == 2


def test_grow_takes_exactly_the_missing_pages():
    kv = cache()
    table = kv.open(NS, list(range(9)), 8)
    assert kv.grow(table, 9)
    assert len(table.pages) == 3
    assert kv.grow(table, 12)
    assert len(table.pages) == 3
    assert kv.counts([table]).held == 3


def test_grow_evicts_cached_pages_and_changes_nothing_when_it_cannot():
    kv = cache(5)
    kv.close(computed(kv, list(range(8))), 0)
    table = kv.open(NS, [50], 0)
    assert kv.grow(table, 16)
    kv.check([table])
    before = list(table.pages)
    assert not kv.grow(table, 17)
    assert table.pages == before
    kv.check([table])


def test_only_full_pages_are_published():
    kv = cache()
    table = computed(kv, list(range(10)))
    assert table.num_shared == 2
    assert len(table.own_pages()) == 1


def test_what_a_retired_step_named_returns_at_once():
    kv = cache()
    kv.retire(5)
    kv.close(computed(kv, list(range(10))), fence=5)
    assert not kv.anything_retiring


def test_without_caching_samples_share_pages_and_the_last_one_drops_them():
    kv = cache(prefix_caching=False)
    private = ("", "", 7)
    first = computed(kv, list(range(9)), private)
    second = kv.open(private, list(range(9)), 8)
    assert second.num_shared == 2
    kv.close(first, 0)
    assert kv.counts([second]).shared == 2
    kv.close(second, 0)
    counts = kv.counts([])
    assert (counts.free, counts.cached) == (counts.total, 0)
    assert not kv.tree.roots


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


def test_nodes_compare_by_identity():
    """Frontiers and lock counts use nodes as dictionary keys."""
    one, two = Node(None, (), 0, 0, 0), Node(None, (), 0, 0, 0)
    assert one != two
