"""What a step costs by its tokens: measured once when an engine is built, part of its configuration from then on.

A schedule may not depend on a clock: recorded requests are replayed with the table that they ran with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SIZES = (1, 4, 8, 16, 32)
"""Tokens of the steps that are measured; nothing is drafted in longer ones."""
_TILE, _STEEP = 4, 1.5
"""Where a step of eight tokens takes that many times one of four it is bound by computing, four rows at a time: five
take as long as eight."""


class StepCosts:
    """Time of a step of up to 32 tokens, in that of a step of one."""

    def __init__(self, measured: Sequence[float], unit: float | None = None) -> None:
        """`measured`: of `SIZES`, in any unit; what counts as 1 is `unit`, or (None) the first. A longer step is never
        taken to be cheaper."""
        rising, most = [], 0.0
        for value in measured:
            most = max(most, value)
            rising.append(most / (unit or measured[0]))
        tile = _TILE if rising[2] >= _STEEP * rising[1] else 1
        sizes = [tokens if tokens < _TILE else -(-tokens // tile) * tile for tokens in range(1, SIZES[-1] + 1)]
        self.table = [0.0, *(self._between(rising, tokens) for tokens in sizes)]
        """By tokens, up to 32."""

    def of(self, tokens: int) -> float:
        """`tokens` from 0 on; beyond 32, as the last measured ones rise."""
        last, rise = self.table[-1], (self.table[-1] - self.table[SIZES[-2]]) / (SIZES[-1] - SIZES[-2])
        return self.table[tokens] if tokens <= SIZES[-1] else last + (tokens - SIZES[-1]) * rise

    @staticmethod
    def _between(rising: Sequence[float], tokens: int) -> float:
        place = bisect_left(SIZES, tokens)
        if SIZES[place] == tokens:
            return rising[place]
        low, high = SIZES[place - 1], SIZES[place]
        share = (tokens - low) / (high - low)
        return rising[place - 1] * (1 - share) + rising[place] * share


def least_chance(costs: Sequence[float], draft_costs: Sequence[float]) -> float:
    """That a draft model's guesses so far are right, below which another is not worth making: each brings a token with
    that chance at most, and costs a step of the draft model and a place in the other's (both measured, of `SIZES`)."""
    place = max(0.0, costs[2] - costs[0]) / (SIZES[2] - SIZES[0])
    return min(1.0, (draft_costs[0] + place) / costs[0])
