"""Window pages: what is held, what goes first, where a prefix can be started from."""

from __future__ import annotations

import pytest

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache import KVCache, PageTable

NS = ("", "")
TOKENS = list(range(1000, 1200))


def cache(windows: int = 9, pages: int = 65, window: int = 8, **settings) -> KVCache:
    return KVCache(pages, 4, windows=[(window, 0), (0, 0)], num_window_pages=windows, most_ahead=4, **settings)


def computed(kv: KVCache, tokens: list[int], *, publish: bool = True) -> PageTable:
    """An open table whose request has computed `tokens`, one by one."""
    table = kv.open(NS, tokens, len(tokens) - 1)
    for end in range(table.num_shared * 4 + 1, len(tokens) + 1):
        kv.release(table, end - 1, 0)
        assert kv.grow(table, end)
        if publish:
            kv.publish(table, tokens, end, 0)
        kv.check([table])
    return table


def test_a_request_holds_its_window_and_all_other_pages():
    kv = cache()
    table = computed(kv, TOKENS[:100], publish=False)
    assert kv.counts([table]).held == 25
    assert kv.window_counts([table]).held == 2
    assert table.window is not None
    assert table.window.first == 23
    kv.close(table, 0)
    assert (kv.counts([]).free, kv.window_counts([]).free) == (64, 8)


def test_what_it_has_gone_past_goes_before_the_ends():
    kv = cache(windows=12)
    kv.close(computed(kv, TOKENS[:61]), 0)
    assert kv.window_counts([]).cached == 10
    assert kv.peek(NS, TOKENS, 60) == 60
    other = kv.open(NS, [5] * 29, 28)
    assert kv.grow(other, 32)  # eight window pages
    kv.check([other])
    assert kv.window_counts([other]).cached == 3
    assert kv.counts([other]).cached == 15
    assert kv.peek(NS, TOKENS, 60) == 60
    assert kv.peek(NS, TOKENS, 52) == 0  # its page 12 is gone


def test_a_match_is_as_deep_as_its_window_is_there_and_publishing_fills_the_gap():
    kv = cache(windows=9)
    kv.close(computed(kv, TOKENS[:61]), 0)
    kv.close(computed(kv, [7] * 41, publish=False), 0)
    assert kv.windows is not None
    found = kv.open(NS, TOKENS[:42], 41)
    assert (found.num_shared, found.matched.depth) == (0, 10)
    kv.close(found, 0)
    again = computed(kv, TOKENS[:42])
    assert kv.counts([again]).shared == 10  # its own have been exchanged for those that were there
    assert kv.counts([again]).cached == 5
    kv.close(again, 0)
    assert kv.peek(NS, TOKENS, 41) == 40
    kv.check([])


def test_where_ways_part_window_pages_are_kept():
    kv = cache(windows=12)
    kv.close(computed(kv, TOKENS[:61]), 0)
    for own in range(5):  # the first finds nothing there, those behind it do
        table = computed(kv, TOKENS[:32] + [own] * 29)
        kv.close(table, 0)
        kv.check([])
        assert kv.peek(NS, [*TOKENS[:32], 99, 99], 33) == 32


def test_a_lock_is_not_there_any_more_when_a_page_can_leave_the_tree():
    """Another request's later fence is first in the queue; the request ends when its own has passed."""
    kv = cache(windows=12)
    table = computed(kv, TOKENS[:25])
    other = kv.open(NS, [5] * 9, 8)
    assert kv.grow(other, 9)
    kv.close(other, 9)
    assert kv.grow(table, 37)
    kv.release(table, 36, fence=3)
    kv.retire(3)
    kv.close(table, 3)
    kv.check([])
    full = kv.open(NS, [7] * 9, 8)
    assert kv.grow(full, 9)
    kv.check([full])


def test_a_page_that_leaves_the_tree_takes_its_window_page_along():
    kv = cache(pages=17)
    kv.close(computed(kv, TOKENS[:24]), 0)
    assert kv.window_counts([]).cached == 6
    full = kv.open(NS, [3] * 9, 8)
    for end in range(1, 62):
        kv.release(full, end - 1, 0)
        assert kv.grow(full, end)
    kv.check([full])
    assert kv.counts([full]).cached == 0
    assert kv.window_counts([full]).cached == 0


def test_samples_of_one_prompt_share_its_window_pages():
    kv = cache(prefix_caching=False)
    first = computed(kv, TOKENS[:21])
    second = kv.open(NS, TOKENS[:21], 20)
    assert second.num_shared == 5
    assert second.window is not None
    assert second.window.pages == first.window.pages[:2]  # type: ignore[union-attr]
    assert kv.grow(second, 21)
    kv.check([first, second])
    kv.close(first, 0)
    kv.close(second, 0)
    assert kv.window_counts([]).free == 8


def test_room_is_needed_of_both_kinds():
    kv = cache(windows=9)
    one, other = kv.open(NS, TOKENS[:30], 29), kv.open(NS, [3] * 30, 29)
    assert not kv.has_room(one, 260, [0, 0])  # 65 pages of 64
    assert kv.has_room(one, 30, [2, 56])  # eight pages, and six of eight: its window, four tokens, and three beside
    assert not kv.has_room(one, 30, [3, 0])
    assert not kv.has_room(one, 30, kv.promised([(other, 30)]))
    assert kv.grow(one, 20)
    assert not kv.grow(other, 20)
    assert kv.num_available == 59
    assert kv.grow(other, 12)
    kv.check([one, other])


def test_a_prompt_longer_than_the_window_pages_is_computed_in_parts():
    kv = cache(windows=9, pages=65)
    assert kv.most_at_once(200, 0) == 5 * 4 - 7
    assert kv.most_at_once(28, 0) == 28
    assert kv.longest == 256


def test_too_few_for_a_window_are_refused():
    cache(windows=6)
    with pytest.raises(ValueError, match="5 window pages of 4 tokens do not hold what a token sees"):
        cache(windows=5)


def test_conservation_finds_a_page_that_leaked():
    kv = cache()
    table = computed(kv, TOKENS[:20])
    assert table.window is not None
    table.window.pages = table.window.pages[:-1]
    with pytest.raises(InvariantViolation, match="window page"):
        kv.check([table])
