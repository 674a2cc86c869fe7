"""Positions that attention layers with windows or chunks see: those that no later token sees need not be kept.

A page has one number for all layers, so it can be given back only when no layer sees any of its positions any more. A
single layer that sees everything keeps them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Window = tuple[int, int]
"""(window, chunk) of a layer's attention, as in `attention.base.LayerSpec`; 0: it has none."""


class Lookback(NamedTuple):
    """Lookback of layers all of which have a window or a chunk."""

    windows: tuple[Window, ...]

    @classmethod
    def of(cls, windows: Iterable[Window]) -> Lookback | None:
        """Lookback of layers of these kinds. None: some see everything, or there are none."""
        kinds = tuple(sorted({(window, chunk) for window, chunk in windows}))
        return cls(kinds) if kinds and all(any(kind) for kind in kinds) else None

    @property
    def span(self) -> int:
        """Largest number of positions before its own that a token sees."""
        return max(min(most for most in kind if most) - 1 for kind in self.windows)

    def first(self, position: int) -> int:
        """The first position that `position` and those after it see."""
        return min(
            max(position - window + 1 if window else 0, position // chunk * chunk if chunk else 0, 0)
            for window, chunk in self.windows
        )
