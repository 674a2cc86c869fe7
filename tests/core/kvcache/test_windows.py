"""Pages that no layer sees any more: what is given back, what stays findable, what holes do to a match."""

from __future__ import annotations

import pytest

from asyncengine.kvcache.radix_tree import Lookback


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
