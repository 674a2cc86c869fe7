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
