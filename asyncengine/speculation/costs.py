"""Costs of steps by their number of tokens, from measurements made once when an engine is built.

A schedule may not depend on a clock: the measured costs become part of the engine's configuration, and recorded
requests are replayed with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from asyncengine.step import MEASURED_SIZES


class StepCosts:
    """Cost of a step as a function of its tokens, drawn as straight lines between measured sizes."""

    def __init__(self, measured: Sequence[float], unit: float | None = None) -> None:
        """`measured`: seconds of steps of `MEASURED_SIZES` tokens, that of two left out or not. `unit`: seconds that
        count as 1; None: those of the smallest step. A longer step is never taken to be cheaper than a shorter one."""
        sizes = MEASURED_SIZES[: len(measured) - 2] + MEASURED_SIZES[-2:]
        rising = list(accumulate((value / (unit or measured[0]) for value in measured), max))
        table = [0.0, rising[0]]
        for (low, high), (cheap, dear) in zip(pairwise(sizes), pairwise(rising), strict=True):
            table += [cheap + (dear - cheap) * (tokens - low) / (high - low) for tokens in range(low + 1, high + 1)]
        self.table = table
        """Cost by number of tokens, 0 to 32."""

    def of(self, tokens: int) -> float:
        """Cost of a step of `tokens`; beyond 32 it rises as between the last measured sizes."""
        if tokens <= MEASURED_SIZES[-1]:
            return self.table[tokens]
        return self.table[-1] + (tokens - MEASURED_SIZES[-1]) * (self.table[-1] - self.table[-2])
