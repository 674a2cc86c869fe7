"""Pages that no layer sees any more: what is given back, what stays findable, what holes do to a match."""

from __future__ import annotations

import pytest

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache, PageTable
from asyncengine.kvcache.lookback import Lookback

NS = ("", "")
TOKENS = list(range(1000, 1100))


def cache(pages: int = 17, window: int = 8, **settings) -> KVCache:
    return KVCache(pages, 4, windows=[(window, 0)], **settings)


def computed(kv: KVCache, tokens: list[int], *, published: int | None = None) -> PageTable:
    """An open table whose request has computed `tokens`, publishing up to `published` of them (None: all)."""
    table = kv.open(NS, tokens, len(tokens) - 1)
    for end in range(table.num_shared * 4 + 1, len(tokens) + 1):
        kv.release(table, end - 1, 0)
        assert kv.grow(table, end)
        if published is None or end <= published:
            kv.publish(table, tokens, end, 0)
        kv.check([table])
    return table


@pytest.mark.parametrize("windows", [[(8, 0)], [(1, 0)], [(8, 0), (3, 0)], [(0, 8)], [(20, 8)], [(4, 0), (0, 16)]])
def test_the_first_position_that_is_seen(windows: list[tuple[int, int]]):
    def sees(position: int, other: int) -> bool:
        near = [
            (not window or other > position - window) and (not chunk or other // chunk == position // chunk)
            for window, chunk in windows
        ]
        return any(near)

    lookback = Lookback.of(windows)
    assert lookback is not None
    for position in range(60):
        seen = [other for other in range(position + 1) if sees(position, other)]
        assert lookback.first(position) == min(seen)
    assert lookback.span == max(position - lookback.first(position) for position in range(60))


@pytest.mark.parametrize("windows", [[], [(0, 0)], [(8, 0), (0, 0)]])
def test_one_layer_that_sees_everything_keeps_it_all(windows: list[tuple[int, int]]):
    kv = KVCache(17, 4, windows=windows)
    table = computed(kv, TOKENS[:40], published=0)
    assert kv.lookback is None
    assert kv.counts([table]).held == 10
    assert kv.longest == 64


def test_a_window_of_nearly_the_whole_pool_gains_nothing():
    assert cache(pages=9, window=24).lookback is None
    assert cache(pages=17, window=24).lookback is not None


def test_what_was_not_published_is_free_at_once():
    kv = cache()
    table = computed(kv, TOKENS, published=0)
    pages = kv.counts([table])
    assert (pages.held, pages.cached, pages.shared) == (2, 0, 0)
    assert pages.free == pages.total - 2
    assert table.pages[:23] == [0] * 23


def test_what_was_published_stays_findable_until_somebody_needs_the_memory():
    kv = cache()
    table = computed(kv, TOKENS[:40])
    pages = kv.counts([table])
    assert (pages.held, pages.shared, pages.cached) == (0, 2, 8)
    other = kv.open(NS, [*TOKENS[:20], 1], 20)
    assert other.num_shared == 5
    assert other.num_unseen == 3
    kv.check([table, other])
    kv.close(other, 0)
    kv.close(table, 0)
    kv.check([])
    assert kv.counts([]).cached == 10


def test_a_lock_is_given_up_when_the_step_has_retired():
    """The request ends meanwhile, and its own fence has passed: what is on its way must still be in the tree."""
    kv = cache()
    table = kv.open(NS, TOKENS[:24], 23)
    assert kv.grow(table, 24)
    kv.publish(table, TOKENS[:24], 24, 0)
    other = kv.open(NS, [5] * 9, 8)
    assert kv.grow(other, 9)
    kv.close(other, 9)  # given up first, and returns last
    kv.release(table, 24, fence=3)
    kv.retire(3)
    kv.close(table, 3)
    kv.check([])
    full = kv.open(NS, [7] * 52, 51)
    assert kv.grow(full, 52)  # all that is not on its way
    assert not kv.grow(full, 53)
    kv.check([full])
    kv.retire(9)
    kv.check([full])
    assert kv.grow(full, 64)


def test_an_output_is_joined_to_its_prompt_over_a_hole():
    kv = cache()
    table = computed(kv, TOKENS[:60], published=8)
    kv.publish(table, TOKENS, 60, 0)
    kv.check([table])
    pages = kv.counts([table])
    assert (pages.held, pages.shared) == (0, 2)
    kv.close(table, 0)
    kv.check([])
    found = kv.open(NS, TOKENS, 99)
    assert found.num_shared == 15
    assert [bool(page) for page in found.pages] == [False] * 13 + [True] * 2
    kv.check([found])


def test_a_prefix_with_a_hole_in_its_window_is_not_found():
    kv = cache(pages=17)
    kv.close(computed(kv, TOKENS[:48]), 0)
    other = kv.open(NS, [3] * 25, 24)
    assert kv.grow(other, 25)  # takes three of those that were first published
    kv.check([other])
    assert kv.peek(NS, TOKENS, 8) == 0
    assert kv.peek(NS, TOKENS, 16) == 0
    assert kv.peek(NS, TOKENS, 99) == 48
    holed = kv.open(NS, TOKENS, 17)
    assert holed.num_shared == 0
    assert kv.grow(holed, 17)
    kv.publish(holed, TOKENS, 17, 0)  # fills the holes
    kv.check([holed, other])
    assert kv.peek(NS, TOKENS, 16) == 16


def test_holes_go_with_the_last_page_that_hangs_on_them():
    kv = cache()
    table = computed(kv, TOKENS[:60], published=8)
    kv.publish(table, TOKENS, 60, 0)
    kv.close(table, 0)
    assert kv.tree.root(NS).children
    full = kv.open(("other", ""), [7] * 64, 63)
    assert kv.grow(full, 64)
    assert kv.tree.num_pages == 0
    kv.check([full])
    assert not kv.tree.root(NS).children


def test_conservation_finds_a_lock_on_what_is_no_longer_there():
    kv = cache()
    table = computed(kv, TOKENS[:20])
    table.num_unseen = 0
    with pytest.raises(InvariantViolation, match="0 locks, 1 holders"):
        kv.check([table])
